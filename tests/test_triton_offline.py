"""The Triton kernels without a GPU: they compile for it, once for any number of rows, and torch.compile sees them.

Each test runs in a process without Triton's interpreter; triton_offline.py is what compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import rest_slow
from support import python

_TESTS = Path(__file__).parent
# Kernels by name and whether they loop over a row.
_KERNELS = {
    ("row_norm_fwd", False),
    ("row_norm_bwd", False),
    ("sum_partials", False),
    ("pointwise", False),
    ("pointwise_bwd_columns", False),
    ("reduce_rows", False),
    ("reduce_columns", False),
    ("softmax_fwd", False),
    ("softmax_bwd", False),
    ("row_norm_fwd", True),
    ("quantize_rows", False),
    ("quantize_rows", True),
    ("row_norm_bwd", True),
    ("rotary", False),
    ("softmax_fwd", True),
    ("softmax_bwd", True),
}


# Grid rationale. Three NVIDIA generations and one AMD: every kernel in bf16, fp16 and fp64, every activation. sm_90
# compiles most of the plans that depend on the length, and with AMD every pair of constants; the other two, which share
# all of Triton but the last stage with sm_90, every constant.
@pytest.mark.parametrize(
    ("backend", "arch", "which"),
    rest_slow(
        [
            ("cuda", "90", "each"),
            ("cuda", "90", "pairs"),
            ("cuda", "80", "values"),
            ("cuda", "100", "values"),
            ("hip", "gfx942", "pairs"),
        ]
    ),
)
def test_every_kernel_compiles(backend: str, arch: str, which: str, tmp_path: Path) -> None:
    """Every kernel compiles, as operators launch it, to code that fits the device and that ptxas does not get wrong."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(_TESTS / "triton_offline.py"), backend, arch, which],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(size > 0 and excess == 0 for _, _, size, excess, _ in compiled)
    assert not {name for name, *_, packed in compiled if packed}, "ptxas may lose a constant of these kernels"
    assert {(name, looped) for name, looped, *_ in compiled} == _KERNELS


_CONSTANTS = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch
    import triton_offline as offline
    from kernel_fusion.operators import fallback

    fallback.define_triton()

    def signatures(rows, cols):
        launches = offline.record(lambda: offline.verbs(rows, cols, torch.bfloat16))
        named = {(launch.kernel.fn.__name__, str(offline.signature(launch))) for launch in launches}
        # Reductions aside, of which one has the number of rows for a length.
        return {(name, text) for name, text in named if not name.startswith("reduce")}

    for cols in (1024, 1000, 255, 40000):
        few, many, odd = (signatures(rows, cols) for rows in (2, 4096, 4099))
        assert few == many == odd, (cols, few ^ many, many ^ odd)
    assert signatures(2, 1024) != signatures(2, 2048)
    assert signatures(16, 1056) == signatures(16, 1120), "beyond its power of two and its divisors N is no constant"
"""


@pytest.mark.slow
def test_no_constant_depends_on_the_number_of_rows() -> None:
    """The compiled kernel is the same for any number of rows; of N it knows the block and what divides it."""
    python(_CONSTANTS, _TESTS, env={"TRITON_INTERPRET": None, "PYTHONPATH": str(_TESTS.parent)})


# torch.compile asks Triton's driver for the GPU when it looks for what a kernel writes. Nothing is run: the compiled
# graph raises.
_ABSENT_GPU = """
    import warnings
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    warnings.filterwarnings("ignore", message="`torch.jit.script")  # PyTorch, of itself
    warnings.filterwarnings("ignore", message=".*should not be instantiated")  # Dynamo, of itself
    import torch, triton
    import torch.distributed as dist
    import kernel_fusion as kf
    from kernel_fusion.backends import availability
    from kernel_fusion.backends.triton import plan
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Driver())
    plan.device_of = lambda device: plan.DeviceLimits(132, 32, 65536)
    availability.triton_is_interpreted = lambda: True  # lets CPU tensors pass for those of a GPU
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    class Reached(Exception):
        pass
