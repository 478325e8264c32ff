"""The benchmark's operations: each is right in both of its forms, a wrong one is never timed, and bytes are counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bench_support import ABOUT, BF16, CPU, EFFORT, FP32, empty, scaled, setup
from torch import Tensor
from typer.testing import CliRunner

from kernel_fusion.cli.app import app
from kernel_fusion.core.spec import dtype_name
from kernel_fusion_bench import check, floor, memory, operations, peers, plot, providers, runner, tables, timing
from kernel_fusion_bench.floor import Floor
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.results import Measurement, Results
from kernel_fusion_bench.suites import SUITES
from kernel_fusion_bench.timing import Timing
from kernel_fusion_bench.workloads import DIRECTIONS, Function, Inputs, Workload

# Enough rows that not all of them are compared, a length that no vector divides, and more columns than rows, so that a
# causal mask leaves something out of every row.
ROWS, COLS = 24, 51
MAX_CHECKED = 10 * COLS


def of_suite(suite: str, dtype: torch.dtype = FP32) -> Iterator[Workload]:
    """The operations of a suite, at the small size."""
    small = SUITES[suite].with_shapes([(ROWS, COLS)])
    workloads = small.workloads("cpu", [dtype], small.verbs)
    return (workload for workload in workloads if not workload.what.bare)


def operation(name: str, dtype: torch.dtype = FP32) -> Workload:
    """The operation of that name."""
    return next(c for suite in ("fused-ops", "memory") for c in of_suite(suite, dtype) if c.what.name == name)


def verdict(workload: Workload, provider: Provider, max_checked: int = MAX_CHECKED) -> Any:
    """The check's verdict on a provider."""
    (inputs,) = workload.input_sets(CPU, 1)
    return check.check(workload, [provider], inputs, max_checked)[provider]


def instead(function: Callable[..., Any]) -> Provider:
    """A provider that calls `function`, whatever the workload."""
    return Provider("other", "0", lambda workload: function)


ALL = [
    *of_suite("fused-ops"),
    *of_suite("fused-ops", BF16),
    *of_suite("stages"),
    *of_suite("images"),
    *of_suite("losses"),
    *(c for c in of_suite("memory") if not c.grouped),
]


@pytest.mark.parametrize("workload", ALL, ids=str)
def test_every_operation_is_right_in_both_forms(workload: Workload) -> None:
    """PyTorch's calls and our verb, by its definition, give the same numbers within the budget of ours."""
    (inputs,) = workload.input_sets(CPU, 1)
    both = [providers.pytorch(), providers.ours("eager")]
    for comparisons in check.check(workload, both, inputs, MAX_CHECKED).values():
        assert not isinstance(comparisons, str), comparisons
        assert {c.name for c in comparisons} == {*workload.what.results, *inputs.leaves}


# A thousandth is less than the 2 % that a peer may be off, and more than the budget of ours in fp32.
@pytest.mark.parametrize("workload", [c for c in ALL if c.dtype == FP32], ids=str)
def test_a_wrong_contender_of_any_operation_is_found(workload: Workload) -> None:
    """One column of y, or all of it where it is one number: a thousandth off for ours, ten times as much for a peer."""
    assert "times its error budget off" in verdict(workload, scaled("kf-eager", 1.001, "eager"))
    assert "y is off by" in verdict(workload, scaled("peer", 10.0))


def test_every_operation_is_measured() -> None:
    """Checked and timed in both directions beside its floor, with the bytes that move."""
    few = [operation(name) for name in ("bias+gelu+dropout", "sum_squared, all", "causal attention weights")]
    for workload in few:
        results = empty()
        directions = SUITES["fused-ops"].directions
        list(runner.run(results, "kernels", workload, setup(providers.ours("eager"), directions=directions)))
        assert not results.failures
        cells = {(m.provider, m.direction, m.operation) for m in results.measurements}
        contenders = ("floor", "pytorch", "kf-eager")
        assert cells == {(p, d, workload.what.name) for p in contenders for d in ("forward", "backward")}
        for m in results.measurements:
            assert m.bytes_moved == workload.bytes_moved(m.direction, m.provider)
            assert m.gigabytes_per_second > 0


