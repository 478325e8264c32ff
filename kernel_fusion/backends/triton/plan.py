"""How a kernel runs: the block of columns, the rows beside each other, the warps, and whether a row is looped over.

One rule for all: a row lies in one block, the power of two that holds it, as long as the program's registers hold what
it keeps of it; short rows share a program. Rows of the norms, often 3, 5 or 7 times a power of two, lie in a few
smaller blocks. No plan depends on the number of rows, so a new batch size compiles nothing and cannot change a row's
bits; how many persistent programs share the rows does, and is not compiled in. Nothing is tuned at a first call. What
was measured for the norms is in docs/notebook/triton.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Columns of a row that is read in pieces, and elements of a tile of short rows: enough loads to keep a program busy.
CHUNK = 4096
_SHORT_TILE = 2048
# Of the norms: the largest block; the longest row of 32-bit registers, 32 in each of 1024 threads; and the chunk of
# longer rows, so large that the second reading finds it in the L2 cache.
_NORM_BLOCK = 4096
_LONGEST_ROW = 32768
_NORM_CHUNK = 16384
# Of shared memory, at most, what a program of the norms needs besides rows fetched ahead.
_EXCHANGED_BYTES = 16384
# Elements of a section of a reduction: of a row, and down a block of columns.
ROW_SECTION = 32768
COLUMN_SECTION = 1024
# Registers that a thread can have.
_MOST_REGISTERS = 255
# Elements of a thread, counting one value per element; and the most warps of 32 that a program may have.
_PER_THREAD = 16
_MAX_WARPS = 32
# Bytes of a sector, which memory gives at once.
_SECTOR = 32


@dataclass(frozen=True)
class Plan:
    """One kernel's layout on the device.

    Attributes:
        rows, block: the tile of a program, rows times columns.
        warps: of the program.
        pieces: blocks that a row takes beside each other.
        looped: whether rows are longer than that, and read a block at a time.
        slices: of a block, where the moments of a row are those of its slices, joined: each is what a warp loads with
            one instruction.
        early: whether weight and bias are asked for before the row's statistics are there.
        again: whether backward reads a row again rather than keep it beside the sums of its columns.
        stages: of the pipeline through shared memory in which a persistent program fetches rows ahead; 1 for none.
        resident: programs on each multiprocessor, where they are persistent; 0 where each has one tile.
    """

    rows: int
    block: int
    warps: int
    pieces: int = 1
    looped: bool = False
    slices: int = 1
    early: bool = False
    again: bool = False
    stages: int = 1
    resident: int = 0

    @property
    def releases(self) -> bool:
        """Whether the programs of forward let the next kernel start as soon as they run, not when they have ended.

        Those of one warp are many, and each has to say so: 65536 rows of 2 KB took 1.24 of the floor for it, 1.02
        without. Programs that share rows are few: those of the next kernel, which wait beside them, then find room
        unevenly, and some multiprocessors have twice the work of others (4096x512 in fp32: 1.26, and 1.00 without).
        """
        return self.rows == 1 and self.warps > 1

    @property
    def chained(self) -> bool:
        """Whether persistent programs are launched while the kernel before them still runs.

        Not where rows are read again: the compiler spills more registers behind the wait.
        """
        return self.resident > 0 and not self.again

    def __str__(self) -> str:
        tile = f"tile {self.rows}x{self.block}" + (f" {self.pieces} times" if self.pieces > 1 else "")
        notes = {"row by chunks": self.looped, "row read again": self.again, "rows fetched ahead": self.stages > 1}
        return ", ".join([tile, f"{self.warps} warps", *(note for note, holds in notes.items() if holds)])


def _has_room(fetched: int, shared_bytes: int) -> bool:
    return fetched <= shared_bytes - _EXCHANGED_BYTES


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
    return Plan(rows, block, _warps(rows * block, per_thread, warp_size), looped=looped)


def norm_forward(cols: int, itemsize: int, warp_size: int, rms: bool) -> Plan:
    """16 elements a thread until there are 8 warps, whose threads then take as many as they have registers for.

    A row of 2 KB is left to one warp, which waits for nobody; shorter ones share a program that reads as much, since
    a multiprocessor takes 32 programs and no more. Weight and bias are asked for before the row's statistics are there
    where registers allow it: the more a program has, the fewer run beside each other. Those of 16 bits are widened
    early, too. Slices join the moments of LayerNorm's warps in one exchange, and cost registers and instructions: rows
    of 8 KB, none of which is masked, do better without, and with 4 warps (16 bits) or 8. So does LayerNorm of 4096
    elements of 32 bits, by 16 warps that ask late; RMSNorm, which keeps less of a row, has 16 warps from 3072 on.

    Args:
        cols: N.
        itemsize: bytes of an element of the input.
        warp_size: of the device.
        rms: RMSNorm, which has a weight and most often no bias.
    """
    cols, width, narrow = int(cols), _width(itemsize), itemsize <= 2  # an int: in a traced program it may be a symbol
    if cols > _LONGEST_ROW // width:
        return Plan(1, _NORM_CHUNK // width, _narrow(16, warp_size), looped=True)
    rows = 1 if cols > 768 else max(2, 2048 // (_block(cols) * min(4, itemsize)))
    unsliced = not rms and width == 1 and cols * itemsize == 8192
    tall = itemsize == 4 and (cols >= 3072 if rms else cols == 4096)
    if cols * itemsize <= 2048:
        warps = 2 if narrow and rows > 2 else 1
    elif unsliced:
        warps = 4 if narrow else 8
    else:
        warps = _at_most(8, -(-rows * cols * width // 512))
    if tall or cols * width > (16384 if narrow else 8191):
        warps = 32 if cols * width > 16384 and not narrow else 16
    each = cols / (32 * warps)  # elements of a thread, of the row
    if not narrow:
        early = (warps <= 4 or each <= 20) and (rms or not tall)
    elif rms:
        early = each <= 32
    else:
        early = warps <= 4 and each > 16
    early = early and rows == 1
    sliced = early and not rms and warps > 1 and cols <= 4096 and not unsliced
    most = 512 * warps // itemsize if sliced else _NORM_BLOCK
    least = (16 if tall else 8) * 32 * max(1, warps // rows)  # bytes
    block, pieces = _pieces(cols, least // itemsize, most)
    return Plan(rows, block, _narrow(warps, warp_size), pieces, slices=warps if sliced else 1, early=early)


def norm_backward(
    cols: int, itemsize: int, warp_size: int, rms: bool, staged: bool, fetched: int, shared_bytes: int
) -> Plan:
    """Backward keeps n and g of its rows and, in persistent programs, dweight and dbias.

    A program has several rows, which wait for each other's sums once, as far as its registers go. Its warps lie beside
    each other, never one above the other: they would exchange the sums of their columns at every tile. The next rows
    are fetched ahead through shared memory, where that has room; those of 16 bits beyond 1024 columns only where two of
    them take more registers than two programs of a multiprocessor have.

    Rows whose columns a program cannot sum as well have a kernel of their own for that, with `norm_columns`.

    Args:
        cols, itemsize, warp_size: as for forward.
        rms: RMSNorm, which sums one value per column instead of two, and so does with longer rows.
        staged: with an activation or dropout, whose arithmetic takes registers too.
        fetched: bytes that are read per column of a row, weight and bias included.
        shared_bytes: of shared memory that a program may have.
    """
    cols, width = int(cols), _width(itemsize)
    longest = _NORM_CHUNK // 2 if staged else _LONGEST_ROW if rms else _NORM_CHUNK
    if cols > longest // width:
        whole = cols % _NORM_CHUNK == 0
        chunk = _NORM_CHUNK if whole else _NORM_BLOCK
        return Plan(1, chunk // width, _narrow(32 if whole else 16, warp_size), looped=True)
    if cols > 1024:
        return _long_backward(cols, itemsize, warp_size, rms, fetched, shared_bytes)
    return _short_backward(cols, itemsize, warp_size, rms, fetched, shared_bytes)


def _short_backward(cols: int, itemsize: int, warp_size: int, rms: bool, fetched: int, shared_bytes: int) -> Plan:
    """Up to 1024 columns: a thread reads 16 bytes of each of several rows."""
    block, narrow = _block(cols), itemsize <= 2
    warps = max(1, block * itemsize // 512)
    rows = max(4, 512 // block) if narrow else min(8, 4096 // block)
    # Warps of a multiprocessor; short rows of float64 have no registers for more.
    together = 16 if narrow or warps > 4 or (itemsize == 4 and block <= 64) else 8
    # Copies of less than 16 bytes, and of 16-bit rows that begin within a sector, are slow. 16-bit rows that fill a
    # block of 256 or more have loads enough on their way.
    if narrow:
        gains = cols * itemsize % _SECTOR == 0 and (cols < block or 64 <= block <= 128)
    else:
        gains = itemsize == 4 and cols % 4 == 0 and (cols < 512 or (cols == 512 and rms))
    stages = 2 if gains and _has_room(rows * block * fetched, shared_bytes) else 1
    return Plan(rows, block, _narrow(warps, warp_size), stages=stages, resident=max(2, together // warps))


def _long_backward(cols: int, itemsize: int, warp_size: int, rms: bool, fetched: int, shared_bytes: int) -> Plan:
    narrow = itemsize <= 2
    warps = 4 if cols <= (3072 if narrow else 1536) else 8 if cols <= 5120 else 16 if cols <= 24576 else 32
    if narrow and cols <= 1536:
        warps = 2
    block, pieces = _pieces(cols, (16 if warps == 16 else 8) * 32 * warps // itemsize)
    # A second row where a thread then has 32 elements at most. As many wide ones would take more than the 128 registers
    # that two programs of 8 warps leave it.
    fits = block * pieces <= 512 * warps and block * itemsize >= 512 * warps
    rows = 2 if fits and (narrow or warps == 16 or cols <= 2048) else 1
    again = cols > (12288 if narrow and not rms else 16384)
    gains = itemsize == 4 or (narrow and rows == 2 and warps < 16 and not rms)
    has_room = _has_room(rows * block * pieces * fetched, shared_bytes)
    stages = 2 if gains and has_room and not again else 1
    resident = max(1, 16 // warps)
    return Plan(rows, block, _narrow(warps, warp_size), pieces, again=again, stages=stages, resident=resident)


def norm_columns(itemsize: int, warp_size: int) -> Plan:
    """For dweight and dbias of rows that are looped over: a program moves down through the rows of its columns."""
    return Plan(4, 2048 // _width(itemsize), _narrow(8, warp_size), resident=2)


def partial_sums(warp_size: int) -> Plan:
    """For adding partial rows: many of few columns at a time, since there are few columns."""
    return Plan(128, 16, _narrow(4, warp_size))


def _block(cols: int) -> int:
    return max(16, _power_of_two(int(cols)))


def _pieces(cols: int, least: int, most: int = _NORM_BLOCK) -> tuple[int, int]:
    """The blocks of a row: the largest up to `most` of which an eighth at most lies outside it, if 8 of `least` can."""
    if cols <= 256:
        return _block(cols), 1
    block = most
    while block > max(128, least, _block(cols) // 8) and -cols % block > cols // 8:
        block //= 2
    return block, -(-cols // block)


def _at_most(most: int, wanted: int) -> int:
    """The largest power of two up to both."""
    return 1 << (min(most, wanted).bit_length() - 1)


def _width(itemsize: int) -> int:
    """Registers of an element in the type that is computed in."""
    return max(1, itemsize // 4)


def _narrow(warps: int, warp_size: int) -> int:
    """So many warps of 32, in warps of the device."""
    return max(1, warps * 32 // warp_size)


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
        shared_bytes: of shared memory that a program may have; 0 where nothing is to be fetched ahead.
        registers: of a multiprocessor; 0 where their number is left to the compiler.
        chained: whether a kernel may be launched while the one before it still runs.
    """

    processors: int
    warp_size: int
    shared_bytes: int = 0
    registers: int = 0
    chained: bool = False

    def programs(self, plan: Plan, rows: int, beside: int = 1) -> int:
        """How many persistent programs share so many rows, of each of the `beside` parts that a row is cut in.

        One for each tile until a multiprocessor has four, then one for every other tile: each writes a row of partial
        sums, which is read again.
        """
        most, few = (max(1, self.processors * each // beside) for each in (plan.resident, 4))
        # In a traced program the number of rows may be a symbol, and the choice must not depend on its value.
        tiles = -(-rows // plan.rows)
        few = torch.sym_max(1, torch.sym_min(tiles, few))
        return torch.sym_min(most, torch.sym_max(few, tiles // 2))  # type: ignore[no-any-return]

    def registers_of(self, plan: Plan) -> int | None:
        """How many a thread may have so that all persistent programs run at once; None where that is no question.

        The compiler may well choose more: 168 or 128 for the same kernel, from one version to the next.
        """
        if plan.resident <= 1 or not self.registers:
            return None
        most = self.registers // (self.warp_size * plan.warps * plan.resident)
        return most if most < _MOST_REGISTERS else None


@lru_cache
def device_of(device: torch.device) -> Device:
    """The device's numbers; those of a small one for the interpreter."""
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Device(properties.multi_processor_count, 64 if properties.warp_size == 64 else 32)
        return Device(
            properties.multi_processor_count,
            32,
            shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            registers=properties.regs_per_multiprocessor,  # type: ignore[attr-defined]
            chained=properties.major >= 9,
        )
    if device.type == "xpu":  # pragma: gpu
        return Device(torch.xpu.get_device_properties(device).max_compute_units, 32)
    return Device(2, 32)
