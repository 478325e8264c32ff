"""The artefact cache: whole, private entries of the right key are read; everything else is a miss, never an error."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_fusion.config import cache_dir
from kernel_fusion.core import cache
from kernel_fusion.core.cache import Cache, digest
from kernel_fusion.errors import KernelFusionError

KEY, OTHER_KEY = digest("a key"), digest("another key")
PAYLOAD = bytes(range(256)) * 40

_only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user or group")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(folder: Path) -> Cache:
    """A kind of entry with one entry stored."""
    store = Cache("kind", ".bin")
    assert store.write(KEY, PAYLOAD) == store.path(KEY)
    return store


def test_reads_what_was_written(store: Cache) -> None:
    """A stored payload comes back, and only under its key."""
    assert store.read(KEY) == PAYLOAD
    assert store.read(OTHER_KEY) is None


def test_files_are_private(store: Cache, folder: Path) -> None:
    """Folders have mode 0700 and files are the owner's alone, whatever the umask."""
    previous = os.umask(0)
    try:
        other = Cache("other", ".bin")
        other.write(KEY, PAYLOAD)
    finally:
        os.umask(previous)
    for path in (folder, folder / "kind", folder / "other"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(other.path(KEY).stat().st_mode) == 0o600


def test_digest_separates_its_parts() -> None:
    """Parts that read alike when joined have different digests."""
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", "")}) == 4


def _foreign(path: Path) -> None:
    """Another key's whole entry under this key's name."""
    store = Cache("kind", ".bin")
    store.write(OTHER_KEY, PAYLOAD)
    store.path(OTHER_KEY).rename(path)


def _symlink(path: Path) -> None:
    """A link to a whole entry elsewhere, which someone else could replace."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: len(PAYLOAD) // 2]),
    "headless": lambda path: path.write_bytes(path.read_bytes()[1:]),
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "one-bit": _flip,
    "foreign": _foreign,
    "symlink": _symlink,
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "group-writable": lambda path: path.chmod(0o620),
    "world-writable": lambda path: path.chmod(0o602),
    "group-writable-folder": lambda path: path.parent.chmod(0o770),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_untrusted_entries_are_misses(store: Cache, damage: str) -> None:
    """Damaged, foreign and writable-by-others entries are not returned."""
    _DAMAGE[damage](store.path(KEY))
    assert store.read(KEY) is None


@pytest.mark.parametrize("damage", [name for name in _DAMAGE if name not in ("directory", "group-writable-folder")])
def test_untrusted_entries_are_replaced(store: Cache, damage: str) -> None:
    """Writing again heals an entry that cannot be trusted."""
    _DAMAGE[damage](store.path(KEY))
    assert store.write(KEY, PAYLOAD) is not None
    assert store.read(KEY) == PAYLOAD


@_only_root
@pytest.mark.parametrize("which", ["file", "folder"])
def test_entries_of_another_user_are_misses(store: Cache, which: str) -> None:
    """An entry of another user is not returned."""
    path = store.path(KEY)
    os.chown(path if which == "file" else path.parent, 65534, 65534)
    assert store.read(KEY) is None


def test_folder_that_others_can_write_is_not_used(store: Cache) -> None:
    """Nothing is stored where another user could replace it."""
    store.path(KEY).parent.chmod(0o777)
    assert store.write(OTHER_KEY, PAYLOAD) is None


def test_what_was_checked_is_what_is_used(store: Cache) -> None:
    """Whoever has opened an entry keeps reading the file that was checked, whatever the path leads to by then."""
    file = store.open(KEY)
    assert file is not None
    store.path(KEY).rename(store.path(OTHER_KEY))
    store.path(KEY).write_bytes(b"another's")
    assert os.pread(file, len(PAYLOAD), 0) == PAYLOAD
    store.discard(KEY, file)  # it is another file by now
    assert store.path(KEY).exists()


_ANCESTORS = [
    pytest.param(lambda path: path.chmod(0o757), False, id="others write"),
    pytest.param(lambda path: path.chmod(0o1777), True, id="others write, sticky"),
    pytest.param(
        lambda path: (os.chown(path, -1, 12345), path.chmod(0o770)), False, id="a group writes", marks=_only_root
    ),
    pytest.param(lambda path: os.chown(path, 65534, -1), False, id="another user", marks=_only_root),
]


@pytest.mark.parametrize(("change", "is_trusted"), _ANCESTORS)
def test_ancestors_that_others_can_change(
    store: Cache, folder: Path, change: Callable[[Path], Any], is_trusted: bool
) -> None:
    """A folder is as trustworthy as those above it; in a sticky one nobody replaces what is ours."""
    change(folder)
    assert (store.read(KEY) is not None) == (store.write(OTHER_KEY, PAYLOAD) is not None) == is_trusted


def test_a_group_of_ones_own(store: Cache, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If every user has a group and umask lets it write, the cache works."""
    folder.chmod(0o770)
    monkeypatch.setattr(cache, "_is_own_group", lambda group: group == folder.stat().st_gid)
    assert store.read(KEY) == PAYLOAD


@pytest.mark.parametrize(("name", "members", "own"), [("me", [], True), ("me", ["you"], False), ("us", [], False)])
def test_whose_group_it_is(name: str, members: list[str], own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own group has the user's name and no other member."""
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda group: SimpleNamespace(gr_name=name, gr_mem=members))
    assert cache._is_own_group.__wrapped__(1) == own


@pytest.mark.parametrize(("uid_map", "outsiders"), [("0 0 4294967295", set()), ("1000 1000 1", {65534}), ("?", set())])
def test_who_stands_for_root_in_a_container(uid_map: str, outsiders: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The overflow user, where the user namespace has no number for it."""
    monkeypatch.setattr(Path, "read_text", lambda path: uid_map if path.name == "uid_map" else "65534")
    assert cache._outsiders.__wrapped__() == outsiders


def test_a_link_to_a_trusted_folder(store: Cache, folder: Path) -> None:
    """A home's cache may lie on another disk."""
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    assert store.read(KEY) == PAYLOAD
    folder.with_name("elsewhere").chmod(0o777)
    assert store.read(KEY) is None


_VARIABLES: dict[str, tuple[dict[str, str], str]] = {
    "home": ({"HOME": "/home/me"}, "/home/me/.cache/kernel_fusion"),
    "xdg": ({"HOME": "/home/me", "XDG_CACHE_HOME": "/xdg"}, "/xdg/kernel_fusion"),
    "xdg with ~": ({"HOME": "/home/me", "XDG_CACHE_HOME": "~/xdg"}, "/home/me/xdg/kernel_fusion"),
    "relative xdg": ({"HOME": "/home/me", "XDG_CACHE_HOME": "xdg"}, "/home/me/.cache/kernel_fusion"),
    "ours": ({"HOME": "/home/me", "XDG_CACHE_HOME": "/xdg", "KERNEL_FUSION_CACHE_DIR": "/ours"}, "/ours"),
    "ours with ~": ({"HOME": "/home/me", "KERNEL_FUSION_CACHE_DIR": "~/ours"}, "/home/me/ours"),
    "ours, relative": ({"HOME": "/home/me", "KERNEL_FUSION_CACHE_DIR": "ours"}, f"{Path.cwd()}/ours"),
    "no home": ({}, f"{tempfile.gettempdir()}/kernel_fusion-{os.getuid()}"),
}


@pytest.mark.parametrize("variables", _VARIABLES)
def test_where_the_cache_is(variables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is a home, a relative XDG folder is ignored, and a user whom the system does not know has a folder too."""

    def unknown(_: int) -> Any:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    values, place = _VARIABLES[variables]
    for name in ("HOME", "XDG_CACHE_HOME", "KERNEL_FUSION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir()) == place


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "KERNEL_FUSION_CACHE_DIR"])
def test_the_home_of_an_unknown_user_is_no_folder(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~nobody-here/x` is an error that names the variable; no folder `~nobody-here` is made in the current one."""
    monkeypatch.delenv("KERNEL_FUSION_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "~nobody-here/x")
    with pytest.raises(KernelFusionError, match=rf"{variable} is '~nobody-here/x', but no user of that name"):
        Cache("kind", ".bin").write(KEY, PAYLOAD)


def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder below a regular file can be neither made nor written: misses, no error."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KERNEL_FUSION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    store = Cache("kind", ".bin")
    assert store.write(KEY, PAYLOAD) is None
    assert store.read(KEY) is None
    assert (store.entries(), store.size()) == ([], 0)
    store.clear()


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "replace"])
def test_no_space(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A full disk, whichever call meets it, is a miss that leaves no file behind."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFile:
        def __init__(self, handle: int, _: str) -> None:
            self.handle = handle

        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        write = full

    owner, name, value = {
        "mkdir": (Path, "mkdir", full),
        "open": (cache.tempfile, "mkstemp", full),
        "write": (cache.os, "fdopen", FullFile),
        "replace": (cache.os, "replace", full),
    }[call]
    store = Cache("kind", ".bin")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert store.write(KEY, PAYLOAD) is None
    assert not folder.exists() or [path for path in folder.rglob("*") if path.is_file()] == []
    assert store.read(KEY) is None


def test_entries_size_and_clear(store: Cache, folder: Path) -> None:
    """The inventory counts this kind's entries, and clearing removes them alone."""
    other = Cache("other", ".bin")
    other.write(KEY, PAYLOAD)
    assert store.entries() == [store.path(KEY)]
    assert store.size() == store.path(KEY).stat().st_size > len(PAYLOAD)
    store.clear()
    assert store.entries() == []
    assert other.read(KEY) == PAYLOAD


def test_the_entries_used_last_are_kept(folder: Path) -> None:
    """Reading is a use; what a killed writer left goes too, once it is old."""
    store, keys = Cache("kind", ".bin"), [digest(str(i)) for i in range(4)]
    for age, key in enumerate(keys):
        store.write(key, PAYLOAD)
        os.utime(store.path(key), (1000 - age, 1000 - age))
    assert store.read(keys[3]) == PAYLOAD
    old, new = folder / "kind" / ".tmp-old", folder / "kind" / ".tmp-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (1000, 1000))
    store.keep(2)
    assert store.entries() == sorted(map(store.path, (keys[0], keys[3])))
    assert (old.exists(), new.exists()) == (False, True)


def test_clearing_leaves_what_is_not_ours(store: Cache, folder: Path) -> None:
    """Somebody's notes, or a folder, that lie in the cache are still there."""
    (folder / "kind" / "notes.bin").write_text("mine")
    (folder / "kind" / "folder").mkdir()
    (folder / "kind" / ".tmp-left").touch()
    store.clear()
    assert sorted(path.name for path in (folder / "kind").iterdir()) == ["folder", "notes.bin"]
    assert store.size() == 0
