"""Gradients that are exactly zero although the graph leads from the loss to the parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check, Finding
from pytest_modelhealth.checks.data_flow import DataFlow, Port
from pytest_modelhealth.checks.evidence import (
    called,
    completed,
    innermost,
    is_closed,
    is_inside,
    learns,
    leaves,
    parent,
    same_values,
    trainable,
)
from pytest_modelhealth.checks.weights import linear_maps

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation, Violation
    from pytest_modelhealth.statistics import TensorStatistics


def zero_gradients(check: Check, observation: Observation) -> Iterator[Finding]:
    """Yield, as findings of a check, where the gradient becomes exactly zero, or the doubt."""
    flow = DataFlow(observation)
    found = list(_flat_weights(check, observation))
    found = found or [*_zero(check, observation, flow), *_stuck(check, observation)]
    for violation in found:
        reason = _doubt(violation, observation)
        record = observation.layers[violation.layer]
        yield check.inconclusive(record, reason) if reason else violation


def is_in_an_empty_part(record: LayerRecord, observation: Observation) -> bool:
    """Whether it or a module around it returned nothing that could pass a gradient back.

    What summarises windows of tokens returns an empty tensor where a sequence is shorter than a
    window. An indexer returns the places of tokens, and learns from a loss of its own.
    """
    return any(
        r.status == "unsupported" if r.activations is None else r.activations.count == 0
        for r in called(observation)
        if r.name and (r is record or is_inside(record.name, r.name))
    )


def _flat_weights(check: Check, observation: Observation) -> Iterator[Violation]:
    """Yield the first layer whose weight gets zeros where its output gets a gradient.

    The forward rounds or compares the weight, or reads its sign, and passes nothing through.
    """
    has_gate = any(is_closed(record) for record in observation.layers.values())
    flat = [r for r in observation.layers.values() if _is_weight_flat(r, has_gate=has_gate)]
    for record in flat[:1]:
        others = [other.name for other in flat[1:]]
        yield check.violation(
            record,
            "the gradient of its weight is exactly zero, although one reaches what it computes",
            value=0.0,
            limit=ALWAYS,
            role="parameter_gradients",
            tensor="weight",
            cause="the weight is rounded, compared, clamped or reduced to its sign on the way, "
            "which has a gradient of zero: let it pass straight through, as in "
            "weight + (weight.round() - weight).detach()",
            affected=tuple(others),
        )


def _is_weight_flat(record: LayerRecord, *, has_gate: bool) -> bool:
    weight, gradient = record.parameters.get("weight"), record.parameter_gradients.get("weight")
    if weight is None or gradient is None or "weight" in record.frozen:
        return False
    if len(weight.shape) < 2 or weight.abs_max == 0.0 or weight.dtype == "float16":
        return False
    if not gradient.finite_count or gradient.nonfinite_count or gradient.abs_max != 0.0:
        return False
    if not set(record.parameters) <= {"weight", "bias"}:
        return False  # a gate of zero may lie between
    if record.entered is not None:
        arrived, given = record.gradients, record.inputs
        is_map = any(found.tensor == "weight" for found in linear_maps(record))
        seen = arrived is not None and arrived.abs_max > 0.0 and not arrived.nonfinite_count
        return is_map and seen and given is not None and given.zero_fraction < _MOSTLY
    if has_gate:
        return False  # what the weight multiplies may be zero by design: it is not seen here
    bias = record.parameter_gradients.get("bias")
    return bias is not None and not bias.nonfinite_count and bias.abs_max > 0.0


_MOSTLY = 0.75
"""Where most inputs are zero, a gradient may meet nothing else: padding, tokens left out."""


def _zero(check: Check, observation: Observation, flow: DataFlow) -> Iterator[Violation]:
    """Yield the last layer whose gradient is exactly zero for no reason that is a design."""
    zero = [record for record in called(observation) if _has_zero_gradient(record)]
    designs = _Designs(observation, flow)
    culprits = [record for record in zero if not designs.explain(record)]
    for culprit in innermost(culprits)[-1:]:
        record = _last_with_zero_gradient(culprit, observation, flow)
        what = "that reaches it" if record is not culprit else "of its trainable parameters"
        yield check.violation(
            record,
            f"the gradient {what} is exactly zero",
            value=0.0,
            limit=ALWAYS,
            role=None if record is culprit else "gradients",
            cause=_zero_cause(record, observation),
            affected=[other.name for other in zero if other is not record],
        )


def _stuck(check: Check, observation: Observation) -> Iterator[Violation]:
    """Yield layers that multiply two parameters of their own, both zero: neither ever moves."""
    for record in called(observation):
        given, arrived = record.inputs, record.gradients
        if given is None or not given.abs_max > 0.0:
            continue
        if arrived is None or not arrived.abs_max > 0.0:
            continue
        names = [name for name in trainable(record) if _is_zero_and_stays(record, name)]
        if len(names) < _FEWEST_FACTORS or not _map_through(record, names):
            continue
        yield check.violation(
            record,
            f"the gradients of {' and '.join(map(repr, names))} are exactly zero",
            value=0.0,
            limit=ALWAYS,
            tensor=names[0],
            cause="they are all zero and are multiplied with each other, so that neither gets a "
            "gradient and both stay zero: initialise one of them at random",
        )


_FEWEST_FACTORS = 2


def _map_through(record: LayerRecord, names: list[str]) -> bool:
    """Whether two of the matrices lead from the layer's inputs to its outputs by a rank between."""
    given, returned = record.inputs, record.activations
    if given is None or returned is None or not given.shape or not returned.shape:
        return False
    shapes = [record.parameters[name].shape for name in names]
    return any(
        len(a) == len(b) == _MATRIX
        and sorted((given.shape[-1], *b)) == sorted((returned.shape[-1], *a))
        and given.shape[-1] in a
        and returned.shape[-1] in b
        for a, b in permutations(shapes, 2)
    )


