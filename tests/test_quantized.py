"""Quantised results: the bits of the formula, what they stand for, gradients, programs, and refusals by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import triples
from support import CPU, CUDA, EAGER, TRITON, Target
from test_errors import outcome
from torch import Tensor
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.backends import eager
from kernel_fusion.core.quantize import LARGEST

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
_ON_CUDA = pytest.param(CUDA, marks=pytest.mark.cuda)
_TARGETS = pytest.mark.parametrize("target", [CPU, _ON_CUDA, TRITON, EAGER], ids=["cpu", "cuda", "triton", "eager"])
_DTYPES = pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2], ids=str)


def _norm(verb: str) -> Callable[..., Any]:
    def call(x: Tensor, other: Tensor, **options: Any) -> Any:
        weight = torch.linspace(-2, 2, x.shape[-1], dtype=other.dtype, device=x.device)
        rows = () if verb in ("layer_norm", "rms_norm") else (other,)
        return getattr(kf, verb)(x, *rows, x.shape[-1], weight, **options)

    return call


def _halves(t: Tensor) -> Tensor:
    """Two shorter rows of each, so that a scale may be that of a row, of its samples or of its positions."""
    return t.unflatten(-1, (2, -1))


# Each takes an input and a second row, and gives a tensor or a NormOutput.
VERBS: dict[str, Callable[..., Any]] = {
    **{
        name: _norm(name)
        for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "gated_layer_norm", "gated_rms_norm")
    },
    "modulated_layer_norm": lambda x, other, **options: kf.modulated_layer_norm(
        _halves(x), x.shape[-1] // 2, _halves(other)[:, :1], _halves(other)[:, 1:], **options
    ),
    "add_modulated_rms_norm": lambda x, other, **options: kf.add_modulated_rms_norm(
        _halves(x), _halves(other), x.shape[-1] // 2, _halves(other)[:1], **options
    ),
    "gated_sum": lambda x, other, **options: kf.add_modulated_rms_norm(
        x, other.to(F32), x.shape[-1], other.flip(-1), gate=other[:1], **options
    ),
    "activation": lambda x, other, **options: kf.rms_norm(x, x.shape[-1], activation="silu", rounding="hf", **options),
    "groups": lambda x, other, **options: kf.gated_rms_norm(
        x, other, x.shape[-1], group_size=x.shape[-1] // 5, **options
    ),
    "gated_act": lambda x, other, **options: kf.gated_act(x, other, "silu", **options),
}


def _quantize(dtype: torch.dtype, per: str | int, device: str, **options: Any) -> kf.Quantize:
    """With a scale that clamps some of what a norm gives."""
    scale = torch.tensor(1.5 / LARGEST[dtype], device=device) if per == "tensor" else None
    return kf.Quantize(dtype, scale, per=per, **options)


def _assert_same_bits(ours: kf.Quantized, v: Tensor, quantize: kf.Quantize) -> None:
    values, scale = eager.quantize(v, quantize.dtype, quantize.scale, quantize.block)
    assert ours.values.is_contiguous()
    assert torch.equal(ours.values.view(torch.uint8), values.view(torch.uint8))
    if quantize.scale is None:
        assert torch.equal(ours.scale, scale)
        assert ours.scale.numel() == 0 or ours.scale.stride() == scale.stride()
    else:
        assert ours.scale == quantize.scale
        assert ours.scale.dim() == 0


# ---- The formula -----------------------------------------------------------------------------------------------------


@_DTYPES
def test_codes_are_the_nearest(dtype: torch.dtype) -> None:
    """The definition's codes are the nearest of all codes, the even one of two, up to the largest."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).to(F64)
    codes = torch.unique(codes[codes.isfinite() & (codes >= -LARGEST[dtype])])
    middles = (codes[1:] + codes[:-1]) / 2  # of which the codes of even numbers are those of PyTorch's own rounding
    v = torch.cat([codes, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), codes[-1:] * 3, codes[:1] * 3])
    found, _ = eager.quantize(v, dtype, torch.tensor(1.0), 0)
    distance = (found.to(F64) - v).abs()
    assert torch.equal(distance, (codes[:, None] - v).abs().amin(0))
    ties = found[codes.numel() : codes.numel() + middles.numel()].view(torch.uint8)
    assert not (ties & 1).any()
    assert codes[-1] == LARGEST[dtype]


