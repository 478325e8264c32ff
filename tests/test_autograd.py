"""Reverse mode: gradients where they are needed and nowhere else, nothing overwritten, nothing kept without need."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support import CPU, CUDA, TRITON, Target, assert_as_accurate, call
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from verbs import VERBS, Verb, cotangents, gradients, results, verbs_where

import kernel_fusion as kf
from kernel_fusion.core.activations import formula

AFFINE = [(True, False), (False, True), (False, False)]


def leaves(target: Target, rows: int = 7, cols: int = 17, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight and bias of a norm, random, all of them requiring gradients."""
    return VERBS["layer_norm"].leaves(target, rows, cols, dtype)


def assert_equal(ones: list[Tensor], others: list[Tensor], target: Target) -> None:
    """Bit for bit; on eager to PyTorch's tolerance, because PyTorch's sums depend on strides."""
    for one, other in zip(ones, others, strict=True):
        if target.backend == "eager":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


# float64, because finite differences need it. gradcheck also tries undefined and batched cotangents.
def test_gradcheck(operation: Verb, target: Target) -> None:
    """The kernels' gradients are those of finite differences."""
    tensors = operation.leaves(target, 3, 5, torch.float64)
    with operation.ran(target, None, None):
        assert torch.autograd.gradcheck(
            operation.on(target), tensors, check_undefined_grad=True, check_batched_grad=True
        )


def test_gradgradcheck(operation: Verb, target: Target) -> None:
    """The gradients' gradients are those of finite differences, for dy too."""
    tensors = operation.leaves(target, 3, 5, torch.float64)
    # A differentiated backward is the composite, by design. If it reads a result of the kernel, y or h, second
    # derivatives go on from there through the backward kernel.
    with operation.ran(target, None, None if operation.reads_results(target) else 0):
        assert torch.autograd.gradgradcheck(operation.on(target), tensors)


# Grid rationale. Each parameter absent, because autograd numbers the inputs that are there.
@pytest.mark.parametrize(("with_weight", "with_bias"), AFFINE)
def test_gradients_of_norms_without_parameters(verb: str, with_weight: bool, with_bias: bool, target: Target) -> None:
    """First and second derivatives are right where weight or bias is missing."""
    x, weight, bias = leaves(target, 3, 5, torch.float64)
    present = [x, *([weight] if with_weight else []), *([bias] if with_bias else [])]
    function = _arranged(verb, with_weight, with_bias, target)
    with target.ran(forward=None, backward=None):
        assert torch.autograd.gradcheck(function, present, check_undefined_grad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, present)


def _arranged(verb: str, with_weight: bool, with_bias: bool, target: Target) -> Callable[..., Tensor]:
    def function(*tensors: Tensor) -> Tensor:
        rest = list(tensors[1:])
        weight = rest.pop(0) if with_weight else None
        bias = rest.pop(0) if with_bias else None
        return call(verb, tensors[0], weight, bias, eps=1e-5, backend=target.backend)

    return function


# Grid rationale. Every subset of the inputs: the kernel is compiled for the subset, and autograd counts tensors.
_SUBSETS = [
    pytest.param(
        operation,
        needs,
        id=f"{operation}-" + "+".join(n for n, need in zip(operation.arguments, needs, strict=True) if need),
    )
    for operation in VERBS.values()
    for needs in product([True, False], repeat=len(operation.arguments))
    if any(needs)
]


@pytest.mark.parametrize(("operation", "needs"), _SUBSETS)
def test_gradients_only_where_needed(operation: Verb, needs: tuple[bool, ...], target: Target) -> None:
    """Each subset of inputs that require gradients gets its gradients, within budget, and the others get none."""
    tensors = operation.leaves(target, 33, 65)
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(need)
    with operation.ran(target, 1, 1):
        y = operation.on(target)(*tensors)
        dys = cotangents(y)
        # h does not depend on weight and bias.
        used = [(one, dy) for one, dy in zip(results(y), dys, strict=True) if one.requires_grad]
        torch.autograd.backward(*zip(*used, strict=True))
    assert [t.grad is not None for t in tensors] == list(needs)

    def pytorch(dys: list[Tensor], *tensors: Tensor) -> list[Tensor]:
        return gradients(operation.pytorch(*tensors), list(tensors), dys)

    assert_as_accurate([t.grad for t in tensors if t.requires_grad], pytorch, dys, *tensors)


_MASKS = [needs for needs in product([True, False], repeat=3) if any(needs)]


