"""Autograd of the norms with stages: two results, what is saved, second derivatives, transforms, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from stages_support import ADD_VERBS, BF16, F32, F64, VERBS, assert_equal, call, cotangents, make, run, with_gradients
from support import CPU, TRITON, Target
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import kernel_fusion as kf

Options = dict[str, Any]
# Every way through the node: nothing but an addition; a slope before, after, both; dropout with and without a slope.
STAGES: dict[str, Options] = {
    "add": {},
    "pre": {"pre_activation": "gelu"},
    "post": {"activation": "silu"},
    "dropout": {"dropout_p": 0.3},
    "all": {"pre_activation": "silu", "activation": "tanh", "dropout_p": 0.3},
}
_SUMS = "add", "post"  # h = residual + x, so no kernel computes the gradients of both from that of h
CASES = [(verb, name) for verb, name in product(VERBS, STAGES) if verb in ADD_VERBS or name in ("pre", "post")]
each_case = pytest.mark.parametrize(("verb", "stages"), CASES)
each_add_case = pytest.mark.parametrize(("verb", "stages"), list(product(ADD_VERBS, STAGES)))
each_add_verb = pytest.mark.parametrize("verb", ADD_VERBS)


def function_of(verb: str, target: Target, **options: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The verb with the same dropout mask in every call."""

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return tuple(call(verb, *tensors, backend=target.backend, **options))

    return function


@each_case
def test_gradcheck(verb: str, stages: str) -> None:
    """The kernels' gradients are those of finite differences, for undefined cotangents too."""
    tensors = make(verb, (3, 5), F64)
    with CPU.ran(forward=None, backward=None):
        assert torch.autograd.gradcheck(
            function_of(verb, CPU, **STAGES[stages]), tensors, check_undefined_grad=True, check_batched_grad=True
        )


@each_case
def test_gradgradcheck(verb: str, stages: str) -> None:
    """The gradients' gradients are those of finite differences, for both cotangents too."""
    tensors = make(verb, (3, 5), F64)
    # A differentiated backward is the definition, by design, but what lies behind h is the node's own affair.
    with CPU.ran(forward=None, backward=None if verb in ADD_VERBS and stages not in _SUMS else 0):
        assert torch.autograd.gradgradcheck(function_of(verb, CPU, **STAGES[stages]), tensors)


@each_case
def test_create_graph_gives_the_same_gradients(verb: str, stages: str) -> None:
    """With `create_graph` the gradients have the dtypes of their inputs and agree with the kernels'."""
    tensors = make(verb, (7, 255), BF16, F32)
    function = function_of(verb, CPU, **STAGES[stages])
    outputs = list(function(*tensors))
    grads = [g.requires_grad_() for g in cotangents(outputs)]  # the gradient of bias may depend on nothing else
    with CPU.ran(forward=0, backward=1):
        differentiable = torch.autograd.grad(outputs, tensors, grads, create_graph=True)
        plain = torch.autograd.grad(outputs, tensors, grads)
    for one, other in zip(differentiable, plain, strict=True):
        assert one.dtype == other.dtype
        assert one.requires_grad
        torch.testing.assert_close(one, other)


# Grid rationale. Each subset of the inputs that autograd may ask about: one result then stands for two, or none is
# left.
_NEEDS = [needs for needs in product([True, False], repeat=4) if any(needs)]


@pytest.mark.parametrize("needs", _NEEDS, ids=str)
@each_add_case
def test_gradients_only_where_needed(verb: str, stages: str, needs: tuple[bool, ...]) -> None:
    """Each subset gets the bits it gets when all inputs require gradients; h requires one if it depends on such."""
    tensors = make(verb, (7, 17), BF16, F32)
    grads = cotangents(call(verb, *tensors, backend="eager"))
    expected = run(verb, tensors, grads, backend="cpu", **STAGES[stages])[2:]
    leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    torch.manual_seed(0)
    with CPU.ran(forward=1, backward=1):
        y, h = call(verb, *leaves, backend="cpu", **STAGES[stages])
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        h_requires_grad = needs[0] or needs[1]
        assert (y.requires_grad, h.requires_grad) == (True, h_requires_grad)
        found = torch.autograd.grad([y, h][: 1 + h_requires_grad], wanted, grads[: 1 + h_requires_grad])
    assert_equal(list(found), [g for g, need in zip(expected, needs, strict=True) if need])


