"""The benchmark harness, from suites to timings: what it measures, and what it refuses to time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from bench_support import BF16, CPU, EFFORT, FP32, NORM, empty, norm, scaled, setup
from support import TRITON
from torch import Tensor

from kernel_fusion.operators import loader
from kernel_fusion.testing import launches
from kernel_fusion_bench import check, host, memory, page_faults, peers, providers, runner, timing
from kernel_fusion_bench.floor import Floor
from kernel_fusion_bench.providers import Provider
from kernel_fusion_bench.suites import SUITES
from kernel_fusion_bench.timing import Effort, Timing
from kernel_fusion_bench.workloads import DIRECTIONS, Function, Inputs, Workload


class Clock:
    """A clock that stands still except for calls that it is told to charge for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now

    def work(self, name: str, *seconds: float) -> Callable[[], Callable[[], None]]:
        """A contender whose call takes `seconds` in turn, beginning anew at the end."""
        count = 0

        def call() -> None:
            nonlocal count
            self.now += seconds[count % len(seconds)]
            count += 1
            self.order.append(name)

        return lambda: call


def effort(**changes: Any) -> Effort:
    """Plenty of rounds and time, with `changes`."""
    return replace(EFFORT, **({"min_rounds": 1, "max_rounds": 100, "max_seconds": 1e9} | changes))


def checked(provider: Provider, workload: Workload = NORM, max_elements: int = 1 << 20) -> Any:
    """The verdict on one provider."""
    (inputs,) = workload.input_sets(CPU, 1)
    return check.check(workload, [provider], inputs, max_elements)[provider]


def test_median_and_quartiles_of_known_samples() -> None:
    """The summary of 1, 2, 3, 4, 5 ms; of page faults, where they are counted, the median."""
    assert timing.summarise([5.0, 1.0, 3.0, 2.0, 4.0], 7) == Timing(3.0, 2.0, 4.0, 5, 7)
    assert timing.summarise([2.5], 1) == Timing(2.5, 2.5, 2.5, 1, 1)
    assert timing.summarise([1.0, 1.0, 1.0], 1, [9, 2, 3]).page_faults == 3


def test_cpu_times_are_those_of_the_calls() -> None:
    """Each contender gets its own times, in ms, and the warm-up call is not among them."""
    clock = Clock()
    calls = {"slow": clock.work("slow", 99.0, 0.2), "fast": clock.work("fast", 0.001)}
    timings = timing.time_calls(calls, effort(max_rounds=1), CPU, clock)
    assert timings["slow"].median_ms == pytest.approx(200)
    assert timings["fast"].median_ms == pytest.approx(1)


def test_cpu_contenders_take_turns_in_any_order() -> None:
    """Everybody once in a round, and after each of the others now and then: who ran before may be in the cache."""
    orders = []
    for _ in range(2):
        clock = Clock()
        timing.time_calls({name: clock.work(name, 1.0) for name in "abcd"}, effort(max_rounds=21), CPU, clock)
        orders.append("".join(clock.order)[4:])  # after the warm-up
    assert orders[0] == orders[1]
    rounds = [orders[0][i : i + 4] for i in range(0, 84, 4)]
    assert all(sorted(turns) == list("abcd") for turns in rounds)
    after = Counter(pairwise(orders[0]))
    assert all(after[one, other] >= 3 for one, other in permutations("abcd", 2))


@pytest.mark.parametrize(("min_rounds", "max_seconds", "rounds"), [(2, 0.0, 2), (1, 4.5, 5), (1, 1e9, 10)])
def test_cpu_time_cap(min_rounds: int, max_seconds: float, rounds: int) -> None:
    """At least `min_rounds`, then until the time is up, and never more than `max_rounds`."""
    clock = Clock()
    limits = effort(min_rounds=min_rounds, max_rounds=10, max_seconds=max_seconds)
    assert timing.time_calls({"a": clock.work("a", 1.0)}, limits, CPU, clock)["a"].iterations == rounds


def outcomes_of(*spreads: float) -> Callable[[], timing.Outcomes]:
    """A measurement that finds 1 ms, with the next of the spreads at each call."""
    found = iter(spreads)
    return lambda: {"a": Timing(1.0, 1.0, 1.0 + next(found), 9, 1), "b": Timing(2.0, 2.0, 2.0, 9, 1), "c": "it raised"}


