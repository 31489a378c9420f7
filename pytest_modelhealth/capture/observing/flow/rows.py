"""The vertices and calls of one run, as plain numbers and names, until a graph is made of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sized
from dataclasses import dataclass

import torch

from pytest_modelhealth.capture.observing.flow.places import Place, line_of
from pytest_modelhealth.report.flow import Call, Graph, Kind, Vertex

counter: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number that the next node of this thread will have (pytorch#103129)."""

MOST_VERTICES = 200_000
"""A run of more operations has a partial flow: each takes some 300 bytes."""


class TooManyError(Exception):
    """There is more than is worth remembering."""


def ensure_room(held: Sized) -> None:
    """Do nothing if one more can be remembered.

    Raises:
        TooManyError: there are too many.
    """
    if len(held) >= MOST_VERTICES:
        raise TooManyError(f"the run has more than {MOST_VERTICES:,} operations")


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call of a layer, while it runs and after.

    Args:
        name: name of the layer.
        type_name: its class, or its function.
        number: the number of the call.
        parent: the number of the call around it, -1 where there is none.
        begin, end: the first number of its nodes, and the first after them.
        index: its vertex, where it is one.
        live: whether a gradient flows through it.
        inputs, outputs: where the values come from that it takes, and gives.
        place: the line that makes it.
    """

    name: str
    type_name: str
    number: int
    parent: int
    begin: int = -1
    end: int = -1
    index: int = -1
    live: bool = False
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    place: Place | None = None

    def vertex(self) -> Vertex:
        """Return the vertex that this call is, where it is one."""
        cuts = frozenset(() if self.live else range(len(self.inputs)))
        line = line_of(self.place)
        return Vertex(Kind.CALL, self.name, self.inputs, cuts, self.number, self.live, line)


@dataclass(slots=True, eq=False)
class Row:
    """An operation or a source. Operands from `first_cut` on pass no gradient."""

    kind: Kind
    name: str
    operands: tuple[int, ...]
    first_cut: int
    live: bool
    call: int
    made_at: int
    place: Place | None

    def vertex(self) -> Vertex:
        """Return the vertex that this is."""
        cuts = frozenset(range(self.first_cut, len(self.operands)))
        line = line_of(self.place)
        return Vertex(self.kind, self.name, self.operands, cuts, self.call, self.live, line)


class Rows:
    """What one run is made of.

    Attributes:
        calls: every call of a layer, by number.
        running: those that have not returned, the innermost last; the first is none.
        notes: what a reader should know of the flow.
        own_functions: the vertex of each function of the user's own, by the number of its node.
    """

    def __init__(self) -> None:
        self._rows: list[Row | OpenCall] = []  # by vertex
        self.calls: list[OpenCall] = []
        self.running = [OpenCall("", "", -1, -1)]
        self.notes: dict[str, None] = {}
        self.own_functions: dict[int, int] = {}

    def add(
        self,
        kind: Kind,
        name: str,
        operands: tuple[int, ...] = (),
        *,
        first_cut: int = 0,
        live: bool = False,
        call: int | None = None,
        at: int = -1,
        place: Place | None = None,
    ) -> int:
        """Add an operation or a source and return its vertex."""
        call = self.running[-1].number if call is None else call
        ensure_room(self._rows)
        self._rows.append(Row(kind, name, operands, first_cut, live, call, at, place))
        return len(self._rows) - 1

    def add_call(self, call: OpenCall) -> None:
        """Add a call that is one vertex."""
        ensure_room(self._rows)
        call.index = len(self._rows)
        self._rows.append(call)

    def line_after(self, vertex: int) -> str:
        """Return the first line at which something takes what a vertex made; ``""`` if unknown."""
        met = {vertex}
        for number in range(vertex + 1, len(self._rows)):
            row = self._rows[number]
            if not met.isdisjoint(row.inputs if isinstance(row, OpenCall) else row.operands):
                if row.place is not None:
                    return line_of(row.place)
                met.add(number)
        return ""

    def is_live(self, vertex: int) -> bool:
        """Whether a vertex has a gradient."""
        return self._rows[vertex].live

    def call_of(self, number: int) -> int:
        """Return the innermost call in which the node with a number was made."""
        place = bisect_right(self.calls, number, key=lambda call: call.begin) - 1
        while place >= 0:
            call = self.calls[place]
            if call.end < 0 or number < call.end:
                return place
            place = call.parent
        return -1

    def revive(self, number: int) -> None:
        """Let gradients through what a reentrant checkpoint ran: no node was made inside."""
        for row in self._rows:
            if isinstance(row, OpenCall):
                row.live = row.live or row.begin == number == row.end
            elif row.made_at == number:
                row.first_cut, row.live = len(row.operands), True

    def clear(self) -> None:
        """Record no flow: one with a gap would deny ways that there are."""
        self.calls.clear()
        self._rows.clear()
        self.own_functions.clear()

    def graph(self, outputs: tuple[int, ...], loss: int | None) -> Graph:
        """Return all of it."""
        vertices = tuple(row.vertex() for row in self._rows)
        last = list(range(len(self.calls)))
        for call in reversed(self.calls):
            if call.parent >= 0:
                last[call.parent] = max(last[call.parent], last[call.number])
        calls = [
            Call(
                layer=call.name,
                type_name=call.type_name,
                parent=call.parent,
                last=last[call.number],
                inputs=call.inputs,
                outputs=call.outputs,
                line=line_of(call.place),
            )
            for call in self.calls
        ]
        own = tuple(vertex for _, vertex in sorted(self.own_functions.items()))
        return Graph(vertices, tuple(calls), outputs, loss, tuple(self.notes), own)