@pytest.mark.parametrize("used", [0, 1], ids=["output", "residual"])
@each_add_case
def test_one_result_used(verb: str, stages: str, used: int) -> None:
    """If only y or only h is used, the other's gradient counts as zero; h alone leaves weight and bias without any."""
    tensors = make(verb, (7, 255), BF16, F32)
    function = function_of(verb, CPU, **STAGES[stages])
    with CPU.ran(forward=1, backward=1 if used == 1 and stages in _SUMS else 2):
        outputs = function(*tensors)
        grads = cotangents(list(outputs))
        grads[1 - used].zero_()
        one = torch.autograd.grad(outputs[used], tensors, grads[used], retain_graph=True, allow_unused=True)
        both = torch.autograd.grad(outputs, tensors, grads)
    assert [g is None for g in one] == [used == 1 and place >= 2 for place in range(len(tensors))]
    assert_equal([torch.zeros_like(g) if found is None else found for found, g in zip(one, both, strict=True)], both)


def _retained(loss: Tensor, h: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    h.retain_grad()
    loss.backward()
    assert h.grad is not None
    return [h.grad, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _hooked(loss: Tensor, h: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return list(torch.autograd.grad(loss, leaves))


def _asked(loss: Tensor, h: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [h, *leaves]))


def _asked_alone(loss: Tensor, h: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [h]))


def _seen_by_the_node(loss: Tensor, h: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    seen: list[Tensor] = []
    h.grad_fn.register_prehook(lambda grads: seen.append(grads[-1]))  # type: ignore[union-attr]
    return [*seen, *torch.autograd.grad(loss, leaves), *seen]


def _differentiated(loss: Tensor, h: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, [h, leaves[0]], create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in found), leaves))


@pytest.mark.parametrize("target", [CPU, TRITON], ids=lambda t: t.backend)
@pytest.mark.parametrize("watch", [_retained, _hooked, _asked, _asked_alone, _seen_by_the_node, _differentiated])
@pytest.mark.parametrize("stages", ["add", "pre"])
@each_add_verb
def test_the_gradient_of_h_is_whole(verb: str, stages: str, watch: Callable[..., list[Tensor]], target: Target) -> None:
    """Whoever sees the gradient of h sees what comes through the norm too, as if h had been computed before it."""
    found, given = [], make(verb, (5, 16), device=target.device)
    for backend in (target.backend, "eager"):
        leaves = [t.detach().requires_grad_() for t in given]
        y, h = call(verb, *leaves, backend=backend, **STAGES[stages])
        found.append(watch(y.sin().sum() + (h * h).tanh().sum(), h, leaves))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("watched", "dropout_p", "launches"), [(False, 0.25, 1), (True, 0.25, 2), (True, 0.0, 1)])
@each_add_verb
def test_both_gradients_take_one_launch(verb: str, launches: int, dropout_p: float, watched: bool) -> None:
    """The norm's part of the gradient of h is computed apart only where somebody sees it, and a sum's by no kernel."""
    leaves = make(verb, (5, 16))
    with CPU.ran(forward=1, backward=launches):
        y, h = call(verb, *leaves, backend="cpu", dropout_p=dropout_p)
        if watched:
            h.retain_grad()
        torch.autograd.backward([y, h], cotangents([y, h]))


@each_add_verb
def test_the_sum_of_a_row_without_a_norm_has_a_gradient(verb: str) -> None:
    """If h alone is used, its gradient reaches x and the residual as it is, even where the norm of the row is NaN."""
    tensors = make(verb, (2, 16), BF16, F32)
    with torch.no_grad():
        tensors[0][0, 3] = float("inf")
    h = call(verb, *tensors, backend="cpu")[1]
    (dh,) = cotangents([h])
    dx, dresidual = torch.autograd.grad(h, tensors[:2], dh)
    assert_equal([dx, dresidual], [dh.to(dx.dtype), dh])


@each_add_verb
def test_same_gradient_for_input_and_residual(verb: str) -> None:
    """If both have one gradient, accumulating into one leaf leaves the other alone."""
    tensors = make(verb, (7, 17))
    with CPU.ran(forward=2, backward=2):
        for _ in range(2):
            outputs = call(verb, *tensors, backend="cpu")
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
            tensors[0].grad.zero_()
    assert tensors[0].grad.count_nonzero() == 0
    assert tensors[1].grad.count_nonzero() > 0


