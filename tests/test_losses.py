"""Losses over classes: accuracy against float64, and the faults that such losses had elsewhere, one test each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import CPU, EAGER, Target, check
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.core import checks
from kernel_fusion.testing.oracle import CrossEntropyCase, TokenLogprobCase

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
IGNORED = -100


@pytest.fixture
def target(target: Target) -> Target:
    """Each backend with kernels, and the definition where a backend has none."""
    return replace(target, backend="eager") if checks.without_kernels("cross_entropy", target.backend) else target


# Grid rationale. Tails, one piece of a row and several of them; options alone and all together; rows that lie apart.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "weighted": True},
    {"weighted": True, "reduction": "mean"},
    {"z_loss": 1e-2, "reduction": "mean"},
    {"layout": "padded", "mean": 50.0},
    {"scale": 0.3, "softcap": 2.0, "label_smoothing": 0.1, "z_loss": 1e-2, "weighted": True, "layout": "transposed"},
)


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, *(pytest.param(each, marks=pytest.mark.slow) for each in (F16, F64))])
def test_options(dtype: torch.dtype, options: dict[str, Any], target: Target) -> None:
    """Loss and gradient are within budget with every option."""
    check(CrossEntropyCase("cross_entropy", (33, 257), dtype, **options), target)


@pytest.mark.parametrize("cols", [1, 2, 7, 64, 1024, 8192, 8193, pytest.param(151937, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_row_lengths(cols: int, dtype: torch.dtype, target: Target) -> None:
    """Any number of classes is within budget."""
    check(CrossEntropyCase("cross_entropy", (65 if cols < 2000 else 4, cols), dtype, label_smoothing=0.1), target)


_CHOICES: tuple[dict[str, Any], ...] = (
    {"num_ids": 3},
    {"warm": True, "softcap": 2.0, "scale": 0.3},
    {"masked": True, "num_ids": 2, "warm": True, "layout": "transposed"},
)


@pytest.mark.parametrize("options", _CHOICES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_log_probabilities(dtype: torch.dtype, options: dict[str, Any], target: Target) -> None:
    """Log-probabilities, entropy and their common gradient are within budget with every option."""
    check(TokenLogprobCase("token_logprob", (33, 257), dtype, **options), target)


def _draw(rows: int, classes: int, target: Target, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, classes, device=target.device, dtype=dtype).requires_grad_()
    return x, torch.randint(0, classes, (rows,), device=target.device)


def _loss(target: Target, *args: Any, **options: Any) -> Any:
    return kf.cross_entropy(*args, backend=target.backend, **options)


# ---- The faults, each a function of a target -------------------------------------------------------------------------


def _every_gradient_counts(target: Target) -> None:
    """Without a reduction each row has the factor of its own gradient, not that of the first."""
    x, ids = _draw(5, 11, target)
    dy = torch.randn(5, device=target.device)
    ours = torch.autograd.grad(_loss(target, x, ids, reduction="none"), x, dy)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(F.cross_entropy(x, ids, reduction="none"), x, dy)[0])


def _logits_are_not_written(target: Target) -> None:
    """The logits and the incoming gradient are the same after forward and backward."""
    x, ids = _draw(5, 11, target)
    before, dy = x.detach().clone(), torch.randn(5, device=target.device)
    dy_before, version = dy.clone(), x._version
    _loss(target, x, ids, reduction="none").backward(dy)
    assert torch.equal(x.detach(), before)
    assert torch.equal(dy, dy_before)
    assert x._version == version


def _backward_twice(target: Target) -> None:
    """A second backward through the same graph is linear in its gradient."""
    x, ids = _draw(5, 11, target)
    loss = _loss(target, x, ids)
    one, three = (
        torch.autograd.grad(loss, x, torch.tensor(v, device=target.device), retain_graph=True)[0] for v in (1.0, 3.0)
    )
    torch.testing.assert_close(three, 3 * one)


def _confident_class(target: Target) -> None:
    """With 1 - p = 1e-3 the gradient of the target is -1e-3 to half a unit of the last place of bf16."""
    x = torch.zeros(1, 2, device=target.device, dtype=BF16)
    x[0, 0] = 6.90625
    x.requires_grad_()
    dx = torch.autograd.grad(_loss(target, x, torch.tensor([0], device=target.device)), x)[0]
    exact = torch.sigmoid(-x.detach().double()[0, 0])
    torch.testing.assert_close(dx[0, 0].double(), -exact, rtol=2.0**-9, atol=0)


def _softcap_and_tail(target: Target) -> None:
    """A softcap does not turn what lies beyond a row into classes."""
    x = torch.full((2, 65537), -5.0, device=target.device)
    loss = _loss(target, x, torch.tensor([0, 65536], device=target.device), softcap=1.0, reduction="none")
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(65537)))


def _padded_tail(target: Target) -> None:
    """What lies beyond a row of very negative logits adds nothing, so no log-probability exceeds 0."""
    x = torch.full((2, 151937), -50.0, device=target.device)
    x[:, 3] = 10.0
    loss = _loss(target, x, torch.tensor([3, 3], device=target.device), reduction="none")
    assert (loss >= 0).all()
    assert (loss < 1e-6).all()


def _all_ignored(target: Target) -> None:
    """If all rows are ignored the mean is NaN, the sum 0, and the gradient 0, even beside NaN."""
    x, ids = _draw(3, 7, target)
    ids = torch.full_like(ids, IGNORED)
    with torch.no_grad():
        x[0] = math.nan
    mean, total = _loss(target, x, ids), _loss(target, x, ids, reduction="sum", z_loss=0.1, label_smoothing=0.1)
    assert mean.isnan()
    assert total == 0
    assert not torch.autograd.grad(mean, x)[0].any()
    assert not torch.autograd.grad(total, x)[0].any()


def _without_gradients(target: Target) -> None:
    """Without a graph the loss has the bits of training."""
    x, ids = _draw(5, 11, target)
    with torch.no_grad():
        loss = _loss(target, x, ids)
    assert torch.equal(loss, _loss(target, x, ids).detach())


def _autocast(target: Target) -> None:
    """Under autocast the loss is that of the given logits, in float32."""
    x, ids = _draw(5, 11, target, BF16)
    with torch.autocast(target.device, dtype=BF16):
        loss = _loss(target, x, ids)
    assert loss.dtype == F32
    assert torch.equal(loss, _loss(target, x, ids))


def _transposed(target: Target) -> None:
    """Rows that lie in another order are read as they lie."""
    x = torch.randn(3, 4, 11, device=target.device)
    rows = x.transpose(0, 1)  # (4, 3, 11)
    ids = torch.randint(0, 11, (4, 3), device=target.device)
    ours = _loss(target, rows.movedim(-1, 1), ids, reduction="none")
    torch.testing.assert_close(ours, F.cross_entropy(rows.movedim(-1, 1), ids, reduction="none"))
    columns = torch.randn(11, 6, device=target.device).T
    torch.testing.assert_close(_loss(target, columns, ids.flatten()[:6]), F.cross_entropy(columns, ids.flatten()[:6]))


def _expanded_gradient(target: Target) -> None:
    """A gradient of stride 0 is that of every row."""
    x, ids = _draw(5, 11, target)
    ours = torch.autograd.grad(_loss(target, x, ids, reduction="none").sum(), x)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(F.cross_entropy(x, ids, reduction="sum"), x)[0])


def _common_offset(target: Target) -> None:
    """Logits that are large but equal give log C and equal gradients."""
    for offset in (1e4, 1e8, -1e4):
        x = torch.full((2, 100), offset, device=target.device).requires_grad_()
        loss = _loss(target, x, torch.tensor([1, 99], device=target.device), label_smoothing=0.1)
        torch.testing.assert_close(loss.item(), math.log(100))
        dx = torch.autograd.grad(loss, x)[0]
        torch.testing.assert_close(dx[:, 0], torch.full((2,), 0.45 / 100, device=target.device), rtol=1e-4, atol=0)


def _out_of_range(target: Target) -> None:
    """A target that is no class raises on a CPU, and makes the row NaN on a GPU; nothing else is read."""
    for wrong in (7, -1, 2**40):
        x, ids = _draw(3, 7, target)
        ids[1] = wrong
        if target.device == "cpu" and target.backend != "triton":
            with pytest.raises(IndexError, match="out of bounds"):
                _loss(target, x, ids)
            continue
        loss = _loss(target, x, ids, reduction="none")
        dx = torch.autograd.grad(loss.sum(), x)[0]
        assert loss.isnan().tolist() == [False, True, False]
        assert dx.isnan().all(-1).tolist() == [False, True, False]


def _z_loss(target: Target) -> None:
    """z_loss is in the loss and in its mean, with and without stats; ignored rows have none."""
    x, ids = _draw(6, 11, target)
    ids[2] = IGNORED
    kept = ids != IGNORED
    lse = torch.logsumexp(x, -1)
    expected = F.cross_entropy(x, ids) + 0.5 * lse[kept].square().mean()
    plain, both = _loss(target, x, ids, z_loss=0.5), _loss(target, x, ids, z_loss=0.5, stats=True)
    torch.testing.assert_close(plain, expected)
    assert torch.equal(plain, both.loss)


def _stats(target: Target) -> None:
    """Stats are those of PyTorch's calls; lse is differentiable; the first of equal logits is predicted."""
    x, ids = _draw(6, 1003, target)
    with torch.no_grad():
        x[1, 500], x[1, 700] = 9.0, 9.0
    ids[1], ids[2] = 500, IGNORED
    _, lse, predicted, correct = _loss(target, x, ids, stats=True)
    kept = ids != IGNORED
    torch.testing.assert_close(lse, torch.logsumexp(x, -1).where(kept, 0.0))
    assert torch.equal(predicted, x.argmax(-1).where(kept, -1))
    assert predicted[1] == 500
    assert torch.equal(correct, (x.argmax(-1) == ids) & kept)
    ours = torch.autograd.grad(lse.sum(), x)[0]
    torch.testing.assert_close(ours, torch.softmax(x.detach(), -1) * kept[:, None])


