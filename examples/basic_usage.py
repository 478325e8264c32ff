"""Every verb, every fixed name and every module in a line or two, each beside the PyTorch code that it replaces.

Both sides run on the same tensors; their results and all gradients are compared with the tolerances of
`torch.testing`, and the largest differences are printed. Dropout is compared under the mask that ours draws, since the
two libraries draw different ones.

    python examples/basic_usage.py                 # the best device
    python examples/basic_usage.py --device cpu

The exit status is non-zero if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernel_fusion as kf
from kernel_fusion.errors import BackendUnavailableError

ROWS, N, HEAD = 64, 512, 64
P = 0.125  # of dropout

# Without arguments, to a tensor or several.
Call = Callable[[], Any]


class Comparison:
    """Compares what two calls return, and the gradients of `leaves`; prints a line for each and counts what differs."""

    def __init__(self, *leaves: Tensor) -> None:
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        self.num_wrong = 0

    def __call__(self, what: str, ours: Call, pytorch: Call) -> None:
        """`ours` and `pytorch` compute the same; `what` names it."""
        mine, theirs = self._values(ours), self._values(pytorch)
        try:
            torch.testing.assert_close(mine, theirs)
            verdict = "  ".join(f"{name} {_largest_difference(mine[name], theirs[name]):.0e}" for name in mine)
        except AssertionError as error:
            verdict = f"WRONG: {error}"
            self.num_wrong += 1
        print(f"  {what:46}{verdict}")

    def _values(self, call: Call) -> dict[str, list[Tensor]]:
        returned = call()
        results = [returned] if isinstance(returned, Tensor) else list(returned)
        values = {"result": [y.detach() for y in results]}
        if results[0].requires_grad:
            random = torch.Generator(results[0].device).manual_seed(0)
            cotangents = [torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=random) for y in results]
            gradients = torch.autograd.grad(results, self.leaves, cotangents, allow_unused=True)
            values["gradients"] = [gradient for gradient in gradients if gradient is not None]
        return values


def _largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def kept(x: Tensor) -> Tensor:
    """Dropout's factors of `x` after `torch.manual_seed(0)`: the same seed gives the same mask in every verb."""
    torch.manual_seed(0)
    return kf.act_dropout(torch.ones_like(x), None, P).detach()


def seeded(call: Call) -> Call:
    """`call` after `torch.manual_seed(0)`."""

    def run() -> Any:
        torch.manual_seed(0)
        return call()

    return run


def norms(device: torch.device) -> int:
    """Normalisation over the last dimensions, and what stands before and after it."""
    x, residual = torch.randn(2, ROWS, N, device=device)
    weight, bias = torch.randn(2, N, device=device)
    compare = Comparison(x, residual, weight, bias)

    compare(
        "layer_norm",
        lambda: kf.layer_norm(x, N, weight, bias),
        lambda: F.layer_norm(x, (N,), weight, bias),
    )
    compare(
        "layer_norm between two activations",
        lambda: kf.layer_norm(x, N, weight, bias, pre_activation="relu", activation="silu"),
        lambda: F.silu(F.layer_norm(F.relu(x), (N,), weight, bias)),
    )
    compare(
        "rms_norm, weight stored as its offset from 1",
        lambda: kf.rms_norm(x, N, weight, weight_offset=1.0),
        lambda: F.rms_norm(x, (N,), 1.0 + weight),
    )
    narrow = x.detach().bfloat16()
    compare_narrow = Comparison(narrow, weight, bias)
    compare_narrow(
        "layer_norm of bf16, result in fp32",
        lambda: kf.layer_norm(narrow, N, weight, bias, out_dtype=torch.float32),
        lambda: F.layer_norm(narrow.float(), (N,), weight, bias),
    )
    # The verbs that add return the sum too, which is the next residual.
    compare(
        "add_layer_norm",
        lambda: kf.add_layer_norm(x, residual, N, weight, bias),
        lambda: (F.layer_norm(residual + x, (N,), weight, bias), residual + x),
    )
    compare(
        "add_rms_norm with dropout",
        seeded(lambda: kf.add_rms_norm(x, residual, N, weight, dropout_p=P)),
        lambda: (F.rms_norm(residual + x * kept(x), (N,), weight), residual + x * kept(x)),
    )
    # A gate multiplies the normalised row, or first what is normalised (Mamba-2).
    compare(
        "gated_rms_norm",
        lambda: kf.gated_rms_norm(x, residual, N, weight),
        lambda: F.rms_norm(x, (N,), weight) * F.silu(residual),
    )
    compare(
        "gated_layer_norm, gate first",
        lambda: kf.gated_layer_norm(x, residual, N, weight, bias, gate_first=True),
        lambda: F.layer_norm(x * F.silu(residual), (N,), weight, bias),
    )
    return compare.num_wrong + compare_narrow.num_wrong + modulated(device)


