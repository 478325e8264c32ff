"""The console script `kernel-fusion`, and `python -m kernel_fusion`, which is the same."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without the libraries that it needs, say how to install them."""
    try:
        from kernel_fusion.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"kernel-fusion needs {error.name}: pip install 'kernel-fusion[cli]'")
    app.main()


if __name__ == "__main__":
    main()
