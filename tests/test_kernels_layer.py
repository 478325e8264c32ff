"""`kf.kernels`, the direct layer: the kernel of the tensor's device runs, or an error says what was demanded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from support import EAGER, Target, assert_as_accurate
from test_ops import bare_signature
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators import dispatch

_NORM = "(input, normalized_shape, weight, bias, eps=1e-05)"
# name -> signature, the call as a function of its tensors, PyTorch's, shapes
_ROWS, _ROW = (5, 96), (96,)
KERNELS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "elementwise.add_relu": (
        "(a, b)",
        kf.kernels.elementwise.add_relu,
        lambda a, b: torch.relu(a + b),
        (_ROWS, _ROWS),
    ),
    "elementwise.mul_tanh": (
        "(a, b)",
        kf.kernels.elementwise.mul_tanh,
        lambda a, b: torch.tanh(a * b),
        (_ROWS, _ROWS),
    ),
    "elementwise.bias_gelu": (
        "(input, bias)",
        kf.kernels.elementwise.bias_gelu,
        lambda x, b: F.gelu(x + b),
        (_ROWS, _ROW),
    ),
    "reduction.sum_squared": (
        "(input, dim=-1)",
        kf.kernels.reduction.sum_squared,
        lambda x: x.square().sum(-1),
        (_ROWS,),
    ),
    "reduction.mean_abs": ("(input, dim=-1)", kf.kernels.reduction.mean_abs, lambda x: x.abs().mean(-1), (_ROWS,)),
    "fusion.layer_norm_relu": (
        _NORM,
        lambda x, w, b: kf.kernels.fusion.layer_norm_relu(x, 96, w, b),
        lambda x, w, b: torch.relu(F.layer_norm(x, (96,), w, b)),
        (_ROWS, _ROW, _ROW),
    ),
    "fusion.relu_layer_norm": (
        _NORM,
        lambda x, w, b: kf.kernels.fusion.relu_layer_norm(x, (96,), w, b, 1e-5),
        lambda x, w, b: F.layer_norm(torch.relu(x), (96,), w, b),
        (_ROWS, _ROW, _ROW),
    ),
    "fusion.gelu_dropout": (
        "(input, p, training=True)",
        lambda x: kf.kernels.fusion.gelu_dropout(x, 0.3, training=False),
        F.gelu,
        (_ROWS,),
    ),
    "fusion.attention_score": (
        "(query, key, scale)",
        lambda q, k: kf.kernels.fusion.attention_score(q, k, 0.25),
        lambda q, k: q @ k.mT * 0.25,
        ((2, 7, 16), (2, 5, 16)),
    ),
}


@pytest.fixture(params=KERNELS)
def name(request: pytest.FixtureRequest) -> str:
    """Each function by name."""
    return request.param


def inputs(name: str, target: Target, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors for a function."""
    return [torch.randn(shape, device=target.device).to(dtype) for shape in KERNELS[name][3]]


def ran(name: str, target: Target) -> Any:
    """That a kernel of ours ran; of the scores, that none did: their product is the vendor's."""
    return EAGER.ran() if name == "fusion.attention_score" else target.ran(forward=None)


def test_names_and_signatures(name: str) -> None:
    """Every function is there under its name with its documented signature."""
    module, function = name.split(".")
    assert bare_signature(getattr(getattr(kf.kernels, module), function)) == KERNELS[name][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_runs_the_kernel(name: str, dtype: torch.dtype, target: Target) -> None:
    """The result is PyTorch's within budget, and a kernel of the device made it."""
    tensors = inputs(name, target, dtype)
    with ran(name, target):
        y = KERNELS[name][1](*tensors)
    assert_as_accurate(y, KERNELS[name][2], *tensors)


def test_use_backend_is_not_asked(name: str, target: Target) -> None:
    """Another backend of the context changes nothing: the kernel is what was called."""
    tensors = inputs(name, target)
    with kf.use_backend("eager"), ran(name, target):
        KERNELS[name][1](*tensors)


def test_result_is_detached(name: str, target: Target) -> None:
    """Inputs may require gradients and carry tangents; the result has neither, and a kernel made it."""
    tensors = inputs(name, target)
    with ran(name, target):
        assert not KERNELS[name][1](*(t.clone().requires_grad_() for t in tensors)).requires_grad
    with fwAD.dual_level(), ran(name, target):
        y = KERNELS[name][1](*(fwAD.make_dual(t, torch.ones_like(t)) for t in tensors))
        assert fwAD.unpack_dual(y).tangent is None


def test_without_weight_and_bias(target: Target) -> None:
    """None, by name, is a norm without affine parameters."""
    x = torch.randn(5, 96, device=target.device)
    with target.ran(forward=None):
        y = kf.kernels.fusion.layer_norm_relu(x, 96, None, None)
    assert_as_accurate(y, lambda t: torch.relu(F.layer_norm(t, (96,))), x)


def test_reduces_any_one_dimension(target: Target) -> None:
    """`dim` may be any dimension."""
    x = torch.randn(4, 5, 6, device=target.device)
    with target.ran(forward=None):
        for dim in (0, 1, -1):
            assert_as_accurate(kf.kernels.reduction.sum_squared(x, dim), lambda t, d=dim: t.square().sum(d), x)


def test_gelu_dropout_drops(target: Target) -> None:
    """In training elements are dropped, by the device's seed."""
    x = torch.rand(64, 64, device=target.device) + 1
    with target.ran(forward=None):
        torch.manual_seed(1)
        y = kf.kernels.fusion.gelu_dropout(x, 0.5)
        torch.manual_seed(1)
        assert torch.equal(y, kf.kernels.fusion.gelu_dropout(x, 0.5))
    assert 0.4 < (y == 0).float().mean().item() < 0.6


def test_compiles_without_graph_breaks(name: str, target: Target) -> None:
    """Under torch.compile the checks leave no graph break."""
    tensors = inputs(name, target)
    compiled = torch.compile(KERNELS[name][1], fullgraph=True, backend="aot_eager")
    with ran(name, target):
        y = compiled(*tensors)
    assert_as_accurate(y, KERNELS[name][2], *tensors)


def _unaligned(t: Tensor) -> Tensor:
    raw = torch.zeros(t.numel() * t.itemsize + 1, dtype=torch.uint8, device="cpu").numpy()[1:]
    return torch.from_numpy(raw.view(np.float32).reshape(tuple(t.shape)))


_BAD: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "list": (lambda t: [1.0], TypeError, "must be a torch.Tensor, got list"),
    "array": (lambda t: np.ones(3), TypeError, "must be a torch.Tensor, got ndarray"),
    "integers": (
        lambda t: t.int(),
        TypeError,
        r"must be one of float16, bfloat16, float32, float64, got torch\.int32",
    ),
    "strided": (
        lambda t: torch.randn(*t.shape[:-1], 2 * t.shape[-1], device=t.device)[..., ::2],
        ValueError,
        r"must be contiguous, got shape \(.*\) with strides \(.*2,?\)",
    ),
    "sparse": (lambda t: t.to_sparse(), ValueError, "must be a contiguous tensor, got layout torch.sparse_coo"),
}