def _token_weights(target: Target) -> None:
    """Weights of rows, by the unreduced loss, scale the gradients of their rows."""
    x, ids = _draw(5, 11, target)
    weights = torch.rand(5, device=target.device)
    ours = torch.autograd.grad((_loss(target, x, ids, reduction="none") * weights).sum(), x)[0]
    theirs = torch.autograd.grad((F.cross_entropy(x, ids, reduction="none") * weights).sum(), x)[0]
    torch.testing.assert_close(ours, theirs)


def _batch_in_pieces(target: Target) -> None:
    """Pieces with unequal numbers of kept rows, divided by the count of all, add up to the whole batch."""
    x, ids = _draw(12, 11, target)
    ids[:5], ids[7] = IGNORED, IGNORED
    count = (ids != IGNORED).sum()
    for divisor in (count, count.item()):
        parts = [_loss(target, x[i : i + 4], ids[i : i + 4], divisor=divisor) for i in (0, 4, 8)]
        torch.testing.assert_close(torch.stack(parts).sum(), F.cross_entropy(x, ids))


def _no_view_of_a_view(target: Target) -> None:
    """Columns of a larger tensor are read where they lie, and get a gradient of their own."""
    whole, ids = _draw(5, 16, target)
    ids = ids % 11
    loss = _loss(target, whole[:, 2:13], ids)
    torch.testing.assert_close(loss, F.cross_entropy(whole[:, 2:13], ids))
    dx = torch.autograd.grad(loss, whole)[0]
    assert not dx[:, :2].any()
    assert not dx[:, 13:].any()


