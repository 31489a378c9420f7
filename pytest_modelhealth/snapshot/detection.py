"""Detection of drift: each tensor against the noise of its snapshot, and what began it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from pytest_modelhealth.alignment.causes import MOST_CALLS, CallChange, TieChange, retyped
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.snapshot.changes import LayerChange, MatchedTensor, SnapshotPair
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport
from pytest_modelhealth.snapshot.snapshot import (
    FRACTIONS,
    Snapshot,
    is_given,
    is_judged_whole,
    shape_text,
)
from pytest_modelhealth.snapshot.tolerances import Allowance, Tolerances

EXACT = ("dtype", "shape", "count", "nan", "inf")
REAL = ("rms", "std", "mean", "min", "max")
"""In this order: of several that moved alike, the first is shown."""

_STAGES = (
    ("inputs",),
    ("parameters",),
    ("buffers", "inputs", "activations"),
    (LOSS,),
    ("gradients", "parameter_gradients"),
)
"""A run from its causes to its effects, and in each stage the roles of a layer likewise. Only in
the last do later layers come first. The inputs of the first stage are those of the model. Buffers
may be either: a batch norm's follow earlier layers."""


def detect_drift(before: Snapshot, now: Snapshot, *, strict_names: bool = False) -> DriftReport:
    """Return what separates two snapshots.

    Args:
        before: the baseline; its noise or scale sets the tolerances.
        now: what is compared with it.
        strict_names: whether renamed, moved, retyped and inserted layers that change no number fail
            too.
    """
    pair = SnapshotPair(before, now)
    tolerances = Tolerances(before, now.epsilon)
    found = [(tensor, _tensor_drift(pair, tolerances, tensor)) for tensor in pair.tensors()]
    drifts = [drift for _, drift in found if drift is not None]
    drifts += _loss_drift(tolerances, before, now.loss)
    drifts.sort(key=lambda drift: _stage(drift, now.place))
    drifts = _with_inputs_judged(drifts)
    changes = tuple(pair.changes())
    if _is_form_only(drifts, changes, pair):
        changes = (*(replace(c, harmless=True) for c in changes), *map(_as_change, drifts))
        drifts = []
    cause = RootCause("")
    if drifts:
        drifted = {(drift.role, drift.layer) for drift in drifts}
        cause = FirstDrift(drifts[0].role, drifts[0].layer, drifted, pair).root_cause()
    return DriftReport(
        drifts=tuple(drifts),
        changes=changes,
        tensors=len(found),
        story=cause.story,
        told=cause.explained,
        remarks=tuple(_remarks(before, now, drifts, tolerances)),
        strict_names=strict_names,
        has_common_layers=pair.has_common_layers,
        kept={
            (tensor.layer, (tensor.role, tensor.own_name)): tensor.before
            for tensor, drift in found
            if drift is None
        },
    )


def _with_inputs_judged(drifts: list[Drift]) -> list[Drift]:
    """Return the drifts, those of inputs as formal where the layer gives what it gave."""
    others = {drift.layer for drift in drifts if drift.role != "inputs" and not drift.formal}
    return [
        replace(drift, formal=True)
        if drift.role == "inputs" and drift.layer and drift.layer not in others
        else drift
        for drift in drifts
    ]


def _is_form_only(
    drifts: Sequence[Drift], changes: Sequence[LayerChange], pair: SnapshotPair
) -> bool:
    """Whether what is recorded of some layers is another thing, and every number agrees.

    Among these numbers has to be the model's own output.
    """
    models = [side.layers.get("") for side in (pair.old, pair.new)]
    return (
        all(model is not None and ("activations", "") in model.tensors for model in models)
        and all(drift.formal for drift in drifts)
        and all(change.harmless or change.formal for change in changes)
    )


def _as_change(drift: Drift) -> LayerChange:
    seen = f"{drift.statistic} {drift.before}, now {drift.now}"
    rest = f": its {drift.role} are another thing ({seen}), all others agree"
    return LayerChange("changed", drift.label, rest, harmless=True, layer=drift.layer)


