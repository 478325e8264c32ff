"""Results: every measured value, with its unit in its name, and the files that hold them.

Speed-ups, tables and pictures are derived from the list of measurements, fresh or read from a file.
"""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from kernel_fusion.cli.machine import cpu_model, gpu_driver, versions
from kernel_fusion.testing.oracle import Comparison
from kernel_fusion_bench.fields import ERROR, FLAG, NAME, OBJECT, TEXT, Fields, checked
from kernel_fusion_bench.providers import Contender
from kernel_fusion_bench.timing import Outcomes, Place, Setup, Timing
from kernel_fusion_bench.workloads import DIRECTIONS, Workload

Record = dict[str, str | int | float | None]
REFERENCE, FLOOR, OURS, COMPILED, BASELINE = "pytorch", "floor", "kf-", "torch.compile", "portable"
# Noise is far larger than the last of these digits.
_DIGITS = 6
# In characters: a hundred times our largest file.
_LARGEST_FILE = 200_000_000
# Two parts of this length fit the 255 bytes of a file name.
_LONGEST_PART = 100
ABOUT = ("machine", "versions", "peers", "method")  # the parts of `Results.about` that have facts by name
_NAMED = ("kernel_fusion", "torch", "triton", "gpu_driver")  # the versions that pictures show


@dataclass(frozen=True)
class Measurement:
    """One contender in one cell. Unmeasured fields are None.

    Attributes:
        configuration: the name of a shape, or the shape itself.
        operation: the variant of a verb, if it has variants.
        bytes_moved: what must move, or what this contender is known to move.
        loss: of a model, before training.
        errors: the largest absolute error of each result and gradient, by name.
        excesses: errors over our error budget.
    """

    configuration: str
    verb: str
    rows: int
    cols: int
    dtype: str
    weight_dtype: str | None
    bias_dtype: str | None
    layout: str
    device: str
    direction: str
    provider: str
    provider_version: str
    threads: int | None = None
    operation: str | None = None
    timing: Timing | None = None
    bytes_moved: int | None = None
    saved_bytes: int | None = None
    training_memory_bytes: int | None = None
    loss: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    excesses: Mapping[str, float] = field(default_factory=dict)

    @property
    def cell(self) -> tuple[str | None, ...]:
        """The key that contenders of one cell share."""
        what = self.configuration, self.verb, self.operation, self.dtype, self.weight_dtype, self.direction
        return *what, str(self.place)

    @property
    def place(self) -> Place:
        """The machine and versions of a measurement."""
        return Place(self.device, self.threads)

    @property
    def group(self) -> str:
        """The title of its table: the operations of a shape, or the configurations of a verb."""
        return self.verb if self.operation is None else self.configuration

    @property
    def label(self) -> str:
        """Its name within its group."""
        return self.configuration if self.operation is None else self.operation

    @property
    def steady(self) -> Timing | None:
        """The time, if it was measured and is not noisy."""
        return None if self.timing is None or self.timing.noisy else self.timing

    @property
    def inaccurate(self) -> bool:
        """Whether a result exceeded its error budget."""
        return any(excess > 1 for excess in self.excesses.values())

    @property
    def gigabytes_per_second(self) -> float | None:
        """The bandwidth, if bytes and time are known."""
        return self.bytes_moved / self.timing.median_ms / 1e6 if self.bytes_moved and self.timing else None


Cell = dict[str, Measurement]  # by provider
Cells = dict[str, Cell]  # by label


def measured(cells: Cells) -> list[Measurement]:
    """All measurements of the cells."""
    return [m for cell in cells.values() for m in cell.values()]


def only(cells: Cells, wanted: Callable[[Measurement], bool]) -> Cells:
    """The cells with the wanted measurements alone, without those that have none."""
    kept = {label: {p: m for p, m in cell.items() if wanted(m)} for label, cell in cells.items()}
    return {label: cell for label, cell in kept.items() if cell}


def is_of_operations(cells: Cells) -> bool:
    """Whether the cells are operations of one shape."""
    return any(m.operation for m in measured(cells))


@dataclass(frozen=True)
class Failure:
    """Something that was not measured, and why."""

    provider: str
    workload: str
    reason: str

    def __str__(self) -> str:
        return f"{self.provider}, {self.workload}: {self.reason}"


