"""NVIDIA GPUs: Python plans, CUDA C++ kernels are compiled at run time, and the C++ extension launches them."""
