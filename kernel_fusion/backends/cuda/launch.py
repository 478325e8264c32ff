"""The launcher's view of a plan: the fields of a C++ struct (core/fields.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How blocks of a kernel run; each family's plan adds fields for its kernels.

    Attributes:
        threads: threads per block.
        per_block: rows, columns or elements per block, or the most of them if `least_per_block` is less.
        least_per_block: the fewest, so that few rows fill the device; 0: always `per_block`.
        cluster: blocks that work together.
        shared_bytes: dynamic shared memory.
        persistent: start only as many blocks as run at once; each takes turns until nothing is left.
        splits_weight: dweight and dbias have a pass of their own.
        min_blocks: blocks per multiprocessor that registers must allow.
        dependent: starts before the previous kernel has ended, and waits for its results itself.
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
