"""The rotary embedding: what is true of it alone, beside the tables of cases and verbs that every operation is in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import CPU, CUDA, TRITON, Target, check
from torch import Tensor

import kernel_fusion as kf
from kernel_fusion.backends.cuda.device import KNOWN_DEVICES
from kernel_fusion.backends.cuda.planner import rehearsal
from kernel_fusion.core.other_specs import RotaryAccess, RotarySpec
from kernel_fusion.core.spec import Access, SumPartialsSpec
from kernel_fusion.functional.rotary import rotate
from kernel_fusion.operators import loader
from kernel_fusion.testing import cases
from kernel_fusion.testing.oracle import Case

F32, BF16 = torch.float32, torch.bfloat16
BACKENDS = [pytest.param(CPU, id="cpu"), pytest.param(TRITON, id="triton")]
BACKENDS += [pytest.param(CUDA, id="cuda", marks=pytest.mark.cuda)]


def angles(rows: int, pairs: int, dtype: torch.dtype = F32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of random angles."""
    values = torch.randn(rows, pairs, device=device) * 3
    return values.cos().to(dtype), values.sin().to(dtype)


# Grid rationale. The list of `verify`: both verbs, roundings, offsets, every dtype, layout and kind of pairs.
@pytest.mark.cuda
@pytest.mark.parametrize("case", [*cases.rotary(quick=False)], ids=str)
def test_within_budget_on_a_gpu(case: Case) -> None:
    """The same by CUDA's kernels."""
    check(case, CUDA)


@pytest.mark.covering(1, "case.verb", "case.dtype")
@pytest.mark.parametrize("case", [*cases.rotary(quick=False)], ids=str)
def test_within_budget(case: Case) -> None:
    """Results and gradients on the CPU are within the oracle's budget."""
    check(case, CPU)


@pytest.mark.parametrize("target", BACKENDS)
def test_a_result_lies_as_its_argument_does(target: Target) -> None:
    """Heads of a fused projection are read where they lie; results and gradients are dense in the same order."""
    qkv = torch.randn(2, 5, 4 * 16, device=target.device, requires_grad=True)
    q, k = qkv[..., :48].unflatten(-1, (3, 16)).transpose(1, 2), qkv[..., 48:].unflatten(-1, (1, 16)).transpose(1, 2)
    ones = torch.ones(16, device=target.device)
    y, y_key = kf.qk_norm_rope(q, k, ones, ones, *angles(5, 8, device=target.device), backend=target.backend)
    dq, dk = torch.autograd.grad([y, y_key], [q, k], [torch.randn_like(y), torch.randn_like(y_key)])
    for t, heads in ((y, 3), (y_key, 1), (dq, 3), (dk, 1)):
        assert t.transpose(1, 2).is_contiguous()
        assert t.shape == (2, heads, 5, 16)
    head_major = q.detach().contiguous()
    assert kf.rope(head_major, *angles(5, 8, device=target.device), backend=target.backend).is_contiguous()