@dataclass
class Results:
    """A run of one suite.

    Attributes:
        about: where, when and how, by the names of `ABOUT`; command and date.
    """

    suite: str
    title: str
    quick: bool
    about: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

    @property
    def stem(self) -> str:
        """The files' name without its extension."""
        return stem(self.suite, self.quick)

    @property
    def hardware(self) -> str:
        """The GPU's name, or the CPU's if no GPU was measured."""
        facts = self.about["machine"]
        return str(facts.get("gpu", facts["cpu"]))

    @property
    def provenance(self) -> str:
        """Machine, versions and date in one line."""
        named = [f"{name} {self.about['versions'][name]}" for name in _NAMED if name in self.about["versions"]]
        noisy = sum(m.timing is not None and m.timing.noisy for m in self.measurements)
        notes = ["quick run"] * self.quick + ["INTERRUPTED"] * self.interrupted
        notes += [f"{noisy} noisy times left out"] if noisy else []
        return " · ".join([self.hardware, *named, self.about["date"][:10], *notes])

    @property
    def name_of_floor(self) -> str:
        """On a CPU the floor is only a comparison: our kernels can beat it from cache."""
        on_gpu = any(m.device.startswith("cuda") for m in self.measurements)
        return FLOOR if on_gpu else "PyTorch's copy"

    @property
    def providers(self) -> list[str]:
        """The contenders in order: the floor, ours, PyTorch, other peers."""
        names = dict.fromkeys(m.provider for m in self.measurements)
        return sorted(names, key=lambda name: (name != FLOOR, not name.startswith(OURS), name != REFERENCE))

    @property
    def groups(self) -> list[tuple[str, str]]:
        """The measured pairs of (group, dtype), in order."""
        return list(dict.fromkeys((m.group, m.dtype) for m in self.measurements))

    @property
    def places(self) -> list[Place]:
        """The places of the measurements, in order."""
        return list(dict.fromkeys(m.place for m in self.measurements))

    def directions(self, group: str, dtype: str) -> list[str]:
        """The directions measured for a group, in order."""
        return list(dict.fromkeys(m.direction for m in self.measurements if (m.group, m.dtype) == (group, dtype)))

    def cells(self, group: str, dtype: str, direction: str | None = None, place: Place | None = None) -> Cells:
        """Measurements by label and provider; for several directions or places, the last one measured."""
        cells: Cells = {}
        for m in self.measurements:
            if (m.group, m.dtype) == (group, dtype) and direction in (None, m.direction) and place in (None, m.place):
                cells.setdefault(m.label, {})[m.provider] = m
        return cells

    def add(
        self,
        setup: Setup,
        workload: Workload,
        direction: str,
        contender: Contender,
        comparisons: Sequence[Comparison],
        **found: Any,
    ) -> None:
        """Add a measurement of a contender: its errors, and the fields of `Measurement` in `found`."""
        found["errors"] = {c.name: c.error for c in comparisons}
        found["excesses"] = {c.name: c.excess for c in comparisons}
        who = {"provider": contender.name, "provider_version": contender.version}
        facts = workload.facts | asdict(setup.place) | who | found
        self.measurements.append(Measurement(direction=direction, **facts))

    def add_times(
        self,
        setup: Setup,
        workload: Workload,
        direction: str,
        contenders: Sequence[Contender],
        outcomes: Outcomes,
        errors: Mapping[Any, Sequence[Comparison]],
        training_bytes: Mapping[Any, int] | None = None,
    ) -> None:
        """Add each contender's time, errors and memory; a contender without a time becomes a failure."""
        for contender in contenders:
            outcome = outcomes[contender.name]
            if isinstance(outcome, str):
                self.fail(setup, contender.name, workload, f"{direction}: {outcome}")
                continue
            found = {
                "timing": outcome,
                "training_memory_bytes": (training_bytes or {}).get(contender),
                "bytes_moved": workload.bytes_moved(direction, contender.name) if direction in DIRECTIONS else None,
            }
            self.add(setup, workload, direction, contender, errors.get(contender, ()), **found)

    def fail(self, setup: Setup, provider: str, workload: Workload, reason: str) -> None:
        """Note why `provider` was not measured on `workload`, or not completely."""
        self.failures.append(Failure(provider, f"{workload} on {setup.place}", reason))

    def records(self) -> list[Record]:
        """One flat record per measurement, without None, with ratios to its neighbours."""
        timings = {(m.cell, m.provider): m.timing for m in self.measurements}
        return [_record(m, timings.get((m.cell, REFERENCE)), timings.get((m.cell, FLOOR))) for m in self.measurements]

    def write(self, folder: Path) -> list[Path]:
        """Write JSON and CSV into `folder`; the paths."""
        paths = [self.write_json(folder), folder / f"{self.stem}.csv"]
        records = self.records()
        found = dict.fromkeys(key for record in records for key in record)
        last = [*_TIMES, *_DERIVED]
        names = [*(key for key in found if key not in last), *(key for key in last if key in found)]
        with paths[1].open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=names)
            writer.writeheader()
            writer.writerows(records)
        return paths

    def write_json(self, folder: Path) -> Path:
        """Write the JSON file, a line per measurement; an old file is replaced atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {"suite": self.suite, "title": self.title, "quick": self.quick, "interrupted": self.interrupted}
        head |= self.about | {"failures": [asdict(failure) for failure in self.failures]}
        lines = ",\n".join(f"  {json.dumps(record)}" for record in self.records())
        text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "measurements": [\n{lines}\n ]\n}}\n'
        path = folder / f"{self.stem}.json"
        temporary = path.with_suffix(".json.part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        return path


def read(path: Path) -> Results:
    """The results in a file of `Results.write_json`; ValueError names file and field if it is none."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise ValueError(f"it has more than {_LARGEST_FILE:.0e} characters")
        return _results(Fields(checked(json.loads(text), OBJECT, "the file")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no results of `kernel-fusion bench`: {error}") from error


def _results(head: Fields) -> Results:
    facts = head.object("machine")
    facts.get("cpu", NAME)
    facts.get("gpu", NAME, None)
    about = {"command": head.get("command", TEXT), "date": head.get("date", NAME)}
    return Results(
        head.get("suite", NAME),
        head.get("title", NAME),
        head.get("quick", FLAG),
        about | {part: head.facts(part) for part in ABOUT},
        [_measurement(record) for record in head.objects("measurements")],
        [Failure(**{f.name: each.get(f.name, TEXT) for f in fields(Failure)}) for each in head.objects("failures")],
        head.get("interrupted", FLAG),
    )


def stem(suite: str, quick: bool) -> str:
    """The name of a suite's files without extension. A quick run never overwrites a full one."""
    return file_name(suite) + ("-quick" if quick else "")


def file_name(name: str) -> str:
    """The name of a suite or group as a safe part of a file name, never a path."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", name)[:_LONGEST_PART]


def describe(
    devices: Sequence[torch.device], command: str, method: Mapping[str, str], peers: Mapping[str, str]
) -> dict[str, Any]:
    """Where, when and how the measurement is made."""
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(*devices) | {"load_average_at_start": round(load_average(), 2)},
        "versions": versions(),
        "peers": peers,
        "method": method,
    }


_TIMES = [f.name for f in fields(Timing)]
# Fields with one entry per result in a record, and the prefix of the entry's name.
_BY_RESULT = {"errors": "max_abs_error_", "excesses": "error_over_budget_"}
_FACTS = [f.name for f in fields(Measurement) if f.name not in ("timing", *_BY_RESULT)]
_DERIVED = ["speedup_over_pytorch", "percent_of_floor", "gigabytes_per_second"]


def _record(m: Measurement, reference: Timing | None, floor: Timing | None) -> Record:
    record: Record = {name: getattr(m, name) for name in _FACTS}
    for name, prefix in _BY_RESULT.items():
        record |= {prefix + result: value for result, value in getattr(m, name).items()}
    if m.timing:
        record |= asdict(m.timing)
        record["speedup_over_pytorch"] = reference.median_ms / m.timing.median_ms if reference else None
        record["percent_of_floor"] = 100 * floor.median_ms / m.timing.median_ms if floor else None
        record["gigabytes_per_second"] = m.gigabytes_per_second
    return {key: _rounded(value) for key, value in record.items() if value is not None}


def _measurement(record: Fields) -> Measurement:
    facts = record.of(Measurement, *_FACTS)
    if any(name in record.values for name in _TIMES):
        facts["timing"] = Timing(**record.of(Timing, *_TIMES))
    for name, prefix in _BY_RESULT.items():
        found = [key for key in record.values if key.startswith(prefix)]
        facts[name] = {checked(key, NAME, key).removeprefix(prefix): record.get(key, ERROR) for key in found}
    return Measurement(**facts)


def _rounded(value: str | int | float | None) -> str | int | float | None:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def machine(*devices: torch.device) -> dict[str, str | int]:
    """Names and sizes of the devices and their host."""
    facts: dict[str, str | int] = {
        "device": ", ".join(map(str, devices)),
        "cpu": cpu_model(),
        "cpu_logical_cores": os.cpu_count() or 0,
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "os": f"{platform.system()} {platform.machine()}",
    }
    for device in devices:
        if device.type == "cuda":  # pragma: gpu
            properties = torch.cuda.get_device_properties(device)
            facts |= {
                "gpu": properties.name,
                "gpu_compute_capability": f"{properties.major}.{properties.minor}",
                "gpu_multiprocessors": properties.multi_processor_count,
                "gpu_memory_bytes": properties.total_memory,
                "gpu_driver": gpu_driver() or "unknown",
            }
    return facts


def load_average() -> float:
    """How many programs wanted to run in the last minute; 0 if the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def device_slug(*devices: torch.device) -> str:
    """The devices' names as part of a file name."""
    names = [torch.cuda.get_device_name(d) if d.type == "cuda" else f"{d.type} {cpu_model()}" for d in devices]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(names).lower()).strip("-")
