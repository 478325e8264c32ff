"""The source of a kernel (a struct of constants and one instantiation of a header's template), and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """The source of a kernel.

    Attributes:
        name: the kernel's name, which profilers show.
        header: the name of a header in native/kernels, and of its template.
        args: the name of the struct that is the kernel's parameter.
        types: the types of the tensors' elements by name; None if a tensor is absent.
        constants: the constants by name, as expressions in C++.
        threads, min_blocks: the threads of a block, and the blocks per multiprocessor for which registers must suffice.
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
    """How the blocks of a kernel run. The plan of each family adds fields of its own.

    Attributes:
        threads: the threads of a block.
        per_block: the most rows, columns or elements that a block takes at a time.
        least_per_block: the fewest of them, so that few rows fill the device. 0 means always `per_block`.
        cluster: the number of blocks that work together.
        shared_bytes: the dynamic shared memory of a block.
        persistent: whether no more blocks start than run at once, so that each takes several turns.
        splits: whether dweight and dbias, or codes, are made in a pass of their own.
        min_blocks: the blocks per multiprocessor for which registers must suffice.
        dependent: whether the kernel starts early and waits for the one before it.
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
