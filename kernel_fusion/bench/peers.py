"""Other libraries, measured if installed, with arguments under which they compute what PyTorch does.

To add one, add an entry to `PEERS`. One entry is ours: the portable build of the CPU kernels.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib import metadata
from typing import Any, cast

import torch
from torch import Tensor

from kernel_fusion.bench.operations import case_of
from kernel_fusion.bench.providers import Provider, ours
from kernel_fusion.bench.results import BASELINE
from kernel_fusion.bench.timing import reason
from kernel_fusion.bench.workloads import Function, Workload
from kernel_fusion.errors import BuildError
from kernel_fusion.native import build
from kernel_fusion.native.library import say
from kernel_fusion.operators import loader
from kernel_fusion.testing.oracle import RowNormCase, default_eps


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
            build.built_library(say, every_variant=True)


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


def _liger() -> Provider:
    layer_norm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
    rms_norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply

    def norm(case: RowNormCase) -> Function:
        eps = default_eps(case)
        if case.verb == "layer_norm":
            return lambda x, weight, bias: layer_norm(x, weight, bias, eps)
        # No offset, fp32 throughout with one rounding as in PyTorch, and dy is not overwritten.
        return lambda x, weight: rms_norm(x, weight, eps, 0.0, "gemma", False)

    return _of_norms("liger", _version("liger-kernel"), norm)


def _quack() -> Provider:
    module = importlib.import_module("quack.rmsnorm")
    layer_norm = _quack_layer_norm(module)

    def norm(case: RowNormCase) -> Function:
        eps = default_eps(case)
        if case.verb == "layer_norm":
            return lambda x, weight, bias: layer_norm(x, weight, bias, eps)
        return lambda x, weight: module.rmsnorm(x, weight, eps=eps)

    return _of_norms("quack", _version("quack-kernels"), norm, f32_weights=("layer_norm",))


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

    def norm(case: RowNormCase) -> Function:
        shape, eps = case.normalized_shape, default_eps(case)
        if case.verb == "layer_norm":
            return lambda x, weight, bias: module.fused_layer_norm_affine(x, weight, bias, shape, eps)
        return lambda x, weight: module.fused_rms_norm_affine(x, weight, shape, eps)

    return _of_norms("apex", _version("apex"), norm)


# flash-attn's norms refuse longer rows.
_FLASH_ROW_BYTES = 65536


def _flash_attn() -> Provider:
    module = importlib.import_module("flash_attn.ops.triton.layer_norm")
    for autotuned in (module._layer_norm_fwd_1pass_kernel, module._layer_norm_bwd_kernel):
        autotuned.early_config_prune = holding_a_row

    def norm(case: RowNormCase) -> Function:
        if case.verb == "layer_norm":
            return partial(module.layer_norm_fn, eps=default_eps(case))
        return lambda x, weight: module.rms_norm_fn(x, weight, None, eps=default_eps(case))

    return _of_norms("flash-attn", _version("flash-attn"), norm, longest=_FLASH_ROW_BYTES)


def holding_a_row(configs: list[Any], named_args: dict[str, Any], **kwargs: Any) -> list[Any]:
    """Triton's configurations with enough registers for a row.

    flash-attn's autotuner also tries too few warps, whose spilling kernels take minutes to compile.
    """
    columns = (named_args | kwargs)["BLOCK_N"]
    return [config for config in configs if columns <= 255 * 32 * config.num_warps]


def _of_norms(
    name: str,
    version: str,
    norm: Callable[[RowNormCase], Function],
    f32_weights: tuple[str, ...] = (),
    longest: float = math.inf,
) -> Provider:
    """A library that has bare norms, for rows of up to `longest` bytes."""

    def measures(workload: Workload) -> bool:
        return workload.what.bare and workload.shape[-1] * workload.dtype.itemsize <= longest

    def function(workload: Workload) -> Function:
        return norm(case_of(workload))

    return Provider(name, version, function, None, f32_weights, measures)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown version"


PEERS: dict[str, Callable[[], Provider]] = {
    "torch.compile": _torch_compile,
    BASELINE: _portable,
    "liger": _liger,
    "quack": _quack,
    "apex": _apex,
    "flash-attn": _flash_attn,
    "cupy": _cupy,
}
# The device types of peers that do not run on CUDA alone.
_DEVICES = {"torch.compile": ("cuda", "cpu"), BASELINE: ("cpu",)}
