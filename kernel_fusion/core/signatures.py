"""The signature of every operator of `torch.ops.kernel_fusion`, as data: its arguments, its results, and its rows.

Schemas, checks of names, the rules for `torch.vmap` and jagged tensors, and shapes for tracing follow from this table
(in `operators` and core/arguments.py), so a new operator is one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kernel_fusion.core import stages
from kernel_fusion.core.fields import Names
from kernel_fusion.core.losses import EXTRAS
from kernel_fusion.core.spec import PASSES

# What an argument is for the rows of the result:
#   rows     a tensor with the dimensions of the result, or one that broadcasts to them
#   mask     a tensor that broadcasts to the rows, whose place in it matters
#   vector   a tensor that all rows share, such as a weight
#   place    a tensor that is read by the place of a row: tables of angles, positions, seeds of dropout
#   dims     numbers of dimensions of the first tensor
#   option   anything else
Kind = Literal["rows", "mask", "vector", "place", "dims", "option"]


class Argument(NamedTuple):
    """An argument of an operator.

    Attributes:
        type: the type in the schema, such as "Tensor?".
        name: the name in the schema.
        kind: what it is for the rows of the result.
        default: the default as the schema writes it, or None without one.
        choices: the names that a string may have; empty if any.
    """

    type: str
    name: str
    kind: Kind = "option"
    default: str | None = None
    choices: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.default is None else f"={self.default}")


@dataclass(frozen=True)
class Operator:
    """An operator.

    Attributes:
        name: without the name of the library.
        arguments: the arguments in order; the first one is a tensor.
        results: the names of the results. A single result has no name in the schema.
        row_dims: from the arguments by name, the number of last dimensions of the first tensor that a row of the
            result depends on, so that all dimensions before them hold independent rows; None if there are no such
            rows. The attribute is None if there never are.
        like: the argument that has the shape and dtype of the only result, which is contiguous; "" if another rule
            gives the results' shapes.
    """

    name: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...] = ("",)
    row_dims: Callable[[Mapping[str, Any]], int | None] | None = None
    like: str = ""

    @property
    def schema(self) -> str:
        """The schema after the name, as PyTorch writes it."""
        results = ", ".join(f"Tensor {name}".strip() for name in self.results)
        arguments = ", ".join(map(str, self.arguments))
        return f"({arguments}) -> {results}" if self.results == ("",) else f"({arguments}) -> ({results})"

    def of_kind(self, kind: Kind, args: Sequence[Any]) -> list[Any]:
        """The values of the arguments of a kind that are not None."""
        pairs = zip(self.arguments, args, strict=False)
        return [value for argument, value in pairs if argument.kind == kind and value is not None]

    def by_name(self, args: Sequence[Any]) -> dict[str, Any]:
        """The values by the names of their arguments."""
        return {argument.name: value for argument, value in zip(self.arguments, args, strict=False)}


def _rows(*names: str) -> tuple[Argument, ...]:
    """Rows, which may be absent if the name ends with a question mark."""
    return tuple(Argument("Tensor?" if name.endswith("?") else "Tensor", name.rstrip("?"), "rows") for name in names)


def _options(text: str, **choices: Sequence[str]) -> tuple[Argument, ...]:
    """Options, as a schema writes them."""
    found = []
    for part in text.split(", "):
        type_, _, rest = part.partition(" ")
        name, _, default = rest.partition("=")
        found.append(Argument(type_, name, "option", default or None, choices.get(name, ())))
    return tuple(found)


def _of_stage(given: stages.Argument) -> Argument:
    kinds: dict[Any, Kind] = {"row": "rows", "vector": "vector", "seed": "place"}
    is_name = isinstance(given.kind, Names)
    kind = "option" if is_name else kinds.get(given.kind, "option")
    return Argument(given.type, given.name, kind, repr(given.default), given.kind.names if is_name else ())


def _without_defaults(arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    return tuple(argument._replace(default=None) for argument in arguments)


def _num_dims(call: Mapping[str, Any]) -> int:
    """A norm's rows are its last dimensions."""
    dims: int = call["num_dims"]
    return dims


def _deepest(call: Mapping[str, Any]) -> int | None:
    """A sum reads its row back to the first dimension that it is taken over."""
    input, dims = call["input"], call["dim"]
    return max(input.dim() - d if d >= 0 else -d for d in dims) if dims else None


