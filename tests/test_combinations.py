"""What goes with what (docs/combinations.md): pairs of options are served, and what the tables leave out is refused."""

from __future__ import annotations

import inspect
from itertools import combinations_with_replacement as pairs
from typing import Any

import pytest
import torch
from support import CPU
from table_combinations import FAMILIES, OPTIONS, has
from test_errors import outcome

import kernel_fusion as kf
from kernel_fusion.backends import availability, eager
from kernel_fusion.core.checks import CONDITIONS, WITHOUT_KERNELS

_QUANTIZE = next(option for option, (_, kind) in OPTIONS.items() if kind == "Quantize")
VERBS = [verb for verbs in FAMILIES.values() for verb in verbs]
_X, _GATE = (torch.linspace(start, end, 48).view(2, 3, 8).bfloat16() for start, end in ((-3, 3), (1, -2)))
_W = torch.linspace(0.5, 2, 8)
_ANGLES = {"cos": _X[0, :, :4].cos(), "sin": _X[0, :, :4].sin()}
_ROWS = kf.Quantize(torch.int8, per="row")
# A value for each option that not every verb has.
_VALUES: dict[str, dict[str, Any]] = {
    "weight": {"weight": _W},
    "bias": {"bias": _W},
    "weight_offset": {"weight_offset": 1.0},
    "residual": {"residual": _GATE},
    "dropout_p": {"dropout_p": 0.5},
    "pre_activation": {"pre_activation": "gelu"},
    "activation": {"activation": "silu"},
    "gate": {"gate": _GATE},
    "gate_first": {"gate_first": True, "gate_activation": "tanh"},
    "group_size": {"group_size": 4},
    "scale": {"scale": _GATE[:, :1], "shift": _X[:, 1:2]},
    "cos": {**_ANGLES, "positions": torch.tensor([2, 0, 1])},
    "rounding": {"rounding": "hf"},
    "out_dtype": {"out_dtype": torch.float32},
    "group": {"group": object()},
}


def _required(verb: str) -> dict[str, Any]:
    """Arguments of a call without options, except those that the verb needs."""
    query = _X[:, None]
    if verb in ("rope", "qk_norm_rope"):
        heads = {"query": query, "key": query, "query_weight": _W, "key_weight": _W}
        return (heads if verb == "qk_norm_rope" else {"input": query}) | _ANGLES
    if verb == "gated_act":
        return {"gate": _GATE, "value": _X, "activation": "silu"}
    if verb == "group_norm":
        return {"input": _X, "num_groups": 3}
    if verb in ("cross_entropy", "token_logprob"):
        classes = torch.tensor([0, 3, 7])
        names = ("input", "target") if verb == "cross_entropy" else ("logits", "ids")
        return dict(zip(names, (_X[0], classes), strict=True))
    if verb == "linear_cross_entropy":
        return {"input": _X[0], "linear_weight": _GATE[0], "target": torch.tensor([0, 2, 1])}
    parameters = inspect.signature(getattr(kf, verb)).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return {"input": _X, "normalized_shape": 8} | {name: _VALUES[name][name] for name in needed if name in _VALUES}


def _call(verb: str, **options: Any) -> Any:
    """Results of a call with these options beside what the verb needs; the same numbers are dropped each time."""
    torch.manual_seed(0)
    result = getattr(kf, verb)(**(_required(verb) | options))
    return list(result) if isinstance(result, tuple) and not isinstance(result, kf.Quantized) else [result]


def _options_of(verb: str) -> list[str]:
    """The arguments by which a verb has options, except codes, and a group, which takes processes."""
    parameters = inspect.signature(getattr(kf, verb)).parameters
    names = {option: name for option, (name, _) in OPTIONS.items() if option not in (_QUANTIZE, "`group`")}
    return [name for option, name in names.items() if name in parameters and has(verb, option)]


def _given(verb: str, *names: str) -> dict[str, Any]:
    """These options, and what they need."""
    needs_weight = "weight_offset" in names and "weight" in _options_of(verb)
    return {key: value for name in (*names, *["weight"] * needs_weight) for key, value in _VALUES[name].items()}


