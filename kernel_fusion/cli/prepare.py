"""`warmup`, `cache` and `hf-kernel`: compile ahead of use, see or clear that, write what the Hugging Face Hub needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kernel_fusion.backends.cuda.device import KNOWN_DEVICES, Device
from kernel_fusion.backends.cuda.planner import compile_ahead, compiled, rehearsal
from kernel_fusion.cli import common
from kernel_fusion.cli.model_calls import calls_of
from kernel_fusion.core.cache import CUBINS, EXTENSIONS
from kernel_fusion.errors import BuildError
from kernel_fusion.hf.folder import write_folder
from kernel_fusion.native import build, prebuilt
from kernel_fusion.native.library import ready_library
from kernel_fusion.operators import loader
from kernel_fusion.operators.dispatch import unavailable_reason


def warmup(
    hidden: Annotated[
        str | None, typer.Option(help="Row lengths, such as 1024,4096. Default: no CUDA kernels, the extension alone.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model's kernels: its configuration of transformers, or module:function that calls it."),
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(help="Such as bf16,fp32. Default: of a model bf16, else bf16,fp16,fp32.")
    ] = None,
    arch: Annotated[
        int | None, typer.Option(help="Compute capability, 90 for 9.0. Default: this machine's GPU.")
    ] = None,
    any_cpu: Annotated[
        bool, typer.Option("--any-cpu", help="Build the extension for other processors too, as an image needs it.")
    ] = False,
) -> None:
    """Build the extension that this machine needs, and compile CUDA kernels ahead of use, with or without a GPU."""
    out = common.console()
    if hidden is None and model is None:
        return _warmup_without_kernels(arch, any_cpu, out)
    target, bar = _target(arch), common.progress_console()
    sizes = common.parse_numbers(hidden, "--hidden") if hidden is not None else []
    names = common.dtype_names(dtypes or "bf16,fp16,fp32")
    _prepare_extension(any_cpu, out)
    calls = calls_of(model, common.parse_dtypes(dtypes or "bf16")) if model is not None else []
    text = f"kernels for sm_{target.arch}"
    count = sum(compile_ahead([cols], names, target) for cols in track(sizes, text, console=bar, disable=not sizes))
    with rehearsal(loader.library(), target) as met:
        for call in calls:
            call()
    if calls and not met:
        out.print(f"{model} calls no kernels of ours.")
        raise typer.Exit(1)
    for spec, access in track(met, text, console=bar, disable=not calls):
        compiled(spec, access, target)
    count += len(met)
    if not CUBINS.entries():
        out.print(f"{CUBINS.path('').parent} cannot be written, so nothing was kept.")
        raise typer.Exit(1)
    out.print(f"{count} kernels for sm_{target.arch} are in the cache; the extension is built.")


def _warmup_without_kernels(arch: int | None, any_cpu: bool, out: Console) -> None:
    if arch is not None:
        raise typer.BadParameter("name row lengths to compile for, such as 1024,4096", param_hint="--hidden")
    _prepare_extension(any_cpu, out)
    library = build.kept_library()
    if loader.is_from_wheel():
        out.print("The wheel brings the extension, so there is nothing to build.")
    elif library is None:
        out.print(f"{EXTENSIONS.path('').parent} cannot be written, so nothing was kept.")
        raise typer.Exit(1)
    else:
        out.print(f"The extension is built: {library}")
    if not unavailable_reason("cuda"):  # pragma: gpu
        out.print("CUDA kernels compile when they are first used; --hidden compiles those of given row lengths now.")


def _prepare_extension(any_cpu: bool, out: Console) -> None:
    try:
        if any_cpu or not loader.is_loaded():
            ready_library(every_variant=any_cpu)
        loader.library()
    except BuildError as error:
        out.print(f"The C++ extension could not be built: {error}")
        raise typer.Exit(1) from error


def _target(arch: int | None) -> Device:
    """The device to compile for: a named architecture, or this machine's GPU."""
    if arch is None and torch.cuda.is_available():  # pragma: gpu
        return Device.of(torch.cuda.current_device())
    if arch not in KNOWN_DEVICES:
        known = ", ".join(map(str, KNOWN_DEVICES))
        problem = "there is no GPU here to compile for" if arch is None else f"{arch} is not known"
        raise typer.BadParameter(f"{problem}; name one of {known}", param_hint="--arch")
    return KNOWN_DEVICES[arch]


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all entries.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Copy all to a folder; with it as KERNEL_FUSION_CACHE_DIR no compiler or network is needed.",
            parser=common.path_of,
            metavar="PATH",
        ),
    ] = None,
) -> None:
    """Show where compiled kernels and the extension are kept, and how much they take."""
    if export is not None:
        _export(common.writable(export), common.console())
        return
    if clear:
        for kind in common.CACHES:
            kind.clear()
    table = Table("kind", "holds", "size", "folder")
    for kind in common.CACHES:
        table.add_row(kind.kind, *common.cache_facts(kind))
    common.console().print(table)


def _export(folder: Path, out: Console) -> None:
    """Write the extension, for all processors of this architecture, and every compiled kernel to a folder."""
    library, what, count = ready_library(every_variant=True), "The extension and", 0
    if library.parent == prebuilt.FOLDER:
        what = "The wheel brings the extension;"
    elif (payload := EXTENSIONS.read(library.stem)) is not None:
        EXTENSIONS.export(folder, build.exported_key(), payload)
    else:
        raise BuildError(f"{library} cannot be read")
    for path in CUBINS.entries():
        if (code := CUBINS.read(path.stem)) is not None:
            CUBINS.export(folder, path.stem, code)
            count += 1
    out.print(f"{what} {count} CUDA kernels are in {folder}, for PyTorch {torch.__version__}.", soft_wrap=True)
    out.print(f"Set KERNEL_FUSION_CACHE_DIR={folder} where they are to be used.", soft_wrap=True)


def hf_kernel(
    output: Annotated[
        Path,
        typer.Option(
            help="A new folder, or one without builds and card.",
            show_default=False,
            parser=common.path_of,
            metavar="PATH",
        ),
    ],
) -> None:
    """Write our layers as a folder for the Hugging Face Hub: Triton kernels, for CUDA, ROCm and XPU."""
    folder = write_folder(output)
    common.console().print(
        f"{folder} is ready for an upload. The Hub builds C++ and CUDA kernels itself; it has none of ours."
    )
