"""ONNX export: the nodes that norms become, and the numbers that ONNX Runtime computes from every verb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from support import EAGER, assert_as_accurate
from test_modules import randomize
from test_new_modules import MODULES, made
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import kernel_fusion as kf
from kernel_fusion import onnx as kf_onnx
from kernel_fusion.core.activations import ACTIVATIONS
from kernel_fusion.operators import decompositions

# Warnings of PyTorch's exporter and tracer about their own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript"),
]


def exported(module: nn.Module, inputs: Any, opset: int = 20, **options: Any) -> Any:
    """The ONNX program of a module, as the documentation makes it."""
    return kf_onnx.export(module, inputs, opset_version=opset, **options)


def operators(program: Any) -> list[str]:
    """The operators of an ONNX program, but constants."""
    return [node.op_type for node in program.model.graph if node.op_type != "Constant"]


def computed(program: Any, inputs: Any, tmp_path: Path) -> list[Tensor]:
    """ONNX Runtime's results."""
    program.save(tmp_path / "model.onnx")
    return run_file(tmp_path / "model.onnx", inputs)


def run_file(file: Path, inputs: Any) -> list[Tensor]:
    """The same of an exported file."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    named = {i.name: t.detach().numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, named)]


class _Call(nn.Module):
    """A function as a module, with a weight and a bias of 8 elements."""

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = (nn.Parameter(torch.randn(8).to(dtype)) for _ in range(2))

    def forward(self, *inputs: Tensor) -> Any:
        """The call on the inputs, weight and bias."""
        return self.function(*inputs, self.weight, self.bias)


@pytest.mark.slow  # an export takes a second
@pytest.mark.parametrize("name", MODULES)
def test_every_module(name: str, tmp_path: Path) -> None:
    """ONNX Runtime computes what the module computes, within the budget of PyTorch's composition."""
    module, inputs = made(name, EAGER)
    ours = computed(exported(module.eval(), inputs), inputs, tmp_path)

    def theirs(*inputs: Tensor) -> Any:
        return MODULES[name].pytorch(pytree.tree_map(lambda m: m.to(inputs[0].dtype), module), *inputs)

    with torch.no_grad():
        assert_as_accurate(tuple(ours), theirs, *inputs)


@pytest.mark.filterwarnings("ignore:(You are using the legacy|The feature will be removed):DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", MODULES)
def test_the_older_exporter(name: str, tmp_path: Path) -> None:
    """Where the definitions run, PyTorch's tracing exporter takes them; it knows no way to write norms in groups."""
    module, inputs = made(name, EAGER)
    file = tmp_path / "model.onnx"
    with kf.use_backend("eager"), torch.no_grad():
        theirs = module.eval()(*inputs)
        if getattr(module, "group_size", None):
            with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match="_unsafe_view"):
                torch.onnx.export(module, tuple(inputs), file, dynamo=False)
            return
        torch.onnx.export(module, tuple(inputs), file, dynamo=False, opset_version=20)
    torch.testing.assert_close(tuple(run_file(file, inputs)), tuple(pytree.tree_leaves(theirs)), rtol=1e-5, atol=1e-5)


# Each norm in one dtype and between dtypes; with an offset, without parameters, over two dimensions. The exporter
# itself computes what depends on parameters only.
_NORMS: dict[str, tuple[Callable[..., Any], torch.dtype, torch.dtype, list[str]]] = {
    "plain": (lambda x, w, b: kf.layer_norm(x, 8, w, b), torch.float32, torch.float32, ["LayerNormalization"]),
    "half": (lambda x, w, b: kf.layer_norm(x, 8, w, b), torch.float16, torch.float16, ["LayerNormalization"]),
    "mixed": (
        lambda x, w, b: kf.layer_norm(x, 8, w, b),
        torch.float16,
        torch.float32,
        ["Cast", "LayerNormalization", "Cast"],
    ),
    "out_dtype": (
        lambda x, w, b: kf.layer_norm(x, 8, w, b, out_dtype=torch.float32 if x.dtype == torch.float16 else None),
        torch.float16,
        torch.float16,
        ["Cast", "LayerNormalization"],
    ),
    "offset": (
        lambda x, w, b: kf.layer_norm(x, 8, w, b, weight_offset=1.0),
        torch.float32,
        torch.float32,
        ["LayerNormalization"],
    ),
    "two dimensions": (lambda x, w, b: kf.layer_norm(x, (4, 8)), torch.float32, torch.float32, ["LayerNormalization"]),
}