# Grid rationale. Every value of 16 bits, so each rounding of each code, NaN and infinities; a scale that
# changes nothing, one that clamps, one that leaves little but codes without a leading 1, and one that rounds.
@_DTYPES
@_TARGETS
@pytest.mark.parametrize("scale", [1.0, 1e-4, 2.0**9, 0.3])
def test_every_value_of_16_bits(scale: float, dtype: torch.dtype, target: Target) -> None:
    """The codes of all bf16 and fp16 numbers are the definition's."""
    for kind in (BF16, F16):
        v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(kind).view(16, -1)
        _assert_codes(v, torch.tensor(scale), dtype, target)


# Grid rationale. Scales whose reciprocals round the most, beside powers of two; ordinary ones; and those at which
# quotients, remainders or reciprocals leave the range of float32, 0 and infinity among them.
_HARD_SCALES = [
    *(2.0 - 2.0**-23 * k for k in (1, 2, 3)), *(1.0 + 2.0**-23 * k for k in (0, 1, 2)), 0.3, 1e-4, 777.0,
    *(2.0**e * 1.7 for e in (-148, -130, -100, -61, -60, 90, 101, 126, 127)), 0.0, float("inf"),
]  # fmt: skip


@_DTYPES
@_TARGETS
def test_beside_the_middle_of_two_codes(dtype: torch.dtype, target: Target) -> None:
    """Numbers beside the middle of two codes, times a scale, have the definition's codes: the quotient is exact."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).to(F64)
    codes = torch.unique(codes[codes.isfinite() & (codes >= -LARGEST[dtype])])
    steps = torch.arange(-2, 3, dtype=torch.int32)
    rows = []
    for scale in map(torch.tensor, _HARD_SCALES):
        v = ((codes[1:] + codes[:-1]) / 2 * scale.to(F64)).to(F32)  # and its neighbours in float32
        v = (v[:, None].view(torch.int32) + steps).view(F32).flatten()
        rows.append(torch.cat([v, codes[-1:].to(F32) * scale, torch.tensor([0.0, -0.0, torch.finfo(F32).max])]))
        _assert_codes(rows[-1][None], scale, dtype, target)
    _assert_codes(torch.stack(rows)[:, :-1], None, dtype, target)


def _assert_codes(v: Tensor, scale: Tensor | None, dtype: torch.dtype, target: Target) -> None:
    """Codes and scales are the definition's; NaN has one of several codes."""
    given = None if scale is None else scale.to(target.device)
    found = _quantize_operator(target)(v.to(target.device), dtype, given, 0)
    wanted, scales = eager.quantize(v, dtype, scale, 0)
    number = ~wanted.to(F32).isnan()
    assert torch.equal(found[0].cpu().view(torch.uint8)[number], wanted.view(torch.uint8)[number])
    assert torch.equal(found[0].cpu().to(F32).isnan(), ~number)
    assert torch.equal(found[1].cpu().nan_to_num(-1.0), scales.nan_to_num(-1.0))


def _quantize_operator(target: Target) -> Callable[..., Any]:
    from kernel_fusion.operators.dispatch import unavailable_reason

    if target.backend == "eager":
        return eager.quantize
    assert unavailable_reason(target.backend, torch.device(target.device)) is None
    return getattr(torch.ops.kernel_fusion, "triton_quantize" if target.backend == "triton" else "quantize")


