"""The attention of Qwen3 beside the same attention with `kf.qk_norm_rope`: agreement, step time, memory.

    python examples/qwen3_block.py                        # a small block on a CPU, a real one on a GPU
    python examples/qwen3_block.py --tokens 4096 --hidden 4096 --heads 32 --key-heads 8

Transformers' code norms the heads of query and key, casts, multiplies by weights and rotates: more than a dozen passes
over both. `kf.qk_norm_rope(..., rounding="hf")` is one, with the same roundings.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

import kernel_fusion as kf


class FusedAttention(nn.Module):
    """Causal attention with the weights of a `Qwen3Attention`."""

    def __init__(self, of: Qwen3Attention) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute what the block does; `cos` and `sin` are the doubled ones of Transformers."""
        of, half = self.of, cos.shape[-1] // 2
        q, k, v = (
            project(x).unflatten(-1, (-1, of.head_dim)).transpose(1, 2) for project in (of.q_proj, of.k_proj, of.v_proj)
        )
        q, k = kf.qk_norm_rope(
            q, k, of.q_norm.weight, of.k_norm.weight, cos[..., :half], sin[..., :half], of.q_norm.variance_epsilon,
            rounding="hf",
        )  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=of.scaling, enable_gqa=True)
        return of.o_proj(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def blocks(hidden: int, heads: int, key_heads: int, head_dim: int, tokens: int) -> tuple[Qwen3Attention, Qwen3Config]:
    """The attention of a Qwen3 with random weights."""
    config = Qwen3Config(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head_dim,
        max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    attention = Qwen3Attention(config, layer_idx=0)
    for norm in (attention.q_norm, attention.k_norm):
        nn.init.normal_(norm.weight, 1.0, 0.1)
    return attention, config


def step(forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, module: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """One forward and backward: the result, and the gradients of the input and of all weights."""
    leaf = x.detach().requires_grad_()
    y = forward(leaf)
    return y.detach(), list(torch.autograd.grad(y, [leaf, *module.parameters()], dy))


def measure(run: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """The median of the times in ms, and the peak of the memory in MB that the run takes (on a GPU)."""
    on_gpu = device.type == "cuda"
    run()
    times = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return statistics.median(times), peak / 1e6


def saved_bytes(forward: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The bytes that autograd keeps for backward, in MB, each storage once."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward(x.detach().requires_grad_())
    return sum(kept.values()) / 1e6


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference over that of the second."""
    return float((one.float() - other.float()).norm() / other.float().norm())


def main(arguments: list[str] | None = None) -> float:
    """Compare and measure; returns the largest distance of a result or gradient."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    for name, gpu, cpu in (("tokens", 4096, 256), ("hidden", 4096, 512), ("heads", 32, 8), ("key-heads", 8, 2)):
        parser.add_argument(f"--{name}", type=int, default=gpu if on_gpu else cpu)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), torch.bfloat16
    attention, config = blocks(options.hidden, options.heads, options.key_heads, options.head_dim, options.tokens)
    attention = attention.to(device, dtype)
    fused = FusedAttention(attention)
    x = torch.randn(1, options.tokens, options.hidden, device=device, dtype=dtype)
    dy = torch.randn_like(x)
    cos, sin = Qwen3RotaryEmbedding(config).to(device)(x, torch.arange(options.tokens, device=device)[None])
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "transformers": lambda t: attention(t, position_embeddings=(cos, sin), attention_mask=None)[0],
        "kernel_fusion": lambda t: fused(t, cos, sin),
    }
    (theirs, their_grads), (ours, our_grads) = (step(f, x, dy, attention) for f in forwards.values())
    largest = max(map(distance, [ours, *our_grads], [theirs, *their_grads]))
    print(f"{device}, {dtype}, torch {torch.__version__}: largest relative distance {largest:.1e}")
    for name, forward in forwards.items():
        ms, peak = measure(lambda forward=forward: step(forward, x, dy, attention), device, options.repeats)  # type: ignore[misc]
        memory = f", peak {peak:.0f} MB" if on_gpu else ""
        print(f"{name:14} {ms:8.2f} ms a step, {saved_bytes(forward, x):7.1f} MB saved for backward{memory}")
    return largest


if __name__ == "__main__":
    main()
