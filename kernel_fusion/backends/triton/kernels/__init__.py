"""The Triton kernels, one file per family and direction, and the functions that they share.

A kernel sees pointers, sizes and strides, and constants that never depend on the number of rows. What it computes is
the formula of the family; who computes what is in the file's first paragraph. Importing this package imports Triton.
"""
