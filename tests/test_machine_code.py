"""The comparison of machine code before and after a change (tests/machine_code.py)."""

from __future__ import annotations

import pytest
from machine_code import code_of, compare

from kernel_fusion.backends.cuda.compile import compile_source

_SOURCE = 'extern "C" __global__ void kernel(float* p) {{ p[threadIdx.x] {operation}= 3.0f; }}'


def test_code_changes_with_the_instructions_alone() -> None:
    """A comment leaves the code as it is, another operation does not; and code is found at all."""
    plain, commented, other = (
        code_of(compile_source(source, 90)[0])
        for source in (
            _SOURCE.format(operation="+"),
            "// x\n" + _SOURCE.format(operation="+"),
            _SOURCE.format(operation="*"),
        )
    )
    assert len(plain) > 64
    assert plain == commented
    assert plain != other


def test_differences_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels whose code differs count, and those that one file alone has."""
    assert compare({"norms a": "1", "norms b": "2", "norms c": "3"}, {"norms a": "1", "norms b": "9"}) == 2
    assert "changed: norms b" in capsys.readouterr().out
