"""A folder of compiled artefacts that can be trusted: private, atomic, and checked before anything is loaded.

An entry is the payload followed by a trailer that holds its key and its SHA-256. A trailer rather than a header,
because a shared library with trailing bytes is still one for the dynamic loader. A file that is truncated, damaged,
made for another key, or that another user could have written, is a miss. An entry is checked and used through one file
descriptor, since a path may lead elsewhere a moment later. Every failure to write is a miss too: a read-only or full
disk costs time, never correctness.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kernel_fusion.config import cache_dir

_MAGIC = b"kernel_fusion cache entry 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_TRAILER_BYTES = 2 * _DIGEST_BYTES + len(_MAGIC)
_TEMPORARY = ".tmp-"
_STALE_S = 3600  # a temporary file of that age has no writer any more
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def digest(*parts: str | bytes) -> str:
    """Hexadecimal SHA-256 of the parts, each with its length so that no two lists of parts agree."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def seal(payload: bytes, key: str) -> bytes:
    """The file content for `payload` under the hexadecimal `key`."""
    return payload + bytes.fromhex(key) + hashlib.sha256(payload).digest() + _MAGIC


def unseal(content: bytes, key: str) -> bytes | None:
    """The payload, or None where `content` is not a whole entry for `key`."""
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    expected = bytes.fromhex(key) + hashlib.sha256(payload).digest() + _MAGIC
    return payload if trailer == expected else None


@dataclass(frozen=True)
class Cache:
    """One kind of artefact: files `<cache_dir>/<kind>/<key><suffix>`."""

    kind: str
    suffix: str

    def path(self, key: str) -> Path:
        """Where the entry of `key` is or would be."""
        return cache_dir() / self.kind / (key + self.suffix)

    def read(self, key: str) -> bytes | None:
        """The payload of `key`, or None where there is no entry that can be trusted."""
        try:
            file, payload = self._open(key)
        except OSError:
            return None
        os.close(file)
        return payload

    def open(self, key: str) -> int | None:
        """A descriptor of the entry of `key`, its content checked; None where there is none that can be trusted."""
        try:
            return self._open(key)[0]
        except OSError:
            return None

    def _open(self, key: str) -> tuple[int, bytes]:
        path = self.path(key)
        file, content = open_private(path)
        try:
            payload = unseal(content, key)
            if payload is None:
                raise OSError(errno.EBADMSG, "it is damaged", str(path))
            with suppress(OSError):
                os.utime(file)  # `keep` goes by the time of the last use
        except BaseException:
            os.close(file)
            raise
        return file, payload

    def write(self, key: str, payload: bytes) -> Path | None:
        """Store `payload` by an atomic rename; the path, or None where it cannot be stored."""
        try:
            path = self.path(key)
            replace_file(self.folder() / path.name, seal(payload, key))
        except OSError:
            return None
        return path

    def export(self, folder: Path, key: str, payload: bytes) -> None:
        """Store `payload` in another cache folder, which every user may read; OSError where that is impossible."""
        path = folder / self.kind / (key + self.suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, seal(payload, key))
        path.chmod(0o644)

    def folder(self) -> Path:
        """The real path of the folder of this kind, made if need be.

        Raises:
            OSError: it cannot be made, or others could change it.
        """
        folder = cache_dir() / self.kind
        make_private_dir(folder)
        return trusted(folder)

    def discard(self, key: str, file: int) -> None:
        """Close `file`, and delete the entry of `key` if it is still that file."""
        with suppress(OSError):
            path = self.path(key)
            if os.path.samestat(path.stat(), os.fstat(file)):
                path.unlink()
        os.close(file)

    def entries(self) -> list[Path]:
        """The files of this kind, unchecked."""
        try:
            paths = sorted((cache_dir() / self.kind).iterdir())
        except OSError:
            return []
        name = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}{re.escape(self.suffix)}")
        return [path for path in paths if name.fullmatch(path.name) and path.is_file()]

    def size(self) -> int:
        """Bytes that the entries take."""
        return sum(path.stat().st_size for path in self.entries())

    def keep(self, count: int) -> None:
        """Delete all entries but the `count` that were used last, and what killed writers left."""
        with suppress(OSError):
            by_use = sorted(self.entries(), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in (*by_use[count:], *self._left_behind(_STALE_S)):
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete every entry; files that are none of ours stay."""
        with suppress(OSError):
            for path in (*self.entries(), *self._left_behind(0)):
                path.unlink(missing_ok=True)
            (cache_dir() / self.kind).rmdir()

    def _left_behind(self, seconds: float) -> list[Path]:
        """Temporary files of that age."""
        paths = (cache_dir() / self.kind).glob(f"{_TEMPORARY}*")
        return [path for path in paths if time.time() - path.lstat().st_mtime >= seconds]


EXTENSIONS = Cache("extension", ".so")
CUBINS = Cache("cubin", ".cubin")


def open_private(path: Path) -> tuple[int, bytes]:
    """A descriptor of a file that only this user or root could have written, and its content.

    Raises:
        OSError: there is no such file, or it cannot be trusted.
    """
    folder = trusted(path.parent)
    file = os.open(folder / path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & _OTHERS_WRITE or info.st_uid not in _us():
            raise PermissionError(errno.EPERM, "it is not a file of this user alone", str(path))
        with open(file, "rb", closefd=False) as content:
            return file, content.read()
    except BaseException:
        os.close(file)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, for its owner alone.

    Raises:
        OSError: it cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private_dir(path: Path) -> None:
    """Create `path` and its missing parents for the owner alone (mode 0700)."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def trusted(folder: Path) -> Path:
    """The real path of `folder`, where nobody but this user and root can change what it holds or what it is.

    Looked at from the root down, because no one else can replace what lies in a folder that has passed.

    Raises:
        PermissionError: others can change `folder` or what it lies in; the message says which.
        OSError: there is no such folder.
    """
    real = Path(os.path.realpath(folder, strict=True))
    for part in (*reversed(real.parents), real):
        info = part.lstat()
        if info.st_uid not in (_us() if part == real else {*_us(), *_outsiders()}):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(part))
        writers = info.st_mode & _OTHERS_WRITE
        if part != real and (info.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_own_group(info.st_gid))):
            continue  # in a sticky folder nobody renames what is another's
        if writers:
            raise PermissionError(errno.EPERM, "other users can write it", str(part))
    return real


def _us() -> set[int]:
    """Who may write what we load."""
    return {os.geteuid(), 0}


@lru_cache
def _is_own_group(group: int) -> bool:
    """Whether a group is this user's alone: many systems give each user one, and let it write all that they make."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == user and set(members.gr_mem) <= {user}


@lru_cache
def _outsiders() -> frozenset[int]:
    """The user who stands for root, among others, in a container whose user namespace has no number for root."""
    try:
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset()
    known = any(inside <= nobody < inside + count for inside, _, count in ranges)
    return frozenset() if known else frozenset({nobody})
