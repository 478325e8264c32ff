"""Tables of values that measured better than the rule, or are safer.

Three tables are asked in turn: the user's, the architecture's and tuned/any.json. In a table, each knob of the rule has
rows with a value, conditions and evidence. The first row whose conditions hold counts. A condition holds if the fact is
the given value or one of the given names, lies between two given numbers (null: no bound) or, after "not", is none of
these.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.tree import Tree, ceil_div, vector_of
from kernel_fusion.backends.cuda.user_table import Row, Table, section
from kernel_fusion.core.activations import IDENTITY
from kernel_fusion.core.spec import ITEMSIZE, ROWS, VECTORS, Access, RowNormSpec, Stages
from kernel_fusion.core.stages import ACTIVATIONS_OF_STAGES

TABLES = Path(__file__).parent / "tuned"
_TENSORS = ("x", "y", "weight", "bias", "residual")
_FLAGS = ("rms", "cols", "offset", "changes_x", "dh", "dresidual", "dgate", "one_row")


class Facts:
    """What conditions can ask about: a spec, its access, a device and, once it is known, a tree.

    Attributes:
        users: the user's rows, which come before the shipped ones.
        came_from: the rows that counted so far, by knob.
    """

    tree: Tree

    def __init__(self, spec: RowNormSpec, access: Access, device: Device, users: Table) -> None:
        self.spec, self.access, self.device, self.vec = spec, access, device, vector_of(spec)
        # A user's rows were measured with whole rows.
        self.users, self.came_from = users if spec.passes == "both" else {}, dict[str, Row]()
        self.itemsize, self.row_bytes = ITEMSIZE[spec.x], spec.cols * ITEMSIZE[spec.x]
        # The bytes of an element of each tensor, 0 if it is absent.
        size = {name: ITEMSIZE.get(getattr(spec, name) or "", 0) for name in (*_TENSORS, *ROWS, *VECTORS)}
        stages = {field.name: getattr(spec, field.name) for field in fields(Stages)}
        self.known: dict[str, Any] = stages | size | {name: getattr(spec, name) for name in _FLAGS}
        self.known |= {
            "stages": spec.has_stages,
            "costly": not {stages[name] for name in ACTIVATIONS_OF_STAGES} <= {IDENTITY, "relu"},
            "like_x": spec.y == spec.x,
            "wide": max(size["weight"], size["bias"], size["y"]) > size["x"],  # wider than x
            "dy_wider": size["y"] > size["x"],
            "natural_vec": self.vec,
            "aligned": access.x >= 16,
            "clusters": device.has_clusters,
            "dtype": spec.x,
            "align": min(access.x, access.y, access.weight, access.dx, access.residual, access.pre_x),
            "strided": access.strided_x or access.strided_y or access.strided_residual or access.strided_pre_x,
        }
        self.known |= zip(("dx", "dweight", "dbias"), spec.grads, strict=True)

    def also(self, **facts: Any) -> Facts:
        """These facts with further ones."""
        other = copy.copy(self)
        other.known = self.known | facts
        return other

    def of(self, tree: Tree) -> Facts:
        """These facts with those of a row's tree."""
        chunk = 32 * tree.warps * self.vec
        covers = tree.covers(self.spec.cols)
        other = self.also(
            **{name: getattr(tree, name) for name in ("vec", "warps", "cluster", "elements", "block_warps")},
            natural_elements=ceil_div(self.spec.cols, chunk) * self.vec,  # per thread, with the widest vectors
            vector_bytes=tree.vec * self.itemsize,
            thread_bytes=tree.elements * self.itemsize,
            covers=covers,
            plain=covers or self.access.x >= tree.vec * self.itemsize,  # no vector in pieces or beyond the row
        )
        other.tree = tree
        return other

    def tuned(self, knob: str, rule: Any) -> Any:
        """The value of the first row for `knob` whose conditions hold, or `rule` if there is none."""
        shipped = table(self.device.arch, self.spec.direction)
        for row in (*self.users.get(knob, ()), *shipped.get(knob, ())):
            if self.hold(row[1]):
                self.came_from[knob] = row
                return row[0]
        return rule

    def hold(self, conditions: dict[str, Any]) -> bool:
        """Whether all conditions hold."""
        return all(self._holds(fact, wanted) for fact, wanted in conditions.items())

    def _holds(self, fact: str, wanted: Any) -> bool:
        if fact.startswith("not "):
            return not self._holds(fact[4:], wanted)
        value = self.known[fact]
        if not isinstance(wanted, list):
            return bool(value == wanted)
        if isinstance(value, str):
            return value in wanted
        least, most = wanted
        return (least is None or least <= value) and (most is None or value <= most)


@cache
def table(arch: int, direction: str) -> Table:
    """The shipped rows of each knob, for an architecture and for any."""
    rows: Table = {}
    for path in shipped_tables(arch):
        for knob, listed in json.loads(path.read_text()).get(section(direction), {}).items():
            rows.setdefault(knob, []).extend(map(tuple, listed))
    return rows


def shipped_tables(arch: int) -> list[Path]:
    """The files of the shipped tables for an architecture, in the order in which they are asked."""
    return [path for path in (TABLES / f"sm_{arch}.json", TABLES / "any.json") if path.exists()]
