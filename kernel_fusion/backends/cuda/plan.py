"""Plans: how a spec runs on a device. One readable rule per direction, each with its reason.

Two things decide speed here. A thread should hold few enough elements to stay in registers, yet enough to keep
several 16-byte loads in flight; and a row should be spread over no more warps than that needs. All sizes below follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_fusion.core.spec import ITEMSIZE, Access, RowNormSpec, SumPartialsSpec

# Vectors (16 bytes of x) per thread in forward: 4 loads in flight each, 16 registers for the row.
_FORWARD_VECTORS = 4
# Elements per thread in backward: two fp32 accumulators each, so 16 take 32 of the 128 registers of a 512-thread SM.
_BACKWARD_ELEMENTS = {"f16": 16, "bf16": 16, "f32": 16, "f64": 8}
_MAX_BLOCK_WARPS = 16
_MAX_CLUSTER = 8  # the portable maximum
_SMALL_ROW_THREADS = 128
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
        cluster: blocks per row; played: virtual warps per physical warp; rows: rows per block.
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
        if self.rows > 1:
            shape = f"{self.rows} rows per block of {self.threads} threads, {self.lanes} lanes per row"
        elif self.cluster > 1:
            shape = f"a cluster of {self.cluster} blocks of {self.threads} threads per row"
        else:
            shape = f"a block of {self.threads} threads per row"
        row = "row in registers" if self.resident else "row read again"
        sums = f", sums in {self.storage}" if self.storage != "none" else ""
        split = ", weight gradients in a pass of their own" if self.splits_weight else ""
        return f"{shape}, {self.vec}-element vectors, {row}{sums}{split}"


def plan_row_norm(spec: RowNormSpec, device: Device) -> Plan:
    """The plan of a row-norm kernel."""
    if spec.direction == "backward_weight":
        return Plan(vec=16 // ITEMSIZE[spec.x], lanes=32, warps=1, threads=128)
    return _plan_backward(spec, device) if spec.direction == "backward" else _plan_forward(spec, device)


def _plan_forward(spec: RowNormSpec, device: Device) -> Plan:
    vec = 16 // ITEMSIZE[spec.x]
    vectors = _ceil_div(spec.cols, vec)
    warps = _power_of_two(_ceil_div(vectors, 32 * _FORWARD_VECTORS))
    if warps == 1:
        return _small_rows(vec, vectors)
    cluster = 1
    if warps > _MAX_BLOCK_WARPS:
        # Beyond one block's registers: a cluster keeps the row on chip once, where it exists.
        cluster = min(_MAX_CLUSTER, warps // _MAX_BLOCK_WARPS) if device.has_clusters else 1
        warps = min(warps, cluster * _MAX_BLOCK_WARPS)
    per_thread = _ceil_div(vectors, 32 * warps)
    return Plan(
        vec,
        lanes=32,
        warps=warps,
        cluster=cluster,
        threads=warps // cluster * 32,
        resident=per_thread <= 2 * _FORWARD_VECTORS,
    )


def _plan_backward(spec: RowNormSpec, device: Device) -> Plan:
    vec = 16 // ITEMSIZE[spec.x]
    vectors = _ceil_div(spec.cols, vec)
    elements = _BACKWARD_ELEMENTS[spec.x]
    wants_sums = spec.grads[1] or spec.grads[2]
    storage = "registers" if wants_sums else "none"
    warps = _power_of_two(_ceil_div(vectors, 32 * elements // vec))
    if warps == 1:
        small = _small_rows(vec, vectors)
        shared = small.rows * spec.cols * ITEMSIZE[spec.acc] if wants_sums and small.rows > 1 else 0
        return _replace_backward(small, storage, prefetch=True, shared_bytes=shared)
    cluster = 1
    if warps > _MAX_BLOCK_WARPS and device.has_clusters:
        cluster = min(_MAX_CLUSTER, warps // _MAX_BLOCK_WARPS)
    warps = min(warps, cluster * _MAX_BLOCK_WARPS)
    per_thread = _ceil_div(vectors, 32 * warps) * vec
    base = Plan(vec, lanes=32, warps=warps, cluster=cluster, threads=warps // cluster * 32)
    if per_thread <= elements:
        return _replace_backward(base, storage, prefetch=True)
    # Twice the elements still fit in registers without their sums, which move to shared memory where there is room.
    resident = per_thread <= 2 * elements
    shared = base.threads * per_thread * 2 * ITEMSIZE[spec.acc] if wants_sums else 0
    if resident and shared <= device.shared_bytes - 4096:
        return _replace_backward(base, "shared" if wants_sums else "none", shared_bytes=shared)
    return _replace_backward(base, "none", resident=resident, splits_weight=wants_sums)


def _replace_backward(
    plan: Plan,
    storage: str,
    *,
    prefetch: bool = False,
    resident: bool = True,
    shared_bytes: int = 0,
    splits_weight: bool = False,
) -> Plan:
    # 512 threads per multiprocessor: 128 registers each, enough for a row, the next row and both sums.
    min_blocks = max(1, 512 // plan.threads)
    return Plan(
        plan.vec,
        plan.lanes,
        plan.warps,
        plan.cluster,
        plan.played,
        plan.rows,
        plan.threads,
        resident,
        storage,
        prefetch,
        min_blocks,
        shared_bytes,
        splits_weight,
    )


def _small_rows(vec: int, vectors: int) -> Plan:
    """Rows that one warp or a part of it holds: several rows per block, no barrier."""
    lanes = min(32, _power_of_two(vectors))
    return Plan(vec, lanes, warps=1, rows=_SMALL_ROW_THREADS // lanes, threads=_SMALL_ROW_THREADS)


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
