"""The CUDA kernels without the C++ extension: the same plans, launched from Python.

This serves machines without a C++ compiler. Calls cost more host time and copy strided inputs; results have the same
bits.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from kernel_fusion.backends.cuda import planner, sum_partials
from kernel_fusion.backends.cuda.device import Device
from kernel_fusion.backends.cuda.plan import Plan
from kernel_fusion.core import arguments, checks
from kernel_fusion.core.arguments import floating
from kernel_fusion.core.checks import shaped
from kernel_fusion.core.spec import Access, RowNormSpec, SumPartialsSpec, compute_dtype, dtype_name

_ARGS_HEADER = Path(__file__).parents[2] / "native" / "shared" / "row_norm_args.h"
launches = 0


@cache
def args_structs() -> dict[str, Any]:
    """The row norms' argument structs by C++ names, read from the header."""
    plain = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_longlong, ctypes.c_double)
    known: dict[str, Any] = dict(zip(("void*", "float*", "unsigned", "long long", "double"), plain, strict=True))
    for name, body in re.findall(r"struct (\w+) {(.*?)\n};", re.sub("//.*", "", _ARGS_HEADER.read_text()), re.DOTALL):
        members = []
        for kind, words in re.findall(r"\s*(?:const )?(long long|\w+\*?) ([^;]+);", body):
            for word, count in re.findall(r"(\w+)(?:\[(\d+)\])?", words):
                members.append((word, known[kind] * int(count) if count else known[kind]))
        known[name] = type(name, (ctypes.Structure,), {"_fields_": members})
    return known


class Kernel:
    """A kernel loaded on one device, and how many blocks run at once."""

    def __init__(self, plan: Any, name: str, code: bytes, index: int) -> None:  # pragma: gpu
        from cuda.bindings import driver

        self.plan = plan
        torch.cuda.current_stream(index).synchronize()  # makes the device's context current on this thread
        library = _checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        kernel = _checked(driver.cuLibraryGetKernel(library, name.encode()))
        self.function = _checked(driver.cuKernelGetFunction(kernel))
        if plan.shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, attribute, plan.shared_bytes))
        if plan.cluster > 8:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _checked(driver.cuFuncSetAttribute(self.function, attribute, 1))
        if plan.cluster > 1:
            config = self._config(plan.cluster, 1, 0)
            self.max_blocks = plan.cluster * max(
                1, _checked(driver.cuOccupancyMaxActiveClusters(self.function, config))
            )
            return
        blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, plan.threads, plan.shared_bytes)
        multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self.max_blocks = max(1, _checked(blocks) * multiprocessors)

    @property
    def local_bytes(self) -> int:  # pragma: gpu
        """A thread's memory for what registers cannot hold."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        return int(_checked(driver.cuFuncGetAttribute(attribute, self.function)))

    def grid(self, rows: int) -> int:  # pragma: gpu
        """The number of blocks for `rows`."""
        plan = self.plan
        at_once, fewest = self.max_blocks // plan.cluster, -(-rows // plan.per_block)
        most = -(-rows // (plan.least_per_block or plan.per_block))
        groups = min(fewest, at_once) if plan.persistent else max(fewest, min(most, at_once))
        return int(groups * plan.cluster)

    def _config(self, grid_x: int, grid_y: int, stream: int) -> Any:  # pragma: gpu
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.plan.threads, 1, 1
        config.sharedMemBytes = self.plan.shared_bytes
        config.hStream = driver.CUstream(stream)
        if self.plan.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attribute.value.clusterDim
            dimension.x, dimension.y, dimension.z = self.plan.cluster, 1, 1
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def launch(self, grid_x: int, grid_y: int, device: torch.device, args: ctypes.Structure) -> None:  # pragma: gpu
        """Launch it on a device's current stream."""
        from cuda.bindings import driver

        global launches
        config = self._config(grid_x, grid_y, torch.cuda.current_stream(device).cuda_stream)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        with torch.cuda.device(device):
            _checked(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(parameters), 0))
        launches += 1


@cache
def _kernel(spec: planner.Spec, access: Access, index: int) -> Kernel:
    return Kernel(*planner.compiled(spec, access, Device.of(index)), index)


planner.forgets.append(_kernel.cache_clear)


def _checked(result: Any) -> Any:  # pragma: gpu
    error, *values = result
    if int(error):
        raise RuntimeError(f"kernel_fusion: the CUDA driver answered {error}")
    return values[0] if values else None


def _alignment(*tensors: Tensor | None) -> int:  # pragma: gpu
    bits = 16
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits & -bits


def _row_alignment(rows: Tensor, cols: int) -> int:  # pragma: gpu
    bits = _alignment(rows) | cols * rows.element_size() | 16
    return bits & -bits


def _layout(cols: int, rows: int) -> Any:  # pragma: gpu
    layout = args_structs()["RowLayout"](1, max(1, rows))
    layout.stride[2] = cols
    return layout


