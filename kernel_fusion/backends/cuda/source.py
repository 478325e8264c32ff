"""A kernel's source, a struct of constants and one instantiation of a header's template, and its launch."""

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


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How blocks run; each family's plan adds its own fields.

    Attributes:
        threads: of a block.
        per_block: rows, columns or elements of a block, at most.
        least_per_block: the fewest, so that few rows fill the device; 0: always `per_block`.
        cluster: blocks that work together.
        shared_bytes: dynamic.
        persistent: no more blocks than run at once, which take turns.
        splits: dweight and dbias, or codes, have a pass of their own.
        min_blocks: per multiprocessor that registers must allow.
        dependent: starts early, and waits for the previous kernel.
    """

    threads: int = 32
    per_block: int = 1
    least_per_block: int = 0
    cluster: int = 1
    shared_bytes: int = 0
    persistent: bool = False
    splits: bool = False
    min_blocks: int = 1
    dependent: bool = False