def _saved(function: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        return function(), packed


@each_case
def test_what_is_saved(verb: str, stages: str) -> None:
    """x, or h in its place where there is a residual, x beside h for a pre-activation; parameters, statistics, seed."""
    options = STAGES[stages]
    tensors = make(verb, (7, 17), BF16, F32)
    with CPU.ran(forward=1):
        outputs, packed = _saved(lambda: call(verb, *tensors, backend="cpu", **options))
    kept = {t.data_ptr() for t in packed}
    adds = verb in ADD_VERBS
    assert (tensors[0].data_ptr() in kept) == (not adds or "pre_activation" in options)
    assert not adds or (outputs[1].data_ptr() in kept and tensors[1].data_ptr() not in kept)
    assert outputs[0].data_ptr() not in kept
    known = {t.data_ptr() for t in [*tensors, *outputs]}
    others = sorted((str(t.dtype), t.numel()) for t in packed if t.data_ptr() not in known)
    statistics = ("torch.float32", 7 if "rms" in verb else 14)
    assert others == [statistics, *([("torch.int64", 1)] if "dropout_p" in options else [])]


@each_add_verb
def test_saved_tensor_hooks_reach_backward(verb: str) -> None:
    """Backward uses what hooks unpack, h included."""
    tensors = make(verb, (7, 17))
    grads = cotangents(call(verb, *tensors, backend="eager"))
    with CPU.ran(forward=2, backward=2):
        plain = run(verb, tensors, grads, backend="cpu", **STAGES["all"])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            hooked = run(verb, tensors, grads, backend="cpu", **STAGES["all"])
    assert_equal(hooked, plain)


@each_add_verb
def test_inference_saves_nothing(verb: str) -> None:
    """Without gradients nothing is kept, and the bits are those of training."""
    tensors = make(verb, (7, 17))
    with CPU.ran(forward=1), torch.no_grad():
        outputs, packed = _saved(lambda: function_of(verb, CPU, **STAGES["all"])(*tensors))
    assert packed == []
    with CPU.ran(forward=1):
        training = function_of(verb, CPU, **STAGES["all"])(*tensors)
    assert_equal(list(outputs), list(training))


@each_add_verb
@pytest.mark.parametrize("requires_grad", [True, False])
def test_results_have_memory_of_their_own(verb: str, requires_grad: bool) -> None:
    """y and h are contiguous, alias neither an input nor each other, and no input is written to."""
    tensors = [t.detach().requires_grad_(requires_grad) for t in make(verb, (7, 17))]
    before = [(t.detach().clone(), t._version) for t in tensors]
    with CPU.ran(forward=1):
        outputs = call(verb, *tensors, backend=CPU.backend)
    assert all(o.is_contiguous() and not o._is_view() for o in outputs)
    assert len({t.untyped_storage().data_ptr() for t in [*tensors, *outputs]}) == 6
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor._version == version


@each_add_verb
def test_changes_in_place(verb: str) -> None:
    """A change of h before backward raises PyTorch's error; one of the residual, which is not saved, is no matter."""
    tensors = make(verb, (7, 17))
    residual = tensors[1] * 1
    with CPU.ran(forward=1, backward=0):
        y, h = call(verb, tensors[0], residual, *tensors[2:], backend="cpu")
        residual.add_(1)
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    with CPU.ran(forward=1, backward=1):
        y, _ = call(verb, tensors[0], residual, *tensors[2:], backend="cpu")
        residual.add_(1)
        y.sum().backward()


@each_add_verb
def test_backward_twice(verb: str) -> None:
    """A second backward needs `retain_graph`."""
    tensors = make(verb)
    outputs = call(verb, *tensors, backend="cpu")
    grads = cotangents(outputs)
    with CPU.ran(forward=0, backward=2):
        first = torch.autograd.grad(outputs, tensors, grads, retain_graph=True)
        second = torch.autograd.grad(outputs, tensors, grads)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(outputs, tensors, grads)
    assert_equal(list(first), list(second))


@pytest.mark.parametrize("use_reentrant", [False, True])
@each_add_case
def test_checkpoint(verb: str, stages: str, use_reentrant: bool) -> None:
    """Checkpointing draws the same mask again and gives the same bits."""
    tensors = make(verb, (7, 17))
    grads = cotangents(call(verb, *tensors, backend="eager"))
    function = partial(call, verb, backend="cpu", **STAGES[stages])
    with CPU.ran(forward=3, backward=2):
        plain = run(verb, tensors, grads, backend="cpu", **STAGES[stages])
        torch.manual_seed(0)
        outputs = list(checkpoint(lambda *t: tuple(function(*t)), *tensors, use_reentrant=use_reentrant))
        torch.autograd.backward(outputs, grads)
    assert_equal([*(o.detach() for o in outputs), *(t.grad for t in tensors)], plain)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "forward-mode"])
