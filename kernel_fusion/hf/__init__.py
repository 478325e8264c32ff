"""Hugging Face `kernels`: our layers in models that look up layers by name, as transformers' do.

Call `register` once, then `from_pretrained(..., use_kernels=True)`; or `kernelize` an existing model.

Example:
    >>> import kernel_fusion.hf, torch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    >>> model = LlamaModel(config).eval()
    >>> kernel_fusion.hf.kernelize(model)
    ['layers.0.mlp.act_fn', 'layers.0.input_layernorm', 'layers.0.post_attention_layernorm', 'norm']
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from kernel_fusion.hf import layers
from kernel_fusion.hf.folder import write_folder
from kernel_fusion.hf.layers import LAYERS

__all__ = ["LAYERS", "Layer", "kernelize", "layers", "mapping", "register", "write_folder"]

_DEVICES = ("cpu", "cuda", "rocm", "xpu")


@dataclass(frozen=True)
class Layer:
    """A layer of `kernel_fusion.hf.layers`, as mappings of `kernels` hold it.

    Attributes:
        layer_name: one of `LAYERS`.
    """

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The layer's class."""
        return getattr(layers, self.layer_name)  # type: ignore[no-any-return]


def mapping() -> dict[str, dict[str, Layer]]:
    """Each layer on each device, as `kernels` takes them."""
    return {name: dict.fromkeys(_DEVICES, Layer(name)) for name in LAYERS}


def register() -> None:
    """Make `kernels`, and transformers with `use_kernels=True`, use our layers from now on.

    Raises:
        ImportError: `kernels` is missing, or transformers does not accept its version and would silently do nothing.
    """
    kernels = _kernels()
    kernels.register_kernel_mapping(mapping())
    if importlib.util.find_spec("transformers") is not None:
        from transformers.integrations import hub_kernels

        # `use_kernels=True` registers these defaults again, over earlier registrations.
        defaults = hub_kernels.get_kernel_mapping_transformers()
        for name, devices in mapping().items():
            defaults.setdefault(name, {}).update(devices)


def kernelize(model: nn.Module, *, mode: Any = None, device: str | None = None) -> list[str]:
    """Replace the layers of `model` that we have, and return their names.

    Args:
        model: changed in place.
        mode, device: as in `kernels.kernelize`; the default mode is the model's.

    Raises:
        ImportError: as for :func:`register`.
        RuntimeError: no layer of the model was replaced.
    """
    kernels = _kernels()
    if mode is None:
        mode = kernels.Mode.TRAINING if model.training else kernels.Mode.INFERENCE
    with kernels.use_kernel_mapping(mapping()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*No kernel mapping found for layer")  # layers that we lack
        kernels.kernelize(model, mode=mode, device=device)
    forwards = [getattr(layers, name).forward for name in LAYERS]
    served = [name for name, module in model.named_modules() if getattr(module.forward, "__func__", None) in forwards]
    if not served:
        raise RuntimeError(
            f"kernel_fusion.hf: no layer of this {type(model).__name__} took one of ours. It has none of the names "
            f"{', '.join(LAYERS)}, or its classes were made before a fitting version of `kernels` was installed"
        )
    return served


def _kernels() -> Any:
    """The package, in a version that takes effect."""
    if importlib.util.find_spec("kernels") is None:
        raise ImportError("kernel_fusion.hf needs the package kernels (pip install kernels)")
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils import import_utils

        if not import_utils.is_kernels_available():
            least, most = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
            raise ImportError(
                "the installed transformers does not take the installed version of kernels, and would leave every "
                f"layer as it is without a word; it takes {least} <= version < {most}"
            )
    import kernels

    return kernels