def modulated(device: torch.device) -> int:
    """Scale and shift for each sample, parts of one projection, as in diffusion transformers."""
    x, residual = torch.randn(2, 2, ROWS, N, device=device)
    scale, shift, gate = (0.1 * torch.randn(2, 1, 3 * N, device=device)).chunk(3, -1)
    compare, norm = Comparison(x, residual, scale, shift, gate), kf.FusedModulatedLayerNorm(N)

    def pytorch() -> Tensor:
        return F.layer_norm(x, (N,)) * (1 + scale) + shift

    compare("modulated_layer_norm", lambda: kf.modulated_layer_norm(x, N, scale, shift), pytorch)
    compare("FusedModulatedLayerNorm", lambda: norm(x, scale, shift), pytorch)
    compare(
        "modulated_rms_norm",
        lambda: kf.modulated_rms_norm(x, N, scale),
        lambda: F.rms_norm(x, (N,)) * (1 + scale),
    )
    compare(
        "add_modulated_layer_norm, gate",
        lambda: kf.add_modulated_layer_norm(x, residual, N, scale, gate=gate),
        lambda: (F.layer_norm(residual + gate * x, (N,)) * (1 + scale), residual + gate * x),
    )
    compare(
        "add_modulated_rms_norm",
        lambda: kf.add_modulated_rms_norm(x, residual, N, scale),
        lambda: (F.rms_norm(residual + x, (N,)) * (1 + scale), residual + x),
    )
    return compare.num_wrong


def chains(device: torch.device) -> int:
    """Two operands, an activation, dropout: one read and one write."""
    x, y = torch.randn(2, ROWS, N, device=device)
    bias = torch.randn(N, device=device)
    compare = Comparison(x, y, bias)

    compare("add_act", lambda: kf.add_act(x, y, "relu"), lambda: F.relu(x + y))
    compare("mul_act", lambda: kf.mul_act(x, y, "tanh"), lambda: torch.tanh(x * y))
    compare("bias_act", lambda: kf.bias_act(x, bias, "gelu"), lambda: F.gelu(x + bias))
    compare(
        "bias_act with dropout",
        seeded(lambda: kf.bias_act(x, bias, "gelu_tanh", dropout_p=P)),
        lambda: F.gelu(x + bias, approximate="tanh") * kept(x),
    )
    compare("act_dropout", seeded(lambda: kf.act_dropout(x, "mish", P)), lambda: F.mish(x) * kept(x))
    # SwiGLU: the halves of one projection are read where they lie.
    gate, value = x.chunk(2, -1)
    compare("gated_act", lambda: kf.gated_act(gate, value, "silu"), lambda: F.silu(gate) * value)
    for name, definition in kf.ACTIVATIONS.items():
        compare(f"act_dropout, {name}", partial(kf.act_dropout, x, name, training=False), partial(definition, x))
    return compare.num_wrong


def reductions(device: torch.device) -> int:
    """Sums of squares and means of absolute values, over any dimensions."""
    x = torch.randn(4, ROWS, N, device=device)
    compare = Comparison(x)

    compare("sum_squared, all", lambda: kf.sum_squared(x), lambda: x.square().sum())
    compare("sum_squared, rows", lambda: kf.sum_squared(x, -1), lambda: x.square().sum(-1))
    compare(
        "mean_abs, two dimensions",
        lambda: kf.mean_abs(x, (0, 1), keepdim=True),
        lambda: x.abs().mean((0, 1), keepdim=True),
    )
    return compare.num_wrong


