"""Reverse mode: gradients where they are needed and nowhere else, nothing overwritten, nothing kept without need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support import Target, assert_as_accurate, call, pytorch_call
from torch import Tensor
from torch.utils.checkpoint import checkpoint

AFFINE = [(False, False), (True, False), (False, True), (True, True)]
NAMES = ("x", "weight", "bias")


def leaves(target: Target, rows: int = 7, cols: int = 17, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight and bias, random, all of them requiring gradients."""
    shapes = ((rows, cols), (cols,), (cols,))
    return [torch.randn(s, device=target.device, dtype=dtype, requires_grad=True) for s in shapes]


# Grid rationale. float64, because finite differences need it; each parameter absent and present, because autograd
# numbers the inputs that are there. gradcheck also tries undefined and batched cotangents.
@pytest.mark.parametrize(("with_weight", "with_bias"), AFFINE)
def test_gradcheck(verb: str, with_weight: bool, with_bias: bool, target: Target) -> None:
    """The kernels' gradients are those of finite differences."""
    x, weight, bias = leaves(target, 3, 5, torch.float64)
    present = [x, *([weight] if with_weight else []), *([bias] if with_bias else [])]
    function = _arranged(verb, with_weight, with_bias, target)
    with target.ran(forward=None, backward=None):
        assert torch.autograd.gradcheck(function, present, check_undefined_grad=True, check_batched_grad=True)


@pytest.mark.parametrize(("with_weight", "with_bias"), AFFINE)
def test_gradgradcheck(verb: str, with_weight: bool, with_bias: bool, target: Target) -> None:
    """The gradients' gradients are those of finite differences, for dy too."""
    x, weight, bias = leaves(target, 3, 5, torch.float64)
    present = [x, *([weight] if with_weight else []), *([bias] if with_bias else [])]
    with target.ran(forward=None, backward=0):  # a differentiated backward is the composite, by design
        assert torch.autograd.gradgradcheck(_arranged(verb, with_weight, with_bias, target), present)


def _arranged(verb: str, with_weight: bool, with_bias: bool, target: Target) -> Callable[..., Tensor]:
    def function(*tensors: Tensor) -> Tensor:
        rest = list(tensors[1:])
        weight = rest.pop(0) if with_weight else None
        bias = rest.pop(0) if with_bias else None
        return call(verb, tensors[0], weight, bias, eps=1e-5, backend=target.backend)

    return function


# Grid rationale. Every subset of the three inputs: the kernel is compiled for the subset, and autograd counts tensors.
_NEEDS = [needs for needs in product([True, False], repeat=3) if any(needs)]


@pytest.mark.parametrize(
    "needs", _NEEDS, ids=lambda n: "+".join(name for name, need in zip(NAMES, n, strict=True) if need)
)
def test_gradients_only_where_needed(verb: str, needs: tuple[bool, ...], target: Target) -> None:
    """Each subset of inputs that require gradients gets its gradients, within budget, and the others get none."""
    tensors = leaves(target)
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(need)
    dy = torch.randn_like(tensors[0])
    with target.ran(forward=1, backward=1):
        call(verb, *tensors, eps=1e-5, backend=target.backend).backward(dy)
    assert [t.grad is not None for t in tensors] == list(needs)

    def pytorch(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
        if verb == "layer_norm":
            y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)
        else:
            y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5) + bias
        return list(torch.autograd.grad(y, [t for t in (x, weight, bias) if t.requires_grad], dy))

    assert_as_accurate([t.grad for t in tensors if t.requires_grad], pytorch, *tensors, dy)


@pytest.mark.parametrize("mask", _NEEDS, ids=str)
def test_backward_operator_computes_what_the_mask_says(verb: str, mask: tuple[bool, ...], target: Target) -> None:
    """`row_norm_bwd` gives no elements for a gradient that its mask leaves out."""
    x, weight, bias = (t.detach() for t in leaves(target))
    rms = verb == "rms_norm"
    with target.ran(forward=1, backward=1):
        _, stats, _ = torch.ops.kernel_fusion.row_norm_fwd(x, 1, weight, bias, 1e-5, 0.0, None, rms)
        results = torch.ops.kernel_fusion.row_norm_bwd(
            torch.randn_like(x), x, stats, 1, weight, bias.dtype, 0.0, rms, [*mask, False]
        )
    assert [r.numel() > 0 for r in results] == [*mask, False]


