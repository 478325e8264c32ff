"""Other libraries, measured if installed, with arguments under which they compute what PyTorch does.

To add one, add an entry to `PEERS`. One entry is ours: the portable build of the CPU kernels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from kernel_fusion.cli.machine import installed
from kernel_fusion.errors import BuildError
from kernel_fusion.native.library import ready_library
from kernel_fusion.operators import loader
from kernel_fusion.testing.oracle import default_eps
from kernel_fusion_bench import images, losses, quantised, stages
from kernel_fusion_bench.operations import case_of
from kernel_fusion_bench.providers import Provider, ours
from kernel_fusion_bench.results import BASELINE
from kernel_fusion_bench.timing import reason
from kernel_fusion_bench.workloads import EPS, Function, Workload

Norms = Mapping[str, Callable[[float], Function]]  # by verb, given eps


def find(names: Sequence[str], device: torch.device) -> tuple[list[Provider], dict[str, str]]:
    """The peers among `names` that can be measured here, and the version of each or why it is absent."""
    found, states = [], {}
    for name in names:
        devices = _DEVICES.get(name, ("cuda",))
        if device.type not in devices:
            states[name] = f"absent: it runs on {' and '.join(map(str.upper, devices))} devices only"
            continue
        try:
            provider = PEERS[name]()
        except Exception as error:  # importing a package can fail in any way
            states[name] = f"absent: {reason(error)}"
        else:
            states[name] = provider.version
            if provider.f32_weights:
                states[name] += f" (weight and bias in fp32 for {', '.join(provider.f32_weights)})"
            found.append(provider)
    return found, states


def prepare(names: Sequence[str]) -> None:
    """Build what `names` need before anything loads the extension: for `portable`, a library with that build."""
    if BASELINE in names and not loader.is_loaded():
        with suppress(BuildError):  # `find` reports the absence
            ready_library(every_variant=True)


def _portable() -> Provider:
    best = loader.cpu_variant()
    loader.use_cpu_variant("DEFAULT")  # raises if the library loaded before has no such build
    loader.use_cpu_variant(best)
    return replace(ours("cpu"), name=BASELINE, variant="DEFAULT")


def _torch_compile() -> Provider:
    # Backward runs many times on one retained graph, so it must not reuse its saved buffers.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False

    @lru_cache(maxsize=1)
    def compiled(workload: Any) -> Any:
        # The recompilation limit counts all shapes together, and suites have more than a program.
        torch.compiler.reset()
        return torch.compile(workload.unfused(), fullgraph=True, dynamic=False)

    return Provider("torch.compile", torch.__version__, cast("Callable[[Workload], Function]", compiled))


def _cupy() -> Provider:
    """CuPy's operations, unfused, on PyTorch's current stream."""
    cupy = importlib.import_module("cupy")

    def function(workload: Workload) -> Function:
        assert workload.what.cupy is not None
        call = workload.what.cupy(cupy)

        def on_stream(*arrays: Any) -> Any:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                return call(*arrays)

        return on_stream

    return Provider(
        "cupy",
        cupy.__version__,
        function,
        measures=lambda workload: workload.what.cupy is not None,
        convert=cupy.from_dlpack,
        differentiable=False,
        in_graphs=False,
    )


_ROPE_OF_BOTH = tuple(operation.name for operation in stages.ROPE_OF_BOTH)
# No offset, fp32 throughout with one rounding as in PyTorch, and dy is not overwritten.
_LIGER_RMS = 0.0, "gemma", False


def _liger() -> Provider:
    def of(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply

    layer_norm, rms_norm = of("layer_norm", "LigerLayerNormFunction"), of("rms_norm", "LigerRMSNormFunction")
    add = of("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    modulated = of("modulated_rms_norm", "LigerModulatedRMSNormFunction")
    rope = of("rope", "LigerRopeFunction")
    group_norm = of("group_norm", "LigerGroupNormFunction")
    cross_entropy = of("cross_entropy", "LigerCrossEntropyFunction")
    no_weight, ignored, no_z_loss, no_smoothing = None, -100, 0.0, 0.0
    norms: Norms = {
        "layer_norm": lambda eps: lambda x, weight, bias: layer_norm(x, weight, bias, eps),
        "rms_norm": lambda eps: lambda x, weight: rms_norm(x, weight, eps, *_LIGER_RMS),
    }

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        heads = (t.transpose(0, 1)[None] for t in (query, key))  # in memory, tokens stay first
        y, y_key, *_ = rope(*heads, cos, sin, None, 1, 2 * cos.shape[-1])
        return y[0].transpose(0, 1), y_key[0].transpose(0, 1)

    calls: dict[str, Function] = {
        "add+rms_norm": lambda x, residual, weight: add(x, residual, weight, EPS, *_LIGER_RMS),
        "modulated rms_norm": lambda x, scale, shift: modulated(
            x, None, scale.squeeze(1), shift.squeeze(1), EPS, *_LIGER_RMS
        ),
        **dict.fromkeys(_ROPE_OF_BOTH, rotated),
        "group_norm": lambda x, weight, bias: group_norm(x, weight, bias, x.shape[1], images.GROUPS, EPS),
        "cross_entropy": lambda x, ids: cross_entropy(x, ids, no_weight)[0],
        "cross_entropy, softcap": lambda x, ids: cross_entropy(
            x, ids, no_weight, ignored, no_z_loss, no_smoothing, "mean", losses.SOFTCAP
        )[0],
    }
    in_place = (*_ROPE_OF_BOTH, "cross_entropy", "cross_entropy, softcap")  # the gradient goes where the logits lie
    return _library("liger", "liger-kernel", norms, calls, in_place=in_place)


def _fla() -> Provider:
    gated = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated
    rope = importlib.import_module("fla.modules.rotary").rotary_embedding
    calls: dict[str, Function] = {
        "gated rms_norm": lambda x, gate, weight: gated(x, gate, weight, None, "swish", eps=EPS),
        stages.ROPE.name: lambda x, cos, sin: rope(x[None], cos, sin)[0],
    }
    return _library("fla", "fla-core", {}, calls)


def _flashinfer() -> Provider:
    """FlashInfer, which has no backward passes, and whose add-norms add to the residual where it lies."""
    norm = importlib.import_module("flashinfer.norm")
    rope = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        norm.fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    def quantised_norm(x: Tensor, weight: Tensor) -> Tensor:
        codes = torch.empty_like(x, dtype=quantised.CODES)
        norm.rmsnorm_quant(codes, x, weight, quantised.GIVEN, EPS)
        return codes

    def quantised_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.empty_like(x, dtype=quantised.CODES)
        norm.fused_add_rmsnorm_quant(codes, x, residual, weight, quantised.GIVEN, EPS)
        return codes, residual

    @lru_cache(maxsize=1)
    def table(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(cos), device=cos.device), torch.cat((cos, sin), -1).float()

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        positions, angles = table(cos, sin)
        both = rope(positions, query.flatten(1), key.flatten(1), query.shape[-1], angles)
        return tuple(y.view(x.shape) for y, x in zip(both, (query, key), strict=True))

    adding = {"add+rms_norm": add, "add+rms_norm, given scale": quantised_add}
    calls: dict[str, Function] = {
        **adding,
        "rms_norm, given scale": quantised_norm,
        **dict.fromkeys(_ROPE_OF_BOTH, rotated),
    }
    options: dict[str, Any] = {"dtypes": (torch.float16, torch.bfloat16), "in_place": tuple(adding)}
    return _library("flashinfer", "flashinfer-python", {}, calls, differentiable=False, **options)


def _quack() -> Provider:
    module = importlib.import_module("quack.rmsnorm")
    layer_norm = _quack_layer_norm(module)

    norms: Norms = {
        "layer_norm": lambda eps: lambda x, weight, bias: layer_norm(x, weight, bias, eps),
        "rms_norm": lambda eps: lambda x, weight: module.rmsnorm(x, weight, eps=eps),
    }
    rotate = importlib.import_module("quack.rotary").apply_rotary_emb
    calls: dict[str, Function] = {
        "cross_entropy": importlib.import_module("quack.cross_entropy").cross_entropy,
        "add+rms_norm": lambda x, residual, weight: module.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True),
        stages.ROPE.name: lambda x, cos, sin: rotate(x[None], cos, sin)[0],
    }
    return _library("quack", "quack-kernels", norms, calls, f32_weights=("layer_norm",))


def _quack_layer_norm(module: Any) -> Callable[..., Tensor]:
    """Quack's LayerNorm; its two halves have no autograd and take two dimensions and fp32 parameters."""

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            y, rstd, mean = module.layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, rstd, mean = ctx.saved_tensors
            return (*module.layernorm_bwd(x, weight, dy.contiguous(), rstd, mean), None)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and x.requires_grad:
            y = LayerNorm.apply(rows, weight, bias, eps)  # type: ignore[no-untyped-call]
        else:
            y = module.layernorm_fwd(rows, weight, bias, eps)
        return y.view(x.shape)  # type: ignore[no-any-return]

    return layer_norm


