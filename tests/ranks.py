"""Processes that stand for GPUs: a pool of ranks, each of which runs the same function when a test asks for it.

A pool is started once for many tests. Its processes are forks of one that has imported PyTorch, which takes seconds. A
function that fails on one rank may leave the others in a collective, so the pool ends then and the next test gets a new
one. Ranks meet in a file, so that pools of several test processes don't collide; what waits for a lost rank gives up
after a minute.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_TIMEOUT = 60  # seconds that a collective waits for the other ranks
_PATIENCE = 1500  # that a test waits for an answer; on a busy machine training takes its time
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Ranks:
    """So many processes on the device's type; calling it runs a function on each of them."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world = world
        self.device = device
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function(device, *args)`, a function at the top of a module, on every rank; raise what any raises."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        errors = [error for error in map(self._answer, range(self.world)) if error]
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))

    def stop(self) -> None:
        """End the processes: asked to, or, if one is stuck in a collective, by force."""
        for connection in self._connections:
            if not connection.closed:
                with suppress(BrokenPipeError):  # its process has ended
                    connection.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor.parallel", "kernel_fusion"])
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, self.device, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _answer(self, rank: int) -> str | None:
        try:
            if self._connections[rank].poll(_PATIENCE):
                error: str | None = self._connections[rank].recv()
                return error and f"rank {rank}: {error}"
            return f"rank {rank} did not answer"
        except EOFError:
            return f"rank {rank} ended"


def pool(world: int, device: str) -> Iterator[Ranks]:
    """Ranks for a fixture, which end with it."""
    ranks = Ranks(world, device)
    yield ranks
    ranks.stop()


def mesh(device: str, *shape: int) -> DeviceMesh:
    """All ranks, in one dimension or in this shape."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def _work(rank: int, world: int, device: str, store: Path, connection: Connection) -> None:
    if device == "cuda":  # `torch._dynamo.reset` imports this there, and PyTorch's own warnings come with it
        import_module("torch._inductor.cudagraph_trees")
    warnings.simplefilter("error")
    # PyTorch's remark where FSDP2 wraps what a parallel style of its own makes.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # PyTorch's remark where a product is the first work of the thread of backward.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        _BACKENDS[device],
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    while (task := connection.recv()) is not None:
        function, args = task
        torch.manual_seed(0)
        try:
            function(device, *args)
            error = None
        except BaseException:  # whatever it is, the test is to see it
            error = traceback.format_exc()
        connection.send(error)
    dist.destroy_process_group()