# Grid rationale. Each verb with each kind of scale and codes; rows of one short block, of a block and a part of one, of
# blocks two of which are in a warp, and of more than a chunk of the loops; fp32 and the types that v is rounded to.
@_TARGETS
@triples(
    kind=(F32, BF16, F16),
    cols=(60, 300, 480, 4100),
    name=VERBS,
    per=("tensor", "row", 128),
    dtype=(INT8, E4M3, E5M2),
    keeps=(False, True),
)
def test_same_bits(
    kind: torch.dtype, cols: int, name: str, per: str | int, dtype: torch.dtype, keeps: bool, target: Target
) -> None:
    """Codes and scales are those of the verb's own unquantised result, which comes with them where it is wanted."""
    x, other = torch.randn(2, 3, cols, device=target.device).to(kind)
    x[1] = 0
    whole = VERBS[name](x, other, backend=target.backend)
    v = whole.output if isinstance(whole, kf.NormOutput) else whole
    quantize = _quantize(dtype, per, target.device, unquantized=keeps)
    with target.ran(forward=None if target.backend != "eager" else 0):
        ours = VERBS[name](x, other, out_dtype=quantize, backend=target.backend)
    if isinstance(ours, kf.NormOutput):
        assert torch.equal(ours.residual, whole.residual)
        ours = ours.output
    _assert_same_bits(ours, v, quantize)
    assert (ours.unquantized is not None) == keeps
    assert ours.unquantized is None or torch.equal(ours.unquantized, v)


# Grid rationale. Rows with one stride, with two, and none that lies in one piece; no rows, and no columns.
@_TARGETS
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "gated_act"])
@pytest.mark.parametrize("layout", ["half", "two strides", "transposed", "no rows", "large", "float64"])
def test_layouts(layout: str, name: str, target: Target) -> None:
    """Rows that lie apart, tensors without rows and long rows have the bits of the formula."""
    made = {
        "half": lambda: torch.randn(5, 400)[:, 200:],
        "two strides": lambda: torch.randn(3, 4, 400)[:, :3, :200],
        "transposed": lambda: torch.randn(200, 6).t(),
        "no rows": lambda: torch.randn(0, 200),
        "large": lambda: torch.randn(1, 33000),
        "float64": lambda: torch.randn(5, 200, dtype=F64),
    }[layout]
    x, other = made().to(target.device), made().to(target.device)
    for per in (128, "row", "tensor"):
        quantize = _quantize(E4M3, per, target.device)
        ours = VERBS[name](x, other, out_dtype=quantize, backend=target.backend)
        v = VERBS[name](x, other, backend=target.backend)
        if name == "add_rms_norm":
            ours, v = ours.output, v.output
        _assert_same_bits(ours, v, quantize)


@_DTYPES
@_TARGETS
def test_not_finite(dtype: torch.dtype, target: Target) -> None:
    """A row with NaN or an infinity has it as its scale, and dequantises to no finite number but 0; its neighbours are
    unharmed.
    """
    v = torch.randn(4, 200, device=target.device)
    clean, _ = _quantize_operator(target)(v, dtype, None, 0)
    v[1, 3], v[2, 5] = float("nan"), float("-inf")
    values, scale = _quantize_operator(target)(v, dtype, None, 0)
    assert scale[1].isnan()
    assert scale[2] == float("inf")
    assert torch.equal(values[::3].view(torch.uint8), clean[::3].view(torch.uint8))
    assert kf.Quantized(values, scale).dequantize()[1].isnan().all()
    assert kf.Quantized(values, scale).dequantize()[2, 5].isnan()


def test_rows_of_any_batch_have_the_same_bits() -> None:
    """A row's codes do not depend on the others, which decide how many rows are computed together."""
    x = torch.randn(70, 1000, dtype=BF16)
    quantize = kf.Quantize(E4M3, per="row")
    whole = kf.rms_norm(x, 1000, out_dtype=quantize)
    part = kf.rms_norm(x[33:36], 1000, out_dtype=quantize)
    assert torch.equal(whole.values[33:36].view(torch.uint8), part.values.view(torch.uint8))
    assert torch.equal(whole.scale[33:36], part.scale)


