"""Retells a run of a TorchScript graph as a program: the operations that ran, and their values."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.torchscript.functions import function_called
from pytest_modelhealth.capture.torchscript.naming import Naming, function_of
from pytest_modelhealth.capture.torchscript.reading import Block, Graph, Operation, Value
from pytest_modelhealth.capture.torchscript.recording import Event, Shower, is_named
from pytest_modelhealth.capture.transcript.program import Node, Scope

Item = str | list[Any] | None
"""What a value of the graph is: the name of a tensor, a list of such items, or nothing of these."""

_LAYOUTS = frozenset({"aten::to_mkldnn", "aten::to_dense", "prim::BroadcastMKLDNNTensors"})
"""Operators that an optimisation puts in to change how tensors lie in memory."""

_COPY = "\0copy"
"""Ends the name of a tensor that is a copy of another one, as long as it is not written to."""

_CASTS = frozenset({"aten::to", "aten::contiguous", "aten::type_as"})
"""Operators that return what they take where there is nothing to change."""

_UNPACK = frozenset({"prim::ListUnpack", "prim::TupleUnpack"})
_PICK = frozenset({"aten::__getitem__", "prim::TupleIndex"})
_GROW = frozenset({"aten::append", "aten::insert", "aten::extend", "aten::_set_item"})


class _Retelling:
    """Follows a graph, and writes down its operations in the order in which they ran.

    Attributes:
        nodes: the operations.
        values: what they computed, by name.
    """

    def __init__(self, graph: Graph, naming: Naming, shower: Shower) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, Tensor] = {}
        self._graph = graph
        self._naming = naming
        self._shower = shower
        self._items: dict[str, Item] = {}
        self._latest: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._rounds: list[tuple[int, int]] = []
        """The loops that run now: how many layers lie around each, and how often it has begun."""

    def take_input(self, value: Value, given: Any) -> None:
        """Take one argument of the model."""
        self._items[value.name] = self._argument(value.name, given)

    def _argument(self, name: str, given: Any) -> Item:
        if isinstance(given, Tensor):
            self.values[name] = given.clone() if self._shower.writes_to(name) else given
            return name
        if isinstance(given, dict):
            given = list(given.values())
        if isinstance(given, list | tuple):
            return [self._argument(f"{name}[{at}]", part) for at, part in enumerate(given)]
        return None

    def run(self, block: Block) -> list[Item]:
        """Follow the operations of a block, and return what it returns."""
        for operation in block.operations:
            if operation.matters:
                self._run(operation)
        return [self._item(value) for value in block.outputs]

    def names(self, items: Iterable[Item]) -> tuple[str, ...]:
        """Return the names of all tensors in items, as they are now."""
        return tuple(dict.fromkeys(self._flat(items)))

    def _flat(self, items: Iterable[Item]) -> Iterator[str]:
        for item in items:
            if isinstance(item, str):
                if item.endswith(_COPY) and item not in self._latest:
                    item = item.removesuffix(_COPY)
                else:
                    item = self._now(item)
                yield item
            elif item is not None:
                yield from self._flat(list(item))

    def _item(self, value: Value) -> Item:
        constant = self._graph.constants.get(value.name)
        if constant is None:
            return self._items.get(value.name)
        if isinstance(constant, Tensor):
            return value.name
        return [f"{value.name}[{at}]" for at in range(len(constant))]

    def _run(self, operation: Operation) -> None:
        if operation.kind == "prim::If":
            results = [self.run(block) for block in self.branches(operation)]
            whole = (
                results[0] if len(results) == 1 else [list(r) for r in zip(*results, strict=True)]
            )
            self._assign(operation.outputs, whole)
        elif operation.kind == "prim::Loop":
            self._loop(operation)
        elif is_named(operation):
            self._operate(operation)
        else:
            self._hold(operation)

    def _loop(self, operation: Operation) -> None:
        (body,) = operation.blocks
        carried = [self._item(value) for value in operation.inputs[2:]]
        around = len(self._naming.scopes[operation])
        for number, _ in enumerate(self.iterations(operation)):
            self._assign(body.inputs[1:], carried)
            self._rounds.append((around, number))
            carried = self.run(body)[1:]
            self._rounds.pop()
        self._assign(operation.outputs, carried)

    def _hold(self, operation: Operation) -> None:
        """Follow an operation that makes no tensor of its own."""
        items = [self._item(value) for value in operation.inputs]
        whole = items[0] if operation.kind == "prim::unchecked_cast" else items
        self._assign(operation.outputs, [whole])

    def _assign(self, values: Sequence[Value], items: Sequence[Item]) -> None:
        self._items.update({v.name: item for v, item in zip(values, items, strict=True)})

    def _operate(self, operation: Operation) -> None:
        given = [self._item(value) for value in operation.inputs]
        found = self.shown(operation)
        if operation.kind in _GROW and isinstance(given[0], list):
            given[0].append(given[-1])
        elif (same := self._same(operation, given)) is not None:
            self._assign(operation.outputs, same)
        elif operation.kind in _CASTS and self._is_given(given[0], found):
            self._assign(operation.outputs, given[:1])
        else:
            self._make(operation, self.names(given), found)

    def _same(self, operation: Operation, given: list[Item]) -> list[Item] | None:
        """Return what an operation gives that only hands on what it takes; ``None`` if it does not.

        What lies elsewhere in memory can be written to without the other changing.
        """
        whole = given[0] if len(given) == 1 else given
        if operation.made_up and operation.kind in _LAYOUTS:
            items = [*self.names([given[0]]), *self.names(given[1:])]
            return [f"{item}{_COPY}" for item in items[: len(operation.outputs)]]
        if operation.kind in _UNPACK and isinstance(whole, list):
            return whole if len(whole) == len(operation.outputs) else None
        if operation.kind in _PICK and isinstance(given[0], list):
            at = self._graph.plain.get(operation.inputs[1].name)
            if isinstance(at, int) and -len(given[0]) <= at < len(given[0]):
                return [given[0][at]]
        return None

    def _is_given(self, given: Item, found: dict[str, Tensor | list[Tensor]]) -> bool:
        """Whether an operation returned the very tensor that it was given."""
        names = self.names([given])
        before = self.values.get(names[0]) if len(names) == 1 else None
        after = next(iter(found.values()), None)
        if not isinstance(after, Tensor) or before is None:
            return False
        return after.data_ptr() == before.data_ptr() and after.dtype == before.dtype

    def _make(
        self, operation: Operation, names: tuple[str, ...], found: dict[str, Tensor | list[Tensor]]
    ) -> None:
        """Write down an operation, and what it made and changed."""
        written = self._items.get(operation.writes)
        for value in operation.outputs:
            made = self._new(value, found.get(value.name)) if value.shown else list(names)
            self._items[value.name] = made
        made = [self._items[value.name] for value in operation.outputs if value.shown]
        if written is not None and made:
            self._replace(written, made[0])
        for base in self._shower.bases[operation]:
            old, new = self._items.get(base.name), self._new(base, found.get(base.name))
            self._replace(old, new)
            made.append(new)
        if outputs := self.names(made):
            self.nodes.append(
                Node(
                    self._scopes(operation),
                    function_called(function_of(operation, self._graph)),
                    names,
                    outputs,
                    operation.place.source,
                )
            )

    def _scopes(self, operation: Operation) -> tuple[Scope, ...]:
        """Return the layers around an operation; each round of a loop calls those in it anew."""
        return tuple(
            replace(
                scope, call=(*(n for around, n in self._rounds if around <= depth), *scope.call)
            )
            for depth, scope in enumerate(self._naming.scopes[operation])
        )

    def _new(self, value: Value, found: Tensor | list[Tensor] | None) -> Item:
        """Return the name of a tensor that was made, or a list of them."""
        count = self._counts[value.name]
        self._counts[value.name] += 1
        name = f"{value.name}~{count}" if count else value.name
        if isinstance(found, list):
            self.values |= {f"{name}[{at}]": tensor for at, tensor in enumerate(found)}
            return [f"{name}[{at}]" for at in range(len(found))]
        if found is not None:
            self.values[name] = found
        return name

    def _replace(self, old: Item, new: Item) -> None:
        """Let whatever is one tensor be another from here on: it was written to."""
        if isinstance(old, str) and isinstance(new, str):
            old = self._now(old)
            if old != new:
                self._latest[old] = new

    def _now(self, name: str) -> str:
        while name in self._latest:
            name = self._latest[name]
        return name

    def branches(self, operation: Operation) -> list[Block]:
        """Return those of its blocks that an operation ran: all where none has run yet."""
        return list(operation.blocks)

    def iterations(self, operation: Operation) -> Iterator[None]:
        """Yield each time that a loop ran: once where none has run yet."""
        yield

    def shown(self, operation: Operation) -> dict[str, Tensor | list[Tensor]]:
        """Return what an operation showed, by the names of the values: nothing before a run."""
        return {}


class Prospect(_Retelling):
    """All that a graph may run.

    Where something in it runs on a condition, no run has all of it in this order, and operations
    are said to take nothing.
    """

    def run(self, block: Block) -> list[Item]:
        """Follow the operations of a block, and return what it returns."""
        results = super().run(block)
        if any(one.blocks and one.matters for one in block.operations):
            self.nodes = [replace(node, inputs=()) for node in self.nodes]
        return results


class Retelling(_Retelling):
    """What one run of a graph ran.

    Args:
        graph: the graph.
        naming: its layers.
        shower: says where it shows what.
        events: what it showed; emptied on the way.
    """

    def __init__(self, graph: Graph, naming: Naming, shower: Shower, events: deque[Event]) -> None:
        super().__init__(graph, naming, shower)
        self._events = events

    def branches(self, operation: Operation) -> list[Block]:
        """Return the block that was run."""
        place, _ = self._events.popleft()
        return [operation.blocks[self._shower.of[operation].index(place)]]

    def iterations(self, operation: Operation) -> Iterator[None]:
        """Yield each time that a loop ran."""
        begin, _ = self._shower.of[operation]
        while self._events.popleft()[0] == begin:
            yield

    def shown(self, operation: Operation) -> dict[str, Tensor | list[Tensor]]:
        """Return what an operation showed, by the names of the values."""
        found: dict[str, Tensor | list[Tensor]] = {}
        for expected in self._shower.of[operation]:
            place, tensors = self._events.popleft()
            assert place == expected
            values = self._shower.showings[place].values
            if values[0].shown == "tensors":
                found[values[0].name] = tensors
            else:
                found |= {v.name: t for v, t in zip(values, tensors, strict=True)}
        return found
