"""The adapters of other libraries, tested on stand-ins with their functions' names, arguments and habits.

These tests say nothing about the libraries themselves: only that the adapters, which need a GPU to run for real, call
such functions so that they compute what PyTorch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bench_support import BF16, CPU, EFFORT, FP32, norm
from torch import Tensor

from kernel_fusion.cli import machine
from kernel_fusion.testing import unfused
from kernel_fusion_bench import check, images, losses, operations, peers, quantised, stages
from kernel_fusion_bench.workloads import Inputs, Operation, Workload


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _cross_entropy(x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), ids)


def _liger() -> dict[str, Any]:
    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting_mode: str, in_place: bool) -> Tensor:
        assert (casting_mode, in_place) == ("gemma", False)
        return _rms_norm(x, offset + weight, eps)

    def add(x: Tensor, residual: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        h = x + residual
        return rms_norm(h, weight, *rest), h

    def modulated(x: Tensor, weight: None, scale: Tensor, shift: Tensor, *rest: Any) -> Tensor:
        assert scale.shape == shift.shape == (x.shape[0], x.shape[-1])
        return rms_norm(x, torch.ones_like(x[0, 0]), *rest) * (1 + scale[:, None]) + shift[:, None]

    def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        assert rest == (None, 1, query.shape[-1])
        return _turned_in_place(query, cos, sin), _turned_in_place(key, cos, sin)

    def cross_entropy(x: Tensor, ids: Tensor, weight: None, *rest: Any) -> tuple[Tensor, None]:
        assert rest in ((), (-100, 0.0, 0.0, "mean", losses.SOFTCAP))
        x = losses.SOFTCAP * torch.tanh(x.float() / losses.SOFTCAP) if rest else x
        return _cross_entropy(x, ids), None

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor, channels: int, groups: int, eps: float) -> Tensor:
        assert channels == x.shape[1]
        return F.group_norm(x, groups, weight, bias, eps)

    functions = {
        "layer_norm.LigerLayerNormFunction": _layer_norm,
        "rms_norm.LigerRMSNormFunction": rms_norm,
        "fused_add_rms_norm.LigerFusedAddRMSNormFunction": add,
        "modulated_rms_norm.LigerModulatedRMSNormFunction": modulated,
        "rope.LigerRopeFunction": rope,
        "cross_entropy.LigerCrossEntropyFunction": cross_entropy,
        "group_norm.LigerGroupNormFunction": group_norm,
    }
    paths = ((path.split("."), function) for path, function in functions.items())
    return {f"liger_kernel.ops.{file}": {name: SimpleNamespace(apply=f)} for (file, name), f in paths}


class _Turned(torch.autograd.Function):
    """Rotates (.., tokens, columns), and its gradient, where they lie."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return x.copy_(unfused.rope(x, cos, sin))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return dy.copy_(unfused.rope(dy, cos, -sin)), None, None


