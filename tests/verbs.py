"""Every verb in one table: what it is called with, what PyTorch's call is, and which arguments have gradients.

Tests of what every operation guarantees run over the table by the fixture `operation`, so a new verb is one row. A verb
may stand here in several forms, where stages, masks, broadcasting or slopes of two values take ways of their own. Other
activations are smooth, so that finite differences mean something; no random argument comes near the kink of these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import Target
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.core import checks
from kernel_fusion.testing import unfused

Function = Callable[..., Any]
EPS = 1e-5


@dataclass(frozen=True)
class Verb:
    """One way to call a verb.

    Attributes:
        name: what the test is called.
        arguments: the differentiable arguments by name, each as a function of rows and columns that gives its shape.
        ours: called with these arguments and `backend`.
        pytorch: PyTorch's calls, with these arguments.
        kernels: how many kernels one call and one backward run; None for at least one.
        batches: whether a batched first argument is one call with more rows.
        row_wise: whether row i of every result comes from row i of the first argument alone.
        reshapes: whether the result has another shape than the operator's.
        views: whether a result is a view, of memory that nobody else has.
    """

    name: str
    arguments: dict[str, Callable[[int, int], tuple[int, ...]]]
    ours: Function
    pytorch: Function
    kernels: int | None = 1
    batches: bool = False
    row_wise: bool = True
    reshapes: bool = False
    views: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def bends(self) -> bool:
        """Whether second derivatives are anything but 0."""
        return not self.name.endswith("relu") and self.name != "rope"

    def keeps_bits(self, target: Target) -> bool:
        """Whether backward reads a bit per element for its slope, and neither that argument nor a result."""
        return target.backend == "cuda" and not self.bends

    def reads_results(self, target: Target) -> bool:
        """Whether backward reads a result, y or h, or what stands for one: second derivatives go on from there."""
        kept = (
            "add_layer",
            "add_rms",
            "add_modulated",
            "softmax",
            "log_softmax",
            "cross_entropy-smoothed",
            "attention_weights",
            "bias_act-tanh",
            "bias_act-relu",
        )
        return self.keeps_bits(target) or self.name.startswith(kept)

    @property
    def exact(self) -> bool:
        """Whether its bits are the same however it is called: a product of matrices chooses its algorithm."""
        return not self.name.startswith("attention")

    def leaves(self, target: Target, rows: int = 7, cols: int = 17, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Random arguments, all of them requiring gradients."""
        shapes = (shape(rows, cols) for shape in self.arguments.values())
        return [torch.randn(s, device=target.device, dtype=dtype, requires_grad=True) for s in shapes]

    def on(self, target: Target) -> Callable[..., Any]:
        """The call on the target's backend."""
        return lambda *tensors: self.ours(*tensors, backend="eager" if self.lacks(target) else target.backend)

    def lacks(self, target: Target) -> bool:
        """Whether the target's backend has no kernels for this verb."""
        return checks.without_kernels(self.name.partition("-")[0], target.backend) is not None

    def ran(self, target: Target, forward: int | None = 1, backward: int | None = 0) -> AbstractContextManager[None]:
        """`Target.ran` for these numbers of calls and backward passes of this verb."""
        if self.lacks(target):
            return target.ran(0, 0)
        return target.ran(self._count(forward), self._count(backward))

    def _count(self, calls: int | None) -> int | None:
        return calls if calls == 0 or self.kernels == 1 else 0 if self.kernels == 0 else None


def results(outputs: Any) -> list[Tensor]:
    """A verb's results as a list."""
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def cotangents(outputs: Any) -> list[Tensor]:
    """A random cotangent for each result."""
    return [torch.randn_like(y) for y in results(outputs)]


def gradients(outputs: Any, tensors: list[Tensor], dys: list[Tensor], **options: Any) -> list[Tensor]:
    """The gradients of the tensors among the arguments that require them, by the results that depend on these."""
    wanted = [t for t in tensors if t.requires_grad]
    used = [(y, dy.to(y)) for y, dy in zip(results(outputs), dys, strict=True) if y.requires_grad]
    return list(torch.autograd.grad([y for y, _ in used], wanted, [dy for _, dy in used], **options))


