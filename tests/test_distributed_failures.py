"""A failure among ranks ends with an error on the remaining ones, and does not hang."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import kernel_fusion as kf

pytestmark = pytest.mark.slow


def _die(device: str) -> None:
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError):
        kf.layer_norm(torch.randn(4, 8, device=device), 8, group=dist.group.WORLD)


def test_a_rank_that_dies() -> None:
    """The others' norm raises PyTorch's error."""
    ranks = Ranks(2)
    with pytest.raises(AssertionError, match=r"^rank 1 ended$"):
        ranks(_die)


def _disagree(device: str) -> None:
    kf.layer_norm(torch.randn(4 + dist.get_rank(), 8, device=device), 8, group=dist.group.WORLD)


def test_ranks_that_disagree() -> None:
    """Ranks with different numbers of rows get PyTorch's error, or end with it."""
    ranks = Ranks(2)
    with pytest.raises(AssertionError, match=r"rank \d"):
        ranks(_disagree)
