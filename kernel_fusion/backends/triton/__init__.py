"""The Triton backend: every verb on kernels that run wherever Triton does.

Nothing here imports Triton until a call asks for it; `kernel_fusion.backends.select` decides when. The kernels are in
`kernels`, what lays them out in `plan` and `layout`, the operators on them in one module per family.
"""
