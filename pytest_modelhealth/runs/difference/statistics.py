"""Which statistics of a model moved by more than rounding and chance explain, the cause first.

Where no seed was set, every number moves from run to run. A tensor that was drawn anew has other
values of one distribution: its mean, deviation and zeros move no further than samples of its size
do. What is computed from it is not to be compared; what moved further was changed by somebody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_modelhealth.runs.difference.result import Change, Place
from pytest_modelhealth.snapshot.changes import MatchedTensor, SnapshotPair
from pytest_modelhealth.snapshot.detection import detect_drift
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport
from pytest_modelhealth.snapshot.snapshot import Snapshot, TensorLine, shape_text

_STAGES = {
    "activations": ("buffers", "inputs", "activations"),
    LOSS: (LOSS,),
    "gradients": ("gradients", "parameter_gradients"),
}
"""What is computed, from causes to effects, and the roles that belong to each."""

_OF_ROLE = {"inputs": "input "}
"""What stands before a statistic where neither the stage nor the label tells whose it is."""

_FORM = ("dtype", "shape", "count")
"""What is told of the layers, and no statistic."""


@dataclass(frozen=True)
class Moved:
    """What is to be said of the statistics.

    Args:
        changes: of the batch and the weights, and of what was computed.
        cause: what began it, a sentence; ``""`` where nothing computed is compared.
        remarks: what was not compared and why.
    """

    changes: tuple[Change, ...] = ()
    cause: str = ""
    remarks: tuple[str, ...] = ()


def moved(pair: SnapshotPair, samples: tuple[int, int]) -> Moved:
    """Return which statistics moved.

    Args:
        pair: both sides.
        samples: how many samples the batches have.
    """
    found = detect_drift(pair.old, pair.new)
    if not found.drifts:
        return Moved()
    given = _Given(pair, found, samples)
    if given.batch is None and not all(map(_has_given, (pair.old, pair.new))):
        return Moved(remarks=(_UNSEEN,))
    drifts = [drift for drift in found.drifts if drift.statistic not in _FORM]
    computed = [drift for drift in drifts if given.is_before_all_chance(drift)]
    if given.is_drawn:
        cause = ""
    else:
        computed = [drift for drift in drifts if drift.role != "parameters"]
        cause = found.story
    if given.batch is not None:
        computed = []
    computed, masks = _before_masks(computed, pair)
    return Moved(
        (*given.changes(), *_stages(computed)),
        cause if computed or given.altered else "",
        (*given.remarks(), *masks),
    )


_UNSEEN = "its batch or its weights were not watched: what is computed is not compared"


def _has_given(side: Snapshot) -> bool:
    """Whether it can be told that the batch and the weights are the same."""
    seen = {(role, bool(name)) for name, line in side.layers.items() for role, _ in line.tensors}
    return ("inputs", False) in seen and bool(seen & {("parameters", False), ("parameters", True)})


class _Given:
    """What is given to a model and differs: its batch and its weights.

    Attributes:
        batch: the batch, where it differs.
        drawn: weights that may be another draw, or are of another shape.
        altered: weights that differ by more than that.
    """

    def __init__(self, pair: SnapshotPair, found: DriftReport, samples: tuple[int, int]) -> None:
        self._pair, self._samples = pair, samples
        differing = [
            tensor
            for tensor in pair.tensors()
            if (tensor.layer, (tensor.role, tensor.own_name)) not in found.kept
        ]
        batches = [one for one in differing if one.role == "inputs" and not one.layer]
        weights = [one for one in differing if one.role == "parameters"]
        self.batch = batches[0] if batches else None
        lines = pair.new.layers.values()
        every = sum(role == "parameters" for line in lines for role, _ in line.tensors)
        self._are_most = len(weights) > max(every / 2, 1)
        least = TRAINED if self._are_most else 0.0
        self.drawn = [one for one in weights if _is_drawn(one, least)]
        self.altered = [one for one in weights if one not in self.drawn]

    @property
    def is_drawn(self) -> bool:
        """Whether chance moves what is computed, or nearly every weight is another."""
        return bool(self.batch or self.drawn or self._are_most)

    def is_before_all_chance(self, drift: Drift) -> bool:
        """Whether a drift is of what is computed before anything that was given differs."""
        places = [self._pair.new.place[one.layer] for one in (*self.drawn, *self.altered)]
        forward = drift.role in _STAGES["activations"]
        return forward and self._pair.new.place[drift.layer] < min(places, default=0)

    def changes(self) -> Iterator[Change]:
        """Yield what chance does not explain."""
        if self.batch is not None and not self._is_batch_drawn(self.batch):
            yield Change("batch", "the batch", (_place(self.batch, "batch"),))
        if self.altered:
            places = [
                _place(one, self._pair.new.label(one.layer, one.own_name)) for one in self.altered
            ]
            yield Change("weights", "weights", tuple(places))

    def remarks(self) -> Iterator[str]:
        """Yield what is not compared and why."""
        if self.batch is not None:
            yield "the batches differ: what is computed from them is not compared"
        elif self.drawn:
            reshaped = [one for one in self.drawn if _is_of_other_form(one)]
            if reshaped:
                how = f"{self._named(reshaped)}: another shape"
            else:
                how = f"{self._named(self.drawn)}: other values, as by another seed"
            yield f"{how}; what is computed from there on is not compared"
        elif self.is_drawn:
            yield "most weights differ: what is computed from them is not compared"

    def _named(self, tensors: Sequence[MatchedTensor]) -> str:
        first = self._pair.new.label(tensors[0].layer, tensors[0].own_name)
        return f"{first} and {len(tensors) - 1:,} more" if len(tensors) > 1 else first

    def _is_batch_drawn(self, batch: MatchedTensor) -> bool:
        before, now = batch.before, batch.now
        if before.dtype != now.dtype or before.shape[1:] != now.shape[1:]:
            return False
        sizes = [
            samples or (line.shape[0] if line.shape else 1)
            for samples, line in zip(self._samples, (before, now), strict=True)
        ]
        return is_another_draw(before, now, (sizes[0], sizes[1]))


def _is_drawn(weight: MatchedTensor, least: float) -> bool:
    before, now = weight.before, weight.now
    sizes = before.count, now.count
    return _is_of_other_form(weight) or is_another_draw(before, now, sizes, least)


def _is_of_other_form(weight: MatchedTensor) -> bool:
    before, now = weight.before.shape, weight.now.shape
    return before != now and before[::-1] != now


def _place(tensor: MatchedTensor, label: str) -> Place:
    """Return what of a tensor differs: its form, what is not finite, or what moved furthest."""
    before, now = tensor.before, tensor.now
    for statistic in ("shape", "dtype", "nan", "inf"):
        if getattr(before, statistic) != getattr(now, statistic):
            return Place(label, *(_spelled(statistic, line) for line in (before, now)))
    furthest = max(("std", "mean", "min", "max"), key=lambda name: _distance(name, before, now))
    return Place(label, *(f"{furthest} {getattr(line, furthest):.5g}" for line in (before, now)))


def _spelled(statistic: str, line: TensorLine) -> str:
    value = getattr(line, statistic)
    return f"{statistic} {shape_text(value) if statistic == 'shape' else value}"


def _distance(statistic: str, before: TensorLine, now: TensorLine) -> float:
    distance: float = abs(getattr(now, statistic) - getattr(before, statistic))
    # extremes move further than the rest by nature
    return distance if statistic in ("std", "mean") else distance / 10


def _before_masks(drifts: list[Drift], pair: SnapshotPair) -> tuple[list[Drift], list[str]]:
    """Return the drifts, none where the first of them is another mask of a dropout."""
    if not drifts or drifts[0].role != "activations":
        return drifts, []
    first, origin = drifts[0], pair.origin(drifts[0].layer)
    if origin is None or "dropout" not in pair.new.layers[first.layer].type.lower():
        return drifts, []
    before = pair.old.layers[origin].tensors["activations", ""]
    now = pair.new.layers[first.layer].tensors["activations", ""]
    if not is_another_draw(before, now, (before.count, now.count)):
        return drifts, []
    return [], [f"{first.label} drew another mask: what is computed from it is not compared"]


def _stages(drifts: Sequence[Drift]) -> Iterator[Change]:
    for stage, roles in _STAGES.items():
        within = [drift for drift in drifts if drift.role in roles]
        if within:
            yield Change("statistic", stage, tuple(_places(within)))


def _places(drifts: Iterable[Drift]) -> Iterator[Place]:
    """Yield the first drift of each layer."""
    seen = set()
    for drift in drifts:
        if drift.label not in seen:
            seen.add(drift.label)
            # the input of a layer that drifts first tells of what happens before it
            what = f"{_OF_ROLE.get(drift.role, '')}{drift.statistic}"
            before, now = f"{what} {drift.before}", f"{what} {drift.now}"
            yield Place(drift.label, before, now, drift.moved.replace("fixed ", ""))


# Chance

DEVIATIONS = 6.0
"""So many standard errors apart two draws may be: by chance once in a billion, for normal ones."""

KURTOSIS = 5.0
"""Of what is drawn, at most: of a normal distribution it is 3, of a uniform one 1.8."""


TRAINED = 0.25
"""Weights that were trained apart are no samples of one distribution: by this part of their
deviation they may differ in any case."""


def is_another_draw(
    before: TensorLine, now: TensorLine, sizes: tuple[int, int], least: float = 0.0
) -> bool:
    """Whether two tensors may be two draws from one distribution.

    Args:
        before: one.
        now: the other.
        sizes: how many independent values either has: of a weight its elements, of a batch its
            samples.
        least: by this part of their deviation they may differ in any case.
    """
    if min(sizes) < 1 or (before.nan, before.inf) != (now.nan, now.inf):
        return False
    if not (before.std > 0 and now.std > 0):  # what is constant is not drawn
        return False
    spread = math.sqrt(before.std) * math.sqrt(now.std)
    step = max(DEVIATIONS * math.sqrt(1 / sizes[0] + 1 / sizes[1]), least)
    part = (before.zeros + now.zeros) / 2
    return (
        abs(now.mean - before.mean) <= step * spread
        and abs(math.log(now.std / before.std)) <= step * math.sqrt(KURTOSIS - 1) / 2
        and abs(now.zeros - before.zeros) <= step * math.sqrt(max(part * (1 - part), 0.0))
    )
