"""First use under hostile conditions: many processes at once, killed builders, bad files, no compiler, no space.

A compiler that takes its result from a finished build stands in for g++, so that a "build" takes no time, or as long as
a test wants, and writes down every call; one test, marked slow, builds for real.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from covering import rest_slow
from support import popen, python

from kernel_fusion.core import cache
from kernel_fusion.errors import BuildError
from kernel_fusion.native import build, jobs, library

pytestmark = pytest.mark.slow

# Each process builds or loads, and computes through the automatic choice of backend.
_USE = """
    import torch, kernel_fusion as kf
    from kernel_fusion.operators import loader
    assert loader.load(), loader.error()
    before = loader.launches("cpu_forward")
    y = kf.layer_norm(torch.randn(3, 8), (8,), backend="cpu")
    print(kf.EXTENSION_LOADED, loader.launches("cpu_forward") - before)
"""
_WORKED = ["True", "1"]

_COMPILER = """#!/bin/sh
for last; do :; done
case "$*" in
  *--version) printf 'stand-in 1.0 \\351\\n' ;;
  *-shared*) echo link >>"{log}"; cp "{library}" "$last" ;;
  *) echo compile >>"{log}"; {action}; : >"$last" ;;
esac
"""


@dataclass
class StandIn:
    """A stand-in for the C++ compiler, with an empty cache and temporary folder of its own."""

    folder: Path
    library: Path

    def __post_init__(self) -> None:
        for name in ("tmp", "bin"):
            (self.folder / name).mkdir()
        self.set_action(":")

    def set_action(self, action: str) -> None:
        """Set what the compiler does, in shell, for each unit."""
        path = self.folder / "next-g++"
        path.write_text(_COMPILER.format(log=self.log, library=self.library, action=action))
        path.chmod(0o755)
        path.replace(self.folder / "bin" / "g++")  # a file that is being started cannot be written

    @property
    def log(self) -> Path:
        """The calls so far."""
        return self.folder / "log"

    @property
    def cache(self) -> Path:
        """The cache folder that `env` names."""
        return self.folder / "cache"

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of a process that uses it."""
        return {
            "CXX": str(self.folder / "bin" / "g++"),
            "KERNEL_FUSION_CACHE_DIR": str(self.cache),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def calls(self, kind: str) -> int:
        """How often the compiler was asked to "compile" or "link"."""
        return self.log.read_text().split().count(kind) if self.log.exists() else 0

    def built_library(self) -> Path:
        """The one library in the cache."""
        (path,) = (self.cache / "extension").glob("*.so")
        return path


@pytest.fixture
def compiler(tmp_path: Path) -> StandIn:
    """A fresh stand-in."""
    return StandIn(tmp_path, build.built_library(print))


def _wait_until(condition: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def _finish(processes: list[Any]) -> Iterator[str]:
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.split() == _WORKED
        yield err


@pytest.mark.slow
def test_eight_processes_build_once(compiler: StandIn) -> None:
    """Eight processes at first use at once: one builds, the others wait for it, all work."""
    compiler.set_action("sleep 3")
    errors = list(_finish([popen(_USE, env=compiler.env) for _ in range(8)]))
    assert compiler.calls("link") == 1
    assert sum("building its C++ extension" in error for error in errors) == 1


@pytest.mark.parametrize("number", rest_slow([signal.SIGKILL, signal.SIGTERM]), ids=lambda s: s.name)
def test_killed_builder(compiler: StandIn, number: signal.Signals) -> None:
    """After a builder is killed half-way the next process, and one that waited for it, build and work."""
    compiler.set_action("sleep 20")
    builder = popen(_USE, env=compiler.env)
    _wait_until(lambda: compiler.calls("compile") > 0)
    waiting = popen(_USE, env=compiler.env)
    compiler.set_action(":")
    builder.send_signal(number)
    builder.communicate()
    assert builder.returncode == -number
    list(_finish([waiting]))
    assert python(_USE, env=compiler.env).stdout.split() == _WORKED
    assert compiler.calls("link") == 1


def _foreign(path: Path) -> None:
    payload = cache.unseal(path.read_bytes(), path.stem)
    assert payload is not None
    path.write_bytes(cache.seal(bytes(payload), cache.digest("another key")))


_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(os.urandom(100_000)),
    "foreign": _foreign,
    "writable": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", rest_slow(_DAMAGE))
def test_bad_library_is_built_again(compiler: StandIn, damage: str) -> None:
    """A library in the cache that is damaged, foreign or writable by others is not loaded but replaced."""
    for links in (1, 1):
        assert python(_USE, env=compiler.env).stdout.split() == _WORKED
        assert compiler.calls("link") == links
    _DAMAGE[damage](compiler.built_library())
    for links in (2, 2):
        assert python(_USE, env=compiler.env).stdout.split() == _WORKED
        assert compiler.calls("link") == links


def _in_the_way(folder: Path) -> str:
    folder.write_text("in the way")
    return "Not a directory"


def _for_everybody(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return "other users can write it"


@pytest.mark.parametrize("obstruct", [_in_the_way, _for_everybody])
def test_cache_folder_that_cannot_be_used(compiler: StandIn, obstruct: Callable[[Path], str]) -> None:
    """If nothing can be stored, the process builds for itself, says so, works, and leaves nothing behind."""
    reason = obstruct(compiler.cache)
    result = python(_USE, env=compiler.env)
    assert result.stdout.split() == _WORKED
    assert "the next process builds again, because nothing can be kept in" in result.stderr
    assert reason in result.stderr
    assert list((compiler.folder / "tmp").iterdir()) == []
    assert not list(compiler.cache.glob("extension/*"))


def test_a_library_that_cannot_be_loaded_is_built_again(compiler: StandIn) -> None:
    """A whole entry that is none for the dynamic loader is replaced, once."""
    python(_USE, env=compiler.env)
    path = compiler.built_library()
    path.write_bytes(cache.seal(b"for another machine", path.stem))
    result = python(_USE, env=compiler.env)
    assert result.stdout.split() == _WORKED
    assert "cannot be loaded and is built again" in result.stderr
    assert python(_USE, env=compiler.env).stdout.split() == _WORKED
    assert compiler.calls("link") == 2


def test_a_build_that_cannot_be_loaded(compiler: StandIn, tmp_path: Path) -> None:
    """It is one warning that says why, not a build without end."""
    compiler.library = tmp_path / "library"
    compiler.library.write_text("for another machine")
    compiler.set_action(":")
    warned, _, backend = json.loads(python(_FALLBACK, env=compiler.env).stdout)
    assert "the extension was built but cannot be loaded" in warned[0]
    assert (len(warned), backend, compiler.calls("link")) == (1, "eager", 1)


# In place of the entry that was checked, and before it is loaded, comes another file.
_SWAP = """
    from pathlib import Path
    from kernel_fusion.core.cache import EXTENSIONS
    from kernel_fusion.native import library
    def swapped(file, dlopen=library._dlopen):
        for path in EXTENSIONS.entries():
            path.unlink()
            path.write_text("somebody else's")
        return dlopen(file)
    library._dlopen = swapped
"""
# A system without /proc.
_NO_PROC = """
    import os
    def readlink(path, readlink=os.readlink, **options):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return readlink(path, **options)
    os.readlink = readlink
"""


@pytest.mark.parametrize("before", rest_slow([_SWAP, _NO_PROC, _NO_PROC + _SWAP]), ids=["proc", "copy", "swapped copy"])
def test_what_was_checked_is_what_is_loaded(compiler: StandIn, before: str) -> None:
    """Not what the path leads to by then; where descriptors have no names, a copy, which is gone afterwards."""
    python(_USE, env=compiler.env)
    assert python(before + _USE, env=compiler.env).stdout.split() == _WORKED
    assert compiler.calls("link") == 1
    assert list((compiler.folder / "tmp").iterdir()) == []


def test_folders_of_killed_builders_are_removed(tmp_path: Path) -> None:
    """Old ones that nobody holds; what is new, or held, belongs to a builder at work."""
    for name, age in (("old", 1000), ("new", 0), ("held", 1000)):
        folder = tmp_path / f"kernel_fusion-builder-{name}"
        folder.mkdir()
        (folder / "0.o").touch()
        os.utime(folder, (time.time() - age,) * 2)
    held = os.open(tmp_path / "kernel_fusion-builder-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with jobs.private_folder([tmp_path]) as own:
        assert {path.name[-4:] for path in tmp_path.iterdir()} == {"-new", "held", own.name[-4:]}
    os.close(held)
    assert not own.exists()


def test_nothing_is_built_where_others_could_change_it(tmp_path: Path) -> None:
    """A temporary folder that everybody may write, and which is not sticky, is passed over."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o777)
    with jobs.private_folder([shared, own]) as folder:
        assert folder.parent == own
    with (
        pytest.raises(BuildError, match=r"no folder to build in: .*other users can write it"),
        jobs.private_folder([shared]),
    ):
        pass
    assert list(shared.iterdir()) == []


_SOON = """
    from kernel_fusion.native import jobs
    jobs.PATIENCE_S = jobs.SIGN_OF_LIFE_S = 0.2
"""


def test_a_lock_that_nobody_frees(compiler: StandIn) -> None:
    """Patience has an end, and the build goes on without the lock."""
    folder = compiler.cache / "extension"
    cache.make_private_dir(folder)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = python(_SOON + _USE, env=compiler.env)
    assert result.stdout.split() == _WORKED
    assert "waiting for another process" in result.stderr
    assert "was not free for 0 s, so this process builds without it" in result.stderr


def test_a_lock_that_is_a_link(compiler: StandIn, tmp_path: Path) -> None:
    """It is not followed, and the file behind it keeps its content."""
    target = tmp_path / "precious"
    target.write_text("content")
    cache.make_private_dir(compiler.cache / "extension")
    (compiler.cache / "extension" / ".lock").symlink_to(target)
    assert python(_USE, env=compiler.env).stdout.split() == _WORKED
    assert target.read_text() == "content"


def test_a_fork_while_another_thread_builds(compiler: StandIn) -> None:
    """The child waits for its parent's build, as any other process does, and works."""
    compiler.set_action("sleep 1")
    code = """
        import os, sys, threading, time, warnings
        import torch, kernel_fusion as kf
        from kernel_fusion.operators import loader
        thread = threading.Thread(target=loader.load)
        thread.start()
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        warnings.simplefilter("ignore")  # Python's own, about forks of processes with threads
        child = os.fork()
        if not child:
            kf.layer_norm(torch.randn(3, 8), (8,), backend="cpu")
            os._exit(0 if loader.is_loaded() else 1)
        thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), loader.is_loaded())
    """
    assert python(code, compiler.log, env=compiler.env).stdout.split() == ["0", "True"]
    assert compiler.calls("link") == 1


def test_a_fork_waits_while_a_compiler_starts() -> None:
    """A child that had a copy of the pipe by which a compiler starts would keep its parent waiting for ever."""
    code = """
        import os, pathlib, threading, time, warnings
        from kernel_fusion.native import jobs
        starting, started = threading.Event(), threading.Event()
        def start(*_, **__):
            starting.set()
            time.sleep(0.3)
            started.set()
        jobs.subprocess.Popen = start
        folder = pathlib.Path(os.devnull)
        thread = threading.Thread(target=lambda: jobs._start([], folder, folder))
        thread.start()
        starting.wait()
        warnings.simplefilter("ignore")  # Python's own, about forks of processes with threads
        child = os.fork()
        if not child:
            os._exit(0 if started.is_set() else 1)
        thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert python(code).stdout.split() == ["0"]


_INTERRUPTED = """
    import torch, kernel_fusion as kf
    from kernel_fusion.native import library
    def interrupted(because):
        raise KeyboardInterrupt
    library.open_built = interrupted
    linear = torch.nn.Linear(8, 8)
    for call in (lambda: kf.rms_norm(torch.randn(2, 8), 8), lambda: kf.rms_norm(linear(torch.randn(2, 8)), 8).sum()):
        try:
            call()
            print("went on")
        except Exception as error:
            print(type(error).__name__)
        except KeyboardInterrupt:
            print("interrupted")
"""


def test_ctrl_c_while_the_extension_is_built() -> None:
    """Ctrl-C during the build of a first use is no error that a loop over bad batches would pass over."""
    assert python(_INTERRUPTED, env={"KERNEL_FUSION_BUILD": "1"}).stdout.split() == ["interrupted"] * 2


def test_first_use_at_exit(compiler: StandIn) -> None:
    """When the interpreter shuts down and starts no threads any more, the extension is built all the same."""
    code = """
        import atexit, torch, kernel_fusion as kf
        from kernel_fusion.operators import loader
        def use():
            kf.layer_norm(torch.randn(3, 8), (8,), backend="cpu")
            print(loader.is_loaded(), loader.launches("cpu_forward"))
        atexit.register(use)
    """
    assert python(code, env=compiler.env).stdout.split() == _WORKED


def test_a_compiler_with_arguments(compiler: StandIn) -> None:
    """CXX may hold more than a path, as `ccache g++` does, and the message shows it."""
    command = f"env {compiler.env['CXX']} -m64"
    result = python(_USE, env={**compiler.env, "CXX": command})
    assert result.stdout.split() == _WORKED
    assert f"/{command}," in result.stderr
    assert compiler.calls("link") == 1


def test_signs_of_life(compiler: StandIn) -> None:
    """While compilers run, the user sees how far they are."""
    compiler.set_action("sleep 0.5")
    result = python(_SOON + _USE, env=compiler.env)
    assert re.search(r"\d of \d parts are compiled after \d s", result.stderr)


def test_signs_of_life_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal each takes the place of the one before, and what follows that of the last."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for terminal, written in (
        (Terminal(), "begins\n10 s of 90\r20 s      \rbuilt     \n"),
        (io.StringIO(), "begins\n10 s of 90\n20 s\nbuilt\n"),
    ):
        monkeypatch.setattr(sys, "stderr", terminal)
        for line in ("begins", "\r10 s of 90", "\r20 s", "built"):
            library.say(line)
        assert terminal.getvalue() == written


def test_warmup_without_arguments(compiler: StandIn) -> None:
    """It builds what this machine needs, and says where it is."""
    command = "import sys; from kernel_fusion.__main__ import main; sys.argv[1:] = ['warmup']; main()"
    result = python(command, env=compiler.env)
    assert f"The extension is built: {compiler.built_library()}" in result.stdout
    assert "building its C++ extension" in result.stderr


def test_build_leaves_no_temporary_files(compiler: StandIn) -> None:
    """A finished build, and a failed one, clean up after themselves; PyTorch makes folders of its own there."""
    python(_USE, env=compiler.env)
    assert list((compiler.folder / "tmp").glob("kernel_fusion*")) == []
    shutil.rmtree(compiler.cache)
    compiler.set_action("exit 1")
    python(_FALLBACK, env=compiler.env)
    assert list((compiler.folder / "tmp").glob("kernel_fusion*")) == []


# Forward and backward of the verbs, several calls and threads, without the extension; prints why, and the warnings.
_FALLBACK = """
    import json, threading, warnings
    import torch, kernel_fusion as kf
    import torch.nn.functional as F
    from kernel_fusion.operators import loader

    def use():
        x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        dy = torch.randn(3, 8)
        for ours, theirs in ((kf.layer_norm, F.layer_norm), (kf.rms_norm, F.rms_norm)):
            results = []
            for verb in (ours, theirs):
                y = verb(x, (8,), w)
                results.append((y, *torch.autograd.grad(y, (x, w), dy)))
            torch.testing.assert_close(*results)
            assert torch.equal(ours(x, (8,), w), ours(x, (8,), w, backend="eager"))
        for verb in (
            lambda **o: kf.layer_norm(x, (8,), w, activation="relu", **o),
            lambda **o: kf.add_rms_norm(x, dy, (8,), w, **o).output,
            lambda **o: kf.bias_act(x, w, "gelu", **o),
            lambda **o: kf.gated_act(x, w, "silu", **o),
            lambda **o: kf.sum_squared(x, -1, **o),
            lambda **o: kf.mean_abs(x, **o),
            lambda **o: kf.softmax(x, mask=w, **o),
        ):
            both = [verb(), verb(backend="eager")]
            assert torch.equal(*both)
            assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in both))
        kf.act_dropout(x, "gelu", 0.5).sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        use()
        module = kf.FusedLayerNorm(8)
        module(torch.randn(3, 8)).sum().backward()
        assert kf.EXTENSION_LOADED is False
        try:
            kf.layer_norm(torch.randn(3, 8), (8,), backend="cpu")
        except kf.errors.BackendUnavailableError as error:
            refusal = str(error)
    explanation = kf.explain(kf.layer_norm, torch.randn(3, 8), (8,))
    print(json.dumps([[str(w.message) for w in caught], refusal, explanation.backend]))
"""


def _no_space(compiler: StandIn) -> Mapping[str, str | None]:
    compiler.set_action('echo "fatal error: No space left on device" >&2; exit 1')
    return compiler.env


def _no_space_for_temporary_files(compiler: StandIn) -> Mapping[str, str | None]:
    (compiler.folder / "sitecustomize.py").write_text(
        "import tempfile, errno\n"
        "def mkdtemp(*_, **__): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "tempfile.mkdtemp = mkdtemp\n"
    )
    return {**compiler.env, "PYTHONPATH": str(compiler.folder)}


def _no_utf8(compiler: StandIn) -> Mapping[str, str | None]:
    compiler.set_action("printf 'fatal error: \\351\\n' >&2; exit 1")
    return compiler.env


_OBSTACLES: dict[str, tuple[Callable[[StandIn], Mapping[str, str | None]], str]] = {
    "CXX-names-nothing": (lambda c: {**c.env, "CXX": "/no/c++ -m64"}, "CXX is '/no/c++ -m64', which names no program"),
    "CXX-without-an-end": (lambda c: {**c.env, "CXX": "'g++"}, "no C++ compiler was found: CXX is"),
    "nothing-on-PATH": (lambda c: {**c.env, "CXX": None, "PATH": "/no"}, "PATH has none of g++, clang++, c++"),
    "no-utf8-from-the-compiler": (_no_utf8, "fatal error: \N{REPLACEMENT CHARACTER}"),
    "no-space-for-the-compiler": (_no_space, "No space left on device"),
    "no-space-for-the-build": (_no_space_for_temporary_files, "No space left on device"),
    "not-a-compiler": (lambda c: {**c.env, "CXX": "/bin/false"}, "/bin/false"),
}


@pytest.mark.parametrize("obstacle", rest_slow(_OBSTACLES))
def test_everything_works_without_the_extension(compiler: StandIn, obstacle: str) -> None:
    """If the extension cannot be built, eager serves every call after exactly one warning with the reason."""
    arrange, reason = _OBSTACLES[obstacle]
    warned, refusal, backend = json.loads(python(_FALLBACK, env=arrange(compiler)).stdout)
    assert len(warned) == 1, warned
    assert reason in warned[0]
    assert warned[0].startswith("kernel_fusion works without its C++ extension")
    assert refusal.startswith("`layer_norm`: backend 'cpu' was requested, but its extension could not be built")
    assert backend == "eager"
