"""torch.compile, export and tracing: one graph, one compilation for every row count, and the kernels inside it.

Dynamo's backend is "aot_eager" where only tracing is tested, since Inductor compiles for seconds; what Inductor makes
of it is tested once per direction.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CPU, CUDA, EAGER, TRITON, Target, call, python
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from verbs import VERBS, Verb, cotangents, gradients, results

import kernel_fusion as kf

ROWS = (4, 7, 64, 1000, 33)

# Grid rationale. Each operator, with what is optional and without; other verbs give the same nodes, which
# `test_training_compiles_once` traces.
_UNLIKE = (
    *("layer_norm", "rms_norm-staged", "add_layer_norm", "gated_rms_norm-grouped", "modulated_rms_norm-rows"),
    *("add_modulated_layer_norm-rows", "add_act-column", "bias_act-tanh", "act_dropout", "gated_act-row", "mean_abs"),
    *("softmax", "softmax-masked", "attention_weights", "rope", "qk_norm_rope"),
)
_others_slow = pytest.mark.parametrize(
    "operation",
    [pytest.param(verb, marks=() if name in _UNLIKE else pytest.mark.slow) for name, verb in VERBS.items()],
    ids=str,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """No graph of another test is reused."""
    torch._dynamo.reset()


def parameters(target: Target, cols: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """weight and bias, requiring gradients."""
    return [torch.randn(cols, device=target.device, dtype=dtype, requires_grad=True) for _ in range(2)]


# Grid rationale. opcheck compares schema, autograd registration, fake tensors and a traced graph with the real call;
# dtypes that differ between x, weight and y, absent parameters and strided rows are what a meta function gets wrong.
_SAMPLES: dict[str, Callable[[Target], tuple[Any, ...]]] = {
    "plain": lambda t: (torch.randn(3, 8, device=t.device), 1),
    "affine": lambda t: (torch.randn(3, 8, device=t.device), 1, *parameters(t, 8)),
    "no-grad-weight": lambda t: (
        torch.randn(3, 8, device=t.device, requires_grad=True),
        1,
        torch.randn(8, device=t.device),
    ),
    "mixed": lambda t: (
        *(torch.randn(3, 8, device=t.device, dtype=torch.bfloat16), 1, *parameters(t, 8)),
        *(1e-3, 1.0, torch.float32),
    ),
    "strided": lambda t: (
        torch.randn(8, 5, 3, device=t.device).transpose(0, 2).requires_grad_(),
        2,
        torch.ones(5, 8, device=t.device),
    ),
    "one-row": lambda t: (torch.randn(8, device=t.device, requires_grad=True), 1),
    "no-rows": lambda t: (torch.randn(0, 8, device=t.device, requires_grad=True), 1, *parameters(t, 8)),
}


@pytest.mark.parametrize("sample", _SAMPLES)
def test_opcheck_of_the_verbs(verb: str, sample: str, target: Target) -> None:
    """PyTorch's own check of custom operators passes."""
    with target.ran(forward=0 if sample == "no-rows" else None, backward=0 if sample == "no-rows" else None):
        args = _SAMPLES[sample](target)
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            args[0].requires_grad_()
        torch.library.opcheck(getattr(torch.ops.kernel_fusion, verb).default, args)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_parts(rms: bool, dtype: torch.dtype, target: Target) -> None:
    """The operators below autograd pass PyTorch's check too."""
    x, weight, bias = (torch.randn(s, device=target.device, dtype=dtype) for s in ((3, 8), (8,), (8,)))
    forward = (x, 1, weight, bias, 1e-5, 0.0, None, rms)
    with target.ran(forward=None, backward=None):
        torch.library.opcheck(torch.ops.kernel_fusion.row_norm_fwd.default, forward)
        y, stats, _ = torch.ops.kernel_fusion.row_norm_fwd(*forward)
        backward = (torch.randn_like(y), x, stats, 1, weight, dtype, 0.0, rms, [True, True, True, False, False])
        torch.library.opcheck(torch.ops.kernel_fusion.row_norm_bwd.default, backward)