"""
_TRACE = f"""{_ABSENT_GPU}
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError
    from torch._inductor.scheduler import Scheduler

    graphs, ends = [], []
    schedule = Scheduler.__init__

    def no_further(scheduler, operations):  # since there is no GPU to generate code for
        schedule(scheduler, operations)
        raise Reached

    Scheduler.__init__ = no_further

    def compiler(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([str(node.target) for node in nodes])
        of_kernels = [node.kwargs["constant_args_idx"] for node in nodes if "constant_args_idx" in node.kwargs]
        constants = [kernel_side_table.get_constant_args(index)["C"] for index in of_kernels]
        assert all(eval(repr(of_kernel), {{}}) == of_kernel for of_kernel in constants)  # in Inductor's generated code
        try:
            compile_fx_inner(graph, inputs)
        except InductorError as error:
            ends.append(str(error).split(":")[0])
        def run(*_):
            raise Reached
        return run

    def f(x, r, w):
        y, h = kf.add_layer_norm(x, r, 256, w, activation="gelu", dropout_p=0.1, backend="triton")
        y = kf.rms_norm(y, 256, w, backend="triton")
        z = kf.gated_rms_norm(y, r, 256, w, group_size=64, backend="triton")
        z = kf.gated_act(z, h, "silu", backend="triton")
        weights = kf.softmax(kf.bias_act(z, w, "gelu", backend="triton"), backend="triton")
        return kf.sum_squared(weights, -1, backend="triton")

    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=True)
    w = torch.randn(256, requires_grad=True)
    for rows in (64, 48, 33, 5000):
        x, r = torch.randn(2, rows, 256)
        try:
            compiled(x.requires_grad_(), r, w)
        except Reached:
            pass
    forward, backward = graphs  # of one compilation
    assert ends == ["Reached", "Reached"], ends
    kernels = [sum("triton_kernel_wrapper" in target for target in graph) for graph in graphs]
    assert kernels[0] == 7 and kernels[1] >= 7, kernels
    assert not any("kernel_fusion" in target for graph in graphs for target in graph), graphs
"""


@pytest.mark.slow
def test_torch_compile_sees_the_kernels() -> None:
    """One graph for any number of rows, without a break, in which Inductor finds the kernels and orders them."""
    python(_TRACE, env={"TRITON_INTERPRET": None})


_FOLLOWING = f"""{_ABSENT_GPU}
    import sys
    sys.path.insert(0, sys.argv[1])
    from support import Target
    from test_compile_shapes import MORE
    from verbs import VERBS, results

    def compiler(graph, inputs):
        kernels.append(sum("triton_kernel_wrapper" in str(node.target) for node in graph.graph.nodes))
        def run(*_):
            raise Reached
        return run

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    target = Target("cpu", "triton")
    functions = {{str(f): ([s(4, 64) != s(5, 64) for s in f.arguments.values()], f.on(target), f.leaves(target, 6, 64))
                 for f in (*VERBS.values(), *MORE) if not f.lacks(target)}}
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    for name, (of_rows, function, tensors) in functions.items():
        def call(mask, *tensors):
            return results(function(*(t[mask] if rows else t for t, rows in zip(tensors, of_rows))))
        torch._dynamo.reset()
        kernels = []
        try:
            torch.compile(call, fullgraph=True, backend=backend)(mask, *tensors)
        except Reached:
            pass
        # A product of matrices is PyTorch's, and the definition sums over rows that nobody knows the number of.
        assert name in ("attention_scores", "mean_abs") or all(kernels), (name, kernels)
        assert kernels, name
"""


@pytest.mark.slow
def test_rows_that_follow_from_data() -> None:
    """With `backend="triton"` the rows of `x[mask]` are part of a full graph, in both directions, on the kernels."""
    env = {"TRITON_INTERPRET": None, "PYTHONPATH": f"{_TESTS.parent}{os.pathsep}{_TESTS}"}
    python(_FOLLOWING, _TESTS, env=env)
