"""The stages of the row norms: values and gradients against float64, masks, layouts, special values, bits.

PyTorch's side of every budget is the unfused composition in the same dtypes, which rounds between its calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from stages_support import (
    ADD_VERBS,
    BF16,
    F16,
    F32,
    F64,
    VERBS,
    assert_equal,
    assert_within_budget,
    call,
    composition,
    cotangents,
    make,
    ran_both,
    run,
    with_gradients,
)
from support import CPU
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends.eager.dropout import random_bits, scale, threshold

# Grid rationale. Each stage alone and all together: each is a branch of its own in both directions, and a residual
# without anything else is the case in which dx and dresidual are one tensor.
STAGES: dict[str, dict[str, Any]] = {
    "add": {},
    "pre": {"pre_activation": "gelu"},
    "post": {"activation": "silu"},
    "both": {"pre_activation": "relu", "activation": "tanh"},
    "dropout": {"dropout_p": 0.3},
    "all": {"pre_activation": "silu", "activation": "gelu_tanh", "dropout_p": 0.1},
}
CASES = [(verb, name) for verb, name in product(VERBS, STAGES) if verb in ADD_VERBS or name in ("pre", "post", "both")]
each_case = pytest.mark.parametrize(("verb", "stages"), CASES)
each_add_verb = pytest.mark.parametrize("verb", ADD_VERBS)


# Grid rationale. One element, less than a vector, chunks of 2048 with and without a rest, several chunks; one row, two
# rows that share their loads, and more rows than a block of partial sums has.
@pytest.mark.parametrize("cols", [1, 3, 64, 2048, 2049, 5000])
@pytest.mark.parametrize("rows", [1, 2, 75])
@each_add_verb
def test_shapes(verb: str, rows: int, cols: int) -> None:
    """Any row length and count is within budget, every stage at once."""
    tensors = [(t + 2).detach().requires_grad_() for t in make(verb, (rows, cols), BF16, F32)]
    grads = cotangents(call(verb, *tensors, backend="eager"))
    with ran_both(CPU):
        ours = run(verb, tensors, grads, backend="cpu", **STAGES["all"])
    assert_within_budget(ours, verb, tensors, grads, **STAGES["all"])


# Grid rationale. The ways in which the CPU kernel of the bare norm comes to dx: short rows, whose fp16 and bf16
# elements are kept as fp32, rows of several stretches, and few long ones, whose columns are shared.
@pytest.mark.parametrize(("rows", "cols"), [(40, 64), (12, 2309), (5, 16387)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))
@each_add_verb
def test_a_residual_alone(verb: str, dtype: torch.dtype, rows: int, cols: int) -> None:
    """Without another stage the gradient that arrives at h is added to dx, however the rows are taken."""
    tensors = make(verb, (rows, cols), dtype)
    grads = cotangents(call(verb, *tensors, backend="eager"))
    with ran_both(CPU):
        ours = run(verb, tensors, grads, backend="cpu")
    assert_within_budget(ours, verb, tensors, grads)


SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 25.0, -25.0, 3.0, -3.0, 0.0, -0.0)


def _kind(t: Tensor) -> Tensor:
    """0 for numbers, 1 for NaN, 2 and 3 for the infinities."""
    return t.isnan() + 2 * t.isposinf() + 3 * t.isneginf()


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("name", kf.ACTIVATIONS)
def test_special_values_after_the_norm(name: str, dtype: torch.dtype) -> None:
    """An activation makes of NaN, infinities and large numbers, and of their gradients, what PyTorch's makes of them.

    The bias puts them after the norm. bf16 values are PyTorch's of float32, as our kernels compute in it. With AVX-512
    its gelu of infinity is NaN there, and so that of the definition is; the kernels' is the one of float64.
    """
    cols = 3 * len(SPECIAL)
    x, weight = torch.randn(2, cols, dtype=dtype), torch.zeros(cols, dtype=dtype)
    bias = torch.tensor(SPECIAL, dtype=dtype).repeat(3).requires_grad_()
    dy = torch.randn(2, cols).to(dtype)
    with ran_both(CPU):
        y = kf.layer_norm(x, cols, weight, bias, activation=name, backend=CPU.backend)
        (dbias,) = torch.autograd.grad(y, bias, dy)
    wide = F64 if name == "gelu" and CPU.backend != "eager" else torch.promote_types(dtype, F32)
    z = bias.detach().to(wide).repeat(2, 1).requires_grad_()
    expected = kf.ACTIVATIONS[name](z)
    (dz,) = torch.autograd.grad(expected, z, dy.to(z.dtype))
    assert torch.equal(_kind(y), _kind(expected.to(dtype)))
    assert torch.equal(_kind(dbias), _kind(dz.sum(0).to(dtype)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", kf.ACTIVATIONS)
@pytest.mark.parametrize("place", ["pre_activation", "activation"])
def test_special_values_in_a_row(place: str, name: str, value: float) -> None:
    """A NaN or an infinity in x makes the same elements of outputs and dx finite as PyTorch's composition does."""
    tensors = make("add_layer_norm", (4, 17))
    with torch.no_grad():
        tensors[0][1, 5] = value
    grads = cotangents(call("add_layer_norm", *tensors, backend="eager"))
    with ran_both(CPU):
        ours = run("add_layer_norm", tensors, grads, backend=CPU.backend, **{place: name})
    theirs = with_gradients(composition("add_layer_norm", *tensors, **{place: name}), tensors, grads)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("cols", [1, 7, 8, 1000, 4099])
