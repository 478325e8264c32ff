"""The operators `torch.ops.kernel_fusion.*`: schemas defined at import, implementations that load when first needed.

Defining schemas in Python keeps `import kernel_fusion` free of any build and lets `torch.export.load` read a program
in a fresh process. Each operator gets one Python stub on the two catch-all dispatch keys (`Autograd` and
`CompositeExplicitAutograd`). The stub loads the extension, whose C++ kernels sit on the specific keys (AutogradCPU,
CUDA, ...) and from then on win over the stub; so nothing is ever overridden. Where the extension has no kernel (other
devices) or cannot be built, the stub itself serves the call through the eager definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends import eager
from kernel_fusion.core import arguments
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.errors import BuildError
from kernel_fusion.native import loader

# Not SymInt[] shapes but the number of normalised dimensions: a new row count then never means a new trace.
_NORM = "(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, {eps}, float weight_offset=0., "
_STAGES = "str pre_activation, str activation, float dropout_p, Tensor? seed"
_AFFINE = "int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, ScalarType? out_dtype, bool rms"
_PART_STAGES = "str pre_activation='identity', str activation='identity', float dropout_p=0., Tensor? seed=None"
_CHAIN = "Tensor? b, str combine, str activation, float scale, float dropout_p, Tensor? seed"
VERBS = {
    "layer_norm": _NORM.format(eps="float eps=1e-05") + "ScalarType? out_dtype=None) -> Tensor",
    "rms_norm": _NORM.format(eps="float? eps=None") + "ScalarType? out_dtype=None) -> Tensor",
    # Both norms with what stands around them. `residual` of the result is h, without elements where none was given.
    "staged_row_norm": f"(Tensor input, Tensor? residual, {_AFFINE}, {_STAGES}) -> (Tensor output, Tensor residual)",
    # dropout(scale * f(a, b)); see backends/eager/pointwise.py.
    "pointwise": f"(Tensor a, {_CHAIN}) -> Tensor",
    "reduce": "(Tensor input, int[] dim, bool keepdim, str kind, ScalarType? dtype) -> Tensor",
    "softmax": "(Tensor input, Tensor? mask, float scale, bool causal) -> Tensor",
}
# What the verbs are made of below autograd. `stats` is fp32 (fp64 for fp64) of shape (2, *rows), mean and rstd, or
# (1, *rows), rstd alone, for RMSNorm: one tensor, because one allocation costs less than two. Results that nobody wants
# have no elements. Backward normalises `input` again, which is h where there is a residual, and else x. It takes x
# itself where there are a residual and a pre-activation, and bias where there is an activation.
_PARTS = {
    "row_norm_fwd": "(Tensor input, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
    f"ScalarType? out_dtype, bool rms, Tensor? residual=None, {_PART_STAGES}) -> (Tensor y, Tensor stats, Tensor h)",
    "row_norm_bwd": "(Tensor dy, Tensor input, Tensor stats, int num_dims, Tensor? weight, ScalarType? bias_dtype, "
    "float weight_offset, bool rms, bool[4] output_mask, ScalarType? x_dtype=None, Tensor? dh=None, Tensor? x=None, "
    f"Tensor? bias=None, bool has_residual=False, {_PART_STAGES}) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)",
    # `bits` of what backward needs of a and b: whether the slope of the activation, which has two values, is that at 1.
    # Backward takes them, or a result whose value tells the slope, as the operand of a chain of one.
    "pointwise_fwd": f"(Tensor a, {_CHAIN}) -> (Tensor y, Tensor bits)",
    "pointwise_bwd": f"(Tensor dy, Tensor a, {_CHAIN}, bool[2] output_mask) -> (Tensor da, Tensor db)",
    "softmax_bwd": "(Tensor dy, Tensor y, float scale, bool leaves_out=False) -> Tensor",
}
# The eager definitions as operators, so that C++ can reach them: they decompose into ATen under every transform.
_REFERENCES: dict[str, tuple[str, Callable[..., Any]]] = {
    "row_norm_reference": (f"(Tensor input, {_AFFINE}) -> Tensor", eager.row_norm),
    "staged_row_norm_reference": (VERBS["staged_row_norm"], eager.staged_row_norm),
    "pointwise_reference": (VERBS["pointwise"], eager.pointwise),
    "reduce_reference": (VERBS["reduce"], eager.reduce),
    "softmax_reference": (VERBS["softmax"], eager.softmax),
}

library = torch.library.Library("kernel_fusion", "DEF")


def _operator(name: str) -> Any:
    return getattr(torch.ops.kernel_fusion, name).default


for _name, _schema in (VERBS | _PARTS).items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
for _name, (_schema, _definition) in _REFERENCES.items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(_name, arguments.checked(_operator(_name), _definition), "CompositeImplicitAutograd")

layer_norm: Callable[..., Tensor] = torch.ops.kernel_fusion.layer_norm.default
rms_norm: Callable[..., Tensor] = torch.ops.kernel_fusion.rms_norm.default


def default_eps(input: Tensor) -> float:
    """What `eps=None` of rms_norm stands for: the machine epsilon of the compute type."""
    return torch.finfo(compute_dtype(input.dtype)).eps


def reference_call(name: str, *args: Any) -> Any:
    """The verb `name`, called with an operator's arguments, by the eager definition."""
    if f"{name}_reference" in _REFERENCES:
        definition: Any = _REFERENCES[f"{name}_reference"][1]
        return definition(*args)
    input, num_dims, weight, bias, eps, weight_offset, out_dtype = args
    if eps is None:
        eps = default_eps(input)
    return eager.row_norm(input, num_dims, weight, bias, eps, weight_offset, out_dtype, name == "rms_norm")


