"""How a kernel runs: columns per block, rows side by side, warps, and whether it loops over a row.

A row, or several short ones, lies in one block, the power of two that holds it, if registers hold what is kept. Rows of
norms, often 3, 5 or 7 times a power of two, lie in a few smaller blocks. No plan depends on the number of rows, so a
new batch size compiles nothing and changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Columns of a piece of a row, and elements of a tile of short rows, to keep a program busy.
CHUNK = 4096
_SHORT_TILE = 2048
# For norms: the largest block; the longest row, with 32 registers in each of 1024 threads; the chunk of longer rows,
# which the second reading finds in the L2 cache.
_NORM_BLOCK = 4096
_LONGEST_ROW = 32768
_NORM_CHUNK = 16384
# Shared memory of a norm, apart from rows fetched ahead.
_EXCHANGED_BYTES = 16384
ROW_SECTION, COLUMN_SECTION = 32768, 1024  # of reductions
LONGEST_HEAD = 8192
_MOST_REGISTERS = 255
# Elements per thread, at one value each; warps per program.
_PER_THREAD = 16
_MAX_WARPS = 32
# Bytes of a transfer.
_SECTOR = 32


@dataclass(frozen=True)
class Plan:
    """One kernel's layout on the device.

    Attributes:
        rows, block: a program's tile, rows times columns.
        warps: of a program, of 32 threads each.
        pieces: blocks side by side that hold a row.
        looped: whether rows are longer than that and read block by block.
        slices: parts of a block that a warp loads with one instruction each.
        early: whether weight and bias are loaded before the row's statistics.
        again: whether backward reads a row again instead of keeping it.
        stages: of the pipeline that fetches rows ahead in a persistent program; 1 for none.
        resident: persistent programs per multiprocessor; 0 if each program has one tile.
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
        """Whether forward lets the next kernel start as soon as it runs.

        One-warp programs are many, and each release costs time.
        """
        return self.rows == 1 and self.warps > 1

    @property
    def chained(self) -> bool:
        """Whether persistent programs start while the kernel before runs; rows read again would then spill more."""
        return self.resident > 0 and not self.again

    def __str__(self) -> str:
        tile = f"tile {self.rows}x{self.block}" + (f" {self.pieces} times" if self.pieces > 1 else "")
        notes = {"row by chunks": self.looped, "row read again": self.again, "rows fetched ahead": self.stages > 1}
        return ", ".join([tile, f"{self.warps} warps", *(note for note, holds in notes.items() if holds)])


