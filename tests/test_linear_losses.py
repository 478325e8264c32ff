"""Linear losses: values and gradients against float64, for every way to add up and every wish for gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import kernel_fusion as kf
from kernel_fusion.errors import BackendUnavailableError
from kernel_fusion.operators.linear_chunks import ACCUMULATE, rows_per_chunk

ROWS, HIDDEN, CLASSES = 23, 16, 301
# The unit of a dtype, and what an fp32 accumulation may add.
UNIT = {torch.float64: 1e-13, torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def layer(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias, and targets of which some are ignored, unequally over chunks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[[1, 2, 3, 9]] = -100
    return x, weight, bias, target


def exact(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    divisor: float | None = None,
) -> Tensor:
    """The loss by PyTorch's functions in float64."""
    z = logits.double() * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    weight = None if weight is None else weight.double()
    loss = F.cross_entropy(z, target, weight, reduction="none", label_smoothing=label_smoothing)
    kept = target != -100
    loss = loss + z_loss * torch.where(kept, torch.logsumexp(z, -1) ** 2, 0.0)
    if reduction == "none":
        return loss
    count = kept.sum() if weight is None else weight[target.clamp(0)].masked_fill(~kept, 0.0).sum()
    return loss.sum() / ((count if divisor is None else divisor) if reduction == "mean" else 1)


def outcomes(function: Callable[..., Tensor], leaves: Sequence[Tensor], dloss: Tensor | None = None) -> list[Tensor]:
    """The loss and the gradients of the leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    loss = function(*leaves)
    dloss = torch.ones_like(loss) if dloss is None else dloss.to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, dloss)]


def off(ours: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """The largest relative error, in the 2-norm."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, true, strict=True))


def random_gradient(reduction: str) -> Tensor:
    """An incoming gradient, different for each row if there are rows."""
    return torch.rand(ROWS if reduction == "none" else (), generator=torch.Generator().manual_seed(5)) + 0.5


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"softcap": 3.0, "scale": 0.5},
    {"label_smoothing": 0.1, "z_loss": 0.02, "weight": torch.linspace(0.1, 2.0, CLASSES)},
)


@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(reduction: str, dtype: torch.dtype, accumulate: str) -> None:
    """Loss and gradients are those of float64, also if chunks are ragged and the incoming gradient varies over rows.

    It catches a first row's gradient for all, a bias that each chunk adds, a softcap or scale that is lost, and means
    of means.
    """
    *leaves, target = layer(dtype)
    dloss = random_gradient(reduction)
    for options in OPTIONS:

        def ours(x: Tensor, weight: Tensor, bias: Tensor, options: dict[str, Any] = options) -> Tensor:
            found: Any = kf.linear_cross_entropy(
                x, weight, target, linear_bias=bias, reduction=reduction, accumulate=accumulate, chunk_rows=5, **options
            )
            return found  # type: ignore[no-any-return]

        def true(x: Tensor, weight: Tensor, bias: Tensor, options: dict[str, Any] = options) -> Tensor:
            return exact(F.linear(x, weight, bias), target, reduction, **options)

        found = outcomes(ours, leaves, dloss)
        assert [t.dtype for t in found[1:]] == [dtype] * 3
        assert off(found, outcomes(true, [t.double() for t in leaves], dloss)) < 4 * UNIT[dtype], options


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_wish_for_gradients(reduction: str) -> None:
    """A frozen head, frozen hidden states and all other combinations give the wanted gradients, and the same loss."""
    x, weight, bias, target = layer()
    dloss, found = random_gradient(reduction), []
    for accumulate, wants in itertools.product(("bf16", "recompute"), itertools.product((False, True), repeat=3)):
        leaves = [t.clone().requires_grad_(wanted) for t, wanted in zip((x, weight, bias), wants, strict=True)]
        loss: Any = kf.linear_cross_entropy(
            *leaves[:2], target, linear_bias=leaves[2], reduction=reduction, chunk_rows=7, accumulate=accumulate
        )
        if any(wants):
            loss.backward(dloss)
        found.append((loss.detach(), *(leaf.grad for leaf in leaves)))
        assert [leaf.grad is not None for leaf in leaves] == list(wants)
    for each in zip(*found, strict=True):
        given = [t for t in each if t is not None]
        assert all(torch.allclose(given[0], t, rtol=1e-5, atol=1e-7) for t in given)
    assert all(torch.equal(found[0][0], each[0]) for each in found)  # also without a gradient