def test_fused_ops_cover_every_verb_and_activation() -> None:
    """The rows of the published table are among them, at 2048x2048 and at a size that leaves every cache."""
    suite = SUITES["fused-ops"]
    workloads = suite.workloads("cuda", [BF16], suite.verbs)
    verbs = {
        "layer_norm",
        "rms_norm",
        "add_layer_norm",
        "add_rms_norm",
        "add_act",
        "mul_act",
        "bias_act",
        "act_dropout",
    }
    assert set(suite.verbs) == verbs | {"gated_act", "sum_squared", "mean_abs", "softmax", "attention_scores"}
    names = {w.name: {c.what.name for c in workloads if c.name == w.name} for w in workloads}
    assert names.keys() == {"2048x2048", "8192x8192", "16x2048x2048"}
    assert names["2048x2048"] == names["8192x8192"] == {operation.name for operation in operations.OPERATIONS}
    assert set(operations.ACTIVATIONS) < names["2048x2048"]
    assert names["16x2048x2048"] == {"attention scores", "causal attention weights"}


def test_mixed_residuals_are_measured_in_16_bits_alone() -> None:
    """In fp32 they would be the plain case again."""
    assert {c.what.name for c in of_suite("fused-ops", BF16)} - {c.what.name for c in of_suite("fused-ops")} == {
        f"add+{norm}, fp32 residual{dropout}" for norm in ("layer_norm", "rms_norm") for dropout in ("", ", dropout")
    }


def test_dropout_is_judged_by_the_masks_that_results_show() -> None:
    """Right numbers under any mask pass; a wrong rate, another mask in backward and a forgotten scale do not."""
    workload = operation("gelu+dropout")
    workload = replace(workload, shape=(200, 400))
    assert not isinstance(verdict(workload, instead(lambda x: F.dropout(F.gelu(x), 0.125))), str)
    scaled_right = instead(lambda x: F.dropout(F.gelu(x), 0.16) * (0.84 / 0.875))
    assert "dropout kept 0.8" in verdict(workload, scaled_right, 200 * 400)
    assert "y is off by" in verdict(workload, instead(lambda x: F.dropout(F.gelu(x), 0.125) * 0.875))

    class OtherMask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return F.dropout(F.gelu(x), 0.125)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(F.dropout(F.gelu(x), 0.125), x, dy)[0]

    # Either mask lets an element through, so more are kept than either alone keeps.
    assert "dropout kept 0.9" in verdict(workload, instead(OtherMask.apply))


def test_a_residual_that_hides_small_values_does_not_hide_the_mask() -> None:
    """In bf16 a kept value may be too small to change the residual; the gradient then tells that it was kept."""
    workload = replace(operation("add+layer_norm, dropout", BF16), shape=(64, 512))
    assert not isinstance(verdict(workload, providers.pytorch()), str)
    assert not isinstance(verdict(workload, providers.ours("eager")), str)


def test_gates_are_the_halves_of_one_tensor() -> None:
    """Read where they lie, and a new tensor in every set."""
    first, second = operation("silu gate").input_sets(CPU, 2)
    gate, value = first.arguments.values()
    assert gate.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert gate.stride() == value.stride() == (2 * COLS, 1)
    assert second.arguments["gate"].data_ptr() != gate.data_ptr()


N = 4 * ROWS * COLS  # bytes of a tensor


# Every argument and result once: operands and results; cotangents, arguments and gradients in backward. Products read
# query and key of 64 columns, and write scores; the softmax of weights reads and writes them again.
@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("add+relu", 3 * N, 2 * N),
        ("leaky_relu", 2 * N, 2 * N),
        ("silu gate", 3 * N, 5 * N),
        ("bias+gelu", 2 * N + 4 * COLS, 3 * N + 8 * COLS),
        ("add+rms_norm", 4 * N + 4 * COLS, 4 * N + 8 * COLS),
        ("sum_squared, last", N + 4 * ROWS, 2 * N + 4 * ROWS),
        ("softmax, scale, mask", 2 * N + N // 4, 3 * N),
        ("softmax, scale, causal", 2 * N, 3 * N),
        ("attention scores", 16 * (N + 256 * (ROWS + COLS)), 16 * (2 * N + 512 * (ROWS + COLS))),
        ("causal attention weights", 16 * (3 * N + 256 * (ROWS + COLS)), 16 * (5 * N + 512 * (ROWS + COLS))),
    ],
)
def test_bytes_moved(name: str, forward: int, backward: int) -> None:
    """All contenders move these bytes, unless the passes of one are known."""
    workload = operation(name)
    assert workload.bytes_moved("forward", "pytorch") == workload.bytes_moved("forward", "kf-cuda") == forward
    assert workload.bytes_moved("backward", "kf-cuda") == backward
    assert workload.bytes_moved("forward+backward", "kf-cuda") == forward + backward


