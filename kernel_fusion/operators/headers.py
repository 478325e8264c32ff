"""Writes the schemas as a C++ header, by which the extension defines the operators in programs without Python.

`python -m kernel_fusion.operators.headers` writes the file that is in git; a test compares it.
"""

from __future__ import annotations

from pathlib import Path

from kernel_fusion.operators import schemas

PATH = Path(__file__).parents[1] / "native" / "extension" / "schemas.h"
_FRAME = """// The operators' schemas, a line each: operators/schemas.py says what they mean.
// Written by `python -m kernel_fusion.operators.headers`.
#pragma once

namespace kf {{

inline constexpr const char* kSchemas = R"(
{schemas})";

}}  // namespace kf
"""


def text() -> str:
    """The text of the header."""
    lines = (f"{name}{schema}\n" for name, schema in schemas.ALL.items())
    return _FRAME.format(schemas="".join(lines))


if __name__ == "__main__":
    PATH.write_text(text())
