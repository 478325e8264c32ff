"""`python -m kernel_fusion`, the same as the console script `kernel-fusion`."""

from kernel_fusion.cli import main

main()