def _matrix(rows: int, cols: int) -> tuple[int, ...]:
    return rows, cols


def _row(rows: int, cols: int) -> tuple[int, ...]:
    return (cols,)


def _column(rows: int, cols: int) -> tuple[int, ...]:
    return rows, 1


def _keys(rows: int, cols: int) -> tuple[int, ...]:
    return 6, cols


_AFFINE = {"x": _matrix, "weight": _row, "bias": _row}
_ADDED = {"x": _matrix, "residual": _matrix, "weight": _row, "bias": _row}
_GATED = {"x": _matrix, "gate": _matrix, "weight": _row, "bias": _row}
_PAIR = {"a": _matrix, "b": _matrix}
_BIASED = {"x": _matrix, "bias": _row}


def _norm(name: str, verb: str, **stages: Any) -> Verb:
    """A norm over the last dimension; the tensors are x, perhaps a residual, weight and bias."""
    added = verb.startswith("add_")

    def ours(x: Tensor, *rest: Tensor, backend: str | None = None) -> Any:
        *residual, weight, bias = rest
        return getattr(kf, verb)(x, *residual, x.shape[-1:], weight, bias=bias, eps=EPS, backend=backend, **stages)

    def pytorch(x: Tensor, *rest: Tensor) -> Any:
        residual, weight, bias = rest if added else (None, *rest)
        rms = verb.endswith("rms_norm")
        y, h = unfused.staged_norm(x, residual, x.shape[-1:], weight, bias, EPS, rms=rms, **stages)
        return (y, h) if added else y

    return Verb(name, _ADDED if added else _AFFINE, ours, pytorch, batches=not stages)


