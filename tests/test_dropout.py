"""Dropout: how often, how independently and how reproducibly elements are dropped, in every verb that drops any."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dropout_statistics import patterns, suspicions
from support import CUDA, EAGER, Target
from torch import Tensor
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.dropout import scale, threshold

# The module; the package has a function of its name.
definition = importlib.import_module("kernel_fusion.backends.eager.dropout")

ROWS, COLS = 1024, 512
RATES = (0.1, 0.25, 0.5, 0.9)
RARE = 0.999  # with which few elements are kept


def _added(verb: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda x, p, **options: verb(x, torch.zeros_like(x), x.shape[-1], dropout_p=p, **options).residual


# Each is dropout alone: (x, p) -> x with elements zeroed and the others scaled.
VERBS: dict[str, Callable[..., Tensor]] = {
    "act_dropout": lambda x, p, **options: kf.act_dropout(x, None, p, **options),
    "bias_act": lambda x, p, **options: kf.bias_act(x, x.new_zeros(x.shape[-1:]), None, dropout_p=p, **options),
    "add_layer_norm": _added(kf.add_layer_norm),
    "add_rms_norm": _added(kf.add_rms_norm),
}


@pytest.fixture(params=VERBS)
def drop(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Each verb that has dropout, reduced to it."""
    return VERBS[request.param]


def dropped(drop: Callable[..., Tensor], shape: tuple[int, ...], p: float, target: Target) -> Tensor:
    """Which elements are dropped."""
    return drop(torch.ones(shape, device=target.device), p, backend=target.backend) == 0


# ---- The distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", RATES)
def test_elements_drop_independently_with_p(drop: Callable[..., Tensor], p: float, any_target: Target) -> None:
    """Rate, correlations at many distances, rates of rows and patterns of eight neighbours are those of coin tosses."""
    with any_target.ran():
        mask = dropped(drop, (ROWS, COLS), p, any_target)
    assert suspicions(mask, p) == {}