def test_rounding_is_that_of_qwen3() -> None:
    """With "hf" 0.1 % of elements at most differ from Qwen3's code in bf16, none by more than a unit."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3  # takes seconds

    norms = [qwen3.Qwen3RMSNorm(64, 1e-6).to(BF16) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.normal_(1.0, 0.3)
    q, k = torch.randn(2, 8, 300, 64).to(BF16), torch.randn(2, 2, 300, 64).to(BF16)
    cos, sin = angles(300, 32, BF16)
    doubled = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    theirs = qwen3.apply_rotary_pos_emb(norms[0](q), norms[1](k), *doubled)
    ours = kf.qk_norm_rope(q, k, norms[0].weight, norms[1].weight, cos, sin, 1e-6, rounding="hf")
    once = kf.qk_norm_rope(q, k, norms[0].weight, norms[1].weight, cos, sin, 1e-6)
    for one, other, rounded_once in zip(ours, theirs, once, strict=True):
        # One flip of the normalised value is a unit of it, and a unit of the larger element of its pair.
        pair = other.float().unflatten(-1, (2, 32)).norm(dim=-2, keepdim=True).expand(-1, -1, -1, 2, -1).flatten(-2)
        assert (one != other).float().mean() <= 1e-3
        assert ((one - other).abs() <= 2**-7 * pair).all()
        assert (rounded_once != other).float().mean() > 0.1


@pytest.mark.parametrize("target", BACKENDS)
def test_a_position_outside_the_table(target: Target) -> None:
    """On the CPU it is an error; Triton's kernels read nothing there and give NaN, to that token alone."""
    x, (cos, sin) = torch.randn(1, 2, 3, 8, device=target.device), angles(4, 4, device=target.device)
    for outside in (-1, 4):
        positions = torch.tensor([0, outside, 3], dtype=torch.int32, device=target.device)
        if target == CPU:
            with pytest.raises(IndexError, match=rf"`positions` must be rows of `cos`, 0 to 3, got {outside}"):
                kf.rope(x, cos, sin, positions=positions)
            continue
        y = kf.rope(x, cos, sin, positions=positions, backend=target.backend)
        assert y[:, :, 1].isnan().all()
        assert y[:, :, ::2].isfinite().all()


@pytest.mark.parametrize("target", BACKENDS)
def test_angles_have_gradients_by_the_definition(target: Target) -> None:
    """If cos requires a gradient, no kernel runs, and the gradient is that of the formula."""
    x, (cos, sin) = torch.randn(1, 2, 3, 8, device=target.device), angles(3, 4, device=target.device)
    cos.requires_grad_()
    y = kf.rope(x, cos, sin, backend=target.backend)
    dy = torch.randn_like(y)
    (dcos,) = torch.autograd.grad(y, cos, dy)
    torch.testing.assert_close(dcos, (dy * x).unflatten(-1, (2, 4)).sum((0, 1, 3)))


@pytest.mark.parametrize("target", BACKENDS)
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_of_both_results(wanted: int, target: Target) -> None:
    """If only the query or only the key is used, or requires gradients, its gradients are the same bit by bit.

    A GPU's compiler may fuse other multiplications with additions where less is wanted.
    """
    exact = {} if target.device == "cuda" else {"rtol": 0.0, "atol": 0.0}
    tensors = [torch.randn(s, device=target.device) for s in ((1, 2, 3, 8), (1, 1, 3, 8), (8,), (8,))]
    leaves = [t.requires_grad_() for t in tensors]
    tables = angles(3, 4, device=target.device)
    results = kf.qk_norm_rope(*leaves, *tables, backend=target.backend)
    dys = [torch.randn_like(y) for y in results]
    own = [leaves[wanted], leaves[2 + wanted]]
    both = torch.autograd.grad(results, own, dys)
    results = kf.qk_norm_rope(*leaves, *tables, backend=target.backend)
    torch.testing.assert_close(torch.autograd.grad(results[wanted], own, dys[wanted]), both, **exact)
    others = [t if i % 2 == wanted else t.detach() for i, t in enumerate(leaves)]
    results = kf.qk_norm_rope(*others, *tables, backend=target.backend)
    assert [y.requires_grad for y in results] == [wanted == 0, wanted == 1]
    torch.testing.assert_close(torch.autograd.grad(results[wanted], own, dys[wanted]), both, **exact)


def test_no_bit_depends_on_threads_or_other_tokens() -> None:
    """Weight gradients are the same bits for any number of threads; a token's results for any batch around it."""
    q, k = torch.randn(3, 4, 200, 24), torch.randn(3, 2, 200, 24)
    w = torch.randn(24).requires_grad_()
    cos, sin = angles(200, 8)

    def run(part: slice) -> list[Tensor]:
        x, y = (t[part].clone().requires_grad_() for t in (q, k))
        results = kf.qk_norm_rope(x, y, w, w, cos, sin)
        return [*results, *torch.autograd.grad(results, [x, y, w], list(results))]

    threads = torch.get_num_threads()
    whole = run(slice(None))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, whole, run(slice(None))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole[:4], run(slice(1, 2))[:4], strict=True))


