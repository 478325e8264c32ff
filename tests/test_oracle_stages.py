"""The norms with stages against float64: y, h and every gradient. The budgets are the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support import Target, check

import kernel_fusion as kf
from kernel_fusion.testing import oracle
from kernel_fusion.testing.oracle import StagedNormCase

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PLAIN, ADDED = ("layer_norm", "rms_norm"), ("add_layer_norm", "add_rms_norm")


# Grid rationale. Every activation, on either side of the norm; 255 has full vectors and a tail in every dtype.
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("place", ["pre_activation", "activation"])
@pytest.mark.parametrize("name", kf.ACTIVATIONS)
def test_activations(name: str, place: str, dtype: torch.dtype, target: Target) -> None:
    """Each activation before and after the norm is within budget, in value and slope."""
    options: dict[str, Any] = {place: name}
    check(StagedNormCase("layer_norm", (33, 255), dtype, weight=dtype, bias=dtype, **options), target)
    check(StagedNormCase("add_rms_norm", (33, 255), dtype, weight=dtype, residual=dtype, **options), target)


# Grid rationale. x, residual, weight and y each have a load or store of their own; h takes the residual's dtype and is
# rounded to it before the statistics.
def _mixes() -> Iterator[StagedNormCase]:
    low = (F16, BF16, F32)
    for x, residual, weight, out in product(low, low, (None, *low), (None, *low)):
        if out == x:
            continue
        stages = {"pre_activation": "silu"} if residual == x else {}
        yield StagedNormCase("add_layer_norm", (7, 255), x, weight=weight, out_dtype=out, residual=residual, **stages)
        yield StagedNormCase("add_rms_norm", (7, 255), x, bias=weight, out_dtype=out, residual=residual, dropout_p=0.25)


@pytest.mark.parametrize("case", list(_mixes()), ids=str)
def test_dtype_mixes(case: StagedNormCase, target: Target) -> None:
    """Any mix of the dtypes of x, residual, parameters and y is within budget."""
    check(case, target)


# Grid rationale. CPU loops apply relu to rows as they read them, and take buffers for other activations, for dropout
# and for rows of two types: which of them meet decides about the way of a row.
@pytest.mark.parametrize(("dtype", "out"), [(F32, None), (BF16, None), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("pre_activation", [None, "relu", "tanh"])
def test_stages_meet(
    pre_activation: str | None, activation: str | None, dtype: torch.dtype, out: torch.dtype | None, target: Target
) -> None:
    """Any activation before the norm goes with any after it, with dropout and a residual and without."""
    stages: dict[str, Any] = {"pre_activation": pre_activation, "activation": activation, "weight": F32, "bias": F32}
    for dropout_p, residual in product((0.0, 0.25), (None, BF16)):
        verb = "add_layer_norm" if residual else "layer_norm"
        if dropout_p and not residual:
            continue  # dropout stands before a residual alone
        check(
            StagedNormCase(verb, (65, 65), dtype, out_dtype=out, residual=residual, dropout_p=dropout_p, **stages),
            target,
        )


# Grid rationale. As for the plain norms: vectors, tails, warps, clusters, and rows that do not stay on chip. There are
# many of the short rows, because the ones with the least variance decide about the largest error. Rows of one element
# are LayerNorm's alone, whose result there is exact.
_LENGTHS = [*product((F32, BF16, F64), (3, 8, 17, 64, 255, 256, 1000, 1023, 1024, 4096, 4099, 12288))]
_LENGTHS += product((F32, BF16), (32768, 131072))


@pytest.mark.parametrize(("dtype", "cols"), _LENGTHS)
def test_row_lengths(dtype: torch.dtype, cols: int, target: Target) -> None:
    """Any row length is within budget, with all stages and with none."""
    rows = 1000 if cols < 64 else 65 if cols < 2000 else 3
    full = {"pre_activation": "gelu", "activation": "silu", "dropout_p": 0.125}
    for verb, options in product(ADDED, ({}, full)):
        check(StagedNormCase(verb, (rows, cols), dtype, weight=dtype, residual=dtype, **options), target)
    # If relu leaves next to nothing of a short row, dx is a difference times 1 / sqrt(eps), and one row decides.
    mean = 3.0 if cols < 64 else 0.5
    for verb in PLAIN:
        check(StagedNormCase(verb, (rows, cols), dtype, weight=dtype, pre_activation="relu", mean=mean), target)


# Grid rationale. The dtypes of h and of the weight, and whether there are a weight and a bias, decide where a norm
# rounds as Hugging Face's do; an activation after the norm sees rounded values, forward and backward. 255 and 4099 end
# in a part of a vector, 40000 is summed by columns.
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight", [BF16, F16, F32, None])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("cols", [255, 1024, 4099, 40000])
def test_rounding_of_hugging_face(
    cols: int, activation: str | None, weight: torch.dtype | None, dtype: torch.dtype, target: Target
) -> None:
    """With `rounding="hf"` results are within the budget of what Hugging Face's norms do."""
    shape = (1000 if cols < 1024 else 65 if cols < 4099 else 5, cols)
    options: dict[str, Any] = {"weight": weight, "activation": activation, "rounding": "hf"}
    check(StagedNormCase("rms_norm", shape, dtype, **options), target)
    check(
        StagedNormCase("layer_norm", shape, dtype, bias=weight, out_dtype=F32, pre_activation="relu", **options), target
    )
    check(StagedNormCase("add_rms_norm", shape, F32, residual=dtype, dropout_p=0.25, **options), target)
    check(StagedNormCase("add_layer_norm", shape, dtype, bias=F32, residual=dtype, **options), target)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_rows_of_one_element(activation: str, target: Target) -> None:
    """A row of one element is its own mean."""
    case = StagedNormCase("add_layer_norm", (65, 1), F32, weight=F32, bias=F32, residual=F32, activation=activation)
    check(case, target)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0,), (3, 0)])