# What serves the verbs on a device type where the extension cannot be built, if not the eager definition. Called like
# `reference_call`. Backends put themselves here.
without_extension: dict[str, Callable[..., Any]] = {}


def _bind(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the schema's order, defaults filled in: the dispatcher leaves trailing defaults out."""
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    bound = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [bound[a.name] for a in arguments]


def _verb_stub(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def stub(*args: Any, **kwargs: Any) -> Any:
        device, is_strided = args[0].device.type, args[0].layout == torch.strided
        is_native, was_loaded = device in NATIVE_DEVICES, loader.is_loaded()
        if is_native and is_strided and not was_loaded and loader.load():
            return operator(*args, **kwargs)
        given = _bind(operator, args, kwargs)
        if is_native and (was_loaded or not is_strided):  # the extension has no kernel for such tensors
            return arguments.checked(operator, partial(reference_call, name))(*given)
        serve: Callable[..., Any] = without_extension.get(device, reference_call)
        return serve(name, *given)

    return stub


def _kind(t: Tensor) -> str:
    return f"{'nested ' if t.is_nested else ''}{t.layout} on {t.device}".removeprefix("torch.")


def _part_stub(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def stub(*args: Any) -> Any:
        if loader.is_loaded():
            raise RuntimeError(
                f"kernel_fusion::{name} takes dense tensors of one device, {', '.join(NATIVE_DEVICES[:-1])} or "
                f"{NATIVE_DEVICES[-1]}; got {', '.join(_kind(t) for t in args if isinstance(t, Tensor))}"
            )
        if loader.load():
            return operator(*args)
        raise BuildError(f"kernel_fusion::{name} needs the C++ extension: {loader.error()}")

    return stub


# The devices whose kernels the extension registers (`meta` stands for tracing).
NATIVE_DEVICES = ("cpu", "cuda", "meta")

for _name in VERBS:
    for _key in ("Autograd", "CompositeExplicitAutograd"):
        library.impl(_name, _verb_stub(_name), _key)
for _name in _PARTS:
    library.impl(_name, _part_stub(_name), "CompositeExplicitAutograd")


def _forget_stubs(_: object) -> None:
    """Under a tracer's Python dispatcher an operator remembers the stub it found; the kernels are there now."""
    for name in VERBS | _PARTS:
        _operator(name)._dispatch_cache.clear()


loader.on_load(_forget_stubs)


def _register_meta() -> None:
    """Shapes and dtypes for tracing of the verbs that do not get theirs from C++: those of the PyTorch calls."""

    def pointwise(a: Tensor, b: Tensor | None, *_: Any) -> Tensor:
        return torch.empty_like(a) if b is None else torch.empty_like(torch.add(a, b))

    def pointwise_fwd(a: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        y = pointwise(a, b, *rest)
        return y, y.new_empty((y.numel() + 7) // 8, dtype=torch.uint8)

    def pointwise_bwd(dy: Tensor, a: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        wants = rest[-1]
        return (
            torch.empty_like(dy if a.dtype == torch.uint8 else a) if wants[0] else dy.new_empty(0),
            torch.empty_like(b) if b is not None and wants[1] else dy.new_empty(0),
        )

    def reduce(input: Tensor, dim: list[int], keepdim: bool, _: str, dtype: torch.dtype | None) -> Tensor:
        return torch.empty_like(input.sum(dim, keepdim, dtype=dtype or input.dtype))

    def softmax(input: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    def softmax_bwd(dy: Tensor, y: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(y, memory_format=torch.contiguous_format)

    def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            arguments.one_device(function.__name__, args)
            return function(*args)

        return checked

    for function in (pointwise, pointwise_fwd, pointwise_bwd, reduce, softmax, softmax_bwd):
        library.impl(function.__name__, on_one_device(function), "Meta")


_register_meta()