@pytest.mark.parametrize("verb", VERBS)
def test_pairs_of_options(verb: str) -> None:
    """Kernels serve each option of a verb, alone and with any other, and give what the definition gives."""
    excluded = {frozenset(pair) for pair, text in CONDITIONS.items() if "does not go" in text}
    for pair in pairs(_options_of(verb), 2):
        if frozenset(pair) in excluded:
            continue
        options = _given(verb, *pair)
        with CPU.ran(forward=None):
            ours = _call(verb, **options, backend="cpu")
        for one, two in zip(ours, _call(verb, **options, backend="eager"), strict=True):
            torch.testing.assert_close(one, two, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if has(verb, _QUANTIZE)])
def test_codes_beside_any_option(verb: str) -> None:
    """Codes beside each option of a verb are those of its result without them, bit for bit."""
    for name in _options_of(verb):
        options = {} if name == "out_dtype" else _given(verb, name)
        (codes, *h), (v, *wanted) = _call(verb, **options, out_dtype=_ROWS), _call(verb, **options)
        values, scale = eager.quantize(v, torch.int8, None, 0)
        assert torch.equal(codes.values, values)
        assert torch.equal(codes.scale, scale)
        assert all(map(torch.equal, h, wanted))


_ABSENT = [(verb, option) for verb in VERBS for option in OPTIONS if not has(verb, option)]


@pytest.mark.parametrize(("verb", "option"), _ABSENT)
def test_an_option_that_a_verb_does_not_have(verb: str, option: str) -> None:
    """An empty cell of the table is a TypeError that names verb and argument."""
    name = OPTIONS[option][0]
    kind, text = outcome(lambda: _call(verb, **_VALUES[name]))
    assert kind == "TypeError"
    assert verb in text
    assert any(each in text for each in _VALUES[name])


# Arguments that break each condition.
_BROKEN: dict[tuple[str, str], dict[str, Any]] = {
    ("weight_offset", "weight"): {"weight_offset": 1.0},
    ("group_size", "normalized_shape"): {"group_size": 4, "normalized_shape": (3, 8)},
    ("out_dtype", "normalized_shape"): {"out_dtype": _ROWS, "normalized_shape": (3, 8)},
    ("out_dtype", "group"): {"out_dtype": _ROWS, "group": object()},
}
_CONDITIONED = [
    (verb, pair)
    for pair in CONDITIONS
    for verb in VERBS
    if {*pair} <= {*inspect.signature(getattr(kf, verb)).parameters}
]


@pytest.mark.parametrize(("verb", "pair"), _CONDITIONED, ids=str)
def test_a_condition_that_is_not_met(verb: str, pair: tuple[str, str]) -> None:
    """Every verb with both arguments refuses them in the words of the table."""
    broken = dict(_BROKEN[pair])
    if verb.endswith(("modulated_layer_norm", "modulated_rms_norm")) and "normalized_shape" in broken:
        broken["scale"] = _GATE[:, :1].expand(2, 3, 8)
    kind, text = outcome(lambda: _call(verb, **broken))
    assert kind == "ValueError"
    assert text.startswith(f"`{verb}`: `{pair[0]}` {CONDITIONS[pair]}")


_LACKING = [(what, backend) for what, lacks in WITHOUT_KERNELS.items() for backend in lacks]


@pytest.mark.parametrize(("what", "backend"), _LACKING)
def test_a_backend_without_kernels(what: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for it is refused in the words of the table, even where the backend could run."""
    monkeypatch.setattr(availability, "why_not_cuda", lambda device=None: None)
    options: dict[str, Any] = {"group": {"group": object()}, "probabilities": {"target": _X[0]}}.get(what, {})
    verb = {"group": "rms_norm", "probabilities": "cross_entropy"}.get(what, what)
    kind, text = outcome(lambda: _call(verb, **options, backend=backend))
    assert kind == "BackendUnavailableError"
    assert WITHOUT_KERNELS[what][backend] in text
