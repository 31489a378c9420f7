"""The vertices and calls of one run, as plain numbers and names, until a graph is made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from pytest_modelhealth.capture.observing.flow.attention import Facts
from pytest_modelhealth.capture.observing.flow.facts import settled
from pytest_modelhealth.report.flow import Call, Graph, Kind, Vertex

Place = tuple[CodeType, int]
"""Where a frame stood: its code and `f_lasti`."""

_TORCH = str(Path(torch.__file__).parent)
_OBSERVING = str(Path(__file__).parents[1])
_OURS = str(Path(__file__).parents[3])
_PASSED_THROUGH = (str(Path(_TORCH, "nn/modules/module.py")), str(Path(_TORCH, "overrides.py")))

_THROUGH, _TORCHS, _USERS, _ENGINES = range(4)


def place_of(frame: FrameType | None, container: Place | None) -> Place | None:
    """Return the place in the user's code that made a call: that of the nearest frame of theirs.

    Where torch's own code made it, such as `nn.Sequential`, it is that of the container.
    """
    while frame is not None:
        code = frame.f_code
        whose = _whose(code.co_filename)
        if whose == _USERS:
            return code, frame.f_lasti
        if whose == _TORCHS:
            return container
        if whose == _ENGINES:
            return None
        frame = frame.f_back
    return None


@cache
def _whose(path: str) -> int:
    """Tell the user's code from torch's, and both from what every call passes through."""
    if path in _PASSED_THROUGH or path.startswith(_OBSERVING):
        return _THROUGH
    if path.startswith(_OURS):
        return _ENGINES
    # the second is what torch.fx calls the code that it writes
    if path.startswith((f"{_TORCH}/nn/modules", "<eval_with_key>")):
        return _TORCHS
    return _THROUGH if path.startswith(_TORCH) else _USERS


@cache
def _lines(code: CodeType) -> tuple[int | None, ...]:
    return tuple(line for line, _, _, _ in code.co_positions())


def line_of(place: Place | None) -> str:
    """Return ``path:line``, and nothing where the place is not known."""
    if place is None:
        return ""
    code, instruction = place
    lines, at = _lines(code), instruction // 2
    line = lines[at] if 0 <= at < len(lines) else None
    return f"{code.co_filename}:{line or code.co_firstlineno}"


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


@dataclass(eq=False)
class Row:
    """A vertex in the making. Operands from `first_cut` on pass no gradient."""

    kind: Kind = Kind.CALL
    name: str = ""
    operands: tuple[int, ...] = ()
    first_cut: int = 0
    live: bool = False
    call: int = -1
    made_at: int = -1  # the number of the next node then
    place: Place | None = None
    facts: Facts | None = None


class OpenCall(Row):
    """One call of a layer, while it runs and after: its own number is `call`."""

    begin = -1  # the first number of its nodes
    end = -1  # the first after them
    index = -1  # its vertex, where it is one
    outputs: tuple[int, ...] = ()
    read: Callable[[torch.Tensor], Facts] | None = None  # what reads its facts when it returns

    def __init__(self, name: str, type_name: str = "", call: int = -1, parent: int = -1) -> None:
        self.name, self.type_name, self.call, self.parent = name, type_name, call, parent


class Rows(list[Row]):
    """What one run is made of: rows by vertex, and the calls of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpenCall] = []  # of layers, by number
        # those that have not returned, the innermost last; the first is none
        self.running = [OpenCall("")]
        self.notes: dict[str, None] = {}
        self.own_functions: dict[int, int] = {}  # the user's own, by the number of their node

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
        facts: Facts | None = None,
    ) -> int:
        """Add an operation or a source and return its vertex."""
        ensure_room(self)
        call = self.running[-1].call if call is None else call
        self.append(Row(kind, name, operands, first_cut, live, call, at, place, facts))
        return len(self) - 1

    def line_after(self, vertex: int) -> str:
        """Return the first line at which something takes what a vertex made; ``""`` if unknown."""
        met = {vertex}
        for number in range(vertex + 1, len(self)):
            if not met.isdisjoint(self[number].operands):
                if self[number].place is not None:
                    return line_of(self[number].place)
                met.add(number)
        return ""

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
        for row in self:
            at = row.begin if isinstance(row, OpenCall) and row.begin == row.end else row.made_at
            if at == number:
                row.first_cut, row.live = len(row.operands), True

    def graph(self, outputs: tuple[int, ...], loss: int | None) -> Graph:
        """Return all of it."""
        vertices = []
        for row in self:
            cuts, line = range(row.first_cut, len(row.operands)), line_of(row.place)
            shown = row.kind, row.name, row.operands, frozenset(cuts), row.call, row.live, line
            vertices.append(Vertex(*shown, settled(row.facts)))
        last = list(range(len(self.calls)))
        for call in reversed(self.calls):
            if call.parent >= 0:
                last[call.parent] = max(last[call.parent], last[call.call])
        calls = []
        for call in self.calls:
            named = call.name, call.type_name, call.parent, last[call.call]
            calls.append(Call(*named, call.operands, call.outputs, line_of(call.place)))
        own = tuple(vertex for _, vertex in sorted(self.own_functions.items()))
        return Graph(tuple(vertices), tuple(calls), outputs, loss, tuple(self.notes), own)