def _geometry(input: Tensor, num_dims: int) -> tuple[int, int]:  # pragma: gpu
    cols = math.prod(input.shape[input.dim() - num_dims :])
    return input.numel() // cols if cols else 0, cols


def _address(tensor: Tensor | None) -> int | None:  # pragma: gpu
    return None if tensor is None else tensor.data_ptr()


def _name(tensor: Tensor | None) -> str | None:  # pragma: gpu
    return None if tensor is None else dtype_name(tensor.dtype)


def _forward_results(
    input: Tensor, num_dims: int, weight: Any, bias: Any, eps: float, offset: float, out_dtype: Any, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for y and statistics."""
    shape = (1 if rms else 2, *input.shape[: input.dim() - num_dims])
    y = input.new_empty(input.shape, dtype=out_dtype)
    return y, input.new_empty(shape, dtype=compute_dtype(input.dtype)), input.new_empty(0)


def _backward_results(
    dy: Tensor, input: Tensor, stats: Tensor, num_dims: int, weight: Any, bias_dtype: Any, *rest: Any
) -> tuple[Tensor, ...]:
    """Memory for the wanted gradients."""
    wants, shape = rest[-1], input.shape[input.dim() - num_dims :]
    dweight = input.new_zeros(shape if wants[1] else 0, dtype=None if weight is None else weight.dtype)
    dbias = input.new_zeros(shape if wants[2] else 0, dtype=bias_dtype)
    return input.new_empty(input.shape if wants[0] else 0), dweight, dbias, input.new_empty(0), input.new_empty(0)


def _stats_addresses(stats: Tensor, rms: bool) -> tuple[int | None, int]:  # pragma: gpu
    return (None, stats[0].data_ptr()) if rms else (stats[0].data_ptr(), stats[1].data_ptr())


def row_norm_fwd(input: Tensor, num_dims: int, *norm: Any) -> tuple[Tensor, Tensor, Tensor]:  # pragma: gpu
    """`kernel_fusion::row_norm_fwd` without stages."""
    *affine, eps, weight_offset, _, rms = norm
    x = input.contiguous()
    weight, bias = (None if t is None else t.contiguous() for t in affine)
    y, stats, no_h = _forward_results(x, num_dims, *norm)
    rows, cols = _geometry(x, num_dims)
    if y.numel():
        names = dtype_name(x.dtype), dtype_name(y.dtype), _name(weight), _name(bias)
        spec = RowNormSpec("forward", rms, cols, *names, weight_offset != 0)
        access = Access(_row_alignment(x, cols), _row_alignment(y, cols), _alignment(weight, bias))
        kernel = _kernel(spec, access, x.device.index)
        pointers = (_address(x), _address(weight), _address(bias), _address(y), *_stats_addresses(stats, rms))
        args = args_structs()["RowNormFwdArgs"](*pointers, rows, _layout(cols, rows), eps, weight_offset)
        kernel.launch(kernel.grid(rows), 1, x.device, args)
    if rms and input.dim() > 3:  # PyTorch's LayerNorm gives a contiguous result
        y = y.contiguous(memory_format=suggest_memory_format(input))
    return y, stats, no_h


def row_norm_bwd(  # pragma: gpu
    dy: Tensor,
    input: Tensor,
    stats: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    weight_offset: float,
    rms: bool,
    output_mask: list[bool],
) -> tuple[Tensor, ...]:
    """`kernel_fusion::row_norm_bwd` without stages."""
    dy, x = dy.contiguous(), input.contiguous()
    weight = None if weight is None else weight.contiguous()
    rows, cols = _geometry(x, num_dims)
    results = _backward_results(dy, x, stats, num_dims, weight, bias_dtype, output_mask)
    dx, dweight, dbias, *_ = results
    if x.numel():
        grads = (output_mask[0], output_mask[1], output_mask[2])
        names = (dtype_name(x.dtype), dtype_name(dy.dtype), _name(weight))
        spec = RowNormSpec("backward", rms, cols, *names, None, weight_offset != 0, grads)
        access = Access(_row_alignment(x, cols), _row_alignment(dy, cols), _alignment(weight), _row_alignment(x, cols))
        pointers = (_address(dy), _address(x), *_stats_addresses(stats, rms), _address(weight))
        args = args_structs()["RowNormBwdArgs"](*pointers, _address(dx) if grads[0] else None, None, None, rows, 0)
        args.x_rows = args.dy_rows = _layout(cols, rows)
        args.weight_offset = weight_offset
        _launch_backward(spec, access, x.device, args, dweight, dbias)
    return results


def _launch_backward(  # pragma: gpu
    spec: RowNormSpec, access: Access, device: torch.device, args: Any, dweight: Tensor, dbias: Tensor
) -> None:
    """The same launches as native/extension/row_norm_cuda.cpp."""
    kernel = _kernel(spec, access, device.index)
    plan: Plan = kernel.plan
    grid = kernel.grid(args.rows)
    if not any(spec.grads[1:]):
        kernel.launch(grid, 1, device, args)
        return
    split = _kernel(planner.weight_pass(spec), access, device.index) if plan.splits else None
    tiles = -(-spec.cols // split.plan.per_block) if split else 1
    num_partials = max(1, min(-(-args.rows // 16), -(-split.max_blocks // tiles))) if split else grid // plan.cluster
    pitch = -(-spec.cols // sum_partials.COLS) * sum_partials.COLS
    acc = torch.float64 if spec.acc == "f64" else torch.float32
    partials = torch.empty(2, num_partials, pitch, dtype=acc, device=device)
    args.dweight_partials, args.dbias_partials = partials[0].data_ptr(), partials[1].data_ptr()
    args.partial_pitch = pitch
    if spec.grads[0] or split is None:
        kernel.launch(grid, 1, device, args)
    if split:
        split.launch(tiles, num_partials, device, args)
    outs = [out if wanted else None for out, wanted in ((dweight, spec.grads[1]), (dbias, spec.grads[2]))]
    finish = _kernel(SumPartialsSpec(spec.cols, spec.acc, _name(outs[0]), _name(outs[1])), Access(), device.index)
    finish_args = args_structs()["SumPartialsArgs"](num_partials=num_partials, pitch=pitch)
    finish_args.partials[:] = partials[0].data_ptr(), partials[1].data_ptr()
    finish_args.out[:] = [*map(_address, outs)]
    finish.launch(-(-spec.cols // finish.plan.per_block), 2, device, finish_args)


class RowNorm(torch.autograd.Function):
    """Autograd of the row norms, as in native/extension/row_norm_autograd.cpp."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Arguments as for `kernel_fusion::row_norm_fwd`."""
        input, num_dims, weight, bias, eps, weight_offset, _, rms = args
        y, stats, _ = torch.ops.kernel_fusion.row_norm_fwd(*args)
        ctx.save_for_backward(input, weight, bias, stats)
        ctx.call = num_dims, eps, weight_offset, rms
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of input, weight and bias."""
        (dy,) = grads
        input, weight, bias, stats = ctx.saved_tensors
        num_dims, eps, weight_offset, rms = ctx.call
        wants = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        if torch.is_grad_enabled():
            affine = (num_dims, weight, bias, eps, weight_offset, dy.dtype, rms)
            y, _ = torch.ops.kernel_fusion.staged_row_norm_reference(input, None, *affine)
            leaves = [t for t, wanted in zip((input, weight, bias), wants, strict=True) if wanted]
            found = iter(torch.autograd.grad(y, leaves, dy, create_graph=True))
            results = [next(found) if wanted else None for wanted in wants]
        else:
            bias_dtype = None if bias is None else bias.dtype
            outputs = torch.ops.kernel_fusion.row_norm_bwd(
                dy, input, stats, num_dims, weight, bias_dtype, weight_offset, rms, [*wants, False, False]
            )
            results = [out if wanted else None for out, wanted in zip(outputs, wants, strict=False)]
        return results[0], None, results[1], results[2], None, None, None, None


def _takes_forward(input: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> bool:
    _, _, out_dtype, _, *stages = rest
    if stages or not 1 <= num_dims <= input.dim() or out_dtype not in (None, *checks.FLOATING):
        return False
    return floating(input, weight, bias) and shaped(input.shape[input.dim() - num_dims :], weight, bias)


def _takes_backward(dy: Tensor, input: Tensor, stats: Tensor, num_dims: int, weight: Tensor | None, *rest: Any) -> bool:
    bias_dtype, offset, rms, wants, *stages = rest
    if stages or not _takes_forward(input, num_dims, weight, None, 0.0, offset, None, rms):
        return False
    rows = (1 if rms else 2, *input.shape[: input.dim() - num_dims])
    dtypes = floating(dy) and bias_dtype in (None, *checks.FLOATING) and stats.dtype == compute_dtype(input.dtype)
    present = (weight is not None or not wants[1]) and (bias_dtype is not None or not wants[2])
    return dtypes and present and shaped(input.shape, dy) and shaped(rows, stats) and stats.is_contiguous()


def _with_checks(function: Callable[..., Any], takes: Callable[..., bool]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        arguments.require(function.__name__, [t for t in args if isinstance(t, Tensor)], takes(*args))
        return function(*args)

    return checked


@lru_cache(maxsize=1)
def register(library: torch.library.Library) -> None:
    """Make these functions the CUDA kernels of the operators below autograd."""
    for function, takes in ((row_norm_fwd, _takes_forward), (row_norm_bwd, _takes_backward)):
        library.impl(function.__name__, _with_checks(function, takes), "CUDA")
    library.impl("row_norm_fwd", _forward_results, "Meta")
    library.impl("row_norm_bwd", _backward_results, "Meta")
