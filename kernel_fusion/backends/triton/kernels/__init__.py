"""The Triton kernels, a file per family and direction, and their shared functions. Importing this imports Triton.

A kernel sees pointers, sizes, strides, and constants that never depend on the number of rows.
"""