def _has_room(fetched: int, shared_bytes: int) -> bool:
    return fetched <= shared_bytes - _EXCHANGED_BYTES


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _warps(elements: int, per_thread: int) -> int:
    return min(_MAX_WARPS, max(4, _power_of_two(-(-elements // (per_thread * 32)))))


def row_plan(cols: int, wide: bool, longest: int = 32768) -> Plan:
    """For kernels that keep a row: softmax and reductions.

    Args:
        wide: computed in float64, which takes twice the registers.
        longest: the longest row that is kept whole, in float32.
    """
    block = _block(cols)
    longest, per_thread = (longest // 2, _PER_THREAD // 2) if wide else (longest, _PER_THREAD)
    looped = block > longest
    if looped:
        block = CHUNK
    rows = max(1, min(32, _SHORT_TILE // block))
    return Plan(rows, block, _warps(rows * block, per_thread), looped=looped)


def norm_forward(cols: int, itemsize: int, rms: bool) -> Plan:
    """16 elements per thread up to 8 warps, then as many as registers allow.

    A 2 KB row takes one warp, which waits for nobody; shorter rows share a program. Weight and bias
    are loaded early if that costs no program. Slices save LayerNorm an exchange between warps, but cost registers.
    """
    cols, width, narrow = int(cols), _width(itemsize), itemsize <= 2  # it may be a symbol
    if cols > _LONGEST_ROW // width:
        return Plan(1, _NORM_CHUNK // width, 16, looped=True)
    rows = 1 if cols > 768 else max(2, 2048 // (_block(cols) * min(4, itemsize)))
    unsliced = not rms and width == 1 and cols * itemsize == 8192
    tall = itemsize == 4 and (cols >= 3072 if rms else cols == 4096)
    if cols * itemsize <= 2048:
        warps = 2 if narrow and rows > 2 else 1
    elif unsliced:
        warps = 4 if narrow else 8
    else:
        warps = 1 << (min(8, -(-rows * cols * width // 512)).bit_length() - 1)
    if tall or cols * width > (16384 if narrow else 8191):
        warps = 32 if cols * width > 16384 and not narrow else 16
    each = cols / (32 * warps)  # per thread
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
    return Plan(rows, block, warps, pieces, slices=warps if sliced else 1, early=early)


def norm_backward(cols: int, itemsize: int, rms: bool, staged: bool, fetched: int, shared_bytes: int) -> Plan:
    """Backward keeps n and g of its rows and, in persistent programs, dweight and dbias.

    A program has as many rows as registers allow, which wait together for their sums. Its warps lie side by side;
    stacked, they would exchange column sums at every tile. The next rows are fetched ahead if there is room and it
    gains. If a program cannot also sum a row's columns, `norm_columns` does.

    Args:
        rms: RMSNorm, with one sum per column.
        staged: with an activation or dropout, which take registers.
        fetched: bytes read per column.
    """
    cols, width = int(cols), _width(itemsize)
    longest = _NORM_CHUNK // 2 if staged else _LONGEST_ROW if rms else _NORM_CHUNK
    if cols > longest // width:
        whole = cols % _NORM_CHUNK == 0
        chunk = _NORM_CHUNK if whole else _NORM_BLOCK
        return Plan(1, chunk // width, 32 if whole else 16, looped=True)
    if cols > 1024:
        return _long_backward(cols, itemsize, rms, fetched, shared_bytes)
    return _short_backward(cols, itemsize, rms, fetched, shared_bytes)


def _short_backward(cols: int, itemsize: int, rms: bool, fetched: int, shared_bytes: int) -> Plan:
    """Up to 1024 columns: a thread reads 16 bytes of several rows."""
    block, narrow = _block(cols), itemsize <= 2
    warps = max(1, block * itemsize // 512)
    rows = max(4, 512 // block) if narrow else min(8, 4096 // block)
    # Warps per multiprocessor; short float64 rows have registers for no more.
    together = 16 if narrow or warps > 4 or (itemsize == 4 and block <= 64) else 8
    # Copies below 16 bytes, and of narrow rows that begin within a sector, are slow; blocks full of columns have enough
    # loads in flight anyway.
    if narrow:
        gains = cols * itemsize % _SECTOR == 0 and (cols < block or 64 <= block <= 128)
    else:
        gains = itemsize == 4 and cols % 4 == 0 and (cols < 512 or (cols == 512 and rms))
    stages = 2 if gains and _has_room(rows * block * fetched, shared_bytes) else 1
    return Plan(rows, block, warps, stages=stages, resident=max(2, together // warps))


def _long_backward(cols: int, itemsize: int, rms: bool, fetched: int, shared_bytes: int) -> Plan:
    narrow = itemsize <= 2
    warps = 4 if cols <= (3072 if narrow else 1536) else 8 if cols <= 5120 else 16 if cols <= 24576 else 32
    if narrow and cols <= 1536:
        warps = 2
    block, pieces = _pieces(cols, (16 if warps == 16 else 8) * 32 * warps // itemsize)
    # A second row while a thread has at most 32 elements, so that two programs of 8 warps fit.
    fits = block * pieces <= 512 * warps and block * itemsize >= 512 * warps
    rows = 2 if fits and (narrow or warps == 16 or cols <= 2048) else 1
    again = cols > (12288 if narrow and not rms else 16384)
    gains = itemsize == 4 or (narrow and rows == 2 and warps < 16 and not rms)
    has_room = _has_room(rows * block * pieces * fetched, shared_bytes)
    stages = 2 if gains and has_room and not again else 1
    resident = max(1, 16 // warps)
    return Plan(rows, block, warps, pieces, again=again, stages=stages, resident=resident)


def norm_columns(itemsize: int) -> Plan:
    """For dweight and dbias of looped rows: a program moves down the rows."""
    return Plan(4, 2048 // _width(itemsize), 8, resident=2)


def norm_apply(cols: int, itemsize: int, *, warps: int) -> Plan:
    """For what follows the sums of parts of rows: 4096 elements per program, half as many of float64."""
    most = _NORM_BLOCK // _width(itemsize)
    block, _ = _pieces(int(cols), 128, most)
    return Plan(most // block, block, warps, looped=int(cols) > block)


def partial_sums() -> Plan:
    """For adding partial rows: many rows of few columns."""
    return Plan(128, 16, 4)


def _block(cols: int) -> int:
    return max(16, _power_of_two(int(cols)))


def _pieces(cols: int, least: int, most: int = _NORM_BLOCK) -> tuple[int, int]:
    """A row's blocks: the largest with at most an eighth outside the row, if 8 of `least` suffice."""
    if cols <= 256:
        return _block(cols), 1
    block = most
    while block > max(128, least, _block(cols) // 8) and -cols % block > cols // 8:
        block //= 2
    return block, -(-cols // block)


def _width(itemsize: int) -> int:
    """Registers per element in the compute type."""
    return max(1, itemsize // 4)


def softmax_backward(cols: int, wide: bool) -> Plan:
    """It keeps y and dy."""
    return row_plan(cols, wide, 16384)


def columns(cols: int) -> Plan:
    """For sums over rows: a program moves at most 512 columns down its rows."""
    block = max(16, min(512, _power_of_two(int(cols))))
    rows = max(1, min(32, _SHORT_TILE // block))
    warps = _warps(rows * block, 8)
    return Plan(rows, block, warps, resident=max(1, 32 // warps))


def chain(cols: int | None) -> Plan:
    """1024 elements per program; `cols` is None for a tensor that is one row."""
    block = 1024 if cols is None else max(16, min(1024, _power_of_two(int(cols))))
    return Plan(max(1, 1024 // block), block, _warps(1024, 8))


def quantize(cols: int, itemsize: int, divided: bool) -> Plan:
    """For codes: a row in one block, as for softmax, or in independent parts, `divided`.

    A thread has 128 bytes of a row.
    """
    layout = row_plan(cols, itemsize > 4)
    block, rows = layout.block, layout.rows
    if divided:
        block = max(128, min(4096, _block(cols)))
        rows = max(1, _SHORT_TILE // block)
    warps = max(1, min(_MAX_WARPS, rows * block * itemsize // (128 * 32)))
    return Plan(rows, block, warps, looped=cols > block)


@dataclass(frozen=True)
class RotaryPlan(Plan):
    """The layout of the rotary embedding; programs are persistent where weights' gradients are summed.

    Attributes:
        rows, block: heads of query or key in a tile, and its columns for each element of the pairs.
        rest: its columns for what is not rotated.
        tiles: of a token. Without sums, each is a program.
    """

    rest: int = 0
    tiles: int = 1

    def __str__(self) -> str:
        return f"{self.tiles} tiles of {self.rows}x{2 * self.block + self.rest} for each token, {self.warps} warps"


def rotary(half: int, cols: int, heads: tuple[int, int], warp_size: int) -> RotaryPlan:
    """Threads have 8 pairs each: 16 bytes of either element in fp16 and bf16.

    A tile has heads for at most 1024 pairs; fewer where more than an eighth of all tiles would be empty.

    Args:
        half, cols: rotated pairs of columns, and all columns of a head.
        heads: of query and key; 0 for no key.
    """
    block, others = _power_of_two(int(half)), int(cols) - 2 * int(half)
    rest = _power_of_two(others) if others else 0
    counts = [int(count) for count in heads]
    most = max(1, 1024 // (block + rest // 2))
    rows = min(1 << most.bit_length() - 1, _power_of_two(max(counts)))  # a tile's sizes are powers of two

    def tiles() -> int:
        return sum(-(-count // rows) for count in counts)

    while rows > 1 and 8 * (tiles() * rows - sum(counts)) > tiles() * rows:
        rows //= 2
    warps = max(1, min(8, rows * block // 256))
    resident = max(2, 16 // max(1, warps * 32 // warp_size))
    return RotaryPlan(rows, block, warps, resident=resident, rest=rest, tiles=tiles())


@dataclass(frozen=True)
class Device:
    """A device, as plans and grids need to know it.

    Attributes:
        processors: multiprocessors, or other vendors' equivalent.
        shared_bytes: a program's shared memory; 0 to fetch nothing ahead.
        registers: of a multiprocessor; 0 to leave their number to the compiler.
        chained: whether a kernel may start while the one before it runs.
        rounds_float8: whether one instruction makes float8 of two numbers.
    """

    processors: int
    warp_size: int
    shared_bytes: int = 0
    registers: int = 0
    chained: bool = False
    rounds_float8: bool = False

    def warps(self, count: int) -> int:
        """`count` warps of 32 threads as the device's."""
        return max(1, count * 32 // self.warp_size)

    def programs(self, plan: Plan, rows: int, beside: int = 1) -> int:
        """How many persistent programs share the rows of each of the `beside` parts of a row.

        One per tile until a multiprocessor has four, then one per two: each writes a row of partial sums.
        """
        most, few = (max(1, self.processors * each // beside) for each in (plan.resident, 4))
        # A traced number of rows is a symbol, whose value must not be asked for.
        tiles = -(-rows // plan.rows)
        few = torch.sym_max(1, torch.sym_min(tiles, few))
        return torch.sym_min(most, torch.sym_max(few, tiles // 2))  # type: ignore[no-any-return]

    def registers_of(self, plan: Plan) -> int | None:
        """Registers per thread that let all persistent programs run at once, or None."""
        if plan.resident <= 1 or not self.registers:
            return None
        most = self.registers // (32 * plan.warps * plan.resident)
        return most if most < _MOST_REGISTERS else None


@lru_cache
def device_of(device: torch.device) -> Device:
    """The device's properties; the interpreter's are a small device's."""
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
            rounds_float8=(properties.major, properties.minor) >= (8, 9),
        )
    if device.type == "xpu":  # pragma: gpu
        return Device(torch.xpu.get_device_properties(device).max_compute_units, 32)
    return Device(2, 32)