def _logprob(target: Target, *args: Any, **options: Any) -> Any:
    return kf.token_logprob(*args, backend=target.backend, **options)


def _entropy_beside_nothing(target: Target) -> None:
    """Classes at -inf, by themselves or by a mask, leave entropy and gradients finite; a masked class is at -inf."""
    x, ids = _draw(3, 9, target)
    keep = torch.ones(3, 9, dtype=torch.bool, device=target.device)
    keep[:, 4:] = False
    hidden = x.detach().masked_fill(~keep, -math.inf).requires_grad_()
    found = []
    for logits, options in ((x, {"mask": keep}), (hidden, {})):
        logprob, entropy = _logprob(target, logits, ids % 4, entropy=True, **options)
        dx = torch.autograd.grad((logprob + entropy).sum(), logits)[0]
        assert dx.isfinite().all()
        assert not dx[:, 4:].any()
        found.append((logprob.detach(), entropy.detach(), dx))
    torch.testing.assert_close(*found)
    few = _logprob(target, x[:, :4], ids % 4, entropy=True)
    torch.testing.assert_close(tuple(t.detach() for t in few), found[0][:2])
    gone = _logprob(target, x, torch.full_like(ids, 8), mask=keep)
    assert (gone == -math.inf).all()
    assert not torch.autograd.grad(gone.sum(), x)[0].any()