def test_unfused_relu_layer_norm_moves_more() -> None:
    """Two passes of ours, four of PyTorch, thirteen of CuPy's operations."""
    (workload,) = of_suite("relu-layernorm")
    passes = {p: workload.bytes_moved("forward", p) / N for p in ("kf-cuda", "pytorch", "cupy")}
    assert passes == {"kf-cuda": pytest.approx(2, rel=0.1), "pytorch": 4, "cupy": 13}


def test_floors_are_the_kernels_that_move_the_same_bytes() -> None:
    """One read and one write, two reads and one write, a read alone, a bare product and a pass over its result."""

    def run(name: str, direction: Any) -> tuple[Any, Inputs]:
        workload = replace(operation(name), shape=(2, 128, 512) if "attention" in name else (128, 512))
        (inputs,) = workload.input_sets(CPU, 1)
        inputs = inputs.map(lambda _, t: t)
        return Floor().prepare(direction, workload, inputs)(), inputs

    result, inputs = run("gelu", "forward")
    torch.testing.assert_close(result, -inputs.arguments["x"])
    result, inputs = run("gelu", "backward")
    torch.testing.assert_close(result, inputs.arguments["x"] + inputs.cotangents[0])
    result, inputs = run("add+relu", "forward")
    torch.testing.assert_close(result, inputs.arguments["a"] + inputs.arguments["b"])
    result, inputs = run("sum_squared, last", "forward")
    torch.testing.assert_close(result, inputs.arguments["x"].sum(-1))
    # Three read and two written: as many bytes as one kernel that reads and writes two tensors and a half.
    result, _ = run("silu gate", "backward")
    assert result.nbytes == 5 * 4 * 128 * 512 // 2
    result, inputs = run("attention scores", "forward")
    torch.testing.assert_close(result, inputs.arguments["query"] @ inputs.arguments["key"].mT)
    (product, passed), inputs = run("causal attention weights", "forward")
    torch.testing.assert_close(product, inputs.arguments["query"] @ inputs.arguments["key"].mT)
    assert passed.shape == product.shape
    results, _ = run("causal attention weights", "backward")
    assert [tuple(r.shape) for r in results] == [(2, 128, 64), (2, 512, 64), (2, 128, 512)]


