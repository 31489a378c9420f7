"""Detection of drift: each tensor against the noise of its snapshot, and what began it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.causes import CallChange
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.links import Link
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.trace import Key
from pytest_modelhealth.comparison.weights import Changed
from pytest_modelhealth.snapshot.changes import LayerChange, MatchedTensor, SnapshotPair, stage
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport
from pytest_modelhealth.snapshot.snapshot import (
    FRACTIONS,
    Snapshot,
    is_judged_whole,
    shape_text,
)
from pytest_modelhealth.snapshot.tolerances import Allowance, Tolerances

EXACT = ("dtype", "shape", "count", "nan", "inf")
REAL = ("rms", "std", "mean", "min", "max")
"""In this order: of several that moved alike, the first is shown."""


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
    drifts.sort(key=lambda drift: stage(drift.role, drift.layer, now.place))
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
    story, told = _story(pair, found, drifts) if drifts else ("", frozenset[str]())
    kept = {
        (one.layer, (one.role, one.own_name)): one.before for one, drift in found if drift is None
    }
    remarks = tuple(_remarks(before, now, drifts, tolerances))
    common = pair.has_common_layers
    return DriftReport(
        tuple(drifts), changes, len(found), story, told, remarks, strict_names, common, kept
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


def _story(
    pair: SnapshotPair,
    found: Sequence[tuple[MatchedTensor, Drift | None]],
    drifts: Sequence[Drift],
) -> tuple[str, frozenset[str]]:
    """Return what began the drifts, and the layers of which that says all.

    The latter is where it is a change of calls or of a tied weight.
    """
    began = drifts[0]
    if began.role == LOSS:
        none = frozenset[str]()
        return "every layer agrees and the loss does not: its function or the target changed", none
    if began.role == "inputs" and not began.layer:
        return f"{pair.new.label('')}: the batch is another one", frozenset()
    results, values = [], {name: dict[str, str]() for name in pair.old.layers}
    first = None
    for tensor, drift in sorted(
        found, key=lambda one: stage(one[0].role, one[0].layer, pair.new.place)
    ):
        key = Key(tensor.origin, tensor.role, tensor.own_name)
        link = Link(key, (key._replace(layer=tensor.layer),))
        result = TensorResult(link, 1.0)
        if drift is not None:
            result.error, result.floor = (drift.excess, drift.excess), (1.0, 1.0)
            if tensor.role == "parameters":
                phrase = (
                    f"{drift.statistic} of {tensor.own_name} is {drift.now}, was {drift.before}"
                )
                values[tensor.origin][tensor.own_name] = phrase
            if first is None and (drift.role, drift.layer, drift.label) == (
                began.role,
                began.layer,
                began.label,
            ):
                first = result
        results.append(result)
    for tie in pair.causes.ties:
        values[tie.pair.name].setdefault(tie.parameter, tie.phrase)
    assert first is not None
    changed = {name: Changed(of_layer, {}, True) for name, of_layer in values.items()}
    divergence = Search(pair.runs, changed, results, of_snapshots=True).begun_by(first)
    if not divergence.causes:
        why = filter(None, (divergence.label, divergence.story, divergence.cause))
        return ": ".join(why), frozenset()
    to, told = pair.alignment.to_candidate, set[str]()
    for cause in divergence.causes:
        inside = cause.inside if isinstance(cause, CallChange) else (cause.pair.name,)
        told |= {to[name] for name in inside}
    return "; ".join(map(str, divergence.causes)), frozenset(told)


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
