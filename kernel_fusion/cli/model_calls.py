"""The calls that a model makes, for `warmup --model`: of a configuration of transformers, or of a function of the user.

A model of transformers has its real sizes and depth, but parameters of one shape are one, so that its layers take the
memory of one of them. It sees few tokens, since no kernel depends on their number.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

import kernel_fusion as kf
from kernel_fusion.errors import KernelFusionError

_BATCH, _TOKENS = 2, 8
_LAYERS = re.compile(r"(^|_)(n_layers?|layers|depths?|blocks)$")
_MOST_LAYERS = 1000
_MOST_WORDS = 300  # characters of another library's error, which may quote a whole file


def calls_of(model: str, dtypes: Sequence[torch.dtype]) -> list[Callable[[], object]]:
    """Functions that make the calls of a model.

    It is a configuration file of transformers or its folder, made in each of `dtypes`; or `module:function`, called
    once without arguments.
    """
    if Path(model).exists():
        return [_steps(model, _of_configuration(model, dtype), dtype) for dtype in dtypes]
    module, _, name = model.partition(":")
    sys.path.insert(0, "")  # as `python -m` has it, and a console script has not
    try:
        return [getattr(importlib.import_module(module), name)]
    except (ImportError, AttributeError, ValueError) as error:
        expected = "expected a configuration file, its folder, or module:function"
        raise _refused(f"{expected}, got {model!r}: {error}") from error


def _refused(problem: str) -> typer.BadParameter:
    return typer.BadParameter(problem, param_hint="--model")


def _of_configuration(path: str, dtype: torch.dtype) -> Any:
    """The patched model of a configuration, with parameters that share memory."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise _refused("a configuration needs transformers (pip install transformers)") from error
    with _in_a_sentence(f"{path} is no configuration of a model of transformers"):
        _check_depth(path)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = _class_of(transformers, path, config.architectures)
    with _in_a_sentence(f"{path} describes no model that {kind.__name__} can be"):
        with default_dtype(dtype), _without_parameters():
            model = kind.from_config(config) if kind is transformers.AutoModel else kind(config)
        _fill(model)
        kf.patch(model)
        return model


def _check_depth(path: str) -> None:
    """Raise ValueError if a number of layers in the file exceeds that of any model; transformers makes lists of it."""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    waiting: list[Any] = [json.loads(file.read_text(encoding="utf-8"))]
    while waiting:
        values = waiting.pop()
        for name, value in values.items() if isinstance(values, dict) else ():
            waiting.append(value)
            numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int | float)]
            if _LAYERS.search(name) and any(number > _MOST_LAYERS for number in numbers):
                raise ValueError(f"`{name}` must be at most {_MOST_LAYERS}, got {value}")


def _class_of(transformers: Any, path: str, architectures: Any) -> Any:
    """The model class that a configuration names, or AutoModel if it names none."""
    if architectures is None:
        return transformers.AutoModel
    name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise _refused(f"`architectures` of {path} must name a model class of transformers, got {architectures!r}")
    return kind


@contextmanager
def _in_a_sentence(problem: str) -> Iterator[None]:
    """Report whatever a configuration makes transformers raise as a fault of the configuration."""
    try:
        yield
    except (typer.BadParameter, KernelFusionError):
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        raise _refused(f"{problem}: {type(error).__name__}: {words[:_MOST_WORDS]}") from error


def _steps(path: str, model: Any, dtype: torch.dtype) -> Callable[[], None]:
    """A function that calls the model once for inference, then runs forward and backward of training."""

    def step() -> None:
        with _in_a_sentence(f"the model of {path} cannot run"):
            run()

    def run() -> None:
        inputs = _inputs(model, dtype)
        with torch.inference_mode():
            model.eval()(**inputs)
        results = [t for t in tree_leaves(model.train()(**inputs)) if isinstance(t, Tensor) and t.requires_grad]
        results[0].float().square().mean().backward()

    return step


def _inputs(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    tokens, name = torch.ones(_BATCH, _TOKENS, dtype=torch.int64), model.main_input_name
    if name == "input_ids":
        return {name: tokens} | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})
    if name == "pixel_values":
        size = model.config.image_size
        sides = size if isinstance(size, Sequence) else (size, size)
        return {name: torch.randn(_BATCH, model.config.num_channels, *sides, dtype=dtype)}
    raise _refused(f"no inputs are known for {type(model).__name__}, which takes {name}; a module:function can call it")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make this the dtype of parameters, and of tensors made from Python's numbers, within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Give modules that are made within the context parameters without memory; their buffers are real."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _fill(model: nn.Module) -> None:
    """Let all parameters of one shape and dtype be one, with random values."""
    known: dict[Any, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kind = tuple(parameter.shape), parameter.dtype, parameter.requires_grad
                if kind not in known:
                    values = torch.randn(parameter.shape, dtype=parameter.dtype) * 0.02
                    known[kind] = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = known[kind]
