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

from pytest_modelhealth.report.flow.flow import Flow
from pytest_modelhealth.report.flow.graph import Call, Graph, Kind, Vertex
from pytest_modelhealth.settings.setting import is_inside

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
    """Makes the graph of one observation.

    Of a layer that was called several times its first entry and its last return are known: it has
    two calls here, the second of which may take all that ran between.
    """

    def __init__(self, observation: Observation, ran: list[LayerRecord]) -> None:
        self._observation = observation
        self._records = sorted(ran, key=lambda record: record.entered or 0)
        self._vertices = [Vertex(Kind.INPUT, "input 0")]
        self._calls: list[Call] = []
        self._open: list[tuple[int, LayerRecord]] = []
        self._so_far = {-1: 0}  # by call: what may have come of it up to now
        self._hiding: set[int] = set()  # calls inside which equal numbers say nothing
        self._seen: dict[_Key, list[tuple[TensorStatistics, int]]] = defaultdict(list)

    def graph(self) -> Graph:
        """Return the graph."""
        events = [(float(record.entered or 0), record, True) for record in self._records]
        events += [(_returned(record), record, False) for record in self._records]
        for _, record, is_entry in sorted(events, key=lambda event: event[0]):
            if is_entry:
                self._leave_before(record)
                self._enter(record)
                continue
            if any(other is record for _, other in self._open):
                while self._leave() is not record:
                    pass
            if record.calls > 1:
                self._repeat(record)
        outputs = self._calls[0].outputs if self._calls else ()
        loss = None
        if self._observation.loss is not None:
            loss = self._add(Vertex(Kind.OPERATION, "loss", outputs, live=True))
        return Graph(tuple(self._vertices), tuple(self._calls), outputs, loss, (NOTE,))

    def _leave_before(self, record: LayerRecord) -> None:
        """Close the calls that do not hold that of a layer which is entered now."""
        while self._open and not _holds(self._open[-1][1], record):
            self._leave()

    def _repeat(self, record: LayerRecord) -> None:
        """Add the last call of a layer that was called several times, and of those inside it."""
        several = [r for r in self._records if r.calls > 1]
        if any(is_inside(record.name, other.name) for other in several):
            return
        self._leave_before(record)
        depth = len(self._open)
        for inner in [record, *(r for r in several if is_inside(r.name, record.name))]:
            while len(self._open) > depth and not is_inside(inner.name, self._open[-1][1].name):
                self._leave()
            self._enter(inner)
        while len(self._open) > depth:
            self._leave()

    def _enter(self, record: LayerRecord) -> None:
        number, parent = len(self._calls), self._open[-1][0] if self._open else -1
        given = self._matched(record.inputs, record.calls)
        if given is None or parent in self._hiding:
            before = (self._so_far[parent], *(() if given is None else (given,)))
            given = self._add(Vertex(Kind.OPERATION, _NOT_SEEN, before, call=parent, live=True))
        if parent < 0 and not self._calls:
            given = 0
        self._calls.append(Call(record.name, record.type_name, parent, number, (given,)))
        self._open.append((number, record))
        self._so_far[number] = given
        if any(s.count and s.abs_max == 0.0 for s in record.parameters.values()):
            # it multiplies by zeros: what is added to or scaled by its output is equal
            self._hiding.add(number)
        self._see(record.inputs, given)

    def _leave(self) -> LayerRecord:
        number, record = self._open.pop()
        call, last = self._calls[number], len(self._calls) - 1
        is_leaf, is_hiding = last == number, number in self._hiding
        out = None if is_leaf or is_hiding else self._matched(record.activations, record.calls)
        if out is None:
            kind, name = (Kind.CALL, record.name) if is_leaf else (Kind.OPERATION, _NOT_SEEN)
            live = record.gradients is not None or bool(record.parameter_gradients)
            live |= "gradients" not in record.watched
            cuts = frozenset(() if live else (0,))
            out = self._add(Vertex(kind, name, (self._so_far[number],), cuts, number, live))
        self._calls[number] = replace(call, last=last, outputs=(out,))
        self._see(record.activations, out)
        both = (self._so_far[call.parent], out)
        vertex = Vertex(Kind.OPERATION, _NOT_SEEN, both, call=call.parent, live=True)
        self._so_far[call.parent] = self._add(vertex)
        returned = record.activations
        if is_hiding and returned is not None and returned.abs_max == 0.0:
            self._hiding.add(call.parent)
        return record

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


_NOT_SEEN = "not seen"


def _returned(record: LayerRecord) -> float:
    return math.inf if record.completed is None else record.completed


def _holds(outer: LayerRecord, record: LayerRecord) -> bool:
    """Whether a layer that was entered is called by `outer`, which was entered before."""
    if outer.calls > 1:
        return is_inside(record.name, outer.name)
    return record.calls > 1 or _returned(record) <= _returned(outer)