def _stage(drift: Drift, place: Mapping[str, int]) -> tuple[int, int, int]:
    position = place.get(drift.layer, -1)
    if drift.role == "inputs":
        stage = 2 if drift.layer else 0
    else:
        stage = next(i for i, roles in enumerate(_STAGES) if drift.role in roles)
    backward = stage == len(_STAGES) - 1
    return stage, -position if backward else position, _STAGES[stage].index(drift.role)


def _tensor_drift(
    pair: SnapshotPair, tolerances: Tolerances, tensor: MatchedTensor
) -> Drift | None:
    found: list[Drift] = []
    before, now = tensor.before, tensor.now
    for statistic in _judged(pair, tensor):
        a, b = getattr(before, statistic), getattr(now, statistic)
        if a == b or (a != a and b != b) or a is None or b is None:
            continue  # whether a tensor has units may hang on who made it
        if statistic in EXACT:
            distance, allowance = math.inf, Allowance(0.0)
        else:
            distance = abs(b - a)
            allowance = tolerances.of(tensor.role, tensor.origin, before, statistic, a)
        if not distance <= allowance.distance:  # a NaN on one side only is never within
            label = pair.new.label(tensor.layer, tensor.own_name)
            texts = _spelled(statistic, a, b)
            found.append(
                Drift(tensor.role, tensor.layer, label, statistic, *texts, distance, allowance)
            )
    largest = max((drift.excess for drift in found), default=0.0)
    # Most often all of them moved alike, and then the first says most.
    first = next((drift for drift in found if drift.excess >= largest / 2), None)
    if first is None or not _is_formal(tensor, {drift.statistic for drift in found}):
        return first
    return replace(first, formal=True)


def _is_formal(tensor: MatchedTensor, statistics: set[str]) -> bool:
    """Whether a tensor within the model has another shape, or is recorded in another number.

    In another shape it has the same numbers. In another number, as of a layer that is called twice
    or returns a tensor more, no statistic of it can be compared. Gradients of the model's own
    outputs come in any order, and the last has the shape.
    """
    inner = bool(tensor.layer and tensor.origin)
    if not statistics & {"shape", "count"} or not (inner or tensor.role == "gradients"):
        return False
    free = {"shape", "dead"}
    if inner and "count" in statistics and tensor.role in ("activations", "gradients"):
        free |= {"count", *REAL, *FRACTIONS}
    return statistics <= free


def _judged(pair: SnapshotPair, tensor: MatchedTensor) -> tuple[str, ...]:
    """Return the statistics to compare.

    Inputs of inner layers serve the story: their form may change, as in another order of
    dimensions. A retyped layer may store its weights transposed.
    """
    before, now = tensor.before, tensor.now
    if not is_judged_whole(tensor.role, tensor.layer):
        return REAL if before.count == now.count else ()
    types = pair.old.layers[tensor.origin].type, pair.new.layers[tensor.layer].type
    transposed = types[0] != types[1] and before.shape[::-1] == now.shape
    exact: tuple[str, ...] = EXACT
    if transposed and "parameter" in tensor.role:
        exact = tuple(statistic for statistic in EXACT if statistic != "shape")
    return (*exact, *REAL, *FRACTIONS)


def _loss_drift(tolerances: Tolerances, before: Snapshot, now: float | None) -> list[Drift]:
    a = before.loss
    if a == now or (a != a and now != now):
        return []
    if a is None or now is None:
        distance, allowance = math.inf, Allowance(0.0)
    else:
        distance, allowance = abs(now - a), tolerances.loss(a, before.loss_noise)
    if distance <= allowance.distance:
        return []
    return [Drift(LOSS, "", LOSS, "value", *_spelled("value", a, now), distance, allowance)]


def _spelled(statistic: str, a: Any, b: Any) -> tuple[str, str]:
    """Return two values with as many digits as show that they differ, and at least five."""
    if statistic in FRACTIONS:
        a, b = ("-" if one is None else f"{100 * one:.2f}%" for one in (a, b))
        return a, b
    for digits in (5, 7, 9, 17):
        texts = _spell(a, digits), _spell(b, digits)
        if texts[0] != texts[1]:
            break
    return texts