@pytest.mark.parametrize("mask", _MASKS, ids=str)
def test_backward_operator_computes_what_the_mask_says(verb: str, mask: tuple[bool, ...], target: Target) -> None:
    """`row_norm_bwd` gives no elements for a gradient that its mask leaves out."""
    x, weight, bias = (t.detach() for t in leaves(target))
    rms = verb == "rms_norm"
    with target.ran(forward=1, backward=1):
        _, stats, _ = torch.ops.kernel_fusion.row_norm_fwd(x, 1, weight, bias, 1e-5, 0.0, None, rms)
        results = torch.ops.kernel_fusion.row_norm_bwd(
            torch.randn_like(x), x, stats, 1, weight, bias.dtype, 0.0, rms, [*mask, False, False]
        )
    assert [r.numel() > 0 for r in results] == [*mask, False, False]


def test_inputs_and_cotangent_are_unchanged(operation: Verb, target: Target) -> None:
    """Forward and backward write to no argument and to no cotangent."""
    tensors = operation.leaves(target)
    with operation.ran(target, 1, 1):
        before = [(t.detach().clone(), t._version) for t in tensors]
        y = operation.on(target)(*tensors)
        dys = cotangents(y)
        tensors += dys
        before += [(t.clone(), t._version) for t in dys]
        torch.autograd.backward(results(y), dys)
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), values)
        assert tensor._version == version


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("cols", [1, 17])
def test_result_is_no_alias(operation: Verb, cols: int, requires_grad: bool, target: Target) -> None:
    """Every result has memory of its own, and no gradient lies in that of an argument, a result or a cotangent."""
    tensors = [t.detach().requires_grad_(requires_grad) for t in operation.leaves(target, 7, cols)]
    with operation.ran(target, None, int(requires_grad)):
        y = operation.on(target)(*tensors)
        dys = cotangents(y)
        made = results(y) + (gradients(y, tensors, dys) if requires_grad else [])
    pointers = [t.untyped_storage().data_ptr() for t in [*tensors, *results(y), *dys]]
    assert len(set(pointers)) == len(pointers)
    assert not {t.untyped_storage().data_ptr() for t in made[len(results(y)) :]} & set(pointers)
    assert operation.kernels == 0 or operation.views or not any(t._is_view() for t in results(y))


@pytest.mark.parametrize("cols", [1, 17])
def test_norms_are_contiguous(verb: str, cols: int, target: Target) -> None:
    """The result is contiguous, whatever the input's strides."""
    x = torch.randn(cols, 7, device=target.device).T
    with target.ran(forward=1):
        assert call(verb, x, backend=target.backend).is_contiguous()


# Grid rationale. Dense in either format, not dense, of other strides, and rows of one pixel, which have every format.
_FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels-last-3d": lambda x: x[..., None].contiguous(memory_format=torch.channels_last_3d),
    "part": lambda x: x.contiguous(memory_format=torch.channels_last)[:, :2],
    "swapped": lambda x: x.transpose(0, 1),
    "one-pixel": lambda x: x[:, :, :1, :1],
    "matrix": lambda x: x[0, 0].T,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", _FORMATS)
def test_norms_have_the_memory_format_of_pytorchs(
    verb: str, layout: str, requires_grad: bool, format_target: Target
) -> None:
    """RMSNorm of a channels-last tensor is channels-last, all else contiguous, as in PyTorch; traced alike."""
    x = _FORMATS[layout](torch.randn(2, 3, 4, 5, device=format_target.device))
    expected = getattr(torch.nn.functional, verb)(x.cpu(), x.shape[-1:])  # whose fused kernel keeps no more
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    with format_target.ran(forward=1):
        y = call(verb, x.requires_grad_(requires_grad), backend=format_target.backend)
    torch.testing.assert_close(y.cpu(), expected, check_stride=True)
    assert call(verb, meta.requires_grad_(requires_grad)).stride() == expected.stride()


@pytest.fixture(params=[CPU, pytest.param(CUDA, marks=pytest.mark.cuda), TRITON], ids=lambda target: target.backend)
def format_target(request: pytest.FixtureRequest) -> Target:
    """Each backend with kernels, Triton's among them."""
    return request.param


