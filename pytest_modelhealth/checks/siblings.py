"""Layers that are alike, and which of them no residual goes past."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import trainable
from pytest_modelhealth.settings.setting import parent

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation

_FEWEST_SIBLINGS = 3
_Form = tuple[tuple[str, str, tuple[tuple[str, tuple[int, ...]], ...]], ...]


class Siblings:
    """The layers of a model in groups of one class and shape, each below one module."""

    def __init__(self, observation: Observation, flow: Flow) -> None:
        self._layers = observation.layers
        self._flow = flow
        self.below: dict[str, list[LayerRecord]] = defaultdict(list)
        """The modules in each module, itself first."""
        for record in sorted(observation.layers.values(), key=lambda record: record.name):
            name = record.name
            if record.functional:
                continue
            self.below[name].append(record)
            while name:
                name = parent(name)
                self.below[name].append(record)

    @cached_property
    def alike(self) -> list[list[str]]:
        """The groups of two or more that hold parameters, each in the order of the calls."""
        rough: dict[tuple[str, str], list[str]] = defaultdict(list)
        for record in self._layers.values():
            rough[parent(record.name), record.type_name].append(record.name)
        groups: dict[tuple[str, _Form], list[str]] = defaultdict(list)
        for (holder, _), names in rough.items():
            for name in names if len(names) > 1 else ():
                groups[holder, self._form(name)].append(name)
        return [g for g in groups.values() if len(g) > 1 and self.has_parameters(g[0])]

    def _form(self, layer: str) -> _Form:
        """Return what tells whether two layers are alike: classes and shapes, by own name."""
        return tuple(
            (
                record.name[len(layer) :],
                record.type_name,
                tuple((name, s.shape) for name, s in record.parameters.items()),
            )
            for record in self.below[layer]
        )

    def has_parameters(self, layer: str) -> bool:
        """Whether a layer or one inside it holds parameters."""
        return any(record.parameters for record in self.below[layer])

    def ran(self, layer: str) -> bool:
        """Whether a layer or one inside it was called, or its parameters used without it."""
        return any(
            record.entered is not None
            or record.parameter_gradients
            or any(f"{record.name}.{name}" in self._flow for name in record.parameters)
            for record in self.below[layer]
        )

    def called(self, layer: str) -> str | None:
        """Return a layer if it was called, of a list that is not the first in it that was."""
        inside = (record.name for record in self.below[layer])
        return next((name for name in inside if name in self._flow), None)

    def learns(self, layer: str) -> bool:
        """Whether a layer or one inside it has parameters that are not frozen."""
        return any(map(trainable, self.below[layer]))


# ---- a residual that one lacks and the rest have ------------------------------------------------


def without_residual(
    observation: Observation, flow: Flow, groups: Siblings
) -> Iterator[tuple[str, str, int]]:
    """Yield layers past which no residual goes, while one goes past each of three siblings or more.

    Each with what it is inside of a sibling whose own code adds nothing past it, ``""`` where it is
    its own code or that of its caller, and how many siblings there are. The first and the last may
    be meant so, as is what changes the shape. Layers that hold no others are compared within a list
    alone: those that have names of their own have parts of their own to play, as queries have.
    """
    for group in groups.alike:
        records = [observation.layers[name] for name in group]
        around = observation.layers[parent(group[0])]
        is_list = around.entered is None or around.type_name == "Sequential"
        inside = [record.name[len(group[0]) :] for record in groups.below[group[0]]]
        if len(group) <= _FEWEST_SIBLINGS or not (is_list or len(inside) > 1):
            continue
        if any(_is_left_out(flow, name) for name in group) or len(set(map(_kept, records))) > 1:
            continue
        for inner in inside:
            if not all(name + inner in flow for name in group):
                continue
            for is_around in (False, True) if inner else (True,):
                without = [n for n in group if not flow.residual(n + inner, around=is_around)]
                if len(without) == 1 and without[0] not in (group[0], group[-1]):
                    yield without[0] + inner, inner if is_around else "", len(group) - 1


def _is_left_out(flow: Flow, layer: str) -> bool:
    """Whether a layer is not called, or returns what it is given: it is skipped for a step."""
    calls = flow.calls(layer) if layer in flow else ()
    return not calls or any(set(call.outputs) <= set(call.inputs) for call in calls)


def _kept(record: LayerRecord) -> bool:
    """Whether a layer returned what has the shape of its input."""
    given, returned = record.inputs, record.activations
    return given is not None and returned is not None and given.shape == returned.shape
