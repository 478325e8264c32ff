"""How a kernel runs: the block of columns, the rows beside each other, the warps, and whether a row is looped over.

One rule for all: a row lies in one block, the power of two that holds it, as long as the program's registers hold what
it keeps of it; short rows share a program. No plan depends on the number of rows, so a new batch size compiles nothing
and cannot change a row's bits. Nothing is tuned at a first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Columns of a row that is read in pieces, and elements of a tile of short rows: enough loads to keep a program busy.
CHUNK = 4096
_SHORT_TILE = 2048
# Elements of a section of a reduction: of a row, and down a block of columns.
ROW_SECTION = 32768
COLUMN_SECTION = 1024
# Elements of a thread, counting one value per element; and the most warps of 32 that a program may have.
_PER_THREAD = 16
_MAX_WARPS = 32


@dataclass(frozen=True)
class Plan:
    """One kernel's layout on the device.

    Attributes:
        rows, block: the tile of a program, rows times columns.
        warps: of the program.
        looped: whether rows are longer than the block.
    """

    rows: int
    block: int
    warps: int
    looped: bool = False

    def __str__(self) -> str:
        loop = ", row by chunks" if self.looped else ""
        return f"tile {self.rows}x{self.block}, {self.warps} warps{loop}"


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _warps(elements: int, per_thread: int, warp_size: int) -> int:
    wanted = _power_of_two(-(-elements // (per_thread * 32)))
    return max(1, min(_MAX_WARPS, max(4, wanted)) * 32 // warp_size)


def row_plan(cols: int, wide: bool, warp_size: int, longest: int = 32768, per_thread: int = _PER_THREAD) -> Plan:
    """For kernels that keep a row: norms and softmax.

    Args:
        cols: N; only the next power of two matters.
        wide: computed in float64, which takes twice the registers.
        warp_size: of the device, 32 or 64.
        longest: the longest row that is kept whole, in float32.
        per_thread: elements of a thread, fewer where a kernel keeps several values of each.
    """
    block = max(16, _power_of_two(int(cols)))
    longest, per_thread = (longest // 2, per_thread // 2) if wide else (longest, per_thread)
    looped = block > longest
    if looped:
        block = CHUNK
    rows = max(1, min(32, _SHORT_TILE // block))
    return Plan(rows, block, _warps(rows * block, per_thread, warp_size), looped)


def norm_forward(cols: int, wide: bool, warp_size: int) -> Plan:
    """Forward keeps h alone."""
    return row_plan(cols, wide, warp_size)


def norm_backward(cols: int, wide: bool, sums: bool, warp_size: int) -> Plan:
    """Backward keeps n, g and, if it `sums` columns, dweight and dbias: five values an element, so shorter rows."""
    return row_plan(cols, wide, warp_size, 8192 if sums else 16384, _PER_THREAD)


def softmax_backward(cols: int, wide: bool, warp_size: int) -> Plan:
    """Backward of softmax keeps y and dy."""
    return row_plan(cols, wide, warp_size, 16384)


def columns(cols: int, warp_size: int) -> Plan:
    """For sums over rows: a tile of 512 columns at most, which a program moves down through its rows."""
    block = max(16, min(512, _power_of_two(int(cols))))
    rows = max(1, min(32, _SHORT_TILE // block))
    return Plan(rows, block, _warps(rows * block, 8, warp_size))


def chain(cols: int | None, warp_size: int) -> Plan:
    """For pointwise chains: 1024 elements a program; `cols` is None for a tensor that is one row."""
    block = 1024 if cols is None else max(16, min(1024, _power_of_two(int(cols))))
    return Plan(max(1, 1024 // block), block, _warps(1024, 8, warp_size))


@dataclass(frozen=True)
class Device:
    """What plans and grids need to know.

    Attributes:
        processors: multiprocessors, or what other vendors have in their place.
        warp_size: threads of a warp.
    """

    processors: int
    warp_size: int

    def programs(self, warps: int) -> int:
        """How many persistent programs: 32 warps of 32 on each multiprocessor, or one program."""
        return self.processors * max(1, 32 * 32 // (warps * self.warp_size))


@lru_cache
def device_of(device: torch.device) -> Device:
    """The device's numbers; those of a small one for the interpreter."""
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.multi_processor_count, 64 if torch.version.hip and properties.warp_size == 64 else 32)
    if device.type == "xpu":  # pragma: gpu
        return Device(torch.xpu.get_device_properties(device).max_compute_units, 32)
    return Device(2, 32)