def test_views_that_negate(operation: Verb, any_target: Target) -> None:
    """A tensor that stands for its negative, in any place, has the results and gradients of one that is negative."""
    tensors = [t.detach() for t in operation.leaves(any_target)]
    for place, given in enumerate(tensors):
        found = []
        for negative in (-given, torch._neg_view(given)):
            leaves = [negative if i == place else t for i, t in enumerate(tensors)]
            leaves = [t.detach().requires_grad_() for t in leaves]
            y = operation.on(any_target)(*leaves)
            dys = [torch.full_like(one, 0.5) for one in results(y)]
            found.append([*results(y), *gradients(y, leaves, dys)])
        assert found[1][0].is_neg() is False
        torch.testing.assert_close(*found)


_COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded-scalar": lambda y: torch.full((), 0.7, device=y.device).expand_as(y),
    "expanded-row": lambda y: torch.randn(y.shape[-1:], device=y.device).expand_as(y),
    "expanded-column": lambda y: torch.randn(y.shape[:1] + (1,) * (y.dim() - 1), device=y.device).expand_as(y),
    "transposed": lambda y: torch.randn(y.shape[::-1], device=y.device).permute(tuple(range(y.dim()))[::-1]),
    "unaligned": lambda y: torch.randn(y.numel() + 1, device=y.device)[1:].view_as(y),
}


@pytest.mark.parametrize("kind", _COTANGENTS)
def test_cotangents_of_any_layout(operation: Verb, kind: str, target: Target) -> None:
    """A strided or expanded dy gives the bits of a contiguous one."""
    tensors = operation.leaves(target)
    with operation.ran(target, 1, 2):
        y = operation.on(target)(*tensors)
        dys = [_COTANGENTS[kind](one) for one in results(y)]
        strided = gradients(y, tensors, dys, retain_graph=True)
        contiguous = gradients(y, tensors, [dy.contiguous() for dy in dys])
    if operation.exact:
        assert_equal(strided, contiguous, target)
    else:
        torch.testing.assert_close(strided, contiguous)


def test_sum_backward(operation: Verb, target: Target) -> None:
    """`y.sum().backward()`, whose dy is an expanded scalar, gives the gradients of a dy of ones."""
    tensors = operation.leaves(target)
    with operation.ran(target, 1, 2):
        y = operation.on(target)(*tensors)
        ones = gradients(y, tensors, [torch.ones_like(one) for one in results(y)], retain_graph=True)
        sum(one.sum() for one in results(y)).backward()
    assert_equal([t.grad for t in tensors], ones, target)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_gradient_of_one_result_alone(name: str, which: int, target: Target) -> None:
    """If only y or only h is used, the other's cotangent counts as zero."""
    operation = VERBS[name]
    tensors = operation.leaves(target)
    with operation.ran(target, 1, None if which == 0 else 1):
        y = operation.on(target)(*tensors)
        dy = torch.randn_like(y[which])
        ours = torch.autograd.grad(y[which], tensors, dy, allow_unused=which == 1)

    def pytorch(dy: Tensor, *tensors: Tensor) -> list[Tensor]:
        y = operation.pytorch(*tensors)[which]
        return list(torch.autograd.grad(y, tensors, dy, allow_unused=True, materialize_grads=True))

    ours = [torch.zeros_like(t) if g is None else g for g, t in zip(ours, tensors, strict=True)]
    assert_as_accurate(ours, pytorch, dy, *tensors)


def test_create_graph_gives_the_same_gradients(operation: Verb, target: Target) -> None:
    """With `create_graph` the gradients are within budget and carry a graph of their own."""
    tensors = operation.leaves(target, 64, 100)
    with operation.ran(target, 1, 0):
        y = operation.on(target)(*tensors)
        dys = [dy.requires_grad_() for dy in cotangents(y)]
        got = gradients(y, tensors, dys, create_graph=True)
    # The gradient of a bias is linear in dy and depends on nothing else.
    assert all(g.requires_grad for g in got)

    def pytorch(dys: list[Tensor], *tensors: Tensor) -> list[Tensor]:
        return gradients(operation.pytorch(*tensors), list(tensors), dys)

    assert_as_accurate([g.detach() for g in got], pytorch, dys, *tensors)


def test_create_graph_where_the_input_depends_on_the_weight(verb: str, target: Target) -> None:
    """Two norms in a row with one weight and bias: with `create_graph` each contributes once, as without."""
    x, weight, bias = leaves(target, dtype=torch.float64)
    dy = torch.randn_like(x)
    with target.ran(forward=2, backward=2):
        y = call(verb, call(verb, x, weight, bias, backend=target.backend), weight, bias, backend=target.backend)
        differentiable = torch.autograd.grad(y, (x, weight, bias), dy, create_graph=True)
        plain = torch.autograd.grad(y, (x, weight, bias), dy)
    torch.testing.assert_close(differentiable, plain)


