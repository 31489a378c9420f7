"""CUDA graphs without CUDA: a capture takes down operators, a replay makes them in static memory.

`torch.cuda.make_graphed_callables` itself runs, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def replay(self) -> None:
        """Make the same operators on the same memory, which writes no version of a tensor."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for function, args, kwargs, static in self.made:
                results = tree_leaves(function(*args, **kwargs))
                for result, held in zip(results, static, strict=True):
                    if isinstance(held, Tensor) and held.data_ptr() != result.data_ptr():
                        held.data.copy_(result)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._graph.made.append((func, args, kwargs or {}, tree_leaves(result)))
        return result


class Cuda:
    """What of `torch.cuda` a capture needs, and whether one is under way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        for name, stand_in in {
            "CUDAGraph": Graph,
            "Stream": object,
            "stream": lambda stream: nullcontext(),
            "synchronize": lambda: None,
            "graph": self.graph,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.is_capturing,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: None)

    @contextmanager
    def graph(self, graph: Graph, pool: Any = None) -> Iterator[None]:
        """Capture what runs inside."""
        self.is_capturing = True
        try:
            with _Capture(graph):
                yield
        finally:
            self.is_capturing = False
