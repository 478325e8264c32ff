"""Options of the commands that name cases to measure, and the files and folders that they write."""

from __future__ import annotations

import datetime
import errno
import itertools
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import typer

from kernel_fusion.cli.common import parse_dtypes, split

Name = TypeVar("Name", bound=str)


def parse_dtype(text: str, option: str) -> torch.dtype:
    """The dtype of an option that takes one."""
    several = parse_dtypes(text)
    if len(several) > 1:
        raise typer.BadParameter(f"expected one dtype, got {text!r}", param_hint=option)
    return several[0]


def parse_shape(text: str) -> tuple[int, int]:
    """Rows and columns, from a shape such as "512x3000"."""
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text, re.ASCII)
    if not match or not all(map(int, match.groups())):
        raise typer.BadParameter(f"expected rows x columns such as 512x3000, got {text!r}", param_hint="--shape")
    return int(match[1]), int(match[2])


def names(text: str, known: Iterable[Name], what: str) -> list[Name]:
    """The members of `known` in a comma-separated list; raises with all of them if one is unknown."""
    by_name = {str(name): name for name in known}
    unknown = [part for part in split(text) if part not in by_name]
    if unknown:
        raise typer.BadParameter(f"no {what} is called {', '.join(unknown)}; there are: {', '.join(by_name)}")
    return [by_name[part] for part in split(text)]


def replaceable(path: Path, is_ours: Callable[[Path], object]) -> Path:
    """The path of a file to write: a new one, or one that the same command wrote.

    Args:
        path: where the file is to be.
        is_ours: tells whether a file that is there comes from us, by its result or a ValueError.

    Raises:
        FileExistsError: there is another file.
    """
    with suppress(ValueError):
        if not path.exists() or is_ours(path):
            return path
    raise FileExistsError(errno.EEXIST, "this file is not of kernel-fusion, which does not overwrite it", str(path))


def new_folder(name: str) -> Path:
    """A new folder in the working directory for the files of this run."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = first = Path("kernel-fusion-results", f"{stamp}-{name}")
    for count in itertools.count(2):
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
        folder = first.with_name(f"{first.name}-{count}")
    return folder