def test_backward_twice(operation: Verb, target: Target) -> None:
    """With `retain_graph` a second backward gives the same bits; without, PyTorch's error."""
    tensors = operation.leaves(target)
    with operation.ran(target, 1, 2):
        y = operation.on(target)(*tensors)
        dys = cotangents(y)
        first = gradients(y, tensors, dys, retain_graph=True)
        second = gradients(y, tensors, dys)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            gradients(y, tensors, dys)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@verbs_where(lambda verb: verb.name != "rope")  # it keeps no input
def test_changed_input_is_noticed(operation: Verb, target: Target) -> None:
    """Changing an input in place between forward and backward raises PyTorch's error instead of a wrong gradient."""
    if operation.keeps_bits(target):
        pytest.skip("a change of what is not kept is no matter")
    tensors = operation.leaves(target)
    tensors[0] = tensors[0] * 1
    with operation.ran(target, 1, 0):
        y = operation.on(target)(*tensors)
        if operation.name.startswith(("softmax", "log_softmax", "attention_weights", "bias_act-tanh", "bias_act-relu")):
            y.detach().add_(1)  # what is kept is the result
        else:
            tensors[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(one.sum() for one in results(y)).backward()


# Calls of tensors a, b and c where the gradients do not depend on the values of c.
UNREAD: dict[str, Callable[..., Any]] = {
    "bias": lambda a, b, c, backend: kf.layer_norm(a, 8, b[0], c[0], backend=backend),
    "shift": lambda a, b, c, backend: kf.modulated_layer_norm(a, 8, b[:, None], c[:, None], backend=backend),
    "value": lambda a, b, c, backend: kf.gated_act(b.detach(), c, "silu", backend=backend),
    "input of a sum": lambda a, b, c, backend: sum(
        kf.add_modulated_rms_norm(c[:, None], a, 8, b[:, None], gate=b.detach()[:, None], backend=backend)
    ),
    "gate of a sum": lambda a, b, c, backend: sum(
        kf.add_modulated_rms_norm(b.detach()[:, None], a, 8, b[:, None], gate=c[:, None], backend=backend)
    ),
}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", UNREAD)
def test_what_backward_does_not_read_may_be_changed(name: str, twice: bool, target: Target) -> None:
    """A tensor that no gradient depends on may be written to before backward, and before a differentiated one."""
    results = []
    for writes in (False, True):
        torch.manual_seed(0)
        leaves = [torch.randn(3, 1, 8, device=target.device, requires_grad=True) for _ in range(3)]
        a, b, c = leaves[0], *(leaf[:, 0] * 1 for leaf in leaves[1:])
        y = UNREAD[name](a, b, c, target.backend)
        if writes:
            c.detach().mul_(-7)
        dy = y.detach() ** 2 * leaves[0].sum()
        grads = torch.autograd.grad(y, leaves, dy, create_graph=twice, allow_unused=True)
        if twice:
            grads = torch.autograd.grad(sum((g**2).sum() for g in grads if g is not None), leaves, allow_unused=True)
        results.append([None if g is None else g.detach() for g in grads])
    assert sum(g is not None for g in results[0]) > 0
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [None, *kf.ACTIVATIONS])
def test_a_result_may_be_changed_where_pytorch_lets_it(name: str | None, dtype: torch.dtype, target: Target) -> None:
    """A tensor that PyTorch's backward does not read may be changed in place before our backward too."""
    function = formula(name or "identity")
    a, b = (torch.randn(3, 8, device=target.device, dtype=dtype, requires_grad=True) for _ in range(2))

    def changed(y: Tensor) -> Tensor | None:
        y.add_(1)
        try:
            return torch.autograd.grad(y, a, torch.ones_like(y))[0]
        except RuntimeError:
            return None

    ours = changed(kf.add_act(a, b, name, backend=target.backend))
    theirs = changed(function(a + b))
    if theirs is not None:
        assert ours is not None
        if dtype == torch.float32:  # in bf16 PyTorch rounds the sum
            torch.testing.assert_close(ours, theirs)


