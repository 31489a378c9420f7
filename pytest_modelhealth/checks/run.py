"""One run as the rules of `wiring` look at it: its flow, its layers, and what they ask of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Literal

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import at, is_fresh, trainable
from pytest_modelhealth.report import Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import Call, Vertex
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.settings.setting import ancestors

WIRING = CHECKS["wiring"]
Grade = Literal[Severity, "note"]
Faults = Iterator[tuple[int | tuple[str, ...], str, str, Grade]]
"""A vertex, or the culprit and what goes with it; what is wrong, the likely cause, the grade."""


class Run:
    """A flow, and what the rules ask of it."""

    def __init__(self, observation: Observation, flow: Flow) -> None:
        self.layers, self.flow, self.vertices = observation.layers, flow, flow.graph.vertices
        self.is_fresh = is_fresh(observation)
        self.takers, made = flow.ways(), [*enumerate(self.vertices)]
        self.given = flow.after(*(n for n, v in made if v.kind == "input"))  # and all made of it
        self.variable = flow.after(*(n for n, v in made if v.kind == "parameter")) | self.given
        given = observation.given[0].shape if observation.given else ()
        self.samples = observation.samples // max(observation.batches, 1)
        self.steps, self.first = given[1] if len(given) > 1 else 0, given
        # the calls of a softmax, by the number that facts have of each
        self._told = [(n, v) for n, v in flow.operation_vertices.items() if v.facts]
        self.softmaxes = {v.facts["made"]: n for n, v in self.having("made")}
        self.tied = {full for record in self.layers.values() for full in record.tied.values()}
        self.inside = dict[str, list[LayerRecord]]()  # of each module itself and those in it
        for record in sorted(self.layers.values(), key=lambda record: record.name):
            for name in () if record.functional else (record.name, *ancestors(record.name)):
                self.inside.setdefault(name, []).append(record)

    def findings(self, rule: Rule) -> Iterator[Finding]:
        """Yield what a rule says, a line of code once."""
        stories: dict[str, tuple[str, str, Grade, dict[str, None]]] = {}
        for place, what, cause, grade in rule(self):
            layers = place if isinstance(place, tuple) else (self.layer_of(place),)
            line = self.vertices[place].line if isinstance(place, int) else ""
            story = stories.setdefault(line or what, (f"{what}{at(line)}", cause, grade, {}))
            story[-1].update(dict.fromkeys(layers))
        for message, cause, severity, names in stories.values():
            first, *others = names
            told = {"cause": cause, "affected": others, "severity": severity}
            yield WIRING.fault(self.layers[first], message, independent=True, **told)

    def having(self, *facts: str) -> Iterator[tuple[int, Vertex]]:
        """Yield the vertices of which one of these was read."""
        return ((n, v) for n, v in self._told if not v.facts.keys().isdisjoint(facts))

    def layer_of(self, number: int) -> str:
        """Return the layer whose code runs an operation, or which a call is of."""
        call = self.vertices[number].call
        layer = self.flow.graph.calls[call].layer if call >= 0 else ""
        return layer if layer in self.layers else ""

    def ran(self, layer: str) -> bool:
        """Whether a module or one inside it was called, or its parameters were read without it."""
        return any(
            record.entered is not None
            or record.status in ("opaque", "parameters_read")
            or any(
                name in record.tied or full in self.tied or full in self.flow
                for name in record.parameters
                if (full := f"{record.name}.{name}")
            )
            for record in self.inside[layer]
        )

    def trainable(self, layer: str) -> int:
        """Return how many numbers a module has to train."""
        return sum(s.count for record in self.inside[layer] for s in trainable(record).values())

    def form(self, layer: str) -> tuple[object, ...]:
        """Return what tells whether two modules are alike: classes and shapes."""
        return tuple(
            (record.type_name, *((name, s.shape) for name, s in record.parameters.items()))
            for record in self.inside[layer]
        )

    def record(self, number: int) -> LayerRecord | None:
        """Return the layer of which a vertex is a call, if it is one."""
        vertex = self.vertices[number]
        return self.layers.get(vertex.name) if vertex.kind == "call" else None

    def before(self, number: int, *traits: str) -> list[int]:
        """Return what a vertex is made of by such operations alone, itself first."""
        met = [number]
        for one in met:  # which grows
            if self.vertices[one].has(*traits):
                met += [o for o in self.vertices[one].operands if o not in met]
        return met

    @cached_property
    def along(self) -> set[int]:
        """The sizes along which something attends or recurs."""
        scores = (v.facts["sizes"][0] for _, v in self.having("made"))
        along = {sizes[-1] for sizes in scores if sizes[-2:-1] == sizes[-1:]}
        layers = ((sizes, record.options["batch_first"]) for _, record, sizes in self.sequences())
        return along | {sizes[1 if is_first else 0] for sizes, is_first in layers}

    def views(self, number: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the sizes before and after each change of layout that a vertex comes from."""
        made = (self.vertices[n] for n in self.flow.as_it_is(number))
        return [v.facts["sizes"] for v in made if v.has("whole") and "sizes" in v.facts]

    def sequences(self) -> Iterator[tuple[Call, LayerRecord, tuple[int, ...]]]:
        """Yield the calls of torch's layers that take steps or samples first, and the sizes."""
        for call in self.flow.graph.calls:
            record = self.layers.get(call.layer)
            sizes = () if record is None or record.inputs is None else record.inputs.shape
            if record and len(sizes) == 3 and call.outputs and "batch_first" in record.options:
                yield call, record, sizes

    def are_apart(self, number: int, steps: int) -> bool:
        """Whether samples lie in the axis of their size alone, and so many steps in another.

        That they are samples is told by the output, by what attends or by positions of the steps.
        """
        views = (self.vertices[n] for n in self.flow.walk([number], back=True))
        sizes = [one for v in views if v.has("whole") for one in v.facts.get("sizes", ())]
        out, samples = self.layers[""].activations, self.samples
        tables = ((*v.facts["table"][:2], v.facts["along"]) for _, v in self.having("table"))
        is_told = steps in self.along or (samples, steps, 1) in tables
        is_told |= out is not None and out.shape[:1] == (samples,) and steps not in out.shape
        is_single = all(one.count(samples) < 2 for one in (self.first, *sizes))
        return is_told and is_single and number in self.given

    def is_scaled(self, number: int, width: int, power: float = -0.5) -> bool:
        """Whether a vertex, in any layout, is something times a power of a width."""
        vertex = self.vertices[self.flow.as_it_is(number)[-1]]
        factor = width ** (-power if vertex.has("quotient") else power)
        is_factor = width > 1 and vertex.has("product", "quotient")
        return is_factor and math.isclose(vertex.facts.get("number", 0.0), factor, rel_tol=1e-4)


Rule = Callable[[Run], Faults]
