"""Arguments of the wrong kind: None, types, dtypes and devices that no verb takes, each refused by name.

If PyTorch's call refuses the same, the error types are compared. Shapes are in test_errors.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import CPU, EAGER, TRITON, Target
from test_errors import outcome
from torch import Tensor

import kernel_fusion as kf

_ONES = torch.ones
_FLOATING = "float16 or bfloat16 or float32 or float64"
_BACKENDS = pytest.mark.parametrize("backend", [None, "cpu", "triton", "eager"])

# ---- None ------------------------------------------------------------------------------------------------------------

_TWO_OPERANDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add_act": ("b", lambda x: kf.add_act(x, None, "relu")),
    "mul_act": ("b", lambda x: kf.mul_act(x, None, "relu")),
    "gated_act": ("value", lambda x: kf.gated_act(x, None, "relu")),
    "fused_bias_gelu": ("bias", lambda x: kf.ops.fused_bias_gelu(x, None)),
    "kernels.elementwise.add_relu": ("b", lambda x: kf.kernels.elementwise.add_relu(x, None)),
    "kernels.elementwise.mul_tanh": ("b", lambda x: kf.kernels.elementwise.mul_tanh(x, None)),
    "kernels.elementwise.bias_gelu": ("bias", lambda x: kf.kernels.elementwise.bias_gelu(x, None)),
    "kernels.fusion.layer_norm_relu": ("input", lambda x: kf.kernels.fusion.layer_norm_relu(None, 8, x[0], None)),
    "kernels.fusion.attention_score": ("key", lambda x: kf.kernels.fusion.attention_score(x, None, 1.0)),
    "attention_scores": ("key", lambda x: kf.attention_scores(x, None)),
}


@pytest.mark.parametrize("name", _TWO_OPERANDS)
@pytest.mark.parametrize("kind", [torch.ones, np.ones], ids=["tensor", "array"])
def test_an_operand_that_is_missing(name: str, kind: Any) -> None:
    """None as an operand is no operand, not the other one again: a TypeError that names verb and argument."""
    argument, call = _TWO_OPERANDS[name]
    if kind is np.ones and name.startswith("kernels."):
        kind = torch.ones  # the direct layer takes no arrays
    got = "NoneType" if name.startswith("kernels.") else "None"
    text = f"`{name}`: `{argument}` must be a (torch.Tensor|tensor), got {got}"
    with EAGER.ran(), pytest.raises(TypeError, match=f"^{text}$"):
        call(kind((4, 8), dtype="float32" if kind is np.ones else None))


def test_bias_act_without_bias(any_target: Target) -> None:
    """None as a bias is no bias."""
    x, dy = torch.randn(2, 4, 8, device=any_target.device)
    x.requires_grad_()
    with any_target.ran(forward=2, backward=2):
        for y in (
            kf.bias_act(x, None, "relu", backend=any_target.backend),
            kf.bias_act(x, None, "relu", dropout_p=0.5, training=False, backend=any_target.backend),
        ):
            assert torch.equal(y, torch.relu(x))
            assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.where(x > 0, dy, 0.0))
    assert torch.equal(kf.bias_act(x, None, None, backend=any_target.backend), x)


def test_a_bias_that_is_taken_away() -> None:
    """A module whose bias was set to None adds none."""
    module = kf.FusedBiasAct(8, "relu")
    module.bias = None
    x = torch.randn(4, 8)
    with CPU.ran():
        assert torch.equal(module(x), torch.relu(x))
    assert not kf.FusedBiasAct(8, "relu", bias=False).state_dict()


@pytest.mark.parametrize("combine", ["add", "mul", "gate", "first"])
def test_the_definition_refuses_a_missing_operand(combine: str) -> None:
    """The operator and its definition take as many operands as the chain has."""
    x = _ONES(4, 8)
    b = x if combine == "first" else None
    for name in ("pointwise", "pointwise_reference"):
        operator = getattr(torch.ops.kernel_fusion, name)
        with EAGER.ran(), pytest.raises(TypeError, match=r"`b` must be None where `combine` is 'first', and a tensor"):
            operator(x, b, combine, "relu", 1.0, 0.0, None)


# ---- Types -----------------------------------------------------------------------------------------------------------

# A call with an argument of a wrong type, PyTorch's, and what ours says.
_WRONG_TYPES: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "normalized_shape": (
        lambda x, **o: kf.layer_norm(x, 8.0, **o),
        lambda x: F.layer_norm(x, 8.0),
        "`layer_norm`: `normalized_shape` must be an int or a sequence of ints, got 8.0",
    ),
    "normalized_shape-add": (
        lambda x, **o: kf.add_rms_norm(x, x, 8.0, **o),
        lambda x: F.rms_norm(x + x, 8.0),
        "`add_rms_norm`: `normalized_shape` must be an int or a sequence of ints, got 8.0",
    ),
    "normalized_shape-several": (
        lambda x, **o: kf.add_rms_norm(x, x, (4, 8.0), **o),
        lambda x: F.rms_norm(x + x, (4, 8.0)),
        "`add_rms_norm`: `normalized_shape` must be an int or a sequence of ints, got tuple",
    ),
    "normalized_shape-gated": (
        lambda x, **o: kf.gated_rms_norm(x, x, (8.0,), **o),
        lambda x: F.rms_norm(x, (8.0,)),
        "`gated_rms_norm`: `normalized_shape` must be an int or a sequence of ints, got tuple",
    ),
    "eps": (
        lambda x, **o: kf.layer_norm(x, 8, eps="1e-5", **o),
        lambda x: F.layer_norm(x, (8,), eps="1e-5"),
        "`layer_norm`: `eps` must be a number, got '1e-5'",
    ),
    "eps-rms": (
        lambda x, **o: kf.rms_norm(x, 8, eps="1e-5", **o),
        lambda x: F.rms_norm(x, (8,), eps="1e-5"),
        "`rms_norm`: `eps` must be a number, got '1e-5'",
    ),
    "eps-none": (
        lambda x, **o: kf.layer_norm(x, 8, eps=None, **o),
        lambda x: F.layer_norm(x, (8,), eps=None),
        "`layer_norm`: `eps` must be a number, got None",
    ),
    "eps-staged": (
        lambda x, **o: kf.layer_norm(x, 8, eps=None, activation="relu", **o),
        lambda x: F.layer_norm(x, (8,), eps=None),
        "`layer_norm`: `eps` must be a number, got None",
    ),
    "weight": (
        lambda x, **o: kf.rms_norm(x, 8, [1.0] * 8, **o),
        lambda x: F.rms_norm(x, (8,), [1.0] * 8),
        "`rms_norm`: `weight` must be a tensor, got list",
    ),
    "weight-staged": (
        lambda x, **o: kf.add_layer_norm(x, x, 8, x[0].numpy(), **o),
        lambda x: F.layer_norm(x, (8,), x[0].numpy()),
        "`add_layer_norm`: `weight` must be a tensor, got ndarray",
    ),
    "residual": (
        lambda x, **o: kf.add_layer_norm(x, 1.0, 8, **o),
        lambda x: F.layer_norm(x, (8,), 1.0),
        "`add_layer_norm`: `residual` must be a tensor, got 1.0",
    ),
    "weight_offset": (
        lambda x, **o: kf.layer_norm(x, 8, x[0], weight_offset="1", **o),
        lambda x: F.layer_norm(x, (8,), x[0], eps="1"),
        "`layer_norm`: `weight_offset` must be a number, got '1'",
    ),
    "out_dtype": (
        lambda x, **o: kf.rms_norm(x, 8, out_dtype="float32", **o),
        lambda x: torch.softmax(x, -1, dtype="float32"),
        "`rms_norm`: `out_dtype` must be a torch.dtype, a Quantize or None, got 'float32'",
    ),
    "b": (
        lambda x, **o: kf.add_act(x, 1.0, "relu", **o),
        lambda x: F.bilinear(x, 1.0, x),
        "`add_act`: `b` must be a tensor, got 1.0",
    ),
    "dropout_p": (
        lambda x, **o: kf.bias_act(x, x, "relu", dropout_p="0.5", **o),
        lambda x: F.dropout(x, "0.5"),
        "`bias_act`: `dropout_p` must be a number, got '0.5'",
    ),
    "dim": (
        lambda x, **o: kf.sum_squared(x, 1.0, **o),
        lambda x: x.sum(1.0),
        "`sum_squared`: `dim` must be an int, a sequence of ints or None, got 1.0",
    ),
    "dim-several": (
        lambda x, **o: kf.mean_abs(x, (0, 1.0), **o),
        lambda x: x.mean((0, 1.0)),
        "`mean_abs`: `dim` must be an int, a sequence of ints or None, got tuple",
    ),
    "keepdim": (
        lambda x, **o: kf.sum_squared(x, 0, "no", **o),
        lambda x: x.sum(0, "no"),
        "`sum_squared`: `keepdim` must be a bool, got 'no'",
    ),
    "dim-softmax": (
        lambda x, **o: kf.softmax(x, 1.0, **o),
        lambda x: torch.softmax(x, 1.0),
        "`softmax`: `dim` must be an int, got 1.0",
    ),
    "dtype": (
        lambda x, **o: kf.mean_abs(x, dtype="float32", **o),
        lambda x: x.mean(dtype="float32"),
        "`mean_abs`: `dtype` must be a torch.dtype or None, got 'float32'",
    ),
    "scale": (
        lambda x, **o: kf.softmax(x, scale="0.5", **o),
        lambda x: F.scaled_dot_product_attention(x, x, x, scale="0.5"),
        "`softmax`: `scale` must be a number, got '0.5'",
    ),
    "scale-scores": (
        lambda x, **o: kf.attention_scores(x, x, "0.5", **o),
        lambda x: F.scaled_dot_product_attention(x, x, x, scale="0.5"),
        "`attention_scores`: `scale` must be a number, got '0.5'",
    ),
    "mask": (
        lambda x, **o: kf.softmax(x, mask=[True] * 8, **o),
        lambda x: x.masked_fill([True] * 8, 0.0),
        "`softmax`: `mask` must be a tensor, got list",
    ),
}


@_BACKENDS
@pytest.mark.parametrize("name", _WRONG_TYPES)
def test_arguments_of_a_wrong_type(name: str, backend: str | None) -> None:
    """An argument of a wrong type is a TypeError, as in PyTorch, that names verb and argument."""
    ours, theirs, text = _WRONG_TYPES[name]
    x = _ONES(4, 8)
    with pytest.raises(TypeError):
        theirs(x)
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        ours(x, backend=backend)


def test_group_of_a_wrong_type() -> None:
    """A `group` that is no process group, such as the name of a mesh's dimension, is named."""
    text = "`rms_norm`: `group` must be a torch.distributed.ProcessGroup or None, got 'tp'"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        kf.rms_norm(_ONES(4, 8), 8, group="tp")