def _apex() -> Provider:
    module = importlib.import_module("apex.normalization.fused_layer_norm")
    importlib.import_module("fused_layer_norm_cuda")  # without its extension, apex fails only at the first call

    norms: Norms = {
        "layer_norm": lambda eps: lambda x, w, bias: module.fused_layer_norm_affine(x, w, bias, w.shape, eps),
        "rms_norm": lambda eps: lambda x, w: module.fused_rms_norm_affine(x, w, w.shape, eps),
    }
    return _library("apex", "apex", norms, {})


# flash-attn's norms refuse longer rows.
_FLASH_ROW_BYTES = 65536


def _flash_attn() -> Provider:
    module = importlib.import_module("flash_attn.ops.triton.layer_norm")
    for autotuned in (module._layer_norm_fwd_1pass_kernel, module._layer_norm_bwd_kernel):
        autotuned.early_config_prune = holding_a_row

    norms: Norms = {
        "layer_norm": lambda eps: partial(module.layer_norm_fn, eps=eps),
        "rms_norm": lambda eps: lambda x, weight: module.rms_norm_fn(x, weight, None, eps=eps),
    }
    return _library("flash-attn", "flash-attn", norms, {}, longest=_FLASH_ROW_BYTES)


def holding_a_row(configs: list[Any], named_args: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Triton's configurations with enough registers for a row.

    flash-attn's autotuner also tries too few warps, whose spilling kernels take minutes to compile.
    """
    columns = (named_args | kwargs)["BLOCK_N"]
    return [config for config in configs if columns <= 255 * 32 * config.num_warps]


def _library(
    name: str,
    distribution: str,
    norms: Norms,
    calls: Mapping[str, Function],
    *,
    longest: float = math.inf,
    dtypes: tuple[torch.dtype, ...] | None = None,
    **facts: Any,
) -> Provider:
    """A library that has bare norms, for rows of up to `longest` bytes, and `calls`, by the operation's name."""

    def measures(workload: Workload) -> bool:
        if dtypes is not None and workload.dtype not in dtypes:
            return False
        if not workload.what.bare:
            return workload.what.name in calls
        return workload.verb in norms and workload.shape[-1] * workload.dtype.itemsize <= longest

    def function(workload: Workload) -> Function:
        if workload.what.bare:
            return norms[workload.verb](default_eps(case_of(workload)))
        return calls[workload.what.name]

    version = installed(distribution) or "unknown version"
    return Provider(name, version, function, measures=measures, **facts)


PEERS: dict[str, Callable[[], Provider]] = {
    "torch.compile": _torch_compile,
    BASELINE: _portable,
    "liger": _liger,
    "quack": _quack,
    "apex": _apex,
    "flash-attn": _flash_attn,
    "fla": _fla,
    "flashinfer": _flashinfer,
    "cupy": _cupy,
}
# The device types of peers that do not run on CUDA alone.
_DEVICES = {"torch.compile": ("cuda", "cpu"), BASELINE: ("cpu",)}
