"""Bad input: PyTorch's own words where it has some, ours elsewhere, and never a crash or a wrong answer.

PyTorch's texts are not copied here: the same bad call is made on PyTorch, and type and text are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import EAGER, Target, call
from torch import Tensor
from verbs import Verb, verbs_where

import kernel_fusion as kf
from kernel_fusion.errors import BackendUnavailableError

_ONES = torch.ones


def outcome(function: Callable[[], Tensor]) -> tuple[str, str] | Tensor:
    """The result of `function`, or the type and text of its error."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error)


# x's shape, normalized_shape, weight's shape, bias's shape.
_BAD_SHAPES = [
    pytest.param((2, 8), (7,), None, None, id="last"),
    pytest.param((2, 2, 3), (2, 2), None, None, id="two-dims"),
    pytest.param((2, 8), (3, 2, 8), None, None, id="too-many"),
    pytest.param((2, 8), (), None, None, id="none"),
    pytest.param((), (1,), None, None, id="0-d"),
    pytest.param((2, 8), (8,), (7,), None, id="weight"),
    pytest.param((2, 8), (8,), (1, 8), None, id="weight-dims"),
    pytest.param((2, 8), (8,), (8,), (1,), id="bias"),
    pytest.param((2, 3, 4), (3, 4), (4,), None, id="weight-of-two"),
]


@pytest.mark.parametrize(("shape", "normalized_shape", "weight", "bias"), _BAD_SHAPES)
def test_layer_norm_shapes_in_pytorch_words(
    shape: Any, normalized_shape: Any, weight: Any, bias: Any, any_target: Target
) -> None:
    """A shape that does not fit `layer_norm` raises PyTorch's error, word by word."""
    ones = [None if s is None else _ONES(s, device=any_target.device) for s in (shape, weight, bias)]
    theirs = outcome(lambda: F.layer_norm(ones[0], normalized_shape, *ones[1:]))
    with any_target.ran(forward=0):
        ours = outcome(lambda: kf.layer_norm(ones[0], normalized_shape, *ones[1:], backend=any_target.backend))
    assert isinstance(theirs, tuple)
    assert ours == theirs


@pytest.mark.parametrize(("shape", "normalized_shape", "weight", "bias"), _BAD_SHAPES)
def test_rms_norm_shapes_in_pytorch_words(
    shape: Any, normalized_shape: Any, weight: Any, bias: Any, any_target: Target
) -> None:
    """A shape that does not fit `rms_norm` raises PyTorch's error, word by word; a bias that of `F.layer_norm`."""
    x, w, b = (None if s is None else _ONES(s, device=any_target.device) for s in (shape, weight, bias))
    if bias is not None:
        theirs = outcome(lambda: F.layer_norm(x, normalized_shape, w, b))
    else:
        theirs = outcome(lambda: F.rms_norm(x, normalized_shape, w))
    with any_target.ran(forward=0):
        ours = outcome(lambda: kf.rms_norm(x, normalized_shape, w, bias=b, backend=any_target.backend))
    assert isinstance(theirs, tuple)
    assert ours == theirs


@pytest.mark.parametrize("shape", [(8.0,), ("8",), None], ids=str)
def test_normalized_shape_of_wrong_type(verb: str, shape: Any, any_target: Target) -> None:
    """A `normalized_shape` that PyTorch's call refuses by type is a TypeError here too."""
    x = torch.randn(2, 8, device=any_target.device)
    with pytest.raises(TypeError):
        getattr(F, verb)(x, shape)
    with any_target.ran(forward=0), pytest.raises(TypeError):
        getattr(kf, verb)(x, shape, backend=any_target.backend)


def test_input_that_is_no_tensor(verb: str) -> None:
    """A list as input raises PyTorch's TypeError."""
    theirs = outcome(lambda: getattr(F, verb)([1.0], (1,)))
    with EAGER.ran():
        assert outcome(lambda: getattr(kf, verb)([1.0], (1,), backend="eager")) == theirs


