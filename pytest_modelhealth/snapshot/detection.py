"""Detection of drift: each tensor against the noise of its snapshot, and what began it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.links import Link
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.trace import Key
from pytest_modelhealth.comparison.weights import Changed
from pytest_modelhealth.snapshot.changes import LayerChange, SnapshotPair, stage
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport
from pytest_modelhealth.snapshot.snapshot import Snapshot, is_judged_whole, shape_text
from pytest_modelhealth.snapshot.tolerances import Allowance, Tolerances, judges_zeros
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import LOSS as LOSS_NAME
from pytest_modelhealth.tolerance import TensorName

EXACT = {
    "dtype": "dtype",
    "shape": "shape",
    "count": "count",
    "nan_count": "nan",
    "inf_count": "inf",
}
REAL = ("rms", "std", "mean", "min", "max")
"""In this order: of several that moved alike, the first is shown."""

_COLUMNS = {**EXACT, **{name: name for name in REAL}, "zero_fraction": "zeros"}
"""What a statistic is called."""


def detect_drift(before: Snapshot, now: Snapshot) -> DriftReport:
    """Return what separates two snapshots; the noise or scale of `before` sets the tolerances."""
    pair, tolerances = SnapshotPair(before, now), Tolerances(before, now.epsilon)
    found = {name: _tensor_drift(pair, tolerances, *name) for name in pair.tensors()}
    loss = _loss_drift(tolerances, before.observation.loss, now.observation.loss)
    kept = {new: old for (old, new), drift in found.items() if drift is None}
    kept |= {} if loss else {LOSS_NAME: LOSS_NAME}
    drifts = [drift for drift in (*found.values(), loss) if drift is not None]
    if not drifts and pair.of_one_form:
        return DriftReport(pair, (), (), kept)
    drifts.sort(key=lambda drift: stage(drift.role, drift.layer, now.place))
    # An input that the layer makes the same of is another form of it.
    others = {drift.layer for drift in drifts if drift.role != "inputs" and not drift.formal}
    forms = [
        one for one in drifts
        if pair.shows_output
        and (one.formal or (one.role == "inputs" and one.layer not in {"", *others}))
    ]  # fmt: skip
    drifts = [drift for drift in drifts if drift not in forms]
    changes = [*pair.changes()]
    for one in forms:
        seen = f"{one.statistic} {one.before}, now {one.now}"
        rest = f": its {one.role} are another thing ({seen}), not compared"
        changes.append(LayerChange("changed", one.label, rest, one.layer))
    story, told = _story(pair, found, drifts) if drifts else ("", frozenset[str]())
    remarks = tuple(_remarks(pair, drifts, tolerances))
    return DriftReport(pair, tuple(drifts), tuple(changes), kept, story, told, remarks)


def _story(
    pair: SnapshotPair,
    found: Mapping[tuple[TensorName, TensorName], Drift | None],
    drifts: Sequence[Drift],
) -> tuple[str, frozenset[str]]:
    """Return what began the drifts, and the layers of which that says all.

    The latter is where it is a change of calls or of a tied weight.
    """
    began, none = drifts[0], frozenset[str]()
    if began.role == LOSS:
        return "every layer agrees and the loss does not: its function or the target changed", none
    if began.role == "inputs" and not began.layer:
        return f"{pair.new.label('')}: the batch is another one", none
    results, values = [], {name: dict[str, str]() for name in pair.old.layers}
    first = None
    for old, new in sorted(found, key=lambda one: stage(one[1][1], one[1][0], pair.new.place)):
        drift, result = found[old, new], TensorResult(Link(Key(*old), (Key(*new),)), 1.0)
        results.append(result)
        if drift is None:
            continue
        result.error, result.floor = (drift.excess, drift.excess), (1.0, 1.0)
        if drift.role == "parameters":
            phrase = f"{drift.statistic} of {new[2]} is {drift.now}, was {drift.before}"
            values[old[0]][old[2]] = phrase
        if first is None and (drift.role, drift.label) == (began.role, began.label):
            first = result
    for tie in pair.causes.ties:
        values[tie.pair.name].setdefault(tie.parameter, tie.phrase)
    assert first is not None
    changed = {name: Changed(of_layer, {}, True) for name, of_layer in values.items()}
    divergence = Search(pair.runs, changed, results, of_snapshots=True).begun_by(first)
    if not divergence.causes:
        why = filter(None, (divergence.label, divergence.story, divergence.cause))
        return ": ".join(why), none
    to = pair.alignment.to_candidate
    told = frozenset(to[name] for cause in divergence.causes for name in cause.inside)
    return "; ".join(map(str, divergence.causes)), told


def _tensor_drift(
    pair: SnapshotPair, tolerances: Tolerances, old: TensorName, new: TensorName
) -> Drift | None:
    found: list[Drift] = []
    before, now = pair.old.tensors[old[0]][old], pair.new.tensors[new[0]][new]
    for statistic in _judged(pair, old, new, before, now):
        a, b = getattr(before, statistic), getattr(now, statistic)
        if a == b or (a != a and b != b):
            continue
        distance, allowance = math.inf, Allowance(0.0)
        if statistic not in EXACT:
            distance, allowance = abs(b - a), tolerances.of(old, before, statistic)
        if not distance <= allowance.distance:  # a NaN on one side only is never within
            texts = _spelled(a, b)
            if statistic == "zero_fraction":
                texts = f"{100 * a:.2f}%", f"{100 * b:.2f}%"
            label, column = pair.new.label(new[0], new[2]), _COLUMNS[statistic]
            found.append(Drift(new[1], new[0], label, column, *texts, distance, allowance))
    largest = max((drift.excess for drift in found), default=0.0)
    # Most often all of them moved alike, and then the first says most.
    first = next((drift for drift in found if drift.excess >= largest / 2), None)
    if first is None or not _is_formal(old, new, {drift.statistic for drift in found}):
        return first
    return replace(first, formal=True)


def _is_formal(old: TensorName, new: TensorName, statistics: set[str]) -> bool:
    """Whether a tensor within the model has another shape, or is recorded in another number.

    In another shape it has the same numbers. In another number, as of a layer that is called twice
    or returns a tensor more, no statistic of it can be compared. Gradients of the model's own
    outputs come in any order, and the last has the shape.
    """
    role, inner = new[1], bool(old[0] and new[0])
    if not statistics & {"shape", "count"} or not (inner or role == "gradients"):
        return False
    free = {"shape"}
    if inner and "count" in statistics and role in ("activations", "gradients"):
        free |= {"count", "zeros", *REAL}
    return statistics <= free


def _judged(
    pair: SnapshotPair,
    old: TensorName,
    new: TensorName,
    before: TensorStatistics,
    now: TensorStatistics,
) -> tuple[str, ...]:
    """Return the statistics to compare.

    The form of what an inner layer takes may change, as in another order of dimensions. A retyped
    layer may store its weights transposed.
    """
    if not is_judged_whole(new):
        return REAL if before.count == now.count else ()
    exact: tuple[str, ...] = tuple(EXACT)
    is_turned = before.shape != now.shape and before.shape[::-1] == now.shape
    if is_turned and "parameter" in new[1]:
        types = pair.old.layers[old[0]].type_name, pair.new.layers[new[0]].type_name
        exact = tuple(one for one in exact if one != "shape" or types[0] == types[1])
    return (*exact, *REAL, *(("zero_fraction",) if judges_zeros(new) else ()))


def _loss_drift(tolerances: Tolerances, a: float | None, b: float | None) -> Drift | None:
    distance, allowance = math.inf, Allowance(0.0)
    if a is not None and b is not None:
        distance, allowance = abs(b - a), tolerances.of_loss(a)
    if a == b or (a != a and b != b) or distance <= allowance.distance:
        return None
    texts = _spelled(*("none" if loss is None else loss for loss in (a, b)))
    return Drift(LOSS, "", LOSS, "value", *texts, distance, allowance)


def _spelled(a: Any, b: Any) -> tuple[str, str]:
    """Return two values with as many digits as show that they differ, and at least five."""
    for digits in (5, 7, 9, 17):
        one, other = (
            shape_text(value)
            if isinstance(value, tuple)
            else format(value + 0.0, f".{digits}g")
            if isinstance(value, float)
            else str(value)
            for value in (a, b)
        )
        if one != other:
            break
    return one, other


def _remarks(pair: SnapshotPair, drifts: Sequence[Drift], tolerances: Tolerances) -> Iterator[str]:
    before, now = pair.old, pair.new
    parameters = sum(len(record.parameters) for record in now.layers.values())
    if any(drift.role == "inputs" and not drift.layer for drift in drifts):
        yield "The batch itself changed; the rest may only follow from that."
    elif sum(drift.role == "parameters" for drift in drifts) > parameters / 2:
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