def attention(device: torch.device) -> int:
    """Softmax with scale and mask, and the scores that it is taken of."""
    x = torch.randn(4, ROWS, ROWS, device=device)
    query, key = torch.randn(2, 4, ROWS, HEAD, device=device)
    added = torch.randn(ROWS, ROWS, device=device)
    keep = torch.ones(ROWS, ROWS, dtype=torch.bool, device=device).tril()  # True keeps
    compare = Comparison(x, query, key, added)

    compare(
        "group_norm, activation",
        lambda: kf.group_norm(x, 8, added[0], activation="silu"),
        lambda: F.silu(F.group_norm(x, 8, added[0])),
    )
    module = kf.FusedGroupNorm(8, ROWS, device=device)
    compare("FusedGroupNorm", lambda: module(x), lambda: F.group_norm(x, 8))
    compare("softmax", lambda: kf.softmax(x), lambda: torch.softmax(x, -1))
    compare("log_softmax", lambda: kf.log_softmax(x), lambda: torch.log_softmax(x, -1))
    compare(
        "softmax with scale and additive mask",
        lambda: kf.softmax(x, scale=0.125, mask=added),
        lambda: torch.softmax(0.125 * x + added, -1),
    )
    compare(
        "softmax, causal",
        lambda: kf.softmax(x, causal=True),
        lambda: torch.softmax(x.masked_fill(~keep, -torch.inf), -1),
    )
    tokens = torch.arange(4 * ROWS, device=device).view(4, ROWS) % ROWS
    compare(
        "token_logprob",
        lambda: kf.token_logprob(x, tokens),
        lambda: torch.log_softmax(x, -1).gather(-1, tokens[..., None])[..., 0],
    )
    rows, target = x.flatten(0, 1), tokens.flatten()
    compare("cross_entropy", lambda: kf.cross_entropy(rows, target), lambda: F.cross_entropy(rows, target))
    smooth = kf.FusedCrossEntropyLoss(label_smoothing=0.1)
    compare(
        "FusedCrossEntropyLoss, label smoothing",
        lambda: smooth(rows, target),
        lambda: F.cross_entropy(rows, target, label_smoothing=0.1),
    )
    head = torch.nn.Linear(rows.shape[-1], 1000, device=rows.device, dtype=rows.dtype)
    compare(
        "linear_cross_entropy",
        lambda: kf.linear_cross_entropy(rows, head.weight, target, linear_bias=head.bias),
        lambda: F.cross_entropy(head(rows), target),
    )
    joined = kf.FusedLinearCrossEntropyLoss(head)
    compare("FusedLinearCrossEntropyLoss", lambda: joined(rows, target), lambda: F.cross_entropy(head(rows), target))
    compare(
        "attention_scores",
        lambda: kf.attention_scores(query, key),
        lambda: query @ key.mT / HEAD**0.5,
    )
    compare(
        "attention_scores, boolean mask, normalised",
        lambda: kf.attention_scores(query, key, mask=keep, normalize=True),
        lambda: torch.softmax((query @ key.mT / HEAD**0.5).masked_fill(~keep, -torch.inf), -1),
    )
    return compare.num_wrong


