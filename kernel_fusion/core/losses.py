"""What every part of the library means by the arguments of the operators of losses."""

# What else is computed of a row of log-probabilities: their weighted sum, or the entropy.
EXTRAS = ("none", "sum", "entropy")

# The `ignore_index` of calls that ignore no row.
NOTHING_IGNORED = -(2**63)
