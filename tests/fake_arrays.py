"""A library with arrays of its own, as CuPy is one: they speak DLPack, and nothing here knows them by name."""

from __future__ import annotations

from typing import Any

import numpy as np


class Array:
    """Memory with a DLPack door and no other."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __dlpack__(self, **options: Any) -> Any:
        """The capsule."""
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device of the memory."""
        return self._values.__dlpack_device__()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values, for comparisons."""
        return self._values


def from_dlpack(source: Any) -> Array:
    """An array that shares the memory of `source`."""
    return Array(np.from_dlpack(source))