@pytest.mark.parametrize(
    ("spreads", "kept", "noisy"), [((0.25,), 0.25, False), ((0.3, 0.1), 0.1, False), ((0.3, 0.5), 0.3, True)]
)
def test_noisy_cells_are_measured_again(spreads: tuple[float, ...], kept: float, noisy: bool) -> None:
    """Once, all contenders of the cell together; the steadier run counts, and is marked where it is noisy, too."""
    found = timing.steadied(outcomes_of(*spreads))["a"]
    assert isinstance(found, Timing)
    assert (found.q3_ms, found.noisy) == (1.0 + kept, noisy)


def test_host_time_is_per_call() -> None:
    """A sample is many calls; the first call, where things are built, is not among them."""
    clock = Clock()
    outcome = timing.time_host({"a": clock.work("a", 9.0, *[2e-6] * 10_000)}, effort(host_rounds=3), CPU, clock)["a"]
    assert outcome.median_ms == pytest.approx(2e-3)
    assert (outcome.iterations, len(clock.order)) == (3, 1 + 3 * outcome.calls_per_iteration)


def test_a_contender_that_raises_has_a_reason_instead_of_a_time() -> None:
    """The others are timed, whether it fails to prepare its call or in the call."""

    def broken() -> None:
        raise ValueError("no such [shape]")

    clock = Clock()
    contenders = {"call": lambda: broken, "prepare": broken, "right": clock.work("right", 0.5)}
    outcomes = timing.time_calls(contenders, effort(max_rounds=1), CPU, clock)
    assert outcomes["right"].median_ms == pytest.approx(500)
    assert outcomes["call"] == outcomes["prepare"] == "ValueError: no such [shape]"