_MATRIX = 2


def _is_zero_and_stays(record: LayerRecord, name: str) -> bool:
    values, gradient = record.parameters[name], record.parameter_gradients.get(name)
    is_factor = len(values.shape) > 1 and values.abs_max == 0.0
    return is_factor and gradient is not None and gradient.abs_max == 0.0


def _doubt(violation: Violation, observation: Observation) -> str:
    """Return what in this batch alone may explain a zero, and what to give instead."""
    if observation.loss == 0.0:  # `loss` names one that is switched off
        return (
            "the loss is exactly 0 on this batch, as a hinge is that every sample satisfies: give "
            "a batch from which there is something to learn"
        )
    record = observation.layers[violation.layer]
    if any(_leaves_one_choice(r) for r in called(observation) if _is_beside(r, record)):
        return (
            "its gradient is exactly zero, but a mask leaves each row of a softmax here a single "
            "choice on this batch, whose weight is 1: give a batch of which it leaves more"
        )
    if violation.tensor:
        return ""  # it lies at a parameter, whatever the batch
    after, twin = _partly_read(record, observation), _learning_twin(record, observation)
    if after is not None and twin is not None:
        return (
            f"its gradient is exactly zero, but only {_read_positions(after)} of the "
            f"{_positions(after)} positions of {after.label!r} after it gets one, as where the "
            f"loss reads a class token: it may be for the others, and {twin.label!r} learns; give "
            "a loss that reads every position"
        )
    if not _later_gradients(record, observation) and any(map(learns, called(observation))):
        return (
            "the loss is flat at this output on this batch and not at others, as where a mask lets "
            "nothing through: give a batch that has something for it to learn"
        )
    if 0 < observation.samples < _FEWEST_SAMPLES:
        return (
            f"its gradient is exactly zero, but all of {observation.samples} samples may have been "
            f"left out here, by a mask or by stochastic depth: give {_FEWEST_SAMPLES} or more"
        )
    return ""


def _leaves_one_choice(record: LayerRecord) -> bool:
    """Whether a softmax was given nothing but -inf beside one score a row."""
    given, out = record.inputs, record.activations
    if record.activation != "softmax" or given is None or out is None or not out.count:
        return False
    left = given.count - given.negative_inf_count
    return given.negative_inf_count > 0 and left == round(out.mean * out.count)


def _is_beside(record: LayerRecord, other: LayerRecord) -> bool:
    """Whether a layer lies in another or in the same module as it."""
    return is_inside(record.name, other.name) or parent(record.name) == parent(other.name)


def _partly_read(record: LayerRecord, observation: Observation) -> LayerRecord | None:
    """Return the next layer after it that gets a gradient, where whole positions of that get none.

    Of the last block of a transformer a class token alone may be read.
    """
    after = min(_later_gradients(record, observation), key=completed, default=None)
    if after is None or len(after.gradients.shape if after.gradients else ()) < _SEQUENCE:
        return None
    read = _read_positions(after)
    return after if 0 < 2 * read <= _positions(after) else None


_SEQUENCE = 3


def _positions(record: LayerRecord) -> int:
    return 0 if record.gradients is None else record.gradients.shape[-2]


def _read_positions(record: LayerRecord) -> int:
    """Return how many of the positions of a layer get a gradient; 0 where they are no whole ones.

    Positions lie in the last dimension but one.
    """
    gradient = record.gradients
    if gradient is None or not gradient.count or gradient.nonfinite_count:
        return 0
    read = (1.0 - gradient.zero_fraction) * gradient.shape[-2]
    return round(read) if abs(read - round(read)) <= _WHOLE * read else 0


