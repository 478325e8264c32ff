"""Each result is as exact as its own dtype, whatever the dtypes of the tensors beside it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support import CPU, CUDA, TRITON, Target, widened
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core.spec import RowNormSpec
from kernel_fusion.testing.oracle import judge

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

_KINDS: dict[str, dict[str, Any]] = {
    "gate": {"gate_activation": "gelu"},
    "gate first": {"gate_activation": "gelu", "gate_first": True},
    "after": {"activation": "gelu"},
    "before": {"pre_activation": "silu"},
    "stream": {"activation": "silu"},
}
_ON = [CPU, TRITON, pytest.param(CUDA, marks=pytest.mark.cuda)]


def _results(kind: str, rms: bool, inputs: dict[str, Tensor], out: Any, dy: Tensor, backend: str) -> dict[str, Tensor]:
    prefix = {"gate": "gated_", "gate first": "gated_", "stream": "add_"}.get(kind, "")
    verb = getattr(kf, f"{prefix}{'rms' if rms else 'layer'}_norm")
    x, weight, bias, *second = inputs.values()
    options: dict[str, Any] = {"bias": bias, "eps": 1e-5, "out_dtype": out, "backend": backend, **_KINDS[kind]}
    y = verb(x, *second, x.shape[-1], weight, **options)
    y = y.output if kind == "stream" else y
    gradients = torch.autograd.grad(y, list(inputs.values()), dy.to(y.dtype))
    return {"y": y.detach()} | {f"d{name}": g for name, g in zip(inputs, gradients, strict=True)}


# Grid rationale. A stage before, after and beside the norm shares what it computes among several results; of x, the
# parameters, y and a residual, any may be the only one in fp32.
@pytest.mark.covering(1, "on.backend", "kind")
@pytest.mark.parametrize("on", _ON, ids=lambda on: on.backend)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtypes", [(BF16, F32, None), (F16, F32, None), (F32, BF16, BF16), (F32, F32, F16)], ids=str)
def test_float32_beside_16_bits(dtypes: Any, rms: bool, kind: str, on: Target) -> None:
    """A gradient in fp32 is within the budget of PyTorch's operations in fp32, beside whatever 16 bits."""
    dtype, parameters, out = dtypes
    names = {"x": dtype, "weight": parameters, "bias": parameters}
    names |= {"residual": F32} if kind == "stream" else {"gate": dtype} if "gate" in kind else {}
    shape = {"weight": (256,), "bias": (256,)}
    inputs = {
        name: torch.randn(shape.get(name, (24, 256)), device=on.device).to(of).requires_grad_()
        for name, of in names.items()
    }
    dy = torch.randn(24, 256, device=on.device).to(out or dtype)
    with on.ran(forward=None, backward=None):
        ours = _results(kind, rms, inputs, out, dy, on.backend)
    exact = _results(kind, rms, widened(inputs), None, dy.double(), "eager")
    single = {name: t.detach().float().requires_grad_() for name, t in inputs.items()}
    theirs = _results(kind, rms, single, None, dy.float(), "eager")
    for name, result in ours.items():
        if result.dtype == F32:
            judged = judge(name, [(result, exact[name].cpu().numpy(), theirs[name])])
            assert judged.ok, judged


def test_forward_and_backward_agree_on_the_finest_dtype() -> None:
    """Backward recomputes what stood before the norm as forward did, whichever gradients are wanted."""
    stages: list[dict[str, Any]] = [{}, {"pre_activation": "gelu"}, {"activation": "silu"}, {"gate": "f32"}]
    stages += [{"gate": "bf16", "gate_first": True}, {"residual": "f32", "activation": "gelu"}]
    for options, x, weight, bias, y in product(
        stages, ("bf16", "f16"), ("bf16", "f32"), (None, "f32"), ("bf16", "f32")
    ):
        forward = RowNormSpec("forward", False, 64, x, y, weight, bias, **options)
        # Backward reads a bias where a stage follows, and knows none elsewhere.
        kept = bias if forward.follows else None
        backward = RowNormSpec("backward", False, 64, x, y, weight, kept, **options)
        assert forward.finest == backward.finest
        assert forward.finest == ("f32" if "f32" in (y, weight, kept, *options.values()) else backward.finest)
    assert RowNormSpec("backward", True, 64, "bf16", "bf16", "bf16", activation="gelu").finest == "bf16"
    assert RowNormSpec("backward", True, 64, "bf16", "bf16", "f16", activation="gelu").finest == "f16"