def _spell(value: object, digits: int) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return shape_text(value)
    return format(value + 0.0, f".{digits}g") if isinstance(value, float) else str(value)


def _remarks(
    before: Snapshot, now: Snapshot, drifts: Sequence[Drift], tolerances: Tolerances
) -> Iterator[str]:
    roles = [role for line in now.layers.values() for role, _ in line.tensors]
    drifted = [drift.role for drift in drifts]
    if any(drift.role == "inputs" and not drift.layer for drift in drifts):
        yield "The batch itself changed; the rest may only follow from that."
    elif drifted.count("parameters") > roles.count("parameters") / 2:
        yield "Most parameters changed: seed before the model is built (torch.manual_seed)."
    if not before.calibrated:
        yield (
            "The snapshot holds no measured noise, so its tolerances are fixed; recording it anew "
            "with the inspector fixture measures it."
        )
    if tolerances.widened > 1:
        yield (
            f"Matrix products are coarser than when it was recorded: tolerances are "
            f"{tolerances.widened:,.0f} times wider."
        )
    if before.recorded != now.recorded:
        yield f"The snapshot was recorded with {before.recorded}; this is {now.recorded}."


_HINTS = (
    ("norm", "its eps, or its mode?"),
    ("dropout", "its mode, its p, or a seed?"),
    ("softmax", "its dim, or a scale?"),
    ("attention", "its mask, its scale, or dropout?"),
    ("conv", "its stride, padding, dilation or groups?"),
    ("pool", "its kernel, stride or padding?"),
    ("embedding", "its padding_idx or max_norm, or other indices?"),
    ("lstm", "its initial state, or its direction?"),
    ("gru", "its initial state, or its direction?"),
    ("upsample", "its mode or align_corners?"),
    ("gelu", "its approximation?"),
    ("relu", "another activation, or its slope?"),
)

_NO_HINT = "its settings or its forward?"


class RootCause(NamedTuple):
    """What began a drift.

    Args:
        story: one sentence.
        explained: names of the layers in the report of which it tells everything, where it is a
            change of calls or of a tied weight.
    """

    story: str
    explained: frozenset[str] = frozenset()