def test_inputs_and_cotangent_are_unchanged(verb: str, target: Target) -> None:
    """Forward and backward write to none of x, weight, bias and dy."""
    tensors = [*leaves(target), torch.randn(7, 17, device=target.device)]
    before = [(t.detach().clone(), t._version) for t in tensors]
    with target.ran(forward=1, backward=1):
        call(verb, *tensors[:3], backend=target.backend).backward(tensors[3])
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), values)
        assert tensor._version == version


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("cols", [1, 17])
def test_result_is_no_alias_and_contiguous(verb: str, cols: int, requires_grad: bool, target: Target) -> None:
    """The result has memory of its own and is contiguous, whatever the input's strides."""
    x = torch.randn(cols, 7, device=target.device).T.requires_grad_(requires_grad)
    with target.ran(forward=1):
        y = call(verb, x, backend=target.backend)
    assert y.is_contiguous()
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert not y._is_view()


_COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded-scalar": lambda y: torch.full((), 0.7, device=y.device).expand_as(y),
    "expanded-row": lambda y: torch.randn(y.shape[-1], device=y.device).expand_as(y),
    "expanded-column": lambda y: torch.randn(y.shape[0], 1, device=y.device).expand_as(y),
    "transposed": lambda y: torch.randn(y.shape[::-1], device=y.device).T,
    "unaligned": lambda y: torch.randn(y.numel() + 1, device=y.device)[1:].view_as(y),
}


@pytest.mark.parametrize("kind", _COTANGENTS)
def test_cotangents_of_any_layout(verb: str, kind: str, target: Target) -> None:
    """A strided or expanded dy gives the bits of a contiguous one."""
    tensors = leaves(target)
    with target.ran(forward=1, backward=2):
        y = call(verb, *tensors, backend=target.backend)
        dy = _COTANGENTS[kind](y)
        strided = torch.autograd.grad(y, tensors, dy, retain_graph=True)
        contiguous = torch.autograd.grad(y, tensors, dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))


def test_sum_backward(verb: str, target: Target) -> None:
    """`y.sum().backward()`, whose dy is an expanded scalar, gives the gradients of a dy of ones."""
    tensors = leaves(target)
    with target.ran(forward=1, backward=2):
        y = call(verb, *tensors, backend=target.backend)
        ones = torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=True)
        y.sum().backward()
    assert all(torch.equal(t.grad, one) for t, one in zip(tensors, ones, strict=True))


