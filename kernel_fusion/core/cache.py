"""A folder of compiled artefacts that can be trusted.

An entry is a payload and a trailer with its key and SHA-256; a shared library loads with trailing bytes. Whatever is
damaged or writable by others is a miss. One descriptor checks and uses an entry, because a path may change meanwhile.
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
_STALE_S = 3600  # older temporary files have no writer
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts and their lengths."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def seal(payload: bytes, key: str) -> bytes:
    """An entry's file content."""
    return payload + bytes.fromhex(key) + hashlib.sha256(payload).digest() + _MAGIC


def unseal(content: bytes, key: str) -> memoryview | None:
    """The payload of a whole entry, or None."""
    payload, trailer = memoryview(content)[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    expected = bytes.fromhex(key) + hashlib.sha256(payload).digest() + _MAGIC
    return payload if trailer == expected else None


@dataclass(frozen=True)
class Cache:
    """Files `<cache_dir>/<kind>/<key><suffix>`."""

    kind: str
    suffix: str

    def path(self, key: str) -> Path:
        """An entry's path."""
        return cache_dir() / self.kind / (key + self.suffix)

    def read(self, key: str) -> bytes | None:
        """A trusted entry's payload, or None."""
        try:
            file, payload = self._open(key)
        except OSError:
            return None
        os.close(file)
        return bytes(payload)

    def open(self, key: str) -> int | None:
        """A trusted entry's descriptor, or None."""
        try:
            return self._open(key)[0]
        except OSError:
            return None

    def _open(self, key: str) -> tuple[int, memoryview]:
        path = self.path(key)
        file, content = open_private(path)
        try:
            payload = unseal(content, key)
            if payload is None:
                raise OSError(errno.EBADMSG, "it is damaged", str(path))
            with suppress(OSError):
                os.utime(file)  # for `keep`
        except BaseException:
            os.close(file)
            raise
        return file, payload

    def write(self, key: str, payload: bytes) -> Path | None:
        """Store `payload` atomically; its path, or None."""
        try:
            path = self.path(key)
            replace_file(self.folder() / path.name, seal(payload, key))
        except OSError:
            return None
        return path

    def export(self, folder: Path, key: str, payload: bytes) -> None:
        """Store `payload` in another folder, for all users; raises OSError."""
        path = folder / self.kind / (key + self.suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, seal(payload, key))
        path.chmod(0o644)

    def folder(self) -> Path:
        """This kind's folder, created if missing; raises OSError if others could change it."""
        folder = cache_dir() / self.kind
        make_private_dir(folder)
        return trusted(folder)

    def discard(self, key: str, file: int) -> None:
        """Close `file`, and delete the entry if it is that file."""
        with suppress(OSError):
            path = self.path(key)
            if os.path.samestat(path.stat(), os.fstat(file)):
                path.unlink()
        os.close(file)

    def entries(self) -> list[Path]:
        """This kind's files, unchecked."""
        try:
            paths = sorted((cache_dir() / self.kind).iterdir())
        except OSError:
            return []
        name = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}{re.escape(self.suffix)}")
        return [path for path in paths if name.fullmatch(path.name) and path.is_file()]

    def size(self) -> int:
        """Their bytes."""
        return sum(path.stat().st_size for path in self.entries())

    def keep(self, count: int) -> None:
        """Delete killed writers' files, and all but the `count` last used entries."""
        with suppress(OSError):
            by_use = sorted(self.entries(), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in (*by_use[count:], *self._left_behind(_STALE_S)):
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete every entry."""
        with suppress(OSError):
            for path in (*self.entries(), *self._left_behind(0)):
                path.unlink(missing_ok=True)
            (cache_dir() / self.kind).rmdir()

    def _left_behind(self, seconds: float) -> list[Path]:
        """Temporary files this old."""
        paths = (cache_dir() / self.kind).glob(f"{_TEMPORARY}*")
        return [path for path in paths if time.time() - path.lstat().st_mtime >= seconds]


EXTENSIONS = Cache("extension", ".so")
CUBINS = Cache("cubin", ".cubin")


def open_private(path: Path) -> tuple[int, bytes]:
    """The descriptor and content of a file that only this user or root can write, or OSError."""
    folder = trusted(path.parent)
    file = os.open(folder / path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # never wait for a pipe
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
    """Write a file atomically, for its owner only; raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private_dir(path: Path) -> None:
    """Create `path` and its parents with mode 0700."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def trusted(folder: Path) -> Path:
    """The real path of `folder`, which only this user and root can change or replace.

    Checks go from the root down, so nobody else can replace what it holds.

    Raises:
        PermissionError: others can change it or the named parent.
        OSError: it does not exist.
    """
    real = Path(os.path.realpath(folder, strict=True))
    for part in (*reversed(real.parents), real):
        info = part.lstat()
        if info.st_uid not in (_us() if part == real else {*_us(), *_outsiders()}):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(part))
        writers = info.st_mode & _OTHERS_WRITE
        if part != real and (info.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_own_group(info.st_gid))):
            continue  # in a sticky folder only owners rename
        if writers:
            raise PermissionError(errno.EPERM, "other users can write it", str(part))
    return real


def _us() -> set[int]:
    return {os.geteuid(), 0}


@lru_cache
def _is_own_group(group: int) -> bool:
    """Whether the group has no other member."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == user and set(members.gr_mem) <= {user}


@lru_cache
def _outsiders() -> frozenset[int]:
    """The id of unmapped users in a container, root among them."""
    try:
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset()
    known = any(inside <= nobody < inside + count for inside, _, count in ranges)
    return frozenset() if known else frozenset({nobody})
