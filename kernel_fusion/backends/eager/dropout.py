"""Dropout: a counter-based generator keyed by a seed and an element's position, so that no mask is ever stored.

The generator is Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3,
SC 2011, who found that 7 rounds pass BigCrush). One block of 128 bits serves eight neighbouring elements, 16 bits
each: element i takes half i % 2 of word i / 2 % 4 of the block with counter (i / 8, seed) and key 0, so that the keys
of all rounds are constants. An element is dropped where its 16 bits are below round(p * 2^16), so p is rounded to a
multiple of 2^-16, and the scale of the others is that of the rounded p. native/shared/philox.h is the same, for the
kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_fusion.core.dropout import scale, threshold

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A seed from the device's default generator, by an ordinary PyTorch operation: graphs and checkpoints know it."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def random_bits(seed: Tensor, count: int) -> Tensor:
    """The 16 random bits of elements 0 ... count - 1, as int64."""
    blocks = torch.arange(-(-count // 8), device=seed.device)
    words = [blocks & _LOW, blocks >> 32, seed[0] & _LOW, (seed[0] >> 32) & _LOW]
    for number in range(_ROUNDS):
        key = [number * step & _LOW for step in _KEY_STEPS]
        # int64 products wrap, which leaves all 64 bits of the unsigned product in place.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW) ^ words[1] ^ key[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ key[1],
            first & _LOW,
        ]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).flatten()[:count]


def dropout(values: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """`values` with dropout; the position of an element is its place in memory, in a tensor like this one.

    Dense tensors keep their strides in `torch.empty_like`, and so does the result of a kernel.
    """
    if seed is None:
        return values
    like = torch.empty_like(values)
    kept = random_bits(seed, values.numel()) >= threshold(p)
    return torch.where(kept.as_strided(like.shape, like.stride()), values * scale(p), 0.0)
