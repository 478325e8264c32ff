"""The lines of `kernel_fusion.explain` for CUDA kernels, from their plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_fusion.backends.cuda import planner
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.row_norm_plan import planned
from kernel_fusion.backends.cuda.tuned import Facts
from kernel_fusion.backends.cuda.user_table import path_of, users_table
from kernel_fusion.core.autocast import widens
from kernel_fusion.core.spec import dtype_name, rounding_for, torch_dtype
from kernel_fusion.core.stages import compiled_in, of_verb


def plan_lines(verb: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The plans of a norm of contiguous tensors, forward and backward with all gradients; no lines for others."""
    if not verb.endswith(("layer_norm", "rms_norm")):
        return ()
    rms = verb.endswith("rms_norm")
    input, out_dtype, shape = (arguments[name] for name in ("input", "out_dtype", "normalized_shape"))
    if out_dtype is None and input.dtype.itemsize == 2 and torch.is_autocast_enabled("cuda"):
        out_dtype = torch.float32 if widens("rms_norm" if rms else "layer_norm", "cuda") else None
    names = {name: _dtype(arguments.get(name)) for name in ("weight", "bias", "residual")}
    normalised = torch_dtype(names["residual"] or dtype_name(input.dtype))
    given = of_verb(arguments) | {"rounding": rounding_for(arguments["rounding"], normalised)}
    group_size = arguments.get("group_size")
    of_columns = group_size is not None and bool(names["weight"] or names["bias"])
    specs = planner.family(
        group_size or int(torch.Size((shape,) if isinstance(shape, int) else tuple(shape)).numel()),
        dtype_name(input.dtype),
        names["weight"],
        rms=rms,
        y=dtype_name(out_dtype or input.dtype),
        residual=names["residual"],
        **compiled_in(given | {"grouped": given["grouped"] or of_columns}),
        offset=arguments["weight_offset"] != 0,
    )
    device, lines = Device.of(input.device.index), []
    for spec in specs[1:]:
        spec = replace(spec, bias=names["bias"], grads=(True, names["weight"] is not None, names["bias"] is not None))
        # The two terms of a sum without further steps and of one dtype share their gradient.
        spec = replace(spec, dresidual=spec.dresidual and (spec.changes_x or spec.residual != spec.x))
        users = users_table(device, spec.direction)
        for each in planner.in_passes(spec) if arguments.get("spread") else [spec]:
            plan, facts = planned(each, planner.contiguous_access(each), device, users)
            which = spec.direction if each.passes == "both" else f"{spec.direction}, {each.passes} pass"
            lines.append(f"{which}: {plan}; by {_origin(facts)}")
    return tuple(lines)


def _origin(facts: Facts) -> str:
    """Where a plan comes from: the rule, and values of tables with their evidence."""
    by_table: dict[str, list[str]] = {}
    for knob, row in facts.came_from.items():
        own = f"{path_of(facts.device.name)}: " if row in facts.users.get(knob, ()) else ""
        by_table.setdefault(own + row[2], []).append(f"{knob} = {row[0]}")
    return "; ".join(["the rule", *(f"{', '.join(values)} ({shown})" for shown, values in by_table.items())])


def _dtype(tensor: Tensor | None) -> str | None:
    return None if tensor is None else dtype_name(tensor.dtype)