def _nothing_kept(target: Target) -> None:
    """A row whose mask keeps nothing has entropy 0 and no gradient, also beside NaN."""
    x, ids = _draw(2, 9, target)
    with torch.no_grad():
        x[1] = math.nan
    keep = torch.zeros(2, 1, dtype=torch.bool, device=target.device)
    logprob, entropy = _logprob(target, x, ids, mask=keep, entropy=True)
    assert (logprob == -math.inf).all()
    assert not entropy.any()
    assert not torch.autograd.grad((logprob + entropy).sum(), x)[0].any()


def _rollout(target: Target) -> None:
    """Equal logits have equal log-probabilities: alone or in a batch, with and without gradients and entropy."""
    x, ids = _draw(5, 1003, target, BF16)
    logprob, _ = _logprob(target, x, ids, entropy=True, temperature=0.7)
    with torch.no_grad():
        plain = _logprob(target, x, ids, temperature=0.7)
        alone = _logprob(target, x[3:4], ids[3:4], temperature=0.7)
        of_rows = _logprob(target, x, ids, temperature=torch.full((5,), 0.7, device=target.device))
    assert torch.equal(logprob.detach(), plain)
    assert torch.equal(alone, plain[3:4])
    assert of_rows.dtype == F32
    torch.testing.assert_close(of_rows, plain)


def _several_ids(target: Target) -> None:
    """Several classes of a row are those of several calls, also one class twice, and their gradients add up."""
    x, ids = _draw(4, 11, target)
    each = torch.stack([ids, (ids + 1) % 11, ids], -1)
    logprob = _logprob(target, x, each)
    assert torch.equal(logprob[:, 1].detach(), _logprob(target, x, each[:, 1].int()).detach())
    dy = torch.randn(4, 3, device=target.device)
    ours = torch.autograd.grad(logprob, x, dy)[0]
    chosen = torch.log_softmax(x, -1).gather(-1, each)
    torch.testing.assert_close(ours, torch.autograd.grad(chosen, x, dy)[0])


def _order_of_factors(target: Target) -> None:
    """The scale comes before the softcap, and the temperature after it."""
    x, ids = _draw(4, 11, target)
    z = 5.0 * torch.tanh(3.0 * x / 5.0) / 0.5
    expected = torch.log_softmax(z, -1).gather(-1, ids[:, None])[:, 0]
    for temperature in (0.5, torch.tensor(0.5, device=target.device)):
        ours = _logprob(target, x, ids, scale=3.0, softcap=5.0, temperature=temperature)
        torch.testing.assert_close(ours, expected)
    loss = _loss(target, x, ids, scale=3.0, softcap=5.0)
    torch.testing.assert_close(loss, F.cross_entropy(5.0 * torch.tanh(3.0 * x / 5.0), ids))


