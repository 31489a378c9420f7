"""Which layers a layer's output reaches, as far as their numbers and the order of calls tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.evidence import called, completed, same_values

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics


class Port(NamedTuple):
    """One end of a layer: what goes into it, or what comes out."""

    layer: str
    output: bool


class DataFlow:
    """The graph of one observation, between the layers that ran.

    What a layer was given is matched by its numbers with what another returned or its container was
    given. Where nothing matches (a residual sum, two inputs at once, a constant), it may depend on
    all that its container was given and on every layer inside the same container that ran before:
    then the flow says too much rather than too little.
    """

    def __init__(self, observation: Observation) -> None:
        self._records = {record.name: record for record in called(observation)}
        self._sources = self._matched()
        self._reached: dict[Port, frozenset[Port]] = {}

    def parent(self, layer: str) -> str | None:
        """Return the nearest module around `layer` that ran."""
        while layer:
            layer = layer.rpartition(".")[0]
            if layer in self._records:
                return layer
        return None

    def source(self, layer: str) -> Port | None:
        """Return where the inputs of `layer` come from, if their numbers tell."""
        return self._sources.get(layer)

    def reached(self, origin: Port) -> frozenset[Port]:
        """Return everything that depends on `origin`, itself included."""
        if origin not in self._reached:
            self._reached[origin] = self._swept([origin])
        return self._reached[origin]

    def reached_by_any(self, origins: Iterable[Port]) -> frozenset[Port]:
        """Return everything that depends on one of `origins`, themselves included."""
        return self._swept(origins)

    def _swept(self, origins: Iterable[Port]) -> frozenset[Port]:
        reached = set(origins)
        while True:
            known = len(reached)
            self._sweep(reached)
            if len(reached) == known:  # a second sweep finds more only where layers run in a loop
                return frozenset(reached)

    def _sweep(self, reached: set[Port]) -> None:
        """Carry what is reached on, in the order in which layers were entered and left."""
        first_reached: dict[str | None, int] = {}
        for port in reached:
            self._note(port, first_reached)
        for port in self._ports:
            if port not in reached and self._depends(port, reached, first_reached):
                reached.add(port)
                self._note(port, first_reached)

    def _note(self, port: Port, first_reached: dict[str | None, int]) -> None:
        """Remember when the first of the layers inside one container gave out what is reached."""
        if port.output and port.layer in self._records:
            parent = self._parents[port.layer]
            begun = self._records[port.layer].entered or 0
            first_reached[parent] = min(begun, first_reached.get(parent, begun))

    def _depends(
        self, port: Port, reached: set[Port], first_reached: dict[str | None, int]
    ) -> bool:
        if port.output:
            return Port(port.layer, output=False) in reached or port.layer in first_reached
        source = self._sources.get(port.layer)
        if source is not None:
            return source in reached
        parent = self._parents[port.layer]
        if parent is None:
            return False
        if Port(parent, output=False) in reached:
            return True
        # called several times, a layer may take what ran between its calls
        return first_reached.get(parent, 1 << 62) < completed(self._records[port.layer])

    def reaching(self, targets: Iterable[Port]) -> frozenset[Port]:
        """Return everything that one of `targets` depends on, themselves included."""
        found = set(targets)
        waiting = list(found)
        taken: dict[str | None, int] = defaultdict(int)
        while waiting:
            for needed in self._needed(waiting.pop(), taken):
                if needed not in found:
                    found.add(needed)
                    waiting.append(needed)
        return frozenset(found)

    def _needed(self, port: Port, taken: dict[str | None, int]) -> Iterator[Port]:
        """Yield what `port` depends on directly; of each container's layers none twice.

        Args:
            port: one end of a layer.
            taken: how many layers inside each container were yielded so far.
        """
        record = self._records.get(port.layer)
        if record is None:
            return
        source = None if port.output else self._sources.get(port.layer)
        if source is not None:
            yield source
            return
        around = port.layer if port.output else self._parents[port.layer]
        if around is None:
            return
        yield Port(around, output=False)
        inside, before = self._inside[around], 1 << 62 if port.output else completed(record)
        while taken[around] < len(inside) and (inside[taken[around]].entered or 0) < before:
            yield Port(inside[taken[around]].name, output=True)
            taken[around] += 1

    @cached_property
    def _inside(self) -> dict[str | None, list[LayerRecord]]:
        """The layers directly inside each container, in the order in which they were entered."""
        inside: dict[str | None, list[LayerRecord]] = defaultdict(list)
        for record in sorted(self._records.values(), key=lambda record: record.entered or 0):
            inside[self._parents[record.name]].append(record)
        return inside

    @cached_property
    def _parents(self) -> dict[str, str | None]:
        return {name: self.parent(name) for name in self._records}

    @cached_property
    def _ports(self) -> list[Port]:
        """Both ends of every layer, on the clock of calls and returns."""
        events = [(r.entered or 0, 0, Port(n, output=False)) for n, r in self._records.items()]
        events += [(completed(r), 1, Port(n, output=True)) for n, r in self._records.items()]
        return [port for _, _, port in sorted(events, key=lambda event: event[:2])]

    def _matched(self) -> dict[str, Port]:
        """Return the source of each layer whose inputs are somebody's numbers, the latest of them.

        A constant has the numbers of any other, and says nothing.
        """
        given: dict[_Numbers, list[tuple[int, Port, TensorStatistics]]] = defaultdict(list)
        for name, record in self._records.items():
            if record.activations is not None:
                key = _numbers(record.activations)
                moment = completed(record)
                given[key].append((moment, Port(name, output=True), record.activations))
            if record.inputs is not None:
                key = _numbers(record.inputs)
                moment = record.entered or 0
                given[key].append((moment, Port(name, output=False), record.inputs))
        matched = {name: _source(record, given) for name, record in self._records.items()}
        return {name: port for name, port in matched.items() if port is not None}


_Numbers = tuple[int, int, float, float]


def _numbers(statistics: TensorStatistics) -> _Numbers:
    return (statistics.count, statistics.zero_count, statistics.min, statistics.max)


def _source(
    record: LayerRecord,
    given: dict[_Numbers, list[tuple[int, Port, TensorStatistics]]],
) -> Port | None:
    seen = record.inputs
    if seen is None or not seen.finite_count or seen.min == seen.max or record.calls > 1:
        return None
    candidates = [
        (moment, port)
        for moment, port, statistics in given[_numbers(seen)]
        if moment < (record.entered or 0) and same_values(statistics, seen)
    ]
    # a container returns after the layer inside whose output it passes on: both are right
    outputs = [candidate for candidate in candidates if candidate[1].output]
    return max(outputs or candidates, key=lambda candidate: candidate[0])[1] if candidates else None
