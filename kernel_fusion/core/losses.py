"""The arguments of the operators of losses, for every part of the library."""

from typing import Annotated

from kernel_fusion.core.fields import Names

# A second result of a row of log-probabilities: their weighted sum, or the entropy.
EXTRAS = ("none", "sum", "entropy")
Extra = Annotated[str, Names("Extra", EXTRAS)]

# The `ignore_index` of calls that ignore no row.
NOTHING_IGNORED = -(2**63)
