"""What the launcher has to know of a plan: the fields of a struct in C++ as well (core/fields.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How blocks of a kernel run; the plan of each family adds what its kernels want to know.

    Attributes:
        threads: threads per block.
        per_block: rows, columns or elements per block; where `least_per_block` is less, that many at most.
        least_per_block: at least, so that few rows fill the device; 0: always `per_block`.
        cluster: blocks that work together.
        shared_bytes: dynamic shared memory.
        persistent: no more blocks than run at once, each of which takes its turn until nothing is left.
        splits_weight: dweight and dbias take a pass of their own.
        min_blocks: blocks per multiprocessor that registers must allow.
        dependent: launched before the kernel before it has ended, for whose results it waits by itself.
    """

    threads: int = 32
    per_block: int = 1
    least_per_block: int = 0
    cluster: int = 1
    shared_bytes: int = 0
    persistent: bool = False
    splits_weight: bool = False
    min_blocks: int = 1
    dependent: bool = False