def _turned_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = _Turned.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def _quack() -> dict[str, Any]:
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, **more: bool) -> Any:
        assert x.dim() == 2
        assert weight.dtype == bias.dtype == FP32
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        assert set(more) in (set(), {"return_rstd", "return_mean"})
        return (y, rstd, mean) if more else y

    def backward(x: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
        native = torch.ops.aten.native_layer_norm_backward
        return native(dy, x, x.shape[-1:], mean, rstd, weight, torch.zeros_like(weight), [True] * 3)

    def rmsnorm(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float, prenorm: bool = False) -> Any:
        if residual is None:
            return _rms_norm(x, weight, eps)
        assert prenorm
        return _rms_norm(x + residual, weight, eps), x + residual

    return {
        "quack.rmsnorm": {"layernorm_fwd": forward, "layernorm_bwd": backward, "rmsnorm": rmsnorm},
        "quack.rotary": {"apply_rotary_emb": _rotary_embedding},
        "quack.cross_entropy": {"cross_entropy": _cross_entropy},
    }


def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As flash-attn, fla and Quack have it: (batch, tokens, heads, columns)."""
    return unfused.rope(x, cos[:, None], sin[:, None])


def _fla() -> dict[str, Any]:
    def rms_norm_gated(x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str, *, eps: float) -> Tensor:
        assert activation == "swish"
        return _rms_norm(x, weight, eps) * F.silu(g)

    return {
        "fla.modules.fused_norm_gate": {"rms_norm_gated": rms_norm_gated},
        "fla.modules.rotary": {"rotary_embedding": _rotary_embedding},
    }


def _flashinfer() -> dict[str, Any]:
    """In fp16 and bf16 alone, with results where they are told, and angles of float32 in one table."""

    def rmsnorm_quant(out: Tensor, x: Tensor, weight: Tensor, scale: float, eps: float) -> None:
        assert x.dtype in (torch.half, torch.bfloat16) and x.dim() == 2  # noqa: PT018
        out.copy_((_rms_norm(x.float(), weight.float(), eps) / scale).clamp(-448, 448))

    def fused_add_rmsnorm_quant(
        out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, scale: float, eps: float
    ) -> None:
        rmsnorm_quant(out, residual.add_(x), weight, scale, eps)

    def fused_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(_rms_norm(residual.add_(x), weight, eps))

    def rope(positions: Tensor, query: Tensor, key: Tensor, size: int, table: Tensor) -> list[Tensor]:
        assert table.dtype == FP32
        cos, sin = table[positions, None].chunk(2, -1)
        return [unfused.rope(x.unflatten(1, (-1, size)), cos, sin).flatten(1).to(x.dtype) for x in (query, key)]

    norms = (rmsnorm_quant, fused_add_rmsnorm_quant, fused_add_rmsnorm)
    return {
        "flashinfer.norm": {norm.__name__: norm for norm in norms},
        "flashinfer.rope": {"apply_rope_with_cos_sin_cache": rope},
    }


def _apex() -> dict[str, Any]:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, eps: float) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms_norm(x: Tensor, weight: Tensor, shape: torch.Size, eps: float) -> Tensor:
        return F.rms_norm(x, shape, weight, eps)

    functions = {"fused_layer_norm_affine": layer_norm, "fused_rms_norm_affine": rms_norm}
    return {"apex.normalization.fused_layer_norm": functions, "fused_layer_norm_cuda": {}}


def _flash_attn() -> dict[str, Any]:
    def rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        assert bias is None
        return _rms_norm(x, weight, eps)

    kernels = {name: SimpleNamespace() for name in ("_layer_norm_fwd_1pass_kernel", "_layer_norm_bwd_kernel")}
    return {"flash_attn.ops.triton.layer_norm": kernels | {"layer_norm_fn": _layer_norm, "rms_norm_fn": rms_norm}}


_STAND_INS: dict[str, Callable[[], dict[str, Any]]] = {
    "liger": _liger,
    "quack": _quack,
    "apex": _apex,
    "flash-attn": _flash_attn,
}
_FOR_STAGES: dict[str, Callable[[], dict[str, Any]]] = _STAND_INS | {"fla": _fla, "flashinfer": _flashinfer}
_BY_NAME = {
    operation.name: operation
    for operation in (*operations.OPERATIONS, *stages.GATED, *stages.MODULATED_RMS, *quantised.NORMS)
}


def _install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> None:
    """Make modules of these names importable, with these contents."""
    for path, contents in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(contents)


def _assert_right(provider: peers.Provider, workload: Workload, inputs: Inputs | None = None) -> None:
    inputs = inputs or workload.input_sets(CPU, 1)[0]
    verdict = check.check(workload, [provider], inputs, EFFORT.max_checked)[provider]
    assert not isinstance(verdict, str), verdict
    assert all(comparison.ok for comparison in verdict), verdict


@pytest.mark.parametrize("name", _STAND_INS)
def test_norms(name: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are within the budget of ours; a version that no distribution has is unknown."""
    _install(monkeypatch, _STAND_INS[name]())
    monkeypatch.setattr(machine.metadata, "version", Mock(side_effect=machine.metadata.PackageNotFoundError))
    ((provider,), states) = peers.find([name], torch.device("cuda"))
    assert provider.version == "unknown version"
    assert states[name].startswith("unknown version")
    assert ("weight and bias in fp32 for layer_norm" in states[name]) == (name == "quack")
    _assert_right(provider, norm((6, 4, 32), verb=verb))
    assert not provider.measures(Workload("a", operations.RELU_LAYER_NORM, (4, 8), FP32))


# Every operation but bare norms that a library has, at a shape that it takes.
@pytest.mark.parametrize(
    ("name", "operation", "shape"),
    [
        *((name, _BY_NAME["add+rms_norm"], (6, 256)) for name in ("liger", "quack", "flashinfer")),
        ("fla", _BY_NAME["gated rms_norm"], (2, 6, 256)),
        ("liger", _BY_NAME["modulated rms_norm"], (2, 6, 256)),
        *((name, stages.ROPE, (6, 256)) for name in ("quack", "fla")),
        *((name, rope, (6, 512)) for name in ("liger", "flashinfer") for rope in stages.ROPE_OF_BOTH),
        ("flashinfer", _BY_NAME["rms_norm, given scale"], (6, 256)),
        ("flashinfer", _BY_NAME["add+rms_norm, given scale"], (6, 256)),
        ("liger", images.OPERATIONS[0], (2, images.GROUPS, 4, 6)),
        *(("liger", loss, (6, 256)) for loss in losses.OPERATIONS[:2]),
        ("quack", losses.OPERATIONS[0], (6, 256)),
    ],
    ids=lambda of: of.name if isinstance(of, Operation) else str(of),
)
def test_stages(name: str, operation: Operation, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are right, codes up to their rounding; what overwrites its arguments gets copies."""
    _install(monkeypatch, _FOR_STAGES[name]())
    ((provider,), _) = peers.find([name], torch.device("cuda"))
    assert provider.measures(Workload("a", operation, shape, FP32)) == (name != "flashinfer")
    workload = Workload("a", operation, shape, BF16)
    assert provider.measures(workload)
    (inputs,) = workload.input_sets(CPU, 1)
    before = [t.clone() for t in inputs.tensors]
    _assert_right(provider, workload, inputs)
    assert all(map(torch.equal, inputs.tensors, before))


@pytest.mark.parametrize(
    ("cols", "warps"), [(4096, [1, 2, 4, 8, 16, 32]), (8192, [2, 4, 8, 16, 32]), (32768, [8, 16, 32])]
)
def test_flash_attn_compiles_nothing_that_spills_a_row(
    cols: int, warps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels' autotuners leave out the configurations whose threads have more elements than registers."""
    _install(monkeypatch, _flash_attn())
    peers.find(["flash-attn"], torch.device("cuda"))
    configs = [SimpleNamespace(num_warps=1 << i) for i in range(6)]
    module = sys.modules["flash_attn.ops.triton.layer_norm"]
    for kernel in (module._layer_norm_fwd_1pass_kernel, module._layer_norm_bwd_kernel):
        found = kernel.early_config_prune(configs, {"N": cols - 1, "BLOCK_N": cols}, HAS_X1=False)
        assert [config.num_warps for config in found] == warps


@pytest.mark.parametrize(
    ("cols", "dtype", "wanted"), [(16384, FP32, True), (16385, FP32, False), (32768, torch.half, True)]
)
def test_flash_attn_has_rows_up_to_64_kb(
    cols: int, dtype: torch.dtype, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones are not measured, since it refuses them."""
    _install(monkeypatch, _flash_attn())
    ((provider,), _) = peers.find(["flash-attn"], torch.device("cuda"))
    assert provider.measures(norm((2, cols), dtype)) is wanted


def test_quack_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inference keeps no statistics."""
    _install(monkeypatch, _quack())
    ((provider,), _) = peers.find(["quack"], torch.device("cuda"))
    workload = norm((6, 32))
    (inputs,) = workload.input_sets(CPU, 1)
    y = provider.prepare("forward", workload, inputs)()
    torch.testing.assert_close(y, workload.unfused()(*inputs.arguments.values()).detach())


def test_cupy_runs_on_the_stream_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chain runs within PyTorch's current stream, and only where a workload has one."""
    streams: list[int] = []

    class ExternalStream:
        def __init__(self, pointer: int) -> None:
            self.pointer = pointer

        def __enter__(self) -> None:
            streams.append(self.pointer)

        def __exit__(self, *_: object) -> None:
            streams.append(-self.pointer)

    contents = vars(np) | {"__version__": "13", "cuda": SimpleNamespace(ExternalStream=ExternalStream)}
    _install(monkeypatch, {"cupy": {name: contents[name] for name in contents if name != "__name__"}})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    ((provider,), states) = peers.find(["cupy"], torch.device("cuda"))
    assert states == {"cupy": "13"}
    assert not provider.measures(Workload("a", operations.OPERATIONS[0], (4, 8), FP32))
    _assert_right(provider, Workload("a", operations.RELU_LAYER_NORM, (6, 32), FP32))
    assert streams == [7, -7]
