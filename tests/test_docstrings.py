"""The example of every docstring runs as it stands and gives what it says."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_fusion as kf
from kernel_fusion.functional.wording import entries

_MODULES = (kf.functional, kf.nn, kf.ops, kf.kernels.elementwise, kf.kernels.reduction, kf.kernels.fusion)


def public() -> Iterator[Any]:
    """Every verb, module, operation and kernel, and the two functions about backends."""
    yield from (kf.explain, kf.use_backend)
    for module in _MODULES:
        for name, value in vars(module).items():
            ours = inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))
            if ours and not name.startswith("_") and value.__module__.startswith(module.__name__):
                yield value


def _modules_with_examples() -> Iterator[str]:
    """The names of the package's modules that have one."""
    root = Path(kf.__file__).parent
    for path in sorted(root.rglob("*.py")):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        if any(line.startswith((">>> ", "@documented(")) for line in lines):
            yield ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", list(_modules_with_examples()))
def test_every_example(name: str) -> None:
    """The examples of a module, its functions, classes and methods hold, with the automatic choice of backend."""
    found = DocTestFinder().find(importlib.import_module(name), globs={})
    examples = [test for test in found if test.examples]
    assert examples, "none is found"
    for example in examples:
        # torch.compile tidies up in the globals when a function that it compiled is gone.
        assert DocTestRunner().run(example, clear_globs=False).failed == 0


# The arguments whose meaning one docstring has for all, and what has them.
_SHARED = {"rounding", "weight_offset", "out_dtype"}


@pytest.mark.parametrize("name", [*kf.functional.__all__, *kf.nn.__all__])
def test_arguments_are_described_where_they_are(name: str) -> None:
    """A docstring describes the shared arguments itself, and refers to no other one for any."""
    documented = getattr(kf, name)
    described = entries(documented.__doc__)
    for argument in _SHARED & set(inspect.signature(documented).parameters):
        assert len(described[argument].split()) > 5
    assert not [text for text in described.values() if text.startswith("as for")]


@pytest.mark.parametrize("documented", list(public()), ids=lambda d: f"{d.__module__}.{d.__name__}")
def test_example_by_the_definition(documented: Any) -> None:
    """Everything public has an example, which holds for the definition too."""
    (example,) = DocTestFinder(recurse=False).find(documented, documented.__name__, globs={})
    assert example.examples, "no example"
    with kf.use_backend("eager"):
        assert DocTestRunner().run(example).failed == 0
