"""Gradients that are exactly zero although the graph leads from the loss to the parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import (
    at,
    called,
    completed,
    enclosing,
    flow_of,
    innermost,
    is_closed,
    is_in_an_empty_part,
    learns,
)
from pytest_modelhealth.checks.gradient_stops import FLAT, GradientStops, gives_zeros
from pytest_modelhealth.checks.normalization import FEWEST_SAMPLES
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.flow import Cut, Edge
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.settings.setting import is_inside, parent

MISSING_GRADIENTS = CHECKS["missing_gradients"]


def zero_gradients(observation: Observation) -> Iterator[Finding]:
    """Yield where gradients become exactly zero, or the doubt."""
    verdict = _Verdict(observation)
    if verdict.layers or verdict.parameters:
        yield from verdict.findings()


def _own_gradients(record: LayerRecord) -> list[str]:
    return [name for name in record.parameter_gradients if name not in record.frozen]


def _is_silent(record: LayerRecord) -> bool:
    """Whether the gradient that reaches a layer is zero, and those of its parameters, if any."""
    arrived, own = record.gradients, _own_gradients(record)
    if arrived is None or arrived.abs_max != 0.0 or not arrived.count:
        return False
    return all(record.parameter_gradients[name].abs_max == 0.0 for name in own)


class _Verdict:
    """Finds for everything silent what stops its gradient: a design, a fault or a doubt."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._flow = flow_of(observation)
        silent = innermost(filter(_is_silent, called(observation)))
        self.silent = {r.name: r for r in silent if not is_in_an_empty_part(r, observation)}
        """The layers whose gradient is exactly zero; behind the last of them it ends."""
        self.layers = [r.name for r in self.silent.values() if _own_gradients(r)]
        """Those that have parameters to train."""
        self.parameters = {
            full: record
            for record in observation.layers.values()
            for name in _own_gradients(record)
            if (full := f"{record.name}.{name}".removeprefix(".")) in self._flow
            and record.parameter_gradients[name].abs_max == 0.0
            and record.parameter_gradients[name].finite_count > 0
        }
        """Parameters of such a gradient that the flow shows by themselves, with their owners."""

    @cached_property
    def _stops(self) -> GradientStops:
        return GradientStops(self._observation)

    def findings(self) -> Iterator[Finding]:
        """Yield one finding a story: two of which neither feeds the other are two."""
        stops, names = self._stops, [*self.silent, *self.parameters]
        for_good = stops.stopped(stops.for_good).names
        designs = self._by_design()
        stuck = self._held
        in_time = stops.stopped(stops.for_good, stops.stuck, stops.designs).names
        known = {n: for_good[n] for n in names if n in for_good}
        for name in [n for n in names if n in stuck and n not in {*known, *designs}]:
            factors = stops.stuck.get(stuck[name], ())
            if not factors or not stuck.keys().isdisjoint(factors):  # what holds it is held, too
                known[name] = stuck[name]
        explained = {*known, *designs, *(in_time.keys() - stuck.keys())}
        yield from self._known_stories(known)
        yield from self._unknown_stories([name for name in names if name not in explained])

    def _by_design(self) -> Collection[str]:
        """Return what is behind a gate that learns, or behind what another check tells of.

        Where the flow is not exact products may be missing, and zeros that are added leave no
        trace: there any gate after a layer, around it or beside it explains.
        """
        stopped = self._stops.stopped(self._stops.designs).names
        if self._flow.is_exact:
            return stopped
        gates = {r.name for r in called(self._observation) if is_closed(r)} | self._stops.dead
        if gates:
            gates |= {r.name for r in self.silent.values() if gives_zeros(r)}
        before = gates | self._flow.feeding(*gates)
        beside = {parent(name) for name in gates | self._stops.without_choice}
        explained = (
            name
            for name in self.silent
            if parent(name) in beside or not before.isdisjoint(enclosing(name))
        )
        return {*stopped, *explained}

    # Where a stop is known.

    def _known_stories(self, known: dict[str, Edge]) -> Iterator[Finding]:
        stops = self._stops
        stuck = {name: stops.stuck[edge] for name, edge in known.items() if edge in stops.stuck}
        factors = {factor for names in stuck.values() for factor in names}
        groups: dict[object, list[str]] = defaultdict(list)
        for name, edge in known.items():
            if name not in stuck:
                stop = self._flow.graph.vertices[edge[0]]
                groups[(stop.name, stop.line, stops.for_good[edge])].append(name)
            elif name in factors:
                groups[edge[0]].append(name)
        for names in groups.values():
            by_vertex: dict[int, list[str]] = defaultdict(list)
            for name in self._flow.last_of(*names, by="gradient"):
                by_vertex[known[name][0]].append(name)
            for last in by_vertex.values():
                yield from self._known_story(last, known)

    def _known_story(self, names: list[str], known: dict[str, Edge]) -> Iterator[Finding]:
        edge, stops = known[names[0]], self._stops
        cut = self._flow.cut_at(edge)
        where = at(cut.line)
        layers = [self.silent[name] for name in names if name in self.silent]
        parameters = [name for name in names if name not in self.silent]
        culprit = max(layers, key=completed, default=None)
        affected = [name for name in self._feeding(names) if name in known]
        if culprit is None:
            culprit = self.parameters[parameters[0]]
        elif not (parameters or affected or culprit.name in self.layers):
            return
        if edge not in stops.stuck:
            advice = "times zero nothing passes back, now or later; train the factor, or leave it "
            advice += "out"
            if cut.operation in FLAT:
                advice = "nothing comes back to what is rounded or reduced to its sign; let it "
                advice += "pass straight through, as in x + (f(x) - x).detach()"
            cause = f"{stops.for_good[edge]}{where}: {advice}"
        else:
            others = dict.fromkeys([*stops.stuck[edge], *names])
            named = ", ".join(repr(name) for name in others if name != culprit.name)
            cause = (
                "its weights are all zero, and what it gives is multiplied by what is made of "
                f"{f'{named}, zero too,' if named else 'it'}{where}: no gradient comes back, and "
                "all stay zero; initialise one at random, or take a detach away"
            )
        yield self._finding(culprit, cause, affected, [] if layers else parameters)

    def _feeding(self, names: Iterable[str]) -> list[str]:
        """Return the silent layers with parameters whose values come to some of what is silent."""
        before = self._flow.feeding(*names, by="gradient").union(names)
        return [name for name in self.layers if name in before]

    def _finding(
        self,
        record: LayerRecord,
        cause: str,
        affected: list[str],
        parameters: list[str],
        severity: Severity = "fail",
    ) -> Finding:
        if self._observation.loss == 0.0:  # `loss` names one that is switched off
            return MISSING_GRADIENTS.inconclusive(record, _NOTHING_TO_LEARN)
        tensors = [name.rpartition(".")[2] for name in parameters]
        what = " and ".join(tensors)
        if not tensors and record.name in self.layers:
            what = "trainable parameters"
        message = f"the gradient of its {what} is exactly zero"
        if not what:
            message = "the gradient that reaches it is exactly zero"
        is_layer = record.name in self.layers or bool(tensors)
        return MISSING_GRADIENTS.fault(
            record,
            message,
            role=None if is_layer else "gradients",
            tensor=tensors[0] if tensors else "",
            cause=cause,
            affected=[name for name in affected if name != record.name],
            severity=severity,
        )

    # Where none is.

    def _unknown_stories(self, names: list[str]) -> Iterator[Finding]:
        stops = self._stops
        certain = (stops.for_good, stops.stuck, stops.designs)
        doubts = stops.stopped(stops.doubts, *certain).names
        suspects = stops.stopped(stops.suspects, *certain).names
        perhaps = stops.stopped(stops.perhaps, *certain).names
        drawn = stops.stopped(stops.drawn, *certain).names
        cut_off = stops.stopped(stops.unread).names
        flat = {n: e for n, e in suspects.items() if e < cut_off.get(n, (math.inf, 0))}
        yield from self._unread_stories({n: cut_off[n] for n in names if n in cut_off}, flat)
        layers = [n for n in names if n in self.silent]
        overtaken = {n for n in layers if self._goes_on_in_vain(n)}
        layers = [n for n in layers if n in doubts or n in overtaken or not self._is_left_out(n)]
        if not any(map(learns, called(self._observation))):
            layers = layers[-1:]
        weights = [n for n in names if n in flat and self._is_flat(n, suspects[n])]
        for name in self._flow.last_of(*layers, *weights, by="gradient")[:_MOST]:
            if name in weights:
                cause = f"{_named(self._flow.cut_at(suspects[name]))}, which it goes through, "
                owner = self.parameters[name]
                yield self._finding(owner, cause + _GIVES_NOTHING, [], [name])
                continue
            affected = [other for other in self._feeding([name]) if other in layers]
            factor = stops.perhaps.get(perhaps.get(name, _NONE))
            is_drawn = drawn.get(name) in stops.drawn
            if not affected or (factor == "" and not is_drawn and name not in suspects):
                continue
            record = self.silent[name]
            if is_drawn:
                where = at(self._flow.cut_at(drawn[name]).line)
                cause = f"it is multiplied by what is drawn at random{where}, {_DROPPED}"
                is_chance = self._observation.samples < FEWEST_SAMPLES
                severity: Severity = "warn" if is_chance else "fail"
                yield self._finding(record, cause, affected, [], severity=severity)
                continue
            if name in overtaken:
                cause = f"of what {_named(self._flow.cut_at(self._picked[name]))} {_OVERTAKEN}"
                last = self.silent[affected[-1]]
                yield self._finding(last, cause, affected, [], severity="warn")
                continue
            doubt = stops.doubts.get(doubts.get(name, _NONE)) or self._doubt(record)
            if factor and name not in {*suspects, *doubts}:
                doubt = f"it is multiplied by {factor}, and may be zero on this batch"
            if doubt:
                text = f"the gradient here is exactly zero, but {doubt}"
                yield MISSING_GRADIENTS.inconclusive(record, text)
            else:
                yield self._finding(record, self._cause(record, suspects.get(name)), affected, [])

    def _unread_stories(
        self, cut_off: Mapping[str, Edge], flat: Collection[str]
    ) -> Iterator[Finding]:
        """Yield matrices all of whose product is left out after it was put together."""
        by_place: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, edge in cut_off.items():
            record = self.parameters.get(name)
            is_matrix = record and len(record.parameters[name.rpartition(".")[2]].shape) >= _MATRIX
            if record and is_matrix and name not in flat:
                by_place[record.name, edge[0]].append(name)
        for found in by_place.values():
            cause = f"of what {_named(self._flow.cut_at(cut_off[found[0]]))} {_NO_EFFECT}"
            yield self._finding(self.parameters[found[0]], cause, [], found, severity="warn")

    def _is_flat(self, name: str, stop: Edge) -> bool:
        """Whether a matrix or a kernel passes one operation, in a layer to which a gradient comes.

        A temperature may be clamped, and gradients of less than float16 holds are zero, too.
        """
        record = self.parameters.get(name)
        if record is None:
            return False
        values = record.parameters[name.rpartition(".")[2]]
        if len(values.shape) < _MATRIX or not values.abs_max or values.dtype == "float16":
            return False
        bias = record.parameter_gradients.get("bias")
        arrived = record.gradients if record.entered is not None else bias
        takes_one = len(self._flow.graph.vertices[stop[0]].operands) == 1
        return takes_one and arrived is not None and arrived.abs_max > 0.0

    def _is_left_out(self, name: str) -> bool:
        """Whether one like it learns in a place where what it gives is not picked.

        Of heads that are stacked, of experts under a mask, some are taken; of what is put together
        for the blocks to come, the last block reads the class token alone.
        """
        flow = self._flow
        if flow.is_exact and name not in self._picked:
            return False
        is_picked = self._picked.get(name) in self._stops.unread
        for around in filter(flow.__contains__, enclosing(name)):
            given = flow.producers(around, as_it_is=True)
            for sibling in flow.siblings(around):
                twin = self._observation.layers.get(sibling + name[len(around) :])
                if twin is None or not learns(twin):
                    continue
                if is_picked or (given and given == flow.producers(sibling, as_it_is=True)):
                    return True
                if sibling not in flow.reach(around) | flow.feeding(around):  # side by side
                    return True
        return False

    def _goes_on_in_vain(self, name: str) -> bool:
        """Whether what is made of it is joined to what it was made of, and that alone is picked.

        Of levels that are stacked an early one is read: most of what is joined is not taken.
        """
        edge = self._picked.get(name, _NONE)
        if edge not in self._stops.unread:
            return False
        unread = filter(None, map(self._picked.get, self.layers))
        idle = {position for number, position in unread if number == edge[0]}
        vertices = self._flow.graph.vertices
        operands = enumerate(vertices[edge[0]].operands)
        rest = [operand for position, operand in operands if position not in idle]
        read = {vertices[number].name for number in self._flow.origins(*rest)}
        return len(idle) > len(rest) > 0 and not read.isdisjoint(self._flow.feeding(name))

    @cached_property
    def _picked(self) -> Mapping[str, Edge]:
        stops = self._stops
        return stops.stopped(stops.unread, stops.masks, stops.perhaps, stops.designs).names

    @cached_property
    def _held(self) -> Mapping[str, Edge]:
        stops = self._stops
        return stops.stopped(stops.for_good, stops.stuck).names

    def _doubt(self, record: LayerRecord) -> str:
        """Return what in this batch alone may explain a zero, and what to give instead."""
        if self._observation.loss == 0.0:
            return _NOTHING_TO_LEARN
        if self._picked.get(record.name) in self._stops.unread:
            join = _named(self._flow.cut_at(self._picked[record.name]))
            return (
                f"of what {join} puts together only a part is taken later: it may be for the rest"
            )
        if record.name in self._stops.cancelled:
            return ""
        if not self._after(record) and any(map(learns, called(self._observation))):
            return (
                "the loss is flat at this output on this batch and not at others, as where a "
                "mask lets nothing through: give a batch that has something for it to learn"
            )
        if 0 < self._observation.samples < _FEWEST_SAMPLES:
            return (
                f"all of {self._observation.samples} samples may have been left out here, by a "
                f"mask or by stochastic depth: give {_FEWEST_SAMPLES} or more"
            )
        return ""

    def _after(self, record: LayerRecord) -> list[LayerRecord]:
        """Return the layers that its values come to and do not hold it, if a gradient does."""
        layers = self._observation.layers
        reached = self._flow.reach(record.name, by="gradient")
        after = (layers[n] for n in reached if n in layers and not is_inside(record.name, n))
        return [r for r in after if r.gradients is not None and r.gradients.abs_max > 0.0]

    def _cause(self, record: LayerRecord, suspect: Edge | None) -> str:
        difference = self._stops.cancelled.get(record.name)
        if difference is not None:
            return (
                f"{_named(self._flow.cut_at(difference))} takes from it what is made of itself, "
                "and leaves nothing: a mean over a dimension of size one"
            )
        held = self._stops.stuck.get(self._held.get(record.name, _NONE))
        if held:
            named = " and ".join(map(repr, held))
            return (
                f"the weights of {named} behind it are all zero and get no gradient either, as "
                "what comes to them tells nothing apart: initialise them at random"
            )
        after, out = self._after(record), record.activations
        if not after and out is not None and out.dtype == "float16":
            return UNDERFLOW
        if not after:
            return "the loss is flat at this output: a clamp, a saturated function or a constant"
        between = "what lies between" if suspect is None else _named(self._flow.cut_at(suspect))
        takers = self._flow.consumers(record.name)
        nearest = min(after, key=lambda r: (r.name not in takers, completed(r)))
        return (
            f"{nearest.label!r} gets a gradient and none comes back through {between}: a clamp, "
            "rounding, a saturated function, times zero, or a backward that returns zeros"
        )


