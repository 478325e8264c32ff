"""NVIDIA GPUs: plans in Python, kernels in CUDA C++ compiled at run time, launched by the C++ extension."""
