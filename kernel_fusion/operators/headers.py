"""Writes the operators as a C++ header: the arguments of each as a struct, and the schemas.

The extension defines the operators by these schemas in programs without Python.
`python -m kernel_fusion.operators.headers` writes the file that is in git; a test compares it.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from textwrap import wrap

from kernel_fusion.core.signatures import OPERATORS, Argument, Operator
from kernel_fusion.operators import schemas

PATH = Path(__file__).parents[1] / "native" / "extension" / "schemas.h"
_FRAME = """// The operators of core/signatures.py: the arguments of each as a struct, its call, and their schemas.
// Written by `python -m kernel_fusion.operators.headers`.
#pragma once

// clang-format off
#include <array>
#include <tuple>

#include "operators.h"

namespace kf {{

// call.arguments(f) is f(every argument), and call.tensors(f) is f(every tensor).
{calls}
inline constexpr const char* kSchemas = R"(
{schemas})";

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


def _type(argument: Argument) -> str:
    size = argument.type.removeprefix("bool[").removesuffix("]")
    return f"std::array<bool, {size}>" if size.isdecimal() else _TYPES[argument.type]


def _call(operator: Operator) -> str:
    name = "".join(part.capitalize() for part in operator.name.split("_")) + "Call"
    count = len(operator.results)
    result = "Tensor" if count == 1 else f"std::tuple<{', '.join(['Tensor'] * count)}>"
    fields = []
    for kind, arguments in groupby(operator.arguments, _type):
        mark = "&" * kind.endswith("&")
        fields.append(f"{kind.removesuffix('&')} {', '.join(mark + each.name for each in arguments)};")
    names = [each.name for each in operator.arguments]
    tensors = [each.name for each in operator.arguments if each.type.startswith("Tensor")]
    lines = [
        f'static constexpr const char* kName = "{operator.name}"; using Result = {result};',
        " ".join(fields),
        f"template <class F> auto arguments(F&& f) const {{ return f({', '.join(names)}); }}",
        f"template <class F> auto tensors(F&& f) const {{ return f({', '.join(tensors)}); }}",
    ]
    body = "\n".join("\n".join(wrap(line, 128, initial_indent="  ", subsequent_indent="    ")) for line in lines)
    return f"struct {name} {{\n{body}\n}};\n"


def text() -> str:
    """The text of the header."""
    lines = (f"{name}{schema}\n" for name, schema in schemas.ALL.items())
    return _FRAME.format(calls="".join(map(_call, OPERATORS.values())), schemas="".join(lines))


if __name__ == "__main__":
    PATH.write_text(text())
