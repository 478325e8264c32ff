"""A build's tools: turns among processes, a private folder, parallel compilers.

The system releases `flock` with its process. The first call may come at shutdown, so no threads start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kernel_fusion.config import environment
from kernel_fusion.core.cache import make_private_dir, trusted
from kernel_fusion.errors import BuildError
from kernel_fusion.native.forks import no_fork

Say = Callable[[str], None]

PATIENCE_S = 1800.0  # several builds on a busy machine
SIGN_OF_LIFE_S = 10.0
_POLL_S = 0.02
_PREFIX = "kernel_fusion-builder-"
_STALE_S = 60.0  # an older folder without lock has no builder

_held: set[int] = set()  # descriptors with a lock


def _let_go() -> None:
    """Close a forked child's descriptors, which would keep a killed parent's locks."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


class _Clock:
    """Seconds since a start, and when to report."""

    def __init__(self) -> None:
        self.start = self.said = time.monotonic()
        self.asked = False

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def is_first(self) -> bool:
        """True once."""
        first, self.asked = not self.asked, True
        return first

    def is_due(self) -> bool:
        """Whether the last report is long ago; True is a report."""
        if time.monotonic() - self.said < SIGN_OF_LIFE_S:
            return False
        self.said = time.monotonic()
        return True


@contextmanager
def turn(folder: Path, say: Say) -> Iterator[None]:
    """One process at a time, by a lock in a private `folder`, but go on after `PATIENCE_S`."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    with _closing(file):
        with suppress(OSError):  # a file system without locks
            _wait(file, folder, say)
        yield


def _wait(file: int, folder: Path, say: Say) -> None:
    clock = _Clock()
    while not _lock(file):
        if clock.seconds() >= PATIENCE_S:
            say(f"kernel_fusion: {folder}/.lock was not free for {PATIENCE_S:.0f} s, so this process builds without it")
            return
        if clock.is_first():
            say("kernel_fusion: waiting for another process to build the extension ...")
        elif clock.is_due():
            say(f"\rkernel_fusion: still waiting after {clock.seconds():.0f} s ...")
        time.sleep(_POLL_S)


@contextmanager
def private_folder(places: Sequence[Path]) -> Iterator[Path]:
    """An empty folder in the first safe one of `places`, deleted afterwards, or BuildError."""
    folder = _new_folder(places)
    try:
        with _closing(os.open(folder, os.O_RDONLY)) as file:
            with suppress(OSError):  # some network file systems lock no folders
                _lock(file)
            _remove_stale(folder.parent)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _new_folder(places: Sequence[Path]) -> Path:
    problems = []
    for place in places:
        try:
            make_private_dir(place)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            problems.append(str(error))
            continue
        try:
            return trusted(folder)
        except OSError as error:
            folder.rmdir()
            problems.append(str(error))
    raise BuildError(f"there is no folder to build in: {'; '.join(problems)}")


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            info = path.lstat()
            if info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode) or time.time() - info.st_mtime < _STALE_S:
                continue
            with _closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                if _lock(file):
                    shutil.rmtree(path, ignore_errors=True)


def run(commands: Sequence[Sequence[str]], folder: Path, say: Say) -> None:
    """Run compilers, one per core at a time, with temporary files in `folder`.

    Raises:
        BuildError: one failed; the message has its first words.
        OSError: one cannot start.
    """
    waiting, clock = list(enumerate(commands)), _Clock()
    running: dict[int, subprocess.Popen[bytes]] = {}
    errors = [folder / f"{index}.errors" for index, _ in waiting]
    try:
        while waiting or running:
            while waiting and len(running) < num_cores():
                index, command = waiting.pop(0)
                running[index] = _start(command, folder, errors[index])
            time.sleep(_POLL_S)
            for index in [index for index, process in running.items() if process.poll() is not None]:
                if running.pop(index).returncode:
                    raise BuildError(f"the C++ compiler failed:\n{' '.join(commands[index])}\n{_head(errors[index])}")
            if clock.is_due():
                done = len(commands) - len(waiting) - len(running)
                say(f"\rkernel_fusion: {done} of {len(commands)} parts are compiled after {clock.seconds():.0f} s ...")
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)  # a compiler is several processes
            process.wait()


def _start(command: Sequence[str], folder: Path, errors: Path) -> subprocess.Popen[bytes]:
    with no_fork, errors.open("wb") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(TMPDIR=str(folder)),
            start_new_session=True,
        )


def num_cores() -> int:
    """This process's cores, at least two: compilers wait for files."""
    with suppress(AttributeError):  # not on macOS
        return max(2, len(os.sched_getaffinity(0)))
    return max(2, os.cpu_count() or 1)


def _head(errors: Path) -> str:
    """The first lines, which later ones mostly repeat."""
    return "\n".join(errors.read_text("utf-8", errors="replace").splitlines()[:20])


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _closing(file: int) -> Iterator[int]:
    """Close `file` with its lock; a forked child has done it."""
    _held.add(file)
    try:
        yield file
    finally:
        if file in _held:
            _held.discard(file)
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a child forked just now has a copy
            os.close(file)
