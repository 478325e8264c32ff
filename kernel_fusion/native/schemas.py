"""The operators `torch.ops.kernel_fusion.*`: schemas defined at import, implementations that load when first needed.

Defining schemas in Python keeps `import kernel_fusion` free of any build and lets `torch.export.load` read a program
in a fresh process. Each operator gets one Python stub on the two catch-all dispatch keys (`Autograd` and
`CompositeExplicitAutograd`). The stub loads the extension, whose C++ kernels sit on the specific keys (AutogradCPU,
CUDA, ...) and from then on win over the stub; so nothing is ever overridden. Where the extension has no kernel (other
devices) or cannot be built, the stub itself serves the call through the eager definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_fusion.backends import eager
from kernel_fusion.core.spec import compute_dtype
from kernel_fusion.errors import BuildError
from kernel_fusion.native import loader

# Not SymInt[] shapes but the number of normalised dimensions: a new row count then never means a new trace.
_VERBS = {
    "layer_norm": "(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
    "float weight_offset=0., ScalarType? out_dtype=None) -> Tensor",
    "rms_norm": "(Tensor input, int num_dims, Tensor? weight=None, Tensor? bias=None, float? eps=None, "
    "float weight_offset=0., ScalarType? out_dtype=None) -> Tensor",
}
# What the verbs are made of below autograd. `stats` is fp32 (fp64 for fp64) of shape (2, *rows), mean and rstd, or
# (1, *rows), rstd alone, for RMSNorm: one tensor, because one allocation costs less than two.
_PARTS = {
    "row_norm_fwd": "(Tensor input, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
    "ScalarType? out_dtype, bool rms) -> (Tensor y, Tensor stats)",
    "row_norm_bwd": "(Tensor dy, Tensor input, Tensor stats, int num_dims, Tensor? weight, ScalarType? bias_dtype, "
    "float weight_offset, bool rms, bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)",
}
# The eager definition as an operator, so that C++ can reach it: it decomposes into ATen under every transform.
_REFERENCE = (
    "row_norm_reference(Tensor input, int num_dims, Tensor? weight, Tensor? bias, float eps, float weight_offset, "
    "ScalarType? out_dtype, bool rms) -> Tensor"
)

library = torch.library.Library("kernel_fusion", "DEF")
for _name, _schema in (_VERBS | _PARTS).items():
    library.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)
library.define(_REFERENCE, tags=torch.Tag.pt2_compliant_tag)
library.impl("row_norm_reference", eager.row_norm, "CompositeImplicitAutograd")

layer_norm: Callable[..., torch.Tensor] = torch.ops.kernel_fusion.layer_norm.default
rms_norm: Callable[..., torch.Tensor] = torch.ops.kernel_fusion.rms_norm.default


def default_eps(input: torch.Tensor) -> float:
    """What `eps=None` of rms_norm stands for: the machine epsilon of the compute type."""
    return torch.finfo(compute_dtype(input.dtype)).eps


def reference_call(name: str, *args: Any) -> torch.Tensor:
    """The verb `name`, called with an operator's arguments, by the eager definition."""
    input, num_dims, weight, bias, eps, weight_offset, out_dtype = args
    if eps is None:
        eps = default_eps(input)
    return eager.row_norm(input, num_dims, weight, bias, eps, weight_offset, out_dtype, name == "rms_norm")


# What serves the verbs on a device type where the extension cannot be built, if not the eager definition. Called like
# `reference_call`. Backends put themselves here.
without_extension: dict[str, Callable[..., torch.Tensor]] = {}


def _bind(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the schema's order, defaults filled in: the dispatcher leaves trailing defaults out."""
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    bound = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [bound[a.name] for a in arguments]


def _verb_stub(name: str) -> Callable[..., Any]:
    operator: Any = getattr(torch.ops.kernel_fusion, name).default

    def stub(*args: Any, **kwargs: Any) -> Any:
        device, layout = args[0].device.type, args[0].layout
        if device in NATIVE_DEVICES and layout == torch.strided and loader.load():
            return operator(*args, **kwargs)
        serve: Callable[..., Any] = without_extension.get(device, reference_call)
        return serve(name, *_bind(operator, args, kwargs))

    return stub


def _part_stub(name: str) -> Callable[..., Any]:
    operator: Any = getattr(torch.ops.kernel_fusion, name).default

    def stub(*args: Any) -> Any:
        if loader.load():
            return operator(*args)
        raise BuildError(f"kernel_fusion::{name} needs the C++ extension: {loader.error()}")

    return stub


# The devices whose kernels the extension registers (`meta` stands for tracing).
NATIVE_DEVICES = ("cpu", "cuda", "meta")

for _name in _VERBS:
    for _key in ("Autograd", "CompositeExplicitAutograd"):
        library.impl(_name, _verb_stub(_name), _key)
for _name in _PARTS:
    library.impl(_name, _part_stub(_name), "CompositeExplicitAutograd")


def _forget_stubs(_: object) -> None:
    """Under a tracer's Python dispatcher an operator remembers the stub it found; the kernels are there now."""
    for name in _VERBS | _PARTS:
        getattr(torch.ops.kernel_fusion, name).default._dispatch_cache.clear()


loader.on_load(_forget_stubs)


def _register_vmap(name: str) -> None:
    operator: Any = getattr(torch.ops.kernel_fusion, name).default

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """Rows batch trivially; a batched weight or bias takes the eager definition, by broadcasting."""
        input, num_dims, weight, bias, eps, offset, out_dtype = _bind(operator, args, {})
        input_dim, _, weight_dim, bias_dim = (*in_dims, None, None)[:4]
        input = input.expand(info.batch_size, *input.shape) if input_dim is None else input.movedim(input_dim, 0)
        if weight_dim is None and bias_dim is None:
            return operator(input, num_dims, weight, bias, eps, offset, out_dtype), 0

        def spread(parameter: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
            if parameter is None or dim is None:
                return parameter
            batched = parameter.movedim(dim, 0)
            return batched.reshape(info.batch_size, *[1] * (input.dim() - num_dims - 1), *batched.shape[1:])

        weight, bias = spread(weight, weight_dim), spread(bias, bias_dim)
        eps = default_eps(input) if eps is None else eps
        return eager.row_norm_formula(input, num_dims, weight, bias, eps, offset, out_dtype, name == "rms_norm"), 0

    torch.library.register_vmap(f"kernel_fusion::{name}", rule, lib=library)


for _name in _VERBS:
    _register_vmap(_name)
