"""The source of a row-norm kernel: the constants of spec, access and plan."""

from __future__ import annotations

from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.activations import CODES, IDENTITY
from kernel_fusion.core.spec import Access, RowNormSpec

_KEEPING = ("wide", "shared", "memory")


def row_norm_source(spec: RowNormSpec, access: Access, plan: Plan) -> Source:
    """What the kernel of a row norm is compiled from."""
    backward = spec.direction.startswith("backward")
    header = {"backward": "row_norm_bwd", "backward_weight": "row_norm_bwd_weight"}.get(spec.direction, "row_norm_fwd")
    constants: dict[str, int] = {
        "kRms": spec.rms,
        "kCols": spec.cols,
        "kOffset": spec.offset,
        "kPreActivation": CODES[spec.pre_activation],
        "kActivation": CODES[spec.activation],
        "kDropout": spec.dropout,
        "kVec": plan.vec,
        "kLanes": plan.lanes,
        "kWarps": plan.warps,
        "kCluster": plan.cluster,
        "kRows": plan.per_block,
        "kThreads": plan.threads,
        "kStridedX": access.strided_x,
        "kAlignX": access.x,
        "kAlignWeight": access.weight,
    }
    constants |= _backward_constants(spec, access, plan) if backward else _forward_constants(spec, access, plan)
    if plan.slots:
        header += "_staged"
        constants["kSlots"] = plan.slots
        constants["kPaceTolerance"] = plan.pace.tolerance if plan.pace else 0
        constants["kPaceLeast"] = plan.pace.least if plan.pace else 0
    elif plan.tiled:
        header += "_tile"
    elif not (backward or plan.resident):
        header += "_long"
        constants |= dict(zip(("kBatch", "kBatchAgain"), plan.batches, strict=True))
    args = "RowNormBwdArgs" if backward else "RowNormFwdArgs"
    return Source(_name(spec), header, args, _types(spec, backward), constants, plan.threads, plan.min_blocks)


def _name(spec: RowNormSpec) -> str:
    stages = [spec.pre_activation, "dropout" if spec.dropout else IDENTITY, "add" if spec.residual else IDENTITY]
    words = [*stages, "rms_norm" if spec.rms else "layer_norm", spec.activation]
    return "_".join(["kf", *(word for word in words if word != IDENTITY), spec.direction, str(spec.cols), spec.x])


def _types(spec: RowNormSpec, backward: bool) -> dict[str, str | None]:
    types: dict[str, str | None] = {"Acc": spec.acc, "X": spec.x, "Row": spec.row, "Residual": spec.residual}
    types["Weight"] = spec.weight
    if not backward:
        return types | {"Y": spec.y, "Bias": spec.bias}
    # Backward reads the bias for the argument of the activation alone.
    types["Bias"] = None if spec.activation == IDENTITY else spec.bias
    return types | {"DY": spec.y, "DH": spec.residual if spec.dh else None, "PreX": spec.pre_x}


def _forward_constants(spec: RowNormSpec, access: Access, plan: Plan) -> dict[str, int]:
    return {
        "kStats": spec.direction == "forward",
        "kAlignY": access.y,
        "kAhead": plan.ahead,
        "kTogether": plan.together,
        "kEarly": plan.early,
        "kAnew": plan.anew,
        "kCenter": plan.center,
        "kHelpers": plan.helpers,
        "kShifted": plan.shifted,
        "kStridedResidual": access.strided_residual,
        "kAlignResidual": access.residual,
    }


def _backward_constants(spec: RowNormSpec, access: Access, plan: Plan) -> dict[str, int]:
    dx, dweight, dbias = spec.grads
    return {
        "kDX": dx,
        "kDWeight": dweight,
        "kDBias": dbias,
        "kDResidual": spec.dresidual,
        "kResident": plan.resident,
        "kPrefetch": plan.prefetch,
        "kStorage": ("none", "registers", "shared").index(plan.storage),
        "kKeeping": _KEEPING.index(plan.weight),
        "kUnkept": plan.unkept,
        "kKeepingBias": _KEEPING.index(plan.bias),
        "kFew": plan.few,
        "kStridedDY": access.strided_y,
        "kAlignDY": access.y,
        "kAlignDX": access.dx,
        "kAlignDH": access.residual,
        "kStridedPreX": access.strided_pre_x,
        "kAlignPreX": access.pre_x,
    }
