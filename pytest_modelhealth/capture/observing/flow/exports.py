"""What leaves for Python or NumPy while a model runs, and may come back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_modelhealth.capture.observing.flow.rows import Place, Rows, line_of

_MOST_NUMBERS = 1_000
"""A longer list is not gone through."""


class Exports:
    """Numbers by identity, as they are held; memory by its address, while it is alive.

    What Python or NumPy computes of either is another object, so it is guessed where a tensor is
    made of numbers within the same call, and otherwise noted.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._readings: list[int] = []  # vertices
        self._has_integers = False
        self._numbers: dict[int, tuple[float | complex, int]] = {}
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    def add_reading(self, vertex: int, result: Any) -> None:
        """Take what a function gave to Python."""
        if type(result) is bool:
            return  # it is for a branch, and no value
        self._readings.append(vertex)
        for number in _numbers([result]):
            if type(number) is int:
                self._has_integers = True
            elif len(self._numbers) < _MOST_NUMBERS:
                self._numbers[id(number)] = (number, vertex)

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

    def among(self, arguments: list[Any], place: Place | None, *, takes: bool) -> tuple[int, ...]:
        """Return the vertices of what was read out and comes back in arguments of a function.

        A fraction that no function gave, and is not written in the user's code at `place`, may be
        computed of what was read; so may what makes a tensor of numbers or of an array: it `takes`.
        """
        if not self._readings:
            return ()
        known = self._numbers
        exact = dict.fromkeys(known[id(n)][1] for n in _numbers(arguments) if id(n) in known)
        if exact or place is None or not (takes or known):
            return tuple(exact)
        if not (takes and any(hasattr(value, "__array_interface__") for value in arguments)):
            numbers = _numbers(arguments, besides=_fractions(place[0]))
            if not any(type(n) is not int or (takes and self._has_integers) for n in numbers):
                return ()
        return self.guessed(place)

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
    return {id(n) for n in _numbers(code.co_consts) if type(n) is not int}
