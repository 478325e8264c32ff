"""The Triton kernels. No constant of theirs depends on the number of rows."""
