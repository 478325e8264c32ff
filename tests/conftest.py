"""Fixtures and the rule for tests that need a GPU: see support.py for what they hand out."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before Triton is imported.
if not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support import CPU, CUDA, EAGER, Target
from verbs import VERBS, Verb

from kernel_fusion.native import build

# One library with every build of the CPU kernels serves all tests and the processes that they start.
build.built_library(print, every_variant=True)

_CUDA_PARAM = pytest.param(CUDA, id="cuda", marks=pytest.mark.cuda)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where PyTorch sees no GPU, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), _CUDA_PARAM])
def target(request: pytest.FixtureRequest) -> Target:
    """Each backend with kernels of ours, on its device."""
    return request.param


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), _CUDA_PARAM, pytest.param(EAGER, id="eager")])
def any_target(request: pytest.FixtureRequest) -> Target:
    """Each backend, the eager definition among them."""
    return request.param


@pytest.fixture(params=["layer_norm", "rms_norm"])
def verb(request: pytest.FixtureRequest) -> str:
    """Each plain norm by name, for what is true of norms alone."""
    return request.param


@pytest.fixture(params=VERBS.values(), ids=str)
def operation(request: pytest.FixtureRequest) -> Verb:
    """Each verb, for what is true of every operation."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same random numbers for a test whichever tests ran before it."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # said, since it warns where there are several
        torch.manual_seed(0)
        yield
