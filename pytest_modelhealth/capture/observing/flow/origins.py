"""Where the values of a tensor came from: a vertex, known already or made of its graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from pytest_modelhealth.capture.observing.autograd_graph import operation
from pytest_modelhealth.capture.observing.flow.attention import Facts
from pytest_modelhealth.capture.observing.flow.rows import (
    OpenCall,
    Place,
    Rows,
    counter,
    ensure_room,
    line_of,
)
from pytest_modelhealth.capture.observing.tensors import KnownTensors, version
from pytest_modelhealth.report.flow import Kind


def is_own(function: type | None) -> bool:
    """Whether a class of `torch.autograd.Function` is none of torch's own; ``None`` is no class."""
    return function is not None and function.__module__.partition(".")[0] not in (
        "torch",
        "functorch",
    )


CUSTOM: type = BackwardCFunction
"""The class of the nodes of custom functions."""
_ACCUMULATES = (1 << 64) - 1
"""The number of every node that stands for a leaf."""

Source = tuple[Kind, tuple[str, ...], Tensor]
"""A tensor that a run starts from: what it is, and the parts of its name."""


class Function(NamedTuple):
    """A call of a function that made nodes."""

    begin: int  # the first number of its nodes
    end: int  # the first after them
    call: int  # of a layer, around it
    place: Place | None  # the line that made it
    unknown: tuple[int, ...]  # operands that its nodes do not know
    name: str  # of the function
    facts: Facts | None  # what was read while it ran


