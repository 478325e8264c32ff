"""Dropout from a seed and an element's position, so that no mask is stored.

The bits are Philox4x32's with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC
2011). Elements 2j and 2j + 1 take word j % 4 of the block with counter (j / 4, seed) and key 0. The even one exchanges
the word's halves, so pairs correlate by at most max(3 * 2^-16, 2^-32 / min(p, 1 - p)).

Bits below t = round(p * 2^32) drop an element; others are scaled by 1 / (1 - t / 2^32), so the expectation is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_fusion.core.dropout import scale, threshold

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_HALF = 16


def draw_seed(device: torch.device) -> Tensor:
    """A seed from the device's generator, by an operation, which graphs and checkpoints handle."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def random_bits(seed: Tensor, count: int) -> Tensor:
    """Elements 0 ... count - 1, as int64."""
    blocks = torch.arange(-(-count // 8), device=seed.device)
    words = [blocks & _LOW, blocks >> 32, seed[0] & _LOW, (seed[0] >> 32) & _LOW]
    for number in range(_ROUNDS):
        key = [number * step & _LOW for step in _KEY_STEPS]
        # int64 products wrap, with all 64 bits.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW) ^ words[1] ^ key[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ key[1],
            first & _LOW,
        ]
    return torch.stack([bits for word in words for bits in pair_bits(word)], dim=-1).flatten()[:count]


def pair_bits(word: Tensor) -> tuple[Tensor, Tensor]:
    """A word's even and odd element."""
    return (word & (1 << _HALF) - 1) << _HALF | word >> _HALF, word


def dropout(values: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Positions are places in `torch.empty_like(values)`, as in a kernel's result."""
    if seed is None:
        return values
    like = torch.empty_like(values)
    kept = random_bits(seed, values.numel()) >= threshold(p)
    return torch.where(kept.as_strided(like.shape, like.stride()), values * scale(p), 0.0)
