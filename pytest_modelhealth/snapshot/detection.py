"""Detection of drift: each tensor of a report against the noise of its snapshot, cause first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.snapshot.changes import LayerChange, MatchedTensor, SnapshotPair
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport
from pytest_modelhealth.snapshot.root_cause import FirstDrift, RootCause
from pytest_modelhealth.snapshot.snapshot import FRACTIONS, Snapshot, is_judged_whole, shape_text
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
