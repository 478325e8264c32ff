"""A kernel's source: a struct of constants, and one instantiation of a header's template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A kernel's source.

    Attributes:
        name: for profilers.
        header: in native/kernels; it also names the template.
        args: its parameter's struct.
        types: of tensors' elements, None if absent.
        constants: as C++ writes them.
        threads: per block; min_blocks, per multiprocessor, bounds the registers.
    """

    name: str
    header: str
    args: str
    types: dict[str, str | None]
    constants: Mapping[str, int | str]
    threads: int
    min_blocks: int = 1

    def text(self) -> str:
        """The CUDA source."""
        lines = [f"  using {key} = kf::{value or 'absent'};" for key, value in self.types.items()]
        lines += [
            f"  static constexpr auto {key} = {value if isinstance(value, str) else int(value)};"
            for key, value in self.constants.items()
        ]
        return (
            f'#include "kernels/{self.header}.cuh"\n'
            + "struct Plan {\n"
            + "\n".join(lines)
            + "\n};\n"
            + f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.min_blocks})\n'
            + f"{self.name}(const __grid_constant__ kf::{self.args} args) {{ kf::{self.header}<Plan>(args); }}\n"
        )
