"""The cases of `verify`, at shapes and layouts with code paths of their own. The tests run these and larger grids."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.testing import attention, group_norms, losses
from kernel_fusion.testing.case import DTYPES, Case
from kernel_fusion.testing.pointwise import PointwiseCase, ReduceCase
from kernel_fusion.testing.rotary import RotaryCase
from kernel_fusion.testing.row_norms import GatedNormCase, ModulatedNormCase, RowNormCase, StagedNormCase

_HALF, _BF16, _FP32, _FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Pairs of dtypes: that of the input, and that of weight, bias and residual.
_MIXES = (*((dtype, dtype) for dtype in DTYPES), (_BF16, _FP32))


def cases(quick: bool) -> list[Case]:
    """Return all cases. `quick` leaves out shapes, but no function and no dtype."""
    norms = (row_norms, staged_norms, gated_norms, modulated_norms, group_norms.cases)
    families = (*norms, pointwise, reductions, attention.cases, losses.cases, rotary)
    return [case for family in families for case in family(quick)]


def row_norms(quick: bool) -> Iterator[Case]:
    """Return cases of the norms alone, in every dtype, at each shape or layout that takes its own path in the kernels.

    The shapes are a row of one element; an odd length, which has no whole vectors; a few vectors; a row for a whole
    block, with and without parameters; strided and unaligned rows; two normalised dimensions; the longest rows that
    stay on chip; and no rows. The values include a mean of 1e4 standard deviations, where E[x²] - E[x]² loses every
    digit, and values whose squares overflow fp16. The row of one element avoids 0, where RMSNorm's dx is pure
    cancellation with an error like 1 / |x|.
    """
    quick_grid: tuple[dict[str, Any], ...] = (
        {"shape": (7, 1), "mean": 3.0, "std": 0.5},
        {"shape": (64, 255)},
        {"shape": (33, 1024), "weight": None, "bias": None},
        {"shape": (16, 100), "layout": "padded"},
        {"shape": (32, 768), "mean": 1e4, "std": 1.0},
        {"shape": (3, 32768)},
        {"shape": (0, 64)},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (257, 64)},
        {"shape": (33, 1024)},
        {"shape": (5, 4096), "std": 1e3},
        {"shape": (4, 3, 96), "layout": "transposed"},
        {"shape": (9, 1000), "layout": "unaligned"},
        {"shape": (6, 4, 40), "num_dims": 2},
        {"shape": (1, 12288)},
    )
    for verb, (dtype, parameters) in product(("layer_norm", "rms_norm"), _MIXES):
        for options in quick_grid if quick else quick_grid + more:
            yield RowNormCase(verb, dtype=dtype, **{"weight": parameters, "bias": parameters, **options})


def training_cases(quick: bool) -> list[RowNormCase]:
    """Return the cases of LayerNorm in fp32 that `verify` shows with a loss and the gradients of the loss."""
    shapes = ((100, 512), (1000, 1024)) if quick else ((100, 512), (1000, 1024), (5000, 256))
    return [RowNormCase("layer_norm", shape, _FP32, weight=_FP32, bias=_FP32) for shape in shapes]


def staged_norms(quick: bool) -> Iterator[Case]:
    """Return cases of the norms with each stage and with all of them, on rows of odd and even length.

    Some rows are long, and some are strided.
    """
    stages: tuple[dict[str, Any], ...] = (
        {"pre_activation": "relu"},
        {"activation": "relu"},
        {"pre_activation": "gelu", "activation": "silu", "weight_offset": 1.0},
        {"rounding": "hf"},
    )
    added: tuple[dict[str, Any], ...] = (
        {},
        {"dropout_p": 0.25},
        {"pre_activation": "silu", "activation": "gelu_tanh", "dropout_p": 0.1},
        {"activation": "silu", "rounding": "hf"},
    )
    places: tuple[dict[str, Any], ...] = (
        {"shape": (16, 255)},
        {"shape": (5, 4096)},
        {"shape": (9, 1000), "layout": "padded"},
        {"shape": (2, 12289)},
    )
    for (dtype, other), place in product(_MIXES, places[:2] if quick else places):
        common: dict[str, Any] = {"dtype": dtype, "weight": other, "bias": other, **place}
        for verb, options in product(("layer_norm", "rms_norm"), stages):
            yield StagedNormCase(verb, **common, **options)
        for verb, options in product(("add_layer_norm", "add_rms_norm"), added):
            yield StagedNormCase(verb, residual=other, **common, **options)


def gated_norms(quick: bool) -> Iterator[Case]:
    """Return cases of the norms with a gate behind or before them, of whole rows and of groups of columns."""
    places: tuple[tuple[dict[str, Any], int], ...] = (
        ({"shape": (16, 255)}, 51),
        ({"shape": (5, 4096), "gate_layout": "contiguous"}, 512),
        ({"shape": (9, 1000), "layout": "padded"}, 125),
        ({"shape": (2, 3, 24578), "layout": "half"}, 12289),
    )
    for (dtype, other), (place, group_size) in product(_MIXES, places[:2] if quick else places):
        gates: tuple[dict[str, Any], ...] = (
            {},
            {"gate_first": True},
            {"gate_activation": "sigmoid", "group_size": group_size},
            {"gate_first": True, "group_size": group_size, "weight_offset": 1.0},
            {"rounding": "hf"},
        )
        for verb, options in product(("gated_layer_norm", "gated_rms_norm"), gates):
            yield GatedNormCase(verb, dtype=dtype, weight=other, bias=other, gate=other, **place, **options)


def modulated_norms(quick: bool) -> Iterator[Case]:
    """Return cases of the modulated norms, with a scale that varies per sample, per token, by position and in between.

    Samples have one block of rows or several, and some rows are longer. Some norms have a weight of their own, a
    residual, and a gate beside it.
    """
    places: tuple[dict[str, Any], ...] = (
        {"shape": (3, 16, 255), "varies": (3, 1)},
        {"shape": (3, 7, 64), "varies": (3, 7), "shift_varies": (3, 1)},
        {"shape": (2, 3, 4096), "varies": (3,)},
        {"shape": (2, 150, 96), "varies": (2, 1), "layout": "padded"},
        {"shape": (2, 3, 4, 40), "varies": (3, 1), "shift_varies": (2, 1, 1)},
        {"shape": (2, 2, 12289), "varies": (2, 1), "shift_varies": ()},
    )
    for (dtype, other), place in product(_MIXES, places[:3] if quick else places):
        common: dict[str, Any] = {"dtype": dtype, "scale": other, "shift": other, **place}
        for verb in ("layer_norm", "rms_norm"):
            yield ModulatedNormCase(f"modulated_{verb}", **common)
            yield ModulatedNormCase(f"modulated_{verb}", weight=other, bias=other, activation="silu", **common)
            yield ModulatedNormCase(f"add_modulated_{verb}", residual=other, **common)
            yield ModulatedNormCase(f"add_modulated_{verb}", residual=other, gate=other, **common)


def pointwise(quick: bool) -> Iterator[Case]:
    """Return cases of every pointwise function and activation in every dtype, with operands of several layouts."""
    names: list[str | None] = [*ACTIVATIONS, None]
    for dtype in DTYPES:
        for activation in names:
            yield PointwiseCase("add_act", (33, 127), dtype, activation=activation)
            yield PointwiseCase("gated_act", (33, 127), dtype, activation=activation, layout="half")
        yield PointwiseCase("mul_act", (33, 127), dtype, activation="tanh")
        yield PointwiseCase("bias_act", (64, 255), dtype, activation="gelu", other=(255,), dropout_p=0.25)
        yield PointwiseCase("act_dropout", (64, 255), dtype, activation="gelu", dropout_p=0.5)
        yield PointwiseCase("add_act", (0, 8), dtype)
        if quick:
            continue
        yield PointwiseCase("bias_act", (7, 4099), dtype, activation="silu", other=(4099,))
        yield PointwiseCase("mul_act", (8, 3, 1, 17), dtype, other=(5, 1))
        yield PointwiseCase("add_act", (4, 6, 8, 10), dtype, layout="channels-last", other=(6, 1, 1))
        yield PointwiseCase("gated_act", (33, 127), dtype, activation="silu", other_dtype=_FP32)
        yield PointwiseCase("add_act", (30, 100), dtype, layout="transposed", other_layout="strided")


def reductions(quick: bool) -> Iterator[Case]:
    """Return cases of the reductions over the last, the first, a middle, several and all dimensions."""
    places: tuple[dict[str, Any], ...] = (
        {"shape": (64, 255), "dim": -1},
        {"shape": (64, 255), "dim": 0, "keepdim": True},
        {"shape": (5, 33, 64), "dim": 1},
        {"shape": (7, 4099)},
        {"shape": (0, 8), "dim": -1},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (4, 5, 6, 7), "dim": (0, 2)},
        {"shape": (4, 5, 6, 7), "dim": (1, 2, 3), "layout": "channels-last"},
        {"shape": (3, 70001), "dim": -1},
        {"shape": (16, 100), "dim": -1, "layout": "padded"},
    )
    for verb, dtype in product(("sum_squared", "mean_abs"), DTYPES):
        for options in places if quick else places + more:
            yield ReduceCase(verb, dtype=dtype, **options)
        if dtype in (_HALF, _BF16):
            yield ReduceCase(verb, (64, 255), dtype, dim=-1, out_dtype=_FP32)


def rotary(quick: bool) -> Iterator[Case]:
    """Return cases of the rotary embedding, with heads before and after tokens, and pairs of either kind.

    Some have columns that stay as they are, positions in a table, heads inside a wider projection, keys with fewer
    heads, an odd number of pairs, which leaves no whole vectors, or more heads than a tile of Triton has.
    """
    places: tuple[dict[str, Any], ...] = (
        {"shape": (2, 3, 9, 32), "pairs": 16, "fused": True},
        {"shape": (2, 9, 6, 40), "pairs": 13, "unsqueeze_dim": 2, "interleaved": True, "positions": True},
    )
    more: tuple[dict[str, Any], ...] = (
        {"shape": (2, 5, 20, 128), "pairs": 64, "unsqueeze_dim": 2, "key_heads": 4},
        {"shape": (3, 4, 7, 64), "pairs": 32, "interleaved": True, "fused": True, "key_heads": 2},
        {"shape": (1, 2, 3, 3), "pairs": 1},
        {"shape": (1, 1, 2, 500), "pairs": 150, "positions": True},
    )
    for dtype in DTYPES:
        for options in places if quick else places + more:
            angles = None if dtype == _FP64 or options.get("positions") else _FP32
            yield RotaryCase("rope", dtype=dtype, angles=angles, **options)
            for norm in ({}, {"rounding": "hf"}, {"weight_offset": 1.0}):
                yield RotaryCase("qk_norm_rope", dtype=dtype, weight=dtype, angles=angles, **options, **norm)
    yield RotaryCase("qk_norm_rope", (2, 4, 5, 32), _BF16, pairs=16, weight=_FP32, rounding="hf")
    yield RotaryCase("qk_norm_rope", (2, 4, 5, 32), _HALF, pairs=16)