def rotary(device: torch.device) -> int:
    """The rotary embedding of query and key, alone and after the norm of each head."""
    query, key = torch.randn(2, 4, ROWS, HEAD, device=device)  # heads, tokens, columns
    weight = torch.randn(HEAD, device=device)
    angles = torch.arange(ROWS, device=device)[:, None] * 1e-4 ** (torch.arange(HEAD // 2, device=device) * 2 / HEAD)
    cos, sin = angles.cos(), angles.sin()
    compare = Comparison(query, key, weight)

    def turned(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)

    def both(weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return turned(F.rms_norm(query, (HEAD,), weight, 1e-6)), turned(F.rms_norm(key, (HEAD,), weight, 1e-6))

    compare("rope", lambda: kf.rope(query, cos, sin, unsqueeze_dim=0), lambda: turned(query))
    compare(
        "qk_norm_rope",
        lambda: kf.qk_norm_rope(query, key, weight, weight, cos, sin, 1e-6, unsqueeze_dim=0),
        lambda: both(weight),
    )
    module = kf.FusedQKNormRope(HEAD, unsqueeze_dim=0, device=device)
    compare("FusedQKNormRope", lambda: module(query, key, cos, sin), lambda: both(None))
    return compare.num_wrong


def fixed_names(device: torch.device) -> int:
    """`kf.ops`: the verbs with their activation chosen."""
    x, y = torch.randn(2, ROWS, N, device=device)
    weight, bias = torch.randn(2, N, device=device)
    compare = Comparison(x, y, weight, bias)
    ops = kf.ops

    compare("elementwise_add_relu", lambda: ops.elementwise_add_relu(x, y), lambda: F.relu(x + y))
    compare("elementwise_mul_tanh", lambda: ops.elementwise_mul_tanh(x, y), lambda: torch.tanh(x * y))
    compare("fused_bias_gelu", lambda: ops.fused_bias_gelu(x, bias), lambda: F.gelu(x + bias))
    compare("reduce_sum_squared", lambda: ops.reduce_sum_squared(x, dim=-1), lambda: x.square().sum(-1))
    compare("reduce_mean_abs", lambda: ops.reduce_mean_abs(x, dim=0), lambda: x.abs().mean(0))
    compare(
        "fused_layer_norm_relu",
        lambda: ops.fused_layer_norm_relu(x, N, weight, bias),
        lambda: F.relu(F.layer_norm(x, (N,), weight, bias)),
    )
    compare(
        "fused_relu_layer_norm",
        lambda: ops.fused_relu_layer_norm(x, N, weight, bias),
        lambda: F.layer_norm(F.relu(x), (N,), weight, bias),
    )
    compare(
        "fused_gelu_dropout",
        seeded(lambda: ops.fused_gelu_dropout(x, P)),
        lambda: F.gelu(x) * kept(x),
    )
    compare(
        "fused_attention_score",
        lambda: ops.fused_attention_score(x, y, scale=0.125),
        lambda: 0.125 * x @ y.mT,
    )
    # Arrays of other libraries go in and come out, without a copy and without gradients.
    array = x.detach().cpu().numpy()
    compare(
        "fused_bias_gelu of a NumPy array",
        lambda: torch.from_numpy(ops.fused_bias_gelu(array, bias.detach().cpu())),
        lambda: F.gelu(torch.from_numpy(array) + bias.detach().cpu()),
    )
    return compare.num_wrong


def direct_kernels(device: torch.device) -> int:
    """`kf.kernels`: the kernel of the tensor's device or an error; contiguous tensors, no gradients."""
    x, y = torch.randn(2, ROWS, N, device=device)
    weight, bias = torch.randn(2, N, device=device)
    compare = Comparison()
    elementwise, reduction, fusion = kf.kernels.elementwise, kf.kernels.reduction, kf.kernels.fusion

    try:
        elementwise.add_relu(x, y)
    except BackendUnavailableError as error:
        print(f"  none on this machine: {error}")
        return 0
    compare("elementwise.add_relu", lambda: elementwise.add_relu(x, y), lambda: F.relu(x + y))
    compare("elementwise.mul_tanh", lambda: elementwise.mul_tanh(x, y), lambda: torch.tanh(x * y))
    compare("elementwise.bias_gelu", lambda: elementwise.bias_gelu(x, bias), lambda: F.gelu(x + bias))
    compare("reduction.sum_squared", lambda: reduction.sum_squared(x), lambda: x.square().sum(-1))
    compare("reduction.mean_abs", lambda: reduction.mean_abs(x, dim=0), lambda: x.abs().mean(0))
    compare(
        "fusion.layer_norm_relu",
        lambda: fusion.layer_norm_relu(x, N, weight, bias),
        lambda: F.relu(F.layer_norm(x, (N,), weight, bias)),
    )
    compare(
        "fusion.relu_layer_norm",
        lambda: fusion.relu_layer_norm(x, N, weight, bias),
        lambda: F.layer_norm(F.relu(x), (N,), weight, bias),
    )
    compare("fusion.gelu_dropout", seeded(lambda: fusion.gelu_dropout(x, P)), lambda: F.gelu(x) * kept(x))
    compare("fusion.attention_score", lambda: fusion.attention_score(x, y, 0.125), lambda: 0.125 * x @ y.mT)
    return compare.num_wrong


def modules(device: torch.device) -> int:
    """Drop-ins for those of `torch.nn`, whose state they load, and the verbs that have parameters or a mode."""
    x, residual = torch.randn(2, ROWS, N, device=device)
    layer, rms = nn.LayerNorm(N, device=device), nn.RMSNorm(N, device=device)
    for parameter in (*layer.parameters(), *rms.parameters()):
        nn.init.normal_(parameter)
    compare = Comparison(x, residual)

    def loaded(module: nn.Module, state: nn.Module) -> nn.Module:
        module.to(device).load_state_dict(state.state_dict())
        return module

    fused_layer, fused_rms = loaded(kf.FusedLayerNorm(N), layer), loaded(kf.FusedRMSNorm(N), rms)
    add_layer = loaded(kf.FusedAddLayerNorm(N, dropout=P), layer)
    add_rms = loaded(kf.FusedAddRMSNorm(N, dropout=P), rms).eval()  # no dropout
    compare("FusedLayerNorm", lambda: fused_layer(x), lambda: layer(x))
    compare("FusedRMSNorm", lambda: fused_rms(x), lambda: rms(x))
    compare(
        "FusedAddLayerNorm with dropout",
        seeded(lambda: add_layer(x, residual)),
        lambda: (layer(residual + x * kept(x)), residual + x * kept(x)),
    )
    compare(
        "FusedAddRMSNorm, evaluating",
        lambda: add_rms(x, residual),
        lambda: (rms(residual + x), residual + x),
    )
    gated_rms = loaded(kf.FusedGatedRMSNorm(N, eps=rms.eps), rms)
    compare("FusedGatedRMSNorm", lambda: gated_rms(x, residual), lambda: rms(x) * F.silu(residual))
    bias_act = kf.FusedBiasAct(N, "relu_squared", device=device)
    compare("FusedBiasAct", lambda: bias_act(x), lambda: F.relu(x + bias_act.bias).square())
    linear_act = kf.FusedLinearAct(N, N, activation="silu", device=device)
    compare("FusedLinearAct", lambda: linear_act(x), lambda: F.silu(F.linear(x, linear_act.weight, linear_act.bias)))
    gated_act = kf.FusedGatedAct("gelu")
    compare("FusedGatedAct", lambda: gated_act(x, residual), lambda: F.gelu(x) * residual)
    softmax = kf.FusedSoftmax(scale=0.125)
    compare("FusedSoftmax", lambda: softmax(x), lambda: torch.softmax(0.125 * x, -1))
    return compare.num_wrong


def choosing_a_backend(device: torch.device) -> int:
    """See which kernels serve a call and why, and ask for others."""
    x = torch.randn(ROWS, N, device=device)
    compare = Comparison(x)

    print(*(f"  {line}" for line in str(kf.explain(kf.layer_norm, x, N)).splitlines()), sep="\n")
    with kf.use_backend("eager"):  # the definition, in PyTorch's operations
        compare("layer_norm within use_backend", lambda: kf.layer_norm(x, N), lambda: F.layer_norm(x, (N,)))
    compare("softmax with backend=", lambda: kf.softmax(x, backend="eager"), lambda: torch.softmax(x, -1))
    return compare.num_wrong


SECTIONS = (norms, chains, reductions, attention, rotary, fixed_names, direct_kernels, modules, choosing_a_backend)


def main() -> None:
    """Run all sections; an error if anything differed."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="Every name of kernel_fusion beside the PyTorch code it replaces.")
    parser.add_argument("--device", default=best, type=torch.device, help=f"a PyTorch device (here by default {best})")
    device = parser.parse_args().device
    torch.manual_seed(0)
    print(f"EXTENSION_LOADED is {kf.EXTENSION_LOADED}, CUDA_AVAILABLE is {kf.CUDA_AVAILABLE}; largest differences:")
    num_wrong = 0
    for section in SECTIONS:
        print(f"\n{section.__doc__}")
        num_wrong += section(device)
    if num_wrong:
        sys.exit(f"FAILED: {num_wrong} differ from PyTorch")


if __name__ == "__main__":
    main()
