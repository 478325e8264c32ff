"""Properties that only a GPU can show: graphs, streams, threads, devices, sizes beyond 32 bits, and launches per call.

Results against the oracle are in the files shared with the CPU, which run here with `-m cuda` too.
"""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import CUDA, assert_as_accurate, call, python, pytorch_call
from torch import Tensor
from verbs import Verb, cotangents, gradients, results

from kernel_fusion.backends.cuda.compile import counters
from kernel_fusion.native import build
from kernel_fusion.operators import loader

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _no_error_left() -> Iterator[None]:
    """Whatever a test does, no CUDA error is pending afterwards and the device computes."""
    yield
    torch.cuda.synchronize()
    assert torch.ones(8, device="cuda").sum().item() == 8


def inputs(rows: int, cols: int, dtype: torch.dtype = BF16, device: str = "cuda") -> list[Tensor]:
    """x, weight, bias (requiring gradients) and dy."""
    shapes = ((rows, cols), (cols,), (cols,), (rows, cols))
    tensors = [torch.randn(s, device=device).to(dtype) for s in shapes]
    return [t.requires_grad_() for t in tensors[:3]] + tensors[3:]


def run(verb: str, tensors: list[Tensor]) -> list[Tensor]:
    """y and all gradients."""
    y = call(verb, *tensors[:3], backend="cuda")
    return [y.detach(), *torch.autograd.grad(y, tensors[:3], tensors[3])]


def assert_equal(ones: list[Tensor], others: list[Tensor]) -> None:
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("cols", [64, 255, 1024, 4096, 12288])
def test_launches_per_call(verb: str, cols: int) -> None:
    """Inference and training forward are one launch; backward is at most two, one if only dx is wanted."""
    x, weight, bias, dy = inputs(32, cols)
    with torch.no_grad(), CUDA.ran(forward=1):
        call(verb, x, weight, bias, backend="cuda")
    with CUDA.ran(forward=1):
        y = call(verb, x, weight, bias, backend="cuda")
    before = loader.launches("cuda_launch")
    torch.autograd.grad(y, x, dy, retain_graph=True)
    assert loader.launches("cuda_launch") - before == 1
    torch.autograd.grad(y, (x, weight, bias), dy)
    assert loader.launches("cuda_launch") - before - 1 <= 2


# Grid rationale. Odd rows, which are aligned to 16 bytes if there is but one; a block of several rows; rows through
# shared memory, in a block and in a cluster.
@pytest.mark.parametrize("cols", [255, 768, 4096, 32768])
def test_another_batch_size_compiles_nothing(verb: str, cols: int) -> None:
    """Kernels are compiled per row length: other row counts find them."""
    run(verb, inputs(4, cols))
    before = (counters.compiled, counters.from_disk)
    for rows in (1, 3, 1000, 2**24 // cols):
        with CUDA.ran(forward=1, backward=1):
            run(verb, inputs(rows, cols))
    assert (counters.compiled, counters.from_disk) == before


def test_second_process_compiles_nothing(verb: str, tmp_path: Any) -> None:
    """The next process finds on disk what one process compiled."""
    code = """
        import sys, torch, kernel_fusion as kf
        from kernel_fusion.backends.cuda.compile import counters
        x = torch.randn(4, 328, device="cuda", requires_grad=True)
        getattr(kf, sys.argv[1])(x, (328,), backend="cuda").sum().backward()
        torch.cuda.synchronize()
        print(counters.compiled, counters.from_disk)
    """
    # The kernels' cache is empty, the extension is there already.
    extension = build.built_library(print).parent
    shutil.copytree(extension, tmp_path / "cache" / extension.name)
    env = {"KERNEL_FUSION_CACHE_DIR": str(tmp_path / "cache")}
    first = [int(n) for n in python(code, verb, env=env).stdout.split()]
    second = [int(n) for n in python(code, verb, env=env).stdout.split()]
    assert first[0] > 0
    assert second == [0, first[0]]


@pytest.mark.parametrize("cols", [1024, 4096, 32768])
def test_graph_capture_after_warm_up(verb: str, cols: int) -> None:
    """Forward and backward are captured after a call, and replay on new values."""
    tensors = inputs(33, cols)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), CUDA.ran(forward=1, backward=1):
        run(verb, tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with CUDA.ran(forward=1, backward=1), torch.cuda.graph(graph):
        captured = run(verb, tensors)
    for _ in range(3):
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, run(verb, tensors))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_first_use_inside_a_capture(verb: str) -> None:
    """A first use inside a capture raises, naming the warm-up call, and leaves stream and library usable."""
    cols = 1032 if verb == "layer_norm" else 1040  # lengths that nothing else uses
    x = torch.randn(4, cols, device="cuda", dtype=BF16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    words = r"(?s)inside a CUDA graph capture.*Run the same call.*once before the capture.*kernel-fusion warmup"
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            with CUDA.ran(forward=0), pytest.raises(RuntimeError, match=words):
                call(verb, x, backend="cuda")
        finally:
            graph.capture_end()
    with torch.cuda.stream(stream), CUDA.ran(forward=1):
        y = call(verb, x, backend="cuda")
    stream.synchronize()
    assert_as_accurate(y, lambda x: pytorch_call(verb, x), x)
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again), CUDA.ran(forward=1):
        captured = call(verb, x, backend="cuda")
    again.replay()
    assert torch.equal(captured, y)


