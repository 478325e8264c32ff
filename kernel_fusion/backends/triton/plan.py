"""The layout of a kernel on the device: the tile of a program, its warps, and whether it loops over a row.

A row lies in one block of columns, whose size is the next power of two, as long as the registers of a program hold what
the kernel keeps of the row. Rows of norms, whose lengths are often 3, 5 or 7 times a power of two, lie in up to eight
smaller blocks side by side. Several short rows share a program, and longer rows are read block by block, twice. No plan
depends on the number of rows, so a new batch size compiles nothing and changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

# Columns of a block of a row that is read block by block.
CHUNK = 4096
# Elements of a tile of short rows. Fewer would not keep a program busy.
_SHORT_TILE = 2048
# The largest block of a norm.
_NORM_BLOCK = 4096
# The longest row of float32 of which a kernel keeps one number for each element.
_LONGEST_ROW = 32768
# The longest row that forward of a norm keeps, at 32 registers in each of 1024 threads.
_LONGEST_FORWARD = 32768
# Columns of a block of longer rows in forward. The second reading of the row finds it in the L2 cache.
_NORM_CHUNK = 16384
# The longest row that backward of a norm keeps, and the longest one with an activation or dropout.
_LONGEST_BACKWARD, _LONGEST_STAGED = 16384, 8192
# Elements that one program of a reduction adds up, along a row or down the columns.
ROW_SECTION, COLUMN_SECTION = 32768, 1024
# The longest head that the rotary embedding takes.
LONGEST_HEAD = 8192
# The most registers that a thread can have.
_MOST_REGISTERS = 255
# Elements of a thread, in a kernel that keeps one number for each element.
_PER_THREAD = 16
# Warps of the largest program.
_MAX_WARPS = 32


@dataclass(frozen=True)
class Plan:
    """The layout of one kernel on the device.

    Attributes:
        rows: The rows of a program's tile.
        block: The columns of a program's tile, a power of two.
        warps: The warps of a program, each counted as 32 threads.
        pieces: How many blocks side by side hold a row that the program keeps.
        looped: Whether rows are longer than the program keeps, and are read block by block.
        resident: How many persistent programs each multiprocessor has. With 0, every program has one tile.
    """

    rows: int
    block: int
    warps: int
    pieces: int = 1
    looped: bool = False
    resident: int = 0

    def __str__(self) -> str:
        times = f" {self.pieces} times" if self.pieces > 1 else ""
        chunks = ", row by chunks" if self.looped else ""
        return f"tile {self.rows}x{self.block}{times}, {self.warps} warps{chunks}"


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def _warps(elements: int, per_thread: int) -> int:
    """The warps of a program with this many elements, of which each thread has at most `per_thread` if it can be."""
    return min(_MAX_WARPS, max(4, _power_of_two(-(-elements // (per_thread * 32)))))


def row_plan(cols: int, wide: bool, kept: int = 1) -> Plan:
    """The plan of a kernel that keeps a row in one block, unless the row is too long.

    Args:
        cols: The length of a row.
        wide: Whether the kernel computes in float64, which takes twice the registers.
        kept: How many numbers the kernel keeps for each element.
    """
    block = _block(cols)
    longest, per_thread = _LONGEST_ROW // kept, _PER_THREAD
    if wide:
        longest, per_thread = longest // 2, per_thread // 2
    looped = block > longest
    if looped:
        block = CHUNK
    rows = max(1, min(32, _SHORT_TILE // block))
    return Plan(rows, block, _warps(rows * block, per_thread), looped=looped)


def norm_forward(cols: int, itemsize: int) -> Plan:
    """The plan of a norm's forward pass: 16 elements for each thread up to 8 warps, then up to 32.

    One warp has a row of up to 2 KB, so that no warp waits for another. Shorter rows share a program.

    Args:
        cols: The length of a row.
        itemsize: The bytes of an element of the input.
    """
    cols, width, narrow = int(cols), _width(itemsize), itemsize <= 2  # a traced length is a symbol
    if cols > _LONGEST_FORWARD // width:
        return Plan(1, _NORM_CHUNK // width, 16, looped=True)
    rows = 1 if cols > 768 else max(2, 2048 // (_block(cols) * min(4, itemsize)))
    if cols * itemsize <= 2048:
        warps = 2 if narrow and rows > 2 else 1
    elif cols * width > (16384 if narrow else 8191):
        warps = 32 if cols * width > 16384 and not narrow else 16
    else:
        warps = 1 << (min(8, -(-rows * cols * width // 512)).bit_length() - 1)
    least = 8 * 32 * max(1, warps // rows)  # bytes, 8 for each thread
    block, pieces = _pieces(cols, least // itemsize)
    return Plan(rows, block, warps, pieces)


def norm_backward(cols: int, itemsize: int, staged: bool) -> Plan:
    """The plan of a norm's backward pass, which keeps two numbers for each element of its rows.

    Persistent programs also keep the sums of dweight and dbias. A program has as many rows as its registers allow,
    which wait together for their sums. The warps of a program lie side by side in a row, because stacked warps would
    exchange the sums of columns at every tile. `norm_columns` sums the columns of rows that are too long for that.

    Args:
        cols: The length of a row.
        itemsize: The bytes of an element of the normalised tensor.
        staged: Whether there is an activation or dropout, which takes registers.
    """
    cols, width, narrow = int(cols), _width(itemsize), itemsize <= 2
    if cols > (_LONGEST_STAGED if staged else _LONGEST_BACKWARD) // width:
        return Plan(1, _NORM_BLOCK // width, 16, looped=True)
    if cols <= 1024:  # a thread reads 16 bytes of each of several rows
        block = _block(cols)
        warps = max(1, block * itemsize // 512)
        rows = max(4, 512 // block) if narrow else min(8, 4096 // block)
        # Short rows of float64 have registers for no more than 8 warps on a multiprocessor.
        together = 16 if narrow or warps > 4 or (itemsize == 4 and block <= 64) else 8
        return Plan(rows, block, warps, resident=max(2, together // warps))
    warps = 4 if cols <= (3072 if narrow else 1536) else 8 if cols <= 5120 else 16
    if narrow and cols <= 1536:
        warps = 2
    block, pieces = _pieces(cols, (16 if warps == 16 else 8) * 32 * warps // itemsize)
    # A second row while a thread has at most 32 elements, so that two programs of 8 warps fit.
    fits = block * pieces <= 512 * warps and block * itemsize >= 512 * warps
    rows = 2 if fits and (narrow or warps == 16 or cols <= 2048) else 1
    return Plan(rows, block, warps, pieces, resident=max(1, 16 // warps))


def norm_columns(itemsize: int) -> Plan:
    """The plan of the kernel that sums the columns of looped rows: its programs move down the rows."""
    return Plan(4, 2048 // _width(itemsize), 8, resident=2)


def partial_sums() -> Plan:
    """The plan of the kernel that adds partial rows: many rows of few columns."""
    return Plan(128, 16, 4)


def _block(cols: int) -> int:
    """The block that holds a whole row."""
    return max(16, _power_of_two(int(cols)))


def _pieces(cols: int, least: int, most: int = _NORM_BLOCK) -> tuple[int, int]:
    """The block of which several hold a row, and how many do.

    It is the largest one that leaves at most an eighth of the blocks' columns outside the row, if there is one of at
    least `least` columns of which eight suffice.
    """
    if cols <= 256:
        return _block(cols), 1
    block = most
    while block > max(128, least, _block(cols) // 8) and -cols % block > cols // 8:
        block //= 2
    return block, -(-cols // block)


def _width(itemsize: int) -> int:
    """How many registers of 32 bits an element takes in the type that the kernel computes in."""
    return max(1, itemsize // 4)


def columns(cols: int) -> Plan:
    """The plan of a kernel that sums over rows: a program moves at most 512 columns down its rows."""
    block = max(16, min(512, _power_of_two(int(cols))))
    rows = max(1, min(32, _SHORT_TILE // block))
    warps = _warps(rows * block, 8)
    return Plan(rows, block, warps, resident=max(1, 32 // warps))


def pointwise(cols: int | None) -> Plan:
    """The plan of a pointwise chain: 1024 elements for each program; `cols` is None for a tensor that is one row."""
    block = 1024 if cols is None else max(16, min(1024, _power_of_two(int(cols))))
    return Plan(max(1, 1024 // block), block, _warps(1024, 8))


def quantize(cols: int, itemsize: int, divided: bool) -> Plan:
    """The plan of the kernel that makes codes of a tensor; a thread has 128 bytes of a row.

    Args:
        cols: The length of a row.
        itemsize: The bytes of an element of the tensor.
        divided: Whether blocks of a row are independent. If they are not, a row lies in one block.
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
    """The layout of the rotary embedding. Programs are persistent if they sum gradients of weights.

    Attributes:
        rows: The heads of a tile, which are all of the query or all of the key.
        block: The columns of a tile for the first element of each pair, and as many for the second.
        rest: The columns of a tile for what is not rotated.
        tiles: The tiles of a token. Without sums of weights' gradients, each is a program.
    """

    rest: int = 0
    tiles: int = 1

    def __str__(self) -> str:
        return f"{self.tiles} tiles of {self.rows}x{2 * self.block + self.rest} for each token, {self.warps} warps"