_FAULTS: tuple[Callable[[Target], None], ...] = (
    _every_gradient_counts,
    _logits_are_not_written,
    _backward_twice,
    _confident_class,
    _softcap_and_tail,
    _padded_tail,
    _all_ignored,
    _without_gradients,
    _autocast,
    _transposed,
    _expanded_gradient,
    _common_offset,
    _out_of_range,
    _z_loss,
    _stats,
    _token_weights,
    _batch_in_pieces,
    _no_view_of_a_view,
    _entropy_beside_nothing,
    _nothing_kept,
    _rollout,
    _several_ids,
    _order_of_factors,
)


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_fault(fault: Callable[[Target], None], target: Target) -> None:
    """A fault that such a loss had somewhere; the function says which."""
    fault(target)


@pytest.mark.parametrize("where", [CPU, EAGER], ids=lambda where: where.backend)
def test_probabilities(where: Target) -> None:
    """Targets that are probabilities are served by the definition, and kernels that are asked for refuse them."""
    x, p = torch.randn(4, 7), torch.randn(4, 7).softmax(-1)
    if where.backend == "cpu":
        with pytest.raises(kf.errors.BackendUnavailableError, match="no kernels for targets that are probabilities"):
            kf.cross_entropy(x, p, backend="cpu")
    weight = torch.rand(7)
    ours = kf.cross_entropy(x, p, weight, label_smoothing=0.1)
    torch.testing.assert_close(ours, F.cross_entropy(x, p, weight, label_smoothing=0.1))
    assert kf.cross_entropy(x, p, stats=True).correct.dtype == torch.bool


# Grid rationale. One error of each check, with the words that name argument, expectation and what came.
_ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "reduction": (
        lambda x, t: kf.cross_entropy(x, t, reduction="avg"),
        ValueError,
        "`reduction` must be one of 'mean'",
    ),
    "smoothing": (lambda x, t: kf.cross_entropy(x, t, label_smoothing=2.0), ValueError, "between 0 and 1, got 2.0"),
    "softcap": (lambda x, t: kf.cross_entropy(x, t, softcap=0.0), ValueError, "`softcap` must be positive or None"),
    "divisor": (
        lambda x, t: kf.cross_entropy(x, t, reduction="sum", divisor=2),
        ValueError,
        "goes with reduction='mean'",
    ),
    "shape": (lambda x, t: kf.cross_entropy(x, t[:2]), RuntimeError, r"`target` must have shape \[3\]"),
    "dtype": (lambda x, t: kf.cross_entropy(x.long(), t), RuntimeError, "`input` must be float16 or"),
    "weight": (lambda x, t: kf.cross_entropy(x, t, torch.ones(3)), RuntimeError, r"shape \(C,\) = \(7,\), got \(3,\)"),
    "classes": (lambda x, t: kf.cross_entropy(x[:, :0], t), RuntimeError, "must have a class"),
    "scale": (lambda x, t: kf.cross_entropy(x, t, scale="1"), TypeError, "`scale` must be a number, got '1'"),
    "target": (lambda x, t: kf.cross_entropy(x, [0, 1, 2]), TypeError, "`target` must be a tensor, got list"),
    "mask": (lambda x, t: kf.token_logprob(x, t, mask=x), RuntimeError, "`mask` must be boolean, got float32"),
    "ids": (lambda x, t: kf.token_logprob(x, t[:2]), RuntimeError, r"shape \[3\] or \[3, 'K'\] for `logits`"),
    "floats": (lambda x, t: kf.token_logprob(x, x), RuntimeError, "`ids` must be of integers, got float32"),
    "temperature": (lambda x, t: kf.token_logprob(x, t, temperature=0.0), ValueError, "must be positive, got 0.0"),
    "rows": (lambda x, t: kf.token_logprob(x, t, temperature=x), RuntimeError, r"broadcast to the rows .* \[3\]"),
    "kernels": (
        lambda x, t: kf.token_logprob(x, t, backend="triton"),
        kf.errors.BackendUnavailableError,
        "it has no kernels for log-probabilities",
    ),
}