# Operators take the number of normalised dimensions instead of their shape, so a new number of rows needs no new trace.
_PARAMETERS = tuple(Argument("Tensor?", name, "vector", "None") for name in ("weight", "bias"))
_PLAIN = (
    *_options("int num_dims"),
    *_PARAMETERS,
    *_options("float eps=1e-05, float weight_offset=0., ScalarType? out_dtype=None"),
)
_OPTIONAL_EPS = tuple(a._replace(type="float?", default="None") if a.name == "eps" else a for a in _PLAIN)
_AFFINE = (*_without_defaults(_PLAIN), *_options("bool rms"))
_STAGES = tuple(map(_of_stage, stages.ARGUMENTS))
# The arguments are described in core/rotary.py.
_ANGLES = (Argument("Tensor", "cos", "place"), Argument("Tensor", "sin", "place"))
_ROTARY = (
    *(Argument("Tensor?", name, "vector") for name in ("query_weight", "key_weight")),
    *_ANGLES,
    Argument("Tensor?", "positions", "place"),
    *_options("float? eps, float weight_offset, bool interleaved, str rounding", rounding=stages.NAMES["rounding"]),
)
_CHAIN = (
    *_rows("b?"),
    *_options(
        "str combine, str activation, float scale, float dropout_p",
        combine=("first", "add", "mul", "gate"),
        activation=stages.NAMES["activation"],
    ),
    Argument("Tensor?", "seed", "place"),
)
_MAP = _options("bool keepdim, str kind, ScalarType? dtype", kind=("sum_squared", "mean_abs"))
# In a "first" pass (core/spec.py) the first result is the sums of a piece of each row, beside h or dweight and dbias. A
# "second" one takes `sums` of all pieces; it makes no h, dweight or dbias.
_PASSES = (*_options("str passes='both'", passes=PASSES), Argument("Tensor?", "sums", "vector", "None"))
_CODES = (*_options("ScalarType dtype"), Argument("Tensor?", "scale", "vector"), *_options("int block"))

# Tensors that a group norm reads beside its input: of the channels, or of each sample's channels, (N, C), or rows.
_AROUND = (
    *(Argument("Tensor?", name, "vector") for name in ("weight", "bias")),
    *_rows("add?", "scale?", "shift?"),
)
_GROUPS = (*_options("int num_groups"), *_AROUND)
_MODULATED = _options("float scale_offset, str activation", activation=stages.NAMES["activation"])
_GROUP_NORM = (*_rows("input"), *_GROUPS, *_options("float eps"), *_MODULATED, *_options("ScalarType? out_dtype"))

# The arguments by which logits become log-probabilities (backends/eager/losses.py).
_LOGITS = (
    Argument("Tensor?", "mask", "mask"),
    Argument("Tensor?", "temperature", "place"),
    Argument("Tensor?", "weight", "vector"),
    *_options("float scale, float softcap, int ignore_index"),
)

