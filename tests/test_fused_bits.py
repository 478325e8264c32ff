"""Fused equals unfused: a call has the bits of the calls that it replaces, where both round alike (docs/bits.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import CPU, CUDA, EAGER, TRITON, Target
from table_bits import differs
from torch import Tensor

import kernel_fusion as kf

# Each gives a fused call's result and that of the calls that it stands for. It gets options of the verbs, and `draw`,
# which makes a tensor of 16 rows or, for `draw(1)`, a vector.
Draw = Callable[..., Tensor]
Pair = Callable[[dict[str, Any], Draw], tuple[Tensor, Tensor]]
ROWS, DTYPES = 16, [torch.bfloat16, torch.float16, torch.float32]
# Beside powers of two, lengths of which a bf16 row's elements lie in other lanes when they are loaded pair by pair.
LENGTHS = (7, 64, 100, 768, 1000, 1152, 2048, 2560, 4096, 5120, 6144, 12288)
_FEW = (100, 1536)  # where the others would take minutes


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """RMSNorm without a bias, LayerNorm with one."""
    if bias is None:
        return kf.rms_norm(x, x.shape[-1:], weight, **options)
    return kf.layer_norm(x, x.shape[-1:], weight, bias, **options)


def _of_a_sum(bias: bool) -> Pair:
    def pair(options: dict[str, Any], draw: Draw) -> tuple[Tensor, Tensor]:
        x, residual, weight = draw(), draw(), draw(1)
        shape = x.shape[-1:]
        if bias:
            shift = draw(1)
            y, h = kf.add_layer_norm(x, residual, shape, weight, shift, **options)
            return y, _norm(h, weight, shift, options)
        y, h = kf.add_rms_norm(x, residual, shape, weight, **options)
        return y, _norm(h, weight, None, options)

    return pair


def _in_training(bias: bool) -> Pair:
    def pair(options: dict[str, Any], draw: Draw) -> tuple[Tensor, Tensor]:
        x, weight, shift = draw(), draw(1), draw(1) if bias else None
        y = _norm(x.clone().requires_grad_(), weight, shift, options)
        return y.detach(), _norm(x, weight, shift, options)

    return pair


def _weight_in_fp32(bias: bool) -> Pair:
    def pair(options: dict[str, Any], draw: Draw) -> tuple[Tensor, Tensor]:
        x, weight, shift = draw(), draw(1), draw(1) if bias else None
        wide = _norm(x, weight.float(), None if shift is None else shift.float(), {**options, "out_dtype": x.dtype})
        return wide, _norm(x, weight, shift, options)

    return pair


def _modulation_of_a_sum(options: dict[str, Any], draw: Draw) -> tuple[Tensor, Tensor]:
    x, residual, scale, shift = draw(), draw(), draw(1), draw(1)
    y, h = kf.add_modulated_layer_norm(x, residual, x.shape[-1:], scale, shift, **options)
    return y, kf.modulated_layer_norm(h, x.shape[-1:], scale, shift, **options)


def _packed_gate(options: dict[str, Any], draw: Draw) -> tuple[Tensor, Tensor]:
    gate, value = draw(), draw()
    packed = torch.cat([gate, value], -1)
    halves = packed.chunk(2, -1)
    return kf.gated_act(*halves, activation="silu", **options), kf.gated_act(gate, value, activation="silu", **options)


def _single_row(options: dict[str, Any], draw: Draw) -> tuple[Tensor, Tensor]:
    x, scale, shift = draw(), draw(1), draw(1)
    many = kf.modulated_layer_norm(x, x.shape[-1:], scale, shift, **options)
    return kf.modulated_layer_norm(x[:1], x.shape[-1:], scale, shift, **options), many[:1]


PAIRS: dict[str, Pair] = {
    "the norm of a sum, and of its h": _of_a_sum(bias=False),
    "LayerNorm of a sum, and of its h": _of_a_sum(bias=True),
    "training, and inference": _in_training(bias=False),
    "LayerNorm in training, and in inference": _in_training(bias=True),
    "a weight in fp32, and in x's dtype": _weight_in_fp32(bias=False),
    "weight and bias in fp32, and in x's dtype": _weight_in_fp32(bias=True),
    "the modulation of a sum, and of its h": _modulation_of_a_sum,
    "a packed gate, and one apart": _packed_gate,
    "one token, and the whole sequence": _single_row,
}


# The change of a GPU's plan, and so perhaps of the order of its sums, by a part of the pair's name.
_CHANGES = {"in fp32": "weight in fp32", "of a sum": "residual, activation or gate"}


def _has_another_order(name: str, cols: int, dtype: torch.dtype) -> bool:
    """Whether the plans of this GPU sum rows of the two calls in different orders."""
    change = next((change for part, change in _CHANGES.items() if part in name), None)
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    short = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    rms = not name.startswith(("LayerNorm", "weight and bias", "the modulation"))
    return change is not None and differs(change, cols, short, rms, arch)


@pytest.mark.parametrize(
    "target",
    [CPU, EAGER, TRITON, pytest.param(CUDA, marks=pytest.mark.cuda)],
    ids=["cpu", "eager", "triton", "cuda"],
)
@pytest.mark.parametrize("name", PAIRS)
def test_a_fused_call_has_the_bits_of_what_it_replaces(name: str, target: Target) -> None:
    """Every length and dtype: a row's order of summation depends on its length, not on what stands around the norm."""
    if target is EAGER and name.startswith("a packed gate"):
        pytest.skip("PyTorch's activations round strided and contiguous tensors in two ways")
    random = torch.Generator().manual_seed(0)
    for cols in _FEW if target in (EAGER, TRITON) else LENGTHS:
        for dtype in DTYPES:
            if target is CUDA and _has_another_order(name, cols, dtype):
                continue

            def draw(rows: int = ROWS, cols: int = cols, dtype: torch.dtype = dtype) -> Tensor:
                shape = (cols,) if rows == 1 else (rows, cols)
                return (2 * torch.randn(shape, generator=random) + 0.5).to(target.device, dtype)

            fused, unfused = PAIRS[name]({"backend": target.backend}, draw)
            assert torch.equal(fused, unfused), f"{cols} columns in {dtype}: {int((fused != unfused).sum())} differ"