@pytest.mark.parametrize("name", _NORMS)
def test_a_layer_norm_is_one_node(name: str, tmp_path: Path) -> None:
    """LayerNorm becomes LayerNormalization, between casts where dtypes differ, with the call's result."""
    function, dtype, parameters, nodes = _NORMS[name]
    module = _Call(function, parameters)
    x = torch.randn(3, 4, 8).to(dtype)
    program = exported(module, [x])
    assert [node for node in operators(program) if node not in ("Expand", "Shape")] == nodes
    (ours,) = computed(program, [x], tmp_path)
    assert ours.dtype == (torch.float32 if name == "out_dtype" else dtype)
    with kf.use_backend("eager"):
        assert_as_accurate(ours, function, x, module.weight.detach(), module.bias.detach())


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"eps": 1e-3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_rms_norm_of_primitives(dtype: torch.dtype, options: Any, tmp_path: Path) -> None:
    """Below opset 23 an RMSNorm is computed in float32, by nodes that every runtime knows."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return kf.rms_norm(x, 8, w, bias=b, **options)

    module = _Call(function, dtype)
    x = torch.randn(3, 8).to(dtype)
    program = exported(module, [x], 18)
    assert {"Pow", "ReduceMean", "Sqrt", "Div", "Mul"} <= set(operators(program))
    with kf.use_backend("eager"):
        (ours,) = computed(program, [x], tmp_path)
        assert_as_accurate(ours, function, x, module.weight.detach(), module.bias.detach())


@pytest.mark.slow
def test_onnx_runtime_fuses_the_rms_norm(tmp_path: Path) -> None:
    """ONNX Runtime recognises the nodes as its SimplifiedLayerNormalization."""
    module = _Call(lambda x, w, b: kf.rms_norm(x, 8, w, 1e-6))
    exported(module, [torch.randn(3, 8)]).save(tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    nodes = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert nodes == ["SimplifiedLayerNormalization"]


@pytest.mark.parametrize("bias", [False, True])
def test_an_rms_norm_is_one_node_from_opset_23(bias: bool, tmp_path: Path) -> None:
    """From opset 23 an RMSNorm is one RMSNormalization, and the bias an addition."""

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return kf.rms_norm(x, 8, w, 1e-6, bias=b if bias else None)

    module = _Call(function)
    x = torch.randn(3, 8)
    program = exported(module, [x], 23)
    assert operators(program) == ["RMSNormalization", *["Add"] * bias]
    (ours,) = computed(program, [x], tmp_path)
    assert_as_accurate(ours, function, x, module.weight.detach(), module.bias.detach())


def test_a_residual_is_an_addition_before_the_norm(tmp_path: Path) -> None:
    """A norm with a residual becomes Add and LayerNormalization, which runtimes fuse."""
    x, r = torch.randn(2, 3, 8)
    module = _Call(lambda x, r, w, b: kf.add_layer_norm(x, r, 8, w, b))
    program = exported(module, [x, r])
    assert operators(program) == ["Add", "LayerNormalization"]
    y, h = computed(program, [x, r], tmp_path)
    assert torch.equal(h, x + r)
    assert_as_accurate(y, lambda h, w, b: torch.nn.functional.layer_norm(h, (8,), w, b), x + r, *module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, tmp_path: Path) -> None:
    """Each activation is exported, and ONNX Runtime computes its definition."""
    x = torch.linspace(-30, 30, 128).reshape(2, 64)
    module = _Call(lambda x, w, b: kf.act_dropout(x, activation, training=False))
    (ours,) = computed(exported(module, [x]), [x], tmp_path)
    # The runtime's polynomials of exp and erf are good to some units in the last place of the largest term.
    torch.testing.assert_close(ours, ACTIVATIONS[activation](x), rtol=2e-6, atol=2e-6)


def test_any_number_of_rows(tmp_path: Path) -> None:
    """A dynamic number of rows stays one."""
    module = nn.Sequential(kf.FusedLayerNorm(8), nn.Linear(8, 8), kf.FusedBiasAct(8, "gelu"), kf.FusedSoftmax())
    randomize(module)
    rows = torch.export.Dim("rows", min=2)
    program = exported(module, [torch.randn(4, 8)], dynamic_shapes=[{0: rows}])
    x = torch.randn(7, 8)
    (ours,) = computed(program, [x], tmp_path)
    torch.testing.assert_close(ours, module(x).detach())


@pytest.mark.slow
def test_programs_decompose_completely() -> None:
    """After the public decompositions no operator of ours is left, and the results are the definition's bits."""
    for name in MODULES:
        module, inputs = made(name, EAGER)
        program = torch.export.export(module, tuple(inputs)).run_decompositions(decompositions())
        assert not [node for node in program.graph.nodes if "kernel_fusion" in str(node.target)]
        with kf.use_backend("eager"):
            theirs = module(*inputs)
        assert all(map(torch.equal, pytree.tree_leaves(program.module()(*inputs)), pytree.tree_leaves(theirs)))
