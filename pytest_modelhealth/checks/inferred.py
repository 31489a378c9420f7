"""The flow where none was recorded: inferred from equal statistics and the order of calls.

Code observed as compiled, and layers that ran in threads of their own, show no graph. What a layer
was given is then matched by its numbers with what another returned, or its container was given.
Where nothing matches, it may depend on all that its container was given and on every layer inside
that returned before: such a flow says too much rather than too little, and its notes say so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_modelhealth.report.flow import Call, Flow, Graph, Kind, Vertex

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics

NOTE = "inferred from equal statistics, as no flow was recorded: it may say too much"


def with_flow(observation: Observation) -> Observation:
    """Return the observation with a flow of every layer that ran, inferred where none was seen."""
    ran = [r for r in observation.layers.values() if r.entered is not None]
    flow = observation.flow
    if flow is not None and all(record.name in flow for record in ran):
        return observation
    return replace(observation, flow=Flow(_Inferred(observation, ran).graph))


def same_values(a: TensorStatistics | None, b: TensorStatistics | None) -> bool:
    """Whether two tensors hold the same numbers, as far as their statistics tell."""
    if a is None or b is None or a.count != b.count:
        return False
    if a.min != b.min and not math.isnan(a.min):  # which tells most apart, and is at hand
        return False
    if a.finite_count != b.finite_count:
        return False
    if a.finite_count == 0:
        return a.shape == b.shape
    return (a.min, a.max, a.zero_count) == (b.min, b.max, b.zero_count) and _close(a, b)


def _close(a: TensorStatistics, b: TensorStatistics) -> bool:
    """Allow for the order of summation, which a reshape changes."""
    return abs(a.mean - b.mean) <= 1e-9 * a.rms and abs(a.rms - b.rms) <= 1e-9 * a.rms


class _Inferred:
    """Makes the graph of one observation."""

    def __init__(self, observation: Observation, ran: list[LayerRecord]) -> None:
        self._observation = observation
        self._records = sorted(ran, key=lambda record: record.entered or 0)
        self._vertices: list[Vertex] = []
        self._calls: list[Call] = []
        self._numbers: dict[str, int] = {}
        self._so_far: dict[int, int] = {}  # by call: what may have come of it up to now
        self._seen: dict[_Key, list[tuple[TensorStatistics, int]]] = defaultdict(list)

    def graph(self) -> Graph:
        """Return the graph."""
        open_calls: list[tuple[int, LayerRecord]] = []
        for record in self._records:
            begun = record.entered or 0
            while open_calls and _returned_before(open_calls[-1][1], begun):
                self._close(*open_calls.pop())
            open_calls.append((self._open(record), record))
        while open_calls:
            self._close(*open_calls.pop())
        outputs = self._calls[0].outputs if self._calls else ()
        loss = None
        if self._observation.loss is not None:
            loss = self._add(Vertex(Kind.OPERATION, "loss", outputs, live=True))
        return Graph(tuple(self._vertices), tuple(self._calls), outputs, loss, (NOTE,))

    def _open(self, record: LayerRecord) -> int:
        number, parent = len(self._calls), self._parent(record.name)
        given = self._matched(record.inputs, record.calls)
        if given is None:
            before = () if parent < 0 else (self._so_far[parent],)
            kind = Kind.INPUT if parent < 0 else Kind.UNKNOWN
            name = "input 0" if parent < 0 else "not seen"
            given = self._add(Vertex(kind, name, before, call=parent, live=parent >= 0))
        self._calls.append(Call(record.name, record.type_name, parent, number, (given,)))
        self._numbers[record.name] = number
        self._so_far[number] = given
        self._see(record.inputs, given)
        return number

    def _close(self, number: int, record: LayerRecord) -> None:
        call, last = self._calls[number], len(self._calls) - 1
        is_leaf = last == number
        live = bool(record.parameter_gradients) or record.gradients is not None
        out = None if is_leaf else self._matched(record.activations, record.calls)
        if out is None:
            kind, name = (Kind.CALL, record.name) if is_leaf else (Kind.UNKNOWN, "not seen")
            cuts = frozenset(() if live else (0,))
            vertex = Vertex(kind, name, (self._so_far[number],), cuts, number, live)
            out = self._add(vertex)
        self._calls[number] = replace(call, last=last, outputs=(out,))
        self._see(record.activations, out)
        if call.parent >= 0:
            around = self._so_far[call.parent]
            both = Vertex(Kind.UNKNOWN, "not seen", (around, out), call=call.parent, live=True)
            self._so_far[call.parent] = self._add(both)

    def _parent(self, layer: str) -> int:
        """Return the call of the nearest module around a layer that ran."""
        while layer:
            layer = layer.rpartition(".")[0]
            if layer in self._numbers:
                return self._numbers[layer]
        return -1

    def _add(self, vertex: Vertex) -> int:
        self._vertices.append(vertex)
        return len(self._vertices) - 1

    def _see(self, statistics: TensorStatistics | None, vertex: int) -> None:
        if statistics is not None:
            self._seen[_key(statistics)].append((statistics, vertex))

    def _matched(self, seen: TensorStatistics | None, calls: int) -> int | None:
        """Return the latest vertex of the same numbers; a constant's say nothing."""
        if seen is None or not seen.finite_count or seen.min == seen.max or calls > 1:
            return None
        known = self._seen.get(_key(seen), ())
        return next((vertex for other, vertex in reversed(known) if same_values(other, seen)), None)


_Key = tuple[int, int, float, float]


def _key(statistics: TensorStatistics) -> _Key:
    return (statistics.count, statistics.zero_count, statistics.min, statistics.max)


def _returned_before(record: LayerRecord, moment: int) -> bool:
    return record.completed is not None and record.completed < moment
