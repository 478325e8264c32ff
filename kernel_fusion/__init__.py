"""Fused norms, pointwise chains, reductions and softmax for PyTorch, on NVIDIA GPUs and CPUs, with PyTorch's numbers.

Importing builds nothing and loads no compiler; the first call does.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernel_fusion import errors, functional, kernels, nn, ops
from kernel_fusion.config import use_backend
from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.core.quantize import Quantize
from kernel_fusion.functional import (
    NormOutput,
    act_dropout,
    add_act,
    add_layer_norm,
    add_modulated_layer_norm,
    add_modulated_rms_norm,
    add_rms_norm,
    attention_scores,
    bias_act,
    gated_act,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    mean_abs,
    modulated_layer_norm,
    modulated_rms_norm,
    mul_act,
    qk_norm_rope,
    rms_norm,
    rope,
    softmax,
    sum_squared,
)
from kernel_fusion.functional.explain import Explanation, explain
from kernel_fusion.functional.results import Quantized
from kernel_fusion.nn import (
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedBiasAct,
    FusedGatedAct,
    FusedGatedRMSNorm,
    FusedLayerNorm,
    FusedLinearAct,
    FusedModulatedLayerNorm,
    FusedQKNormRope,
    FusedRMSNorm,
    FusedSoftmax,
)

if TYPE_CHECKING:
    from kernel_fusion import compiler, hf
    from kernel_fusion.patching import Report, patch, unpatch

__version__ = "0.1.0"

# Evaluated when read: reading one loads the extension, building it if necessary. Not in `__all__`, so that `import *`
# reads neither.
CUDA_AVAILABLE: bool
EXTENSION_LOADED: bool
# Imported when read, because no call needs them.
bench: ModuleType
onnx: ModuleType
_MODULES = ("bench", "compiler", "hf", "onnx")
_PATCHING = ("Report", "patch", "unpatch")

__all__ = [
    "ACTIVATIONS",
    "Explanation",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedBiasAct",
    "FusedGatedAct",
    "FusedGatedRMSNorm",
    "FusedLayerNorm",
    "FusedLinearAct",
    "FusedModulatedLayerNorm",
    "FusedQKNormRope",
    "FusedRMSNorm",
    "FusedSoftmax",
    "NormOutput",
    "Quantize",
    "Quantized",
    "Report",
    "act_dropout",
    "add_act",
    "add_layer_norm",
    "add_modulated_layer_norm",
    "add_modulated_rms_norm",
    "add_rms_norm",
    "attention_scores",
    "bias_act",
    "compiler",
    "errors",
    "explain",
    "functional",
    "gated_act",
    "gated_layer_norm",
    "gated_rms_norm",
    "hf",
    "kernels",
    "layer_norm",
    "mean_abs",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "mul_act",
    "nn",
    "ops",
    "patch",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "softmax",
    "sum_squared",
    "unpatch",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kernel_fusion.{name}")
    if name in _PATCHING:
        return getattr(importlib.import_module("kernel_fusion.patching"), name)
    if name == "EXTENSION_LOADED":
        from kernel_fusion.operators import loader

        return loader.load()
    if name == "CUDA_AVAILABLE":
        from kernel_fusion.operators import loader
        from kernel_fusion.operators.dispatch import unavailable_reason

        loader.load()
        return unavailable_reason("cuda") is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # names that are imported when read, too