# ---- Dtypes ----------------------------------------------------------------------------------------------------------

# Every verb, the name of its first argument, and PyTorch's calls.
_OF_DTYPE: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "layer_norm": ("input", lambda x: kf.layer_norm(x, 8), lambda x: F.layer_norm(x, (8,))),
    "rms_norm": ("input", lambda x: kf.rms_norm(x, 8), lambda x: F.rms_norm(x, (8,))),
    "layer_norm-staged": (
        "input",
        lambda x: kf.layer_norm(x, 8, activation="relu"),
        lambda x: F.relu(F.layer_norm(x, (8,))),
    ),
    "add_layer_norm": ("input", lambda x: kf.add_layer_norm(x, x, 8)[0], lambda x: F.layer_norm(x + x, (8,))),
    "add_rms_norm": ("input", lambda x: kf.add_rms_norm(x, x, 8)[0], lambda x: F.rms_norm(x + x, (8,))),
    "add_rms_norm-dropout": (
        "input",
        lambda x: kf.add_rms_norm(x, x, 8, dropout_p=0.5)[0],
        lambda x: F.rms_norm(F.dropout(x) + x, (8,)),
    ),
    "gated_layer_norm": ("input", lambda x: kf.gated_layer_norm(x, x, 8), lambda x: F.layer_norm(x, (8,)) * F.silu(x)),
    "gated_rms_norm": (
        "input",
        lambda x: kf.gated_rms_norm(x, x, 8, gate_activation="tanh", gate_first=True),
        lambda x: F.rms_norm(x * torch.tanh(x), (8,)),
    ),
    "modulated_layer_norm": (
        "input",
        lambda x: kf.modulated_layer_norm(x, 8, x),
        lambda x: F.layer_norm(x, (8,)) * (1 + x),
    ),
    "add_act": ("a", lambda x: kf.add_act(x, x, "relu"), lambda x: F.relu(x + x)),
    "mul_act": ("a", lambda x: kf.mul_act(x, x, "tanh"), lambda x: torch.tanh(x * x)),
    "gated_act": ("gate", lambda x: kf.gated_act(x, x, "silu"), lambda x: F.silu(x) * x),
    "bias_act": ("input", lambda x: kf.bias_act(x, x[0], "gelu"), lambda x: F.gelu(x + x[0])),
    "bias_act-mixed": ("input", lambda x: kf.bias_act(x, _ONES(8), "gelu"), lambda x: F.gelu(x + _ONES(8))),
    "act_dropout": ("input", lambda x: kf.act_dropout(x, None), F.dropout),
    "sum_squared": ("input", lambda x: kf.sum_squared(x, -1), lambda x: x.square().sum(-1)),
    "sum_squared-dtype": (
        "dtype",
        lambda x: kf.sum_squared(_ONES(4, 8), dtype=x.dtype),
        lambda x: _ONES(4, 8).sum(dtype=x.dtype),
    ),
    "mean_abs": ("input", lambda x: kf.mean_abs(x), lambda x: x.abs().mean()),
    "softmax": ("input", lambda x: kf.softmax(x), lambda x: torch.softmax(x, -1)),
}
# PyTorch's chains of these compute in float8, through operations that know it.
_BEYOND_PYTORCH = {
    "mul_act": lambda x: kf.mul_act(x, x, None),
    "mean_abs": lambda x: kf.mean_abs(x, dtype=torch.float32),
}
_FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, *_FLOAT8], ids=str)
@pytest.mark.parametrize("name", _OF_DTYPE)
def test_dtypes_without_kernels(name: str, dtype: torch.dtype) -> None:
    """Integers, complex numbers and float8 give PyTorch's dtype, or an error of its type with our names."""
    argument, ours, theirs = _OF_DTYPE[name]
    x = _ONES(4, 8).to(dtype)
    expected = outcome(lambda: theirs(x))
    with EAGER.ran():
        got = outcome(lambda: ours(x))
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor)
        assert got.dtype == expected.dtype
        return
    assert isinstance(got, tuple)
    assert got[0] == expected[0]
    short = str(dtype).removeprefix("torch.")
    assert got[1].startswith(f"`{name.split('-')[0]}`: `{argument}` must be {_FLOATING}, got {short}: ")


