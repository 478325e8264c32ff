"""The libraries that a wheel brings: which one is taken, whom it trusts, and what happens when it cannot be used.

Here the extension that the tests use stands in for the one of a wheel; a slow test makes the real ones.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import release_check
import release_wheel
import torch
from support import popen, python

from kernel_fusion.config import cxx_compiler
from kernel_fusion.core import cache
from kernel_fusion.native import build, library, prebuilt

pytestmark = pytest.mark.slow

_VERSION = ".".join(torch.__version__.split(".")[:2])  # of a release, as the tests expect


def _seal(folder: Path, name: str, payload: bytes) -> None:
    sealed = cache.seal(payload, prebuilt.key_of(name, platform.machine(), build.sources_digest()))
    path = folder / f"{name}.so"
    path.write_bytes(sealed)
    path.chmod(0o644)


def _compiled(folder: Path, source: str, *flags: str) -> bytes:
    """A small shared library."""
    (folder / "small.cpp").write_text(source)
    compiler = cxx_compiler()
    assert compiler is not None
    command = [*compiler, "-shared", "-fPIC", str(folder / "small.cpp"), *flags, "-o", str(folder / "small.so")]
    subprocess.run(command, check=True)
    return (folder / "small.so").read_bytes()


def test_what_the_check_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that needs another one, looks into a folder of the builder's, or is too new for the platform."""
    _compiled(tmp_path, "extern int a; int *b = &a;", "-fopenmp", "-Wl,--no-as-needed,-rpath,/home/builder")
    assert release_check.problems(tmp_path / "small.so") == [
        "small.so needs libgomp.so.1",
        "small.so looks into /home/builder",
    ]
    _compiled(tmp_path, "#include <cmath>\nfloat (*f)(float) = std::exp;", "-lm")
    assert release_check.too_new(tmp_path / "small.so", "manylinux_2_28") == []
    monkeypatch.setitem(release_check._NEWEST["manylinux_2_28"], "GLIBC", (2, 2))
    assert release_check.too_new(tmp_path / "small.so", "manylinux_2_28")[0].startswith("small.so needs GLIBC_2.")


# All functions that have a newer name than the platform of the wheel knows.
_NEWER = """
    #include <cmath>
    #include <dlfcn.h>
    #include <memory>
    #include <mutex>
    #include <shared_mutex>
    #include <sstream>
    std::string all(double x, std::shared_ptr<int> p, std::shared_mutex& mutex, std::shared_mutex& other) {
      std::shared_lock shared(mutex);
      std::unique_lock whole(other);
      std::istringstream words(std::string("a b"));
      std::ostringstream out;
      const auto copy = p;
      out << std::exp(x) << *copy << words.rdbuf() << dlopen("none", RTLD_NOW) << dlsym(nullptr, "none") << dlerror();
      return out.str();
    }
"""


def test_a_newer_system_compiles_for_the_platform(tmp_path: Path) -> None:
    """What glibc and GCC renamed later has its older name."""
    header = Path(release_check.__file__).with_name("release_symbols.h")
    flags = ("-std=c++20", "-O1", "-lm")
    _compiled(tmp_path, _NEWER, *flags)
    renamed = release_check.too_new(tmp_path / "small.so", "manylinux_2_28")
    assert renamed or platform.libc_ver()[1] <= "2.28"
    _compiled(tmp_path, _NEWER, *flags, "-include", str(header))
    assert release_check.too_new(tmp_path / "small.so", "manylinux_2_28") == []
    ctypes.CDLL(str(tmp_path / "small.so"))


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A library beside, and the extension, which here needs none beside it."""
    extension = cache.EXTENSIONS.read(build.built_library(print).stem)
    assert extension is not None
    return {prebuilt.KERNELS: _compiled(tmp_path_factory.mktemp("small"), "int kernels;"), "extension": extension}


@pytest.fixture
def folder(payloads: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's libraries for this PyTorch."""
    folder = tmp_path / "prebuilt"
    folder.mkdir(mode=0o755)
    _seal(folder, prebuilt.KERNELS, payloads[prebuilt.KERNELS])
    _seal(folder, _VERSION, payloads["extension"])
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.delenv("KERNEL_FUSION_BUILD", raising=False)
    return folder