# ---- What they stand for ---------------------------------------------------------------------------------------------


def test_product_of_rows() -> None:
    """Codes and scales of rows go into `torch._scaled_mm` as they are."""
    x, weight = torch.randn(16, 256, dtype=BF16), torch.randn(32, 256, dtype=BF16)
    a = kf.rms_norm(x, 256, out_dtype=kf.Quantize(E4M3, per="row"))
    values, scale = eager.quantize(weight, E4M3, None, 0)
    product = torch._scaled_mm(a.values, values.t(), a.scale, scale.t().contiguous(), out_dtype=BF16)
    wanted = a.dequantize() @ kf.Quantized(values, scale).dequantize().t()
    torch.testing.assert_close(product.to(F32), wanted, rtol=2**-7, atol=2**-7 * 16)


@pytest.mark.parametrize("per", ["tensor", "row", 128])
@pytest.mark.parametrize("shape", [(300,), (3, 300), (1, 300), (2, 3, 300)])
def test_dequantize(shape: tuple[int, ...], per: str | int) -> None:
    """Every code is multiplied by the scale of its row and block."""
    x = torch.randn(shape)
    q = kf.rms_norm(x, 300, out_dtype=_quantize(INT8, per, "cpu"))
    wanted = torch.empty(shape)
    for index in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        place = (*index[:-1], {"row": 0, 128: index[-1] // 128}.get(per))
        wanted[tuple(index)] = q.values[tuple(index)].to(F32) * (q.scale if per == "tensor" else q.scale[place])
    assert torch.equal(q.dequantize(), wanted)


# ---- Gradients -------------------------------------------------------------------------------------------------------


@_TARGETS
@pytest.mark.parametrize("per", ["tensor", "row", 128])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "gated_rms_norm", "gated_sum", "gated_act"])
def test_gradients_pass_straight_through(name: str, per: str | int, target: Target) -> None:
    """`dequantize` gives its arguments' gradients to the verb's, except where it clamped; so does `unquantized`."""
    x, other = torch.randn(2, 7, 300, device=target.device).requires_grad_(True).unbind()
    quantize = _quantize(E4M3, per, target.device, unquantized=True)
    cotangent = torch.randn(7, 300, device=target.device)
    v, ours = (VERBS[name](x, other, out_dtype=o, backend=target.backend) for o in (None, quantize))
    if isinstance(v, kf.NormOutput):
        v, ours = v.output, ours.output
    clamped = v.abs() > quantize.scale * LARGEST[E4M3] if per == "tensor" else torch.zeros_like(v, dtype=torch.bool)
    assert clamped.any() == (per == "tensor")
    _assert_same_bits(ours, v, quantize)
    found = torch.autograd.grad(ours.dequantize(), (x, other), cotangent, retain_graph=True, allow_unused=True)
    wanted = torch.autograd.grad(v, (x, other), cotangent.masked_fill(clamped, 0.0), allow_unused=True)
    direct = torch.autograd.grad(ours.unquantized, (x, other), cotangent.masked_fill(clamped, 0.0), allow_unused=True)
    for one, two, three in zip(found, wanted, direct, strict=True):
        assert (one is None) == (two is None) == (three is None)
        assert one is None or (torch.equal(one, two) and torch.equal(three, two))


def test_codes_alone_have_no_gradient() -> None:
    """Without `unquantized` nothing requires a gradient but h, which has its own."""
    x, r = torch.randn(2, 4, 64).requires_grad_(True).unbind()
    y, h = kf.add_rms_norm(x, r, 64, out_dtype=kf.Quantize(E4M3, per="row"))
    assert not y.values.requires_grad
    assert not y.dequantize().requires_grad
    cotangent = torch.randn(4, 64)
    assert torch.equal(torch.autograd.grad(h, x, cotangent)[0], cotangent)