# x's dtype, the parameter's dtype, what is expected.
_BAD_MIXES = [
    (torch.float32, torch.float64, "float16 or bfloat16 or float32"),
    (torch.bfloat16, torch.int64, "float16 or bfloat16 or float32"),
    (torch.float64, torch.float32, "float64"),
]


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(("dtype", "parameter", "expected"), _BAD_MIXES)
def test_dtype_mixes_that_do_not_fit(
    verb: str, name: str, dtype: torch.dtype, parameter: torch.dtype, expected: str, any_target: Target
) -> None:
    """A weight or bias dtype outside the contract is named, with what would fit."""
    x = _ONES(2, 8, dtype=dtype, device=any_target.device)
    wrong = {name: _ONES(8, dtype=parameter, device=any_target.device)}
    short = [str(d).removeprefix("torch.") for d in (dtype, parameter)]
    text = f"`{verb}`: `{name}` must be {expected} for {short[0]} input, got {short[1]}"
    with any_target.ran(forward=0):
        assert outcome(lambda: call(verb, x, backend=any_target.backend, **wrong)) == ("RuntimeError", text)


@pytest.mark.parametrize(("dtype", "out"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_out_dtype_that_does_not_fit(verb: str, dtype: torch.dtype, out: torch.dtype, any_target: Target) -> None:
    """An `out_dtype` outside the contract is named, with what would fit."""
    x = _ONES(2, 8, dtype=dtype, device=any_target.device)
    with (
        any_target.ran(forward=0),
        pytest.raises(RuntimeError, match=rf"^`{verb}`: `out_dtype` must be .* for .* input, got "),
    ):
        call(verb, x, out_dtype=out, backend=any_target.backend)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameter_on_another_device(verb: str, name: str, any_target: Target) -> None:
    """A weight or bias on another device is named, with both devices."""
    x = _ONES(2, 8, device=any_target.device)
    text = (
        f"`{verb}`: expected all tensors to be on the same device, but `{name}` is on meta and `input` is on {x.device}"
    )
    elsewhere = {name: _ONES(8, device="meta")}
    with any_target.ran(forward=0):
        assert outcome(lambda: call(verb, x, backend=any_target.backend, **elsewhere)) == ("RuntimeError", text)


def test_weight_offset_without_weight(verb: str, any_target: Target) -> None:
    """`weight_offset` with nothing to add it to is a ValueError."""
    x = _ONES(2, 8, device=any_target.device)
    text = f"`{verb}`: `weight_offset` needs a `weight`, got weight_offset=1.0 without one"
    with any_target.ran(forward=0):
        assert outcome(lambda: call(verb, x, weight_offset=1.0, backend=any_target.backend)) == ("ValueError", text)


def test_unknown_backend(verb: str) -> None:
    """A backend that does not exist is named beside those that do."""
    text = "`backend` must be one of 'cuda', 'triton', 'cpu', 'eager' or None, got 'cdua'"
    with EAGER.ran():
        assert outcome(lambda: call(verb, _ONES(2, 8), backend="cdua")) == ("ValueError", text)
        assert outcome(lambda: kf.use_backend("cdua").__enter__()) == ("ValueError", text)


@pytest.mark.parametrize(
    ("backend", "device", "reason"),
    [
        ("cuda", "cpu", "the input is on cpu"),
        ("cpu", "meta", "the input is on meta"),
        (
            "triton",
            "cpu",
            "the input is on cpu, and its kernels run there in the interpreter alone (TRITON_INTERPRET=1)",
        ),
    ],
)
def test_unavailable_backend_says_why(
    verb: str, backend: str, device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explicit request that cannot be met raises with the reason, by argument and by `use_backend`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = _ONES(2, 8, device=device)
    text = f"`{verb}`: backend {backend!r} was requested, but {reason}"
    with EAGER.ran():
        with pytest.raises(BackendUnavailableError) as by_argument:
            call(verb, x, backend=backend)
        with kf.use_backend(backend), pytest.raises(BackendUnavailableError) as by_context:
            call(verb, x)
    assert str(by_argument.value) == str(by_context.value) == text


@pytest.mark.parametrize("verb", ["add_layer_norm", "add_rms_norm"])
def test_no_residual_to_add_to(verb: str) -> None:
    """The verbs that add want what they add to, and name the verb that does not."""
    text = f"`{verb}`: `residual` must be a tensor, got None; without one the verb is `{verb.removeprefix('add_')}`"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        getattr(kf, verb)(torch.ones(2, 8), None, 8)


def test_use_backend_nests_and_recovers() -> None:
    """`use_backend` restores the previous choice, after an exception too."""
    with EAGER.ran(), kf.use_backend("eager"):
        with pytest.raises(BackendUnavailableError), kf.use_backend("cuda"):
            kf.layer_norm(_ONES(2, 8), (8,))
        kf.layer_norm(_ONES(2, 8), (8,))


def test_explain_names_every_backend(target: Target) -> None:
    """`explain` says what a call takes and why not the others, and runs nothing."""
    x = _ONES(2, 8, device=target.device)
    with target.ran(forward=0):
        explanation = kf.explain(kf.layer_norm, x, (8,))
        assert kf.explain(kf.layer_norm, x, (8,), backend="eager").backend == "eager"
        with pytest.raises(BackendUnavailableError, match="the input is on meta"):
            kf.explain(kf.layer_norm, x.to("meta"), (8,), backend=target.backend)
    assert explanation.backend == target.backend
    assert set(explanation.reasons) == {"cuda", "triton", "cpu", "eager"} - {target.backend}
    assert all(explanation.reasons.values())


def test_a_bad_call_changes_nothing(verb: str, target: Target) -> None:
    """After a refused call the inputs are as they were, and the next call works."""
    x, weight = torch.randn(4, 8, device=target.device), torch.randn(8, device=target.device)
    before = x.clone(), weight.clone()
    with target.ran(forward=1):
        with pytest.raises(RuntimeError):
            call(verb, x, weight, torch.randn(7, device=target.device), backend=target.backend)
        y = call(verb, x, weight, backend=target.backend)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])
    assert y.isfinite().all()


# Wrong shapes, and the PyTorch call that complains about them.
_IN_PYTORCH_WORDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add_act": (lambda x, o: kf.add_act(x, x[:, :3], "relu", **o), lambda x: x + x[:, :3]),
    "mul_act": (lambda x, o: kf.mul_act(x, x[:, :3], "relu", **o), lambda x: x * x[:, :3]),
    "bias_act": (lambda x, o: kf.bias_act(x, x[0, :3], "relu", **o), lambda x: x + x[0, :3]),
    "gated_act": (lambda x, o: kf.gated_act(x, x[:, :3], "relu", **o), lambda x: x * x[:, :3]),
    "sum_squared": (lambda x, o: kf.sum_squared(x, 2, **o), lambda x: x.sum(2)),
    "sum_squared-twice": (lambda x, o: kf.sum_squared(x, (1, -1), **o), lambda x: x.sum((1, -1))),
    "mean_abs": (lambda x, o: kf.mean_abs(x, (0, -3), **o), lambda x: x.mean((0, -3))),
    "softmax": (lambda x, o: kf.softmax(x, -3, **o), lambda x: torch.softmax(x, -3)),
    "softmax-mask": (lambda x, o: kf.softmax(x, mask=x[:, :3], **o), lambda x: x[:, :3].expand(x.shape)),
    "attention_scores": (lambda x, o: kf.attention_scores(x, x[:, :3], **o), lambda x: x @ x[:, :3].mT),
    "attention_scores-mask": (
        lambda x, o: kf.attention_scores(x, x, mask=x[:, :3], **o),
        lambda x: x[:, :3].expand(4, 4),
    ),
    "attention_weights-mask": (
        lambda x, o: kf.attention_scores(x, x, mask=x[:, :3], normalize=True, **o),
        lambda x: x[:, :3].expand(4, 4),
    ),
    "add_layer_norm": (lambda x, o: kf.add_layer_norm(x, x, 7, **o), lambda x: F.layer_norm(x, (7,))),
    "add_rms_norm": (lambda x, o: kf.add_rms_norm(x, x, 7, **o), lambda x: F.rms_norm(x, (7,))),
}