@pytest.mark.parametrize("rest", [".0", ".2+cpu", ".0+cu130", ".1+rocm7.1", ".0+xpu"])
def test_a_release_has_its_library(folder: Path, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One library serves all releases of a minor version, for the CPU and for every kind of GPU."""
    monkeypatch.setattr(torch, "__version__", _VERSION + rest)
    assert prebuilt.name_here() == _VERSION
    assert prebuilt.usable_library() == (folder / f"{_VERSION}.so", None)


@pytest.mark.parametrize("rest", [".0a0+b6fd", ".0.dev20260601", ".0rc1", "9.0", ".0+nv26.5"])
def test_other_versions_have_none(folder: Path, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alphas, nightlies, vendors' builds and later versions may lay objects out in another way."""
    monkeypatch.setattr(torch, "__version__", _VERSION + rest)
    with pytest.raises(OSError, match=rf"there is one for PyTorch's releases {_VERSION}, and this is {_VERSION}"):
        prebuilt.load(library._dlopen)


def test_a_package_without_libraries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone, or the wheel for every platform, says nothing about libraries that it does not have."""
    monkeypatch.setattr(prebuilt, "FOLDER", folder / "none")
    assert prebuilt.load(library._dlopen) is None
    assert prebuilt.usable_library() == (None, None)


def _belongs_to_another(path: Path) -> None:
    os.chown(path, 12345, -1)


_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged"),
    "of another version": (lambda path: path.write_bytes(path.with_name("kernels.so").read_bytes()), "another version"),
    "writable by others": (lambda path: path.chmod(0o646), "not a file of this user alone"),
    "of another owner": (_belongs_to_another, "not a file of this user alone"),
    "in a folder of others": (lambda path: path.parent.chmod(0o777), "other users can write it"),
    "missing kernels": (lambda path: path.with_name("kernels.so").unlink(), "No such file"),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_library_that_cannot_be_trusted(folder: Path, damage: str) -> None:
    """It is not opened, and the error has the reason."""
    if damage == "of another owner" and os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    change, reason = _DAMAGE[damage]
    change(folder / f"{_VERSION}.so")

    def opened(_: int) -> None:
        raise AssertionError

    with pytest.raises(OSError, match=reason):
        prebuilt.load(opened)
    path, why_not = prebuilt.usable_library()
    assert path is None
    assert reason in str(why_not)


def test_a_group_of_the_user_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems let a user's own group write what pip installs; a group with others is not trusted."""
    for path in (folder, folder / f"{_VERSION}.so", folder / "kernels.so"):
        path.chmod(path.stat().st_mode | 0o020)
    monkeypatch.setattr(cache, "_is_own_group", lambda group: True)
    assert prebuilt.usable_library()[0]
    monkeypatch.setattr(cache, "_is_own_group", lambda group: False)
    assert not prebuilt.usable_library()[0]


def test_a_symbol_that_pytorch_lacks(folder: Path) -> None:
    """Every symbol is bound when a library is opened, not when it is first called."""
    _seal(folder, _VERSION, _compiled(folder.parent, "int removed();\nint use() { return removed(); }"))
    with pytest.raises(OSError, match=r"cannot be loaded: .*undefined symbol: .*removed"):
        prebuilt.load(library._dlopen)


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path]:
    """A file system that runs no code."""
    folder = tmp_path / "noexec"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,mode=755", "tmpfs", folder], check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_folder_that_runs_no_code(
    noexec: Path, payloads: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to map the code, which is an error like any other."""
    for path in folder.iterdir():
        (noexec / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(prebuilt, "FOLDER", noexec)
    with pytest.raises(OSError, match="failed to map segment"):
        prebuilt.load(library._dlopen)


def test_the_reason_comes_before_the_build(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Who builds although there is a wheel says why, once; who finds a library in the cache says nothing."""

    def build_it(load: object, say: Callable[[str], None]) -> ctypes.CDLL:
        say("building ...")
        say("built")
        return ctypes.CDLL(None)

    monkeypatch.setattr(library, "_declared", lambda opened: opened)
    monkeypatch.setattr(build, "load_library", build_it)
    library.open_built("it is damaged")
    assert capfd.readouterr().err.splitlines() == ["kernel_fusion: it is damaged", "building ...", "built"]
    monkeypatch.setattr(build, "load_library", lambda load, say: ctypes.CDLL(None))
    library.open_built("it is damaged")
    assert capfd.readouterr().err == ""