def rotary(half: int, cols: int, heads: tuple[int, int], warp_size: int) -> RotaryPlan:
    """The plan of the rotary embedding: a thread has 8 pairs, 16 bytes of either element in fp16 and bf16.

    A tile has heads for at most 1024 pairs, and fewer if more than an eighth of all tiles would be empty.

    Args:
        half: How many pairs of columns of a head are rotated.
        cols: All columns of a head.
        heads: How many heads the query and the key have; 0 for no key.
        warp_size: The threads of a warp of the device.
    """
    block, others = _power_of_two(int(half)), int(cols) - 2 * int(half)
    rest = _power_of_two(others) if others else 0
    counts = [int(count) for count in heads]
    most = max(1, 1024 // (block + rest // 2))
    rows = min(1 << most.bit_length() - 1, _power_of_two(max(counts)))  # the sizes of a tile are powers of two

    def tiles() -> int:
        return sum(-(-count // rows) for count in counts)

    while rows > 1 and 8 * (tiles() * rows - sum(counts)) > tiles() * rows:
        rows //= 2
    warps = max(1, min(8, rows * block // 256))
    resident = max(2, 16 // max(1, warps * 32 // warp_size))
    return RotaryPlan(rows, block, warps, resident=resident, rest=rest, tiles=tiles())


@dataclass(frozen=True)
class DeviceLimits:
    """The numbers of a device that grids and launches depend on.

    Attributes:
        processors: How many multiprocessors the device has, or what other vendors have for them.
        warp_size: The threads of a warp.
        registers: The registers of a multiprocessor, or 0 to leave the registers of a thread to the compiler.
        rounds_float8: Whether one instruction makes float8 of two numbers.
    """

    processors: int
    warp_size: int
    registers: int = 0
    rounds_float8: bool = False

    def warps(self, count: int) -> int:
        """The device's warps that have as many threads as `count` warps of 32."""
        return max(1, count * 32 // self.warp_size)

    def programs(self, plan: Plan, rows: int, beside: int = 1) -> int:
        """How many persistent programs share the rows of each of the `beside` parts of a row.

        There is one for each tile until a multiprocessor has four, and then one for every two tiles, because each
        program writes a row of partial sums.
        """
        # A traced number of rows or of groups is a symbol, whose value must not be asked for.
        shared_by = torch.sym_max(1, beside)
        most, few = (torch.sym_max(1, self.processors * each // shared_by) for each in (plan.resident, 4))
        tiles = -(-rows // plan.rows)
        few = torch.sym_max(1, torch.sym_min(tiles, few))
        return torch.sym_min(most, torch.sym_max(few, tiles // 2))  # type: ignore[no-any-return]

    def registers_of(self, plan: Plan) -> int | None:
        """The most registers of a thread with which all persistent programs run at once, or None for no bound.

        Without this bound the compiler gives some kernels of norms 168 registers for 128. A multiprocessor then has one
        program instead of two, which took 49 us instead of 35 for LayerNorm of 4096x4096 in bf16 on an H200.
        """
        if plan.resident <= 1 or not self.registers:
            return None
        most = self.registers // (32 * plan.warps * plan.resident)
        return most if most < _MOST_REGISTERS else None


@lru_cache
def device_of(device: torch.device) -> DeviceLimits:
    """The limits of `device`. The interpreter gets those of a small device."""
    if device.type == "cuda" and torch.cuda.is_available():  # pragma: gpu
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return DeviceLimits(properties.multi_processor_count, 64 if properties.warp_size == 64 else 32)
        return DeviceLimits(
            properties.multi_processor_count,
            32,
            registers=properties.regs_per_multiprocessor,  # type: ignore[attr-defined]
            rounds_float8=(properties.major, properties.minor) >= (8, 9),
        )
    if device.type == "xpu":  # pragma: gpu
        return DeviceLimits(torch.xpu.get_device_properties(device).max_compute_units, 32)
    return DeviceLimits(2, 32)
