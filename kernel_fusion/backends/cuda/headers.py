"""Writes two C++ headers from core/fields.py: the names, for host and device, and the structs, for the host.

`python -m kernel_fusion.backends.cuda.headers` writes the files that are in git; a test compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from kernel_fusion.backends.cuda import stage_headers, sum_partials
from kernel_fusion.backends.cuda.group_norm import GroupNormRule
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.planner import KERNELS
from kernel_fusion.backends.cuda.reduce import ReduceRule
from kernel_fusion.backends.cuda.row_plan import RowPlan
from kernel_fusion.backends.cuda.source import Launch
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.fields import COUNTERS, Names, Several, constant, count, is_struct, kinds, literal
from kernel_fusion.core.other_specs import PointwiseAccess, PointwiseSpec
from kernel_fusion.core.spec import VECTOR_BYTES

_NATIVE = Path(__file__).parents[2] / "native"
_FRAME = """// {about}
// Written by `python -m kernel_fusion.backends.cuda.headers`.
#pragma once

{includes}namespace kf {{

{body}
}}  // namespace kf
"""


def _inner(kind: Any) -> Any:
    return kind.kind if isinstance(kind, Several) else kind


def _structs(owner: Any) -> Iterator[Any]:
    """The dataclasses that the fields of `owner` need, then `owner` itself."""
    for kind in map(_inner, kinds(owner).values()):
        if is_struct(kind):
            yield from _structs(kind)
    yield owner


def _struct(owner: Any, number: int | None) -> str:
    lines = [f"struct {owner.__name__} {{"]
    lines += [] if number is None else [f"  static constexpr int kKernel = {number};"]
    for of_type, fields in groupby(dataclasses.fields(owner), lambda field: _type(kinds(owner)[field.name])):
        members = ", ".join(_member(field, kinds(owner)[field.name]) for field in fields)
        lines += wrap(f"{of_type} {members};", 128, initial_indent="  ", subsequent_indent="      ")
    return "\n".join([*lines, "};\n"])


def _type(kind: Any) -> str:
    inner = _inner(kind)
    name = inner.cpp if isinstance(inner, Names) else inner.__name__ if is_struct(inner) else None
    return name or "int"


def _member(field: Any, kind: Any) -> str:
    several = f"[{kind.length}]" if isinstance(kind, Several) else ""
    return f"{field.name}{several}{_initializer(field.default, kind)}"


def _initializer(default: Any, kind: Any) -> str:
    if default is dataclasses.MISSING:
        return ""
    if is_struct(_inner(kind)):
        return " = {}"
    if isinstance(kind, Several):
        return f" = {{{', '.join(literal(kind.kind, each) for each in default)}}}"
    return f" = {literal(kind, default)}"


def _enumeration(names: Names) -> str:
    known = [*([None] if names.optional else []), *names.names]
    enumerators = [f"{names.enumerator(name)} = {names.code(name)}" for name in known]
    return f"enum class {names.cpp} : int {{ {', '.join(enumerators)} }};\n"


def _list(name: str, of: tuple[str, ...]) -> str:
    return " \\\n  ".join([f"#define {name}(X)", *wrap(" ".join(f"X({each})" for each in of), 120)]) + "\n\n"


def _constants(values: dict[str, int]) -> str:
    return "\n" + "".join(f"inline constexpr int {constant(name)} = {value};\n" for name, value in values.items())


def texts() -> dict[Path, str]:
    """The texts of the headers by their paths."""
    numbers = {spec: number for number, spec in enumerate(KERNELS)}
    keys = [_structs(owner) for spec, kernel in KERNELS.items() for owner in (spec, kernel.access)]
    structs = [*dict.fromkeys(each for owners in keys for each in owners), ReduceRule, GroupNormRule, Launch]
    fields = [kind for owner in (*structs, Plan, RowPlan) for kind in map(_inner, kinds(owner).values())]
    enumerations = dict.fromkeys([COUNTERS, *(kind for kind in fields if isinstance(kind, Names) and kind.cpp)])
    lists = {"KF_ACTIVATIONS": tuple(CODES), "KF_COMBINES": kinds(PointwiseSpec)["combine"].names}
    longest = max(count(spec) + count(kernel.access) for spec, kernel in KERNELS.items())
    constants = {"key_fields": longest, "vector_bytes": VECTOR_BYTES, "partial_cols": sum_partials.COLS}
    slots = {"operands": kinds(PointwiseAccess)["operands"].length}
    names = _FRAME.format(
        about="The names that fields of specs have, and lists of names in the order of their codes.",
        includes="".join(_list(name, of) for name, of in lists.items()),
        body="".join(map(_enumeration, enumerations)) + _constants(slots),
    )
    specs = _FRAME.format(
        about="Specs, accesses and launches: core/spec.py, core/other_specs.py, backends/cuda/source.py define them.",
        includes='#include "shared/names.h"\n\n',
        body="\n".join(_struct(owner, numbers.get(owner)) for owner in structs) + _constants(constants),
    )
    unformatted = "// clang-format off\n"
    about = "The stages around a norm, which core/spec.py lists"
    options = _FRAME.format(
        about=f"{about}: what is no tensor, without a library.",
        includes=f'{unformatted}#include <array>\n\n#include "stages.h"\n\n',
        body=stage_headers.options(),
    )
    arguments = _FRAME.format(
        about=f"{about}: an operator's arguments for them, and what a call has of them.",
        includes=f'{unformatted}#include <array>\n\n#include "operators.h"\n#include "stage_options.h"\n\n',
        body=stage_headers.arguments(),
    )
    extension = _NATIVE / "extension"
    return {
        _NATIVE / "shared" / "names.h": names,
        extension / "cuda" / "specs.h": specs,
        extension / "stage_options.h": options,
        extension / "stage_arguments.h": arguments,
    }


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
