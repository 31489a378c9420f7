"""Detection of drift: each tensor against the noise of its snapshot, and what began it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from pytest_modelhealth.alignment.causes import MOST_CALLS, CallChange, retyped
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
    # An input that the layer makes the same of is another form of it.
    others = {drift.layer for drift in drifts if drift.role != "inputs" and not drift.formal}
    drifts = [
        replace(one, formal=one.formal or (one.role == "inputs" and one.layer not in {"", *others}))
        for one in drifts
    ]
    changes = tuple(pair.changes())
    if _is_form_only(drifts, changes, pair):
        changes = (*(replace(c, harmless=True) for c in changes), *map(_as_change, drifts))
        drifts = []
    story: Told = ("", frozenset())
    if drifts:
        drifted = {(drift.role, drift.layer) for drift in drifts}
        story = FirstDrift(drifts[0].role, drifts[0].layer, drifted, pair).story()
    kept = {
        (one.layer, (one.role, one.own_name)): one.before for one, drift in found if drift is None
    }
    remarks = tuple(_remarks(before, now, drifts, tolerances))
    common = pair.has_common_layers
    return DriftReport(
        tuple(drifts), changes, len(found), *story, remarks, strict_names, common, kept
    )


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
    stages = range(1, len(_STAGES)) if drift.role == "inputs" and drift.layer else range(5)
    stage = next(i for i in stages if drift.role in _STAGES[i])
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
            texts = _spelled(a, b)
            if statistic in FRACTIONS:
                texts = f"{100 * a:.2f}%", f"{100 * b:.2f}%"
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
    texts = _spelled("none" if a is None else a, "none" if now is None else now)
    return [Drift(LOSS, "", LOSS, "value", *texts, distance, allowance)]


def _spelled(a: Any, b: Any) -> tuple[str, str]:
    """Return two values with as many digits as show that they differ, and at least five."""
    for digits in (5, 7, 9, 17):
        texts = _spell(a, digits), _spell(b, digits)
        if texts[0] != texts[1]:
            break
    return texts


def _spell(value: Any, digits: int) -> str:
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
    ("upsample", "its mode or align_corners?"),
    ("gelu", "its approximation?"),
    ("relu", "another activation, or its slope?"),
)

_NO_HINT = "its settings or its forward?"


Told = tuple[str, frozenset[str]]
"""A story, and the layers of the report of which it tells all, as it is one of calls or of ties."""


@dataclass(frozen=True)
class FirstDrift:
    """The first drift, from cause to effect, and what it comes from.

    Args:
        role: which tensor of the layer drifted; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        drifted: role and layer of each tensor that drifted.
        pair: both snapshots.
    """

    role: str
    layer: str
    drifted: Set[tuple[str, str]]
    pair: SnapshotPair

    def story(self) -> Told:
        """Return the change of calls or of a tied weight it comes from, else what numbers tell."""
        for tie in self.pair.causes.ties:
            later, owner = tie.pair.candidate, tie.owner.candidate
            if (self.role, self.layer) in (
                ("activations", later),
                ("parameters", later),
                ("parameter_gradients", later),
                ("parameter_gradients", owner),
            ):
                return str(tie), frozenset({later or ""})
        calls = [] if self.role == LOSS or is_given(self.role, self.layer) else self._calls()
        if not calls:
            return self._of_numbers(), frozenset()
        to = self.pair.alignment.to_candidate
        text = "; ".join(map(str, calls[:MOST_CALLS]))
        return text, frozenset(to[name] for change in calls for name in change.inside)

    def _calls(self) -> list[CallChange]:
        """Return what is called more or less often and explains the drift.

        - The layer itself, or one around it, and whatever else is.
        - Of a container whose layers agree and that gives something else: what is in it.
        - Of a layer that takes something else, and nothing came or went before it: all.
        """
        changes, name = self.pair.causes.calls, self.pair.origin(self.layer)
        if name is None:
            return []
        own = [one for one in changes if name in one.inside]
        if own or (self.role == "inputs" and not self._unmatched()):
            rest = [one for one in changes if one not in own]
            return sorted([*own, *rest], key=lambda one: not one.more)
        if self.role == "activations" and self.layer in self.pair.new.holders:
            return [one for one in changes if is_inside(one.pair.name, name)]
        return []

    def _of_numbers(self) -> str:
        label = self.pair.new.label(self.layer)
        if self.role == LOSS:
            return "every layer agrees and the loss does not: its function or the target changed"
        if self.role == "inputs":
            return f"{label}: {self._other_input() if self.layer else 'the batch is another one'}"
        # Whether the input of the layer is known to be the same.
        seen = ("inputs", "") in self.pair.new.layers[self.layer].tensors
        same = ["same input"] if seen and ("inputs", self.layer) not in self.drifted else []
        if self.role in ("parameters", "buffers"):
            what = "weights" if self.role == "parameters" else "buffers"
            return f"{label}: {', '.join([*same, f'other {what}'])}"
        if self.role == "activations":
            return f"{label}: {self._other_output(same)}"
        what = "its gradient" if self.role == "gradients" else "the gradient of its parameters"
        cause = "a detach(), a custom backward, or the loss function?"
        if not self.layer:
            cause = "the loss function, its reduction, or a scale?"
        return f"{label}: the forward pass agrees, {what} is the first that does not: {cause}"

    def _other_input(self) -> str:
        new = self.pair.new
        between = self._unmatched()
        if between:
            return f"other input; between it and the layers before: {', '.join(between)}"
        before = [name for name in new.layers if name not in new.holders or name == self.layer]
        index = before.index(self.layer)
        after = f" after {new.label(before[index - 1])}" if index else ""
        parent = new.label(self.layer.rpartition(".")[0])
        return (
            f"other input, while every layer before it agrees: what happens{after} in {parent} "
            "changed (a residual, a mask, a reshape, a function?)"
        )

    def _other_output(self, same: list[str]) -> str:
        old, new, origin = self.pair.old, self.pair.new, self.pair.origin(self.layer)
        if self.layer in new.holders and len(new.layers) > 1:
            return "every layer in it agrees, its own output does not: its forward changed"
        line = new.layers[self.layer]
        before = line if origin is None else old.layers[origin]
        hint = next((hint for word, hint in _HINTS if word in line.type.lower()), _NO_HINT)
        cause = hint if before.type == line.type else retyped(before.type, line.type)
        known = [*same, *["same weights"] * line.owns_parameters, "other output"]
        return f"{', '.join(known)}: {cause}"

    def _unmatched(self) -> list[str]:
        """Return what was added or removed right before the layer, and may change numbers."""
        found: list[str] = []
        old, new = self.pair.old, self.pair.new
        for pair in self.pair.alignment.pairs:
            if pair.candidate == self.layer:
                break
            if pair.aligned and pair.candidate not in new.holders:
                found = []
            elif pair.candidate is None and old.computes(pair.name):
                found.append(f"{old.label(pair.name)} was removed")
            elif pair.reference is None and new.computes(pair.name):
                found.append(f"{new.label(pair.name)} was added")
        return found
