"""Lets a TorchScript graph show every tensor that it computes, and which way it went."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.torchscript.reading import Block, Graph, Operation, Value

BRANCHES = ("prim::If", "prim::Loop")

_UNNAMED = frozenset(
    {"prim::TupleConstruct", "prim::ListConstruct", "prim::DictConstruct", "prim::unchecked_cast"}
    | {"prim::Uninitialized"}
)
"""Operators that only hold together what others made, or say more of its type."""


@dataclass(frozen=True, slots=True)
class Showing:
    """What a graph shows at one place.

    Args:
        values: the tensors, or the one list of them; none where it is only told to have come by.
        written: whether each is written to later.
    """

    values: tuple[Value, ...] = ()
    written: tuple[bool, ...] = ()


Event = tuple[int, list[Tensor]]
"""A place that was come by, and the tensors that it showed."""

_lock = threading.RLock()
_logs: list[tuple[deque[Event], list[Showing]]] = []


@contextmanager
def recording(showings: list[Showing]) -> Iterator[deque[Event]]:
    """Collect what a graph shows; runs in several threads wait for one another."""
    log: deque[Event] = deque()
    with _lock:
        _logs.append((log, showings))
        try:
            yield log
        finally:
            _logs.pop()


@torch.library.custom_op("modelhealth::see_values", mutates_args=("clock",))
def see_values(values: list[Tensor], clock: Tensor, place: int) -> None:
    """See tensors; the write to `clock`, any integer tensor, keeps the call in its place."""
    clock.add_(1)
    if not _logs:
        return
    log, showings = _logs[-1]
    written = showings[place].written or (False,) * len(values)
    several = len(written) != len(values)  # a list, whose length is not known before
    copies = written[:1] * len(values) if several else written
    with torch._C.DisableTorchFunction():  # no function of the model's
        kept = [_kept(value, copy) for value, copy in zip(values, copies, strict=True)]
    log.append((place, kept))


def _kept(value: Tensor, copy: bool) -> Tensor:
    if value.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return value.to_dense()
    return value.detach().clone() if copy or value.requires_grad else value


def is_named(operation: Operation) -> bool:
    """Whether an operation makes values of its own."""
    return operation.kind not in _UNNAMED and operation.kind not in BRANCHES


class Shower:
    """Rewrites a graph so that it shows its values.

    Args:
        graph: the graph, which is changed: it takes a clock as a further, last input.
        read: what was read of it.

    Attributes:
        showings: what it shows at each place.
        of: the places of each operation: those of its values, or of its blocks; one more for the
            end of a loop.
        bases: what each operation that writes changes besides its output.
    """

    def __init__(self, graph: Any, read: Graph) -> None:
        self.showings: list[Showing] = []
        self.of: dict[Operation, list[int]] = {}
        self.bases: dict[Operation, tuple[Value, ...]] = {}
        self._graph = graph
        self._aliases = graph.alias_db()
        self._values = {value.debugName(): value for value in _all_values(graph)}
        self._written: dict[str, bool] = {
            name: self._aliases.has_writers(value) for name, value in self._values.items()
        }
        self._makers = {v.name: one for one in read.body.all_operations() for v in one.outputs}
        self._clock = graph.addInput("modelhealth_clock")
        self._clock.setType(torch._C.TensorType.get())
        self._show_block(read.body)

    def writes_to(self, name: str) -> bool:
        """Whether anything in the graph writes to a value."""
        return self._written.get(name, True)

    def _show_block(self, block: Block) -> None:
        for operation in block.operations:
            if not operation.matters:
                continue
            if operation.kind in BRANCHES:
                self._show_branches(operation)
            elif is_named(operation):
                self._show_values(operation)

    def _show_branches(self, operation: Operation) -> None:
        places = []
        for block, inner in zip(operation.node.blocks(), operation.blocks, strict=True):
            self._graph.setInsertPoint(next(iter(block.nodes()), block.returnNode()))
            places.append(self._show((), ()))
            self._show_block(inner)
        if operation.kind == "prim::Loop":
            self._insert_after(operation.node)
            places.append(self._show((), ()))
        self.of[operation] = places

    def _show_values(self, operation: Operation) -> None:
        self.bases[operation] = tuple(self._bases(operation))
        tensors = [value for value in operation.outputs if value.shown == "tensor"]
        tensors += self.bases[operation]
        lists = [value for value in operation.outputs if value.shown == "tensors"]
        self.of[operation] = places = []
        self._insert_after(operation.node)
        if tensors:
            made = [self._values[value.name] for value in tensors]
            node = self._graph.create("prim::ListConstruct", made, 1)
            self._graph.insertNode(node)
            node.output().setType(torch._C.ListType(torch._C.TensorType.get()))
            places.append(self._show(tuple(tensors), (node.output(),)))
        places += [self._show((value,), (self._values[value.name],)) for value in lists]

    def _bases(self, operation: Operation) -> Iterator[Value]:
        """Yield the tensors that an operation changes by writing to a view of them."""
        name = operation.writes
        maker = self._makers.get(name)
        while maker is not None and maker.views and maker.inputs:
            base = maker.inputs[0]
            if base.shown != "tensor":
                return
            yield base
            maker = self._makers.get(base.name)

    def _show(self, values: tuple[Value, ...], shown: tuple[Any, ...]) -> int:
        place = len(self.showings)
        written = tuple(self._written[value.name] for value in values)
        self.showings.append(Showing(values, written))
        if not shown:
            empty = self._graph.create("prim::ListConstruct", [], 1)
            self._graph.insertNode(empty)
            empty.output().setType(torch._C.ListType(torch._C.TensorType.get()))
            shown = (empty.output(),)
        number = self._graph.insertConstant(place)
        node = self._graph.create("modelhealth::see_values", [*shown, self._clock, number], 0)
        self._graph.insertNode(node)
        return place

    def _insert_after(self, node: Any) -> None:
        """Insert what follows right after a node."""
        marker = self._graph.create("prim::Constant", [], 1)
        marker.insertAfter(node)
        marker.output().setType(torch._C.NoneType.get())
        self._graph.setInsertPoint(marker)


def _all_values(block: Any) -> Iterator[Any]:
    yield from block.inputs()
    for node in block.nodes():
        yield from node.outputs()
        for inner in node.blocks():
            yield from _all_values(inner)
