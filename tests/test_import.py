"""Import side effects, and who may import whom: rules of the architecture that no other test would miss."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support import PACKAGE, ROOT, python

# The units of the package and what each may import, by first name below `kernel_fusion`.
_FOUNDATION = {"errors", "config"}
_CORE = _FOUNDATION | {"core"}
_DISTRIBUTED = _CORE | {"backends", "distributed"}
_OPERATORS = _DISTRIBUTED | {"native", "operators"}
_VERBS = _OPERATORS | {"functional"}
_API = _VERBS | {"nn", "ops", "kernels", "compiler", "patching", "onnx", "hf"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "core": _CORE,
    "backends": _CORE | {"backends"},
    "native": _CORE | {"backends", "native"},
    "distributed": _DISTRIBUTED,
    "operators": _OPERATORS,
    "functional": _VERBS,
    "nn": _VERBS | {"nn"},
    "ops": _VERBS,
    "kernels": _VERBS | {"kernels"},
    "patching": _VERBS | {"patching"},
    "onnx": _OPERATORS | {"onnx"},
    "hf": _VERBS | {"hf"},
    "compiler": _OPERATORS | {"compiler"},
    "__init__": _API,
    "testing": _API | {"testing", "__init__"},
    "bench": set(),
    "cli": _API | {"testing", "cli", "__init__"},
    "__main__": {"cli"},
}
_SOURCES = sorted(PACKAGE.rglob("*.py"))
_BENCH = ROOT / "bench" / "kernel_fusion_bench"


def unit(path: Path) -> str:
    """The unit that a file belongs to: its module or top folder below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, package: str = PACKAGE.name) -> Iterator[str]:
    """Every module of a package that a file imports, at its top or in a function, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import name`: the name is the module where there is one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == package)


def imported_unit(name: str) -> str:
    """The unit that a dotted name belongs to; a name that the package itself defines belongs to `__init__`."""
    first = [*name.split("."), "__init__"][1]
    return first if (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file() else "__init__"


@pytest.mark.parametrize("path", _SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_direction(path: Path) -> None:
    """A file imports from its own layer and those below."""
    found = {imported_unit(name) for name in imports(path)}
    assert found <= MAY_IMPORT[unit(path)], f"{path.name} may not import {found - MAY_IMPORT[unit(path)]}"


def test_only_one_module_imports_the_benchmarks() -> None:
    """The library runs without kernel-fusion-bench: bench.py alone imports it, and nothing imports bench.py."""
    assert [path.name for path in _SOURCES if [*imports(path, _BENCH.name)]] == ["bench.py"]
    users = [path for path in (*_SOURCES, *_BENCH.rglob("*.py")) if "bench" in map(imported_unit, imports(path))]
    assert users == []


def test_benchmarks_of_programs_need_no_command_line() -> None:
    """Only the commands import what needs typer and rich; nothing else imports the commands."""
    light = {f"{PACKAGE.name}.cli.{name}" for name in ("machine", "table", "units")}
    for path in sorted(_BENCH.rglob("*.py")):
        if path.parent != _BENCH / "commands":
            of_cli = [name for name in imports(path) if imported_unit(name) == "cli"]
            assert [name for name in of_cli if not name.startswith(tuple(light))] == [], path
            assert [name for name in imports(path, _BENCH.name) if "commands" in name] == [], path


def test_the_direction_has_no_cycle() -> None:
    """The table itself is layered, without exception."""
    TopologicalSorter({name: below - {name} for name, below in MAY_IMPORT.items()}).prepare()


def test_no_module_is_imported_by_what_it_imports() -> None:
    """Modules are layered within each unit too; imports in functions count."""
    modules = {_module(path): path for path in (*_SOURCES, *_BENCH.rglob("*.py"))}
    graph = {}
    for module, path in modules.items():
        # `from a import b` names a module or something in one.
        named = [*imports(path), *imports(path, _BENCH.name)]
        found = {name if name in modules else name.rpartition(".")[0] for name in named}
        graph[module] = found - {module}
    TopologicalSorter(graph).prepare()


def _module(path: Path) -> str:
    """The dotted name of a file of the package."""
    root = _BENCH.parent if path.is_relative_to(_BENCH) else PACKAGE.parent
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def test_a_backend_never_imports_another() -> None:
    """The folders of `backends` do not know each other."""
    folders = {path.name for path in (PACKAGE / "backends").iterdir() if path.is_dir()}
    for path in _SOURCES:
        parts = path.relative_to(PACKAGE).parts
        if parts[0] == "backends" and len(parts) > 2:
            others = folders - {parts[1]}
            bad = [
                name for name in imports(path) if name.split(".")[1:2] == ["backends"] and {*name.split(".")} & others
            ]
            assert not bad, f"{path}: {bad}"


def test_device_code_includes_only_device_code() -> None:
    """Kernels and shared headers include nothing but each other: no PyTorch, CUDA or C++ library header."""
    folders = (PACKAGE / "native" / "kernels", PACKAGE / "native" / "shared")
    headers = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    assert headers
    for path in headers:
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                name = line.split('"')[1] if '"' in line else line
                found = [root / name for root in (path.parent, PACKAGE / "native") if (root / name).is_file()]
                assert found, f"{path.name}: {line}"
                assert found[0].parent in folders, f"{path.name}: {line}"


def test_only_config_reads_the_environment() -> None:
    """`os.environ` and `os.getenv` occur in config.py alone."""
    readers = set()
    for path in _SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if name in ("environ", "environb", "getenv", "getenvb"):
                readers.add(path.name)
    assert readers == {"config.py"}


_IMPORT = """
    import gc, json, os, subprocess, sys, time
    start = time.process_time()
    import torch
    of_torch = time.process_time() - start
    def refuse(*_, **__):
        raise AssertionError("import started a process")
    subprocess.Popen = os.system = os.posix_spawn = refuse
    gc.collect()  # what PyTorch's import left behind
    before, start = set(sys.modules), time.process_time()
    import kernel_fusion
    seconds = time.process_time() - start
    from kernel_fusion.operators import loader
    print(json.dumps([seconds / of_torch, sorted(set(sys.modules) - before), loader.is_loaded()]))