def test_float8_is_refused_everywhere() -> None:
    """No verb computes in float8, as hardly any of PyTorch's operations does."""
    x = _ONES(4, 8).to(torch.float8_e4m3fn)
    for name, ours in ({name: ours for name, (_, ours, _) in _OF_DTYPE.items()} | _BEYOND_PYTORCH).items():
        assert isinstance(outcome(lambda ours=ours: ours(x)), tuple), name


@_BACKENDS
def test_scores_of_integers_are_refused(backend: str | None) -> None:
    """PyTorch's attention refuses integers; its product of them takes the scale for an integer, here 0."""
    x = torch.ones(4, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(x, x, x)
    text = f"`attention_scores`: `query` must be {_FLOATING}, got int64"
    assert outcome(lambda: kf.attention_scores(x, x, backend=backend)) == ("RuntimeError", text)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn], ids=str)
@_BACKENDS
def test_masks_that_neither_keep_nor_add(dtype: torch.dtype, backend: str | None) -> None:
    """A mask of integers is refused, as by PyTorch's attention, not added to the logits; so it is by the operators."""
    x = torch.randn(2, 4, 4)
    mask = _ONES(4, 4).to(dtype)
    with pytest.raises(RuntimeError, match="attn_mask dtype"):
        F.scaled_dot_product_attention(x, x, x, mask)
    short = str(dtype).removeprefix("torch.")
    text = "`{}`: `mask` must be boolean or floating point, got {}; `mask.bool()` keeps what is not 0"
    calls: dict[str, Callable[[], Tensor]] = {
        "softmax": lambda: kf.softmax(x, mask=mask, backend=backend),
        "attention_scores": lambda: kf.attention_scores(x, x, mask=mask, normalize=True, backend=backend),
        "attention_scores ": lambda: kf.attention_scores(x, x, mask=mask, backend=backend),
        "softmax ": lambda: torch.ops.kernel_fusion.softmax(x, mask.expand(x.shape), 1.0, False),
        "softmax  ": lambda: torch.ops.kernel_fusion.softmax_reference(x, mask.expand(x.shape), 1.0, False),
    }
    for name, call in calls.items():
        assert outcome(call) == ("RuntimeError", text.format(name.strip(), short)), name