def test_two_streams(verb: str) -> None:
    """Calls run on the current stream: two streams at once give each its own result."""
    sets = [inputs(2048, 4096) for _ in range(2)]
    expected = [run(verb, tensors) for tensors in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    with CUDA.ran(forward=20, backward=20):
        for _ in range(10):
            for index, (stream, tensors) in enumerate(zip(streams, sets, strict=True)):
                with torch.cuda.stream(stream):
                    results[index] = run(verb, tensors)
    torch.cuda.synchronize()
    for result, reference in zip(results, expected, strict=True):
        assert_equal(result, reference)


# Grid rationale. Rows read directly, streamed by blocks, and streamed by clusters, which also wait for each other.
@pytest.mark.parametrize(("rows", "cols"), [(20000, 1024), (6000, 4096), (5000, 10240), (3000, 32768)])
def test_grids_that_keep_together(verb: str, rows: int, cols: int) -> None:
    """Blocks of long grids wait for each other, but not for those that cannot run; no bit depends on it."""
    tensors = inputs(rows, cols)
    y, *gradients_alone = run(verb, tensors)
    few = [tensors[0][:8].detach().requires_grad_(), *tensors[1:3], tensors[3][:8]]
    assert_equal(run(verb, few)[:2], [y[:8], gradients_alone[0][:8]])
    x, weight, bias, dy = tensors
    dx = torch.autograd.grad(call(verb, x, weight.detach(), bias.detach(), backend="cuda"), x, dy)[0]
    assert torch.equal(dx, gradients_alone[0])
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[list[Tensor]] = []
    torch.cuda.synchronize()
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(verb, tensors))
    torch.cuda.synchronize()
    for one in found:
        assert_equal(one, [y, *gradients_alone])


