"""Drift: where a report left its snapshot by more than rounding explains, the cause first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_modelhealth.snapshot.changes import LayerChange, MatchedTensor, Matching
from pytest_modelhealth.snapshot.file_format import percentage
from pytest_modelhealth.snapshot.snapshot import (
    FRACTIONS,
    Snapshot,
    TensorLine,
    is_judged_whole,
    shape_text,
)
from pytest_modelhealth.snapshot.story import Cause, find_cause, tell
from pytest_modelhealth.snapshot.tolerances import Allowance, Tolerances

EXACT = ("dtype", "shape", "count", "nan", "inf")
REAL = ("rms", "std", "mean", "min", "max")
"""In this order: of several that moved alike, the first is shown."""

LOSS = "loss"

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


@dataclass(frozen=True)
class Drift:
    """The statistic of a tensor that left its tolerance furthest.

    Args:
        role: which tensor of the layer; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        label: the tensor's name for people.
        statistic: column of the snapshot file.
        before: its value in the snapshot, spelled as there, without its noise.
        now: its value in the report.
        distance: how far it moved; infinite where the two have no distance.
        allowance: how far it may.
        formal: whether only the form of the tensor changed, or what a layer takes and makes the
            same of, so that it is harmless where every number agrees that can be compared.
    """

    role: str
    layer: str
    label: str
    statistic: str
    before: str
    now: str
    distance: float
    allowance: Allowance
    formal: bool = False

    @property
    def excess(self) -> float:
        """Distance by tolerance; infinite where the two should be equal."""
        if math.isfinite(self.distance) and self.allowance.distance:
            return self.distance / self.allowance.distance
        return math.inf

    @property
    def moved(self) -> str:
        """How far it moved, for people."""
        if math.isinf(self.excess):
            return "has to be equal"
        noise = self.allowance.noise
        if noise is not None:
            return f"{_count(self.distance / noise)} times its noise"
        return f"{_count(self.excess)} times its fixed tolerance"


def _count(ratio: float) -> str:
    if ratio >= 1e7:
        return f"{ratio:.1e}"
    return f"{float(f'{ratio:.2g}'):,.0f}" if ratio >= 10 else f"{ratio:.2g}"


@dataclass(frozen=True)
class DriftReport:
    """What is different between a snapshot and a report.

    Args:
        drifts: one a tensor, from cause to effect.
        changes: layers that came, went or became something else.
        tensors: how many tensors both have.
        story: what began the drifts, a sentence; ``""`` where nothing drifted.
        told: names of the layers of which the story says all, where it is a change of calls or of
            a tied weight.
        remarks: what may explain the differences, a sentence each.
        strict_names: whether changes that change no number are failures too.
        has_common_layers: whether any layer is on both sides.
        kept: names of the tensors that did not drift, by role, as the report calls them, each
            with its line in the snapshot.
    """

    drifts: tuple[Drift, ...]
    changes: tuple[LayerChange, ...]
    tensors: int
    story: str
    told: frozenset[str]
    remarks: tuple[str, ...]
    strict_names: bool
    has_common_layers: bool
    kept: Mapping[tuple[str, str], TensorLine]

    @property
    def failing_changes(self) -> tuple[LayerChange, ...]:
        """The changes of layers that fail by themselves."""
        strict = self.strict_names
        return tuple(change for change in self.changes if strict or not change.harmless)

    @property
    def drifted(self) -> bool:
        """Whether anything differs that may not."""
        return bool(self.drifts or self.failing_changes) or not self.has_common_layers

    def __str__(self) -> str:
        from pytest_modelhealth.snapshot.explanation import explain

        return "\n".join(explain(self)) or f"no drift in {self.tensors} tensors"


def compare(before: Snapshot, now: Snapshot, *, strict_names: bool = False) -> DriftReport:
    """Compare two snapshots.

    Args:
        before: the baseline; its noise or scale sets the tolerances.
        now: what is compared with it.
        strict_names: whether renamed, moved, retyped and inserted layers that change no number fail
            too.
    """
    matching = Matching(before, now)
    tolerances = Tolerances(before, now.epsilon)
    pairs = list(matching.tensors())
    found = [(pair, _tensor_drift(matching, tolerances, pair)) for pair in pairs]
    drifts = [drift for _, drift in found if drift is not None]
    drifts += _loss_drift(tolerances, before, now.loss)
    place = matching.new.place
    drifts.sort(key=lambda drift: _stage(drift, place))
    drifts = _with_inputs_judged(drifts)
    changes = tuple(matching.changes())
    if _is_form_only(drifts, changes, matching):
        changes = (*(replace(c, harmless=True) for c in changes), *map(_as_change, drifts))
        drifts = []
    cause, story = Cause(), ""
    if drifts:
        first = drifts[0]
        cause = find_cause(first.role, first.layer, matching)
        drifted = {(drift.role, drift.layer) for drift in drifts}
        story = cause.text or tell(first.role, first.layer, drifted, matching)
    return DriftReport(
        drifts=tuple(drifts),
        changes=changes,
        tensors=len(pairs),
        story=story,
        told=cause.layers,
        remarks=tuple(_remarks(before, now, drifts, tolerances)),
        strict_names=strict_names,
        has_common_layers=matching.has_common_layers,
        kept={(pair.role, _name(pair)): pair.before for pair, drift in found if drift is None},
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
    drifts: Sequence[Drift], changes: Sequence[LayerChange], matching: Matching
) -> bool:
    """Whether what is recorded of some layers is another thing, and every number agrees.

    Among these numbers has to be the model's own output.
    """
    output = ("activations", "")
    return (
        all(output in side.tensors.get("", {}) for side in (matching.old, matching.new))
        and all(drift.formal for drift in drifts)
        and all(change.harmless or change.formal for change in changes)
    )


def _as_change(drift: Drift) -> LayerChange:
    seen = f"{drift.statistic} {drift.before}, now {drift.now}"
    rest = f": its {drift.role} are another thing ({seen}), all others agree"
    return LayerChange("changed", drift.label, rest, harmless=True, layer=drift.layer)


def _name(pair: MatchedTensor) -> str:
    return ".".join(filter(None, (pair.layer, pair.own_name)))


def _stage(drift: Drift, place: Mapping[str, int]) -> tuple[int, int, int]:
    position = place.get(drift.layer, -1)
    if drift.role == "inputs":
        stage = 2 if drift.layer else 0
    else:
        stage = next(i for i, roles in enumerate(_STAGES) if drift.role in roles)
    backward = stage == len(_STAGES) - 1
    return stage, -position if backward else position, _STAGES[stage].index(drift.role)


def _tensor_drift(matching: Matching, tolerances: Tolerances, pair: MatchedTensor) -> Drift | None:
    found: list[Drift] = []
    before, now = pair.before, pair.now
    for statistic in _judged(matching, pair):
        a, b = getattr(before, statistic), getattr(now, statistic)
        if a == b or (a != a and b != b) or a is None or b is None:
            continue  # whether a tensor has units may hang on who made it
        if statistic in EXACT:
            distance, allowance = math.inf, Allowance(0.0)
        else:
            distance = abs(b - a)
            allowance = tolerances.of(pair.role, pair.origin, before, statistic, a)
        if not distance <= allowance.distance:  # a NaN on one side only is never within
            label = matching.new.label(pair.layer, pair.own_name)
            texts = _spelled(statistic, a, b)
            found.append(
                Drift(pair.role, pair.layer, label, statistic, *texts, distance, allowance)
            )
    largest = max((drift.excess for drift in found), default=0.0)
    # Most often all of them moved alike, and then the first says most.
    first = next((drift for drift in found if drift.excess >= largest / 2), None)
    if first is None or not _is_formal(pair, {drift.statistic for drift in found}):
        return first
    return replace(first, formal=True)


def _is_formal(pair: MatchedTensor, statistics: set[str]) -> bool:
    """Whether a tensor within the model has another shape, or is recorded in another number.

    In another shape it has the same numbers. In another number, as of a layer that is called twice
    or returns a tensor more, no statistic of it can be compared. Gradients of the model's own
    outputs come in any order, and the last has the shape.
    """
    inner = bool(pair.layer and pair.origin)
    if not statistics & {"shape", "count"} or not (inner or pair.role == "gradients"):
        return False
    free = {"shape", "dead"}
    if inner and "count" in statistics and pair.role in ("activations", "gradients"):
        free |= {"count", *REAL, *FRACTIONS}
    return statistics <= free


def _judged(matching: Matching, pair: MatchedTensor) -> tuple[str, ...]:
    """Return the statistics to compare.

    Inputs of inner layers serve the story: their form may change, as in another order of
    dimensions. A retyped layer may store its weights transposed.
    """
    if not is_judged_whole(pair.role, pair.layer):
        return REAL if pair.before.count == pair.now.count else ()
    statistics = (*EXACT, *REAL, *FRACTIONS)
    transposed = pair.before.shape[::-1] == pair.now.shape
    if transposed and matching.is_retyped(pair) and "parameter" in pair.role:
        return tuple(statistic for statistic in statistics if statistic != "shape")
    return statistics


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


def _spelled(statistic: str, a: object, b: object) -> tuple[str, str]:
    """Return two values with as many digits as show that they differ, and at least five."""
    if statistic in FRACTIONS:
        return _fraction(a), _fraction(b)
    for digits in (5, 7, 9, 17):
        texts = _spell(a, digits), _spell(b, digits)
        if texts[0] != texts[1]:
            break
    return texts


def _fraction(value: object) -> str:
    return percentage(value if isinstance(value, float) else None)


def _spell(value: object, digits: int) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return shape_text(value)
    return format(value + 0.0, f".{digits}g") if isinstance(value, float) else str(value)


def _remarks(
    before: Snapshot, now: Snapshot, drifts: Sequence[Drift], tolerances: Tolerances
) -> Iterator[str]:
    roles = [drift.role for drift in drifts]
    if any(drift.role == "inputs" and not drift.layer for drift in drifts):
        yield "The batch itself changed; the rest may only follow from that."
    elif roles.count("parameters") > len(now.tensors.get("parameters", ())) / 2:
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
