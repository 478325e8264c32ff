"""Arrays of other libraries: every verb takes them, shares their memory, and gives back their kind.

`fake_arrays` stands for CuPy and whatever else speaks DLPack and has a `from_dlpack` where its arrays come from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import fake_arrays
import numpy as np
import pytest
import torch
from support import CPU, EAGER, Target
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.functional import interop

_CLASSES = torch.tensor([1, 0, 7, 3])
# Each verb and operation as a function of three arrays: two of shape (4, 8) and one of shape (8,).
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "layer_norm": lambda x, y, w: kf.layer_norm(x, 8, w, bias=w),
    "layer_norm_relu": lambda x, y, w: kf.layer_norm(x, 8, w, w, activation="relu"),
    "rms_norm": lambda x, y, w: kf.rms_norm(x, 8, w),
    "add_layer_norm": lambda x, y, w: kf.add_layer_norm(x, y, 8, w, w),
    "add_rms_norm": lambda x, y, w: kf.add_rms_norm(x, y, 8, w),
    "gated_layer_norm": lambda x, y, w: kf.gated_layer_norm(x, y, 8, w, w, group_size=4),
    "gated_rms_norm": lambda x, y, w: kf.gated_rms_norm(x, y, 8, w),
    "modulated_layer_norm": lambda x, y, w: kf.modulated_layer_norm(x, 8, y, w),
    "modulated_rms_norm": lambda x, y, w: kf.modulated_rms_norm(x, 8, w, y, w),
    "add_modulated_layer_norm": lambda x, y, w: kf.add_modulated_layer_norm(x, y, 8, w, gate=y),
    "add_modulated_rms_norm": lambda x, y, w: kf.add_modulated_rms_norm(x, y, 8, y),
    "add_act": lambda x, y, w: kf.add_act(x, y, "relu"),
    "mul_act": lambda x, y, w: kf.mul_act(x, y, "tanh"),
    "bias_act": lambda x, y, w: kf.bias_act(x, w, "gelu"),
    "act_dropout": lambda x, y, w: kf.act_dropout(x, "gelu", 0.5, training=False),
    "gated_act": lambda x, y, w: kf.gated_act(x, y, "silu"),
    "sum_squared": lambda x, y, w: kf.sum_squared(x, -1),
    "mean_abs": lambda x, y, w: kf.mean_abs(x),
    "softmax": lambda x, y, w: kf.softmax(x, mask=y),
    "log_softmax": lambda x, y, w: kf.log_softmax(x, mask=y),
    "cross_entropy": lambda x, y, w: kf.cross_entropy(x, _CLASSES, reduction="none"),
    "linear_cross_entropy": lambda x, y, w: kf.linear_cross_entropy(x, y, _CLASSES.clip(0, 3), reduction="none"),
    "token_logprob": lambda x, y, w: kf.token_logprob(x, _CLASSES),
    "attention_weights": lambda x, y, w: kf.attention_scores(x, y, normalize=True),
    "ops.elementwise_add_relu": lambda x, y, w: kf.ops.elementwise_add_relu(x, y),
    "ops.elementwise_mul_tanh": lambda x, y, w: kf.ops.elementwise_mul_tanh(x, y),
    "ops.fused_bias_gelu": lambda x, y, w: kf.ops.fused_bias_gelu(x, w),
    "ops.reduce_sum_squared": lambda x, y, w: kf.ops.reduce_sum_squared(x),
    "ops.reduce_mean_abs": lambda x, y, w: kf.ops.reduce_mean_abs(x, 0, True),
    "ops.fused_layer_norm_relu": lambda x, y, w: kf.ops.fused_layer_norm_relu(x, (8,), w, w),
    "ops.fused_relu_layer_norm": lambda x, y, w: kf.ops.fused_relu_layer_norm(x, (8,), w, w),
    "ops.fused_gelu_dropout": lambda x, y, w: kf.ops.fused_gelu_dropout(x, training=False),
}
KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {"numpy": lambda a: a, "fake": fake_arrays.Array}


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), pytest.param(EAGER, id="eager")])
def host(request: pytest.FixtureRequest) -> Target:
    """The targets on the device that these arrays are on."""
    return request.param


@pytest.fixture
def values() -> list[np.ndarray[Any, Any]]:
    """Three arrays for `CALLS`."""
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (4, 8), (8,))]


def results(tree: Any) -> tuple[Any, ...]:
    """The results of a call that returns one or several."""
    return tuple(tree) if isinstance(tree, tuple) else (tree,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_gives_back_the_kind(name: str, kind: str, values: Any, host: Target) -> None:
    """The result is of the first argument's kind and holds what the call on tensors gives."""
    arrays = [KINDS[kind](value) for value in values]
    with kf.use_backend(host.backend), host.ran(forward=None):
        expected = CALLS[name](*map(torch.from_numpy, values))
        ours = CALLS[name](*arrays)
    assert type(ours) is (kf.NormOutput if isinstance(expected, tuple) else type(arrays[0]))
    for one, other in zip(results(ours), results(expected), strict=True):
        assert type(one) is type(arrays[0])
        np.testing.assert_array_equal(one if kind == "numpy" else one.numpy(), other.numpy())


