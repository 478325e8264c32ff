"""The Triton kernels. None of their constants depends on the number of rows, so a new batch size compiles nothing."""
