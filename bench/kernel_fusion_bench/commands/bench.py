"""`bench`: runs suites, writes their files, and shows a short table with a summary. Ctrl-C keeps what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kernel_fusion.cli import common
from kernel_fusion.cli.table import Table
from kernel_fusion.config import BACKENDS
from kernel_fusion.operators import loader
from kernel_fusion.operators.dispatch import unavailable_reason
from kernel_fusion_bench import plot, providers, results, run_suite, summary, tables
from kernel_fusion_bench.commands import options
from kernel_fusion_bench.operations import NORMS
from kernel_fusion_bench.peers import PEERS, find, prepare
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.results import OURS, Results
from kernel_fusion_bench.suite import Suite
from kernel_fusion_bench.suites import SUITES, VERBS
from kernel_fusion_bench.timing import FULL, QUICK, Setup
from kernel_fusion_bench.workloads import DIRECTIONS, Direction

_BUSY_LOAD = 0.5  # one other busy program already makes the threads of a kernel wait for each other


def bench(
    suites: Annotated[list[str] | None, typer.Argument(metavar="SUITE...", help="See --list.")] = None,
    list_suites: Annotated[bool, typer.Option("--list", help="Describe the suites, and measure nothing.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A minute for a suite: less of everything, no peers.")] = False,
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cpu,cuda: several stand side by side. Default: the GPU, if any.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(help="On a CPU, such as 1,8. Default: all; the suite cpu also measures one.")
    ] = None,
    dtypes: Annotated[str | None, typer.Option(help="Such as bf16,float32. Default: the suite's.")] = None,
    verbs: Annotated[str | None, typer.Option(help=f"Some of {', '.join(VERBS)}. Default: the suite's.")] = None,
    directions: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(DIRECTIONS)}. Default: the suite's, if it times kernels.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="The dtype of bare norms' weights. Default: the input's.")] = None,
    backends: Annotated[
        str | None, typer.Option(help="Such as cuda,triton, side by side. Default: the suite's, or the device's own.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help=f"all, none, or some of {', '.join(PEERS)}. Default: the suite's.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="RxN, repeatable: measured in place of the suite's.")] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Default: a new folder in kernel-fusion-results.", parser=common.path_of, metavar="PATH"),
    ] = None,
) -> None:
    """Measure our kernels beside PyTorch, its peers and the floor, after checking that results are right."""
    out = common.console()
    if list_suites:
        rows = tuple((suite.name, suite.about) for suite in SUITES.values())
        common.show(Table("Suites", ("name", "what it measures"), rows), out, of_numbers=False)
        raise typer.Exit
    if not suites:
        raise typer.BadParameter("name one or more suites, or ask for --list", param_hint="SUITE...")
    chosen = [SUITES[name] for name in options.names(",".join(suites), SUITES, "suite")]
    devices = [common.resolve_device(name) for name in dict.fromkeys(common.split(device) if device else [None])]
    selection = _Selection(
        quick=quick,
        devices=devices,
        backends=common.split(backends) if backends else [],
        dtypes=common.parse_dtypes(dtypes) if dtypes else None,
        verbs=options.names(verbs, VERBS, "verb") if verbs else None,
        directions=options.names(directions, DIRECTIONS, "direction") if directions else None,
        weights=options.parse_dtype(weights, "--weights") if weights else None,
        shapes=[options.parse_shape(text) for text in shape or []],
        peers=_parse_peers(peers),
        threads=common.parse_numbers(threads, "--threads") if threads else None,
    )
    _check(chosen, selection)
    if output_dir is not None:
        _refuse_to_overwrite(output_dir, [results.stem(suite.name, quick) for suite in chosen])
    folder = common.writable(output_dir) if output_dir else options.new_folder(results.device_slug(*devices))
    _warn(devices, out)
    raise typer.Exit(_measure_all(chosen, selection, folder, out))


def _refuse_to_overwrite(folder: Path, stems: Sequence[str]) -> None:
    """Raise if files of a suite's names are in the folder, and no results of ours among them."""
    for stem in stems:
        kept = folder / f"{stem}.json"
        is_ours = partial(_holds_results, kept)
        for suffix in (".json", ".csv", ".md"):
            options.replaceable(folder / (stem + suffix), is_ours)