@pytest.mark.parametrize(("verb", "stages"), [case for case in CASES if "dropout_p" not in STAGES[case[1]]])
def test_transforms(verb: str, stages: str, transform: str) -> None:
    """torch.func and forward mode agree with the definition in plain PyTorch, to its own tolerance for float64."""
    tensors = [t.detach() for t in make(verb, (3, 5), F64)]
    weights = cotangents(call(verb, *tensors, backend="eager"))

    def transformed(function: Callable[..., tuple[Tensor, ...]]) -> Any:
        if transform == "grad":

            def loss(*args: Tensor) -> Tensor:
                return sum((o * w).sum() for o, w in zip(function(*args), weights, strict=True))

            return grad(loss, argnums=tuple(range(len(tensors))))(*tensors)
        if transform == "jvp":
            return jvp(function, tuple(tensors), tuple(t.flip(0) for t in tensors))
        if transform == "vmap":
            in_dims = tuple(0 if t.dim() == 2 else None for t in tensors)
            return vmap(function, in_dims=in_dims)(*tensors)
        with forward_ad.dual_level():
            outputs = function(*(forward_ad.make_dual(t, t.flip(0)) for t in tensors))
            return [forward_ad.unpack_dual(o).tangent for o in outputs]

    options = STAGES[stages]
    result = transformed(lambda *t: tuple(call(verb, *t, backend=CPU.backend, **options)))
    expected = transformed(lambda *t: tuple(call(verb, *t, backend="eager", **options)))
    torch.testing.assert_close(result, expected)
    assert all(t.abs().max() > 0 for t in torch.utils._pytree.tree_leaves(result))


def test_forward_mode_of_the_residual() -> None:
    """A tangent on the residual alone reaches both results."""
    tensors = [t.detach() for t in make("add_layer_norm", (3, 5), F64)]
    with forward_ad.dual_level():
        tensors[1] = forward_ad.make_dual(tensors[1], torch.ones_like(tensors[1]).cumsum(-1))
        outputs = call("add_layer_norm", *tensors, backend="cpu")
        tangents = [forward_ad.unpack_dual(o).tangent for o in outputs]
    assert all(t is not None and t.abs().max() > 0 for t in tangents)


@pytest.fixture
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.covering(1)
@pytest.mark.usefixtures("_fresh_dynamo")
@each_case
def test_compile(verb: str, stages: str) -> None:
    """One full graph serves forward and backward of every row count; without dropout with the eager call's bits."""
    options = STAGES[stages]
    compiled = torch.compile(
        lambda *t: tuple(call(verb, *t, backend="cpu", **options)), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (4, 7, 33):
        tensors = make(verb, (rows, 64), BF16, F32)
        grads = cotangents(call(verb, *tensors, backend="eager"))
        with CPU.ran(forward=2, backward=2):
            ours = with_gradients(list(compiled(*tensors)), tensors, grads)
            plain = run(verb, tensors, grads, backend="cpu", **options)
        assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in plain]
        if "dropout_p" not in options:
            assert_equal(ours, plain)


@pytest.mark.usefixtures("_fresh_dynamo")
@each_add_verb
def test_compiled_dropout_has_one_mask(verb: str) -> None:
    """Under torch.compile backward drops what forward dropped."""
    compiled = torch.compile(
        lambda *t: tuple(call(verb, *t, backend="cpu", dropout_p=0.5)), fullgraph=True, backend="aot_eager"
    )
    tensors = make(verb, (9, 64))
    with CPU.ran(forward=1, backward=1):
        _, h = compiled(*tensors)
        (dx,) = torch.autograd.grad(h, tensors[0], torch.ones_like(h))
    torch.testing.assert_close(h, tensors[1] + tensors[0] * dx)
    assert set(dx.unique().tolist()) == {0.0, 2.0}


