"""Writes C++ headers from the tables of Python: names, specs, calls of operators, and the stages around a norm.

A build writes most of them beside its objects. Kernels are compiled without one, so `shared/names.h` is in git, and so
is the digest of the others, by which a library knows whether it is built of them. After a change of the tables,
`python -m kernel_fusion.native.headers` writes both; a test compares them. With a folder as its argument it writes all
headers there, for an editor or a reader.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from kernel_fusion.backends.cuda import sum_partials
from kernel_fusion.backends.cuda.group_norm import GroupNormRule
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.planner import KERNELS
from kernel_fusion.backends.cuda.reduce import ReduceRule
from kernel_fusion.backends.cuda.row_plan import RowPlan
from kernel_fusion.backends.cuda.source import Launch
from kernel_fusion.core import cache
from kernel_fusion.core.activations import CODES
from kernel_fusion.core.fields import COUNTERS, Names, Several, constant, count, is_struct, kinds, literal
from kernel_fusion.core.other_specs import PointwiseAccess, PointwiseSpec
from kernel_fusion.core.signatures import OPERATORS, Argument, Operator
from kernel_fusion.core.spec import VECTOR_BYTES
from kernel_fusion.native import stage_headers

_NATIVE = Path(__file__).parent
_FRAME = """// {about}
// Written by `python -m kernel_fusion.native.headers`.
#pragma once

{includes}namespace kf {{

{body}
}}  // namespace kf
"""
_TYPES = {
    "Tensor": "const Tensor&",
    "Tensor?": "const OptionalTensor&",
    "int": "int64_t",
    "int[]": "at::IntArrayRef",
    "float": "double",
    "float?": "std::optional<double>",
    "bool": "bool",
    "str": "std::string_view",
    "ScalarType": "at::ScalarType",
    "ScalarType?": "OptionalDtype",
}


def _inner(kind: Any) -> Any:
    return kind.kind if isinstance(kind, Several) else kind


def _structs(owner: Any) -> Iterator[Any]:
    """The dataclasses that the fields of `owner` need, then `owner` itself."""
    for kind in map(_inner, kinds(owner).values()):
        if is_struct(kind):
            yield from _structs(kind)
    yield owner


def _struct(owner: Any, number: int | None) -> str:
    lines = [] if number is None else [f"static constexpr int kKernel = {number};"]
    for field in dataclasses.fields(owner):
        kind = kinds(owner)[field.name]
        several = f"[{kind.length}]" if isinstance(kind, Several) else ""
        lines.append(f"{_type(kind)} {field.name}{several}{_initializer(field.default, kind)};")
    return "\n  ".join([f"struct {owner.__name__} {{", *lines]) + "\n};\n"


def _type(kind: Any) -> str:
    inner = _inner(kind)
    name = inner.cpp if isinstance(inner, Names) else inner.__name__ if is_struct(inner) else None
    return name or "int"


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


def _all_structs() -> list[Any]:
    """The dataclasses that are structs of C++, each after those that it needs."""
    keys = [_structs(owner) for spec, kernel in KERNELS.items() for owner in (spec, kernel.access)]
    return [*dict.fromkeys(each for owners in keys for each in owners), ReduceRule, GroupNormRule, Launch]


def _names() -> str:
    """The header of names, which kernels include."""
    fields = [kind for owner in (*_all_structs(), Plan, RowPlan) for kind in map(_inner, kinds(owner).values())]
    enumerations = dict.fromkeys([COUNTERS, *(kind for kind in fields if isinstance(kind, Names) and kind.cpp)])
    lists = {"KF_ACTIVATIONS": tuple(CODES), "KF_COMBINES": kinds(PointwiseSpec)["combine"].names}
    return _FRAME.format(
        about="The names that fields of specs have, and lists of names in the order of their codes.",
        includes="".join(_list(name, of) for name, of in lists.items()),
        body="".join(map(_enumeration, enumerations))
        + _constants({"operands": kinds(PointwiseAccess)["operands"].length}),
    )


def _specs() -> str:
    numbers = {spec: number for number, spec in enumerate(KERNELS)}
    longest = max(count(spec) + count(kernel.access) for spec, kernel in KERNELS.items())
    constants = {"key_fields": longest, "vector_bytes": VECTOR_BYTES, "partial_cols": sum_partials.COLS}
    return "\n".join(_struct(owner, numbers.get(owner)) for owner in _all_structs()) + _constants(constants)


def _type_of(argument: Argument) -> str:
    size = argument.type.removeprefix("bool[").removesuffix("]")
    return f"std::array<bool, {size}>" if size.isdecimal() else _TYPES[argument.type]


def _call(operator: Operator) -> str:
    """The struct of an operator's arguments; x.arguments(f) is f(every argument), x.tensors(f) is f(every tensor)."""
    name = "".join(part.capitalize() for part in operator.name.split("_")) + "Call"
    count = len(operator.results)
    result = "Tensor" if count == 1 else f"std::tuple<{', '.join(['Tensor'] * count)}>"
    names = [each.name for each in operator.arguments]
    tensors = [each.name for each in operator.arguments if each.type.startswith("Tensor")]
    lines = [
        f"struct {name} {{",
        f'static constexpr const char* kName = "{operator.name}";',
        f"using Result = {result};",
        *(f"{_type_of(each)} {each.name};" for each in operator.arguments),
        f"template <class F> auto arguments(F&& f) const {{ return f({', '.join(names)}); }}",
        f"template <class F> auto tensors(F&& f) const {{ return f({', '.join(tensors)}); }}",
    ]
    return "\n  ".join(lines) + "\n};\n"


def _schemas() -> str:
    """The calls, and the schemas, by which the extension defines the operators in programs without Python."""
    schemas = "".join(f"{name}{each.schema}\n" for name, each in OPERATORS.items())
    calls = "".join(map(_call, OPERATORS.values()))
    return f'{calls}\ninline constexpr const char* kSchemas = R"(\n{schemas})";\n'


def texts() -> dict[str, str]:
    """The texts of the headers that a build writes, by the paths by which others include them."""
    stages = "The stages around a norm, which core/spec.py lists"
    headers = {
        "cuda/specs.h": (
            "Specs, accesses and launches: core/spec.py, core/other_specs.py, backends/cuda/source.py define them.",
            '#include "shared/names.h"',
            _specs(),
        ),
        "stage_options.h": (
            f"{stages}: what is no tensor, without a library.",
            '#include <array>\n#include "stages.h"',
            stage_headers.options(),
        ),
        "stage_arguments.h": (
            f"{stages}: an operator's arguments for them, and what a call has of them.",
            '#include <array>\n#include "operators.h"\n#include "stage_options.h"',
            stage_headers.arguments(),
        ),
        "schemas.h": (
            "The operators of core/signatures.py: the arguments of each as a struct, its call, and their schemas.",
            '#include <array>\n#include <tuple>\n#include "operators.h"',
            _schemas(),
        ),
    }
    return {
        path: _FRAME.format(about=about, includes=includes + "\n\n", body=body)
        for path, (about, includes, body) in headers.items()
    }


def write(folder: Path) -> None:
    """Write the headers of a build to a folder."""
    for path, text in texts().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def kept() -> dict[Path, str]:
    """The texts of the files in git by their paths."""
    digest = cache.digest(*(part for each in texts().items() for part in each))
    return {_NATIVE / "shared" / "names.h": _names(), _NATIVE / "headers.digest": digest + "\n"}


if __name__ == "__main__":
    for path, text in kept().items():
        path.write_text(text)
    for folder in sys.argv[1:]:
        write(Path(folder))