def test_unwanted_gradients_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradient mode, or with nothing that requires a gradient, forward calls no backward part."""
    from kernel_fusion.operators import linear_losses

    monkeypatch.setattr(linear_losses, "Gradients", None)  # raises if it is called
    x, weight, _, target = layer()
    plain = kf.linear_cross_entropy(x, weight, target)
    with torch.no_grad():
        assert torch.equal(kf.linear_cross_entropy(x.requires_grad_(), weight, target), plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_backward_passes(reduction: str) -> None:
    """A second backward pass with another gradient is right, or raises without `retain_graph`; no input is written."""
    *leaves, target = layer(torch.bfloat16)
    kept = [t.clone() for t in leaves]
    x, weight, bias = (t.requires_grad_() for t in leaves)
    loss: Any = kf.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction, chunk_rows=5)
    first = torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=True)
    copies = [t.clone() for t in first]
    second = torch.autograd.grad(loss, leaves, torch.full_like(loss, 2.0))
    assert all(torch.equal(a, b) for a, b in zip(first, copies, strict=True))
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(leaves, kept, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves, torch.ones_like(loss))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_raise(reduction: str) -> None:
    """A gradient of the gradient is an error that says what has one, and that has it."""
    *leaves, target = layer()
    leaves = [t.requires_grad_() for t in leaves]

    def gradient(**options: Any) -> Tensor:
        loss: Any = kf.linear_cross_entropy(*leaves[:2], target, linear_bias=leaves[2], reduction=reduction, **options)
        return torch.autograd.grad(loss.sum() ** 2, leaves[0], create_graph=True)[0]

    with pytest.raises(RuntimeError, match="backend='eager'"):
        gradient().sum().backward()
    gradient(backend="eager").sum().backward()


@pytest.mark.parametrize("accumulate", ACCUMULATE)
def test_many_chunks_round_as_one(accumulate: str) -> None:
    """The gradient of a bf16 weight keeps within the documented part of the unfused error: 64 chunks are too many
    for one rounding each, so "auto" adds in float32.
    """
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 32, generator=generator).bfloat16() for n in (1024, 64))
    target = torch.randint(64, (1024,), generator=generator)
    true = outcomes(lambda x, w: exact(F.linear(x, w), target), [x.double(), weight.double()])[2]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return kf.linear_cross_entropy(x, weight, target, accumulate=accumulate, chunk_rows=16)  # type: ignore[return-value]

    error, unfused = (
        float((outcomes(f, [x, weight])[2].double() - true).norm() / true.norm())
        for f in (ours, lambda x, w: F.cross_entropy(F.linear(x, w).float(), target))
    )
    limit = {"auto": 1.5, "fp32": 1.02, "recompute": 1.02, "bf16": 8.0}[accumulate]
    assert error < limit * unfused
    assert (accumulate == "bf16") == (error > 1.5 * unfused)


@pytest.mark.parametrize("chunks", [3, 8])
def test_auto_with_flat_logits(chunks: int) -> None:
    """Flat logits, whose gradients are the most exact, show each rounding of the sum: "auto" stays within 1.5."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (1536, 256))
    leaves, target = [x.bfloat16(), (0.02 * weight).bfloat16()], torch.randint(256, (1536,), generator=generator)
    true = outcomes(lambda x, w: exact(F.linear(x, w), target), [t.double() for t in leaves])[2]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return kf.linear_cross_entropy(x, weight, target, chunk_rows=1536 // chunks)  # type: ignore[return-value]

    error, unfused = (
        float((outcomes(f, leaves)[2].double() - true).norm())
        for f in (ours, lambda x, w: F.cross_entropy(F.linear(x, w).float(), target))
    )
    assert error < 1.5 * unfused


def test_logits_in_float32() -> None:
    """`logits_dtype` keeps the product's digits: the loss is nearer to that of float64 than with rounded logits."""
    x, weight, bias, target = layer(torch.bfloat16)
    true = exact(F.linear(x.double(), weight.double(), bias.double()), target)
    losses = [
        kf.linear_cross_entropy(x, weight, target, linear_bias=bias, logits_dtype=dtype)
        for dtype in (None, torch.float32)
    ]
    rounded, kept = (abs(float(loss - true)) for loss in losses)  # type: ignore[operator]
    assert kept < 1e-5 < rounded


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(reduction: str) -> None:
    """If no row counts, the mean is NaN, the sum and losses of rows are 0, and so are gradients, beside NaN too."""
    x, weight, bias, target = layer()
    x[3] = float("nan")
    wanted = [t.requires_grad_() for t in (weight, bias)]
    loss: Any = kf.linear_cross_entropy(
        x.nan_to_num(), weight, torch.full_like(target, -100), linear_bias=bias, reduction=reduction, chunk_rows=5
    )
    assert bool(loss.isnan().all() if reduction == "mean" else (loss == 0).all())
    loss.sum().backward()
    assert all(bool((t.grad == 0).all()) for t in wanted)


def test_without_rows() -> None:
    """An input without rows gives gradients of zeros, and a sum of 0."""
    x, weight = torch.randn(0, HIDDEN, requires_grad=True), torch.randn(CLASSES, HIDDEN, requires_grad=True)
    for accumulate in ACCUMULATE:
        loss: Any = kf.linear_cross_entropy(
            x, weight, torch.zeros(0, dtype=torch.int64), reduction="sum", accumulate=accumulate
        )
        assert float(loss.detach()) == 0.0
        assert all(bool((g == 0).all()) for g in torch.autograd.grad(loss, [x, weight]))


def test_batches_in_pieces() -> None:
    """Four unequal micro-batches with the divisor of the whole give the whole batch's loss and gradient."""
    *leaves, target = layer(torch.float64)
    count = (target != -100).sum()

    def pieces(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cuts = [slice(0, 4), slice(4, 5), slice(5, 15), slice(15, None)]
        return sum(  # type: ignore[return-value]
            kf.linear_cross_entropy(x[cut], weight, target[cut], linear_bias=bias, divisor=count) for cut in cuts
        )

    true = outcomes(lambda x, w, b: exact(F.linear(x, w, b), target), leaves)
    assert off(outcomes(pieces, leaves), true) < 1e-12


def test_autocast_casts_once() -> None:
    """Under autocast a float32 head beside bf16 hidden states computes in bf16; its gradient is float32."""
    x, weight, bias, target = layer()
    leaves = [x.bfloat16().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        ours: Any = kf.linear_cross_entropy(*leaves[:2], target, linear_bias=bias, chunk_rows=5)
    rounded = [leaves[0].detach(), weight.detach().bfloat16(), bias.detach().bfloat16()]
    plain = kf.linear_cross_entropy(*rounded[:2], target, linear_bias=rounded[2], chunk_rows=5)
    assert torch.equal(ours.detach(), plain)  # type: ignore[arg-type]
    assert [g.dtype for g in torch.autograd.grad(ours, leaves)] == [torch.bfloat16, torch.float32, torch.float32]
    with pytest.raises(RuntimeError, match="`linear_weight` must have the dtype of `input`, bfloat16, got float32"):
        kf.linear_cross_entropy(*leaves[:2], target)


def test_tied_weights() -> None:
    """A weight that is the embedding too gets both gradients."""
    _, weight, _, target = layer(torch.float64)
    ids = torch.arange(ROWS) % CLASSES

    def model(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda weight: function(torch.tanh(F.embedding(ids, weight)), weight)  # type: ignore[no-any-return]

    ours = outcomes(model(lambda x, w: kf.linear_cross_entropy(x, w, target, chunk_rows=5)), [weight])
    assert off(ours, outcomes(model(lambda x, w: exact(F.linear(x, w), target)), [weight])) < 1e-12


def test_stats_and_their_gradient() -> None:
    """Log-sum-exp, predictions and hits come with the loss; log-sum-exp has its gradient beside that of the mean."""
    x, weight, bias, target = layer(torch.float64)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found: Any = kf.linear_cross_entropy(x, weight, target, linear_bias=bias, stats=True, chunk_rows=5)
        logits = F.linear(x, weight, bias)
        kept = target != -100
        assert torch.equal(found.predicted, logits.argmax(-1).masked_fill(~kept, -1))
        assert torch.equal(found.correct, (found.predicted == target) & kept)
        return found.loss + 0.1 * (found.lse**2).sum()  # type: ignore[no-any-return]

    def true(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias)
        lse = torch.logsumexp(logits, -1).masked_fill(target == -100, 0.0)
        return exact(logits, target) + 0.1 * (lse**2).sum()

    assert off(outcomes(ours, [x, weight, bias]), outcomes(true, [x, weight, bias])) < 1e-12


def test_shapes() -> None:
    """Leading dimensions are rows; a single row, and probabilities as targets, are served."""
    x, weight, _, target = layer(torch.float64)
    shaped: Any = kf.linear_cross_entropy(x[:22].view(2, 11, -1), weight, target[:22].view(2, 11), reduction="none")
    flat: Any = kf.linear_cross_entropy(x[:22], weight, target[:22], reduction="none")
    assert torch.equal(shaped, flat.view(2, 11))
    one: Any = kf.linear_cross_entropy(x[0], weight, target[0], reduction="none")
    assert one.shape == ()
    assert torch.allclose(one, flat[0])
    p = torch.softmax(torch.randn(ROWS, CLASSES, dtype=torch.float64), -1)
    found: Any = kf.linear_cross_entropy(x, weight, p)
    assert torch.allclose(found, F.cross_entropy(F.linear(x, weight), p))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_to_one_call(reduction: str) -> None:
    """A compiled loss is one graph without breaks, whose forward holds one operator, and has the same bits."""
    *leaves, target = layer(torch.bfloat16)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found: Any = kf.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction, chunk_rows=5)
        return found.sum()  # type: ignore[no-any-return]

    compiled = outcomes(torch.compile(loss, backend="aot_eager", fullgraph=True), leaves)
    assert all(torch.equal(a, b) for a, b in zip(compiled, outcomes(loss, leaves), strict=True))


def test_no_value_is_read_by_the_host() -> None:
    """Forward and backward run on tensors without values, in every way to add up: nothing asks for a number."""
    with FakeTensorMode():
        for reduction, accumulate in itertools.product(("mean", "none"), ACCUMULATE):
            x, weight = (torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (4096, 1000))
            loss: Any = kf.linear_cross_entropy(
                x, weight, torch.zeros(4096, dtype=torch.int64), accumulate=accumulate, reduction=reduction
            )
            loss.sum().backward()
            assert [t.grad is not None and t.grad.shape == t.shape for t in (x, weight)] == [True, True]


def test_checkpointing() -> None:
    """Under activation checkpointing the loss and its gradients have the same bits."""
    *leaves, target = layer()

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return kf.linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_rows=5)  # type: ignore[return-value]

    again = outcomes(lambda *given: checkpoint(loss, *given, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(again, outcomes(loss, leaves), strict=True))


def test_chunks_follow_from_the_layer() -> None:
    """The length of chunks depends on the layer and the dtype only, and keeps a chunk of logits near 256 MiB."""
    for hidden, classes in ((4096, 128256), (1152, 262144), (1024, 151936), (8192, 152064)):
        rows = rows_per_chunk(hidden, classes, torch.bfloat16)
        assert rows % 256 == 0
        assert 2**27 < 2 * rows * classes <= 2**28 or rows == hidden // 4
    assert rows_per_chunk(16, 10, torch.float32) == 8192


@pytest.mark.parametrize("accumulate", ["bf16", "recompute"])
def test_logits_never_exist_at_once(accumulate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor within the call is larger than the weight or a chunk of logits."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor))
            return found

    from kernel_fusion.operators import linear_chunks, linear_losses

    monkeypatch.setattr(linear_chunks, "_CHUNK_BYTES", 1)  # so a block has 256 classes
    x, weight, bias, target = layer(torch.bfloat16)
    call = (x, weight, bias, None, target, None, None, None, 1.0, 0.0, -100, None, True, 0.0, 0.0, False)
    x, target = x.repeat(40, 1), target.repeat(40)
    with Sizes():
        linear_losses._linear_cross_entropy(x, *call[1:4], target, *call[5:], accumulate, 16, [True] * 3)
    assert max(sizes) <= max(weight.numel(), 16 * CLASSES, 256 * x.shape[0]) < x.shape[0] * CLASSES


def test_errors() -> None:
    """Errors name the argument, what was expected and what came."""
    x, weight, bias, target = layer()
    cases: tuple[tuple[type[Exception], str, Callable[[], Any]], ...] = (
        (RuntimeError, "no elements.*ZeRO-3", lambda: kf.linear_cross_entropy(x, torch.empty(0), target)),
        (RuntimeError, r"`linear_weight` \(V, H\)", lambda: kf.linear_cross_entropy(x, weight[:, 1:], target)),
        (RuntimeError, r"\(V,\) = \(301,\)", lambda: kf.linear_cross_entropy(x, weight, target, linear_bias=bias[1:])),
        (RuntimeError, "`target` must have shape", lambda: kf.linear_cross_entropy(x, weight, target[1:])),
        (ValueError, "`accumulate`", lambda: kf.linear_cross_entropy(x, weight, target, accumulate="fp64")),
        (ValueError, "`chunk_rows`", lambda: kf.linear_cross_entropy(x, weight, target, chunk_rows=0)),
        (ValueError, "`logits_dtype`", lambda: kf.linear_cross_entropy(x, weight, target, logits_dtype=torch.float16)),
        (ValueError, "`softcap`", lambda: kf.linear_cross_entropy(x, weight, target, softcap=-1.0)),
        (IndexError, "out of bounds", lambda: kf.linear_cross_entropy(x, weight, target + CLASSES)),
        (BackendUnavailableError, "triton", lambda: kf.linear_cross_entropy(x, weight, target, backend="triton")),
    )
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()


def test_distributed_tensors_are_refused() -> None:
    """A DTensor beside plain tensors is an error in a sentence."""
    from torch.distributed.tensor import DTensor

    x, weight, _, target = layer()
    head = DTensor.__new__(DTensor, weight, _spec(weight), requires_grad=False)
    with pytest.raises(TypeError, match="`linear_weight` is a DTensor"):
        kf.linear_cross_entropy(x, head, target)


def _spec(t: Tensor) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    class Mesh:
        ndim, device_type = 1, "cpu"

        def size(self, dim: int = 0) -> int:
            return 1

    return DTensorSpec(Mesh(), (Replicate(),), TensorMeta(t.shape, t.stride(), t.dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_transforms_take_the_definition(transform: Any) -> None:
    """`torch.func` sees PyTorch's operations, so its derivatives are right."""
    x, weight, _, target = layer(torch.float64)
    ours = transform(lambda w: kf.linear_cross_entropy(x, w, target))(weight)
    assert torch.allclose(ours, torch.func.grad(lambda w: exact(F.linear(x, w), target))(weight))


def test_rows_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel makes the gradient of a chunk, PyTorch's operations make it, with every option."""
    from kernel_fusion.operators import linear_chunks

    *leaves, target = layer(torch.float64)
    monkeypatch.setattr(linear_chunks, "_has_kernel", lambda device: False)
    for options in OPTIONS:

        def ours(x: Tensor, weight: Tensor, bias: Tensor, options: dict[str, Any] = options) -> Tensor:
            found: Any = kf.linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_rows=5, **options)
            return found  # type: ignore[no-any-return]

        def true(x: Tensor, weight: Tensor, bias: Tensor, options: dict[str, Any] = options) -> Tensor:
            return exact(F.linear(x, weight, bias), target, **options)

        assert off(outcomes(ours, leaves), outcomes(true, leaves)) < 1e-12, options
