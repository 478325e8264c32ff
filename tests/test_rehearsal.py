"""Rehearsals: which CUDA kernels calls need, found out with CPU tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernel_fusion as kf
from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.planner import rehearsal
from kernel_fusion.cli.model_calls import calls_of
from kernel_fusion.core.other_specs import QuantizeSpec
from kernel_fusion.core.quantize import NO_CODES
from kernel_fusion.core.spec import RowNormSpec
from kernel_fusion.operators import loader

_H100 = KNOWN_DEVICES[90]


def noted(*calls: Callable[[], Any], device: Device = _H100) -> list[tuple[planner.Spec, Any]]:
    """The spec and access of each kernel that the calls need."""
    with rehearsal(loader.library(), device) as met:
        for call in calls:
            call()
    return list(met)


def _step(device: str) -> None:
    """Calls of every family with their backward: strided rows, all stages, bits, sums over columns."""
    x, other = (torch.randn(8, 2, 96, device=device).requires_grad_() for _ in range(2))
    w, b = (torch.randn(96, device=device, dtype=torch.float32).requires_grad_() for _ in range(2))
    y, h = kf.add_layer_norm(x[:, 0], other[:, 1], 96, w, b, dropout_p=0.1, activation="gelu")
    z = kf.gated_rms_norm(x, other, 96, w, gate_first=True)
    m = kf.modulated_layer_norm(x, 96, other[:, :1], torch.randn(8, 1, 96, device=device))
    terms = kf.bias_act(x, b, "relu"), kf.gated_act(x, other, "silu"), kf.add_act(x, other, "tanh")
    s = kf.softmax(x, causal=True), kf.sum_squared(x), kf.mean_abs(x, 0), kf.mean_abs(x, -1)
    g = kf.group_norm(x.movedim(-1, 1), 8, activation="silu")
    loss = kf.cross_entropy(x.flatten(0, 1), torch.arange(16, device=device))
    r = kf.rope(x.unflatten(-1, (4, 24)), *torch.randn(2, 2, 12, device=device), unsqueeze_dim=2)
    with torch.no_grad():
        kf.gated_act(x, other, "silu", out_dtype=kf.Quantize(torch.int8, per="row"))
    torch.stack([t.square().sum() for t in (y, h, z, m, *terms, *s, r, g, loss)]).sum().backward()


def _source(spec: planner.Spec, access: Any) -> str:
    """The source of the kernel."""
    return planner.source_of(spec, access, planner.plan_for(spec, access, _H100)).text()


@pytest.mark.parametrize("rms", [False, True])
def test_plain_norms_need_what_is_compiled_ahead(rms: bool) -> None:
    """Training and inference of contiguous rows need the kernels that `warmup --hidden` compiles, and no others."""
    x, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((4, 63), (63,), (63,)))

    def call() -> torch.Tensor:
        return kf.rms_norm(x, 63, w) if rms else kf.layer_norm(x, 63, w, b)

    met = noted(torch.no_grad()(call), lambda: call().square().sum().backward())
    wanted = set()
    for spec in planner.family(63, "f32", "f32", rms=rms):
        plan = planner.plan_for(spec, planner.contiguous_access(spec), _H100)
        wanted |= {_source(each, planner.contiguous_access(each)) for each in planner.with_helpers(spec, plan)}
    assert {_source(spec, access) for spec, access in met} == wanted


def test_every_family_is_noted() -> None:
    """Each kind of kernel is met, and each can be planned and written for the GPU that is not here."""
    met = noted(lambda: _step("cpu"))
    assert {type(spec) for spec, _ in met} == planner.KERNELS.keys()
    assert all(_source(spec, access) for spec, access in met)


# Grid rationale. A row in a block's registers, and in a cluster's, which leaves codes to a kernel of their own.
@pytest.mark.parametrize(("cols", "kernels"), [(4096, [RowNormSpec]), (65536, [RowNormSpec, QuantizeSpec])])
def test_codes_of_a_norm(cols: int, kernels: list[type]) -> None:
    """A norm's kernel makes its codes where it can, and sums rows as the norm without codes."""
    x, codes = torch.randn(2, cols, dtype=torch.bfloat16), kf.Quantize(torch.float8_e4m3fn, per=128)
    met = noted(torch.no_grad()(lambda: kf.layer_norm(x, cols, out_dtype=codes)))
    assert [type(spec) for spec, _ in met] == kernels
    spec, access = met[0]
    assert isinstance(spec, RowNormSpec)
    plan, plain = (planner.plan_for(each, access, _H100) for each in (spec, replace(spec, codes=NO_CODES)))
    assert plan.order(spec) == plain.order(spec)


def test_a_rehearsal_ends() -> None:
    """Afterwards calls on the CPU compute what they did, gradients of relu included, and note nothing."""
    x = torch.randn(4, 8, requires_grad=True)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(kf.bias_act(x, torch.ones(8), "relu").sum(), x)[0]

    assert noted(gradient)
    assert torch.equal(gradient(), torch.autograd.grad(F.relu(x + 1).sum(), x)[0])
    with pytest.raises(ZeroDivisionError), rehearsal(loader.library(), _H100) as met:
        raise ZeroDivisionError
    gradient()
    assert not met


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ["rounding=hf", "residual=bf16", "'silu'"]),
        ({"model_type": "vit", "image_size": 32, "patch_size": 8}, ["layer_norm.backward", "layer_norm.inference"]),
    ],
    ids=["llama", "vit"],
)
def test_a_configuration_is_made_and_called(sizes: dict[str, Any], texts: list[str], tmp_path: Path) -> None:
    """A model of transformers is patched and runs, forward and backward, in little memory: layers share parameters."""
    common = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(common | {"vocab_size": 96} | sizes))
    met = "\n".join(str(spec) for spec, _ in noted(*calls_of(str(tmp_path), [torch.bfloat16])))
    assert all(text in met for text in texts), met


@pytest.mark.cuda
def test_a_gpu_asks_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that a GPU plans for the same calls were all noted."""
    met = set(noted(lambda: _step("cpu"), device=Device.of(torch.cuda.current_device())))
    asked, compiled = set(), planner.compiled

    def record(spec: planner.Spec, access: Any, device: Device) -> Any:
        asked.add((spec, access))
        return compiled(spec, access, device)

    monkeypatch.setattr(planner, "compiled", record)
    planner.forget_kernels()
    _step("cuda")
    assert asked
    assert asked <= met