@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_both_turn_in_one_launch(rounding: str, target: Target) -> None:
    """Query and key together take a kernel in each direction, and "hf" gives the bits of the definition in bf16."""
    x = torch.randn(2, 5, 5 * 16, device=target.device).to(BF16).requires_grad_()
    heads = [t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (x[..., :64], x[..., 64:])]
    tables = angles(5, 8, BF16, target.device)
    options: dict[str, Any] = {"interleaved": False, "unsqueeze_dim": 1, "rounding": rounding}
    with target.ran(forward=1, backward=1):
        results = rotate(heads, *tables, **options)
        torch.cat(results, 1).square().sum().backward()
    for y, expected in zip(results, rotate(heads, *tables, backend="eager", **options), strict=True):
        share = (y != expected).float().mean()
        assert share == 0 if rounding == "hf" else share < 0.01


def test_keys_of_launches_on_a_gpu() -> None:
    """They say how heads, angles and weights lie, and whether weights have gradients; long heads are Triton's."""
    q, k = torch.randn(2, 5, 80).to(BF16)[..., 4:].split([48, 28], -1)
    q, k = q.unflatten(-1, (3, 16)), k[..., :16].unflatten(-1, (1, 16))
    tables, w = angles(5, 4), torch.randn(16)
    with rehearsal(loader.library(), KNOWN_DEVICES[90]) as met:
        rotate([q, k], *tables, torch.arange(5), interleaved=True, unsqueeze_dim=2)
    spec = RotarySpec(x="bf16", angles="f32", cols=16, half=4, interleaved=True)
    lie = RotaryAccess(4, 32, align=8, align_out=8, align_angles=16)
    assert met == {(spec, replace(lie, positions=8)): None}
    with rehearsal(loader.library(), KNOWN_DEVICES[90]) as met:
        y, _ = kf.qk_norm_rope(
            q, k, w.requires_grad_(), None, *tables, unsqueeze_dim=2, weight_offset=0.0, rounding="hf"
        )
        y.sum().backward()
    forward = replace(spec, interleaved=False, norm=True, rounds=True, query_weight="f32")
    backward = replace(forward, backward=True, sums=True, key_weight="f32")
    sums = SumPartialsSpec(16, "f32", "f32", None)
    lie = replace(lie, threads=0)
    assert met == {(forward, lie): None, (backward, replace(lie, align_out=16)): None, (sums, Access()): None}
    long = torch.randn(1, 5, 1, 514)
    with rehearsal(loader.library(), KNOWN_DEVICES[90]) as met:
        kf.qk_norm_rope(long, long, None, None, *tables, unsqueeze_dim=2)
    assert not met


def test_arrays() -> None:
    """Arrays of another library give arrays of its kind, with the numbers of tensors; anything else is refused."""
    x, (cos, sin) = torch.randn(2, 3, 5, 8), angles(5, 4)
    arrays = [t.numpy() for t in (x, cos, sin)]
    turned = kf.rope(*arrays)  # type: ignore[arg-type]
    assert isinstance(turned, np.ndarray)
    np.testing.assert_array_equal(turned, kf.rope(x, cos, sin))
    both = kf.qk_norm_rope(arrays[0], x, None, None, *arrays[1:])  # type: ignore[arg-type]
    for one, other in zip(both, kf.qk_norm_rope(x, x, None, None, cos, sin), strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, other)
    with pytest.raises(TypeError, match=r"^`rope`: expected a torch\.Tensor, or an array with `__dlpack__`"):
        kf.rope([1.0], cos, sin)  # type: ignore[arg-type]


def test_nothing_is_kept_but_arguments() -> None:
    """Backward of the norm keeps the arguments themselves, and that of the rotation not even the input."""
    q, k, w = (torch.randn(s, requires_grad=True) for s in ((1, 2, 3, 8), (1, 1, 3, 8), (8,)))
    cos, sin = angles(3, 4)

    def kept(call: Any) -> set[int]:
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            call()
        return {t.data_ptr() for t in packed}

    pointers = {t.data_ptr() for t in (q, k, w, cos, sin)}
    assert kept(lambda: kf.qk_norm_rope(q, k, w, w, cos, sin)) == pointers
    assert kept(lambda: kf.rope(q, cos, sin)) == {cos.data_ptr(), sin.data_ptr()}


