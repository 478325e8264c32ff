"""The pass for Inductor's settings. A separate file, because importing Inductor takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from kernel_fusion.compiler.rewrite import fuse_graph


class FusionPass(CustomGraphPass):
    """`fuse` on each graph that Inductor is given; it passes subgraphs itself."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        fuse_graph(graph, compiled=True)

    def uuid(self) -> Any:
        """A digest of the pass's sources, part of Inductor's cache keys."""
        return get_hash_for_files(tuple(sorted(str(path) for path in Path(__file__).parent.glob("*.py"))))
