"""How a kernel runs: the block of columns, the rows beside each other, the warps, and whether a row is looped over.

One rule for all: a row lies in one block, the power of two that holds it, as long as the program's registers hold what
it keeps of it; short rows share a program. No plan depends on the number of rows, so a new batch size compiles nothing
and cannot change a row's bits. Nothing is tuned at a first call. What was measured for the norms is in docs/triton.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Columns of a row that is read in pieces, and elements of a tile of short rows: enough loads to keep a program busy.
CHUNK = 4096
_SHORT_TILE = 2048
# The same of the norms, in float32. Chunks so large that the second reading of a row finds it in the L2 cache.
_NORM_CHUNK = 16384
_NORM_SHORT_TILE = 512
# Bytes of a tile that a thread of a norm has: enough of them on their way for the memory system.
_THREAD_BYTES = 64
# What backward's programs have of the rows at a time, at most.
_BACKWARD_TILE_BYTES = 32768
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
        early: whether weight and bias are asked for before the row's statistics are there.
        stages: of the pipeline through shared memory in which a persistent program fetches rows ahead; 1 for none.
        resident: programs on each multiprocessor, where they are persistent; 0 where each has one tile.
    """

    rows: int
    block: int
    warps: int
    looped: bool = False
    early: bool = False
    stages: int = 1
    resident: int = 0

    def __str__(self) -> str:
        loop = ", row by chunks" if self.looped else ""
        return f"tile {self.rows}x{self.block}, {self.warps} warps{loop}"


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _warps(elements: int, per_thread: int, warp_size: int) -> int:
    wanted = _power_of_two(-(-elements // (per_thread * 32)))
    return max(1, min(_MAX_WARPS, max(4, wanted)) * 32 // warp_size)


def row_plan(cols: int, wide: bool, warp_size: int, longest: int = 32768, per_thread: int = _PER_THREAD) -> Plan:
    """For kernels that keep a row: softmax, and reductions.

    Args:
        cols: N; only the next power of two matters.
        wide: computed in float64, which takes twice the registers.
        warp_size: of the device, 32 or 64.
        longest: the longest row that is kept whole, in float32.
        per_thread: elements of a thread, fewer where a kernel keeps several values of each.
    """
    block = _block(cols)
    longest, per_thread = (longest // 2, per_thread // 2) if wide else (longest, per_thread)
    looped = block > longest
    if looped:
        block = CHUNK
    rows = max(1, min(32, _SHORT_TILE // block))
    return Plan(rows, block, _warps(rows * block, per_thread, warp_size), looped)


def norm_forward(cols: int, itemsize: int, warp_size: int) -> Plan:
    """One row, by 8 warps at most: beyond, waiting for each other costs more than longer shares of a row.

    Weight and bias are asked for early where their registers are few; those of 16 bits would be widened early, too.

    Args:
        cols: N; only the next power of two matters.
        itemsize: bytes of an element of the input.
        warp_size: of the device.
    """
    block = _block(cols)
    longest = _NORM_CHUNK // _width(itemsize)
    if block > longest:
        return Plan(1, longest, _narrow(16, warp_size), looped=True)
    rows = max(1, _NORM_SHORT_TILE // block)
    early = itemsize > 2 and block <= longest // 2
    return Plan(rows, block, _norm_warps(rows * block * itemsize, 8, warp_size), early=early)


def norm_backward(cols: int, itemsize: int, warp_size: int) -> Plan:
    """Backward keeps n and g of its rows and, in persistent programs, dweight and dbias; arguments as for forward.

    A program has two rows at least, which wait for each other's sums once, unless they exceed 32 KB. Two rows of 16-bit
    elements take more registers than two programs of a multiprocessor have: fetching ahead keeps some of them in shared
    memory (of which devices with warps of 64, AMD's, have too little).

    Rows whose columns a program cannot sum as well have a kernel of their own for that, with `norm_columns`.
    """
    block = _block(cols)
    longest = _NORM_CHUNK // _width(itemsize)
    if block > longest:
        return Plan(1, longest, _narrow(32, warp_size), looped=True)
    if block > longest // 2:
        return Plan(1, block, _norm_warps(block * itemsize, 16, warp_size))
    rows = max(2, min(8, 2 * _SHORT_TILE // block))
    if rows * block * itemsize > _BACKWARD_TILE_BYTES:
        return Plan(1, block, _narrow(32, warp_size), resident=1)
    warps = _norm_warps(rows * block * itemsize, 16, warp_size)
    in_warps = warps * warp_size // 32
    ahead = rows == 2 and itemsize == 2 and in_warps < 16 and warp_size == 32
    return Plan(rows, block, warps, stages=2 if ahead else 1, resident=max(1, min(4, 16 // in_warps)))


def norm_columns(itemsize: int, warp_size: int) -> Plan:
    """For dweight and dbias of rows that are looped over: a program moves down through the rows of its columns."""
    return Plan(4, 2048 // _width(itemsize), _narrow(8, warp_size), resident=2)


def partial_sums(warp_size: int) -> Plan:
    """For adding partial rows: many of few columns at a time, since there are few columns."""
    return Plan(128, 16, _narrow(4, warp_size))


def _block(cols: int) -> int:
    return max(16, _power_of_two(int(cols)))


def _width(itemsize: int) -> int:
    """Registers of an element in the type that is computed in."""
    return max(1, itemsize // 4)


def _narrow(warps: int, warp_size: int) -> int:
    """So many warps of 32, in warps of the device."""
    return max(1, warps * 32 // warp_size)


def _norm_warps(tile_bytes: int, most: int, warp_size: int) -> int:
    return _narrow(max(1, min(most, tile_bytes // (_THREAD_BYTES * 32))), warp_size)


def softmax_backward(cols: int, wide: bool, warp_size: int) -> Plan:
    """Backward of softmax keeps y and dy."""
    return row_plan(cols, wide, warp_size, 16384)


def columns(cols: int, warp_size: int) -> Plan:
    """For sums over rows: a tile of 512 columns at most, which a program moves down through its rows."""
    block = max(16, min(512, _power_of_two(int(cols))))
    rows = max(1, min(32, _SHORT_TILE // block))
    warps = _warps(rows * block, 8, warp_size)
    return Plan(rows, block, warps, resident=max(1, 32 * 32 // (warps * warp_size)))


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

    def programs(self, plan: Plan) -> int:
        """How many persistent programs."""
        return self.processors * plan.resident


@lru_cache
def device_of(device: torch.device) -> Device:
    """The device's numbers; those of a small one for the interpreter."""
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        properties = torch.cuda.get_device_properties(device)
        return Device(properties.multi_processor_count, 64 if torch.version.hip and properties.warp_size == 64 else 32)
    if device.type == "xpu":  # pragma: gpu
        return Device(torch.xpu.get_device_properties(device).max_compute_units, 32)
    return Device(2, 32)
