"""The source of a row norm's kernel: constants from spec, access and plan, for the templates in native/kernels."""

from __future__ import annotations

from dataclasses import fields

from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.backends.cuda.source import Source
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.fields import constant, constants
from kernel_fusion.core.quantize import NO_CODES
from kernel_fusion.core.spec import ROWS, VECTORS, Access, RowNormSpec, Stages

_OPTIONS = tuple(field.name for field in fields(Stages) if field.name not in (*ROWS, *VECTORS))


def row_norm_source(spec: RowNormSpec, access: Access, plan: Plan) -> Source:
    """The source of a row norm's kernel."""
    backward = spec.direction.startswith("backward")
    known: dict[str, int | str] = {
        **constants(spec, "rms", "cols", "offset", *_OPTIONS),
        **(constants(spec, "passes") if spec.passes != "both" else {}),
        **constants(plan, "vec", "lanes", "warps", "cluster"),
        **constants(plan.ring, "slots"),
        "kRows": plan.per_block,
        "kThreads": plan.threads,
        "kStridedX": access.strided_x,
        "kAlignX": access.x,
        "kAlignWeight": access.weight,
        "kPaceTolerance": plan.ring.pace.tolerance if plan.ring.pace else 0,
        "kPaceLeast": plan.ring.pace.least if plan.ring.pace else 0,
    }
    known |= _backward_constants(spec, access, plan) if backward else _forward_constants(spec, access, plan)
    args = "RowNormBwdArgs" if backward else "RowNormFwdArgs"
    return Source(_name(spec), plan.kernel, args, _types(spec, backward), known, plan.threads, plan.min_blocks)


def _name(spec: RowNormSpec) -> str:
    rows = [name for name in ROWS if getattr(spec, name)]
    before = [spec.pre_activation, "dropout" if spec.dropout else IDENTITY, "gate" if spec.residual_gate else IDENTITY]
    before.append("add" if spec.residual else IDENTITY)
    first, last = ([], rows) if spec.follows else (rows, [])
    words = [*before, *first, "rms_norm" if spec.rms else "layer_norm", spec.activation, *last]
    which = [] if spec.passes == "both" else [spec.passes, "pass"]
    words = [word for word in words if word != IDENTITY]
    return "_".join(["kf", *words, spec.direction, *which, str(spec.cols), spec.x])


def _types(spec: RowNormSpec, backward: bool) -> dict[str, str | None]:
    types: dict[str, str | None] = {"Acc": spec.acc, "X": spec.x, "Row": spec.row, "Residual": spec.residual}
    types |= {"Weight": spec.weight, "Finest": spec.finest}
    types |= {constant(name)[1:]: getattr(spec, name) for name in (*ROWS, *VECTORS)}
    if not backward:
        return types | {"Y": spec.y, "Bias": spec.bias}
    types["Bias"] = spec.bias if spec.follows else None
    types["DBias"] = spec.bias if spec.one_row else None
    pre_x = None if spec.beside else spec.pre_x
    return types | {"DY": spec.y, "DH": spec.residual if spec.dh else None, "PreX": pre_x}


def _forward_constants(spec: RowNormSpec, access: Access, plan: Plan) -> dict[str, int | str]:
    return {
        **constants(plan, "center", "shifted", "rows_ahead"),
        **constants(plan.ring, "helpers"),
        **constants(NO_CODES if plan.splits else spec.codes, "code", "scales", "keeps"),
        "kShares": plan.shares,
        "kResident": plan.resident,
        "kStats": spec.direction == "forward",
        "kAlignY": access.y,
        "kAhead": plan.variant == "ahead",
        "kEarly": plan.variant == "early",
        "kAnew": plan.variant == "anew",
        "kTogether": plan.batches[0],
        "kBatch": plan.batches[0],
        "kBatchAgain": plan.batches[-1],
        "kStridedResidual": access.strided_residual,
        "kAlignResidual": access.residual,
    }


def _backward_constants(spec: RowNormSpec, access: Access, plan: Plan) -> dict[str, int | str]:
    dx, dweight, dbias = spec.grads
    return {
        **constants(plan, "sums", "keeps", "unkept"),
        "kResident": plan.resident,
        "kDX": dx,
        "kDWeight": dweight,
        "kDBias": dbias,
        "kDResidual": spec.dresidual,
        "kDGate": spec.dgate,
        "kPrefetch": plan.variant == "next",
        "kFew": plan.variant == "few",
        "kStridedDY": access.strided_y,
        "kAlignDY": access.y,
        "kAlignDX": access.dx,
        "kAlignDH": access.residual,
        "kStridedPreX": access.strided_pre_x,
        "kAlignPreX": access.pre_x,
    }