def test_hooks(operation: Verb, target: Target) -> None:
    """Hooks on a result and on an argument see and replace gradients."""
    tensors = operation.leaves(target)
    with operation.ran(target, 2, 2):
        y = operation.on(target)(*tensors)
        dys = cotangents(y)
        plain = gradients(y, tensors, [2 * dys[0], *dys[1:]])
        y = operation.on(target)(*tensors)
        results(y)[0].register_hook(lambda gradient: gradient * 2)
        tensors[0].register_hook(lambda gradient: gradient * 4)
        torch.autograd.backward(results(y), dys)
    assert torch.equal(tensors[0].grad, plain[0] * 4)


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
def test_checkpoint(operation: Verb, use_reentrant: bool, target: Target) -> None:
    """Checkpointing runs forward twice and gives the same bits."""
    tensors = operation.leaves(target)
    function = operation.on(target)
    with operation.ran(target, 1, 1):
        y = function(*tensors)
        dys = cotangents(y)
        plain = gradients(y, tensors, dys)
    with operation.ran(target, 2, 1):
        again = checkpoint(lambda *t: tuple(results(function(*t))), *tensors, use_reentrant=use_reentrant)
        torch.autograd.backward(again, dys)
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


# Elements that backward keeps beside the arguments, for 7 rows of 17: the norms' statistics and h; the softmax's y (6
# columns in the attention weights).
_KEPT = {
    "layer_norm-staged": 14,
    "rms_norm-staged": 7,
    "add_layer_norm": 14 + 119,
    "add_rms_norm": 7 + 119,
    "gated_layer_norm": 14,
    "gated_rms_norm": 7,
    "gated_rms_norm-grouped": 14,
    "modulated_layer_norm": 14,
    "modulated_rms_norm-rows": 7,
    "add_modulated_layer_norm-rows": 14 + 119,
    "add_modulated_rms_norm": 7 + 119,
    "softmax": 119,
    "softmax-masked": 119,
    "log_softmax": 119,
    "cross_entropy": 21,  # the targets, m and log s
    "cross_entropy-smoothed": 28,  # and lse, for its square
    "token_logprob": 28,  # and the entropy
    "bias_act-tanh": 119,  # the result
    "bias_act-relu": 119,
    "add_act-leaky_relu": 15,  # bits; and 15 bytes of them on a GPU for bias_act-relu
    "attention_weights": 42,
    "rope": 238,  # cos and sin, which are arguments too
    "qk_norm_rope": 238,
}


@verbs_where(lambda verb: verb.name not in ("layer_norm", "rms_norm"))  # these have a test of their own
def test_training_keeps_no_more_than_it_needs(operation: Verb, target: Target) -> None:
    """Beside the arguments, forward keeps statistics or its result: no mask, no widened copy, no intermediate value."""
    tensors = operation.leaves(target)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        operation.on(target)(*tensors)
    ours = {t.untyped_storage().data_ptr() for t in tensors}
    others = {t.untyped_storage().data_ptr(): t.numel() for t in packed if t.untyped_storage().data_ptr() not in ours}
    assert sum(others.values()) <= _KEPT.get(operation.name, 0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_inference_saves_nothing(operation: Verb, mode: Callable[[], Any], target: Target) -> None:
    """If no gradient can be asked for, nothing is kept, and the bits are those of training."""
    tensors = operation.leaves(target)
    packed: list[Tensor] = []
    with operation.ran(target, 2, 0):
        training = results(operation.on(target)(*tensors))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), mode():
            outputs = results(operation.on(target)(*tensors))
    assert packed == []
    for y, trained in zip(outputs, training, strict=True):
        assert not y.requires_grad
        assert y.is_inference() == (mode is torch.inference_mode)
        assert torch.equal(y, trained)


def test_statistics_are_mean_and_rstd(verb: str, target: Target) -> None:
    """`row_norm_fwd` returns mean and rstd (rstd alone for RMSNorm) of each row, in float32 for bf16 input."""
    x = torch.randn(2, 3, 255, device=target.device, dtype=torch.bfloat16)
    with target.ran(forward=1):
        _, stats, _ = torch.ops.kernel_fusion.row_norm_fwd(x, 1, None, None, 1e-5, 0.0, None, verb == "rms_norm")

    def pytorch(x: Tensor) -> Tensor:
        # In float32, because the statistics are those of the widened rows.
        mean = x.mean(-1) if verb == "layer_norm" else torch.zeros_like(x[..., 0])
        rstd = torch.rsqrt((x - mean[..., None]).square().mean(-1) + 1e-5)
        return torch.stack([mean, rstd]) if verb == "layer_norm" else rstd[None]

    assert_as_accurate(stats, pytorch, x.float())
