"""Attention's weights as a module."""

from torch import Tensor

from kernel_fusion.functional import softmax
from kernel_fusion.nn.stages import Fused


class FusedSoftmax(Fused):
    r"""Softmax of a scaled and masked input, in one pass.

    .. math:: y = \mathrm{softmax}(\mathrm{scale} \cdot x + \mathrm{mask})

    Args:
        dim: the dimension that sums to one. The last one is fused; another is moved there and back, by a copy.
        scale: a factor.
        causal: leave out columns beyond the row's own number, top-left aligned; for the last dimension alone.

    Shape: input and output (\*); the mask that `forward` takes broadcasts against the input. Boolean: True keeps.
    Floating point: added. See :func:`kernel_fusion.softmax` for dtypes, accumulation and rows without anything left.

    Raises:
        ValueError: when called, `causal` with another `dim` than the last.

    Example:
        >>> import torch, kernel_fusion as kf
        >>> weights = kf.FusedSoftmax(scale=0.125, causal=True)(torch.randn(2, 8, 8))
        >>> torch.allclose(weights.sum(-1), torch.ones(2, 8))
        True
    """

    # Also of a `torch.nn.Softmax` that became one of these by `__class__`.
    scale: float = 1.0
    causal: bool = False

    def __init__(self, dim: int = -1, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        self.dim, self.scale, self.causal = dim, scale, causal

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """The softmax of `input` under `mask`."""
        return softmax(input, self.dim, scale=self.scale, mask=mask, causal=self.causal)

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return self._repr(f"dim={self.dim}", options=("scale", "causal"))