_FEWEST_SAMPLES = 4
"""Of fewer, all are left out by chance too often: of 3 one time in 8, where half are."""

_MOST = 16
"""Stories to tell; each is a sweep of its own."""

_NOTHING_TO_LEARN = (
    "the loss is exactly 0 on this batch, as a hinge is that every sample satisfies: give a batch "
    "from which there is something to learn"
)


UNDERFLOW = (
    "the gradient underflows float16, or the loss is flat here: scale the loss (GradScaler), or "
    "use bfloat16"
)

_DROPPED = (
    "as in stochastic depth, which kept none of the samples of this batch: give more of them; if "
    "that does not help, its rate is 1"
)

_NO_EFFECT = (
    "puts together only a part is taken later, and it has no effect on that, as where a class "
    "token alone is read of the last block: leave it out there or freeze it, or read the rest"
)

_OVERTAKEN = (
    "puts together only an early part is used, and this, which goes on from it, is not: read a "
    "later one, or leave out or freeze what is not to learn"
)

_GIVES_NOTHING = (
    "gives a gradient of zero: it is rounded, compared, clamped or reduced to its sign there; let "
    "it pass straight through, as in weight + (f(weight) - weight).detach()"
)


_NONE = (-1, -1)
_MATRIX = 2


def _named(cut: Cut) -> str:
    return f"`{cut.operation}`{at(cut.line)}"