class FirstDrift:
    """The first drift, from cause to effect, and what it comes from.

    Args:
        role: which tensor of the layer drifted; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        drifted: role and layer of each tensor that drifted.
        pair: both snapshots.
    """

    def __init__(
        self, role: str, layer: str, drifted: Set[tuple[str, str]], pair: SnapshotPair
    ) -> None:
        self.role, self.layer, self.drifted = role, layer, drifted
        self.pair, self.old, self.new = pair, pair.old, pair.new
        self.label = pair.new.label(layer)

    def root_cause(self) -> RootCause:
        """Return the change of calls or of a tied weight it comes from, else what numbers tell."""
        tie = self._tie()
        if tie is not None:
            return RootCause(str(tie), frozenset({tie.pair.candidate or ""}))
        calls: Sequence[CallChange] = ()
        if self.role != "loss" and not is_given(self.role, self.layer):
            calls = self._calls()
        if not calls:
            return RootCause(self._story())
        to = self.pair.alignment.to_candidate
        text = "; ".join(map(str, calls[:MOST_CALLS]))
        return RootCause(text, frozenset(to[name] for change in calls for name in change.inside))

    def _tie(self) -> TieChange | None:
        for tie in self.pair.causes.ties:
            later, owner = tie.pair.candidate, tie.owner.candidate
            of_later = self.role in ("activations", "parameters", "parameter_gradients")
            if (self.layer == later and of_later) or (
                self.layer == owner and self.role == "parameter_gradients"
            ):
                return tie
        return None

    def _calls(self) -> Sequence[CallChange]:
        """Return what is called more or less often and explains the drift.

        - The layer itself, or one around it.
        - Of a container whose layers agree and that gives something else: what is in it.
        - Of a layer that takes something else: what was called right before it and no longer is, or
          is now; else what is called several times, as a snapshot has only the place of the last
          call.
        """
        changes, name = self.pair.causes.calls, self.pair.origin(self.layer)
        if name is None:
            return ()
        own = [change for change in changes if name in change.inside]
        if own:
            rest = [one for one in changes if one not in own]
            near = [one for one in rest if one.both or self._is_right_before(one)]
            return sorted([*own, *near], key=lambda one: not one.more)
        if self.role == "activations" and self.layer in self.new.holders:
            return [one for one in changes if is_inside(one.pair.name, name)]
        if self.role != "inputs" or self._unmatched():
            return ()
        before = [one for one in changes if self._is_right_before(one)]
        return before or [one for one in changes if one.both]

    def _is_right_before(self, change: CallChange) -> bool:
        """Whether a layer called on one side only returned there after the last common one."""
        if change.both:
            return False
        side = self.new if change.more else self.old
        here = self.layer if change.more else self.pair.origin(self.layer) or ""
        once = [
            (one.pair.candidate if change.more else one.pair.reference) or ""
            for one in (change, *self.pair.causes.calls)
            if not one.both
        ]
        if side.place[once[0]] > side.place[here]:
            return False
        between = list(side.layers)[side.place[once[0]] + 1 : side.place[here]]
        return all(
            other in side.holders or any(other == one or is_inside(other, one) for one in once)
            for other in between
        )

    def _story(self) -> str:
        if self.role == "loss":
            return "every layer agrees and the loss does not: its function or the target changed"
        if self.role == "inputs":
            return self._other_input()
        if self.role in ("parameters", "buffers"):
            what = "weights" if self.role == "parameters" else "buffers"
            return f"{self.label}: {', '.join([*self._given(), f'other {what}'])}"
        if self.role == "activations":
            return self._other_output()
        parameters = self.role == "parameter_gradients"
        what = "the gradient of its parameters" if parameters else "its gradient"
        cause = "a detach(), a custom backward, or the loss function?"
        if not self.layer:
            cause = "the loss function, its reduction, or a scale?"
        return f"{self.label}: the forward pass agrees, {what} is the first that does not: {cause}"

    def _given(self) -> list[str]:
        """Return whether the input of the layer is known to be the same."""
        seen = ("inputs", "") in self.new.layers[self.layer].tensors
        return ["same input"] if seen and ("inputs", self.layer) not in self.drifted else []

    def _other_input(self) -> str:
        if not self.layer:
            return f"{self.label}: the batch is another one"
        between = self._unmatched()
        if between:
            beginning = f"{self.label}: other input; between it and the layers before: "
            return beginning + ", ".join(between)
        layers = list(self.new.layers)[: self.new.place[self.layer]]
        before = [name for name in layers if name not in self.new.holders]
        after = f" after {self.new.label(before[-1])}" if before else ""
        parent = self.new.label(self.layer.rpartition(".")[0])
        return (
            f"{self.label}: other input, while every layer before it agrees: what happens{after} "
            f"in {parent} changed (a residual, a mask, a reshape, a function?)"
        )

    def _other_output(self) -> str:
        if self.layer in self.new.holders and len(self.new.layers) > 1:
            return (
                f"{self.label}: every layer in it agrees, its own output does not: its forward "
                "changed"
            )
        line, origin = self.new.layers[self.layer], self.pair.origin(self.layer)
        known = self._given() + ["same weights"] * line.owns_parameters
        before = line if origin is None else self.old.layers[origin]
        hint = next((hint for word, hint in _HINTS if word in line.type.lower()), _NO_HINT)
        cause = hint if before.type == line.type else retyped(before.type, line.type)
        return f"{self.label}: {', '.join([*known, 'other output'])}: {cause}"

    def _unmatched(self) -> list[str]:
        """Return what was added or removed right before the layer, and may change numbers."""
        found: list[str] = []
        for pair in self.pair.alignment.pairs:
            if pair.candidate == self.layer:
                break
            if pair.aligned and pair.candidate not in self.new.holders:
                found = []
            elif pair.candidate is None and self.old.computes(pair.name):
                found.append(f"{self.old.label(pair.name)} was removed")
            elif pair.reference is None and self.new.computes(pair.name):
                found.append(f"{self.new.label(pair.name)} was added")
        return found