def test_functional_transforms() -> None:
    """`torch.func.grad`, `jvp` and `vmap` go through: straight, or as codes of each example."""
    x, cotangent = torch.randn(2, 4, 64)
    quantize = kf.Quantize(INT8, per="row", unquantized=True)

    def loss(t: Tensor) -> Tensor:
        return (kf.rms_norm(t, 64, out_dtype=quantize).dequantize() * cotangent).sum()

    wanted = torch.func.grad(lambda t: (kf.rms_norm(t, 64) * cotangent).sum())(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), wanted)
    _, tangent = torch.func.jvp(loss, (x,), (cotangent,))
    torch.testing.assert_close(tangent, (wanted * cotangent).sum())
    batched = torch.vmap(lambda t: kf.rms_norm(t, 64, out_dtype=quantize).values)(x[:, None])
    assert torch.equal(batched[:, 0], kf.rms_norm(x, 64, out_dtype=quantize).values)


# ---- Programs --------------------------------------------------------------------------------------------------------


def test_compile_and_export() -> None:
    """One graph without breaks has the bits of eager calls for any number of rows, and so has a saved program."""
    quantize, by_scale = _quantize(E4M3, 128, "cpu"), _quantize(INT8, "tensor", "cpu")

    class Block(torch.nn.Module):
        def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y, h = kf.add_rms_norm(x, r, 256, out_dtype=quantize)
            gated = kf.gated_act(h, x, "silu", out_dtype=by_scale)
            return y.values, y.scale, gated.values

    block, inputs = Block(), [torch.randn(2, rows, 256) for rows in (4, 7)]
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(block, tuple(inputs[0]), dynamic_shapes=({0: rows}, {0: rows})).module()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for x, r in inputs:
        wanted = block(x, r)
        for found in (compiled(x, r), exported(x, r)):
            for one, two in zip(found, wanted, strict=True):
                assert torch.equal(one.to(F32), two.to(F32))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("block", [0, 128])
def test_operators_trace(block: int, keeps: bool) -> None:
    """The operators' shapes and strides for tracing are those of their results."""
    x, other = torch.randn(2, 3, 4, 300)
    ops = torch.ops.kernel_fusion
    norm = 1, torch.randn(300), None, 1e-6, 0.0, BF16, True
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.quantize, (x, E4M3, None, block), test_utils=tests)
    torch.library.opcheck(ops.quantized_row_norm, (x, other, E4M3, None, block, keeps, *norm), test_utils=tests)
    torch.library.opcheck(ops.quantized_gate, (x, other, "silu", INT8, None, block, keeps), test_utils=tests)


# ---- Refusals --------------------------------------------------------------------------------------------------------


def _message(function: Callable[[], Any]) -> str:
    """The error of `function`, as a traceback ends."""
    return ": ".join(outcome(function))


_ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.uint8, None, "row"), "ValueError: `Quantize`: `dtype` must be torch.int8 or "),
        ((INT8, None, "column"), "ValueError: `Quantize`: `per` must be 'tensor', 'row' or 128, got 'column'"),
        ((INT8, None, 64), "ValueError: `Quantize`: `per` must be 'tensor', 'row' or 128, got 64"),
        ((INT8, None, "tensor"), "ValueError: `Quantize`: per='tensor' needs a `scale`"),
        ((INT8, _ONE, "row"), "ValueError: `Quantize`: `scale` goes with per='tensor', got per='row'"),
        ((INT8, 1.0, "tensor"), "TypeError: `Quantize`: `scale` must be a tensor, got float"),
        (
            (INT8, torch.ones(2), "tensor"),
            "RuntimeError: `Quantize`: `scale` must be one float32 number, got ",
        ),
        (
            (INT8, _ONE.double(), "tensor"),
            "RuntimeError: `Quantize`: `scale` must be one float32 number, got ",
        ),
        (
            (INT8, torch.ones(1, requires_grad=True), "tensor"),
            "RuntimeError: `Quantize`: `scale` must not require a gradient",
        ),
    ],
)
def test_arguments_are_checked(arguments: tuple[Any, ...], message: str) -> None:
    """`Quantize` refuses what it cannot mean, and says what it can."""
    assert _message(lambda: kf.Quantize(*arguments[:2], per=arguments[2])).startswith(message)


