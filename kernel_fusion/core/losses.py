"""What every part of the library means by the arguments of the operators of losses."""

from typing import Annotated

from kernel_fusion.core.fields import Names

# What else is computed of a row of log-probabilities: their weighted sum, or the entropy.
EXTRAS = ("none", "sum", "entropy")
Extra = Annotated[str, Names("Extra", EXTRAS)]

# The `ignore_index` of calls that ignore no row.
NOTHING_IGNORED = -(2**63)
