"""GroupNorm fused with its neighbours in models of images: an addition, a modulation and an activation."""

from __future__ import annotations

from torch import Tensor

from kernel_fusion.core import checks
from kernel_fusion.core.group_norm import per_channel
from kernel_fusion.functional import interop
from kernel_fusion.operators.dispatch import operator


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    add: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    scale_offset: float = 1.0,
    activation: str | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Group normalisation, with an addition before it, and a modulation and an activation after it.

    .. math::
        u = x + \mathrm{add}, \qquad
        n = \frac{u - \mathrm{E}[u]}{\sqrt{\mathrm{Var}[u] + \epsilon}} \cdot w + b, \qquad
        y = \mathrm{activation}(n \cdot (\mathrm{offset} + \mathrm{scale}) + \mathrm{shift})

    Mean and variance are those of the C / G channels of a group and all positions of a sample. With G = C this is the
    instance norm, with G = 1 a norm over the whole sample.

    Args:
        input: x, shape (N, C, \*), any number of dimensions of positions, any strides; float16, bfloat16, float32 or
            float64. Contiguous tensors and tensors with channels last are read as they lie, others are copied.
        num_groups: G, which divides C.
        weight, bias: w and b, shape (C,), or None. float16, bfloat16 and float32 mix freely.
        eps: added to the variance.
        add: added to x, such as a time embedding; shape (N, C), (N, C, 1, ...) or that of x.
        scale, shift: the modulation, with a shape as for `add`. None leaves out the multiplication, or the addition.
        scale_offset: added to `scale`; 0 where a model multiplies by `scale` itself.
        activation: one of `kernel_fusion.ACTIVATIONS`, or None.
        backend: "cuda", "eager", or None for the automatic choice. The other backends have no kernels of this function.
            PyTorch's operations serve it without an NVIDIA GPU, or if `add`, `scale` or `shift` has the shape of x.

    Returns:
        Tensor of the shape and dtype of x; under CUDA autocast float32, as `torch.nn.functional.group_norm`. It has
        channels last if x has them, else it is contiguous. Computed in float32 (float64 for float64) and rounded once;
        on a CPU also before an activation that follows the norm itself. A sample's bits do not depend on the other
        samples.

    Raises:
        RuntimeError, ValueError: as `torch.nn.functional.group_norm`, in its words; other shapes, dtypes and devices
            that don't fit; an unknown `activation` or `backend`.
        TypeError: an argument of another kind.
        BackendUnavailableError: `backend` was given and cannot serve this call.

    Wu and He, "Group Normalization", 2018.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> x, w, b = torch.randn(2, 8, 4, 4), torch.randn(8), torch.randn(8)
        >>> y = kf.group_norm(x, 2, w, b, activation="silu")
        >>> expected = torch.nn.functional.silu(torch.nn.functional.group_norm(x, 2, w, b))
        >>> torch.allclose(y, expected, atol=1e-6)
        True
    """
    if not interop.is_tensor(input):
        around = {"add": add, "scale": scale, "shift": shift, "scale_offset": scale_offset}
        options = {"activation": activation, "backend": backend}
        return interop.served(group_norm, input, num_groups, weight, bias, eps, **around, **options)  # type: ignore[no-any-return]
    activation = checks.activation("group_norm", "activation", activation)
    try:
        a, s, t = (
            per_channel("group_norm", name, value, input)
            for name, value in (("add", add), ("scale", scale), ("shift", shift))
        )
        serve = operator("group_norm", "group_norm", backend, input, weight, bias, a, s, t)
        result: Tensor = serve(input, num_groups, weight, bias, a, s, t, eps, scale_offset, activation, None)
    except checks.REFUSALS as error:
        tensors = {"input": input, "weight": weight, "bias": bias, "add": add, "scale": scale, "shift": shift}
        checks.explain("group_norm", error, tensors, num_groups=num_groups, eps=eps, scale_offset=scale_offset)
        raise
    return result