def _holds_results(kept: Path, _: Path) -> bool:
    return kept.is_file() and bool(results.read(kept))


def _warn(devices: Sequence[torch.device], out: Console) -> None:
    if reason := plot.missing():
        out.print(f"No plots will be drawn: {reason}")
    if any(one.type == "cpu" for one in devices) and results.load_average() > _BUSY_LOAD:
        out.print(f"This machine is busy (load {results.load_average():.1f}): expect times that are too long and vary.")


@dataclass(frozen=True)
class _Selection:
    """The selected part of a suite. None, or no backends or shapes, means the suite's own."""

    quick: bool
    devices: Sequence[torch.device]
    backends: Sequence[str]
    dtypes: Sequence[torch.dtype] | None
    verbs: Sequence[str] | None
    directions: Sequence[Direction] | None
    weights: torch.dtype | None  # None: the input's
    shapes: Sequence[tuple[int, int]]
    peers: Sequence[str] | None
    threads: Sequence[int] | None

    def verbs_of(self, suite: Suite) -> list[str]:
        """The verbs to measure of a suite."""
        own = (suite.quick_verbs if self.quick else None) or suite.verbs
        return [verb for verb in suite.verbs if verb in (own if self.verbs is None else self.verbs)]

    def threads_of(self, suite: Suite, device: torch.device) -> Sequence[int | None]:
        """The numbers of threads for a suite on a device; None for PyTorch's own."""
        if device.type != "cpu":
            return [None]
        return self.threads or ([1, torch.get_num_threads()] if suite.single_thread else [None])


def _check(suites: Sequence[Suite], selection: _Selection) -> None:
    """Raise if a suite lacks something selected, or a backend runs nowhere."""
    for suite in suites:
        if not selection.verbs_of(suite):
            raise typer.BadParameter(f"{suite.name} measures {', '.join(suite.verbs)}", param_hint="--verbs")
        if selection.shapes and suite.kind == "steps":
            problem = f"{suite.name} measures models, which have shapes of their own"
            raise typer.BadParameter(problem, param_hint="--shape")
        if selection.weights and not set(suite.verbs) <= set(NORMS):
            raise typer.BadParameter(f"{suite.name} is no suite of bare norms", param_hint="--weights")
        if any(device.type == "cpu" for device in selection.devices):
            wanted = suite.quick() if selection.quick else suite
            prepare(wanted.peers if selection.peers is None else selection.peers)
    for name in selection.backends:
        if not any(name in BACKENDS and not unavailable_reason(name, device) for device in selection.devices):
            common.resolve_backend(name, selection.devices[0])  # says why it runs nowhere


def _contenders(suite: Suite, selection: _Selection) -> tuple[dict[torch.device, list[Provider]], dict[str, str]]:
    """PyTorch and ours on each device, and why some of our backends run on none of them."""
    contenders: dict[torch.device, list[Provider]] = {}
    absent: dict[str, str] = {}
    for device in selection.devices:
        named = selection.backends or suite.backends.get(device.type, ())
        reasons = {name: unavailable_reason(name, device) for name in named}
        absent |= {name: f"absent: {reason}" for name, reason in reasons.items() if reason}
        running: list[str | None] = [name for name, reason in reasons.items() if not reason]
        # Resolving a backend builds the extension, so that no measurement includes the build.
        ours = [providers.ours(common.resolve_backend(name, device)) for name in running or [None]]
        contenders[device] = [providers.pytorch(), *ours]
    present = {provider.name for several in contenders.values() for provider in several}
    return contenders, {OURS + name: why for name, why in absent.items() if OURS + name not in present}


def _measure_all(suites: Sequence[Suite], selection: _Selection, folder: Path, out: Console) -> int:
    """Measure the suites until one is interrupted; returns the exit code."""
    exit_code = 0
    for suite in suites:
        result = _measure(suite, selection, folder, out)
        if result.interrupted:
            return common.INTERRUPTED
        if {failure.provider for failure in result.failures} - set(PEERS):
            exit_code = 1
    return exit_code


