"""The norms as TorchScript compiles them: calls of the operators, without the Python of the verbs.

TorchScript evaluates annotations, so here they are no text.
"""

import torch
from torch import Tensor

# weight_offset, out_dtype, pre_activation, activation, rounding.
Extras = tuple[float, torch.dtype | None, str | None, str | None, str]


def norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    rms: bool,
    extras: Extras,
) -> Tensor:
    """A norm with the extras of the modules."""
    weight_offset, out_dtype, before, after, rounding = extras
    if before is not None or after is not None or _rounds(rounding, input):
        return staged_norm(input, None, normalized_shape, (weight, bias), eps, rms, extras, 0.0)[0]
    num_dims = _num_dims(input, normalized_shape)
    if rms:
        y: Tensor = torch.ops.kernel_fusion.rms_norm(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
    else:
        eps = 1e-5 if eps is None else eps
        y = torch.ops.kernel_fusion.layer_norm(input, num_dims, weight, bias, eps, weight_offset, out_dtype)
    return y


def staged_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: list[int],
    affine: tuple[Tensor | None, Tensor | None],
    eps: float | None,
    rms: bool,
    extras: Extras,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """A norm with what stands around it; y and the sum with the residual, if there is one."""
    weight_offset, out_dtype, before, after, rounding = extras
    seed: Tensor | None = None
    if dropout_p > 0.0:
        # As `eager.draw_seed` draws it; the lower bound has no literal in TorchScript.
        limit = 9223372036854775807
        seed = torch.randint(-limit - 1, limit, [1], dtype=torch.int64, device=input.device)
    if eps is None:  # the machine epsilon of the dtype to compute in
        eps = 2.220446049250313e-16 if input.dtype == torch.float64 else 1.1920928955078125e-07
    y, h = torch.ops.kernel_fusion.staged_row_norm(
        input,
        residual,
        _num_dims(input, normalized_shape),
        affine[0],
        affine[1],
        eps,
        weight_offset,
        out_dtype,
        rms,
        "identity" if before is None else before,
        "identity" if after is None else after,
        dropout_p,
        seed,
        rounding if _rounds(rounding, input if residual is None else residual) else "once",
    )
    return y, h


def _rounds(rounding: str, h: Tensor) -> bool:
    """Whether a rounding is another than "once", as `core.spec.rounding_for` says."""
    return rounding != "once" and (h.dtype == torch.float16 or h.dtype == torch.bfloat16)


def _num_dims(input: Tensor, normalized_shape: list[int]) -> int:
    num_dims = len(normalized_shape)
    if list(input.shape[-num_dims:]) != normalized_shape:
        raise RuntimeError(
            f"Given normalized_shape={normalized_shape}, expected an input that ends with it, got size {input.shape}"
        )
    return num_dims
