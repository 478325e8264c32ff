"""`rounding="hf"`: the norms of Hugging Face's models, as their code rounds, forward and backward.

`llama_norm` and `t5_norm` are the forwards of `LlamaRMSNorm` and `T5LayerNorm` of transformers 4.57, operation by
operation. Mistral's, Qwen's and most others are Llama's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import EAGER, Target, call
from torch import Tensor, nn

import kernel_fusion as kf

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
EPS = 1e-6


def llama_norm(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """`LlamaRMSNorm.forward`."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + EPS)
    return weight * hidden_states.to(input_dtype)


def t5_norm(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """`T5LayerNorm.forward`, which rounds to the weight's dtype if that is fp16 or bf16."""
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + EPS)
    if weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(weight.dtype)
    return weight * hidden_states


class _Round(torch.autograd.Function):
    """float64 rounded to a dtype, by way of float32; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, dtype: torch.dtype) -> Tensor:
        """v, rounded."""
        return v.to(F32).to(dtype).to(F64)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient as it comes."""
        return dy, None


def _draw(target: Target, dtype: torch.dtype, weight: torch.dtype, cols: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(cols)
    x = 2 * torch.randn(2**18 // cols, cols, generator=generator)
    w = 1 + 0.3 * torch.randn(cols, generator=generator)
    return x.to(target.device, dtype), w.to(target.device, weight)


# Grid rationale. Rows in a part of a warp, with a tail, in a block, and in more than one; the weight in the dtype of x,
# where the product is rounded to it, and in float32, where it is not.
@pytest.mark.parametrize("theirs", [llama_norm, t5_norm], ids=["llama", "t5"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("weight", [None, F32], ids=["alike", "f32"])
@pytest.mark.parametrize("cols", [64, 255, 4096, 32768])
def test_forward_is_that_of_hugging_face(
    cols: int, weight: torch.dtype | None, dtype: torch.dtype, theirs: Any, any_target: Target
) -> None:
    """At most 0.1 % of y differ, each by no more than the normalised value's last digit.

    The order of a sum decides about the last digit of rstd, and so about which way some values are rounded.
    """
    if theirs is t5_norm and weight is not None:
        return  # T5 rounds to the weight's dtype, so not at all
    x, w = _draw(any_target, dtype, weight or dtype, cols)
    expected = theirs(x, w)
    with any_target.ran(forward=2):
        y = kf.rms_norm(x, cols, w, EPS, rounding="hf", out_dtype=expected.dtype, backend=any_target.backend)
        once = kf.rms_norm(x, cols, w, EPS, out_dtype=expected.dtype, backend=any_target.backend)
    assert (y != expected).double().mean() <= 1e-3
    n = theirs(x, torch.ones_like(w, dtype=dtype))
    bounds = [w * torch.nextafter(n.cpu(), torch.tensor(to, dtype=dtype)).to(n.device) for to in (-1e4, 1e4)]
    assert ((y >= torch.minimum(*bounds)) & (y <= torch.maximum(*bounds))).all()
    assert (once != expected).double().mean() > 0.1, "the test sees no difference"


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_norm_of_a_sum(dtype: torch.dtype, any_target: Target) -> None:
    """`add_rms_norm` is Hugging Face's norm of h, the rounded sum."""
    x, w = _draw(any_target, dtype, dtype, 1024)
    residual = torch.randn_like(x)
    with any_target.ran():
        y, h = kf.add_rms_norm(x, residual, 1024, w, EPS, rounding="hf", backend=any_target.backend)
    assert torch.equal(h, x + residual)
    assert (y != llama_norm(h, w)).double().mean() <= 1e-3


def _in_float64(
    h: Tensor, weight: Tensor, bias: Tensor, rms: bool, to: tuple[torch.dtype, torch.dtype] | None
) -> Tensor:
    """silu(norm(h)) in float64, with the roundings of "hf" alone, or with none."""
    n = h if rms else h - h.mean(-1, keepdim=True)
    n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + EPS)
    z = (_Round.apply(n, to[0]) if to else n) * weight + bias
    return nn.functional.silu(_Round.apply(z, to[1]) if to else z)


# Grid rationale. x in float32 beside a narrow residual, and parameters in float32, so that gradients show what was
# rounded on the way to them; with narrow parameters, where the activation's argument is rounded too, dx alone does.
# Long rows are streamed, or their columns summed apart.
@pytest.mark.parametrize("verb", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("parameters", ["alike", "f32"])
@pytest.mark.parametrize("shape", [(300, 255), (65, 1024), (20, 4099), (20, 12288), (7, 40000)])
def test_gradients_pass_straight_through(
    shape: tuple[int, int], parameters: str, dtype: torch.dtype, verb: str, any_target: Target
) -> None:
    """The gradients are those of the rounded values, a rounding being the identity, and not of unrounded ones."""
    generator = torch.Generator().manual_seed(shape[1])

    def draw(size: tuple[int, ...], of: torch.dtype, mean: float = 0.0) -> Tensor:
        return (torch.randn(size, generator=generator) + mean).to(any_target.device, of).requires_grad_()

    parameter = F32 if parameters == "f32" else dtype
    x, r, dy = draw(shape, F32), draw(shape, dtype), draw(shape, F32).detach()
    w, b = draw(shape[1:], parameter, 1.0), draw(shape[1:], parameter, 0.5)
    with any_target.ran(backward=1):
        options: dict[str, Any] = {"activation": "silu", "rounding": "hf", "backend": any_target.backend}
        y, h = getattr(kf, verb)(x, r, shape[1:], w, bias=b, eps=EPS, **options)
        ours = torch.autograd.grad(y, (x, w, b), dy)
    rounded, unrounded = (
        torch.autograd.grad(_in_float64(*wide, verb == "add_rms_norm", to), wide, dy.double())
        for to in ((dtype, torch.promote_types(dtype, parameter)), None)
        for wide in [[t.detach().double().requires_grad_() for t in (h, w, b)]]
    )
    # The definition's gradient passes h in the dtype of h.
    shown = ([0] if any_target != EAGER else []) + ([1, 2] if parameters == "f32" else [])
    for i in shown:
        assert (ours[i] - rounded[i]).norm() < 0.1 * (unrounded[i] - rounded[i]).norm(), f"gradient {i}"


@pytest.mark.parametrize("residual", [False, True])
def test_double_backward(residual: bool, target: Target) -> None:
    """A backward that is differentiated has the gradients of the other, and those of the definition."""
    x, w = (t.requires_grad_() for t in _draw(target, BF16, BF16, 64))
    x = x[:8].detach().requires_grad_()
    r = [torch.randn_like(x).requires_grad_()] if residual else []
    dy = torch.randn_like(x)
    found = []
    for backend in (target.backend, "eager"):
        verb = kf.add_rms_norm if residual else kf.rms_norm
        y: Any = verb(x, *r, 64, w, EPS, activation="silu", rounding="hf", backend=backend)
        y = y.output if residual else y
        first = torch.autograd.grad(y, (x, w), dy, create_graph=True)
        found.append([*first, *torch.autograd.grad([g.float().square().sum() for g in first], (x, w))])
    for ours, definition in zip(*found, strict=True):
        torch.testing.assert_close(
            ours.float(), definition.float(), rtol=0.05, atol=0.05 * definition.abs().max().item()
        )


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_nothing_is_rounded_in_the_compute_type(activation: str | None, dtype: torch.dtype, any_target: Target) -> None:
    """If the normalised value has the compute type, no bit changes."""
    x, w = _draw(any_target, dtype, dtype, 255)
    with any_target.ran(forward=2):
        once, hf = (
            call("rms_norm", x, w, activation=activation, rounding=rounding, backend=any_target.backend)
            for rounding in ("once", "hf")
        )
    assert torch.equal(once, hf)


def test_rows_that_overflow_when_rounded(any_target: Target) -> None:
    """A value read past the end of a row may be infinite once it is rounded; it spoils no sum."""
    cols = 1001  # ends in a part of a vector, which reads as zeros, far from the mean
    x = torch.full((4, cols), 1000.0, dtype=F16, device=any_target.device)
    x[1:] = torch.randn(3, cols)
    x.requires_grad_()
    w = torch.ones(cols, dtype=F16, device=any_target.device, requires_grad=True)
    with any_target.ran(backward=1):
        options: dict[str, Any] = {"activation": "gelu", "rounding": "hf", "backend": any_target.backend}
        y = kf.layer_norm(x, cols, w, **options)
        grads = torch.autograd.grad(y, (x, w), torch.randn_like(y))
    assert (y[0] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("verb", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_unknown_rounding(verb: str, any_target: Target) -> None:
    """A rounding that does not exist is named beside those that do."""
    x = torch.randn(2, 8, device=any_target.device)
    residual = [x] if verb.startswith("add_") else []
    with any_target.ran(forward=0), pytest.raises(ValueError) as error:  # noqa: PT011
        getattr(kf, verb)(x, *residual, 8, rounding="twice", backend=any_target.backend)
    assert str(error.value) == f"`{verb}`: `rounding` must be one of 'once', 'hf', got 'twice'"


def test_operator_refuses_an_unknown_rounding() -> None:
    """The operator itself raises where no verb stands before it."""
    x = torch.randn(2, 8)
    args = (x, None, 1, None, None, EPS, 0.0, None, True, "identity", "identity", 0.0, None)
    with pytest.raises(ValueError, match="no rounding is called 'twice'"):
        torch.ops.kernel_fusion.staged_row_norm(*args, "twice")
    with pytest.raises(ValueError, match="`rounding` must be one of 'once', 'hf', got 'twice'"):
        torch.ops.kernel_fusion.staged_row_norm_reference(*args, "twice")


@pytest.mark.parametrize("module", [kf.FusedLayerNorm, kf.FusedRMSNorm, kf.FusedAddLayerNorm, kf.FusedAddRMSNorm])
def test_modules(module: Any, any_target: Target) -> None:
    """A module rounds as its verb does, prints it, and refuses what the verb refuses."""
    norm = module(64, eps=EPS, rounding="hf", device=any_target.device, dtype=BF16)
    plain = module(64, eps=EPS, device=any_target.device, dtype=BF16)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    plain.load_state_dict(norm.state_dict())
    assert norm.extra_repr() == plain.extra_repr() + ", rounding='hf'"
    x = torch.randn(32, 64, device=any_target.device, dtype=BF16)
    args = (x, torch.randn_like(x)) if "Add" in module.__name__ else (x,)
    verb = getattr(
        kf,
        {"FusedLayerNorm": "layer_norm", "FusedRMSNorm": "rms_norm"}.get(module.__name__, "")
        or {"FusedAddLayerNorm": "add_layer_norm", "FusedAddRMSNorm": "add_rms_norm"}[module.__name__],
    )
    with any_target.ran(forward=3), kf.use_backend(any_target.backend):
        y, once = norm(*args), plain(*args)
        same = verb(*args, 64, norm.weight, bias=getattr(norm, "bias", None), eps=EPS, rounding="hf")
    if len(args) == 2:
        y, once, same = y.output, once.output, same.output
    assert torch.equal(y, same)
    assert not torch.equal(y, once)
    with pytest.raises(ValueError, match=rf"^`{module.__name__}`: `rounding` must be one of 'once', 'hf', got 'twice'"):
        module(64, rounding="twice")


def test_transforms(any_target: Target) -> None:
    """`torch.compile`, `torch.vmap`, `torch.func.vjp` and `jvp` round too."""
    x, w = _draw(any_target, BF16, BF16, 64)
    x, t = x[:8], torch.randn_like(x[:8])

    def norm(x: Tensor) -> Tensor:
        return kf.rms_norm(x, 64, w, EPS, activation="silu", rounding="hf", backend=any_target.backend)

    with any_target.ran(forward=None, backward=None):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        (dx,) = torch.autograd.grad(y, leaf, t)
        assert torch.equal(torch.compile(norm, fullgraph=True, backend="aot_eager")(x), y)
        assert torch.equal(torch.vmap(norm)(x), y)
    for transformed in (torch.func.vjp(norm, x)[0], torch.func.jvp(norm, (x,), (t,))[0]):
        assert (transformed != y).double().mean() <= 0.01
    torch.testing.assert_close(torch.func.vjp(norm, x)[1](t)[0], dx, rtol=0.02, atol=0.02)


def test_arrays_and_other_tensors() -> None:
    """An array, and a tensor that PyTorch's own operations serve, are rounded too."""
    x, w = _draw(EAGER, BF16, BF16, 64)
    y = kf.rms_norm(x, 64, w, EPS, rounding="hf")
    nested = torch.nested.nested_tensor([x[:3], x[3:5]], layout=torch.jagged)
    first = kf.rms_norm(nested, 64, w, EPS, rounding="hf").unbind()[0]
    assert torch.equal(first, y[:3])
    narrow = x.half().numpy()
    z = kf.rms_norm(narrow, 64, w.half().numpy(), EPS, rounding="hf")
    assert torch.equal(torch.from_numpy(z), kf.rms_norm(x.half(), 64, w.half(), EPS, rounding="hf"))
