"""A block of a diffusion transformer (DiT, adaLN-Zero) of diffusers, and the same block with modulated norms.

Both have the same parameters. In the block of diffusers a modulated norm is a norm, two operations on its result and
one on the scale; here it is one pass, which reads scale and shift where they lie in the projection of the time step.
The first gated residual addition is part of the second norm's pass, and the last one is `addcmul`.

    python examples/dit_block.py                                  # the best device: fp32 on a CPU, bf16 on a GPU
    python examples/dit_block.py --batch 2 --tokens 4096 --heads 24 --head-size 128

It prints the time of a training step of each, the bytes that forward keeps for backward, and how far results and
gradients are from those of diffusers' block in float64. The exit status is non-zero if ours are off by more than twice
(the largest error of diffusers' own block + one rounding).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

import kernel_fusion as kf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLASSES, STEPS = 1000, 7

Inputs = tuple[Tensor, Tensor, Tensor]  # x, time steps, classes


class FusedBlock(nn.Module):
    """The forward of a `BasicTransformerBlock` with `norm_type="ada_norm_zero"`, by its own submodules."""

    def __init__(self, block: BasicTransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *, timestep: Tensor, class_labels: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        block, width = self.block, x.shape[-1]
        ada: Any = block.norm1
        second: Any = block.norm3
        embedding = ada.emb(timestep, class_labels, hidden_dtype=x.dtype)
        modulation = ada.linear(ada.silu(embedding))[:, None].chunk(6, dim=-1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        y = kf.modulated_layer_norm(x, width, scale, shift, eps=ada.norm.eps)
        y, x = kf.add_modulated_layer_norm(block.attn1(y), x, width, mlp_scale, mlp_shift, eps=second.eps, gate=gate)
        return torch.addcmul(x, mlp_gate, block.ff(y))


def forward_and_gradients(block: nn.Module, inputs: Inputs, dy: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients of the input and of every parameter that has one."""
    x, timestep, labels = inputs
    x = x.detach().requires_grad_()
    y = block(x, timestep=timestep, class_labels=labels)
    leaves = {"dx": x} | {f"d{name.removeprefix('block.')}": p for name, p in block.named_parameters()}
    gradients = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    found = dict(zip(leaves, gradients, strict=True))
    return {"y": y.detach()} | {name: g for name, g in found.items() if g is not None}


def errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each."""
    return {name: float((results[name].double() - exact[name]).abs().max()) for name in exact}


def bytes_kept(call: Callable[[], object], *but: Tensor) -> int:
    """The bytes that a call keeps for backward, without parameters and `but`."""
    known = {t.untyped_storage().data_ptr() for t in but}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(size for address, size in kept.items() if address not in known)


def step_ms(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after one that warms up."""
    times = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def main() -> int:
    """Measure and compare both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device)
    parser.add_argument("--dtype", choices=DTYPES)
    for name, default in {"batch": 2, "tokens": 256, "heads": 6, "head-size": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    device = given.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[given.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    width = given.heads * given.head_size

    torch.manual_seed(0)
    theirs = BasicTransformerBlock(
        width, given.heads, given.head_size, activation_fn="gelu-approximate", num_embeds_ada_norm=CLASSES,
        attention_bias=True, norm_elementwise_affine=False, norm_type="ada_norm_zero",
    ).to(device, dtype).eval()  # fmt: skip
    x, dy = torch.randn(2, given.batch, given.tokens, width, device=device, dtype=dtype)
    timestep, labels = torch.randint(CLASSES, (2, given.batch), device=device)
    blocks = {"diffusers": theirs, "kernel_fusion": FusedBlock(theirs)}
    exact = forward_and_gradients(copy.deepcopy(theirs).double(), (x.double(), timestep, labels), dy.double())

    off: dict[str, dict[str, float]] = {}
    for name, block in blocks.items():
        step = partial(forward_and_gradients, block, (x, timestep, labels), dy)
        off[name] = errors(step(), exact)
        forward = partial(block, x, timestep=timestep, class_labels=labels)
        kept, ms = bytes_kept(forward, x, *theirs.parameters()), step_ms(step, device)
        print(f"{name:13}  {ms:8.2f} ms a step  {kept / 2**20:8.3f} MiB kept  largest error of y {off[name]['y']:.1e}")
    rounding = {name: float(t.abs().max()) * torch.finfo(dtype).eps / 2 for name, t in exact.items()}
    wrong = [
        name
        for name, error in off["kernel_fusion"].items()
        if not error <= 2 * (off["diffusers"][name] + rounding[name])
    ]
    print(f"WRONG: {', '.join(wrong)}" if wrong else f"results and {len(exact) - 1} gradients agree")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