# A first forward and backward with the libraries of a folder, and who computed them.
_USE = """
    import sys, torch, kernel_fusion as kf
    from pathlib import Path
    from kernel_fusion.native import prebuilt
    from kernel_fusion.operators import loader, schemas
    prebuilt.FOLDER = Path(sys.argv[1])
    if len(sys.argv) > 2:
        definition = schemas.reference_call
        schemas.reference_call = lambda *args: 2 * definition(*args)
    x, dy = torch.randn(2, 5, 96).unbind()
    def results(norm):
        y = norm(x.requires_grad_(), (96,))
        return y, *torch.autograd.grad(y, x, dy)
    with torch.inference_mode(False), torch.autocast("cpu"):
        first = kf.layer_norm(x, (96,))
    torch.testing.assert_close(results(kf.layer_norm), results(torch.nn.functional.layer_norm))
    assert loader.launches("cpu_backward") >= 1
    print(loader.is_from_wheel(), loader.why_not_from_wheel())
"""


def test_two_processes_at_once(folder: Path, tmp_path: Path) -> None:
    """Both take the wheel's library without a compiler, a cache or a word, and compute the right thing."""
    env = {"CXX": "/nonexistent", "KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache")}
    for process in [popen(_USE, folder, env=env) for _ in range(2)]:
        out, err = process.communicate()
        assert (process.returncode, out.split(), err) == (0, ["True", "None"], "")
    assert not (tmp_path / "cache").exists()


def test_a_library_that_computes_something_else(folder: Path) -> None:
    """It is withdrawn before anybody's call, and the built library serves in its place."""
    ran = python(_USE, folder, "wrong")
    assert ran.stdout.strip() == (
        "False the library of its wheel is not used: it computes something else than the definition"
    )


def test_neither_library_nor_compiler(folder: Path, tmp_path: Path) -> None:
    """The one warning has both reasons, and the definition computes the right thing."""
    os.truncate(folder / f"{_VERSION}.so", 1000)
    code = """
        import sys, warnings, torch, kernel_fusion as kf
        from pathlib import Path
        from kernel_fusion.native import prebuilt
        prebuilt.FOLDER = Path(sys.argv[1])
        x = torch.randn(5, 96)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(kf.layer_norm(x, (96,)), torch.nn.functional.layer_norm(x, (96,)))
        (warning,) = caught
        print(warning.message)
    """
    env = {"CXX": "/nonexistent", "KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache")}
    told = python(code, folder, env=env).stdout
    assert "no C++ compiler was found" in told
    assert "the library of its wheel is not used: " in told
    assert "it is damaged" in told


def test_a_build_can_be_asked_for(folder: Path) -> None:
    """KERNEL_FUSION_BUILD=1 takes what the compiler made on this machine."""
    ran = python(_USE, folder, env={"KERNEL_FUSION_BUILD": "1"})
    assert ran.stdout.strip() == "False the library of its wheel is not used: KERNEL_FUSION_BUILD is set"


_WAYS: dict[str, dict[str, str | None]] = {"wheel": {"CXX": "/nonexistent"}, "built": {"KERNEL_FUSION_BUILD": "1"}}


@pytest.mark.slow
def test_the_libraries_of_a_wheel(tmp_path: Path) -> None:
    """They need no more than the platform has, and have the bits of the built library."""
    made = dict(release_wheel.libraries_here())
    for each, content in made.items():
        (tmp_path / f"{each}.so").write_bytes(content)
        assert release_check.problems(tmp_path / f"{each}.so") == []
        assert release_check.too_new(tmp_path / f"{each}.so", "manylinux_2_28") == []
    code = f"""
        import sys
        from pathlib import Path
        from kernel_fusion.native import prebuilt
        prebuilt.FOLDER = Path(sys.argv[1])
        {textwrap.indent(release_check.FIRST_CALLS, 8 * " ").strip()}
    """
    told = {each: json.loads(python(code, tmp_path, env=env).stdout) for each, env in _WAYS.items()}
    assert {each: result["from_wheel"] for each, result in told.items()} == {"wheel": True, "built": False}
    assert told["wheel"]["bits"] == told["built"]["bits"]