def test_create_graph_gives_the_same_gradients(verb: str, target: Target) -> None:
    """With `create_graph` the gradients are within budget and carry a graph of their own."""
    tensors = leaves(target)
    dy = torch.randn(7, 17, device=target.device, requires_grad=True)
    with target.ran(forward=1):
        y = call(verb, *tensors, backend=target.backend)
        gradients = torch.autograd.grad(y, tensors, dy, create_graph=True)
    # The gradient of bias is linear in dy and depends on nothing else.
    assert all(g.requires_grad for g in gradients)

    def pytorch(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> Any:
        return torch.autograd.grad(pytorch_call(verb, x, weight, bias), (x, weight, bias), dy)

    assert_as_accurate([g.detach() for g in gradients], pytorch, *tensors, dy)


def test_backward_twice(verb: str, target: Target) -> None:
    """With `retain_graph` a second backward gives the same bits; without, PyTorch's error."""
    tensors = leaves(target)
    with target.ran(forward=1, backward=2):
        y = call(verb, *tensors, backend=target.backend)
        dy = torch.randn_like(y)
        first = torch.autograd.grad(y, tensors, dy, retain_graph=True)
        second = torch.autograd.grad(y, tensors, dy)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, tensors, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_changed_input_is_noticed(verb: str, target: Target) -> None:
    """Changing x in place between forward and backward raises PyTorch's error instead of a wrong gradient."""
    x = torch.randn(7, 17, device=target.device, requires_grad=True)
    h = x * 1
    with target.ran(forward=1):
        y = call(verb, h, backend=target.backend)
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks(verb: str, target: Target) -> None:
    """Hooks on the result and on the input see and replace gradients."""
    x = torch.randn(7, 17, device=target.device, requires_grad=True)
    dy = torch.randn_like(x)
    with target.ran(forward=2, backward=2):
        (plain,) = torch.autograd.grad(call(verb, x, backend=target.backend), x, 2 * dy)
        y = call(verb, x, backend=target.backend)
        y.register_hook(lambda gradient: gradient * 2)
        x.register_hook(lambda gradient: gradient * 4)
        y.backward(dy)
    assert torch.equal(x.grad, plain * 4)


def test_anomaly_mode(verb: str, target: Target) -> None:
    """Anomaly mode names the operator whose gradient is NaN, and changes no bit otherwise."""
    x = torch.randn(7, 17, device=target.device, requires_grad=True)
    dy = torch.randn_like(x)
    with target.ran(forward=2, backward=3):
        y = call(verb, x, backend=target.backend)
        (plain,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        with torch.autograd.set_detect_anomaly(True):
            y = call(verb, x, backend=target.backend)
            (checked,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            with (
                pytest.raises(RuntimeError, match="returned nan values"),
                pytest.warns(UserWarning, match="Error detected"),
            ):
                torch.autograd.grad(y, x, dy.fill_(float("nan")))
    assert torch.equal(plain, checked)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(verb: str, use_reentrant: bool, target: Target) -> None:
    """Checkpointing runs forward twice and gives the same bits."""
    tensors = leaves(target)
    function = partial(call, verb, backend=target.backend)
    dy = torch.randn(7, 17, device=target.device)
    with target.ran(forward=1, backward=1):
        plain = torch.autograd.grad(function(*tensors), tensors, dy)
    with target.ran(forward=2, backward=1):
        checkpoint(function, *tensors, use_reentrant=use_reentrant).backward(dy)
    assert all(torch.equal(t.grad, g) for t, g in zip(tensors, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_training_saves_inputs_and_statistics_alone(verb: str, dtype: torch.dtype, target: Target) -> None:
    """Forward keeps x, the parameters and one or two statistics per row, in the accumulation type; no copy of x."""
    tensors = leaves(target, dtype=dtype)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), target.ran(forward=1):
        call(verb, *tensors, backend=target.backend)
    ours = {t.data_ptr() for t in tensors}
    others = [t for t in packed if t.data_ptr() not in ours]
    accumulation = torch.float64 if dtype == torch.float64 else torch.float32
    assert {t.dtype for t in others} == {accumulation}
    assert sum(t.numel() for t in others) == 7 * (1 if verb == "rms_norm" else 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_inference_saves_nothing(verb: str, mode: Callable[[], Any], target: Target) -> None:
    """Where no gradient can be asked for, nothing is kept, and the bits are those of training."""
    tensors = leaves(target)
    packed: list[Tensor] = []
    with target.ran(forward=2):
        training = call(verb, *tensors, backend=target.backend)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), mode():
            y = call(verb, *tensors, backend=target.backend)
    assert packed == []
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)
    assert torch.equal(y, training)


def test_statistics_are_mean_and_rstd(verb: str, target: Target) -> None:
    """`row_norm_fwd` returns mean and rstd (rstd alone for RMSNorm) of each row, in float32 for bf16 input."""
    x = torch.randn(2, 3, 255, device=target.device, dtype=torch.bfloat16)
    with target.ran(forward=1):
        _, stats, _ = torch.ops.kernel_fusion.row_norm_fwd(x, 1, None, None, 1e-5, 0.0, None, verb == "rms_norm")

    def pytorch(x: Tensor) -> Tensor:
        # Of float32 input, since the statistics are those of the widened rows.
        mean = x.mean(-1) if verb == "layer_norm" else torch.zeros_like(x[..., 0])
        rstd = torch.rsqrt((x - mean[..., None]).square().mean(-1) + 1e-5)
        return torch.stack([mean, rstd]) if verb == "layer_norm" else rstd[None]

    assert_as_accurate(stats, pytorch, x.float())