@pytest.mark.parametrize("cols", [1024, 4096, 32768])
def test_dependent_calls_without_synchronisation(verb: str, cols: int) -> None:
    """Calls that wait for each other on the device alone, on two streams, have the bits of calls that the host awaits.

    A kernel may be launched while the one before it runs, and then waits inside (kernels/vectors.cuh).
    """
    sets = [inputs(2**22 // cols, cols) for _ in range(2)]
    expected = [_chain(verb, tensors, torch.cuda.synchronize) for tensors in sets]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    with CUDA.ran(forward=1200, backward=1200):
        for _ in range(200):
            for stream, tensors, reference, count in zip(streams, sets, expected, wrong, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead
                    results = _chain(verb, tensors, lambda: None)
                    for result, other in zip(results, reference, strict=True):
                        count += (result != other).sum()
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0]


def _chain(verb: str, tensors: list[Tensor], wait: Callable[[], None]) -> list[Tensor]:
    """norm(norm(norm(x))) and all gradients, with `wait` after each call."""
    x, weight, bias, dy = tensors
    calls = []
    for _ in range(3):
        y = call(verb, x, weight, bias, backend="cuda")
        wait()
        calls.append((x, y))
        x = y.detach().requires_grad_()
    results = [x.detach()]
    for x, y in reversed(calls):
        dy, *sums = torch.autograd.grad(y, (x, weight, bias), dy)
        wait()
        results += [dy, *sums]
    return results


def test_call_waits_for_its_stream(verb: str) -> None:
    """A call on a side stream comes after what that stream did before."""
    stream = torch.cuda.Stream()
    x = torch.zeros(64, 4096, device="cuda")
    values = torch.randn_like(x)
    call(verb, x, backend="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), CUDA.ran(forward=1):
        torch.cuda._sleep(50_000_000)
        x.copy_(values)
        y = call(verb, x, backend="cuda")
    stream.synchronize()
    assert torch.equal(y, call(verb, values, backend="cuda"))


@pytest.mark.parametrize("first_use", [False, True])
def test_threads(verb: str, first_use: bool) -> None:
    """Fresh Python threads, forward and backward, at first use too, give the bits of one thread."""
    cols = (1048 if verb == "layer_norm" else 1056) if first_use else 1024
    sets = [inputs(64, cols) for _ in range(8)]
    if not first_use:
        run(verb, sets[0])
    start = threading.Barrier(8)

    def work(tensors: list[Tensor]) -> list[Tensor]:
        start.wait()
        for _ in range(20):
            result = run(verb, tensors)
        torch.cuda.current_stream().synchronize()
        return result

    with CUDA.ran(forward=160, backward=160), ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, sets))
    for tensors, result in zip(sets, results, strict=True):
        assert_equal(result, run(verb, tensors))


def test_backward_alone_in_a_fresh_thread(verb: str) -> None:
    """Backward of a graph built elsewhere works in a thread that never touched the device."""
    x, weight, bias, dy = inputs(16, 1024)
    expected = run(verb, [x, weight, bias, dy])[1:]
    y = call(verb, x, weight, bias, backend="cuda")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(torch.autograd.grad(y, (x, weight, bias), dy)))
    with CUDA.ran(forward=0, backward=1):
        thread.start()
        thread.join()
    assert_equal(results, expected)


def test_dtypes_in_turn(verb: str) -> None:
    """Calls that alternate between dtypes find each its own kernel."""
    sets = [inputs(8, 1024, dtype) for dtype in (torch.float32, BF16, torch.float16, torch.float64)]
    expected = [run(verb, tensors) for tensors in sets]
    with CUDA.ran(forward=12, backward=12):
        for _ in range(3):
            for tensors, reference in zip(sets, expected, strict=True):
                assert_equal(run(verb, tensors), reference)


