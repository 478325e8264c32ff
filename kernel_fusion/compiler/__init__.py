"""Fusion across modules: a pass over the graph that `torch.compile` makes of a model.

`fuse` changes a graph in place. `backend` is a backend of `torch.compile` that fuses and calls another one;
`inductor_pass` fits Inductor's setting `pre_grad_custom_pass`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from kernel_fusion.compiler.rewrite import Fused, fuse_graph

__all__ = ["Fused", "backend", "fuse", "inductor_pass"]


def fuse(gm: GraphModule, *, compiled: bool = False) -> Fused:
    r"""Replace additions, norms, gates and activations by fused operators, in a graph and its subgraphs, in place.

    .. math:: \mathrm{norm}(r + \mathrm{dropout}(x)),\quad \mathrm{act}(g) \cdot v,\quad \mathrm{act}(x + b)

    Each of these becomes one operator of this library, whichever modules the operations belong to. Norms are
    `F.layer_norm`, `F.rms_norm`, RMSNorms written out as in Hugging Face transformers, and this library's, with or
    without a residual addition. Biases include those of linear layers. Norms keep the graph's rounding; other chains
    round once instead of between operations. If dropout becomes part of an operator, this library's generator draws its
    mask, which also follows `torch.manual_seed`.

    Args:
        gm: the graph that Dynamo hands to a backend: calls of PyTorch's functions, not of ATen, with the shapes and
            dtypes of all values. Nodes without them are left alone.
        compiled: whether a compiler that fuses, such as Inductor, gets the graph afterwards. Then these stay: gates and
            activations; norms without a weight, which become one kernel with their modulation; and norms of fewer than
            2 million elements on a GPU, for the compiler's kernels take the host less time than an operator.

    Returns:
        :class:`Fused`: how much was replaced.

    Left alone: operations that write to their operands, sums of tensors of different shapes, and operations with a
    call between them that is not known to be pure, such as a write or a change of the autocast or gradient mode.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        ...     def forward(self, x, residual):
        ...         h = residual + x
        ...         return h, self.linear(self.norm(h))
        >>> def compiled(gm, example_inputs):
        ...     print(kf.compiler.fuse(gm))
        ...     return gm
        >>> h, y = torch.compile(Block(), backend=compiled)(*torch.randn(2, 4, 8))
        Fused(add_norms=1, norms=0, gates=0, activations=0)
    """
    fused = Fused()
    for module in gm.modules():
        if isinstance(module, GraphModule):
            fused += fuse_graph(module.graph, compiled=compiled)
            module.recompile()
    return fused


def backend(inner: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """A backend of `torch.compile` that fuses and then calls another backend.

    Inductor keeps what it fuses well itself, see :func:`fuse`; other backends get operators.

    Args:
        inner: the other one, by name ("inductor", "aot_eager", "cudagraphs"...) or as a function.

    Returns:
        Callable: what `torch.compile(model, backend=...)` takes.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> compiled = torch.compile(layer, backend=kf.compiler.backend("aot_eager"))
        >>> x = torch.randn(2, 4, 16)
        >>> compiled(x).shape
        torch.Size([2, 4, 16])
    """

    def compile_fused(gm: GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        fuse(gm, compiled=inner == "inductor")
        return lookup_backend(inner)(gm, example_inputs, **options)

    return compile_fused


def inductor_pass() -> Any:
    """The pass for Inductor's setting: `torch._inductor.config.pre_grad_custom_pass = kf.compiler.inductor_pass()`.

    Unlike :func:`backend`, it works if other code chooses the backend, such as a trainer that calls `torch.compile`
    itself. Inductor's cache keys contain the version of this pass.

    Returns:
        CustomGraphPass: a callable that takes a graph.
    """
    from kernel_fusion.compiler.inductor import FusionPass

    return FusionPass()
