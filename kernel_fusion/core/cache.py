"""A folder of compiled artefacts that can be trusted.

An entry is a file: a payload, then a trailer with the key and the SHA-256. A shared library can be loaded with those
trailing bytes. An entry that is damaged, or that others could write, counts as missing. An entry is checked and used
through one file descriptor, because another file may get the path meanwhile.
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
_STALE_S = 3600  # a temporary file older than this has no writer any more
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def digest(*parts: str | bytes) -> str:
    """The SHA-256 of the parts and of their lengths, in hexadecimal."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def seal(payload: bytes, key: str) -> bytes:
    """The content of an entry's file: the payload and its trailer."""
    return payload + bytes.fromhex(key) + hashlib.sha256(payload).digest() + _MAGIC


def unseal(content: bytes, key: str) -> memoryview | None:
    """The payload in a file's content, or None if the entry is damaged or has another key."""
    payload, trailer = memoryview(content)[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    expected = bytes.fromhex(key) + hashlib.sha256(payload).digest() + _MAGIC
    return payload if trailer == expected else None


@dataclass(frozen=True)
class Cache:
    """The entries of one kind: files `<cache_dir>/<kind>/<key><suffix>`."""

    kind: str
    suffix: str

    def path(self, key: str) -> Path:
        """The path of an entry, which need not exist."""
        return cache_dir() / self.kind / (key + self.suffix)

    def read(self, key: str) -> bytes | None:
        """The payload of an entry, or None if there is none that can be trusted."""
        try:
            file, payload = self._open(key)
        except OSError:
            return None
        os.close(file)
        return bytes(payload)

    def open(self, key: str) -> int | None:
        """A file descriptor of an entry, or None if there is none that can be trusted. The caller closes it."""
        try:
            return self._open(key)[0]
        except OSError:
            return None

    def _open(self, key: str) -> tuple[int, memoryview]:
        file, payload = open_sealed(self.path(key), key)
        with suppress(OSError):
            os.utime(file)  # `keep` goes by the last use
        return file, payload

    def write(self, key: str, payload: bytes) -> Path | None:
        """Store `payload` atomically. Return its path, or None if it could not be written."""
        try:
            path = self.path(key)
            replace_file(self.folder() / path.name, seal(payload, key))
        except OSError:
            return None
        return path

    def export(self, folder: Path, key: str, payload: bytes) -> None:
        """Store `payload` in another folder, readable by all users. Raises OSError if that fails."""
        path = folder / self.kind / (key + self.suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, seal(payload, key))
        path.chmod(0o644)

    def folder(self) -> Path:
        """The folder of this kind, created if it is missing. Raises OSError if others could change it."""
        folder = cache_dir() / self.kind
        make_private_dir(folder)
        return trusted(folder)

    def discard(self, key: str, file: int) -> None:
        """Close the descriptor `file`, and delete the entry if its path still leads to that file."""
        with suppress(OSError):
            path = self.path(key)
            if os.path.samestat(path.stat(), os.fstat(file)):
                path.unlink()
        os.close(file)

    def entries(self) -> list[Path]:
        """The paths of all entries of this kind, which are not checked."""
        try:
            paths = sorted((cache_dir() / self.kind).iterdir())
        except OSError:
            return []
        name = re.compile(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}{re.escape(self.suffix)}")
        return [path for path in paths if name.fullmatch(path.name) and path.is_file()]

    def size(self) -> int:
        """The size of all entries of this kind, in bytes."""
        return sum(path.stat().st_size for path in self.entries())

    def keep(self, count: int) -> None:
        """Delete all entries except the `count` that were used last, and temporary files whose writers were killed."""
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
        """Temporary files that are older than this many seconds."""
        paths = (cache_dir() / self.kind).glob(f"{_TEMPORARY}*")
        return [path for path in paths if time.time() - path.lstat().st_mtime >= seconds]


EXTENSIONS = Cache("extension", ".so")
CUBINS = Cache("cubin", ".cubin")


def open_sealed(path: Path, key: str, *, installed: bool = False) -> tuple[int, memoryview]:
    """Open and unseal an entry, or raise OSError if it is not trusted and whole; `installed` as for `open_private`."""
    file, content = open_private(path, installed=installed)
    payload = unseal(content, key)
    if payload is None:
        os.close(file)
        raise OSError(errno.EBADMSG, "it is damaged, or of another version", str(path))
    return file, payload


def open_private(path: Path, *, installed: bool = False) -> tuple[int, bytes]:
    """Open and read a file that only this user and root can write; otherwise raise OSError.

    A file that was `installed` may also be writable by a group that has no other member, as many systems' umask has it.
    """
    folder = trusted(path.parent, installed=installed)
    file = os.open(folder / path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not make this wait
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or _others_write(info, own_group=installed) or info.st_uid not in _us():
            raise PermissionError(errno.EPERM, "it is not a file of this user alone", str(path))
        with open(file, "rb", closefd=False) as content:
            return file, content.read()
    except BaseException:
        os.close(file)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only. Raises OSError if that fails."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private_dir(path: Path) -> None:
    """Create a folder, and those of its parents that are missing, with mode 0700."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def trusted(folder: Path, *, installed: bool = False) -> Path:
    """The real path of `folder`, if only this user and root can change or replace it.

    The folders of the path are checked from the root down, so that nobody can replace one that was checked.
    `installed` is as for `open_private`.

    Raises:
        PermissionError: others can change the folder, or one of its parents, which the error names.
        OSError: the folder does not exist.
    """
    real = Path(os.path.realpath(folder, strict=True))
    for part in (*reversed(real.parents), real):
        info = part.lstat()
        if info.st_uid not in (_us() if part == real else {*_us(), *_outsiders()}):
            raise PermissionError(errno.EPERM, "it belongs to another user", str(part))
        if part != real and info.st_mode & stat.S_ISVTX:
            continue  # in a folder with the sticky bit only owners can rename
        if _others_write(info, own_group=installed or part != real):
            raise PermissionError(errno.EPERM, "other users can write it", str(part))
    return real


def _others_write(info: os.stat_result, *, own_group: bool) -> bool:
    """Whether others can write this file or folder; this user's `own_group` may be no other."""
    writers = info.st_mode & _OTHERS_WRITE
    return bool(writers) and not (own_group and writers == stat.S_IWGRP and _is_own_group(info.st_gid))


def _us() -> set[int]:
    return {os.geteuid(), 0}


@lru_cache
def _is_own_group(group: int) -> bool:
    """Whether this user is the only member of the group."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == user and set(members.gr_mem) <= {user}


@lru_cache
def _outsiders() -> frozenset[int]:
    """The user id by which a container shows all users that it does not map, the host's root among them."""
    try:
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return frozenset()
    known = any(inside <= nobody < inside + count for inside, _, count in ranges)
    return frozenset() if known else frozenset({nobody})
