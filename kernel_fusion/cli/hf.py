"""`hf-kernel`: writes what an upload to the Hugging Face Hub needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_fusion.cli.common import console
from kernel_fusion.hf.folder import write_folder


def hf_kernel(
    output: Annotated[Path, typer.Option(help="A new folder, or one without builds.", show_default=False)],
) -> None:
    """Write our layers as a folder for the Hugging Face Hub: Triton kernels, for CUDA, ROCm and XPU."""
    folder = write_folder(output)
    console().print(
        f"{folder} is ready for an upload. The Hub builds C++ and CUDA kernels itself; it has none of ours."
    )
