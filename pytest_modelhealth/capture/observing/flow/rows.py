"""The vertices and calls of one run, as plain numbers and names, until a graph is made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_modelhealth.report.flow import Call, Graph, Kind, Vertex

Place = tuple[CodeType, int]
"""Where a frame stood: its code and `f_lasti`."""

_TORCH = str(Path(torch.__file__).parent)
_OBSERVING = str(Path(__file__).parents[1])
_OURS = str(Path(__file__).parents[3])
_MODULE_CALL = str(Path(_TORCH, "nn", "modules", "module.py"))
_OVERRIDES = str(Path(_TORCH, "overrides.py"))

_GENERATED = "<eval_with_key>"
"""What torch.fx calls the code that it writes."""

_THROUGH, _TORCHS, _USERS, _ENGINES = range(4)


def place_of(frame: FrameType | None, container: Place | None) -> Place | None:
    """Return the place in the user's code that made a call: that of the nearest frame of theirs.

    Args:
        frame: where to begin.
        container: what to return where torch's own code made it, such as `nn.Sequential`.
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
    if path in (_MODULE_CALL, _OVERRIDES) or path.startswith(_OBSERVING):
        return _THROUGH
    if path.startswith(_OURS):
        return _ENGINES
    if path.startswith(_GENERATED):
        return _TORCHS
    if path.startswith(_TORCH):
        return _TORCHS if f"{_TORCH}/nn/modules" in path else _THROUGH
    return _USERS


@cache
def _lines(code: CodeType) -> tuple[int | None, ...]:
    return tuple(line for line, _, _, _ in code.co_positions())


def line_of(place: Place | None) -> str:
    """Return ``path:line``, and nothing where the place is not known."""
    if place is None:
        return ""
    code, instruction = place
    lines = _lines(code)
    at = instruction // 2
    line = lines[at] if 0 <= at < len(lines) else code.co_firstlineno
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


_MOST_NUMBERS = 1_000
"""A longer list is not gone through."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One call that read values out: its vertex, function, the call around it and the line."""

    vertex: int
    function: str
    call: int
    place: Place | None


class Exports:
    """Numbers by identity, as they are held; memory by its address, while it is alive.

    What Python or NumPy computes of either is another object, so it is guessed where a tensor is
    made of numbers within the same call, and otherwise noted.
    """

    def __init__(self) -> None:
        self._readings: list[Reading] = []
        self._has_integers = False
        self._numbers: dict[int, tuple[float | complex, int]] = {}
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._readings)

    def add_reading(self, reading: Reading, result: Any) -> None:
        """Take what a function gave to Python."""
        if type(result) is bool:
            return  # it is for a branch, and no value
        self._readings.append(reading)
        for number in _numbers([result]):
            if type(number) is int:
                self._has_integers = True
            elif len(self._numbers) < _MOST_NUMBERS:
                self._numbers[id(number)] = (number, reading.vertex)

    def add_memory(self, tensor: Tensor, vertex: int) -> None:
        """Take a tensor whose memory something without a tie to it may share."""
        storage = tensor.untyped_storage()
        if storage.data_ptr():
            self._memory[storage.data_ptr()] = (StorageWeakRef(storage), vertex)

    def of_memory(self, tensor: Tensor) -> int | None:
        """Return the vertex whose memory a tensor shares, if that is known."""
        if not self._memory:
            return None
        known = self._memory.get(tensor.untyped_storage().data_ptr())
        return None if known is None or known[0].expired() else known[1]

    def given(self, arguments: Iterable[Any]) -> tuple[int, ...]:
        """Return the vertices of the numbers that were read out, among arguments."""
        known = self._numbers
        return tuple(dict.fromkeys(known[id(n)][1] for n in _numbers(arguments) if id(n) in known))

    def may_be_in(self, arguments: Iterable[Any], place: Place) -> bool:
        """Whether arguments of an operation hold a fraction that may be computed of what was read.

        One that is written in the user's code is not.
        """
        known = self._numbers
        return bool(known) and any(
            type(number) is not int and id(number) not in known
            for number in _numbers(arguments, besides=_fractions(place[0]))
        )

    def may_be_made_of(self, arguments: list[Any], place: Place) -> bool:
        """Whether a tensor that is made of arguments may come of what was read out."""
        return any(hasattr(value, "__array_interface__") for value in arguments) or any(
            type(number) is not int or self._has_integers
            for number in _numbers(arguments, besides=_fractions(place[0]))
        )

    def read_in(self, call: int) -> tuple[int, ...]:
        """Return the vertices of what was read out within a call."""
        return tuple([reading.vertex for reading in self._readings if reading.call == call])

    def note(self, place: Place | None) -> str:
        """Return what to say where something came in that may be made of what was read out."""
        reading = self._readings[-1]
        read, line = line_of(reading.place), line_of(place)
        since = f"at {line}" if line else "later"
        return (
            f"`{reading.function}`{f' at {read}' if read else ''} read values out, and what comes "
            f"in {since} may be computed from them: arithmetic outside of torch is not followed"
        )

    def forget(self) -> None:
        """Hold nothing any longer."""
        self._readings.clear()
        self._numbers.clear()
        self._memory.clear()


def _numbers(values: Iterable[Any], besides: Collection[int] = ()) -> Iterator[float | complex]:
    """Yield the numbers among arguments and in lists among them, up to some; not those of an id."""
    todo = list(values)[::-1]
    for _ in range(_MOST_NUMBERS):
        if not todo:
            return
        value = todo.pop()
        kind = type(value)
        if (kind is float or kind is int or kind is complex) and id(value) not in besides:
            yield value
        elif kind is list or kind is tuple:
            todo.extend(value[::-1])


def _fractions(code: CodeType) -> set[int]:
    """Return the ids of the fractions written in code, alone or in a tuple or list.

    Small integers are one object wherever they come from.
    """
    found = set[int]()
    for constant in code.co_consts:
        found.update(id(n) for n in _numbers([constant]) if type(n) is not int)
    return found
