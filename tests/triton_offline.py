"""Compiles, for one GPU that need not be there, every kernel of the Triton backend as the operators launch it.

Run by test_triton_offline.py in a process of its own, without Triton's interpreter: `triton_offline.py BACKEND ARCH`,
then `each`, once each kernel in bf16; or `values`, `pairs` or `all`: as many dtypes, activations and lengths as give
each kernel every type and constant once, every pair of them, or all that are listed here.
The operators are called on CPU tensors with `launch` replaced by a recorder, so constants and types are those of real
calls. Prints one JSON line per kernel: its name, whether it loops over a row, the size of the machine code, the bytes
of shared memory that it takes beyond what the device has (none, if the plan is right), and how many packed additions
of 16-bit integers its PTX has (none: the assemblers of CUDA 12.8 and 12.9, which Triton 3.6 to 3.9 bring, lose the
constant of one whose lower half nobody reads).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from covering import covering, factors
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_fusion.backends.triton import (
    plan,
    pointwise,
    quantize,
    reduce,
    rotary,
    row_norm,
    serve,
)
from kernel_fusion.backends.triton.kernels import softmax
from kernel_fusion.backends.triton.kernels.constants import Constants
from kernel_fusion.core.stages import Given
from kernel_fusion.operators import fallback

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}
_DEVICES = {
    "80": plan.DeviceLimits(108, 32, 65536),
    "90": plan.DeviceLimits(132, 32, 65536, rounds_float8=True),
    "100": plan.DeviceLimits(148, 32, 65536, rounds_float8=True),
    "gfx942": plan.DeviceLimits(304, 64),
}
_SHARED_BYTES = {"80": 166912, "90": 232448, "100": 232448, "gfx942": 65536}
# Constants that make another kernel of one.
_KINDS = ("looped", "codes", "columns", "joined", "backward")


class Launch(NamedTuple):
    """The arguments of `launch`."""

    kernel: Any
    args: tuple[Any, ...]
    warps: int
    registers: int | None
    constants: Constants


def record(calls: Callable[[], None], device: plan.DeviceLimits = _DEVICES["90"]) -> list[Launch]:
    """The launches that `calls` would make on a device."""
    launches: list[Launch] = []

    def recorder(
        kernel: Any, grid: tuple[Any, ...], *args: Any, constants: Constants, warps: int, registers: int | None = None
    ) -> None:
        first = next(arg for arg in args if isinstance(arg, Tensor))
        pointers = tuple(first if arg is None else arg for arg in args)
        launches.append(Launch(kernel, pointers, device.warps(warps), registers, constants))

    families = (row_norm, pointwise, reduce, rotary, softmax, quantize)
    originals = [family.launch for family in families], plan.device_of
    try:
        for family in families:
            family.launch = recorder
        plan.device_of = lambda _: device
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
        *serve("staged_row_norm", x, r, *affine, False, *stages, "hf"),
        serve("pointwise", x, r, "gate", "gelu", 1.0, 0.0, None),
        serve("pointwise", x, w, "add", "gelu", 1.0, 0.1, seed),
        serve("pointwise", x[:, : cols // 2], x[:, cols // 2 : cols // 2 * 2], "gate", "silu", 1.0, 0.0, None),
        serve("reduce", x, [-1], False, "sum_squared", None),
        serve("reduce", x, [0], False, "mean_abs", None),
        serve("softmax", x, None, 1.0, True),
        serve("softmax", x, torch.zeros(rows, cols, dtype=torch.bool), 1.0, False),
        serve("softmax", x, torch.zeros(rows, cols, dtype=torch.bool), 1.0, False, True),
    ]
    for y in results:
        torch.autograd.grad(y, [x, r, w], torch.zeros_like(y), retain_graph=True, allow_unused=True)
    torch.autograd.grad(results[0], [x], torch.zeros_like(results[0]))


def heads(batch: int, cols: int, pairs: int, dtype: torch.dtype) -> None:
    """The rotary embedding in both directions, with and without the norm, of both kinds of pairs, and positions."""
    q = torch.zeros(batch, 3, 32, cols, dtype=dtype, requires_grad=True)
    k = torch.zeros(batch, 3, 6, cols, dtype=dtype, requires_grad=True)
    w = torch.zeros(cols, dtype=dtype, requires_grad=True)
    angles = torch.zeros(1, 3, pairs, dtype=dtype)
    positions = torch.zeros(1, 3, dtype=torch.int64)
    for interleaved in (False, True):
        y, _ = serve("qk_norm_rope", q, None, None, None, angles, angles, None, None, 0.0, interleaved, "once")
        torch.autograd.grad(y, q, torch.zeros_like(y))
        both = serve("qk_norm_rope", q, k, w, w, angles, angles, positions, 1e-6, 1.0, interleaved, "hf")
        torch.autograd.grad(both, [q, k, w], [torch.zeros_like(y) for y in both], retain_graph=True)
        torch.autograd.grad(both, [q, k], [torch.zeros_like(y) for y in both])


def signature(launch: Launch) -> dict[str, tuple[str, Any]]:
    """The type of each parameter, and its value if it is compiled in."""
    found: dict[str, tuple[str, Any]] = {}
    for parameter, value in zip(launch.kernel.params, launch.args, strict=False):
        if isinstance(value, Tensor):
            found[parameter.name] = (_TYPES[value.dtype], None)
        elif value == 1 and not parameter.do_not_specialize:
            found[parameter.name] = ("constexpr", 1)
        else:
            found[parameter.name] = ("i32", None)
    return found | {"C": ("constexpr", launch.constants)}


def distinct(launches: list[Launch]) -> Iterator[Launch]:
    """One launch of each signature."""
    seen = set()
    for launch in launches:
        key = launch.kernel.fn.__name__, str(signature(launch))
        if key not in seen:
            seen.add(key)
            yield launch


def chosen(launches: list[Launch], strength: int) -> list[Launch]:
    """Few launches that have, of each kernel, all combinations of `strength` types and constants."""
    rows = []
    for launch in launches:
        types = {name: kind for name, (kind, _) in signature(launch).items()}
        row = factors({**types, "C": launch.constants, "warps": launch.warps, "registers": launch.registers})
        rows.append({f"{launch.kernel.fn.__name__}.{name}": value for name, value in row.items()})
    return [launches[index] for index in covering(rows, strength)]


def compile_for(target: GPUTarget, launch: Launch) -> tuple[int, int, int]:
    """The size of the machine code, the bytes of shared memory, and the number of packed additions in the PTX."""
    parameters = signature(launch)
    names = list(launch.kernel.arg_names)
    source = ASTSource(
        launch.kernel,
        {name: parameters[name][0] for name in names},
        constexprs={(names.index(name),): value for name, (kind, value) in parameters.items() if kind == "constexpr"},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if parameters[name][0][0] == "*"},
    )
    options = {"num_warps": launch.warps, "enable_fp_fusion": True}
    if target.backend == "hip":
        assert launch.registers is None
        code = triton.compile(source, target=target, options=options)
        return len(code.asm["hsaco"]), code.metadata.shared, 0
    code = triton.compile(source, target=target, options=options | {"maxnreg": launch.registers})
    packed = re.findall(r"\b(?:add|sub)\.[su]16x2\b", code.asm["ptx"])
    return len(code.asm["cubin"]), code.metadata.shared, len(packed)


def gated(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Norms with a gate in either place, which is half of a projection, of whole rows and of four groups."""
    x, gate = torch.zeros(rows, 2 * cols, dtype=dtype).requires_grad_().chunk(2, -1)
    w = torch.zeros(cols, dtype=dtype, requires_grad=True)
    for rms, first, whole in product((False, True), repeat=3):
        shape = (cols,) if whole else (4, cols // 4)
        tensors = [x.unflatten(-1, shape), None, 1, w.view(shape), w.view(shape), 1e-5, 0.0, None, rms]
        stages = "identity", "identity", 0.0, None, "once", gate.unflatten(-1, shape), "silu", first, not whole
        y = serve("staged_row_norm", *tensors, *stages)[0]
        torch.autograd.grad(y, [x, gate, w], torch.zeros_like(y))


def quantized(rows: int, cols: int, dtype: torch.dtype) -> None:
    """Norms and gates with every kind of codes and scales."""
    x, r = torch.zeros(2, rows, cols, dtype=dtype)
    w, scale = torch.zeros(cols, dtype=dtype), torch.ones(1)
    kinds = (torch.int8, scale, 0), (torch.float8_e4m3fn, None, 0), (torch.float8_e5m2, None, 128)
    for codes, keeps in product(kinds, (False, True)):
        for rms in (False, True):
            serve("quantized_row_norm", x, r, *codes, keeps, 1, w, w, 1e-5, 0.0, dtype, rms)
        serve("quantized_gate", x, r, "silu", *codes, keeps)
    tokens = x, None, *kinds[-1], False, 1, r, r, 1e-5, 1.0, dtype, False
    serve("quantized_row_norm", *tokens, *Given(grouped=True))


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


def modulated(cols: int, dtype: torch.dtype) -> None:
    """Both norms with a gated residual and vectors of each example, in both directions."""
    x, r = torch.zeros(2, 2, 3, cols, dtype=dtype).requires_grad_().unbind()
    w = torch.zeros(2, 1, cols, dtype=dtype, requires_grad=True)
    stages = Given(grouped=True, residual_gate=w, dropout_p=0.1, seed=torch.zeros(1, dtype=torch.int64))
    for rms in (False, True):
        results = serve("staged_row_norm", x, r, 1, w, w, 1e-5, 1.0, None, rms, *stages)
        torch.autograd.grad(results, [x, r, w], [torch.zeros_like(y) for y in results])


def activations() -> None:
    """Value and slope of every activation, in one chain each."""
    from kernel_fusion.core.activations import ACTIVATIONS

    for name in ACTIVATIONS:
        a = torch.zeros(8, 64, requires_grad=True)
        y = serve("pointwise", a, torch.zeros(8, 64, requires_grad=True), "gate", name, 1.0, 0.0, None)
        torch.autograd.grad(y, a, torch.zeros_like(y))


def all_launches(arch: str) -> list[Launch]:
    """Every kernel in bf16, fp16 and fp64, every activation, and the lengths that an architecture stands for."""

    def recorded(calls: Callable[[], None]) -> list[Launch]:
        return record(calls, _DEVICES[arch])

    launches = recorded(activations)
    for rows, cols, dtype in ((48, 1024, torch.bfloat16), (3, 40000, torch.bfloat16), (7, 320, torch.float16)):
        launches += recorded(partial(verbs, rows, cols, dtype))
    launches += recorded(lambda: verbs(5, 255, torch.float64))
    halves = (128, 64, torch.bfloat16), (96, 16, torch.float16), (6, 3, torch.float64), (512, 117, torch.float16)
    for cols, pairs, dtype in halves:
        launches += recorded(partial(heads, 2, cols, pairs, dtype))
    launches += recorded(lambda: norms(3, 2048, torch.float32))
    for cols, dtype in ((1024, torch.bfloat16), (2520, torch.float32)):
        launches += recorded(partial(gated, 3, cols, dtype))
        launches += recorded(partial(modulated, cols, dtype))
    for cols, dtype in ((320, torch.float16), (4096, torch.bfloat16), (40000, torch.bfloat16), (2048, torch.float32)):
        launches += recorded(partial(quantized, 3, cols, dtype))
    if arch == "90":
        # Rows in pieces, with 16 warps, and the longest that are kept or looped over in one direction alone.
        launches += recorded(lambda: norms(3, 3000, torch.bfloat16))
        for cols in (4096, 5120, 16384):
            launches += recorded(partial(norms, 3, cols, torch.float32))
        launches += recorded(lambda: norms(3, 24576, torch.bfloat16))
        for cols, dtype in ((4096, torch.float32), (8192, torch.bfloat16), (40000, torch.bfloat16)):
            launches += recorded(partial(gated, 3, cols, dtype))
    if arch == "80":
        launches += recorded(lambda: norms(3, 12288, torch.float32))
    return launches


def each_kernel(arch: str) -> list[Launch]:
    """One launch of each kernel, and of each that loops over a row, makes codes or sums columns."""
    found: dict[Any, Launch] = {}
    for rows, cols in ((48, 1024), (3, 40000)):
        calls = [partial(each, rows, cols, torch.bfloat16) for each in (verbs, quantized)]
        for launch in (launch for call in calls for launch in record(call, _DEVICES[arch])):
            kind = (getattr(launch.constants, name, "") for name in ("looped", "codes", "columns", "backward"))
            found.setdefault((launch.kernel, *map(bool, kind)), launch)
    for launch in record(partial(heads, 2, 128, 64, torch.bfloat16), _DEVICES[arch]):
        found.setdefault((launch.kernel, getattr(launch.constants, "backward", False)), launch)
    # Backward of a norm of heads of which most is not rotated.
    *_, last = record(partial(heads, 2, 512, 117, torch.float16), _DEVICES[arch])
    found[last.kernel, "rest"] = last
    return [*found.values()]


def main(backend: str, arch: str, which: str) -> None:
    """Compile, and print what was compiled."""
    fallback.define_triton()
    cuda = backend == "cuda"
    device = _DEVICES[arch]
    launches = [*distinct(each_kernel(arch) if which == "each" else all_launches(arch))]
    for launch in launches if which in ("each", "all") else chosen(launches, {"values": 1, "pairs": 2}[which]):
        size, taken, packed = compile_for(GPUTarget(backend, int(arch) if cuda else arch, device.warp_size), launch)
        looped = getattr(launch.constants, "looped", False)
        print(json.dumps([launch.kernel.fn.__name__, looped, size, max(0, taken - _SHARED_BYTES[arch]), packed]))


if __name__ == "__main__":
    main(*sys.argv[1:])