@pytest.mark.parametrize("bad", _BAD)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_demands(name: str, bad: str, last: bool, target: Target) -> None:
    """Each tensor must be one, floating-point, and contiguous; nothing runs otherwise."""
    spoil, error, text = _BAD[bad]
    tensors: list[Any] = inputs(name, target)
    index = -1 if last else 0
    tensors[index] = spoil(tensors[index])
    with target.ran(forward=0), pytest.raises(error, match=rf"^`kernels\.{re.escape(name)}`: `\w+` {text}"):
        KERNELS[name][1](*tensors)


def test_demands_alignment(name: str) -> None:
    """A tensor that lies between its elements' addresses is refused."""
    tensors = inputs(name, EAGER)
    tensors[0] = _unaligned(tensors[0])
    with EAGER.ran(), pytest.raises(ValueError, match=r"must be aligned to its element of 4 bytes, got address 0x"):
        KERNELS[name][1](*tensors)


@pytest.mark.parametrize("name", [name for name, row in KERNELS.items() if len(row[3]) > 1])
def test_demands_one_device(name: str, target: Target) -> None:
    """Tensors of two devices are named with their devices."""
    tensors = inputs(name, target)
    tensors[-1] = tensors[-1].to("meta")
    with target.ran(forward=0), pytest.raises(ValueError, match=r"must be on one device, got `\w+` on .*`\w+` on meta"):
        KERNELS[name][1](*tensors)


def test_devices_without_kernels(name: str) -> None:
    """A device that has no kernels of ours is named, and PyTorch's do not step in."""
    tensors = [t.to("meta") for t in inputs(name, EAGER)]
    text = f"`kernels.{name}`: there are kernels for cpu and cuda tensors, and the input is on meta"
    with EAGER.ran(), pytest.raises(BackendUnavailableError) as error:
        KERNELS[name][1](*tensors)
    assert str(error.value) == text


def test_no_fallback_where_kernels_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device's backend is unavailable, the call raises with the reason."""
    monkeypatch.setattr(dispatch, "unavailable_reason", lambda backend, device=None: "there is no compiler")
    text = f"`kernels.{name}`: the kernels of cpu are not available, because there is no compiler"
    with EAGER.ran(), pytest.raises(BackendUnavailableError) as error:
        KERNELS[name][1](*inputs(name, EAGER))
    assert str(error.value) == text


def test_refuses_transforms(name: str) -> None:
    """Inside torch.func, where only the definition could serve, the call raises."""
    stacked = [torch.stack([t, t]) for t in inputs(name, EAGER)]
    with EAGER.ran(), pytest.raises(BackendUnavailableError, match=r"torch\.func cannot see through kernels"):
        torch.vmap(KERNELS[name][1])(*stacked)


@pytest.mark.parametrize("kernel", [kf.kernels.reduction.sum_squared, kf.kernels.reduction.mean_abs])
@pytest.mark.parametrize("dim", [None, (0, 1), 1.0], ids=str)
def test_one_dimension_is_reduced(kernel: Callable[..., Tensor], dim: Any) -> None:
    """Anything but an int as `dim` is a TypeError."""
    with EAGER.ran(), pytest.raises(TypeError, match="`dim` must be one dimension, an int, got"):
        kernel(torch.randn(4, 8), dim)


def test_scores_need_one_dtype_shape_and_scale() -> None:
    """Scores demand what would otherwise take a cast or a copy."""
    score, q = kf.kernels.fusion.attention_score, torch.randn(2, 7, 16)
    with EAGER.ran():
        with pytest.raises(TypeError, match=r"`key` must be of the dtype of `query`, torch\.float32, got torch\.bf"):
            score(q, q.bfloat16(), 1.0)
        with pytest.raises(TypeError, match="`scale` must be a number, got None"):
            score(q, q, None)
        for key in (q[:1], q[0], q[..., :8].contiguous()):
            with pytest.raises(ValueError, match=r"must have shapes \(\*, L, D\) and \(\*, S, D\), got"):
                score(q, key, 1.0)