@pytest.mark.slow
@pytest.mark.parametrize("strided", [False, True])
def test_more_than_2_31_elements(verb: str, strided: bool) -> None:
    """Rows beyond 2^31 elements are read and written where they belong, forward and backward."""
    cols, rows = 4096, 2**31 // 4096 + 1
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    wide = torch.randn(rows, cols + 8 * strided, device="cuda", dtype=BF16)
    x = wide[:, :cols].requires_grad_()
    dy = torch.randn(rows, cols, device="cuda", dtype=BF16)
    with CUDA.ran(forward=1, backward=1):
        y = call(verb, x, backend="cuda")
        (dx,) = torch.autograd.grad(y, x, dy)
    assert x.numel() > 2**31
    edge = torch.cat([torch.arange(3), torch.arange(rows - 3, rows), torch.tensor([rows // 2])]).cuda()
    few = x.detach()[edge].requires_grad_()
    with CUDA.ran(forward=1, backward=1):
        y_few = call(verb, few, backend="cuda")
        (dx_few,) = torch.autograd.grad(y_few, few, dy[edge])
    assert torch.equal(y[edge], y_few)
    assert torch.equal(dx[edge], dx_few)
    del wide, x, dy, y, dx
    gc.collect()
    torch.cuda.empty_cache()


_BAD_CALLS: dict[str, Callable[[str, Tensor], Any]] = {
    "shape": lambda verb, x: call(verb, x, torch.ones(7, device="cuda"), backend="cuda"),
    "device": lambda verb, x: call(verb, x, torch.ones(64), backend="cuda"),
    "dtype": lambda verb, x: call(verb, x, torch.ones(64, device="cuda", dtype=torch.float64), backend="cuda"),
    "backend": lambda verb, x: call(verb, x.cpu(), backend="cuda"),
}


@pytest.mark.parametrize("bad", _BAD_CALLS)
def test_bad_call_leaves_no_cuda_error(verb: str, bad: str) -> None:
    """A refused call launches nothing, and the next call works."""
    x = torch.randn(4, 64, device="cuda")
    with CUDA.ran(forward=0), pytest.raises((RuntimeError, ValueError)):
        _BAD_CALLS[bad](verb, x)
    torch.cuda.synchronize()
    with CUDA.ran(forward=1):
        y = call(verb, x, backend="cuda")
    assert_as_accurate(y, lambda x: pytorch_call(verb, x), x)


def test_explain_shows_the_plan(verb: str) -> None:
    """`explain` gives a line per direction where a kernel of ours runs."""
    import kernel_fusion as kf

    explanation = kf.explain(getattr(kf, verb), torch.randn(4, 4096, device="cuda"), (4096,))
    assert explanation.backend == "cuda"
    assert len(explanation.plan) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_second_device(operation: Verb) -> None:
    """A device that is not the current one computes the first one's bits, and nothing makes it the current one."""
    tensors = operation.leaves(CUDA, 33, 1024)
    others = [t.detach().to("cuda:1").requires_grad_() for t in tensors]
    with operation.ran(CUDA, 2, 2):
        y, other = operation.on(CUDA)(*tensors), operation.on(CUDA)(*others)
        assert torch.cuda.current_device() == 0
        dys = cotangents(y)
        expected = [*results(y), *gradients(y, tensors, dys)]
        found = [*results(other), *gradients(other, others, [dy.to("cuda:1") for dy in dys])]
    assert torch.cuda.current_device() == 0
    assert {t.device.index for t in found} == {1}
    if operation.exact and torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert_equal([t.to("cuda:0") for t in found], expected)


def test_without_the_extension_triton_serves_the_gpu() -> None:
    """If nothing can build the extension, the verbs go to Triton's kernels, after one warning, and gradients too."""
    code = """
        import warnings
        import torch, kernel_fusion as kf
        import torch.nn.functional as F
        x, dy = torch.randn(2, 7, 4096, device="cuda").unbind()
        x.requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            both = [(y, *torch.autograd.grad(y, x, dy)) for y in (kf.layer_norm(x, 4096), F.layer_norm(x, (4096,)))]
        torch.testing.assert_close(*both)
        assert sum("works without its C++ extension" in str(each.message) for each in caught) == 1
        assert (kf.EXTENSION_LOADED, kf.CUDA_AVAILABLE) == (False, False)
        print(kf.explain(kf.layer_norm, x, 4096).backend)
    """
    assert python(code, env={"CXX": "/nonexistent", "KERNEL_FUSION_BUILD": "1"}).stdout.split() == ["triton"]