def test_the_floor_of_reading_is_computed_where_the_bandwidth_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.5 TB/s on an H200, for reductions forward; anything else is measured."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    workload = replace(operation("sum_squared, all"), shape=(3000, 1500))
    assert floor.computed_ms("forward", workload, gpu) == pytest.approx(4e-3, rel=1e-4)
    assert floor.computed_ms("backward", workload, gpu) is None
    assert floor.computed_ms("forward", workload, CPU) is None
    assert floor.computed_ms("forward", operation("gelu"), gpu) is None
    assert floor.computed_ms("forward", operation("attention scores"), gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert floor.computed_ms("forward", workload, gpu) is None


def test_a_computed_floor_stands_beside_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without iterations, and the floor is not timed."""
    monkeypatch.setattr(floor, "computed_ms", lambda *_: 0.5)
    workload = operation("mean_abs, all")
    (inputs,) = workload.input_sets(CPU, 1)
    contenders = [Floor(), providers.pytorch()]
    outcomes = runner.time_direction(workload, "forward", contenders, [inputs], setup())
    assert outcomes["floor"] == Timing(0.5, 0.5, 0.5, 0, 0)
    assert outcomes["pytorch"].iterations > 0


def test_float64_has_no_reference() -> None:
    """The failure says so; nothing is compared with itself."""
    results = empty()
    list(runner.run(results, "kernels", operation("gelu", torch.float64), setup()))
    assert "nothing wider to be compared with" in results.failures[0].reason
    assert not results.measurements


def numpy_as_cupy() -> Provider:
    """NumPy in the place of CuPy, whose calls it has."""

    def function(workload: Workload) -> Function:
        assert workload.what.cupy is not None
        return workload.what.cupy(np)

    return Provider(
        "cupy",
        "0",
        function,
        measures=lambda workload: workload.what.cupy is not None,
        convert=lambda t: t.numpy(),
        differentiable=False,
        in_graphs=False,
    )


def test_a_contender_without_backward_is_measured_forward() -> None:
    """CuPy's chain is right, and in backward it is not mentioned; operations that it has no chain for go without it."""
    results = empty()
    (workload,) = of_suite("relu-layernorm")
    list(runner.run(results, "kernels", workload, setup(numpy_as_cupy())))
    assert not results.failures
    assert [m.direction for m in results.measurements if m.provider == "cupy"] == ["forward"]
    assert {m.direction for m in results.measurements if m.provider == "pytorch"} == {*DIRECTIONS}
    list(runner.run(results, "kernels", operation("gelu"), setup(numpy_as_cupy())))
    assert not results.failures
    assert len([m for m in results.measurements if m.provider == "cupy"]) == 1


def test_libraries_of_norms_have_no_operations() -> None:
    """They are asked for bare norms and what they name; torch.compile for everything."""
    (norm, *_) = SUITES["large"].workloads("cuda", [BF16], ["layer_norm"])
    library = peers._library("peer", "torch", {"layer_norm": lambda eps: F.layer_norm}, {"gelu": F.gelu})
    assert library.measures(norm)
    assert library.measures(operation("gelu"))
    assert not library.measures(operation("layer_norm"))
    (compiled,), _ = peers.find(["torch.compile"], CPU)
    assert compiled.measures(operation("layer_norm"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add+layer_norm, dropout", "softmax, scale, causal"])
def test_torch_compile_takes_the_operations(name: str) -> None:
    """Without graph breaks, forward and backward, right by its own masks."""
    (provider,), _ = peers.find(["torch.compile"], CPU)
    assert not isinstance(verdict(operation(name), provider), str)


def test_memory_of_pytorch_in_a_block() -> None:
    """Two inputs of norms with mean and rstd, what the products made, silu of the gate; with dropout two masks."""
    workload = operation("pre-norm block")
    (inputs,) = workload.input_sets(CPU, 1)
    saved = memory.saved_bytes(providers.pytorch(), workload, inputs)
    assert saved == 2 * (N + 8 * ROWS) + 7 * N + 4 * ROWS * (7 * COLS // 2)
    workload = operation("pre-norm block, dropout")
    (inputs,) = workload.input_sets(CPU, 1)
    mask = N  # PyTorch's on a CPU has the dtype of the data
    assert memory.saved_bytes(providers.pytorch(), workload, inputs) == saved + 2 * mask


def test_memory_suite_has_every_verb_and_three_batches_of_a_block() -> None:
    """Sequences of 128 tokens of a hidden size of 4096 on a GPU; single tokens on a CPU."""
    suite = SUITES["memory"]
    assert set(suite.verbs) == {*SUITES["fused-ops"].verbs, "block", "block_dropout"}
    for device, tokens in (("cuda", 128), ("cpu", 1)):
        blocks = suite.workloads(device, [FP32], ["block"])
        assert [(w.name, w.facts["rows"], w.facts["cols"]) for w in blocks] == [
            (f"batch {batch}", batch * tokens, 4096) for batch in (32, 64, 128)
        ]


def test_operations_of_a_shape_share_a_table_and_a_plot(tmp_path: Path) -> None:
    """A row each, with bytes, bandwidth and speedups; blocks, which have no operation, are rows of their verb."""

    def measured(operation: str | None, provider: str, ms: float) -> Measurement:
        shape = "64x32", "add_act", 64, 32, "f32", None, None, "contiguous"
        cell = Measurement(*shape, "cuda", "forward", provider, "1")
        return replace(cell, operation=operation, timing=Timing(ms, ms, ms, 9, 1), bytes_moved=10**6)

    times = {"floor": 0.01, "kf-cuda": 0.02, "pytorch": 0.06, "torch.compile": 0.03}
    several = [measured(name, p, ms) for name in ("add+relu", "mul+tanh") for p, ms in times.items()]
    results = Results("fused-ops", "Fused operations", False, ABOUT, several)
    made = {t.title: dict(zip(t.columns, t.rows[0], strict=True)) for t in tables.tables(results)}
    title = "Fused operations: 64x32, fp32, forward"
    assert list(made) == [title, f"{title}, bandwidth"]
    row, bandwidth = made.values()
    assert (row["speedup"], row["kf-cuda over torch.compile"]) == ("3.00", "1.50")
    expected = {"operation": "add+relu", "MB moved": "1.00", "kf-cuda GB/s": "50.0", "kf-cuda % of floor": "50%"}
    assert {name: bandwidth[name] for name in expected} == expected
    (path,) = plot.plot(results, tmp_path, ["time", "bandwidth"])  # one size is nothing to draw a bandwidth over
    assert path.name == "fused-ops-64x32-fp32-time.png"


def test_relu_layernorm_writes_a_table_of_contenders_and_bars(tmp_path: Path) -> None:
    """Time, bytes, bandwidth, speedup and correctness of each; CuPy is named as absent where there is no GPU."""
    arguments = ["relu-layernorm", "--device", "cpu", "--backends", "eager", "--shape", f"{ROWS}x{COLS}"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "relu-layernorm.json").read_text())
    assert data["peers"] == {"cupy": "absent: it runs on CUDA devices only"}
    assert "--directions forward --backends eager --peers cupy" in data["command"]
    records = {record["provider"]: record for record in data["measurements"]}
    assert records["pytorch"]["bytes_moved"] == 4 * N
    assert records["kf-eager"]["operation"] == "relu+layer_norm"
    assert records["kf-eager"]["error_over_budget_dweight"] <= 1
    markdown = (tmp_path / "relu-layernorm.md").read_text()
    assert (
        "| contender | µs | MB moved | GB/s | speedup | ÷ PyTorch's copy | largest error of y | error ÷ budget |"
        in markdown
    )
    assert (tmp_path / f"relu-layernorm-{ROWS}x{COLS}-fp32-time.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fused-ops", "--weights", "fp32"], "fused-ops is no suite of bare norms"),
        (["models", "--verbs", "softmax"], "models measures layer_norm, rms_norm"),
    ],
)
def test_selections_that_a_suite_cannot_serve(arguments: list[str], message: str) -> None:
    """A usage error, before anything is measured."""
    result = CliRunner().invoke(app, ["bench", *arguments, "--device", "cpu"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("suite", ["fused-ops", "stages", "rope", "quantised", "images", "losses", "memory"])
def test_a_quick_suite_has_as_many_dimensions_at_chosen_shapes(suite: str) -> None:
    """Operations on samples get samples, in a quick run too."""
    whole, quick = (
        {w.what.name: w.shape for w in chosen.workloads("cpu", [FP32], chosen.verbs)}
        for chosen in (SUITES[suite].with_shapes([(8, 256)]), SUITES[suite].quick().with_shapes([(8, 256)]))
    )
    assert quick.items() <= whole.items()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("suite", "dtype"), [("fused-ops", FP32), ("fused-ops", BF16), ("relu-layernorm", FP32), ("memory", BF16)], ids=str
)
def test_operations_on_a_gpu(suite: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every operation passes its check on our kernels and is measured."""
    options = ["--quick", "--device", "cuda", "--shape", "256x512", "--dtypes", dtype_name(dtype)]
    result = CliRunner().invoke(app, ["bench", suite, *options, "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / f"{suite}-quick.json").read_text())
    assert not data["failures"]
    chosen = SUITES[suite].quick().with_shapes([(256, 512)])
    workloads = chosen.workloads("cuda", [dtype], chosen.verbs)
    measured = {(r["verb"], r.get("operation"), r["dtype"]) for r in data["measurements"] if r["provider"] == "kf-cuda"}
    assert measured == {(w.verb, w.facts.get("operation"), w.facts["dtype"]) for w in workloads}


@pytest.mark.cuda
def test_calls_that_cannot_be_captured_are_launched() -> None:
    """They wait for the GPU, which no capture allows, and are timed all the same."""
    x = torch.randn(1000, 1000, device="cuda")
    contenders = {"waits": lambda: [lambda: x.sum().item()] * 4, "right": lambda: [lambda: torch.neg(x)] * 4}
    outcomes = timing.time_cuda(contenders, EFFORT, x.device, ["waits"])
    assert all(isinstance(outcome, Timing) for outcome in outcomes.values())