# ---- Devices ---------------------------------------------------------------------------------------------------------

_TWO_DEVICES: dict[str, Callable[..., Any]] = {
    "add_act": lambda x, other, **o: kf.add_act(x, other, "relu", **o),
    "mul_act": lambda x, other, **o: kf.mul_act(x, other, "relu", **o),
    "bias_act": lambda x, other, **o: kf.bias_act(x, other[0], "relu", dropout_p=0.5, **o),
    "gated_act": lambda x, other, **o: kf.gated_act(x, other, "relu", **o),
    "softmax": lambda x, other, **o: kf.softmax(x, mask=other, **o),
    "softmax-boolean": lambda x, other, **o: kf.softmax(x, mask=other.bool(), **o),
    "attention_scores": lambda x, other, **o: kf.attention_scores(x, other, **o),
    "attention_scores-mask": lambda x, other, **o: kf.attention_scores(x, x, mask=other[:, :4], **o),
    "attention_scores-boolean": lambda x, other, **o: kf.attention_scores(x, x, mask=other[:, :4].bool(), **o),
    "attention_weights": lambda x, other, **o: kf.attention_scores(x, other, normalize=True, causal=True, **o),
    "attention_weights-mask": lambda x, other, **o: kf.attention_scores(x, x, mask=other[:, :4], normalize=True, **o),
}