_WHOLE = 1e-3


def _learning_twin(record: LayerRecord, observation: Observation) -> LayerRecord | None:
    """Return a layer that learns in the place of `record` in another block of the same list."""
    places = {alike for alike, _ in _places_in_lists(record)}
    for other in called(observation):
        if learns(other) and any(alike in places for alike, _ in _places_in_lists(other)):
            return other
    return None


_FEWEST_SAMPLES = 4
"""Of fewer, all are left out by chance too often: of 3 one time in 8, where half are."""


def _last_with_zero_gradient(
    culprit: LayerRecord, observation: Observation, flow: DataFlow
) -> LayerRecord:
    """Return the last layer on the way from `culprit` at which nothing arrives."""
    reached = {port.layer for port in flow.reached(Port(culprit.name, output=True)) if port.output}
    silent = [
        r
        for r in leaves(observation)
        if r.name in reached and r.gradients is not None and r.gradients.abs_max == 0.0
    ]
    return max(silent, key=completed, default=culprit)


def _has_zero_gradient(record: LayerRecord) -> bool:
    gradients = [s for name, s in record.parameter_gradients.items() if name not in record.frozen]
    arrived = record.gradients
    return (
        bool(gradients)
        and all(s.abs_max == 0.0 for s in gradients)
        and arrived is not None
        and arrived.abs_max == 0.0
    )


class _Designs:
    """What explains a gradient of exactly zero: a closed gate, a silent activation, a choice."""

    def __init__(self, observation: Observation, flow: DataFlow) -> None:
        self._observation = observation
        self._flow = flow

    def explain(self, record: LayerRecord) -> bool:
        """Whether a zero gate or a silent activation after it, or a choice, explains the zero."""
        return (
            self._is_blocked(record)
            or self._is_left_out(record)
            or self._has_a_closed_partner(record)
            or self._has_no_choice(record)
            or is_in_an_empty_part(record, self._observation)
            or _is_for_what_is_not_read(record, self._observation)
        )

    def _is_blocked(self, record: LayerRecord) -> bool:
        """Whether a layer that passes nothing on depends on it."""
        out = Port(record.name, output=True)
        if out not in self._blocked:
            return False
        return record.name not in self._blockers or any(
            port.layer in self._blockers and port.layer != record.name
            for port in self._flow.reached(out)
        )

    @cached_property
    def _blockers(self) -> frozenset[str]:
        """The layers that pass nothing on."""
        return frozenset(
            r.name
            for r in called(self._observation)
            if is_closed(r)
            or (_is_silent(r) and not _is_zero(r))
            or (_has_zero_gradient(r) and self._has_a_closed_partner(r))
        )

    @cached_property
    def _blocked(self) -> frozenset[Port]:
        return self._flow.reaching(Port(name, output=True) for name in self._blockers)

    def _has_no_choice(self, record: LayerRecord) -> bool:
        """Whether it makes scores of one token on itself, or on one key: its weight is 1 anyway.

        A softmax over one score of each of several is no such attention, but a wrong dimension.
        """
        return parent(record.name) in self._without_choice

    @cached_property
    def _without_choice(self) -> frozenset[str]:
        """The modules whose attention has a single key."""
        return frozenset(
            parent(r.name)
            for r in called(self._observation)
            if r.options.get("keys") == 1
            or (
                r.activation == "softmax"
                and r.activations is not None
                and r.activations.shape[-2:] == (1, 1)
                and r.activations.min == 1.0
            )
        )

    def _is_left_out(self, record: LayerRecord) -> bool:
        """Whether it is one of several alike, side by side, of which the model takes others.

        Heads whose outputs are stacked and sliced get gradients of exactly zero where they are left
        out. They are no stack of blocks, and what feeds them learns through the others.
        """
        return any(
            self._are_side_by_side(own, other)
            for alike, own in _places_in_lists(record)
            for other in self._learning.get(alike, ())[:_MOST_ALIKE]
        )

    @cached_property
    def _learning(self) -> dict[_Alike, list[str]]:
        """Of layers alike, the members of the list that hold one that learns."""
        learning: dict[_Alike, list[str]] = defaultdict(list)
        for record in self._observation.layers.values():
            if learns(record):
                for alike, member in _places_in_lists(record):
                    learning[alike].append(member)
        return learning

    def _are_side_by_side(self, one: str, other: str) -> bool:
        layers = self._observation.layers
        a, b = layers.get(one), layers.get(other)
        if a is None or b is None or a.entered is None or b.entered is None:
            return False
        stem = parent(one)
        sources = [s for name in (one, other) if (s := self._flow.source(name)) is not None]
        if any(source.output and parent(source.layer) == stem for source in sources):
            return False  # in a row, though a small branch may leave the numbers as they are
        if same_values(a.inputs, b.inputs):
            return True
        return self._first_learning < min(a.entered, b.entered)

    @cached_property
    def _first_learning(self) -> float:
        """When the first layer that learns had returned."""
        learning = [completed(r) for r in called(self._observation) if learns(r)]
        return min(learning, default=math.inf)

    def _has_a_closed_partner(self, record: LayerRecord) -> bool:
        """Whether a layer beside it gives out zeros so far that its output multiplies, and learns.

        Their product opens at the first step: queries that start at zero, with keys that do not;
        the weights of channels (squeeze-and-excitation) of a branch that ends in zeros.
        """
        out = record.activations
        if out is None or not out.count:
            return False
        return any(
            (own == parent(record.name) and zeros.count == out.count)
            or (
                is_inside(record.name, own)
                and end < completed(record)
                and zeros.shape[:1] == out.shape[:1]
                and zeros.count % out.count == 0
            )
            for own, zeros, end in self._opening
        )

    @cached_property
    def _opening(self) -> list[tuple[str, TensorStatistics, int]]:
        """Of the layers that give out zeros and learn, what they lie in, the zeros and the end."""
        return [
            (parent(_around(r, self._observation)), r.activations, completed(r))
            for r in called(self._observation)
            if r.activations is not None
            and r.activations.abs_max == 0.0
            and is_closed(r)
            and learns(r)
        ]