@pytest.mark.parametrize("name", _ERRORS)
def test_errors(name: str) -> None:
    """Wrong arguments are named."""
    call, error, text = _ERRORS[name]
    with pytest.raises(error, match=f"`(cross_entropy|token_logprob)`: .*{text}"):
        call(torch.randn(3, 7), torch.tensor([0, 1, 2]))


def test_module() -> None:
    """The module is PyTorch's, takes its place by `__class__`, and passes its options on."""
    x, ids = torch.randn(4, 7, dtype=BF16), torch.tensor([1, 0, IGNORED, 6])
    loss = torch.nn.CrossEntropyLoss(torch.rand(7), label_smoothing=0.1)
    expected = loss(x.float(), ids)
    loss.__class__ = kf.FusedCrossEntropyLoss
    torch.testing.assert_close(loss(x, ids), expected)
    ours = kf.FusedCrossEntropyLoss(softcap=2.0, z_loss=0.1, stats=True)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert torch.equal(ours(x, ids).loss, kf.cross_entropy(x, ids, softcap=2.0, z_loss=0.1))


def test_more_elements_than_32_bits_count() -> None:
    """Shapes with more than 2^31 elements are traced, and offsets of rows are counted in 64 bits."""
    x = torch.empty(33000, 65600, dtype=BF16, device="meta", requires_grad=True)
    loss = kf.cross_entropy(x, torch.empty(33000, dtype=torch.int64, device="meta"), reduction="none")
    assert loss.shape == (33000,)
    assert loss.dtype == F32


@pytest.mark.slow
def test_the_last_of_many_rows() -> None:
    """The last row of 2^31 elements and more is read and written in its place."""
    rows, classes = 33000, 65600
    x = torch.zeros(1, classes, dtype=BF16).expand(rows, classes)
    ids = torch.full((rows,), IGNORED)
    ids[-1] = 5
    torch.testing.assert_close(kf.cross_entropy(x, ids, backend="cpu").item(), math.log(classes))


def test_threads_do_not_change_bits() -> None:
    """Few long rows, whose pieces threads share, have the bits of one thread, and a row those of a batch."""
    x, ids = _draw(3, 70001, CPU)
    found = []
    threads = torch.get_num_threads()
    for number in (1, 4):
        torch.set_num_threads(number)
        loss = _loss(CPU, x, ids, reduction="none", label_smoothing=0.1)
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), x)[0]))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))
    one = _loss(CPU, x[1:2], ids[1:2], reduction="none", label_smoothing=0.1)
    assert torch.equal(one, found[0][0][1:2])


def _step(x: Tensor, ids: Tensor) -> Tensor:
    return kf.cross_entropy(x, ids, label_smoothing=0.1, z_loss=1e-3, softcap=5.0)


def test_compile_and_transforms() -> None:
    """torch.compile keeps one graph for every number of rows; vmap, grad and jvp are those of PyTorch's calls."""
    compiled = torch.compile(_step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        x, ids = _draw(rows, 11, CPU)
        torch.testing.assert_close(compiled(x, ids), _step(x, ids))
        torch.testing.assert_close(*(torch.autograd.grad(f(x, ids), x)[0] for f in (compiled, _step)))
    x, ids = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    each = torch.stack([kf.cross_entropy(a, b) for a, b in zip(x, ids, strict=True)])
    torch.testing.assert_close(torch.vmap(kf.cross_entropy)(x, ids), each)
    per_example = torch.vmap(torch.func.grad(kf.cross_entropy))(x, ids)
    torch.testing.assert_close(per_example, torch.vmap(torch.func.grad(F.cross_entropy))(x, ids))
    tangent = torch.randn(5, 11)
    ours, theirs = (
        torch.func.jvp(lambda v, f=f: f(v, ids[0]), (x[0],), (tangent,)) for f in (kf.cross_entropy, F.cross_entropy)
    )
    torch.testing.assert_close(ours, theirs)
    exported = torch.export.export(kf.FusedCrossEntropyLoss(), (x[0], ids[0]))
    torch.testing.assert_close(exported.module()(x[0], ids[0]), each[0])
