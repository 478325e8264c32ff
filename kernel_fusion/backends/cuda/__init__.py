"""NVIDIA GPUs: Python plans and compiles kernels, the C++ extension launches them."""
