"""A linear layer with its activation, and what may follow one: bias, activation and dropout, a gated activation."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernel_fusion.backends.availability import is_dtensor
from kernel_fusion.core import checks
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import bias_act, gated_act
from kernel_fusion.nn.stages import Fused


class _Activated(Fused):
    """The base of modules that end with a bias, which may be absent, an activation and dropout."""

    bias: nn.Parameter | None
    dropout: float = 0.0

    def _set_up(self, activation: str | None, dropout: float, bias: bool, features: int, **factory: Any) -> None:
        kind = type(self).__name__
        checks.activation(kind, "activation", activation)
        checks.dropout_p(kind, "dropout", dropout)
        self.activation = activation
        self.dropout = dropout
        self.register_parameter("bias", nn.Parameter(torch.empty(features, **factory)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to 0."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class FusedBiasAct(_Activated):
    r"""Bias, activation and dropout, in one pass: put it after `nn.Linear(..., bias=False)`.

    .. math:: y = \mathrm{dropout}(\mathrm{activation}(x + b))

    Args:
        features: the size of the last dimension.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        dropout: probability of an element to be zeroed, in training mode; in evaluation mode there is no dropout.
        device, dtype: of the bias.
        bias: without it, nothing is added: for a linear layer that has a bias of its own.

    Shape: input and output (\*, features).

    Attributes:
        bias: b, of shape (features,), initialised to 0; or None.

    Raises:
        ValueError: an unknown activation, or `dropout` is no probability.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> module = kf.FusedBiasAct(64, "gelu", dropout=0.1)
        >>> module(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        features: int,
        activation: str | None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.features = features
        self._set_up(activation, dropout, bias, features, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Apply bias, activation and, in training mode, dropout."""
        return bias_act(input, self.bias, self.activation, dropout_p=self.dropout, training=self.training)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        text = self._repr(f"{self.features}, activation={self.activation!r}", options=["dropout"])
        return text + (", bias=False" if self.bias is None else "")


class FusedLinearAct(_Activated):
    r"""A linear layer and its activation: the product without bias, then bias, activation and dropout in one pass.

    .. math:: y = \mathrm{dropout}(\mathrm{activation}(x W^T + b))

    It is no `torch.nn.Linear`, although parameters, state dict and initialisation are the same: what replaces or wraps
    linear layers, for adapters or quantisation, would leave the activation out or apply it too early.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        dropout: probability of an element to be zeroed, in training mode; in evaluation mode there is no dropout.

    Shape: input (\*, in_features), output (\*, out_features). The product is the vendor library's, rounded to its dtype
    before the bias is added; under autocast that is the dtype of autocast.

    Attributes:
        weight: W, of shape (out_features, in_features).
        bias: b, of shape (out_features,), or None.

    Raises:
        ValueError: an unknown activation, or `dropout` is no probability.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> linear = torch.nn.Linear(16, 64)
        >>> module = kf.FusedLinearAct(16, 64, activation="gelu")
        >>> module.load_state_dict(linear.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 8, 16)
        >>> torch.allclose(module(x), torch.nn.functional.gelu(linear(x)), atol=1e-6)
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self._set_up(activation, dropout, bias, out_features, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise as `torch.nn.Linear` does."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]  # which reads weight and bias alone

    def forward(self, input: Tensor) -> Tensor:
        """Multiply, then apply bias, activation and, in training mode, dropout."""
        y = nn.functional.linear(input, self.weight)
        bias: Tensor | None = self.bias
        if bias is not None and isinstance(y, Tensor) and bias.dtype != y.dtype:
            bias = bias.to(y.dtype)  # as a linear layer's; under autocast the result would have the bias's dtype
        return bias_act(y, bias, self.activation, dropout_p=self.dropout, training=self.training)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return self._repr(sizes, f"activation={self.activation!r}", options=["dropout"])


class FusedGatedAct(Fused):
    r"""A gated activation, in one pass: SwiGLU with "silu", GeGLU with "gelu", ReGLU with "relu".

    .. math:: y = \mathrm{activation}(\mathrm{gate}) \cdot \mathrm{value}

    Args:
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        dim: the dimension in which one input holds both, the gate first: `gate, value = input.chunk(2, dim)`. (In
            `torch.nn.GLU` the gate is the second half.)
        features: n, the size of the output in that dimension. One input that does not have 2n there is refused, such
            as a rank's part under tensor parallelism. Without `features`, training refuses such a part, and inference
            warns.
        out_dtype: a :class:`kernel_fusion.Quantize`, with which the module returns a :class:`kernel_fusion.Quantized`,
            as :func:`kernel_fusion.gated_act` does; or None.

    Shape: input with 2n elements in dimension `dim`, output with n; or gate and value of shapes that broadcast, output
    of their common shape. The halves are read where they lie.

    Raises:
        ValueError: an unknown activation.
        TypeError: `out_dtype` is neither.
        RuntimeError, IndexError: an input that has no two halves, in the words of `torch.nn.GLU`; RuntimeError: it does
            not have 2n elements there, or is known to be a rank's part whose halves lie on different ranks.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> module = kf.FusedGatedAct("silu", features=64)
        >>> x = torch.randn(2, 8, 128)
        >>> torch.equal(module(x), module(*x.chunk(2, -1)))
        True
    """

    features: int | None = None
    out_dtype: Quantize | None = None

    def __init__(
        self,
        activation: str | None,
        dim: int = -1,
        *,
        features: int | None = None,
        out_dtype: Quantize | None = None,
    ) -> None:
        super().__init__()
        checks.activation("FusedGatedAct", "activation", activation)
        checks.of_kind("FusedGatedAct", "out_dtype", out_dtype, checks.CODES)
        self.activation = activation
        self.dim = dim
        self.features = features
        self.out_dtype = out_dtype

    def forward(self, gate: Tensor, value: Tensor | None = None) -> Tensor:
        """Gate `value`; without it, `gate` holds both."""
        if value is None:
            gate, value = _halves(gate, self.dim, self.features)
        return gated_act(gate, value, self.activation, out_dtype=self.out_dtype)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return self._repr(f"activation={self.activation!r}, dim={self.dim}", options=["features", "out_dtype"])


def _halves(input: Tensor, dim: int, features: int | None) -> tuple[Tensor, ...]:
    checks.tensor("gated_act", "gate", input)
    if isinstance(input, Tensor) and (input.dim() == 0 or input.size(dim) % 2):  # no size is known of a proxy
        nn.functional.glu(input, dim)  # raises, in PyTorch's words
    if isinstance(input, Tensor) and features is not None and input.size(dim) != 2 * features:
        raise RuntimeError(
            f"`gated_act`: packed `gate` must have 2 * features = {2 * features} elements in dimension {dim}, got "
            f"{input.size(dim)}; if they are a rank's part, keep them a DTensor: "
            "`kernel_fusion.distributed.PackedColwiseParallel(parts=2, use_local_output=False)`"
        )
    if is_dtensor(input):
        from kernel_fusion.distributed.shards import halves

        return halves(input, dim)  # type: ignore[arg-type]
    if isinstance(input, Tensor) and features is None and not torch.compiler.is_compiling():
        _look_for_part(input, dim)
    return input.chunk(2, dim)


def _look_for_part(input: Tensor, dim: int) -> None:
    """Raise of what autograd knows to be a rank's part of a projection whose halves lie on different ranks.

    Without gradients a part cannot be told from the whole, and several ranks are warned.
    """
    node: Any = input.grad_fn
    while type(node).__name__ == "BackwardHookFunctionBackward":  # the linear layer has hooks
        node = node.next_functions[0][0]
    spec = getattr(node, "dtensor_spec", None)
    for placement in () if spec is None else spec.placements:
        if placement.is_shard(dim % input.dim()) and getattr(placement, "split_factor", 1) == 1:
            raise RuntimeError(
                f"`gated_act`: `gate` is this rank's part of a DTensor sharded in dimension {dim}, and its halves are "
                "not parts of the halves of that; `kernel_fusion.distributed.PackedColwiseParallel(parts=2)` shards "
                "each half by itself"
            )
    if node is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            "`FusedGatedAct` of one packed input cannot tell a rank's part of it, whose halves are not gate and value, "
            "from the whole; `features=n`, the size of the output, makes it sure and ends this warning",
            stacklevel=4,
        )
