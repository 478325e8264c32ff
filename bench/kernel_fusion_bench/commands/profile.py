"""`profile`: Chrome traces of one norm or operation by PyTorch and our backends, with a summary.

Each trace is written when it is finished, so Ctrl-C keeps the earlier ones.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from kernel_fusion.cli import common
from kernel_fusion.operators.dispatch import unavailable_reason
from kernel_fusion_bench import providers, results, summary, timing, trace
from kernel_fusion_bench.commands import options
from kernel_fusion_bench.operations import case_workload
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.suites import ALL_BACKENDS
from kernel_fusion_bench.tables import markdown
from kernel_fusion_bench.trace import Trace
from kernel_fusion_bench.workloads import Workload

_SUMMARY = "profile.md"


def profile(
    case: Annotated[
        str, typer.Argument(help="layer_norm, rms_norm, or an operation of the suite fused-ops, such as bias+gelu.")
    ],
    shape: Annotated[str, typer.Option(help="RxN.")] = "4096x1024",
    dtype: Annotated[str | None, typer.Option(help="Default: bf16 on a GPU, fp32 on a CPU.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: the GPU, if any.")] = None,
    backends: Annotated[str | None, typer.Option(help="Such as cuda,triton. Default: all with kernels there.")] = None,
    no_trace: Annotated[
        bool, typer.Option("--no-trace", help="Only make the calls of ours, for a profiler of your own, such as ncu.")
    ] = False,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Default: a new folder in kernel-fusion-results.", parser=common.path_of, metavar="PATH"),
    ] = None,
) -> None:
    """Trace PyTorch and our kernels, forward and backward, for chrome://tracing or ui.perfetto.dev."""
    target = common.resolve_device(device)
    chosen = options.parse_dtype(dtype or ("fp32" if target.type == "cpu" else "bf16"), "--dtype")
    try:
        workload = case_workload(case, options.parse_shape(shape), chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    out, traces, exit_code = common.console(), list[Trace](), 0
    mine = [providers.ours(name) for name in _backends(common.split(backends) if backends else [], target, out)]
    if no_trace:
        for provider in mine:
            trace.make_calls(provider, workload, target)
            out.print(f"{provider.name}: made the calls of {workload}")
        return
    contenders = [providers.pytorch(), *mine]
    if output_dir is not None:
        for each in contenders:
            options.replaceable(output_dir / trace.file_name(each), lambda path: trace.read(path, target.type) or True)
        options.replaceable(output_dir / _SUMMARY, lambda path: "`kernel-fusion profile " in path.read_text())
    folder = common.writable(output_dir) if output_dir else options.new_folder("profile")
    command = _command(case, shape, chosen, target, mine)
    about = results.describe([target], shlex.join(["kernel-fusion", *command]), trace.METHOD, {})
    try:
        for provider in track(contenders, "traces", console=common.progress_console()):
            try:
                traces.append(trace.record(provider, workload, target, folder))
            except Exception as error:  # any failure counts against this contender only
                out.print(f"NOT TRACED: {provider.name}: {timing.reason(error)}", style="red")
                exit_code = 1
    except KeyboardInterrupt:
        out.print("Interrupted: this is what was traced until then.")
        exit_code = common.INTERRUPTED
    _write_and_show(traces, workload, summary.heading(f"Profile of {case}", about), folder, out)
    if target.type == "cuda":
        out.print(f"The counters of the hardware{'' if shutil.which('ncu') else ', once `ncu` is on PATH'}:")
        for one in (each for each in traces if each.ours):
            calls = _command(case, shape, chosen, target, [one.provider])
            words = trace.ncu_command(one, ["python", "-m", "kernel_fusion", *calls, "--no-trace"])
            out.print(shlex.join(words), soft_wrap=True)
    raise typer.Exit(exit_code)


def _backends(named: list[str], device: torch.device, out: Console) -> list[str]:
    """The named backends, or all that can run with kernels for the device, or else the device's own."""
    if named:
        return [common.resolve_backend(name, device) for name in named]
    reasons = {name: unavailable_reason(name, device) for name in ALL_BACKENDS.get(device.type, ())}
    for name, reason in reasons.items():
        if reason:
            out.print(f"{name}: absent: {reason}")
    return [name for name, reason in reasons.items() if not reason] or [common.resolve_backend(None, device)]


def _command(case: str, shape: str, dtype: torch.dtype, device: torch.device, ours: list[Provider]) -> list[str]:
    """The arguments that repeat the trace, with every default written out."""
    backends = ",".join(str(provider.backend) for provider in ours)
    options = {"--shape": shape, "--dtype": common.shown_dtype(dtype), "--device": str(device), "--backends": backends}
    return ["profile", case, *(word for option in options.items() for word in option)]


def _write_and_show(traces: list[Trace], workload: Workload, heading: list[str], folder: Path, out: Console) -> None:
    """Print a summary of each trace, and write all of them beside the traces."""
    summaries = [trace.summary(one, workload) for one in traces]
    for one, table in zip(traces, summaries, strict=True):
        common.show(table, out)
        out.print(f"wrote {one.path}", soft_wrap=True)
    if summaries:
        path = folder / _SUMMARY
        lines = [*heading, *(line for each in summaries for line in markdown(each))]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        out.print(f"wrote {path}", soft_wrap=True)
