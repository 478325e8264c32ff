"""Plans: how a spec runs on a device. One readable rule per direction, each with its reason.

Two things decide speed here. A thread should hold few enough elements to stay in registers, yet enough to keep
several 16-byte loads in flight; and a row should be spread over no more warps than that needs. All sizes below follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec, SumPartialsSpec

# Vectors (16 bytes of x) per thread in forward: 4 loads in flight each, 16 registers for the row.
_FORWARD_VECTORS = 4
# Vectors per thread in backward, where each element has two accumulators: 16 elements take 32 of the 128 registers that
# 512 threads per multiprocessor leave each. Longer rows of wide elements take twice as many before they take a cluster.
_BACKWARD_VECTORS = 2
_MAX_ELEMENTS = 32  # per thread, beyond which the sums leave no registers
_MAX_BLOCK_WARPS = 16
_MAX_CLUSTER = 8  # the portable maximum
_SMALL_ROW_THREADS = 128
_MIN_STAGED_COLS = 256  # shorter rows make copies too small to be worth their issue
_STATIC_SHARED_BYTES = 8192  # at most: what a staged kernel declares besides its rows
_FINISH_THREADS = 512


@dataclass(frozen=True)
class Device:
    """What a plan depends on: architecture (90 for sm_90), and the shared memory that one block may have, in bytes."""

    arch: int
    shared_bytes: int

    @property
    def has_clusters(self) -> bool:
        """Whether blocks of a cluster can write to each other's shared memory."""
        return self.arch >= 90

    @staticmethod
    def of(index: int) -> Device:
        """The device `cuda:index`."""
        properties = torch.cuda.get_device_properties(index)
        shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return Device(properties.major * 10 + properties.minor, shared_bytes)


# The architectures that CI compiles for without a device. Source: CUDA C++ Programming Guide, technical specifications.
KNOWN_DEVICES = {
    arch: Device(arch, kilobytes * 1024)
    for arch, kilobytes in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}


@dataclass(frozen=True)
class Plan:
    """How one kernel runs. The first group decides the order of summation and depends on the spec and device alone.

    Attributes:
        vec: elements per vector; lanes: lanes per virtual warp; warps: virtual warps per row (see kernels/tree.cuh).
        cluster: blocks per row; played: virtual warps per physical warp; rows: rows per block, at a time if staged.
        threads: threads per block.
        resident: the row stays in registers, else it is read again.
        storage: where backward keeps dweight and dbias: "none", "registers" or "shared".
        prefetch: backward loads the next row early.
        min_blocks: blocks per multiprocessor that registers must allow.
        shared_bytes: dynamic shared memory.
        splits_weight: dweight and dbias take a pass of their own.
        stages: backward reads rows through shared memory, this many per group of threads on their way; 0: directly.
    """

    vec: int
    lanes: int
    warps: int
    cluster: int = 1
    played: int = 1
    rows: int = 1
    threads: int = 32
    resident: bool = True
    storage: str = "none"
    prefetch: bool = False
    min_blocks: int = 1
    shared_bytes: int = 0
    splits_weight: bool = False
    stages: int = 0

    def __str__(self) -> str:
        if self.stages:
            rows = f"{self.rows} rows at a time" if self.rows > 1 else "a row at a time"
            where = f"clusters of {self.cluster} blocks" if self.cluster > 1 else "blocks"
            shape = f"persistent {where} of {self.threads} threads, {rows}, {self.stages} rows each on their way"
        elif self.rows > 1:
            shape = f"{self.rows} rows per block of {self.threads} threads, {self.lanes} lanes per row"
        elif self.cluster > 1:
            shape = f"a cluster of {self.cluster} blocks of {self.threads} threads per row"
        else:
            shape = f"a block of {self.threads} threads per row"
        row = "row in registers" if self.resident else "row read again"
        row = "rows through shared memory" if self.stages else row
        sums = f", sums in {self.storage}" if self.storage != "none" else ""
        split = ", weight gradients in a pass of their own" if self.splits_weight else ""
        return f"{shape}, {self.vec}-element vectors, {row}{sums}{split}"


