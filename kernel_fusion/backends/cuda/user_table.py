"""The user's table: what `kernel-fusion tune` measured, a file per device name in the cache folder.

Each row is for one kernel and sets only `KNOBS`. A file with anything else, or that others could have written, is
ignored with one warning.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.config import cache_dir, uses_tuned_tables
from kernel_fusion.core.cache import open_private
from kernel_fusion.core.spec import ROWS, VECTORS, Stages

# The rows of a knob: value, conditions, evidence.
Row = tuple[Any, dict[str, Any], str]
Table = dict[str, list[Row]]

# These decide who executes a row, not how it is spread and summed.
KNOBS: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {
        "ahead": (False, True),
        "bound": (False, True),
        "variant": ("", "early", "anew"),
        "parameters": (4, 8, 16, 32),
        "helpers": (0, 1, 2),
        "keeps_pace": (False, True),
        "pace": ([6, 15], [7, 15], [8, 15], [9, 15]),
        "shifted": (False, True),
    },
    "backward": {
        "threads": (384, 512, 1024),
        "roomy": (False, True),
        "slots": (2, 3, 4),
        "keeps_pace": (False, True),
        "streamed_variant": ("", "few"),
    },
}
# All of these are a row's conditions, so it holds for one kernel.
_STAGES = ("residual", *(field.name for field in fields(Stages)))
_BOTH = ("rms", "cols", "dtype", "x", "y", "weight", "offset", *_STAGES)
_GRADS = ("dx", "dweight", "dbias", "dh", "dresidual", "dgate", "one_row")
CONDITIONS = {
    "forward": (*_BOTH, "bias", "align", "strided"),
    "backward": (*_BOTH, *_GRADS, "align", "strided"),  # reads no bias
}
# The type of each condition's value: a number, such as an item size that is 0 for an absent tensor; a name; or a flag.
_TYPES: dict[str, type] = dict.fromkeys(("cols", "x", "y", "weight", "bias", "residual", "align", *ROWS, *VECTORS), int)
_TYPES |= {"dtype": str} | {name: str for name, kind in get_type_hints(Stages).items() if kind is str}


def section(direction: str) -> str:
    """The section of a table for kernels of a direction."""
    return "backward" if direction == "backward" else "forward"


def path_of(device: str) -> Path:
    """A device's table, existing or not."""
    return cache_dir() / "tuned" / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def users_table(device: Device, direction: str) -> Table:
    """The user's rows; none for an absent device."""
    if not device.name or not uses_tuned_tables():
        return {}
    return read_once(path_of(device.name), device.name).get(section(direction), {})


@cache
def read_once(path: Path, device: str) -> dict[str, Table]:
    """The table in a file, empty if there is none, as it was when this process first read it."""
    try:
        return read(path, device)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"kernel_fusion ignores the table of tuned plans {path}: {error}", stacklevel=2)
        return {}


def read(path: Path, device: str) -> dict[str, Table]:
    """The table in a file, by section.

    Raises:
        OSError: it cannot be read or trusted.
        ValueError: it is no table for this device.
    """
    file, content = open_private(path)
    os.close(file)
    try:
        stored = json.loads(content)
        if stored["device"] != device:
            raise ValueError(f"it is for {stored['device']}, not for {device}")
        return {
            part: {knob: [_row(part, knob, row) for row in listed] for knob, listed in stored[part].items()}
            for part in KNOBS
        }
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("it is not a table that `kernel-fusion tune` wrote") from error


def _row(part: str, knob: str, row: Any) -> Row:
    value, conditions, shown = row
    # Python takes 128.0 and 128, true and 1 for equal; JSON's texts differ.
    known = json.dumps(value) in map(json.dumps, KNOBS[part][knob])
    typed = all(type(wanted) is _TYPES.get(name, bool) for name, wanted in conditions.items())
    if not known or {*conditions} != {*CONDITIONS[part]} or not typed:
        raise ValueError(f"`kernel-fusion tune` writes no such row for {part}, {knob}: {row}")
    return value, conditions, str(shown)