_RIGHT: dict[str, Any] = {"query": (2, 4, 5, 8), "key": (2, 1, 5, 8), "weight": (8,), "cos": (5, 4), "sin": (5, 4)}
_WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dims": ({"query": (5, 8)}, RuntimeError, "`query` must have three or four dimensions, heads, tokens and columns"),
    "heads": ({"unsqueeze_dim": 3}, ValueError, "`unsqueeze_dim` must be the dimension of heads, 1 or 2 of 4, got 3"),
    "range": ({"unsqueeze_dim": 4}, IndexError, "Dimension out of range"),
    "key": ({"key": (2, 1, 6, 8)}, RuntimeError, "`key` must have the query's .B, L, D. = .2, 5, 8. around its heads"),
    "cos": ({"cos": (6, 4)}, RuntimeError, r"`cos` must have shape .L, R / 2. or .B, L, R / 2., with L = 5 and B = 2"),
    "sin": ({"sin": (5, 3)}, RuntimeError, r"`sin` must have the shape and dtype of `cos`, \[1, 5, 4\] float32, got"),
    "pairs": ({"cos": (5, 5)}, RuntimeError, r"`cos` must have at most D / 2 = 4 columns, got 5: one for each pair$"),
    "halves": ({"cos": (5, 8)}, RuntimeError, r"`cos` .*; of halves that are equal, give one: `cos\[\.\.\., : 4\]`"),
    "weight": ({"weight": (7,)}, RuntimeError, r"`query_weight` must have shape .D,. = .8,., got \[7\]"),
    "offset": ({"weight": None, "weight_offset": 1.0}, RuntimeError, "`weight_offset` needs a weight, got 1.0 without"),
    "positions": ({"positions": (3,)}, RuntimeError, "`positions` must be int32 or int64 on cpu, got float32 on cpu"),
    "rounding": ({"rounding": "twice"}, ValueError, "`rounding` must be one of 'once', 'hf', got 'twice'"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_errors(name: str) -> None:
    """Verb, argument, what was expected and what came."""
    changes, kind, text = _WRONG[name]
    given = {k: torch.randn(v) if isinstance(v, tuple) else v for k, v in (_RIGHT | changes).items()}
    weight = given.pop("weight")
    with pytest.raises(kind, match=text if name == "range" else f"^`qk_norm_rope`: {text}"):
        kf.qk_norm_rope(
            given.pop("query"), given.pop("key"), weight, weight, given.pop("cos"), given.pop("sin"), **given
        )


def test_the_module_is_the_verb_with_its_weights() -> None:
    """It prints what was asked for, begins as the plain norm, and passes on every option."""
    options: dict[str, Any] = {"interleaved": True, "unsqueeze_dim": 2, "weight_offset": 1.0, "rounding": "hf"}
    module = kf.FusedQKNormRope(8, 1e-5, **options).bfloat16()
    text = "8, eps=1e-05, interleaved=True, unsqueeze_dim=2, weight_offset=1.0, rounding='hf'"
    assert module.extra_repr() == text
    assert kf.FusedQKNormRope(8).extra_repr() == "8, eps=1e-06"
    assert [*module.state_dict()] == ["query_weight", "key_weight"]
    assert not any(w.any() for w in module.parameters())
    with torch.no_grad():
        module.key_weight.normal_()
    q, k, positions = torch.randn(2, 3, 4, 8).bfloat16(), torch.randn(2, 3, 1, 8).bfloat16(), torch.tensor([3, 0, 1])
    tables = angles(4, 4)
    verb = kf.qk_norm_rope(q, k, *module.parameters(), *tables, 1e-5, positions=positions, **options)
    assert all(map(torch.equal, module(q, k, *tables, positions), verb))
    with pytest.raises(ValueError, match=r"^`FusedQKNormRope`: `rounding` must be one of"):
        kf.FusedQKNormRope(8, rounding="twice")