def plan_row_norm(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    """The plan of a row-norm kernel."""
    if spec.direction == "backward_weight":
        return Plan(vec=16 // ITEMSIZE[spec.x], lanes=32, warps=1, threads=128)
    return _plan_backward(spec, access, device) if spec.direction == "backward" else _plan_forward(spec, device)


@dataclass(frozen=True)
class _Tree:
    """The order of summation of a row and the blocks it spans: a function of spec and device alone."""

    vec: int
    lanes: int
    warps: int
    cluster: int
    vectors: int  # per thread


def _tree(spec: RowNormSpec, device: Device, per_thread: int, min_lanes: int) -> _Tree:
    """Spread a row over lanes, warps and blocks so that a thread gets about `per_thread` vectors of it."""
    vec = 16 // ITEMSIZE[spec.x]
    vectors = _ceil_div(spec.cols, vec)
    slots = _ceil_div(vectors, 32)  # vectors per lane of a single warp
    if slots <= per_thread:
        lanes = max(min(min_lanes, _power_of_two(vectors)), _power_of_two(_ceil_div(vectors, per_thread)))
        return _Tree(vec, lanes, 1, 1, _ceil_div(vectors, lanes))
    # A count that divides the row spares every thread the question whether its column is inside.
    near = [n for n in (per_thread, per_thread - 1, per_thread + 1) if n > 1 and slots % n == 0]
    warps = slots // near[0] if near else _ceil_div(slots, per_thread)
    cluster = _power_of_two(_ceil_div(warps, _MAX_BLOCK_WARPS)) if device.has_clusters else 1
    cluster = min(_MAX_CLUSTER, cluster)
    warps = min(_ceil_div(warps, cluster), _MAX_BLOCK_WARPS) * cluster
    return _Tree(vec, 32, warps, cluster, _ceil_div(slots, warps))


def _plan_forward(spec: RowNormSpec, device: Device) -> Plan:
    tree = _tree(spec, device, _FORWARD_VECTORS, min_lanes=8)
    resident = tree.vectors <= 2 * _FORWARD_VECTORS
    return _direct(tree, resident=resident)


def _direct(tree: _Tree, **options: Any) -> Plan:
    """A plan that reads rows straight into registers: several rows per block, or a block or cluster per row."""
    if tree.warps == 1:
        rows, threads = _SMALL_ROW_THREADS // tree.lanes, _SMALL_ROW_THREADS
    else:
        rows, threads = 1, tree.warps // tree.cluster * 32
    return Plan(tree.vec, tree.lanes, tree.warps, tree.cluster, rows=rows, threads=threads, **options)


def _plan_backward(spec: RowNormSpec, access: Access, device: Device) -> Plan:
    per_thread = _BACKWARD_VECTORS
    if ITEMSIZE[spec.x] > 2 and spec.cols * ITEMSIZE[spec.x] > _MAX_BLOCK_WARPS * 32 * 16 * per_thread:
        per_thread *= 2
    tree = _tree(spec, device, per_thread, min_lanes=32 if spec.cols >= _MIN_STAGED_COLS else 8)
    staged = _plan_staged(spec, tree, access, device)
    if staged is not None:
        return staged
    wants_sums = spec.grads[1] or spec.grads[2]
    # 512 threads per multiprocessor: 128 registers each, enough for a row, the next row and both sums.
    # Half as many threads where the row ends inside a vector: loading it element by element takes registers too.
    ragged = spec.cols % tree.vec != 0
    plan = partial(_direct, tree, min_blocks=max(1, (256 if ragged else 512) // _direct(tree).threads))
    if tree.vectors <= per_thread + 1:
        rows = _direct(tree).rows
        table = rows * spec.cols * ITEMSIZE[spec.acc] if wants_sums and rows > 1 else 0
        storage = "registers" if wants_sums else "none"
        # A next row of more than two vectors has registers on sm_90 alone; on sm_120 the compiler spills.
        prefetch = tree.vectors <= (per_thread if device.arch == 90 else _BACKWARD_VECTORS)
        return plan(storage=storage, prefetch=prefetch, shared_bytes=table)
    # Twice the elements still fit in registers without their sums, which move to shared memory where there is room.
    resident = tree.vectors <= 2 * per_thread
    shared = _direct(tree).threads * tree.vectors * tree.vec * 2 * ITEMSIZE[spec.acc]
    if not wants_sums:
        return plan(resident=resident)
    if resident and shared <= device.shared_bytes - _STATIC_SHARED_BYTES:
        return plan(storage="shared", shared_bytes=shared)
    return plan(resident=resident, splits_weight=True)


def _plan_staged(spec: RowNormSpec, tree: _Tree, access: Access, device: Device) -> Plan | None:
    """A plan that copies whole rows into shared memory in bulk, or None where that is impossible.

    It takes sm_90, and addresses and lengths that are multiples of 16 bytes. Measured on an H200, bf16, time over the
    floor, directly and so: 32768x4096 1.42 and 1.18, 16384x8192 1.57 and 1.06, 4096x32768 2.13 and 1.35.
    """
    aligned = access.x == access.y == access.dx == 16
    wants_sums = spec.grads[1] or spec.grads[2]
    if not (device.has_clusters and aligned and wants_sums and spec.acc == "f32" and spec.cols >= _MIN_STAGED_COLS):
        return None
    # Beyond 24 elements every register is needed; compiled for sm_100 such a kernel spills.
    if tree.vectors * tree.vec > (_MAX_ELEMENTS if device.arch == 90 else 24):
        return None
    threads = tree.warps // tree.cluster * 32
    groups = max(1, _MAX_BLOCK_WARPS * 32 // threads) if tree.cluster == 1 else 1
    columns = tree.vectors * threads * tree.vec
    slot_bytes = columns * (ITEMSIZE[spec.x] + ITEMSIZE[spec.y])
    weight_bytes = columns * ITEMSIZE[spec.weight] if spec.weight else 0
    table_bytes = (groups - 1) * columns * ITEMSIZE[spec.acc]
    room = device.shared_bytes - _STATIC_SHARED_BYTES - weight_bytes - table_bytes
    stages = min(4 if groups == 1 else 3, room // (groups * slot_bytes))
    if stages < 2:
        return None
    return Plan(
        tree.vec,
        tree.lanes,
        tree.warps,
        tree.cluster,
        rows=groups,
        threads=groups * threads,
        storage="registers",
        shared_bytes=stages * groups * slot_bytes + weight_bytes + table_bytes,
        stages=stages,
    )


def plan_sum_partials(spec: SumPartialsSpec) -> Plan:
    """The plan of the finishing kernel: 32 columns per block, the partial rows spread over its warps."""
    return Plan(vec=1, lanes=32, warps=1, threads=_FINISH_THREADS)


def kernel_source(spec: RowNormSpec | SumPartialsSpec, access: Access, plan: Plan) -> tuple[str, str]:
    """The kernel's name and its CUDA source: the constants of spec, access and plan, and one instantiation."""
    if isinstance(spec, SumPartialsSpec):
        name, args, header = "sum_partials", "SumPartialsArgs", "sum_partials"
        types: dict[str, str | None] = {"Acc": spec.acc, "First": spec.first, "Second": spec.second}
        constants: dict[str, int] = {"kCols": spec.cols, "kThreads": plan.threads}
    else:
        name, args, header, types, constants = _row_norm_source(spec, access, plan)
    lines = [f"  using {key} = kf::{value or 'absent'};" for key, value in types.items()]
    lines += [f"  static constexpr int {key} = {int(value)};" for key, value in constants.items()]
    source = (
        f'#include "kernels/{header}.cuh"\n'
        + "struct Plan {\n"
        + "\n".join(lines)
        + "\n};\n"
        + f'extern "C" __global__ void __launch_bounds__({plan.threads}, {plan.min_blocks})\n'
        + f"{name}(const __grid_constant__ kf::{args} args) {{ kf::{header}<Plan>(args); }}\n"
    )
    return name, source


def _row_norm_source(
    spec: RowNormSpec, access: Access, plan: Plan
) -> tuple[str, str, str, dict[str, str | None], dict[str, int]]:
    backward = spec.direction.startswith("backward")
    header = {"backward": "row_norm_bwd", "backward_weight": "row_norm_bwd_weight"}.get(spec.direction, "row_norm_fwd")
    types: dict[str, str | None] = {"Acc": spec.acc, "X": spec.x, "DY" if backward else "Y": spec.y}
    types |= {"Weight": spec.weight} if backward else {"Weight": spec.weight, "Bias": spec.bias}
    constants: dict[str, int] = {
        "kRms": spec.rms,
        "kCols": spec.cols,
        "kOffset": spec.offset,
        "kVec": plan.vec,
        "kLanes": plan.lanes,
        "kWarps": plan.warps,
        "kCluster": plan.cluster,
        "kPlayed": plan.played,
        "kRows": plan.rows,
        "kThreads": plan.threads,
        "kResident": plan.resident,
        "kStridedX": access.strided_x,
        "kAlignX": access.x,
        "kAlignWeight": access.weight,
    }
    if backward:
        if plan.stages:
            header = "row_norm_bwd_staged"
            constants["kStages"] = plan.stages
        dx, dweight, dbias = spec.grads
        constants |= {"kDX": dx, "kDWeight": dweight, "kDBias": dbias, "kPrefetch": plan.prefetch}
        constants |= {"kStorage": ("none", "registers", "shared").index(plan.storage)}
        constants |= {"kStridedDY": access.strided_y, "kAlignDY": access.y, "kAlignDX": access.dx}
        args = "RowNormBwdArgs"
    else:
        constants |= {"kStats": spec.direction == "forward", "kAlignY": access.y}
        args = "RowNormFwdArgs"
    norm = "rms_norm" if spec.rms else "layer_norm"
    name = f"kf_{norm}_{spec.direction}_{spec.cols}_{spec.x}"
    return name, args, header, types, constants


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