# The warning is PyTorch's about itself, for every node that saves its result (`torch.exp`, for one).
@pytest.mark.covering(1)
@pytest.mark.usefixtures("_fresh_dynamo")
@each_case
def test_compiled_autograd(verb: str, stages: str) -> None:
    """Under compiled autograd the backward is traced and gives the same bits."""
    tensors = make(verb, (7, 64))
    grads = cotangents(call(verb, *tensors, backend="eager"))
    with CPU.ran(forward=2, backward=2):
        plain = run(verb, tensors, grads, backend="cpu", **STAGES[stages])
        torch.manual_seed(0)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", dynamic=True)):
            torch.autograd.backward(call(verb, *tensors, backend="cpu", **STAGES[stages]), grads)
    assert_equal([t.grad for t in tensors], plain[len(grads) :])


@each_case
def test_opcheck(verb: str, stages: str) -> None:
    """PyTorch's own check of custom operators passes for the verb's operator."""
    x, *residual, weight, bias = make(verb, (3, 8), BF16, F32)
    options: Options = {"pre_activation": "identity", "activation": "identity", "dropout_p": 0.0} | STAGES[stages]
    seed = torch.tensor([5]) if options["dropout_p"] else None
    args = (
        x,
        residual[0] if residual else None,
        1,
        weight,
        bias,
        1e-5,
        0.0,
        None,
        "rms" in verb,
        *options.values(),
        seed,
    )
    with CPU.ran(forward=None, backward=None):
        torch.library.opcheck(torch.ops.kernel_fusion.staged_row_norm.default, args)


# The arguments from the rounding to a gate of the residual.
_GATED = ("once", None, "identity", False, False, torch.randn(8))


def test_opcheck_of_the_parts() -> None:
    """The operators below autograd pass PyTorch's check with every stage."""
    x, residual, weight, bias = (t.detach() for t in make("add_layer_norm", (3, 8), BF16, F32))
    stages = ("silu", "tanh", 0.5, torch.tensor([5]), *_GATED)
    forward = (x, 1, weight, bias, 1e-5, 0.0, None, False, residual, *stages)
    with CPU.ran(forward=None, backward=None):
        torch.library.opcheck(torch.ops.kernel_fusion.row_norm_fwd.default, forward)
        y, stats, h = torch.ops.kernel_fusion.row_norm_fwd(*forward)
        backward = (torch.randn_like(y), h, stats, 1, weight, BF16, 0.0, False, [True] * 5)
        staged = (BF16, torch.randn_like(h), x, bias, True, *stages)
        torch.library.opcheck(torch.ops.kernel_fusion.row_norm_bwd.default, (*backward, *staged))


@pytest.mark.parametrize("mask", list(product([True, False], repeat=5)), ids=str)
def test_backward_operator_computes_what_the_mask_says(mask: tuple[bool, ...]) -> None:
    """`row_norm_bwd` gives no elements for a gradient that its mask leaves out, and the same bits for the others."""
    x, residual, weight, bias = (t.detach() for t in make("add_layer_norm", (7, 8), BF16, F32))
    stages = ("silu", "identity", 0.0, None, *_GATED)
    y, stats, h = torch.ops.kernel_fusion.row_norm_fwd(x, 1, weight, bias, 1e-5, 0.0, None, False, residual, *stages)
    args = (torch.randn_like(y), h, stats, 1, weight, bias.dtype, 0.0, False)
    with CPU.ran(forward=0, backward=2):
        everything, some = (
            torch.ops.kernel_fusion.row_norm_bwd(*args, list(m), x.dtype, torch.ones_like(h), x, None, True, *stages)
            for m in ((True,) * 5, mask)
        )
    for wanted, one, all_wanted in zip(mask, some, everything, strict=True):
        assert torch.equal(one, all_wanted) if wanted else one.numel() == 0


def test_residual_stream_of_a_model() -> None:
    """Norms in a row, each of which hands its h to the next, train as PyTorch's composition does."""
    x, stream, weight, bias = make("add_layer_norm", (7, 64), F64)

    def model(*tensors: Tensor, backend: str) -> Tensor:
        x, h, weight, bias = tensors
        for _ in range(3):
            x, h = kf.add_layer_norm(x, h, 64, weight, bias, activation="gelu", backend=backend)
        return x + h

    dy = torch.randn(7, 64, dtype=F64)
    tensors = [x, stream, weight, bias]
    with CPU.ran(forward=3, backward=3):
        ours = torch.autograd.grad(model(*tensors, backend="cpu"), tensors, dy)
    torch.testing.assert_close(ours, torch.autograd.grad(model(*tensors, backend="eager"), tensors, dy))