class Origins:
    """Knows of each tensor which vertex it is; makes the vertices of nodes between layers.

    What leaves for Python or NumPy is not followed: a tensor that is made of numbers or an array
    afterwards, within the same call, is taken for made of all that was read there, and that is
    noted. A number that an operation takes is no operand.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._spans = [rows.running[0]]  # calls that are one vertex and made nodes, in order
        self._begins = [-1]  # their first numbers
        self._by_number: dict[int | tuple[int, int], int] = {}
        self._plain = KnownTensors[int]()
        self._within: dict[tuple[int, int], int] = {}  # what custom functions gave, as made inside
        # vertices of leaves that are none of the sources, by id: the graph holds these
        self.leaves: dict[int, int] = {}
        self.earlier: int | None = None  # the last vertex of what was computed before the run
        self._sources: dict[int, Source] = {}
        self._unnamed: Iterator[Source] = iter(())
        self.source_vertices: dict[int, int] = {}  # those met, by id
        self._functions: list[Function] = []
        self._marks: object | None = None  # the key of marks in the metadata of nodes
        self._unseen: dict[int, tuple[tuple[int, ...], int]] = {}  # by call; calls until then
        self._first = counter()
        self._readings: list[int] = []  # vertices that gave values to Python

    def name_sources(self, sources: Iterable[Source]) -> None:
        """Say what the tensors are that a run starts from.

        They are gone through when one of them is met outside of the layers.
        """
        self._unnamed = iter(sources)

    def of(self, tensor: Tensor) -> int:
        """Return the vertex that a tensor comes from."""
        node = tensor.grad_fn
        if node is None:
            return self._of_leaf(tensor) if tensor.requires_grad else self.of_plain(tensor)
        number, output = node._sequence_nr(), tensor.output_nr
        if (known := self._known(node, number, output)) is not None:
            return known
        if isinstance(node, CUSTOM) and (seen := self._plain.latest(tensor)) is not None:
            if "CheckpointFunction" in node.name():
                self._rows.revive(number)
                self._by_number[(number, output) if output else number] = seen
                return seen
            self.see_made_within(tensor)
        return self._walk(node, output)

    def see_made_within(self, tensor: Tensor) -> None:
        """Note as what the forward of a custom function made a tensor."""
        node: Any = tensor.grad_fn
        if (seen := self._plain.latest(tensor)) is not None and is_own(node._forward_cls):
            self._within[node._sequence_nr(), tensor.output_nr] = seen

    def of_all(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the vertex of each tensor."""
        return tuple(map(self.of, tensors))

    def put(self, tensor: Tensor, vertex: int) -> None:
        """Say that a vertex made a tensor without a gradient."""
        self._plain.put(tensor, version(tensor), vertex)

    def add_function(self, function: Function) -> None:
        """Take a call of a function that made nodes."""
        ensure_room(self._functions)
        self._functions.append(function)

    def mark(self, tensors: Iterable[Tensor], vertex: int) -> None:
        """Say which vertex made tensors whose nodes have the numbers of another thread.

        A mark lives with the node, and holds nothing.
        """
        self._marks = self._marks or object()
        for tensor in tensors:
            node: Any = tensor.grad_fn
            node.metadata[self._marks] = vertex

    def add_call(self, call: OpenCall, tensors: list[Tensor]) -> None:
        """Take a call that is one vertex, and what it returned."""
        rows = self._rows
        ensure_room(rows)
        call.index = len(rows)
        rows.append(call)
        makes_nodes = call.end > call.begin
        if makes_nodes:
            while self._begins[-1] > call.begin:  # those of a call inside
                self._begins.pop()
                self._spans.pop()
            self._begins.append(call.begin)
            self._spans.append(call)
        outputs = []
        for tensor in tensors:
            if tensor.requires_grad:
                call.live, call.first_cut = True, len(call.operands)
                outputs.append(call.index if makes_nodes else self.of(tensor))
                continue
            now = version(tensor)
            if self._plain.get(tensor, now) is None and id(tensor) not in self.source_vertices:
                self._plain.put(tensor, now, call.index)
            outputs.append(self.of_plain(tensor))
        call.outputs = tuple(outputs)

    def add_what_was_read(self) -> None:
        """Make a vertex of each function that leads to no end: its nodes are not walked.

        So are those of a loss that is differentiated in the forward. What such a function takes was
        read all the same; of that its plain operands are known.
        """
        walked = sorted(n if isinstance(n, int) else n[0] for n in self._by_number)
        for begin, end, call, place, unknown, name, facts in self._functions:
            at = bisect_left(walked, begin)
            if (unknown or begin < end) and (at == len(walked) or walked[at] >= end):
                unused = {**(facts or {}), "unused": True}
                self._rows.add(Kind.OPERATION, name, unknown, call=call, place=place, facts=unused)

    def forget(self) -> None:
        """Hold nothing any longer."""
        self._unnamed = iter(())
        self._plain = KnownTensors()
        held: tuple[Any, ...] = (self._sources, self._by_number, self._functions)
        for things in (*held, self._readings):
            things.clear()

    # By its node.

    def _known(self, node: Any, number: int, output: int) -> int | None:
        if self._marks is not None and self._marks in node.metadata:
            marked: int = node.metadata[self._marks]
            return marked
        vertex = self._by_number.get((number, output) if output else number)
        if vertex is not None:
            return vertex
        span = self._spans[bisect_right(self._begins, number) - 1]
        return span.index if number < span.end else None

    def _walk(self, root: Any, output: int) -> int:
        """Make the vertices of a node and of those before it that have none yet."""
        stack = [(root, output)]
        while stack:
            node, place = stack[-1]
            number = node._sequence_nr()
            if self._known(node, number, place) is None:
                todo = [
                    (following, index)
                    for following, index in node.next_functions
                    if following is not None and self._of_following(following, index) is None
                ]
                if todo:
                    stack += todo
                    continue
                self._add_node(node, number, place)
            stack.pop()
        vertex = self._known(root, root._sequence_nr(), output)
        assert vertex is not None
        return vertex

    def _of_following(self, node: Any, output: int) -> int | None:
        number = node._sequence_nr()
        if number == _ACCUMULATES:
            return self._of_leaf(node.variable)
        if number < self._first and number not in self._by_number and self._marks is None:
            vertex = self._rows.add(Kind.UNKNOWN, "made before the run", live=True)
            self._by_number[number] = self.earlier = vertex
        return self._known(node, number, output)

    def _add_node(self, node: Any, number: int, output: int) -> None:
        following = node.next_functions
        operands = [self._of_following(f, index) for f, index in following if f is not None]
        known = [operand for operand in operands if operand is not None]
        first_cut, call, place, facts = len(known), None, None, None
        at = bisect_right(self._functions, number, key=lambda function: function.end)
        if at < len(self._functions) and self._functions[at].begin <= number:
            _, end, call, place, unknown, _, read = self._functions[at]
            if len(operands) < len(following) or number == end - 1:
                known += unknown
            facts = read if number == end - 1 else None
        known += self._given_plain(number, output)
        name = operation(node)
        vertex = self._rows.add(
            Kind.OPERATION,
            f"{name}[{output}]" if output else name,
            tuple(known),
            first_cut=first_cut,
            live=True,
            call=self._rows.call_of(number) if call is None else call,
            place=place,
            facts=facts,
        )
        self._by_number[(number, output) if output else number] = vertex
        if is_own(getattr(type(node), "_forward_cls", None)):
            self._rows.own_functions.setdefault(number, vertex)

    def _given_plain(self, number: int, output: int) -> list[int]:
        """Return what the forward of a custom function took without a gradient, of before it."""
        met, found, todo = set[int](), list[int](), [self._within.pop((number, output), -1)]
        while todo and (vertex := todo.pop()) >= 0:
            row = self._rows[vertex]
            if vertex not in met and not row.live:
                met.add(vertex)
                is_inside = (row.begin if isinstance(row, OpenCall) else row.made_at) > number
                todo += row.operands if is_inside else ()
                found += [] if is_inside else [vertex]
        return found

    # By its identity.

    def of_plain(self, tensor: Tensor) -> int:
        """Return the vertex that a tensor without a gradient comes from."""
        seen = self._plain.get(tensor, version(tensor))
        if seen is not None:
            return seen
        base = None if tensor.is_inference() else tensor._base
        if base is not None and not self._is_named(id(tensor)):
            return self.of(base)
        seen = self._plain.latest(tensor)  # written to where nothing was seen
        return self._of_leaf(tensor) if seen is None else seen

    def _of_leaf(self, tensor: Tensor) -> int:
        key = id(tensor)
        if key in self.source_vertices:
            return self.source_vertices[key]
        if not self._is_named(key):
            return self._of_stranger(tensor)
        kind, parts, _ = self._sources[key]
        vertex = self._rows.add(kind, ".".join(filter(None, parts)), live=tensor.requires_grad)
        self.source_vertices[key] = vertex
        return vertex

    def _is_named(self, key: int) -> bool:
        """Go on through what has names until the one that is asked for."""
        if key in self._sources:
            return True
        for source in self._unnamed:
            self._sources.setdefault(id(source[2]), source)
            if id(source[2]) == key:
                return True
        return False

    def _of_stranger(self, tensor: Tensor) -> int:
        """Return the vertex of a tensor that nothing showed being made."""
        seen, live = self._plain.latest(tensor), tensor.requires_grad
        if seen is not None and (not live or self._rows[seen].live):
            return seen
        if seen is not None:  # it was computed, and then told to require gradients
            vertex = self._rows.add(Kind.OPERATION, "requires_grad", (seen,), live=True)
        elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return self.of(torch._C._functorch.get_unwrapped(tensor))
        elif guessed := self.guessed(None):
            vertex = self._rows.add(Kind.OPERATION, "tensor", guessed, live=live)
        else:
            vertex = self._of_unseen(live)
        if live:
            self.leaves[id(tensor)] = vertex
        self.put(tensor, vertex)
        return vertex

    def _of_unseen(self, live: bool) -> int:
        """Return the vertex of a tensor that may come of all that its call has been given and made.

        Outside of the model, and where it has a gradient of its own, it is the user's own.
        """
        rows, around = self._rows, self._rows.running[-1]
        if live or around.call < 0:
            return rows.add(Kind.UNKNOWN, "tensor", live=live)
        before, since = self._unseen.get(around.call, (around.operands, around.call + 1))
        inside = (output for call in rows.calls[since:] for output in call.outputs)
        vertex = rows.add(Kind.UNKNOWN, "tensor", tuple(dict.fromkeys((*before, *inside))))
        self._unseen[around.call] = (vertex,), len(rows.calls)
        note = (
            f"a tensor inside {around.name or around.type_name!r} was made where nothing shows it "
            "(by a script, vmap, compiled code or in another module): it may come of all before it"
        )
        rows.notes[note] = None
        return vertex

    # By way of Python or NumPy.

    def add_reading(self, vertex: int, result: Any) -> None:
        """Take what a function gave to Python; a truth value is for a branch."""
        if type(result) is not bool:
            self._readings.append(vertex)

    def guessed(self, place: Place | None) -> tuple[int, ...]:
        """Return what may have been made a tensor of: what was read out within the same call."""
        rows, call = self._rows, self._rows.running[-1].call
        guessed = tuple([vertex for vertex in self._readings if rows[vertex].call == call])
        if guessed:
            reading = rows[self._readings[-1]]
            read, line = line_of(reading.place), line_of(place)
            note = (
                f"`{reading.name}`{f' at {read}' if read else ''} read values out, and what comes "
                f"in {f'at {line}' if line else 'later'} may be computed from them: arithmetic "
                "outside of torch is not followed"
            )
            rows.notes[note] = None
        return guessed