def test_other_devices_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a call ends when the device has done it; page faults of the host say nothing about it."""
    clock = Clock()

    def wait(device: torch.device) -> None:
        clock.now += 0.25

    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    outcome = timing.time_calls({"a": clock.work("a", 0.5)}, effort(max_rounds=3), torch.device("mps"), clock)["a"]
    assert (outcome.median_ms, outcome.page_faults) == (pytest.approx(750), None)


def test_large_results_are_new_and_fault_unless_memory_is_kept() -> None:
    """64 MB are 16384 pages of 4 KB, given to the process at the first write; memory that is kept does not fault."""
    large, small = torch.randn(4096, 4096), torch.randn(512, 512)
    contenders = {"large": lambda: lambda: torch.neg(large), "small": lambda: lambda: torch.neg(small)}
    with page_faults.settled():
        new = timing.time_calls(contenders, effort(max_rounds=5), CPU)
    with page_faults.reused():
        kept = timing.time_calls(contenders, effort(max_rounds=5), CPU)
    assert max(new["small"].page_faults, kept["small"].page_faults, kept["large"].page_faults) < 10
    assert new["large"].page_faults > 20  # a page may be larger than 4 KB
    merged = timing.with_reused(new | {"other": "it raised"}, kept)
    assert merged["large"] == replace(new["large"], reused_median_ms=kept["large"].median_ms)
    assert merged["other"] == "it raised"


def test_kept_memory_belongs_to_one_tensor_at_a_time() -> None:
    """Two results that live at once do not share memory, and what was freed comes back at the next call of its size."""
    x = torch.ones(100, 1000)
    with page_faults.reused():
        first, second = x + 1, x + 2
        places = {first.data_ptr(), second.data_ptr()}
        assert len(places) == 2
        assert (first[0, 0], second[0, 0]) == (2, 3)
        del first, second
        third = x + 3
        assert third.data_ptr() in places
    assert third[-1, -1] == 4


@pytest.mark.parametrize(("num_bytes", "calls"), [(100_000, 256), (2_000_000, 150), (10_000_000_000, 4)])
def test_rotation_touches_more_than_the_cache(num_bytes: int, calls: int) -> None:
    """The inputs of one graph exceed 300 MB, in at least four calls and as far as 256 calls suffice."""
    assert timing.rotating_calls(num_bytes) == calls


def test_models_suite_is_the_published_table() -> None:
    """Eleven configurations, by rows and hidden size, in every dtype and verb asked for."""
    workloads = SUITES["models"].workloads("cpu", [BF16, FP32], ["layer_norm", "rms_norm"])
    assert len(workloads) == 44
    sizes = {w.name: (w.shape[0] * w.shape[1], w.shape[2]) for w in workloads}
    assert all((w.num_rows, w.shape[2]) == sizes[w.name] for w in workloads)
    assert sizes["BERT-Base"] == (16384, 768)
    assert sizes["GPT-3 XXL"] == (1024, 8192)
    assert sizes["GPT-3 175B"] == (512, 12288)
    mixes = {(w.verb, w.dtype, *(a.dtype for a in w.arguments.values())) for w in workloads}
    layer_norms = {("layer_norm", dtype, dtype, dtype, dtype) for dtype in (BF16, FP32)}
    assert mixes == layer_norms | {("rms_norm", dtype, dtype, dtype) for dtype in (BF16, FP32)}


def test_cpu_suite_has_the_published_shapes() -> None:
    """The four of the published benchmark first, on any device, in every dtype, beside the portable build."""
    suite = SUITES["cpu"]
    assert suite.dtypes_on("mps") == suite.dtypes_on("cpu") == (FP32, BF16, torch.float16)
    names = [w.name for w in suite.workloads("mps", [FP32], ["layer_norm"])]
    assert names[:4] == ["100x512", "1000x1024", "5000x256", "10000x10000"]
    assert set(names[4:]) == {"32768x768", "4096x4096", "64x16384", "8x131072", "200000x64"}
    assert "portable" in suite.peers
    assert "portable" in suite.quick().peers


def test_sweep_suite_goes_over_the_published_lengths() -> None:
    """4096 rows of 256 to 32768 elements, fewer on a CPU; every backend that has kernels for the device."""
    for device, rows in (("cuda", 4096), ("cpu", 512)):
        sizes = [w.shape for w in SUITES["sweep"].workloads(device, [FP32], ["rms_norm"])]
        assert {size[0] for size in sizes} == {rows}
        lengths = [size[1] for size in sizes]
        assert lengths == sorted(lengths)
        assert (lengths[0], lengths[-1], len(set(lengths))) == (256, 32768, 15)
        assert {256 << power for power in range(8)} < set(lengths)
    quick = SUITES["sweep"].quick().workloads("cuda", [FP32], ["layer_norm"])
    assert [w.shape[1] for w in quick] == [256 << power for power in range(8)]


def test_weights_have_the_dtype_asked_for() -> None:
    """fp32 parameters beside bf16 data."""
    (workload, *_) = SUITES["large"].workloads("cuda", [BF16], ["layer_norm"], FP32)
    assert (workload.name, workload.dtype) == ("131072x256", BF16)
    assert workload.arguments["weight"].dtype == workload.arguments["bias"].dtype == FP32


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_odd_suite_has_tensors_of_128_megabytes(dtype: torch.dtype) -> None:
    """Whatever the dtype; and one shape whose rows lie apart, under the same row length as an even one."""
    cases = SUITES["odd"].workloads("cuda", [dtype], ["layer_norm"])
    assert [case.shape[1] for case in cases] == [255, 1000, 1023, 3000, 5000, 7168, 14336, 50257, 4096]
    for case in cases:
        assert case.shape[0] * case.shape[1] * dtype.itemsize == pytest.approx(128e6, rel=1e-3)
    (inputs,) = replace(cases[-1], shape=(5, 4096)).input_sets(CPU, 1)
    assert inputs.arguments["x"].stride() == (4097, 1)
    assert inputs.cotangents[0].is_contiguous()


def test_prepared_calls_do_what_their_direction_says() -> None:
    """Forward builds no graph; backward and forward+backward return the same gradients, time after time."""
    (inputs,) = NORM.input_sets(CPU, 1)
    provider = providers.pytorch()
    y = provider.prepare("forward", NORM, inputs)()
    assert isinstance(y, Tensor)
    assert not y.requires_grad
    backward, both = (provider.prepare(direction, NORM, inputs) for direction in ("backward", "forward+backward"))
    expected = provider.results(NORM, inputs)
    for _ in range(2):
        torch.testing.assert_close(backward(), tuple(expected[name] for name in ("dx", "dweight", "dbias")))
        torch.testing.assert_close(both(), tuple(expected.values()))


def test_floor_moves_the_unavoidable_bytes() -> None:
    """One read and one write forward, two reads and one write backward, on contiguous tensors."""
    (inputs,) = NORM.input_sets(CPU, 1)
    x, (dy,) = inputs.arguments["x"].detach(), inputs.cotangents
    torch.testing.assert_close(Floor().prepare("forward", NORM, inputs)(), -x)
    torch.testing.assert_close(Floor().prepare("backward", NORM, inputs)(), x + dy)
    torch.testing.assert_close(Floor().prepare("forward+backward", NORM, inputs)(), (-x, x + dy))


def test_input_sets_do_not_share_memory() -> None:
    """Rotation is over different x and dy; the parameters are one pair, as in a model."""
    sets = NORM.input_sets(CPU, 3)
    assert len({t.data_ptr() for s in sets for t in (s.arguments["x"], *s.cotangents)}) == 6
    assert len({id(s.arguments["weight"]) for s in sets}) == 1


def test_cpu_memory_of_pytorch() -> None:
    """Saved: mean and rstd, the saved input not counted. Training: with y, dx and the two sums."""
    (inputs,) = NORM.input_sets(CPU, 1)
    rows, cols = NORM.shape
    saved, training = 4 * 2 * rows, 4 * (2 * rows * cols + 2 * cols + 2 * rows)
    provider = providers.pytorch()
    assert memory.saved_bytes(provider, NORM, inputs) == saved
    assert memory.training_bytes(provider, NORM, inputs) == training
    assert memory.training_bytes(providers.ours("eager"), NORM, inputs) > training


def test_memory_suite_measures_bytes_alone() -> None:
    """Saved and training bytes of each provider, and no times."""
    results = empty()
    assert list(memory.measure(results, NORM, setup(providers.ours("eager")))) == ["bytes"]
    assert [m.provider for m in results.measurements] == ["pytorch", "kf-eager"]
    for m in results.measurements:
        assert m.timing is None
        assert 0 < m.saved_bytes < m.training_memory_bytes


def test_host_suite_times_functions_and_modules() -> None:
    """PyTorch and ours in both forms and every mode; a peer, which has no module, as a function."""
    assert loader.load(), loader.error()
    results = empty()
    workload = replace(norm((1, 64), verb="rms_norm"), name="1x64")
    before = loader.launches("cpu_forward")
    list(host.measure(results, workload, setup(providers.ours("cpu"), scaled("peer", 1.0))))
    assert not results.failures
    for form, names in {"function": {"pytorch", "peer", "kf-cpu"}, "module": {"pytorch", "kf-cpu"}}.items():
        for mode in host.MODES:
            cell = [m for m in results.measurements if (m.configuration, m.direction) == (f"1x64 {form}", mode)]
            assert {m.provider for m in cell} == names
    # The two rounds of 400 calls in each form and mode, and a few to check and to warm up
    assert loader.launches("cpu_forward") - before >= 2 * 400 * 2 * len(host.MODES)


def test_check_judges_every_result_of_ours() -> None:
    """A right provider gets its comparisons, and the kernel ran."""
    assert loader.load(), loader.error()
    before = loader.launches("cpu_backward")
    comparisons = checked(providers.ours("cpu"))
    assert [c.name for c in comparisons] == ["y", "dx", "dweight", "dbias"]
    assert loader.launches("cpu_backward") > before


def test_check_refuses_results_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right numbers that no kernel of the named backend computed are not timed in its name."""
    assert loader.load(), loader.error()
    monkeypatch.setattr(loader, "launches", lambda counter: 0)
    assert "no kernel of backend 'cpu' ran" in checked(providers.ours("cpu"))


