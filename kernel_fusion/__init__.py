"""Fused norms, rotary embeddings, pointwise chains, reductions and attention weights for PyTorch, on GPUs and CPUs.

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
from kernel_fusion.functional import *  # noqa: F403 - its `__all__` says what
from kernel_fusion.functional.attention import *  # noqa: F403 - for type checkers, which do not add up `__all__`
from kernel_fusion.functional.explain import Explanation, explain
from kernel_fusion.functional.linear_losses import *  # noqa: F403
from kernel_fusion.functional.losses import *  # noqa: F403
from kernel_fusion.functional.results import CrossEntropyOutput, Quantized, TokenLogprobOutput
from kernel_fusion.nn import *  # noqa: F403

if TYPE_CHECKING:
    from kernel_fusion import compiler, hf
    from kernel_fusion.patching.patch import patch, unpatch
    from kernel_fusion.patching.report import Report

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
    "CrossEntropyOutput",
    "Explanation",
    "Quantize",
    "Quantized",
    "Report",
    "TokenLogprobOutput",
    "compiler",
    "errors",
    "explain",
    "functional",
    "hf",
    "kernels",
    "nn",
    "ops",
    "patch",
    "unpatch",
    "use_backend",
]
__all__ += functional.__all__
__all__ += nn.__all__


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
    return sorted({*globals(), *__all__, *_MODULES})  # names that are imported when read, too