# The text before PyTorch's words, if they name no argument that the caller knows.
_BEFORE = {
    "add_act": "`add_act`: `a` and `b` must have shapes that broadcast, got [4, 8] and [4, 3]: ",
    "mul_act": "`mul_act`: `a` and `b` must have shapes that broadcast, got [4, 8] and [4, 3]: ",
    "bias_act": "`bias_act`: `input` and `bias` must have shapes that broadcast, got [4, 8] and [3]: ",
    "gated_act": "`gated_act`: `gate` and `value` must have shapes that broadcast, got [4, 8] and [4, 3]: ",
    "softmax-mask": "`softmax`: `mask` must broadcast to shape [4, 8], got [4, 3]: ",
    "attention_scores-mask": "`attention_scores`: `mask` must broadcast to shape [4, 4], got [4, 3]: ",
    "attention_weights-mask": "`attention_scores`: `mask` must broadcast to shape [4, 4], got [4, 3]: ",
}


@pytest.mark.parametrize("name", _IN_PYTORCH_WORDS)
def test_shapes_and_dimensions_in_pytorch_words(name: str, any_target: Target) -> None:
    """Wrong shapes in the other verbs raise PyTorch's error, after the names of verb and arguments."""
    ours, theirs = _IN_PYTORCH_WORDS[name]
    x = _ONES(4, 8, device=any_target.device)
    expected = outcome(lambda: theirs(x))
    assert isinstance(expected, tuple)
    with any_target.ran(forward=0):
        kind, text = outcome(lambda: ours(x, {"backend": any_target.backend}))
    assert (kind, text) == (expected[0], _BEFORE.get(name, "") + expected[1])