def test_triton_kernels_are_counted() -> None:
    """Results of the Triton backend pass the check, and results without a launch of its kernels do not."""
    (inputs,) = NORM.input_sets(torch.device(TRITON.device), 1)
    ours, others = providers.ours("triton"), replace(providers.ours("eager"), backend="triton")
    verdicts = check.check(NORM, [ours, others], inputs, 1 << 20)
    assert not isinstance(verdicts[ours], str)
    assert verdicts[others] == "AssertionError: no kernel of backend 'triton' ran: triton unchanged"


def test_check_compares_rows_spread_over_the_tensor() -> None:
    """As many as fit, never fewer than one; the first and the last of the tensor among them."""
    assert check.spread_rows(48, 96, 96 * 4).tolist() == [0, 16, 31, 47]
    assert check.spread_rows(48, 96, 5).tolist() == [0]
    assert check.spread_rows(48, 96, 48 * 96).tolist() == list(range(48))


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_check_of_some_rows_finds_a_wrong_sum(rows: int) -> None:
    """Rows that are not compared add nothing to dweight and dbias: right sums pass, and wrong ones are named."""
    assert not isinstance(checked(providers.pytorch(), max_elements=96 * rows), str)

    def function(workload: Workload) -> Function:
        right = workload.unfused()
        return lambda x, weight, bias: right(x, weight, bias.detach() + 0 * bias)

    wrong = checked(Provider("wrong", "0", function), max_elements=96 * rows)
    assert isinstance(wrong, str)
    assert "dbias is off by" in wrong
    assert "dweight" not in wrong


