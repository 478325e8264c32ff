"""A folder of compiled artefacts that can be trusted: private, atomic, and checked before anything is loaded.

An entry is the payload followed by a trailer that holds its key and its SHA-256. A trailer rather than a header,
because a shared library with trailing bytes is still one for the dynamic loader. A file that is truncated, damaged,
made for another key, or that another user owns or can write, is a miss. Every failure to write is a miss too: a
read-only or full disk costs time, never correctness.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernel_fusion.config import cache_dir

_MAGIC = b"kernel_fusion cache entry 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_TRAILER_BYTES = 2 * _DIGEST_BYTES + len(_MAGIC)


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
        path = self.path(key)
        try:
            if not (_is_private(path.parent) and _is_private(path)):
                return None
            return unseal(path.read_bytes(), key)
        except OSError:
            return None

    def write(self, key: str, payload: bytes) -> Path | None:
        """Store `payload` by an atomic rename; the path, or None where it cannot be stored."""
        path = self.path(key)
        try:
            make_private_dir(path.parent)
            if not _is_private(path.parent):
                return None
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        except OSError:
            return None
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(seal(payload, key))
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            return None
        return path

    def entries(self) -> list[Path]:
        """The files of this kind, unchecked."""
        folder = cache_dir() / self.kind
        return sorted(folder.glob(f"*{self.suffix}")) if folder.is_dir() else []

    def size(self) -> int:
        """Bytes that the entries take."""
        return sum(path.stat().st_size for path in self.entries())

    def clear(self) -> None:
        """Delete every entry."""
        shutil.rmtree(cache_dir() / self.kind, ignore_errors=True)


EXTENSIONS = Cache("extension", ".so")
CUBINS = Cache("cubin", ".cubin")


def make_private_dir(path: Path) -> None:
    """Create `path` and its missing parents for the owner alone (mode 0700)."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def _is_private(path: Path) -> bool:
    """Whether only this user (or root) could have written `path`."""
    info = path.lstat()
    owned = info.st_uid in (os.getuid(), 0)
    return owned and not stat.S_ISLNK(info.st_mode) and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
