"""Compiles, for one GPU that need not be there, every kernel of the Triton backend as the operators launch it.

Run by test_triton_offline.py in a process of its own, without Triton's interpreter: `triton_offline.py BACKEND ARCH`.
The operators are called on CPU tensors with `launch` replaced by a recorder, so constants and types are those of real
calls. Prints one JSON line per kernel: its name, whether it loops over a row, the size of the machine code, and the
bytes of shared memory that it takes beyond what the device has (none, if the plan is right).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_fusion.backends import select
from kernel_fusion.backends.triton import plan, pointwise, reduce, row_norm, serve, softmax

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
# Bytes of shared memory that a program may have; AMD's are not used for fetching ahead.
_SHARED_BYTES = {"80": 166912, "90": 232448, "100": 232448, "gfx942": 65536}
Launch = tuple[Any, tuple[Any, ...], int, dict[str, Any]]


def record(calls: Callable[[], None], warp_size: int = 32, shared_bytes: int = 0) -> list[Launch]:
    """The launches that `calls` would make on a device of 132 multiprocessors: kernel, arguments, warps, constants."""
    launches: list[Launch] = []

    def recorder(kernel: Any, grid: tuple[Any, ...], *args: Any, warps: int, **constants: Any) -> None:
        first = next(arg for arg in args if isinstance(arg, Tensor))
        launches.append((kernel, tuple(first if arg is None else arg for arg in args), warps, constants))

    families = (row_norm, pointwise, reduce, softmax)
    originals = [family.launch for family in families], plan.device_of
    try:
        for family in families:
            family.launch = recorder
        plan.device_of = lambda device: plan.Device(132, warp_size, shared_bytes)
        calls()
    finally:
        for family, launch in zip(families, originals[0], strict=True):
            family.launch = launch
        plan.device_of = originals[1]
    return launches


def verbs(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Each verb in both directions, with stages, masks and dropout."""
    x, r = torch.zeros(2, rows, cols, dtype=dtype).requires_grad_().unbind()
    w = torch.zeros(cols, dtype=dtype, requires_grad=True)
    seed = torch.zeros(1, dtype=torch.int64)
    affine = 1, w, w, 1e-5, 0.0, None
    plain, stages = ("identity", "identity", 0.0, None), ("gelu", "silu", 0.1, seed)
    results = [
        serve("staged_row_norm", x, None, *affine, False, *plain)[0],
        *serve("staged_row_norm", x, r, *affine, True, *stages),
        serve("pointwise", x, r, "gate", "gelu", 1.0, 0.0, None),
        serve("pointwise", x, w, "add", "gelu", 1.0, 0.1, seed),
        serve("pointwise", x[:, : cols // 2], x[:, cols // 2 : cols // 2 * 2], "gate", "silu", 1.0, 0.0, None),
        serve("reduce", x, [-1], False, "sum_squared", None),
        serve("reduce", x, [0], False, "mean_abs", None),
        serve("softmax", x, None, 1.0, True),
        serve("softmax", x, torch.zeros(rows, cols, dtype=torch.bool), 1.0, False),
    ]
    for y in results:
        torch.autograd.grad(y, [x, r, w], torch.zeros_like(y), retain_graph=True, allow_unused=True)
    torch.autograd.grad(results[0], [x], torch.zeros_like(results[0]))


def signature(launch: Launch) -> dict[str, tuple[str, Any]]:
    """Of each parameter its type, and its value where that is compiled in."""
    kernel, args, _, constants = launch
    found: dict[str, tuple[str, Any]] = {}
    for parameter, value in zip(kernel.params, args, strict=False):
        if isinstance(value, Tensor):
            found[parameter.name] = (_TYPES[value.dtype], None)
        elif value == 1 and not parameter.do_not_specialize:
            found[parameter.name] = ("constexpr", 1)
        else:
            found[parameter.name] = ("i32", None)
    return found | {name: ("constexpr", value) for name, value in constants.items()}


def distinct(launches: list[Launch]) -> Iterator[Launch]:
    """One launch of each signature."""
    seen = set()
    for launch in launches:
        key = launch[0].fn.__name__, str(signature(launch))
        if key not in seen:
            seen.add(key)
            yield launch


def compile_for(target: GPUTarget, launch: Launch) -> tuple[int, int]:
    """The size of the machine code, and the bytes of shared memory."""
    kernel, _, warps, _ = launch
    parameters = signature(launch)
    names = list(kernel.arg_names)
    source = ASTSource(
        kernel,
        {name: parameters[name][0] for name in names},
        constexprs={(names.index(name),): value for name, (kind, value) in parameters.items() if kind == "constexpr"},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if parameters[name][0][0] == "*"},
    )
    code = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": True})
    return len(code.asm["hsaco" if target.backend == "hip" else "cubin"]), code.metadata.shared


def norms(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Both norms in both directions, bare and with every stage."""
    x, r = torch.zeros(2, rows, cols, dtype=dtype).requires_grad_().unbind()
    w = torch.zeros(cols, dtype=dtype, requires_grad=True)
    for rms in (False, True):
        y = serve("staged_row_norm", x, None, 1, w, w, 1e-5, 0.0, None, rms, "identity", "identity", 0.0, None)[0]
        torch.autograd.grad(y, [x, w], torch.zeros_like(y))
        seed = torch.zeros(1, dtype=torch.int64)
        y, h = serve("staged_row_norm", x, r, 1, w, w, 1e-5, 0.0, None, rms, "gelu", "silu", 0.1, seed)
        torch.autograd.grad([y, h], [x, r, w], [torch.zeros_like(y), torch.zeros_like(h)])


def activations() -> None:
    """Value and slope of every activation, in one chain each."""
    from kernel_fusion.core.activations import ACTIVATIONS

    for name in ACTIVATIONS:
        a = torch.zeros(8, 64, requires_grad=True)
        y = serve("pointwise", a, torch.zeros(8, 64, requires_grad=True), "gate", name, 1.0, 0.0, None)
        torch.autograd.grad(y, a, torch.zeros_like(y))


def main(backend: str, arch: str) -> None:
    """Compile, and print what was compiled."""
    warp_size = 64 if backend == "hip" else 32
    select._define_triton()
    cuda = backend == "cuda"
    shared = _SHARED_BYTES[arch]

    def recorded(calls: Callable[[], None]) -> list[Launch]:
        return record(calls, warp_size, shared if cuda else 0)

    launches = recorded(lambda: verbs(48, 1024, torch.bfloat16))
    if arch in ("90", "gfx942"):
        launches += recorded(lambda: verbs(3, 40000, torch.bfloat16))
        launches += recorded(lambda: norms(3, 2048, torch.float32))
    if arch == "90":
        launches += recorded(activations)
        # Rows in slices; in pieces, fetched ahead; the longest that are; and those that are read again.
        launches += recorded(lambda: norms(3, 3000, torch.bfloat16))
        launches += recorded(lambda: norms(3, 5120, torch.float32))
        launches += recorded(lambda: norms(3, 16384, torch.float32))
        launches += recorded(lambda: norms(3, 24576, torch.bfloat16))
    if arch == "80":
        launches += recorded(lambda: verbs(5, 255, torch.float64))
        launches += recorded(lambda: norms(3, 12288, torch.float32))
    for launch in distinct(launches):
        size, taken = compile_for(GPUTarget(backend, int(arch) if cuda else arch, warp_size), launch)
        print(json.dumps([launch[0].fn.__name__, launch[3].get("LOOPED", False), size, max(0, taken - shared)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
