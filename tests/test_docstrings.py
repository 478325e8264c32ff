"""The example of every public docstring runs as it stands and gives what it says."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernel_fusion as kf

_MODULES = (kf.functional, kf.nn, kf.ops, kf.kernels.elementwise, kf.kernels.reduction, kf.kernels.fusion)


def public() -> Iterator[Any]:
    """Every verb, module, operation and kernel, and the two functions about backends."""
    yield from (kf.explain, kf.use_backend)
    for module in _MODULES:
        for name, value in vars(module).items():
            ours = inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
            if ours and not name.startswith("_") and value.__module__.startswith(module.__name__):
                yield value


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("documented", list(public()), ids=lambda d: f"{d.__module__}.{d.__name__}")
def test_example(documented: Any, backend: str | None) -> None:
    """There is one, and it holds, with the automatic choice of backend and by the definition."""
    (example,) = doctest.DocTestFinder(recurse=False).find(documented, documented.__name__, globs={})
    assert example.examples, "no example"
    with kf.use_backend(backend):
        assert doctest.DocTestRunner().run(example).failed == 0
