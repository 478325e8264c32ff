"""How a row is spread over lanes, warps and blocks. Only spec and device decide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.core.spec import ITEMSIZE, RowNormSpec

MAX_BLOCK_WARPS = 16
MAX_CLUSTER = 8  # the portable maximum


@dataclass(frozen=True)
class Tree:
    """The order in which a row is summed (kernels/tree.cuh), and the number of blocks that share the row."""

    vec: int  # the elements of a vector
    lanes: int
    warps: int
    cluster: int
    vectors: int  # the vectors of a thread

    @property
    def elements(self) -> int:
        """The elements of a thread."""
        return self.vectors * self.vec

    @property
    def block_warps(self) -> int:
        """The number of warps that a row has in one block."""
        return self.warps // self.cluster

    def covers(self, cols: int) -> bool:
        """Whether every vector lies within the row."""
        return cols == self.warps * self.lanes * self.elements

    def narrowed(self, cols: int, dtypes: Iterable[str | None]) -> Tree:
        """The tree with the same threads, and vectors so short that they have at most 16 bytes in these types too.

        Otherwise a thread would load vectors of a wider tensor in two pieces, and a warp half of every sector at a
        time.
        """
        vec = min([self.vec, *(16 // ITEMSIZE[dtype] for dtype in dtypes if dtype)])
        return replace(self, vec=vec, vectors=ceil_div(cols, vec * self.lanes * self.warps))


def vector_of(spec: RowNormSpec) -> int:
    """The elements of a vector: 16 bytes if all rows of a contiguous tensor start at multiples of that, else fewer.

    So for every N neighbouring lanes read neighbouring elements, and no row ends inside a vector.
    """
    return min(16 // ITEMSIZE[spec.x], spec.cols & -spec.cols)


def spread_row(
    spec: RowNormSpec,
    device: Device,
    bytes_per_thread: int,
    most_bytes: int,
    prefer: Callable[[int, int], bool] = lambda warps, elements: False,
    max_cluster: int = MAX_CLUSTER,
) -> Tree:
    """Spread a row over threads.

    A thread gets about `bytes_per_thread`, and up to `most_bytes` if that divides the row. Among possible numbers of
    warps and elements per thread, `prefer(warps, elements)` chooses.
    """
    itemsize, vec = ITEMSIZE[spec.x], vector_of(spec)
    per_thread, most = bytes_per_thread // (vec * itemsize), most_bytes // (vec * itemsize)
    vectors = spec.cols // vec
    slots = ceil_div(vectors, 32)  # how many vectors a lane would have if one warp took the row
    if slots <= per_thread:
        # The lanes read a cache line, with two vectors each if that is allowed. For vectors of two fp16 or bf16
        # elements few lanes are best, because adding lanes up costs instructions.
        at_a_time = 64 if vec * itemsize == 4 and itemsize == 2 else 128
        min_lanes = min(32, power_of_two(ceil_div(vectors, min(2, per_thread))), at_a_time // (vec * itemsize))
        lanes = max(min_lanes, power_of_two(ceil_div(vectors, per_thread)))
        return Tree(vec, lanes, 1, 1, ceil_div(vectors, lanes))
    # A number that divides the row needs no checks of bounds. Single fp16 or bf16 elements take a register each.
    larger = range(per_thread + 1, most + 1) if vec * itemsize > 2 else ()
    near = [n for n in (per_thread, per_thread - 1, *larger) if slots % n == 0 and (n > 1 or slots <= 5)]
    near.sort(key=lambda n: prefer(slots // n, n * vec), reverse=True)
    each = near[0] if near else per_thread
    blocks = ceil_div(ceil_div(slots, each), MAX_BLOCK_WARPS)
    cluster = min(max_cluster, power_of_two(blocks)) if device.has_clusters else 1
    if not near or slots > each * MAX_BLOCK_WARPS * cluster:
        each = max(each if cluster == 1 else 1, ceil_div(slots, MAX_BLOCK_WARPS * cluster))
    while cluster > 1 and not _all_blocks_have_columns(slots, each, cluster):
        each += 1
    warps = ceil_div(ceil_div(slots, each), cluster) * cluster
    return Tree(vec, 32, warps, cluster, ceil_div(slots, warps))


def _all_blocks_have_columns(slots: int, each: int, cluster: int) -> bool:
    warps = ceil_div(slots, each)
    return (cluster - 1) * ceil_div(warps, cluster) < warps


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
