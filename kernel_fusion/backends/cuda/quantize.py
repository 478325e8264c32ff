"""Codes of rows: plans and sources (kernels/quantize.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import SMALL_ROW_THREADS, Plan
from kernel_fusion.backends.cuda.source import Launch, Source
from kernel_fusion.backends.cuda.tree import Tree, ceil_div, spread_row
from kernel_fusion.core.fields import constants
from kernel_fusion.core.other_specs import QuantizeAccess, QuantizeSpec
from kernel_fusion.core.quantize import BLOCK
from kernel_fusion.core.spec import ITEMSIZE, RowNormSpec

_THREAD_BYTES = 64  # of x
# Loads in flight, and threads per multiprocessor: more where they wait for a row's largest element.
_AHEAD, _AHEAD_OF_ROWS = 4, 2
_THREADS, _THREADS_OF_ROWS, _THREADS_OF_WIDE = 1024, 1344, 512


@dataclass(frozen=True)
class QuantizePlan(Launch):
    """How a row is spread.

    Attributes:
        resident: it stays in registers.
        ahead: vectors that a thread loads before it uses one.
    """

    tree: Tree
    resident: bool
    ahead: int


def plan(spec: QuantizeSpec, access: QuantizeAccess, device: Device) -> QuantizePlan:
    """As norms spread their rows, in one block."""
    row = RowNormSpec("inference", True, spec.cols, spec.x, spec.x)
    tree = spread_row(row, device, _THREAD_BYTES, 2 * _THREAD_BYTES, max_cluster=1)
    if spec.codes.scales == "block" and not has_whole_blocks(tree):
        tree = Tree(tree.vec, 32, 1, 1, ceil_div(spec.cols, 32 * tree.vec))
    threads = max(SMALL_ROW_THREADS, tree.lanes) if tree.warps == 1 else 32 * tree.warps
    held = tree.elements * max(ITEMSIZE[spec.x], 4 if tree.vec == 1 else 0)
    resident, rows = held <= 2 * _THREAD_BYTES, spec.codes.scales == "row"
    in_pieces = min(access.x.align, access.other.align) < tree.vec * ITEMSIZE[spec.x]
    wide = ITEMSIZE[spec.x] > 2 or tree.vec == 1 or in_pieces
    together = _THREADS_OF_WIDE if wide else _THREADS_OF_ROWS if rows else _THREADS
    return QuantizePlan(
        threads=threads,
        per_block=threads // (tree.lanes * tree.warps),
        min_blocks=max(1, together // threads) if spec.acc == "f32" else 1,
        tree=tree,
        resident=resident,
        ahead=min(tree.vectors, _AHEAD_OF_ROWS if rows else _AHEAD) if resident else 1,
    )


def has_whole_blocks(tree: Tree | Plan) -> bool:
    """Whether neighbouring lanes have the columns that share a scale."""
    return tree.warps == 1 or tree.lanes * tree.vec % BLOCK == 0


def source(spec: QuantizeSpec, access: QuantizeAccess, plan: QuantizePlan) -> Source:
    """The source of the kernel."""
    types: dict[str, str | None] = {"X": spec.x, "Other": spec.other, "Acc": spec.acc}
    known: dict[str, int | str] = {
        **constants(spec, "cols", "activation"),
        **constants(spec.codes, "code", "scales", "keeps"),
        **constants(plan.tree, "vec", "lanes", "warps", "cluster"),
        **constants(plan, "threads", "resident", "ahead"),
        "kRows": plan.per_block,
        "kShares": 1,
        "kCombine": "kf::Combine::kGate",
    }
    for name, rows in (("X", access.x), ("Other", access.other)):
        known |= {f"{key}{name}": value for key, value in constants(rows, "align", "strided").items()}
    name = f"kf_quantize_{f'{spec.activation}_' if spec.other else ''}{spec.cols}_{spec.x}"
    return Source(name, "quantize", "QuantizeArgs", types, known, plan.threads, plan.min_blocks)
