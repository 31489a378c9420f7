"""Layers that are alike, and what one of them does otherwise than the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import trainable
from pytest_modelhealth.checks.own_code import Difference, differences, keeps_shape
from pytest_modelhealth.checks.paths import is_normalization
from pytest_modelhealth.settings.layer_names import parent

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
        self.functions: dict[str, list[LayerRecord]] = defaultdict(list)
        """The functional layers in each module."""
        for record in sorted(observation.layers.values(), key=lambda record: record.name):
            name, found = record.name, self.functions if record.functional else self.below
            found[name].append(record)
            while name:
                name = parent(name)
                found[name].append(record)

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


# ---- what one lacks and the rest have -----------------------------------------------------------


def differing(
    observation: Observation, flow: Flow, groups: Siblings
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield layers that lack what all siblings have: the layer, what it lacks, the siblings.

    Layers that hold no others are compared within a list alone: those that have names of their own
    have parts of their own to play, as queries and keys have.
    """
    for group in groups.alike:
        if len(group) <= _FEWEST_SIBLINGS:
            continue
        around = observation.layers[parent(group[0])]
        is_list = around.entered is None or around.type_name == "Sequential"
        holds_others = len(groups.below[group[0]]) > 1
        if not is_list and not holds_others:
            continue
        called = [name for name in group if name in flow]
        if len(called) == len(group):
            yield from _odd_ones(observation, flow, groups, group)
        elif is_list:
            yield from _norm_left_out(observation, groups, group, called)


def _odd_ones(
    observation: Observation, flow: Flow, groups: Siblings, group: list[str]
) -> Iterator[tuple[str, list[str], list[str]]]:
    holds_others = len(groups.below[group[0]]) > 1
    calls = {name: len(flow.calls(name)) for name in group}
    odd: dict[str, list[str]] = defaultdict(list)
    if len(set(calls.values())) > 1:
        twice = [name for name in group if calls[name] == 2]
        if sum(calls.values()) == len(group) + 1 and holds_others and _is_row(flow, twice[0]):
            odd[twice[0]].append("it is called twice in a row, they once each")
    else:
        for name, inner, said in _otherwise(observation, flow, groups, group):
            if not inner:
                odd[name] = said
                continue
            yield name + inner, said, [other + inner for other in group if other != name]
        past = _without_residual(observation, flow, group)
        if past is not None and past not in (*odd, group[0], group[-1]):
            odd[past].append(PAST)
    for name, lacks in odd.items():
        yield name, lacks, [other for other in group if other != name]