def test_scores_are_given_back(values: Any) -> None:
    """The scores, which no kernel of ours computes, take arrays too."""
    with EAGER.ran():
        scores = kf.ops.fused_attention_score(values[0], values[1], 1.0)
        assert isinstance(kf.attention_scores(*map(fake_arrays.Array, values[:2])), fake_arrays.Array)
    np.testing.assert_allclose(scores, values[0] @ values[1].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_shared(kind: str, values: Any) -> None:
    """A verb sees an array's memory, and the array that comes back is the result's memory."""
    seen: list[Tensor] = []

    def verb(x: Tensor) -> Tensor:
        seen.append(x)
        return x[1:]

    array = KINDS[kind](values[0])
    result = interop.served(verb, array)
    assert seen[0].data_ptr() == values[0].ctypes.data
    given_back = result if kind == "numpy" else result.numpy()
    assert given_back.ctypes.data == values[0][1:].ctypes.data


@pytest.mark.parametrize("name", CALLS)
def test_read_only_arrays(name: str, values: Any, host: Target) -> None:
    """Read-only arrays need no copy and cause no warning."""
    with kf.use_backend(host.backend), host.ran(forward=None):
        expected = CALLS[name](*values)
        for value in values:
            value.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = CALLS[name](*values)
    for one, other in zip(results(ours), results(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert interop.as_tensor(values[0]).data_ptr() == values[0].ctypes.data


def test_a_read_only_array_outlives_its_name() -> None:
    """The tensor keeps the memory of a read-only array, or a view of one, alive."""
    whole = np.full((1000, 8), 3.0, dtype=np.float32)
    whole.flags.writeable = False
    tensor = interop.as_tensor(whole[::2])
    del whole
    np.zeros((1000, 8), dtype=np.float32)
    assert tensor.shape == (500, 8)
    assert torch.equal(tensor, torch.full((500, 8), 3.0))


def test_the_first_argument_decides(values: Any, host: Target) -> None:
    """Beside an array others may be arrays of other kinds, or tensors, and None stays None."""
    x, y, w = values
    with kf.use_backend(host.backend), host.ran(forward=None):
        expected = kf.add_layer_norm(x, y, 8, w, None)
        ours = kf.add_layer_norm(x, torch.from_numpy(y), 8, fake_arrays.Array(w), None)
    for one, other in zip(ours, expected, strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, other)


def test_strided_arrays_are_read_where_they_lie(values: Any, host: Target) -> None:
    """A view of an array needs no contiguous copy."""
    wide = np.concatenate([values[0], values[1]], axis=1)
    with kf.use_backend(host.backend), host.ran(forward=None):
        np.testing.assert_array_equal(kf.layer_norm(wide[:, :8], 8), kf.layer_norm(values[0], 8))


def test_result_is_detached(values: Any, host: Target) -> None:
    """A parameter beside an array does not make the result part of a graph."""
    weight = torch.nn.Parameter(torch.from_numpy(values[2]))
    with kf.use_backend(host.backend), host.ran(forward=None):
        y = kf.layer_norm(values[0], 8, weight)
    assert isinstance(y, np.ndarray)


def test_boolean_masks(values: Any, host: Target) -> None:
    """A mask may be an array of booleans."""
    mask = np.arange(8) < 5
    with kf.use_backend(host.backend), host.ran(forward=None):
        weights = kf.softmax(values[0], mask=mask)
    assert not weights[:, 5:].any()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


class _Homeless:
    """An array whose library has no `from_dlpack`: this module."""

    def __dlpack__(self) -> None:
        raise AssertionError("asked for a capsule that could not be given back")


@pytest.mark.parametrize("bad", [[1.0], 1.0, None, _Homeless()], ids=["list", "number", "None", "no way back"])
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("layer_norm", "rms_norm")])
def test_what_is_no_array(name: str, bad: Any, values: Any) -> None:
    """Anything else is a TypeError that names the verb, before anything is computed."""
    with (
        EAGER.ran(),
        pytest.raises(TypeError, match=r"^`\w+`: expected a torch\.Tensor, or an array with `__dlpack__`"),
    ):
        CALLS[name](bad, *values[1:])


@pytest.mark.parametrize("name", ["add_act", "gated_act", "add_rms_norm", "softmax"])
def test_an_array_beside_a_tensor(name: str, values: Any) -> None:
    """If the first argument is a tensor, arrays among the others are a TypeError, as in PyTorch."""
    with EAGER.ran(), pytest.raises(TypeError, match=r"^`\w+`: `\w+` must be a tensor, got ndarray$"):
        CALLS[name](torch.from_numpy(values[0]), *values[1:])