def _measure(suite: Suite, selection: _Selection, folder: Path, out: Console) -> Results:
    """Measure one suite with a progress bar, write its files and show its tables."""
    suite = suite.quick() if selection.quick else suite
    suite = suite.with_shapes(selection.shapes) if selection.shapes else suite
    contenders, absent = _contenders(suite, selection)
    setups, states = _setups(suite, selection, contenders)
    for name, state in (absent | states).items():
        out.print(f"{name}: {state}")
    with common.progress_bar() as progress:
        task = progress.add_task(suite.name, total=None)
        result, paths = run_suite(
            suite,
            setups,
            folder,
            dtypes=selection.dtypes,
            verbs=selection.verbs_of(suite),
            weights=selection.weights,
            command=_command(suite, selection, setups, list(states)),
            quick=selection.quick,
            peers=absent | states,
            report=lambda done, of, what: progress.update(task, completed=done, total=of, description=what),
        )
    _show(result, paths, out)
    return result


def _setups(
    suite: Suite, selection: _Selection, contenders: Mapping[torch.device, Sequence[Provider]]
) -> tuple[list[Setup], dict[str, str]]:
    """A setup for each device and number of threads, and each peer's version or why it is absent."""
    setups: list[Setup] = []
    states: dict[str, str] = {}
    for device, mine in contenders.items():
        peers, here = find(suite.peers if selection.peers is None else selection.peers, device)
        present = {peer.name for peer in peers}
        states |= {name: state for name, state in here.items() if name in present or name not in states}
        setups += [
            Setup(
                [*mine, *peers],
                device,
                selection.directions or suite.directions,
                QUICK if selection.quick else FULL,
                threads,
                suite.settles_memory and device.type == "cpu" and loader.load(),
            )
            for threads in dict.fromkeys(selection.threads_of(suite, device))
        ]
    return setups, states


def _command(suite: Suite, selection: _Selection, setups: Sequence[Setup], peers: Sequence[str]) -> str:
    """The command that repeats the measurement, with every default written out except all verbs."""
    verbs = selection.verbs_of(suite)
    devices = dict.fromkeys(setup.device for setup in setups)
    dtypes = selection.dtypes or [dtype for device in devices for dtype in suite.dtypes_on(device.type)]
    backends = [provider.backend for setup in setups for provider in setup.providers if provider.name.startswith(OURS)]
    options: dict[str, Sequence[str]] = {
        "--device": [str(device) for device in devices],
        "--threads": [str(setup.threads) for setup in setups if setup.threads],
        "--dtypes": [common.shown_dtype(dtype) for dtype in dtypes],
        "--verbs": [] if len(verbs) == len(suite.verbs) > len(NORMS) else verbs,
        "--directions": setups[0].directions if suite.kind == "kernels" else [],
        "--weights": [common.shown_dtype(selection.weights)] if selection.weights else [],
        "--backends": [backend for backend in backends if backend],
        "--peers": peers or (["none"] if suite.peers else []),
    }
    words = ["kernel-fusion", "bench", suite.name, *(["--quick"] if selection.quick else [])]
    words += [
        word for option, values in options.items() if values for word in (option, ",".join(dict.fromkeys(values)))
    ]
    words += [word for rows, cols in selection.shapes for word in ("--shape", f"{rows}x{cols}")]
    return shlex.join(words)


def _show(result: Results, paths: Sequence[Path], out: Console) -> None:
    """Print the short tables, the failures, the files and, last, the summary."""
    for data in tables.short_tables(result):
        common.show(data, out)
    for failure in result.failures:
        out.print(f"NOT MEASURED: {failure}", style="red")
    if result.interrupted:
        out.print("Interrupted: this is what was measured until then.")
    noisy = sum(m.timing is not None and m.timing.noisy for m in result.measurements)
    if noisy:
        out.print(f"{noisy} times vary too much (marked {tables.NOISY}); they are in no mean and no picture.")
    out.print(f"All tables and pictures: {len(paths)} files {result.stem}* in {paths[0].parent}", soft_wrap=True)
    for sentence in summary.sentences(result):
        out.print(sentence, style="bold", soft_wrap=True)


def _parse_peers(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return list(PEERS) if text == "all" else [] if text == "none" else options.names(text, PEERS, "peer")