def test_dropout_mask(p: float, cols: int) -> None:
    """u is that of Philox's bits at each element's position, and dx is zero and scaled at the same elements."""
    x, residual = (torch.randn(5, cols, requires_grad=True) for _ in range(2))
    torch.manual_seed(3)
    with ran_both(CPU):
        _, h = kf.add_rms_norm(x, residual, cols, dropout_p=p, backend=CPU.backend)
        (dx,) = torch.autograd.grad(h, x, torch.ones_like(h))
    torch.manual_seed(3)
    bits = random_bits(torch.randint(-(2**63), 2**63 - 1, (1,)), x.numel()).view(x.shape)
    factor = torch.where(bits >= threshold(p), scale(p), 0.0)
    assert torch.equal(h, residual + x * factor)
    assert torch.equal(dx, factor)


def test_no_dropout_outside_training() -> None:
    """`training=False` drops nothing and draws no random number."""
    x, residual = torch.randn(2, 5, 17)
    state = torch.get_rng_state()
    with CPU.ran(forward=1):
        _, h = kf.add_layer_norm(x, residual, 17, dropout_p=0.5, training=False, backend=CPU.backend)
    assert torch.equal(h, x + residual)
    assert torch.equal(torch.get_rng_state(), state)


_PLACES = {
    "columns": lambda t: torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "last-dimension-strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("cols", [17, 1024])
@each_add_verb
def test_layouts(verb: str, cols: int, place: str) -> None:
    """The layout of x, the residual and the cotangents changes no bit."""
    tensors = make(verb, (4, 3, cols), BF16, F32)
    grads = cotangents(call(verb, *tensors, backend="eager"))
    place_of = _PLACES[place]
    placed = [place_of(t.detach()) if t.dim() == 3 else t for t in tensors]
    placed_grads = [place_of(g) for g in grads]
    with CPU.ran(forward=2, backward=2):
        strided = run(verb, placed, placed_grads, backend="cpu", **STAGES["all"])
        plain = run(
            verb,
            [t.contiguous() for t in placed],
            [g.contiguous() for g in placed_grads],
            backend="cpu",
            **STAGES["all"],
        )
    assert_equal(strided, plain)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@pytest.mark.parametrize(("rows", "cols"), [(7, 5000), (1000, 255)])
@each_case
def test_number_of_threads(verb: str, stages: str, rows: int, cols: int) -> None:
    """One, two and three threads give the same bits, sums over rows included."""
    tensors = make(verb, (rows, cols), BF16, F32)
    grads = cotangents(call(verb, *tensors, backend="eager"))
    results = []
    with CPU.ran(forward=3, backward=3):
        for count in (1, 2, 3):
            with _threads(count):
                results.append(run(verb, tensors, grads, backend="cpu", **STAGES[stages]))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@each_add_verb
def test_without_stages_as_the_bare_norm(verb: str) -> None:
    """y of `add_*` has the bits of the bare norm of h."""
    tensors = make(verb, (7, 255))
    with CPU.ran(forward=2):
        y, h = call(verb, *tensors, backend="cpu")
        (bare,) = call(verb.removeprefix("add_"), h.detach(), *tensors[2:], backend="cpu")
    assert torch.equal(y, bare)


@each_add_verb
@pytest.mark.parametrize("weight_offset", [1.0, -0.5])
def test_weight_offset(verb: str, weight_offset: float) -> None:
    """The activation's argument is computed again with the offset."""
    tensors = make(verb, (9, 255))
    shifted = [*tensors[:2], (tensors[2] + weight_offset).detach().requires_grad_(), tensors[3]]
    grads = cotangents(call(verb, *tensors, backend="eager"))
    with CPU.ran(forward=2, backward=2):
        ours = run(verb, tensors, grads, weight_offset=weight_offset, activation="silu", backend="cpu")
        plain = run(verb, shifted, grads, activation="silu", backend="cpu")
    assert_equal(ours, plain)


@each_add_verb
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_residuals_that_do_not_fit(verb: str, backend: str) -> None:
    """A residual of another shape or of a dtype that does not go with the input's is refused."""
    x = torch.randn(4, 17)
    verb_of: Any = getattr(kf, verb)
    with pytest.raises(RuntimeError, match=r"`residual` must have the shape of `input`, \[4, 17\], got \[17\]"):
        verb_of(x, torch.randn(17), 17, backend=backend)
    with pytest.raises(RuntimeError, match="`residual` must be float16 or bfloat16 or float32 for float32 input"):
        verb_of(x, torch.randn(4, 17, dtype=F64), 17, backend=backend)
    with pytest.raises(ValueError, match=r"`dropout_p` must be a probability between 0 and 1, got 1\.5"):
        verb_of(x, x, 17, dropout_p=1.5, backend=backend)
    with pytest.raises(ValueError, match=r"`activation` must be one of .*, got 'step'"):
        verb_of(x, x, 17, activation="step", backend=backend)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5])
def test_operator_refuses_what_is_no_probability(dropout_p: float) -> None:
    """The operator itself raises where no verb stands before it."""
    x, seed = torch.randn(4, 17), torch.zeros(1, dtype=torch.int64)
    args = (x, x, 1, None, None, 1e-5, 0.0, None, False)
    with pytest.raises(ValueError, match="`dropout_p` must be a probability between 0 and 1"):
        torch.ops.kernel_fusion.staged_row_norm(*args, "identity", "identity", dropout_p, seed)
    with pytest.raises(ValueError, match="no activation is called 'step'"):
        torch.ops.kernel_fusion.staged_row_norm(*args, "step", "identity", 0.0, None)
