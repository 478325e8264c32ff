"""The launcher's view of a plan."""

from __future__ import annotations

from dataclasses import dataclass


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