@pytest.mark.parametrize("target", [CPU, TRITON, EAGER], ids=lambda t: t.backend)
@pytest.mark.parametrize("name", _TWO_DEVICES)
def test_tensors_on_two_devices(name: str, target: Target) -> None:
    """Tensors on two devices raise what PyTorch's sum of them raises, instead of giving whatever memory holds."""
    here, there = _ONES(4, 8, device=target.device), _ONES(4, 8, device="meta")
    expected = outcome(lambda: here + there)
    assert expected[0] == "RuntimeError"
    words = {
        expected,
        *([] if "boolean" not in name else [outcome(lambda: there + here)]),
    }  # masked_fill takes the mask
    assert outcome(lambda: _TWO_DEVICES[name](here, there, backend=target.backend)) in words
    if target is EAGER:  # of the others, meta is no device
        assert outcome(lambda: _TWO_DEVICES[name](there, here))[0] == "RuntimeError"


def test_scores_of_vectors() -> None:
    """Query and key have rows: a product with a vector would go unscaled."""
    x = _ONES(4, 8)
    for name, call in (("query", lambda: kf.attention_scores(x[0], x)), ("key", lambda: kf.attention_scores(x, x[0]))):
        text = f"`attention_scores`: `{name}` must have at least two dimensions, got shape [8]"
        assert outcome(call) == ("RuntimeError", text)