def _gated_norm(name: str, verb: str, **gating: Any) -> Verb:
    """A gated norm over the last dimension, or with `group_size` over either half of it."""
    arguments = _GATED
    if "group_size" in gating:
        arguments = {name: lambda r, c, of=of: of(r, 2 * c) for name, of in _GATED.items()}

    def options(x: Tensor) -> dict[str, Any]:
        return gating | ({"group_size": x.shape[-1] // 2} if "group_size" in gating else {})

    def ours(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, backend: str | None = None) -> Tensor:
        norm = getattr(kf, verb)
        y: Tensor = norm(x, gate, x.shape[-1:], weight, bias=bias, eps=EPS, backend=backend, **options(x))
        return y

    def pytorch(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rms = verb.endswith("rms_norm")
        return unfused.gated_norm(x, gate, x.shape[-1:], weight, bias, EPS, rms=rms, **options(x))

    return Verb(name, arguments, ours, pytorch, reshapes="group_size" in gating)


def _modulated_norm(name: str, verb: str, varies: Callable[[int, int], tuple[int, ...]], **options: Any) -> Verb:
    """A modulated norm over the last dimension; scale, shift and gate have the leading dimensions of `varies`."""
    added = verb.startswith("add_")
    names = ("scale", "shift", "gate") if added else ("scale", "shift")
    arguments = {"x": _matrix} | ({"residual": _matrix} if added else {}) | dict.fromkeys(names, varies)

    def ours(x: Tensor, *rest: Tensor, backend: str | None = None) -> Any:
        residual, (scale, shift, *gate) = rest[:added], rest[added:]
        given = options | dict(zip(("gate",), gate, strict=False))
        return getattr(kf, verb)(x, *residual, x.shape[-1:], scale, shift, eps=EPS, backend=backend, **given)

    def pytorch(x: Tensor, *rest: Tensor) -> Any:
        residual, scale, shift, gate = rest if added else (None, *rest, None)
        stages: dict[str, Any] = {"pre_activation": options.get("pre_activation"), "rms": verb.endswith("rms_norm")}
        stages["dropout"] = lambda u: u if gate is None else gate * u
        y, h = unfused.staged_norm(x, residual, x.shape[-1:], None, None, EPS, **stages)
        y = unfused.modulated(y, scale, shift, options.get("activation"))
        return (y, h) if added else y

    return Verb(name, arguments, ours, pytorch, row_wise=varies is _row)


def _pointwise(verb: str, activation: str, arguments: dict[str, Any], form: str = "", **options: Any) -> Verb:
    def ours(*tensors: Tensor, **backend: Any) -> Tensor:
        return getattr(kf, verb)(*tensors, activation, **backend)

    def pytorch(a: Tensor, b: Tensor) -> Tensor:
        return unfused.pointwise(verb, a, b, activation)

    return Verb(verb + form, arguments, ours, pytorch, **options)


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the tokens of x, its first dimension: a tensor of its kind, and the same in every row."""
    angles = torch.ones_like(x.detach()[:, 0, : x.shape[-1] // 2]).cumsum(-1) * 0.3
    return angles.cos(), angles.sin()


# With a norm, CUDA C++ takes heads of at most 512 columns.
_MAX_PAIRS = 256


def _classes(x: Tensor) -> Tensor:
    """A class for each row of x, in a tensor of x's kind."""
    return torch.full_like(x.detach()[:, 0], 3 % x.shape[1], dtype=torch.int64)


def _logprob_and_entropy(x: Tensor) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(unfused.scaled(x, 2.0), -1)
    return logs.gather(-1, _classes(x)[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def _two_heads(rows: int, cols: int) -> tuple[int, ...]:
    return rows, 2, 2 * min(cols, _MAX_PAIRS)


def _one_head(rows: int, cols: int) -> tuple[int, ...]:
    return rows, 1, 2 * min(cols, _MAX_PAIRS)


def _wide_row(rows: int, cols: int) -> tuple[int, ...]:
    return (2 * min(cols, _MAX_PAIRS),)


def _rotated(x: Tensor, weight: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """The rotation by PyTorch's calls, after the norm if there is a weight."""
    cos, sin = _angles(x)
    n = x if weight is None else unfused.norm(x, x.shape[-1:], weight, None, EPS, rms=True, weight_offset=1.0)
    return unfused.rope(n, cos[:, None], sin[:, None], interleaved)


_STAGES = {"pre_activation": "gelu", "activation": "silu"}
_VERBS = (
    _norm("layer_norm", "layer_norm"),
    _norm("rms_norm", "rms_norm"),
    _norm("layer_norm-staged", "layer_norm", **_STAGES),
    _norm("rms_norm-staged", "rms_norm", **_STAGES),
    _norm("add_layer_norm", "add_layer_norm", pre_activation="tanh"),
    _norm("add_rms_norm", "add_rms_norm", pre_activation="tanh"),
    _gated_norm("gated_layer_norm", "gated_layer_norm"),
    _gated_norm("gated_rms_norm", "gated_rms_norm", gate_activation="gelu", gate_first=True),
    _gated_norm("gated_rms_norm-grouped", "gated_rms_norm", group_size=None),
    _modulated_norm("modulated_layer_norm", "modulated_layer_norm", _row),
    _modulated_norm("modulated_rms_norm-rows", "modulated_rms_norm", _matrix, activation="silu"),
    _modulated_norm("add_modulated_layer_norm-rows", "add_modulated_layer_norm", _matrix, pre_activation="tanh"),
    _modulated_norm("add_modulated_rms_norm", "add_modulated_rms_norm", _row, pre_activation="tanh"),
    _pointwise("add_act", "gelu", _PAIR),
    _pointwise("add_act", "silu", {"a": _matrix, "b": _column}, "-column", kernels=None),
    _pointwise("mul_act", "tanh", _PAIR),
    _pointwise("bias_act", "gelu", _BIASED),
    _pointwise("bias_act", "tanh", _BIASED, "-tanh", kernels=None),
    _pointwise("add_act", "leaky_relu", _PAIR, "-leaky_relu"),
    _pointwise("bias_act", "relu", _BIASED, "-relu", kernels=None),
    Verb(
        "act_dropout",
        {"x": _matrix},
        lambda x, **o: kf.act_dropout(x, "mish", 0.5, training=False, **o),
        lambda x: unfused.pointwise("act_dropout", x, None, "mish"),
        batches=True,
    ),
    _pointwise("gated_act", "silu", _PAIR),
    _pointwise("gated_act", "gelu_tanh", {"gate": _row, "value": _matrix}, "-row", kernels=None, row_wise=False),
    Verb(
        "sum_squared",
        {"x": _matrix},
        lambda x, **o: kf.sum_squared(x, -1, **o),
        lambda x: unfused.reduce("sum_squared", x, -1),
        kernels=None,
        batches=True,
    ),
    Verb(
        "mean_abs",
        {"x": _matrix},
        lambda x, **o: kf.mean_abs(x, **o),
        lambda x: unfused.reduce("mean_abs", x, (-1, -2)),
        kernels=None,
        batches=True,
        row_wise=False,
    ),
    Verb(
        "softmax",
        {"x": _matrix},
        lambda x, **o: kf.softmax(x, scale=0.5, **o),
        lambda x: torch.softmax(unfused.scaled(x, 0.5), -1),
        batches=True,
    ),
    Verb(
        "softmax-masked",
        {"x": _matrix, "mask": _row},
        lambda x, mask, **o: kf.softmax(x, mask=mask, causal=True, **o),
        lambda x, mask: torch.softmax(unfused.scaled(x, mask=mask, causal=True), -1),
        row_wise=False,
    ),
    Verb(
        "log_softmax",
        {"x": _matrix},
        lambda x, **o: kf.log_softmax(x, scale=0.5, **o),
        lambda x: torch.log_softmax(unfused.scaled(x, 0.5), -1),
        batches=True,
    ),
    Verb(
        "cross_entropy",
        {"x": _matrix},
        lambda x, **o: kf.cross_entropy(x, _classes(x), reduction="none", scale=0.5, **o),
        lambda x: torch.nn.functional.cross_entropy(unfused.scaled(x, 0.5), _classes(x), reduction="none"),
        kernels=None,
    ),
    Verb(
        "cross_entropy-smoothed",
        {"x": _matrix},
        lambda x, **o: kf.cross_entropy(x, _classes(x), reduction="none", label_smoothing=0.1, z_loss=1e-2, **o),
        lambda x: (
            torch.nn.functional.cross_entropy(x, _classes(x), reduction="none", label_smoothing=0.1)
            + 1e-2 * torch.logsumexp(x, -1).square()
        ),
        kernels=None,
    ),
    Verb(
        "token_logprob",
        {"x": _matrix},
        lambda x, **o: kf.token_logprob(x, _classes(x), temperature=0.5, entropy=True, **o),
        _logprob_and_entropy,
        kernels=None,
    ),
    Verb(
        "attention_scores",
        {"query": _matrix, "key": _keys},
        lambda q, k, **o: kf.attention_scores(q, k, 0.25, **o),
        lambda q, k: unfused.attention_scores(q, k, 0.25),
        kernels=0,
        row_wise=False,
    ),
    Verb(
        "attention_weights",
        {"query": _matrix, "key": _keys},
        lambda q, k, **o: kf.attention_scores(q, k, 0.25, causal=True, normalize=True, **o),
        lambda q, k: torch.softmax(unfused.masked(unfused.attention_scores(q, k, 0.25), causal=True), -1),
        row_wise=False,
    ),
    Verb(
        "rope",
        {"x": _two_heads},
        lambda x, **o: kf.rope(x, *_angles(x), interleaved=True, **o),
        lambda x: _rotated(x, interleaved=True),
        row_wise=False,
        views=True,
    ),
    Verb(
        "qk_norm_rope",
        {"query": _two_heads, "key": _one_head, "query_weight": _wide_row, "key_weight": _wide_row},
        lambda q, k, a, b, **o: kf.qk_norm_rope(q, k, a, b, *_angles(q), EPS, weight_offset=1.0, **o),
        lambda q, k, a, b: (_rotated(q, a), _rotated(k, b)),
        kernels=None,
        row_wise=False,
        views=True,
    ),
)
VERBS = {verb.name: verb for verb in _VERBS}


def verbs_where(holds: Callable[[Verb], bool]) -> pytest.MarkDecorator:
    """For a test in place of the fixture `operation`: the verbs of which this holds."""
    return pytest.mark.parametrize("operation", [*filter(holds, _VERBS)], ids=str)
