"""Results of verbs that are more than a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_fusion.core.quantize import BLOCK, LARGEST


class CrossEntropyOutput(NamedTuple):
    """The result of :func:`kernel_fusion.cross_entropy` with `stats`.

    Attributes:
        loss: what the function returns without `stats`.
        lse: the logarithm of the sum of the exponentials of a row's logits, with the shape of the target. It is
            differentiable.
        predicted: the class with the largest logit, the first of several; int64, with the shape of the target.
        correct: whether that is the target; bool.
    """

    loss: Tensor
    lse: Tensor
    predicted: Tensor
    correct: Tensor


class TokenLogprobOutput(NamedTuple):
    """The result of :func:`kernel_fusion.token_logprob` with `entropy`.

    Attributes:
        logprob: what the function returns without `entropy`.
        entropy: that of each row's probabilities, of the logits' shape without the classes. It is differentiable.
    """

    logprob: Tensor
    entropy: Tensor


class NormOutput(NamedTuple):
    """The result of the `add_*` verbs.

    Attributes:
        output: the normalised tensor, in the input's dtype (or `out_dtype`), or a :class:`Quantized`.
        residual: h = residual + u, what was normalised, in the residual's dtype.
    """

    output: Tensor
    residual: Tensor


class Quantized(NamedTuple):
    """The result of a verb whose `out_dtype` is a :class:`Quantize`.

    Attributes:
        values: the codes, contiguous, of the shape of the result.
        scale: what a code is multiplied by, float32: a single number, as it was given; or (\\*, 1), one for each row;
            or (\\*, ceil(N / 128)), one for each block of columns, where the scales of neighbouring rows are neighbours
            in memory.
        unquantized: v, where it was asked for; else None.
    """

    values: Tensor
    scale: Tensor
    unquantized: Tensor | None = None

    def dequantize(self) -> Tensor:
        r"""The values that the codes stand for, in float32.

        .. math:: \hat v = \mathrm{code} \cdot s

        With `unquantized`, gradients pass straight through to it, and to the arguments of the verb, wherever v was not
        clamped; scales of rows and blocks clamp nothing. Without it there is no gradient.

        Example:
            >>> import torch, kernel_fusion as kf
            >>> x = torch.randn(4, 256, requires_grad=True)
            >>> quantize = kf.Quantize(torch.float8_e4m3fn, per=128, unquantized=True)
            >>> kf.rms_norm(x, 256, out_dtype=quantize).dequantize().square().sum().backward()
            >>> x.grad.shape
            torch.Size([4, 256])
        """
        scale = self.scale
        if scale.dim() > 0 and scale.shape[-1] != 1:
            scale = scale.repeat_interleave(BLOCK, -1)[..., : self.values.shape[-1]]
        result = self.values.to(torch.float32) * scale
        if self.unquantized is None:
            return result
        v = self.unquantized.to(torch.float32)
        if self.scale.dim() == 0:
            limit = self.scale * LARGEST[self.values.dtype]
            v = v.clamp(-limit, limit)
        # The difference is 0, but NaN for an infinity; subtracting it leaves the value and passes the gradient on.
        return result - torch.nan_to_num(v.detach() - v)