_ACTIVATED: dict[str, Callable[..., Any]] = {
    "add_act": lambda x, act, **o: kf.add_act(x, x, act, **o),
    "mul_act": lambda x, act, **o: kf.mul_act(x, x, act, **o),
    "bias_act": lambda x, act, **o: kf.bias_act(x, x, act, **o),
    "act_dropout": lambda x, act, **o: kf.act_dropout(x, act, **o),
    "gated_act": lambda x, act, **o: kf.gated_act(x, x, act, **o),
    "layer_norm": lambda x, act, **o: kf.layer_norm(x, 8, activation=act, **o),
    "rms_norm": lambda x, act, **o: kf.rms_norm(x, 8, activation=act, **o),
    "add_layer_norm": lambda x, act, **o: kf.add_layer_norm(x, x, 8, activation=act, **o),
    "add_rms_norm": lambda x, act, **o: kf.add_rms_norm(x, x, 8, activation=act, **o),
}


@pytest.mark.parametrize("name", _ACTIVATED)
def test_unknown_activation(name: str, any_target: Target) -> None:
    """A name that is no activation is given back beside those that are; internal names count as unknown."""
    x = _ONES(4, 8, device=any_target.device)
    choices = ", ".join(map(repr, kf.ACTIVATIONS))
    for wrong in ("swish", "sign", ""):
        with any_target.ran(forward=0):
            error = outcome(lambda wrong=wrong: _ACTIVATED[name](x, wrong, backend=any_target.backend))
        assert error == ("ValueError", f"`{name}`: `activation` must be one of {choices}, got {wrong!r}")


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_unknown_pre_activation(norm: str, any_target: Target) -> None:
    """So is one before the norm."""
    x = _ONES(4, 8, device=any_target.device)
    tensors = (x, x) if norm.startswith("add_") else (x,)
    with (
        any_target.ran(forward=0),
        pytest.raises(ValueError, match=rf"^`{norm}`: `pre_activation` must be one of .*'x'$"),
    ):
        getattr(kf, norm)(*tensors, 8, pre_activation="x", backend=any_target.backend)


@pytest.mark.parametrize("norm", ["add_layer_norm", "add_rms_norm"])
def test_residual_that_does_not_fit(norm: str, any_target: Target) -> None:
    """A residual of another shape, dtype or device is named, with what was expected and what came."""
    x = _ONES(4, 8, device=any_target.device)
    elsewhere = "expected all tensors to be on the same device, but `residual` is on meta and `input` is on"
    expected = {
        "`residual` must have the shape of `input`, [4, 8], got [8]": x[0],
        "`residual` must be float16 or bfloat16 or float32 for float32 input, got float64": x.double(),
        f"{elsewhere} {x.device}": x.to("meta"),
    }
    for text, residual in expected.items():
        with any_target.ran(forward=0):
            error = outcome(lambda r=residual: getattr(kf, norm)(x, r, 8, backend=any_target.backend))
        assert error == ("RuntimeError", f"`{norm}`: {text}")


def test_causal_needs_rows_and_columns(any_target: Target) -> None:
    """`causal` over a dimension that has no rows is a ValueError."""
    x = _ONES(4, 8, device=any_target.device)
    for dim, wrong in ((0, x), (-1, x[0]), (-1, x[0, 0]), (0, x[0, 0])):
        with any_target.ran(forward=0), pytest.raises(ValueError, match=r"^`softmax`: `causal` needs rows and columns"):
            kf.softmax(wrong, dim, causal=True, backend=any_target.backend)


@verbs_where(lambda verb: verb.kernels != 0)  # of the others no kernel of ours is asked for
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_unavailable_backend_of_every_verb(operation: Verb, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit request that cannot be met raises with the verb's name and the reason, whatever the verb."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [t.detach() for t in operation.leaves(EAGER)]
    with (
        EAGER.ran(),
        pytest.raises(
            BackendUnavailableError, match=rf"^`\w+`: backend '{backend}' was .*the input is on cpu"
        ) as error,
    ):
        operation.ours(*tensors, backend=backend)
    assert operation.name.startswith((str(error.value).split("`")[1], "attention_weights"))