def test_seeds_are_independent(any_target: Target) -> None:
    """An element's eight values under eight consecutive seeds come in every pattern equally often."""
    masks = []
    with any_target.ran(forward=8):
        for seed in range(8):
            torch.manual_seed(seed)
            masks.append(dropped(VERBS["act_dropout"], (ROWS * COLS // 8,), 0.5, any_target))
    assert abs(patterns(torch.stack(masks, -1).flatten(), 0.5)) < 6


def test_consecutive_calls_are_independent(any_target: Target) -> None:
    """So do its values in eight calls, one after the other: the generator moves on."""
    with any_target.ran(forward=8):
        masks = [dropped(VERBS["bias_act"], (ROWS * COLS // 8,), 0.5, any_target) for _ in range(8)]
    assert abs(patterns(torch.stack(masks, -1).flatten(), 0.5)) < 6


def _bernoulli(p: float, *shape: int) -> Tensor:
    return torch.rand(shape) < p


# Masks that a broken generator makes, for a rate p.
_BROKEN: dict[str, Callable[[float], Tensor]] = {
    "rate": lambda p: _bernoulli(p + 0.01, ROWS, COLS),
    "period-8": lambda p: torch.where(_bernoulli(p, 1, 8), 1, 0).repeat(ROWS, COLS // 8) > 0,
    "period-65536": lambda p: _bernoulli(p, 128, COLS).repeat(ROWS // 128, 1),
    "same-in-every-row": lambda p: _bernoulli(p, 1, COLS).expand(ROWS, COLS),
    "same-in-every-column": lambda p: _bernoulli(p, ROWS, 1).expand(ROWS, COLS),
    "pairs": lambda p: _bernoulli(p, ROWS, COLS // 2).repeat_interleave(2, 1),
    "halves-of-words": lambda p: _bernoulli(p, ROWS * COLS // 8, 1, 4).expand(-1, 2, 4).reshape(ROWS, COLS),
    "evenly": lambda p: torch.arange(ROWS * COLS).view(ROWS, COLS) % 10 < round(10 * p),
}


@pytest.mark.parametrize(
    ("kind", "p"),
    [*((kind, p) for kind in _BROKEN for p in RATES), *((kind, RARE) for kind in ("rate", "pairs", "halves-of-words"))],
)
def test_the_statistics_find_broken_masks(kind: str, p: float) -> None:
    """Each broken generator is suspect, and an honest one is not."""
    assert suspicions(_bernoulli(p, ROWS, COLS), p) == {}
    assert suspicions(_BROKEN[kind](p), p) != {}


def test_the_statistics_find_seeds_that_do_nothing() -> None:
    """The same mask for every seed is found."""
    mask = _bernoulli(0.5, ROWS * COLS // 8)
    assert abs(patterns(torch.stack([mask] * 8, -1).flatten(), 0.5)) > 6


# ---- The generator ---------------------------------------------------------------------------------------------------


def philox(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Philox4x32, one block, in plain integers."""
    x, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * x[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


# The known answers that Random123 publishes for 10 rounds: counter, key, result.
_KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), _KNOWN)
def test_plain_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    """The yardstick itself is Philox4x32-10."""
    assert philox(_words(counter), _words(key), 10) == _words(expected)


def _bits(seed: int, block: int, rounds: int) -> list[int]:
    words = philox([block % 2**32, block >> 32, seed % 2**32, (seed >> 32) % 2**32], [0, 0], rounds)
    return [bits for word in words for bits in (word % 2**16 * 2**16 + word // 2**16, word)]


@pytest.mark.parametrize("rounds", [7, 10])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x243F6A8885A308D3])
def test_definition_is_philox(seed: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition's bits are those of Philox with seven rounds, and with ten those of the published generator."""
    assert definition._ROUNDS == 7
    monkeypatch.setattr(definition, "_ROUNDS", rounds)
    bits = definition.random_bits(torch.tensor([seed]), 8 * 100 - 3)
    assert bits.tolist() == [bit for block in range(100) for bit in _bits(seed, block, rounds)][:-3]


@pytest.fixture(scope="module")
def many_bits() -> Tensor:
    """The bits of two million elements."""
    return definition.random_bits(torch.tensor([7]), 2**21)


@pytest.mark.parametrize("p", [1e-5, 0.1, 0.5, 0.9, 0.9999, 0.99999])
def test_bits_are_independent_at_any_rate(p: float, many_bits: Tensor) -> None:
    """If few elements are dropped or kept, their number and distances are as expected."""
    assert suspicions((many_bits < threshold(p)).view(-1, COLS), p) == {}


def test_joint_distribution_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every threshold an element drops with exactly p, and both of a pair as often as the definition says.

    Counted over all words, with halves of 6 bits in place of 16.
    """
    half = 6
    monkeypatch.setattr(definition, "_HALF", half)
    size, t = 4**half, torch.arange(4**half + 1)
    even, odd = definition.pair_bits(torch.arange(size))

    def below(bits: Tensor) -> Tensor:
        """How many are below each threshold."""
        return torch.bincount(bits + 1, minlength=size + 1).cumsum(0)

    assert torch.equal(below(even), t)
    assert torch.equal(below(odd), t)
    both, high, low = below(torch.maximum(even, odd)), t >> half, t % 2**half
    assert torch.equal(both, high**2 + 2 * torch.minimum(high, low) + (high < low))
    p, unit = t.double() / size, 2.0**-half
    covariance, rarer = both / size - p**2, torch.minimum(p, 1 - p)
    assert torch.all(covariance >= 0)
    assert torch.all(covariance[low == 0] == 0)
    assert torch.all(covariance <= p * (1 - p) * torch.clamp(unit**2 / rarer, min=3 * unit).nan_to_num(0, 0) + 1e-15)


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5, 0.9, 0.9999, 1e-6, 2.0**-32, 1 - 2.0**-32])
def test_scale_is_that_of_p(p: float) -> None:
    """Kept elements are scaled by 1 / (1 - p), as exactly as p is a multiple of 2^-32: 0.9 by 10 in fp32."""
    assert scale(p) * (1 - p) == pytest.approx(1, rel=2.0**-32 / (1 - p), abs=0)
    assert torch.tensor(scale(0.9)) == 10
    assert (scale(0.0), scale(1.0)) == (1, 0)


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5, 0.999, 1e-4, 0.99999])
def test_mask_is_that_of_the_definition(drop: Callable[..., Tensor], p: float, any_target: Target) -> None:
    """On every backend the same seed drops the same elements, at any size, and scales the others by the same factor."""
    for shape in ((1,), (7,), (8, 1), (3, 1027), (65, 4099)):
        torch.manual_seed(5)
        with any_target.ran():
            y = drop(torch.ones(shape, device=any_target.device), p, backend=any_target.backend)
        torch.manual_seed(5)
        seed = eager.draw_seed(torch.device(any_target.device)).cpu()
        kept = definition.random_bits(seed, y.numel()).view(shape) >= threshold(p)
        expected = torch.where(kept, torch.tensor(scale(p)), 0.0)
        assert torch.equal(y.cpu(), expected)


def test_same_mask_for_every_shape(drop: Callable[..., Tensor], any_target: Target) -> None:
    """An element's position in memory decides whether it drops, not the tensor's shape."""
    masks = []
    for shape in ((12 * 35 * 11,), (12, 385), (12, 35, 11), (1, 420, 1, 11), (385, 12)):
        torch.manual_seed(3)
        with any_target.ran():
            masks.append(dropped(drop, shape, 0.3, any_target).flatten())
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_same_mask_in_every_verb(any_target: Target) -> None:
    """The verbs agree on what a seed drops."""
    masks = []
    for drop in VERBS.values():
        torch.manual_seed(3)
        with any_target.ran():
            masks.append(dropped(drop, (33, 65), 0.3, any_target))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("name", ["act_dropout", "bias_act"])
def test_position_is_the_place_in_memory(name: str, any_target: Target) -> None:
    """If a chain keeps the strides of a permuted input, the mask is permuted with it."""
    x = torch.ones(6, 5, 4, device=any_target.device)
    masks = []
    with any_target.ran(forward=2):
        for tensor in (x, x.permute(2, 0, 1)):
            torch.manual_seed(3)
            masks.append(VERBS[name](tensor, 0.5, backend=any_target.backend) == 0)
    assert masks[1].shape == (4, 6, 5)
    assert torch.equal(masks[1].permute(1, 2, 0), masks[0])


# ---- Forward and backward --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_same_mask_forward_and_backward(drop: Callable[..., Tensor], layout: str, any_target: Target) -> None:
    """The gradient is dropped and scaled where the value is."""
    x = torch.ones(65, 129, device=any_target.device)
    x = (x if layout == "contiguous" else x.T.contiguous().T).requires_grad_()
    with any_target.ran(forward=1, backward=2):
        y = drop(x, 0.4, backend=any_target.backend)
        for dy in (torch.ones_like(y), torch.ones(129, 65, device=any_target.device).T):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            assert torch.equal(dx, y)


@pytest.mark.parametrize("name", ["act_dropout", "bias_act"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1, 0, 2)])
def test_same_mask_for_cotangents_of_any_layout(name: str, order: tuple[int, ...], any_target: Target) -> None:
    """However dy lies in memory, as y or not: the gradient is dropped where the value is."""
    x = torch.ones(6, 5, 4, device=any_target.device).permute(2, 0, 1).requires_grad_()
    dy = torch.randn([x.shape[d] for d in order], device=any_target.device)
    dy = dy.permute(sorted(range(3), key=order.__getitem__))
    with any_target.ran(forward=1, backward=1):
        y = VERBS[name](x, 0.5, backend=any_target.backend)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, torch.where(y == 0, 0.0, 2 * dy))


@pytest.mark.parametrize("name", ["act_dropout", "bias_act", "add_layer_norm", "add_rms_norm"])
def test_gradcheck(name: str, any_target: Target) -> None:
    """With the mask held fixed, first and second derivatives are those of finite differences."""
    x, r, b = (torch.randn(s, dtype=torch.float64, device=any_target.device) for s in ((4, 6), (4, 6), (6,)))
    options = {"backend": any_target.backend}
    stages = {"pre_activation": "gelu", "activation": "silu", "dropout_p": 0.4, **options}
    functions: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "act_dropout": (lambda x: kf.act_dropout(x, "gelu", 0.4, **options), (x,)),
        "bias_act": (lambda x, b: kf.bias_act(x, b, "gelu", dropout_p=0.4, **options), (x, b)),
        "add_layer_norm": (lambda x, r, b: kf.add_layer_norm(x, r, 6, b, b, **stages), (x, r, b)),
        "add_rms_norm": (lambda x, r, b: kf.add_rms_norm(x, r, 6, b, **stages), (x, r, b)),
    }
    function, tensors = functions[name]

    def fixed(*tensors: Tensor) -> Any:
        torch.manual_seed(11)
        return function(*tensors)

    leaves = [t.requires_grad_() for t in tensors]
    with any_target.ran(forward=None, backward=None):
        assert torch.autograd.gradcheck(fixed, leaves)
        assert torch.autograd.gradgradcheck(fixed, leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(drop: Callable[..., Tensor], use_reentrant: bool, any_target: Target) -> None:
    """Recomputation in backward drops what forward dropped."""
    x = torch.ones(33, 65, device=any_target.device, requires_grad=True)
    with any_target.ran(forward=2, backward=1):
        y = checkpoint(lambda t: drop(t, 0.5, backend=any_target.backend), x, use_reentrant=use_reentrant)
        torch.rand(3, device=any_target.device)  # the generator has moved on since
        y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y)


def test_no_mask_is_kept(drop: Callable[..., Tensor], target: Target) -> None:
    """For backward, forward keeps the seed instead of a mask."""
    x = torch.randn(64, 128, device=target.device, requires_grad=True)
    plain, kept = [], []
    for p, packed in ((0.0, plain), (0.5, kept)):
        with torch.autograd.graph.saved_tensors_hooks(lambda t, packed=packed: packed.append(t) or t, lambda t: t):
            # Without dropout a chain of nothing keeps nothing; a factor needs its operand's shape at most.
            drop(x * 1, p, backend=target.backend)
    extra = sum(t.nbytes for t in kept if t.numel() < x.numel()) - sum(t.nbytes for t in plain if t.numel() < x.numel())
    assert extra == 8
    assert all(t.dtype == x.dtype for t in kept if t.numel() >= x.numel())


# ---- Seeds and modes -------------------------------------------------------------------------------------------------


def test_follows_manual_seed(drop: Callable[..., Tensor], any_target: Target) -> None:
    """The same seed gives the same masks in the same order, and another seed others."""
    runs = []
    with any_target.ran(forward=6):
        for seed in (7, 7, 8):
            torch.manual_seed(seed)
            runs.append([dropped(drop, (33, 65), 0.5, any_target) for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_generator_state_can_be_saved(drop: Callable[..., Tensor], any_target: Target) -> None:
    """Restoring the state of the device's generator repeats the mask."""
    module = torch.cuda if any_target.device == "cuda" else torch
    state = module.get_rng_state()
    with any_target.ran(forward=2):
        first = dropped(drop, (33, 65), 0.5, any_target)
        assert not torch.equal(module.get_rng_state(), state)
        module.set_rng_state(state)
        assert torch.equal(dropped(drop, (33, 65), 0.5, any_target), first)


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 0.5, "training": False}], ids=["p=0", "eval"])
def test_nothing_drops(drop: Callable[..., Tensor], options: Any, any_target: Target) -> None:
    """With p = 0, and outside of training, the values pass, and no random number is drawn."""
    x = torch.randn(33, 65, device=any_target.device, requires_grad=True)
    module = torch.cuda if any_target.device == "cuda" else torch
    state = module.get_rng_state()
    y = drop(x, **options, backend=any_target.backend)
    assert torch.equal(module.get_rng_state(), state)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(y, x)
    assert torch.equal(dx, dy)
    assert y.data_ptr() != x.data_ptr()


def test_everything_drops(drop: Callable[..., Tensor], any_target: Target) -> None:
    """With p = 1 values and gradients are zero; a chain then needs no kernel."""
    x = torch.randn(33, 65, device=any_target.device, requires_grad=True)
    y = drop(x, 1.0, backend=any_target.backend)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(dx, torch.zeros_like(y))


@pytest.mark.parametrize(("p", "text"), [(-0.1, "-0.1"), (1.5, "1.5"), (float("nan"), "nan")])
@pytest.mark.parametrize("name", VERBS)
def test_what_is_no_probability(name: str, p: float, text: str) -> None:
    """A p outside of [0, 1] is named with the verb."""
    argument = "p" if name == "act_dropout" else "dropout_p"
    with (
        EAGER.ran(),
        pytest.raises(ValueError, match=rf"^`{name}`: `{argument}` must be a probability .*, got {text}$"),
    ):
        VERBS[name](torch.ones(3, 8), p, backend="eager")


# ---- Transforms ------------------------------------------------------------------------------------------------------


def test_vmap_respects_randomness(any_target: Target) -> None:
    """vmap refuses random operations unless told whether examples share their random numbers."""
    x = torch.ones(4, 33, 65, device=any_target.device)

    def drop(t: Tensor) -> Tensor:
        return kf.act_dropout(t, None, 0.5, backend=any_target.backend)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(drop)(x)
    same = vmap(drop, randomness="same")(x)
    assert all(torch.equal(example, same[0]) for example in same)
    different = vmap(drop, randomness="different")(x)
    assert not any(torch.equal(different[i], different[j]) for i in range(4) for j in range(i))
    for masks in (same, different):
        assert suspicions((masks[0] == 0), 0.5) == {}


@pytest.mark.covering(1)
def test_compile(drop: Callable[..., Tensor], any_target: Target) -> None:
    """In one full graph, forward and backward share the mask, calls differ, and the same seed repeats."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t: drop(t, 0.5, backend=any_target.backend), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    x = torch.ones(33, 64, device=any_target.device, requires_grad=True)
    runs = []
    with any_target.ran(forward=3, backward=3):
        for seed in (4, None, 4):
            if seed is not None:
                torch.manual_seed(seed)
            y = compiled(x)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert torch.equal(dx, y)
            runs.append(y)
    assert torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[1])
    assert suspicions(runs[0] == 0, 0.5) == {}


@pytest.mark.cuda
def test_replays_of_a_graph_draw_anew(drop: Callable[..., Tensor]) -> None:
    """A captured call drops other elements at each replay, forward and backward alike, and follows the seed."""
    x = torch.ones(ROWS, COLS, device="cuda", requires_grad=True)

    def step() -> tuple[Tensor, Tensor]:
        y = drop(x, 0.5, backend="cuda")
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    with CUDA.ran(forward=1, backward=1):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    torch.cuda.synchronize()  # as the next test shows
    replays = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        assert torch.equal(y, dx)
        assert suspicions((y == 0), 0.5) == {}
        replays.append(y.clone())
    assert torch.equal(replays[0], replays[2])
    assert not torch.equal(replays[0], replays[1])


@pytest.mark.cuda
def test_pytorch_sets_the_seed_of_a_capture_on_its_stream() -> None:
    """A replay that doesn't wait for the stream of the capture draws with the capture's seed, without a kernel of ours.

    `capture_begin` writes the generator's seed on the capturing stream, `replay` the current one on its own. Here the
    first write is held back until after the second.
    """
    stream, graph, cycles = torch.cuda.Stream(), torch.cuda.CUDAGraph(), 10**8
    torch.cuda.manual_seed(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        graph.capture_begin()
        torch.cuda._sleep(3 * cycles)
        drawn = torch.randint(2**62, (1,), device="cuda")
        graph.capture_end()
    draws = []
    for _ in range(2):
        torch.cuda.manual_seed(1)
        graph.replay()
        draws.append(drawn.item())
        torch.cuda.synchronize()
    assert draws[0] != draws[1]
