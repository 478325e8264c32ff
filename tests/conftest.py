"""Fixtures, and the rules: what needs a GPU, what is slow, how long a test may take. support.py has what fixtures give.

Limits are in CPU time, so that a busy machine fails no test; pytest-timeout ends what waits for ever.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before Triton is imported.
if not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import forked
import interpreter
from covering import mark_slow
from ranks import Ranks, pool
from support import CPU, CUDA, EAGER, Target
from verbs import VERBS, Verb

from kernel_fusion.native import build

# A graph in Inductor's cache calls operators by the schemas of its time, which are not in its key.
_SCHEMAS = zlib.crc32((build.NATIVE / "headers.digest").read_bytes())
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/kernel_fusion-{os.getuid()}-{_SCHEMAS:x}")

# Seconds of all threads and of processes that a test starts and waits for.
_CPU_LIMIT, _SLOW_CPU_LIMIT = 120, 1800

# A checkout without an installed kernel-fusion-bench has it on the path, as pyproject.toml says; what tests start, too.
_PATH = str(Path(__file__).parents[1] / "bench"), os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATH))

interpreter.speed_up()

if not (torch.cuda.is_available() or torch.xpu.is_available()):
    # For a GPU that never comes, `torch.manual_seed` would keep a stack trace, which takes most of a small test's time.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None

# The same examples in each run; `--hypothesis-profile=random` draws others, which test_random_search.py does.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("fixed")

_CUDA_PARAM = pytest.param(CUDA, id="cuda", marks=pytest.mark.cuda)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the many objects of a collection, which stay: it would look at each of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `slow` what covering arrays leave out; skip what is marked `cuda` where PyTorch sees no GPU, and say so."""
    # What is slow by itself takes minutes and comes first, so that at the end no worker waits for another.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    mark_slow(items)
    for item in filter(_wants_every_variant, items):
        item.add_marker("slow")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


def pytest_sessionfinish() -> None:
    """Let the interpreter free everything when it ends."""
    gc.unfreeze()


def _wants_every_variant(item: pytest.Item) -> bool:
    return "every_variant" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the library that serves all tests and the processes that they start, before the first of them."""
    if not session.config.option.collectonly:
        build.built_library(print, every_variant=any(map(_wants_every_variant, session.items)))


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + forked.seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that takes too much CPU time: at once in this process, else when the processes that it starts end."""
    limit = _SLOW_CPU_LIMIT if item.get_closest_marker("slow") else _CPU_LIMIT

    def fail(*_: object) -> None:
        pytest.fail(f"more than {limit} s of CPU time")

    children = _cpu_seconds_of_children()
    previous = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        result = yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    if _cpu_seconds_of_children() - children > limit:
        fail()
    return result


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), _CUDA_PARAM])
def target(request: pytest.FixtureRequest) -> Target:
    """Each backend with kernels of ours, on its device."""
    return request.param


@pytest.fixture(params=[pytest.param(CPU, id="cpu"), _CUDA_PARAM, pytest.param(EAGER, id="eager")])
def any_target(request: pytest.FixtureRequest) -> Target:
    """Each backend, the eager definition among them."""
    return request.param


@pytest.fixture
def every_variant() -> None:
    """Have a library with every build of the CPU kernels, here and in other processes; the test is a slow one then."""


@pytest.fixture(params=["layer_norm", "rms_norm"])
def verb(request: pytest.FixtureRequest) -> str:
    """Each plain norm by name, for what is true of norms alone."""
    return request.param


@pytest.fixture(params=VERBS.values(), ids=str)
def operation(request: pytest.FixtureRequest) -> Verb:
    """Each verb, for what is true of every operation."""
    return request.param


_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(scope="session", params=_DEVICES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Two processes, or one on each GPU; once for all tests, since each takes seconds to start."""
    yield from pool(2 if request.param == "cpu" else torch.cuda.device_count(), request.param)


@pytest.fixture(scope="session", params=_DEVICES)
def four_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four processes, or GPUs."""
    if request.param == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    yield from pool(4, request.param)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same random numbers for a test whichever tests ran before it."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # said, since it warns where there are several
        torch.manual_seed(0)
        yield
