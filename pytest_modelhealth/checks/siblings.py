"""Layers that are alike: which no residual goes past, and which stand in for others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from pytest_modelhealth.checks.facts import trainable
from pytest_modelhealth.report import Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import Call
from pytest_modelhealth.settings.setting import parent

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
        kept = {
            (r.inputs is not None and r.activations is not None)
            and r.inputs.shape == r.activations.shape
            for r in records
        }
        calls = [flow.calls(name) if name in flow else () for name in group]
        # one that is not called, or returns what it is given, is skipped for a step
        is_left_out = any(
            not c or any(set(one.outputs) <= set(one.inputs) for one in c) for c in calls
        )
        if is_left_out or len(kept) > 1:
            continue
        for inner in inside:
            if not all(name + inner in flow for name in group):
                continue
            for is_around in (False, True) if inner else (True,):
                without = [n for n in group if not flow.residual(n + inner, around=is_around)]
                if len(without) == 1 and without[0] not in (group[0], group[-1]):
                    yield without[0] + inner, inner if is_around else "", len(group) - 1


_FEWEST_FOR_A_LOOP = 3


class StandIn(NamedTuple):
    """A layer that is called in the place of others.

    Args:
        layer: the layer.
        never: its siblings that are never called.
        times: how often it is called.
        is_sure: whether no design is known that does so.
    """

    layer: str
    never: list[str]
    times: int
    is_sure: bool


def standing_in(observation: Observation, flow: Flow, groups: Siblings) -> Iterator[StandIn]:
    """Yield layers called in the place of others.

    In each call of the module around them, as many of its calls are made as there are siblings.
    What is routed calls several on parts of one tensor, or fewer; what is dropped or left early
    calls fewer; a slow copy that is kept for later is frozen.
    """
    for group in groups.alike:
        never = [name for name in group if not groups.ran(name)]
        called = [shown for name in group if (shown := groups.called(name))]
        if not never or not called or len(never) + len(called) != len(group):
            continue
        if not all(map(groups.learns, never)):
            continue
        callers: dict[int, list[Call]] = defaultdict(list)
        for name in called:
            for call in flow.calls(name):
                callers[call.parent].append(call)
        if any(len(calls) != len(group) for calls in callers.values()):
            continue
        first = min(callers)
        times = Counter(call.layer for call in callers[first])
        layer = max(times, key=lambda name: times[name])
        again = [call for call in callers[first] if call.layer == layer]
        by_key = observation.layers[parent(layer)].type_name == "ModuleDict"
        if _take_a_place(flow, again, by_key):
            around = observation.layers[parent(group[0])]
            is_listed = around.entered is None or around.type_name in _LISTS
            is_sure = not is_listed or _is_no_choice(observation, flow, again, len(called))
            yield StandIn(layer, never, len(again), is_sure)


_LISTS = frozenset({"ModuleDict", "ModuleList", "Sequential"})


def _is_no_choice(observation: Observation, flow: Flow, calls: list[Call], ran: int) -> bool:
    """Whether calls of one layer are no choice from a list by what was not seen.

    A language, a route or a score may choose. None computes one thing twice, or mixes statistics of
    two depths; and one layer, the only one that `ran`, in each of three places or more is what a
    loop does that leaves out its index.
    """
    first, last = calls[0], calls[-1]
    is_loop = ran == 1 and len(calls) >= _FEWEST_FOR_A_LOOP
    if all(call.inputs == first.inputs for call in calls):
        return True
    if is_loop and len({call.line for call in calls}) == 1:
        return True
    has_statistics = "running_mean" in observation.layers[first.layer].buffers
    return has_statistics and not flow.after(*first.outputs).isdisjoint(last.inputs)


def _take_a_place(flow: Flow, calls: list[Call], by_key: bool) -> bool:
    """Whether calls of a layer follow one another, or have inputs of their own, or all the same."""
    first, *later = calls
    if all(call.inputs == first.inputs for call in later):  # parts of what has no graph look alike
        given = [flow.graph.vertices[number] for number in first.inputs]
        return all(vertex.live or vertex.kind == "input" for vertex in given)
    following = flow.after(*first.outputs)
    if all(not following.isdisjoint(call.inputs) for call in later):
        pairs = zip(calls, later, strict=False)  # chosen by name: it may be called between others
        return not by_key or all(set(b.inputs) & set(a.outputs) for a, b in pairs)
    origins = [flow.origins(*call.inputs) for call in calls]
    return all(one != origins[0] for one in origins[1:])