_VERBS = (
    Operator("layer_norm", (*_rows("input"), *_PLAIN), row_dims=_num_dims),
    Operator("rms_norm", (*_rows("input"), *_OPTIONAL_EPS), row_dims=_num_dims),
    # The result `residual` is h, or empty. If `grouped`, weight, bias and residual_gate have leading dimensions, which
    # broadcast to the input's.
    Operator(
        "staged_row_norm",
        (*_rows("input", "residual?"), *_AFFINE, *_STAGES),
        ("output", "residual"),
        row_dims=_num_dims,
    ),
    # dropout(scale * f(a, b)), as backends/eager/pointwise.py defines it.
    Operator("pointwise", (*_rows("a"), *_CHAIN), row_dims=lambda call: 0),
    Operator("reduce", (*_rows("input"), Argument("int[]", "dim", "dims"), *_MAP), row_dims=_deepest),
    Operator(
        "softmax",
        (
            *_rows("input"),
            Argument("Tensor?", "mask", "mask"),
            *_options("float scale, bool causal, bool log=False"),
        ),
        row_dims=lambda call: 1 + call["causal"],
        like="input",
    ),
    # Samples are independent, but must be the first dimension.
    Operator("group_norm", _GROUP_NORM),
    # `ids` has the leading dimensions of the input, and perhaps one more. Unwanted results are empty.
    Operator(
        "token_logprob",
        (
            *_rows("input"),
            Argument("Tensor", "ids", "place"),
            *_LOGITS,
            *_options("str extra, bool predicts", extra=EXTRAS),
        ),
        ("logprob", "largest", "log_sum", "extra", "predicted"),
        row_dims=lambda call: 1,
    ),
    # With an `eps`, each head is normalised by RMSNorm before. The results have their dimensions in the order of the
    # strides of their arguments. A token's position is its place.
    Operator("qk_norm_rope", (*_rows("query", "key?"), *_ROTARY), ("query", "key")),
)
# The parts below autograd. `stats` holds mean and rstd as (2, *rows) in fp32 (fp64 for fp64), for RMSNorm rstd as (1,
# *rows): one allocation. Unwanted results are empty. Backward normalises `input`: h with a residual, else x. It takes
# x, too, if a residual meets a pre-activation or a gate, and bias with an activation or a gate. `dresidual` is the
# residual's or gate's gradient, `dgate` that of the residual's gate.
_PARTS = (
    # PyTorch's cached graphs call these by position, so new arguments are appended.
    Operator(
        "row_norm_fwd",
        (*_rows("input"), *_AFFINE, Argument("Tensor?", "residual", "rows", "None"), *_STAGES, *_PASSES),
        ("y", "stats", "h"),
    ),
    Operator(
        "row_norm_bwd",
        (
            *_rows("dy", "input", "stats"),
            *_options("int num_dims"),
            Argument("Tensor?", "weight", "vector"),
            *_options("ScalarType? bias_dtype, float weight_offset, bool rms, bool[5] output_mask"),
            *_options("ScalarType? x_dtype=None"),
            *(Argument("Tensor?", name, "rows", "None") for name in ("dh", "x")),
            Argument("Tensor?", "bias", "vector", "None"),
            *_options("bool has_residual=False"),
            *_STAGES,
            *_PASSES,
        ),
        ("dx", "dweight", "dbias", "dresidual", "dgate"),
    ),
    # `bits` say which of two slopes each element has. Backward takes them, or a result that determines the slope.
    Operator("pointwise_fwd", (*_rows("a"), *_CHAIN), ("y", "bits")),
    Operator("pointwise_bwd", (*_rows("dy", "a"), *_CHAIN, *_options("bool[2] output_mask")), ("da", "db")),
    Operator(
        "softmax_bwd", (*_rows("dy", "y"), *_options("float scale, bool leaves_out=False, bool log=False")), like="y"
    ),
    # `stats` are mean and rstd as (2, samples, groups), in the compute type.
    Operator("group_norm_fwd", _GROUP_NORM, ("y", "stats")),
    Operator(
        "group_norm_bwd",
        (*_rows("dy", "input", "stats"), *_GROUPS, *_MODULATED, *_options("bool[6] output_mask")),
        ("dx", "dweight", "dbias", "dadd", "dscale", "dshift"),
    ),
    # dz = p (da - sum(dlogprob) + db log p) + dc weight, and dlogprob at each id; da, db and dc may be absent.
    Operator(
        "token_logprob_bwd",
        (
            *_rows("input"),
            *(Argument("Tensor", name, "place") for name in ("ids", "largest", "log_sum", "dlogprob")),
            *(Argument("Tensor?", name, "place") for name in ("da", "db", "dc")),
            *_LOGITS,
        ),
        like="input",
    ),
    # With a norm, backward computes the statistics again.
    Operator(
        "qk_norm_rope_bwd",
        (*_rows("dy", "dy_key?", "query?", "key?"), *_ROTARY, *_options("bool[4] output_mask")),
        ("dquery", "dkey", "dquery_weight", "dkey_weight"),
    ),
)
# A verb that needs a gradient calls its own operator, then `quantize`. `block` columns share a scale, 0: a row. With
# `scale` given, the second result is empty. `keeps` asks for the result in its own dtype.
_QUANTIZED = (
    Operator("quantize", (*_rows("input"), *_CODES), ("values", "scale")),
    Operator(
        "quantized_row_norm",
        (*_rows("input", "residual?"), *_CODES, *_options("bool keeps"), *_AFFINE, *_STAGES),
        ("values", "scale", "output", "residual"),
    ),
    Operator(
        "quantized_gate",
        (
            *_rows("gate", "value"),
            *_options("str activation", activation=stages.NAMES["activation"]),
            *_CODES,
            *_options("bool keeps"),
        ),
        ("values", "scale", "output"),
    ),
)
# `staged_row_norm` of rows that are spread over the ranks of process groups; `groups` has their names, with spaces
# between.
_SPREAD = (
    Operator(
        "spread_row_norm",
        (*_rows("input", "residual?"), *_AFFINE, *_options("str groups"), *_STAGES),
        ("output", "residual"),
    ),
)
VERBS, PARTS, QUANTIZED, SPREAD = (
    {each.name: each for each in group} for group in (_VERBS, _PARTS, _QUANTIZED, _SPREAD)
)
OPERATORS = VERBS | PARTS | QUANTIZED | SPREAD
# The names that an argument may have, in every operator that has such an argument.
NAMES = {a.name: a.choices for each in OPERATORS.values() for a in each.arguments if a.choices}