"""


def test_import_builds_and_loads_nothing(tmp_path: Path) -> None:
    """`import kernel_fusion` starts no process, writes no cache and imports no compiler, Triton or plotting."""
    result = python(_IMPORT, env={"KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache")})
    _, modules, loaded = json.loads(result.stdout)
    heavy = {"triton", "cuda", "matplotlib", "typer", "rich", "ninja", "setuptools", "jinja2", _BENCH.name}
    assert not loaded
    assert not {name.split(".")[0] for name in modules} & heavy
    assert not (tmp_path / "cache").exists()
    assert result.stderr == ""


@pytest.mark.slow
def test_import_adds_at_most_a_thirtieth(tmp_path: Path) -> None:
    """`import kernel_fusion` takes at most a thirtieth of the processor time of `import torch` (the least of 7)."""
    # That is 50 ms where PyTorch's import takes 1.5 s; a ratio is the same on a slow or busy machine. Bytecode is kept,
    # as by installing.
    env = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(json.loads(python(_IMPORT, env=env).stdout)[0] for _ in range(7)) <= 1 / 30


def test_availability_is_evaluated_when_read() -> None:
    """Reading `EXTENSION_LOADED` loads the extension; before that nothing has."""
    code = """
        import kernel_fusion as kf
        from kernel_fusion.operators import loader
        assert not loader.is_loaded()
        print(kf.EXTENSION_LOADED, loader.is_loaded(), isinstance(kf.CUDA_AVAILABLE, bool))
    """
    assert python(code).stdout.split() == ["True"] * 3


def test_reading_every_public_name_builds_nothing() -> None:
    """`from kernel_fusion import *`, and reading all of `__all__`, which `dir` lists before, load no extension.

    It lists `kf.onnx` too, which needs another package.
    """
    code = """
        import kernel_fusion as kf
        listed = {*kf.__all__, "onnx"} <= set(dir(kf))
        from kernel_fusion import *
        from kernel_fusion.operators import loader
        public = [getattr(kf, name) for name in kf.__all__]
        print(listed, loader.is_loaded(), layer_norm is kf.layer_norm)
    """
    assert python(code).stdout.split() == ["True", "False", "True"]


def test_unknown_name_is_an_attribute_error() -> None:
    """The lazy attributes of the package hide no misspelling."""
    import kernel_fusion as kf

    with pytest.raises(AttributeError, match="module 'kernel_fusion' has no attribute 'layernorm'"):
        kf.layernorm  # noqa: B018


def test_few_files_name_an_operation() -> None:
    """An operation of rows stands in few files, which are counted by the word softmax."""
    kinds = ("*.py", "*.h", "*.cpp", "*.cuh")
    named = [path for kind in kinds for path in PACKAGE.rglob(kind) if re.search(r"\bsoftmax\b", path.read_text())]
    assert len(named) <= 16, sorted(str(path.relative_to(PACKAGE)) for path in named)