_MOST_ALIKE = 256

_Alike = tuple[str, str, str]
"""What lies before and after a number in the name of a layer, and the layer's type."""


def _places_in_lists(record: LayerRecord) -> Iterator[tuple[_Alike, str]]:
    """Yield the lists that a layer lies in, by the numbers in its name, and its member of each."""
    parts = record.name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            stem, rest = ".".join(parts[:place]), ".".join(parts[place + 1 :])
            yield (stem, rest, record.type_name), ".".join(parts[: place + 1])


def _around(record: LayerRecord, observation: Observation) -> str:
    """Return the outermost module that gives out the zeros of `record` and no more."""
    name, zeros = record.name, record.activations
    while (container := observation.layers.get(parent(name))) is not None and name:
        out = container.activations
        if out is None or zeros is None or out.abs_max != 0.0 or out.count != zeros.count:
            break
        name = container.name
    return name


def _is_for_what_is_not_read(record: LayerRecord, observation: Observation) -> bool:
    """Whether it makes just the positions of which nothing is read: all but the class token.

    So does a table of relative positions, where what is looked up there has as many positions.
    """
    after = _partly_read(record, observation)
    if after is None or after.gradients is None or record.activations is None:
        return False
    if record.activations.count == after.gradients.zero_count:
        return True
    unread = _positions(after) - _read_positions(after)
    return any(
        layer.activations is not None and layer.activations.shape[-2:-1] == (unread,)
        for layer in leaves(observation)
        if completed(record) <= completed(layer) < (after.entered or 0)
    )


def _is_zero(record: LayerRecord) -> bool:
    """Whether all that a layer multiplies by is zero."""
    maps = linear_maps(record)
    return bool(maps) and all(found.weights.abs_max == 0.0 for found in maps)


def _is_silent(record: LayerRecord) -> bool:
    return record.activations is not None and record.activations.dead_fraction == 1.0


def _zero_cause(record: LayerRecord, observation: Observation) -> str:
    zero = [r.label for r in leaves(observation) if _is_zero(r) and not learns(r)]
    if record.label in zero and len(zero) > 1:
        others = ", ".join(repr(label) for label in zero if label != record.label)
        return (
            f"its weights are all zero, and so are those of {others}: multiplied with each other "
            "neither gets a gradient, and both stay zero; initialise them at random"
        )
    after = _later_gradients(record, observation)
    if not after:
        return _flat_loss_cause(record)
    nearest = min(after, key=completed)
    return (
        f"{nearest.label!r} gets a gradient and none comes back through what lies between: a "
        "clamp, rounding, a saturated function, times zero, or a backward that returns zeros"
    )


def _later_gradients(record: LayerRecord, observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran after it and do not hold it, to whose outputs a gradient came."""
    return [
        r
        for r in called(observation)
        if completed(r) > completed(record)
        and r.gradients is not None
        and r.gradients.abs_max > 0.0
        and not is_inside(record.name, r.name)
    ]


def _flat_loss_cause(record: LayerRecord) -> str:
    out = record.activations
    if out is not None and out.dtype == "float16":
        return (
            "the gradient underflows float16, or the loss is flat here: scale the loss "
            "(GradScaler), or use bfloat16"
        )
    return "the loss is flat at this output: a clamp, a saturated function or a constant"