def test_a_peer_may_be_inaccurate_but_ours_may_not() -> None:
    """One column off by a thousandth: marked for a peer, refused for ours. Off by a half: refused for both."""
    assert any(not c.ok for c in checked(scaled("peer", 1.001)))
    assert "times its error budget off" in checked(scaled("kf-eager", 1.001, "eager"))
    assert "y is off by" in checked(scaled("peer", 1.5))
    assert "y is off by" in checked(scaled("peer", float("nan")))


def test_pytorch_is_timed_however_inaccurate_it_is() -> None:
    """Off by a half, which no peer may be; but not if it is no number."""
    assert not isinstance(checked(scaled("pytorch", 1.5)), str)
    assert "y is off by" in checked(scaled("pytorch", float("nan")))


def test_a_wrong_provider_is_not_timed() -> None:
    """It becomes a failure that says what is wrong; PyTorch and the floor are still measured."""
    results = empty()
    steps = list(runner.run(results, "kernels", NORM, setup(scaled("kf-cpu", 1.001, "cpu"))))
    assert steps == ["a: checked", *(f"a: {direction}" for direction in DIRECTIONS)]
    (failure,) = results.failures
    assert failure.provider == "kf-cpu"
    assert {m.provider for m in results.measurements} == {"floor", "pytorch"}