def _otherwise(
    observation: Observation, flow: Flow, groups: Siblings, group: list[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each that is put together otherwise than all others, with how.

    The second is what its name goes on with, where that is in the code of one layer inside alone.
    """
    inside = [record.name[len(group[0]) :] for record in groups.below[group[0]]]
    codes = list(differences(observation, flow, group, inside))
    read = {name: len(_read(flow, name)) for name in group} if len(inside) > 1 else {}
    fewest = sorted(read.values())[:2]
    for name, lacking in _lacking(flow, groups, group).items():
        if any(set(call.outputs) <= set(call.inputs) for call in flow.calls(name)):
            continue  # left out for a step
        found = [one for one in codes if one.block == name]
        if read and _reads_otherwise(flow, name, read[name], fewest, set(lacking)):
            lacking = {trait: said for trait, said in lacking.items() if trait[0] == "call"}
            found = [one for one in found if one.is_constant]
        where = {one.inner for one in found}
        if not lacking and len(where) == 1:
            yield name, found[0].inner, [one.said for one in found]
        elif lacking or found:
            firsts = {trait[0]: said for trait, said in reversed(lacking.items())}
            yield name, "", [*reversed(firsts.values()), *map(_within, found)]


def _within(one: Difference) -> str:
    return f"in its {one.inner[1:]!r}, {one.said}" if one.inner else one.said


def _is_row(flow: Flow, layer: str) -> bool:
    first, second = flow.calls(layer)
    return bool(set(first.outputs) & set(second.inputs))


Traits = dict[tuple[object, ...], str]
"""What a layer has: its kind and what it is compared by, each with what to say where it lacks."""


def _lacking(flow: Flow, groups: Siblings, group: list[str]) -> dict[str, Traits]:
    """Return what each layer of a group lacks that all others have."""
    traits = {name: _traits(flow, groups, name) for name in group}
    counts = Counter(trait for found in traits.values() for trait in found)
    common = {t: said for found in traits.values() for t, said in found.items()}
    common = {t: said for t, said in common.items() if counts[t] == len(group) - 1}
    return {
        name: {trait: said for trait, said in common.items() if trait not in found}
        for name, found in traits.items()
    }


def _reads_otherwise(
    flow: Flow, layer: str, count: int, fewest: list[int], lacking: set[tuple[object, ...]]
) -> bool:
    """Whether a layer reads something else in place of what it lacks, or has made that itself.

    A layer with a mask of its own lacks no mask, and the first block may make what others take.
    It reads `count` tensors; `fewest` are the two least counts of its group.
    """
    missed = {trait[1] for trait in lacking if trait[0] == "read"}
    if not missed.isdisjoint(flow.inside(layer)):
        return True
    least_of_others = fewest[1] if count == fewest[0] else fewest[0]
    return count > least_of_others - bool(missed)


def _read(flow: Flow, layer: str) -> frozenset[int]:
    """Return the vertices that a layer reads from outside."""
    vertices, inside = flow.graph.vertices, flow.inside(layer)
    return frozenset(o for i in inside for o in vertices[i].operands) - inside


def _traits(flow: Flow, groups: Siblings, layer: str) -> Traits:
    called = (inner for inner in groups.below[layer][1:] if inner.entered is not None)
    names = [inner.name[len(layer) + 1 :] for inner in called]
    traits: Traits = {("call", own): f"its {own!r} is never called" for own in names}
    if len(groups.below[layer]) > 1:
        traits |= _reads(flow, layer) | _options(groups, layer)
    return traits


PAST = "no residual goes past it: nothing that it is made of is added to what comes of it"


def _without_residual(observation: Observation, flow: Flow, group: list[str]) -> str | None:
    """Return the one layer of a group whose caller adds nothing to what it returns."""
    without = [name for name in group if not flow.residual(name, around=True)]
    if len(without) != 1 or not keeps_shape(observation.layers[without[0]]):
        return None
    return without[0]


def _reads(flow: Flow, layer: str) -> Traits:
    """Return what a layer reads from outside beside its own values."""
    vertices = flow.graph.vertices
    traits: Traits = {}
    for number in _read(flow, layer):
        vertex = vertices[number]
        own = vertex.name.removeprefix(f"{layer}.")
        if own != vertex.name and vertex.kind in ("parameter", "buffer"):
            traits["own", own] = f"it does not read its {own!r}"
        else:
            where = f" of {vertex.line}" if vertex.line else ""
            traits["read", number] = f"{vertex.name!r}{where} does not get into it"
    return traits


def _options(groups: Siblings, layer: str) -> Traits:
    """Return how functions inside a layer are called: along which dimension, causal or not."""
    traits: Traits = {}
    for record in groups.functions[layer]:
        own = record.name[len(layer) + 1 :]
        for option, value in record.options.items():
            traits["option", own, option, value] = f"{own!r} is not called with {option}={value!r}"
    return traits


def _norm_left_out(
    observation: Observation, groups: Siblings, group: list[str], called: list[str]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the one norm of a list that is never called, while all else beside the list runs."""
    never = [name for name in group if not groups.ran(name)]
    if len(never) != 1 or len(called) != len(group) - 1:
        return
    if not all(is_normalization(observation.layers[name]) for name in called):
        return
    around = parent(parent(group[0]))
    idle = [r.name for r in groups.below[around] if r.parameters and not groups.ran(r.name)]
    if idle == never:
        yield never[0], ["it is never called"], called