# Grid rationale. One call of each operator of the other families with every tensor, and one with what is optional left
# out; operands of other dtypes and strides, broadcast ones, and results of another dtype.
def _seed(target: Target) -> Tensor:
    return torch.tensor([7], device=target.device)


def _randn(target: Target, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=target.device, dtype=dtype, requires_grad=True)


def _leaf(x: Tensor) -> Tensor:
    """A view as a leaf with gradients."""
    return x.detach().requires_grad_()


_FAMILIES: dict[str, tuple[str, Callable[[Target], tuple[Any, ...]]]] = {
    "chain": ("pointwise", lambda t: (_randn(t, 3, 8), _randn(t, 8), "add", "gelu", 1.0, 0.0, None)),
    "chain-of-one": ("pointwise", lambda t: (_randn(t, 3, 8), None, "first", "silu", 1.0, 0.25, _seed(t))),
    "chain-mixed": (
        "pointwise",
        lambda t: (_randn(t, 3, 1, dtype=torch.bfloat16), _leaf(_randn(t, 8, 3).T[:1]), "gate", "tanh", 0.5, 0.0, None),
    ),
    "sum": ("reduce", lambda t: (_randn(t, 3, 4, 5), [0, 2], True, "sum_squared", None)),
    "mean": ("reduce", lambda t: (_randn(t, 3, 8, dtype=torch.bfloat16), [], False, "mean_abs", torch.float32)),
    "softmax": ("softmax", lambda t: (_randn(t, 2, 3, 8), _leaf(_randn(t, 3, 1).expand(2, 3, 8)), 0.5, True)),
    "softmax-half": (
        "softmax",
        lambda t: (
            _randn(t, 3, 8, dtype=torch.bfloat16),
            _leaf(_randn(t, 8, dtype=torch.bfloat16).expand(3, 8)),
            1.0,
            False,
        ),
    ),
    "softmax-plain": ("softmax", lambda t: (_leaf(_randn(t, 8, 3).T), None, 1.0, False)),
    "staged": (
        "staged_row_norm",
        lambda t: (
            *(_randn(t, 3, 8, dtype=torch.bfloat16), _randn(t, 3, 8), 1, _randn(t, 8), _randn(t, 8), 1e-5, 1.0),
            *(torch.float16, True, "silu", "gelu", 0.25, _seed(t)),
        ),
    ),
    "staged-hf": (
        "staged_row_norm",
        lambda t: (
            *(_randn(t, 3, 8, dtype=torch.bfloat16), _randn(t, 3, 8, dtype=torch.bfloat16), 1, _randn(t, 8), None),
            *(1e-5, 0.0, None, True, "identity", "silu", 0.0, None, "hf"),
        ),
    ),
    "staged-plain": (
        "staged_row_norm",
        lambda t: (_randn(t, 3, 8), None, 1, None, None, 1e-5, 0.0, None, False, "relu", "identity", 0.0, None),
    ),
    "rotary": (
        "qk_norm_rope",
        lambda t: (
            *(_leaf(_randn(t, 2, 3, 4, 8).transpose(1, 2)), _randn(t, 2, 4, 1, 8), _randn(t, 8), None),
            *(_randn(t, 1, 4, 4).detach(), _randn(t, 1, 4, 4).detach(), None, 1e-5, 0.0, True, "once"),
        ),
    ),
    "rotary-positions": (
        "qk_norm_rope",
        lambda t: (
            *(_randn(t, 2, 4, 3, 8), None, None, None, _randn(t, 1, 9, 3).detach(), _randn(t, 1, 9, 3).detach()),
            *(torch.arange(8, device=t.device).view(2, 4), None, 0.0, False, "once"),
        ),
    ),
    "chain-backward": (
        "pointwise_bwd",
        lambda t: (
            *(a.detach() for a in (_randn(t, 3, 8), _randn(t, 3, 8), _randn(t, 8))),
            *("add", "gelu", 1.0, 0.0, None, [True, True]),
        ),
    ),
    "softmax-backward": (
        "softmax_bwd",
        lambda t: (_randn(t, 3, 8).detach(), torch.softmax(_randn(t, 3, 8).detach(), -1), 0.5),
    ),
}