def test_a_provider_that_fails_in_one_direction_is_timed_in_the_others() -> None:
    """Its reason names the direction."""

    def function(workload: Workload) -> Function:
        def training_only(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
            if not x.requires_grad:
                raise RuntimeError("no inference here")
            return workload.unfused()(x, weight, bias)

        return training_only

    results = empty()
    list(runner.run(results, "kernels", NORM, setup(Provider("peer", "0", function))))
    where = f"a (layer_norm-48x96-f32) on cpu, {torch.get_num_threads()} threads"
    assert [str(failure) for failure in results.failures] == [
        f"peer, {where}: forward: RuntimeError: no inference here"
    ]
    timed = [m.direction for m in results.measurements if m.provider == "peer"]
    assert timed == ["backward", "forward+backward"]


def test_a_workload_that_fails_altogether_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out for the inputs, say."""

    def out_of_memory(*_: Any) -> list[Inputs]:
        raise torch.OutOfMemoryError("tried to allocate 3 TB")

    monkeypatch.setattr(Workload, "input_sets", out_of_memory)
    results = empty()
    assert list(runner.run(results, "kernels", NORM, setup())) == []
    assert results.failures[0].reason == "OutOfMemoryError: tried to allocate 3 TB"


@pytest.mark.usefixtures("every_variant")
def test_the_portable_build_is_timed_in_turns_with_the_best() -> None:
    """Its calls run the kernels of that build, forward and backward, and the calls after them those of the best."""
    (provider,), _ = peers.find(["portable"], CPU)
    best, ran = loader.cpu_variant(), []

    def function(workload: Workload) -> Function:
        call = provider.function(workload)

        def noted(*arguments: Any) -> Any:
            ran.append(loader.cpu_variant())
            return call(*arguments)

        return noted

    noting = replace(provider, function=function)
    (inputs,) = NORM.input_sets(CPU, 1)
    for leaf in inputs.leaves.values():
        leaf.register_hook(lambda gradient: ran.append(loader.cpu_variant()))
    noting.results(NORM, inputs)
    for direction in DIRECTIONS:
        noting.prepare(direction, NORM, inputs)()
    # Forward to check, to time, before backward and with it; three gradients to check, of backward, and of both.
    assert ran == ["DEFAULT"] * (4 + 3 * 3)
    assert loader.cpu_variant() == best


@pytest.mark.usefixtures("every_variant")
def test_the_portable_build_is_held_to_the_budget_of_ours() -> None:
    """It is measured beside the others, on a CPU; a result that a peer would be marked for is refused."""
    (provider,), states = peers.find(["portable"], CPU)
    assert states.keys() == {"portable"}
    results = empty()
    list(runner.run(results, "kernels", NORM, setup(providers.ours("cpu"), provider)))
    assert not results.failures
    assert {m.provider for m in results.measurements} == {"floor", "pytorch", "kf-cpu", "portable"}

    def function(workload: Workload) -> Function:
        return lambda *arguments: 1.001 * provider.function(workload)(*arguments)

    wrong = replace(provider, function=function)
    assert "times its error budget off" in checked(wrong)
    assert peers.find(["portable"], torch.device("cuda"))[1] == {"portable": "absent: it runs on CPU devices only"}


def test_threads_are_those_asked_for_and_put_back() -> None:
    """One thread within, and results that say so; PyTorch's number before and after."""
    before = torch.get_num_threads()
    seen: list[int] = []

    def function(workload: Workload) -> Function:
        def counting(*arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return workload.unfused()(*arguments)

        return counting

    results = empty()
    single = replace(setup(Provider("peer", "0", function), directions=("forward",)), threads=1)
    list(runner.run(results, "kernels", NORM, single))
    assert set(seen) == {1}
    assert torch.get_num_threads() == before
    assert {str(m.place) for m in results.measurements} == {"cpu, 1 thread"}


def test_peers_are_found_or_absent_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version where it can be imported; why not where it cannot, whatever its import raises."""

    def broken() -> Provider:
        raise RuntimeError("0 active drivers")

    monkeypatch.setitem(peers.PEERS, "torch.compile", broken)
    found, states = peers.find(["torch.compile", "liger"], CPU)
    assert found == []
    assert states == {
        "torch.compile": "absent: RuntimeError: 0 active drivers",
        "liger": "absent: it runs on CUDA devices only",
    }
    monkeypatch.setitem(peers.PEERS, "torch.compile", lambda: scaled("torch.compile", 1.0))
    found, states = peers.find(["torch.compile"], CPU)
    assert [provider.name for provider in found] == ["torch.compile"]
    assert states == {"torch.compile": "0"}


@pytest.mark.slow
def test_torch_compile_runs_in_every_direction() -> None:
    """More shapes than its limit on recompilations, each right, and backward more than once over one graph."""
    (provider,), _ = peers.find(["torch.compile"], CPU)
    for rows in range(2, 12):
        workload = norm((rows, 32))
        assert not isinstance(checked(provider, workload), str)
    (inputs,) = workload.input_sets(CPU, 1)
    backward = provider.prepare("backward", workload, inputs)
    torch.testing.assert_close(backward(), backward())
    assert not provider.prepare("forward", workload, inputs)().requires_grad


def test_quack_takes_fp32_parameters_whatever_the_case() -> None:
    """The leaves are the widened ones; other verbs keep theirs."""
    provider = replace(scaled("quack", 1.0), f32_weights=("layer_norm",))
    for verb, dtype in (("layer_norm", FP32), ("rms_norm", BF16)):
        workload = norm((4, 8), BF16, verb)
        (inputs,) = workload.input_sets(CPU, 1)
        gradients = provider.prepare("backward", workload, inputs)()
        assert gradients[1].dtype == dtype


def test_pytorch_serves_the_mixes_that_it_refuses() -> None:
    """bf16 data with fp32 parameters gives bf16, from fp32 arithmetic, in both verbs."""
    for verb in ("layer_norm", "rms_norm"):
        mixed = norm((8, 64), FP32, verb)
        comparisons = checked(providers.pytorch(), replace(mixed, dtype=BF16))
        assert not isinstance(comparisons, str)
        assert all(c.ok for c in comparisons)


@pytest.mark.cuda
def test_a_failed_capture_harms_nobody_else() -> None:
    """A contender that waits for the GPU cannot be captured; the others, and whatever comes later, are timed."""
    x = torch.randn(1000, 1000, device="cuda")
    contenders = {
        "waits": lambda: [lambda: x.sum().item()] * 4,
        "right": lambda: [lambda: torch.neg(x)] * 4,
    }
    for _ in range(2):
        outcomes = timing.time_cuda(contenders, EFFORT, x.device)
        assert isinstance(outcomes["waits"], str)
        assert isinstance(outcomes["right"], Timing)
        torch.cuda.empty_cache()
        NORM.input_sets(x.device, 1)


def test_kernels_are_counted_from_the_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted before the extension is loaded, which a first call does: from there on it is."""
    answers = iter([{}, {"cuda_launch": 2}])
    monkeypatch.setattr(launches, "launches", lambda backend: next(answers))
    with launches.kernels_must_run("cuda"):
        pass
    monkeypatch.setattr(launches, "launches", lambda backend: {"cuda_launch": 2})
    with pytest.raises(AssertionError, match="cuda_launch unchanged"), launches.kernels_must_run("cuda"):
        pass
