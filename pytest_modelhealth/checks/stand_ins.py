"""Layers that are used in the place of siblings, which never run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.settings.setting import parent

if TYPE_CHECKING:
    from pytest_modelhealth.checks.siblings import Siblings
    from pytest_modelhealth.report import Flow, Observation
    from pytest_modelhealth.report.flow import Call

# ---- called in the place of others --------------------------------------------------------------

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
            has_own_name = not _is_listed(observation, group[0])
            is_sure = has_own_name or _is_no_choice(observation, flow, again, len(called))
            yield StandIn(layer, never, len(again), is_sure)


_LISTS = frozenset({"ModuleDict", "ModuleList", "Sequential"})


def _is_listed(observation: Observation, layer: str) -> bool:
    around = observation.layers[parent(layer)]
    return around.entered is None or around.type_name in _LISTS


def _is_no_choice(observation: Observation, flow: Flow, calls: list[Call], ran: int) -> bool:
    """Whether calls of one layer are no choice from a list by what was not seen.

    A language, a route or a score may choose. None computes one thing twice, or mixes statistics of
    two depths; and one layer, the only one that `ran`, in each of three places or more is what a
    loop does that leaves out its index.
    """
    first, last = calls[0], calls[-1]
    if all(call.inputs == first.inputs for call in calls):
        return True
    if ran == 1 and len(calls) >= _FEWEST_FOR_A_LOOP and len({call.line for call in calls}) == 1:
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


# ---- one result in the place of two -------------------------------------------------------------


def taken_for_two(
    observation: Observation, flow: Flow, groups: Siblings
) -> Iterator[tuple[str, str]]:
    """Yield layers whose result is taken in two places, with the one sibling that never runs.

    Siblings that run beside it, where neither feeds the other, are taken in one place each: this is
    no stack that leaves a layer out. Where none is beside it, they are no list, and two layers take
    the result of which neither feeds the other: it is the only one that runs, or called again.
    """
    places: dict[int, set[tuple[int, object]]] = {}
    for group in groups.alike:
        never = [name for name in group if not groups.ran(name)]
        called = [name for name in group if name in flow and flow.calls(name)]
        if len(never) != 1 or len(called) != len(group) - 1 or not called:
            continue
        if not all(map(groups.learns, group)):
            continue
        places = places or _places(flow)
        for name in called:
            if _count(flow, places, name) != {2}:
                continue
            beside = [other for other in called if other != name and _are_beside(flow, name, other)]
            if beside:
                is_for_two = all(_count(flow, places, other) == {1} for other in beside)
            else:
                is_for_two = len(called) == 1 or _is_called_twice_with_each(flow, name)
                is_for_two &= observation.layers[parent(name)].entered is not None
                takers = flow.consumers(name)
                is_for_two &= len(takers) == 2 and _are_beside(flow, *takers)
            if is_for_two:
                yield name, never[0]


def _is_called_twice_with_each(flow: Flow, layer: str) -> bool:
    times = Counter(call.inputs for call in flow.calls(layer))
    live = all(flow.graph.vertices[number].live for given in times for number in given)
    return live and set(times.values()) == {2}


def _are_beside(flow: Flow, one: str, other: str) -> bool:
    """Whether neither of two layers feeds the other."""
    if one not in flow or other not in flow:
        return False  # an end
    return other not in flow.reach(one) and one not in flow.reach(other)


def _count(flow: Flow, places: dict[int, set[tuple[int, object]]], layer: str) -> set[int]:
    """Return in how many places what a layer makes of each input is taken."""
    taken: dict[tuple[int, ...], set[tuple[int, object]]] = defaultdict(set)
    for call in flow.calls(layer):
        taken[call.inputs].update(*(places[output] for output in call.outputs[:1]))
    return set(map(len, taken.values()))


def _places(flow: Flow) -> dict[int, set[tuple[int, object]]]:
    """Return for each vertex where it is taken, in another layout or not.

    Its parts, taken one by one, are taken in one place.
    """
    from pytest_modelhealth.report.flow import AS_IT_IS, WHOLE

    places: dict[int, set[tuple[int, object]]] = defaultdict(set)
    vertices = flow.graph.vertices
    for at, number in enumerate(flow.graph.outputs):
        places[number].add((-1, at))
    for number in range(len(vertices) - 1, -1, -1):
        vertex = vertices[number]
        for position, operand in enumerate(vertex.operands):
            if vertex.function in WHOLE:
                places[operand] |= places[number]
            elif vertex.function in AS_IT_IS:
                places[operand].add((operand, vertex.function))
            else:
                places[operand].add((number, position))
    return places