@pytest.mark.parametrize("per", ["row", 128])
def test_modules_return_codes(per: str | int) -> None:
    """A norm module and a gate module with a `Quantize` return what the function does, also after being saved."""
    x, codes = torch.randn(4, 256), kf.Quantize(INT8, per=per)
    for module, expected in (
        (kf.FusedRMSNorm(256, out_dtype=codes), kf.rms_norm(x, 256, torch.ones(256), out_dtype=codes)),
        (kf.FusedGatedAct("silu", out_dtype=codes), kf.gated_act(*x.chunk(2, -1), "silu", out_dtype=codes)),
    ):
        assert "out_dtype=Quantize" in repr(module)
        for result in (module(x), copy.deepcopy(module)(x)):
            assert torch.equal(result.values, expected.values)
            assert torch.equal(result.scale, expected.scale)
    with pytest.raises(TypeError, match="`FusedGatedAct`: `out_dtype` must be a Quantize or None, got "):
        kf.FusedGatedAct("silu", out_dtype=INT8)


def test_refusals_name_the_verb() -> None:
    """Arguments that go with no codes are refused by the verb's name."""
    x, rows = torch.randn(4, 64), kf.Quantize(INT8, per="row")
    by_row = "`out_dtype` with a scale per row or block goes with a `normalized_shape` of one dimension, got 2"
    assert _message(lambda: kf.rms_norm(x, (4, 64), out_dtype=rows)) == f"ValueError: `rms_norm`: {by_row}"
    scaled = kf.Quantize(INT8, torch.ones(1, device="meta"), per="tensor")
    assert "but the `scale` of `out_dtype` is on meta" in _message(lambda: kf.layer_norm(x, 64, out_dtype=scaled))
    whole = "floating-point tensors, got torch.int64"
    assert whole in _message(lambda: kf.gated_act(x.long(), x.long(), "relu", out_dtype=rows))
    assert "array" in _message(lambda: kf.rms_norm(x.numpy(), 64, out_dtype=rows))
    assert "; kf.Quantize(torch.int8, per=...) gives codes with scales" in _message(
        lambda: kf.rms_norm(x, 64, out_dtype=INT8)
    )
    scalar = torch.tensor(1.0)
    assert "needs a dimension" in _message(lambda: kf.gated_act(scalar, scalar, "relu", out_dtype=rows))


def test_explained() -> None:
    """`explain` names the backend that makes the codes, and its plan."""
    x, rows = torch.randn(4, 64), kf.Quantize(INT8, per="row")
    assert kf.explain(kf.rms_norm, x, 64, out_dtype=rows).backend == "cpu"
    assert kf.explain(kf.modulated_rms_norm, x, 64, x, out_dtype=rows, backend="triton").plan


def test_float8_of_a_gate_agrees_with_a_chain_of_pytorch() -> None:
    """The codes are what PyTorch's own calls would make of PyTorch's chain, where both round alike."""
    gate, value = torch.randn(2, 33, 512)
    ours = kf.gated_act(gate, value, "relu", out_dtype=kf.Quantize(E4M3, per="row"))
    v = F.relu(gate) * value
    scale = v.abs().amax(-1, keepdim=True) / 448
    assert torch.equal(ours.scale, scale)
    assert torch.equal(ours.values.view(torch.uint8), (v / scale).clamp(-448, 448).to(E4M3).view(torch.uint8))
