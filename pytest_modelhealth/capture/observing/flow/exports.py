"""What left for Python or NumPy, and how it is known when it comes back to a function of torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_modelhealth.capture.observing.flow.places import Place, line_of

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