# PyTorch's own warning: it looks for the .grad of saved tensors.
@pytest.mark.parametrize("sample", _FAMILIES)
def test_opcheck_of_the_families(sample: str, target: Target) -> None:
    """PyTorch's own check passes for the operators of every family."""
    name, arguments = _FAMILIES[sample]
    backward = name.endswith("_bwd")
    with target.ran(forward=0 if backward else None, backward=None):
        torch.library.opcheck(getattr(torch.ops.kernel_fusion, name).default, arguments(target))


@pytest.mark.cuda
def test_opcheck_of_bits() -> None:
    """So it does for the operators that write and read a bit per element, where there are such kernels."""
    with CUDA.ran(forward=None, backward=None):
        a = torch.randn(3, 9, device="cuda")
        chain = ("relu", 1.0, 0.0, None)
        torch.library.opcheck(torch.ops.kernel_fusion.pointwise_fwd.default, (a, a[0].clone(), "add", *chain))
        y, bits = torch.ops.kernel_fusion.pointwise_fwd(a, None, "first", *chain)
        backward = (torch.randn_like(y), bits, a[0].clone(), "first", *chain, [True, True])
        torch.library.opcheck(torch.ops.kernel_fusion.pointwise_bwd.default, backward)


def _ran_twice(operation: Verb, target: Target, backward: bool = False) -> AbstractContextManager[None]:
    """`Verb.ran` for a compiled and an eager call; Triton's kernels are launched by the graph, which counts none."""
    calls = 1 if target == TRITON else 2
    return operation.ran(target, calls, calls * backward)


# The row count is what varies from call to call; `attention_scores` has as many rows as there are queries.
@pytest.mark.slow  # training compiles the same ways, once more
def test_inference_compiles_once(operation: Verb, target: Target) -> None:
    """One full graph serves every row count, with the eager call's bits where they are always the same."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(*tensors: Tensor) -> list[Tensor]:
        return [y + 1 for y in results(operation.on(target)(tensors[0] * 2, *tensors[1:]))]

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows in ROWS:
        tensors = [t.detach() for t in operation.leaves(target, rows, 64)]
        with _ran_twice(operation, target):
            made, expected = compiled(*tensors), function(*tensors)
        if operation.exact:
            assert_equal(made, expected, target)
        else:
            torch.testing.assert_close(made, expected)
    assert _graphs(counter, operation, target) == 1


def test_training_compiles_once(operation: Verb, target: Target) -> None:
    """One full graph serves forward and backward of every row count, with the eager call's bits."""
    counter = CompileCounterWithBackend("aot_eager")
    function = operation.on(target)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows in ROWS:
        tensors = operation.leaves(target, rows, 64)
        with _ran_twice(operation, target, backward=True):
            y = compiled(*tensors)
            dys = cotangents(y)
            ours = gradients(y, tensors, dys)
            plain = gradients(function(*tensors), tensors, dys)
        assert_equal(ours, plain, target)
    assert _graphs(counter, operation, target) == 1


def assert_equal(ones: list[Tensor], others: list[Tensor], target: Target) -> None:
    """Bit for bit; on eager to PyTorch's tolerance, because its operations are decomposed where they are traced."""
    for one, other in zip(ones, others, strict=True):
        if target.backend == "eager":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


def _graphs(counter: CompileCounterWithBackend, operation: Verb, target: Target) -> int:
    """How many graphs were made; Dynamo's empty ones do not count."""
    native = target.backend != "eager" and operation.kernels != 0
    return sum(("kernel_fusion" if native else "torch") in graph.code for graph in counter.graphs)