@pytest.mark.parametrize("verb", [*PLAIN, *ADDED])
def test_empty(verb: str, shape: tuple[int, ...], target: Target) -> None:
    """Empty inputs give empty results and zero gradients of the parameters."""
    residual = F32 if verb in ADDED else None
    check(StagedNormCase(verb, shape, F32, weight=F32, residual=residual, activation="gelu"), target)


# Grid rationale. x, residual and the cotangents have strides of their own.
@pytest.mark.parametrize("layout", ["padded", "unaligned", "transposed", "half", "channels-last", "expanded"])
@pytest.mark.parametrize("verb", [*PLAIN, *ADDED])
def test_layouts(verb: str, layout: str, target: Target) -> None:
    """Strided rows, permuted dimensions and storage offsets are within budget, where dropout counts elements too."""
    options: dict[str, Any] = {"pre_activation": "tanh"}
    if verb in ADDED:
        options |= {"residual": BF16, "dropout_p": 0.25}
    check(StagedNormCase(verb, (5, 3, 4, 255), BF16, weight=F32, layout=layout, **options), target)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("verb", ADDED)
def test_several_normalized_dimensions(verb: str, num_dims: int, target: Target) -> None:
    """Rows may span any number of last dimensions."""
    case = StagedNormCase(verb, (4, 3, 5, 17), F32, num_dims, weight=F32, bias=F32, residual=F32, activation="relu")
    check(case, target)


@pytest.mark.parametrize("verb", ADDED)
@pytest.mark.parametrize("stages", [{}, {"pre_activation": "relu", "activation": "relu"}], ids=["plain", "relu"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nan_and_inf_propagate_as_in_pytorch(verb: str, stages: Any, value: float, target: Target) -> None:
    """A NaN or Inf in x or in the residual makes the same elements not finite as in PyTorch."""
    case = StagedNormCase(verb, (5, 1000), F32, weight=F32, bias=F32, residual=F32, **stages)
    inputs, cpu_inputs = oracle.make_inputs(case, target.device), oracle.make_inputs(case, "cpu")
    with torch.no_grad():
        for tensors in (inputs, cpu_inputs):
            tensors.x[1, 500] = value
            tensors.residual[3, -1] = value
    with target.ran(forward=1, backward=1):
        ours = oracle.run(case, inputs, target.backend)
    for name, result in oracle.pytorch(case, cpu_inputs).items():
        assert torch.equal(ours[name].isfinite().cpu(), result.isfinite()), name
    assert not ours["h"][3].isfinite().all(), "the value did not propagate"


@pytest.mark.parametrize("verb", ADDED)
@pytest.mark.parametrize(("dtype", "residual"), [(BF16, BF16), (BF16, F32), (F32, BF16), (F64, F64)])
@pytest.mark.parametrize("cols", [255, 256])  # CUDA kernels round one by one, and in pairs
def test_h_is_rounded_once_and_normalised_as_it_is(
    verb: str, cols: int, dtype: torch.dtype, residual: torch.dtype, any_target: Target
) -> None:
    """h has the bits of the sum in the compute type, rounded to the residual's dtype; y is the norm of these bits."""
    x = torch.randn(33, cols, device=any_target.device, dtype=dtype)
    r = torch.randn(33, cols, device=any_target.device, dtype=residual)
    norm = getattr(kf, verb)
    with any_target.ran(forward=2):
        y, h = norm(x, r, cols, backend=any_target.backend)
        again, same = norm(torch.zeros_like(x), h, cols, backend=any_target.backend)
    compute = torch.float64 if dtype == F64 else torch.float32
    assert torch.equal(h, (x.to(compute) + r.to(compute)).to(residual))
    assert torch.equal(same, h)
    assert torch.equal(again, y)
