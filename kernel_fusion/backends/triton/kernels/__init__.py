"""The Triton kernels, a file per family and direction. Importing this imports Triton.

No constant of a kernel depends on the number of rows.
"""