@_others_slow
def test_automatic_backend_compiles(operation: Verb, target: Target) -> None:
    """Without a named backend the graph holds the operator, and the kernel runs."""
    compiled = torch.compile(operation.ours, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = [t.detach() for t in operation.leaves(target, 5, 64)]
    with operation.ran(target, 2):
        assert_equal(results(compiled(*tensors)), results(operation.ours(*tensors)), target)


@pytest.mark.slow
@pytest.mark.parametrize("operation", [VERBS[name] for name in _UNLIKE], ids=str)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice about products in fp32
def test_inductor(operation: Verb, target: Target) -> None:
    """Inductor's graphs run our kernels between its own, forward and backward."""
    tensors = operation.leaves(target, 5, 64)

    def function(*tensors: Tensor) -> list[Tensor]:
        return [torch.tanh(y) for y in results(operation.on(target)(*(torch.sin(t) for t in tensors)))]

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    with operation.ran(target, 1, 1):
        y = compiled(*tensors)
        dys = cotangents(y)
        made = [*y, *gradients(y, tensors, dys)]
    expected = function(*tensors)
    expected += gradients(expected, tensors, dys)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_module_compiles(target: Target) -> None:
    """The modules compile to one full graph."""
    module = torch.nn.Sequential(kf.FusedLayerNorm(64), kf.FusedRMSNorm(64)).to(target.device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(5, 64, device=target.device)
    with kf.use_backend(target.backend), target.ran(forward=4, backward=2):
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(y, module(x))


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_use_backend_inside_compile(verb: str, backend: str) -> None:
    """`use_backend` inside a compiled function chooses the backend of the calls within, in a thread that never did."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        with kf.use_backend(backend):
            return call(verb, x)

    x = torch.randn(5, 64)
    with (CPU if backend == "cpu" else EAGER).ran(forward=1), ThreadPoolExecutor(1) as thread:
        y = thread.submit(compiled, x).result()
    torch.testing.assert_close(y, call(verb, x, backend="eager"))


# PyTorch's own warning: it looks for the .grad of saved tensors when it traces.
@_others_slow
def test_compiled_autograd(operation: Verb, target: Target, request: pytest.FixtureRequest) -> None:
    """Under compiled autograd the backward is traced and gives the same bits."""
    on_a_gpu = operation.views or operation.name.startswith("cross_entropy")
    if operation.reshapes or (on_a_gpu and target == CUDA):
        reason = "PyTorch 2.13 does not tell nodes written in C++ what a gradient is that another node computed"
        request.applymarker(pytest.mark.xfail(reason=reason, raises=RuntimeError, strict=True))
    # Eight rows: a mean's gradient is multiplied by 1 / n, but divided by n where n is symbolic.
    tensors = operation.leaves(target, 8, 64)
    function = operation.on(target)
    with operation.ran(target, 2, 2):
        y = function(*tensors)
        dys = cotangents(y)
        plain = gradients(y, tensors, dys)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", dynamic=True)):
            torch.autograd.backward(results(function(*tensors)), dys)
    assert_equal([t.grad for t in tensors], plain, target)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(operation: Verb, mode: str, target: Target) -> None:
    """A traced graph holds our operator and runs the kernel."""
    tensors = [t.detach() for t in operation.leaves(target, 5, 64)]
    function = operation.on(target)
    graph = make_fx(function, tracing_mode=mode)(*tensors)
    assert operation.kernels == 0 or any("kernel_fusion" in str(node.target) for node in graph.graph.nodes)
    others = [t.detach() for t in operation.leaves(target, 9 if mode == "symbolic" else 5, 64)]
    with operation.ran(target, 2):
        assert_equal(results(graph(*others)), results(function(*others)), target)


class _Call(torch.nn.Module):
    """A verb as a module, which is what `torch.export` takes."""

    def __init__(self, operation: Verb) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The results, on the backend of `use_backend`."""
        return tuple(results(self.operation.ours(*tensors)))


@_others_slow
@pytest.mark.parametrize("strict", [False, True])
def test_export(operation: Verb, strict: bool, target: Target) -> None:
    """An exported program with a dynamic row count gives the call's results at another one."""
    rows = torch.export.Dim("rows", min=2)
    tensors = [t.detach() for t in operation.leaves(target, 4, 64)]
    shapes = [{0: rows} if shape(4, 64) != shape(5, 64) else None for shape in operation.arguments.values()]
    with kf.use_backend(None if target == TRITON else target.backend):
        program = torch.export.export(_Call(operation), tuple(tensors), dynamic_shapes=(tuple(shapes),), strict=strict)
    others = [t.detach() for t in operation.leaves(target, 9, 64)]
    with operation.ran(target, 2):
        expected = results(operation.on(target)(*others))
        assert_equal(list(program.module()(*others)), expected, target)


_FIRST_USE = """
    import warnings
    warnings.simplefilter("default")  # PyTorch's compiler warns about itself
    import torch, kernel_fusion as kf
    from kernel_fusion.operators import loader
    assert not loader.is_loaded()
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def function(x, weight):
        return kf.layer_norm(x, (8,), weight)
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = function(x, weight)
    y.sum().backward()
    expected = torch.nn.functional.layer_norm(x, (8,), weight)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(weight.grad, torch.autograd.grad(expected.sum(), weight)[0])
    print(loader.launches("cpu_forward"), loader.launches("cpu_backward"))
"""


def test_first_use_inside_a_compiled_function() -> None:
    """In a fresh process the first call may be a compiled one: the extension loads under Dynamo."""
    assert python(_FIRST_USE).stdout.split() == ["1", "1"]


def test_export_save_load(tmp_path: Path) -> None:
    """An exported program runs our kernel in a fresh process that only imports the library, at any row count."""
    module = kf.FusedLayerNorm(64)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(module, (torch.randn(4, 64),), dynamic_shapes={"input": {0: rows}}, strict=False)
    assert any("kernel_fusion" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(9, 64)
    with CPU.ran(forward=1), kf.use_backend("cpu"):
        torch.save((x, module(x)), tmp_path / "tensors.pt")
    torch.export.save(program, tmp_path / "program.pt2")
    code = """
        import sys, warnings
        warnings.simplefilter("default")
        import torch, kernel_fusion
        from kernel_fusion.operators import loader
        program = torch.export.load(sys.argv[1])
        assert not loader.is_loaded()
        x, y = torch.load(sys.argv[2])
        assert torch.equal(program.module()(x), y)
        print(loader.launches("cpu_forward"))
    """
    assert python(code, tmp_path / "program.pt2", tmp_path / "tensors.pt").stdout.split() == ["1"]


# Grid rationale. Under CPU autocast PyTorch's norms keep their input's dtype; under CUDA autocast LayerNorm returns
# float32, and RMSNorm since PyTorch 2.12. Ours follow without an upcast copy of x; an explicit out_dtype wins.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_dtypes(verb: str, dtype: torch.dtype, autocast: torch.dtype, target: Target) -> None:
    """The result's dtype under autocast is that of the installed PyTorch's norm; gradients keep their dtypes."""
    x = torch.randn(5, 64, device=target.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(64, device=target.device, requires_grad=True)
    with torch.autocast(target.device, autocast), target.ran(forward=2, backward=1):
        y = call(verb, x, weight, backend=target.backend)
        explicit = call(verb, x, weight, out_dtype=torch.float16, backend=target.backend)
        dx, dweight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    with torch.autocast(target.device, autocast):
        theirs = getattr(F, verb)(x, (64,), weight.to(dtype))  # which need not take a weight of another dtype
    assert y.dtype == theirs.dtype
    assert explicit.dtype == torch.float16
    assert (dx.dtype, dweight.dtype) == (dtype, torch.float32)


def test_autocast_module_as_its_parent(target: Target) -> None:
    """Under autocast a norm module returns its parent's dtype."""
    x = torch.randn(5, 64, device=target.device, dtype=torch.bfloat16)
    for name in ("LayerNorm", "RMSNorm"):
        kinds = getattr(torch.nn, name), getattr(kf, f"Fused{name}")
        theirs, ours = (kind(64, device=target.device, dtype=x.dtype) for kind in kinds)
        with torch.autocast(target.device, torch.bfloat16), kf.use_backend(target.backend), target.ran(forward=1):
            assert ours(x).dtype == theirs(x).dtype
