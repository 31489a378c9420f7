"""What changed in a model between two inspections: layers, statistics, shapes, dtypes and costs.

The file of a run holds no measured noise. The tolerances are those of snapshots without it: fixed
parts of each statistic's scale, which rounding, other threads and other kernels stay within.

Where no seed was set, every number moves from run to run. A tensor that was drawn anew has other
values of one distribution: its mean, deviation and zeros move no further than samples of its size
do. What is computed from it is not to be compared; what moved further was changed by somebody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pytest_modelhealth.layers import ACTIVATION_MODULES
from pytest_modelhealth.rendering.notation import shape
from pytest_modelhealth.report import ROLES, LayerRecord, Observation, Status
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.snapshot.changes import grouped
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport
from pytest_modelhealth.snapshot.file_format import statistics
from pytest_modelhealth.snapshot.snapshot import REAL, Snapshot, of_roles
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import TF32, TensorName, coarsest_epsilon

Data = Mapping[str, Any]


class Grade(StrEnum):
    """Whether a change is for the worse; most are neither. The gravest is first."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"
    SAME = "same"


@dataclass(frozen=True)
class Place:
    """Where something changed, from what to what, for people; ``""`` stands for none."""

    label: str  # of the layer, tensor or model in the head, or in the base where it is gone
    before: str = ""
    now: str = ""
    note: str = ""  # by how much


@dataclass(frozen=True)
class Change:
    """One thing that changed, in one or several places."""

    kind: str  # a word of ours: "verdict", "finding", "statistic", "cost"
    what: str  # what changed, in words of ours
    places: tuple[Place, ...]  # what came first is first
    grade: Grade = Grade.CHANGED


Names = tuple[TensorName, TensorName]
"""A tensor in the base and in the head."""

_FORWARD = ("buffers", "inputs", "activations")
_STAGES = {
    "activations": _FORWARD,
    LOSS: (LOSS,),
    "gradients": ("gradients", "parameter_gradients"),
}
"""What is computed, from causes to effects, and the roles that belong to each."""


def moved(found: DriftReport, samples: tuple[int, int]) -> tuple[list[Change], str, list[str]]:
    """Return which statistics moved, what began it, and what was not compared and why."""
    if not found.drifts:
        return [], "", []
    pair = found.pair
    # another dtype or shape of what is computed is told of the layers
    others = [names for names in pair.tensors if names[1] not in found.kept]
    differing = [one for one in others if len({seen.dtype for seen in _sides(found, one)}) == 1]
    batch = next((one for one in differing if one[1][:2] == ("", "inputs")), None)
    if batch is None and not all(map(_is_watched, (pair.old, pair.new))):
        unseen = "its batch or its weights were not watched: what is computed is not compared"
        return [], "", [unseen]
    weights = [one for one in differing if one[1][1] == "parameters"]
    are_most = len(weights) > max(sum(len(r.parameters) for r in pair.new.layers.values()) / 2, 1)
    drawn = [one for one in weights if _is_drawn(found, one, least=TRAINED * are_most)]
    altered = [one for one in weights if one not in drawn]
    changes: list[Change] = []
    remarks: list[str] = []
    drifts = [
        one for one in found.drifts if one.statistic not in ("dtype", "shape", "count")
        if one.role != "parameters"
    ]  # fmt: skip
    if batch is not None:
        drifts = []
        remarks.append("the batches differ: what is computed from them is not compared")
        if not _is_drawn(found, batch, samples):
            batches = (one for one in found.drifts if (one.layer, one.role) == ("", "inputs"))
            place = next((_place(one, "batch") for one in batches), Place("batch"))
            changes.append(Change("batch", "the batch", (place,)))
    elif drawn or are_most:
        order = pair.new.place
        first = min(order[now[0]] for _, now in weights)
        drifts = [d for d in drifts if d.role in _FORWARD and order[d.layer] < first]
        (_, name), *others = drawn or weights
        named = pair.new.label(name[0], name[2])
        more = f" and {len(others):,} more" if others else ""
        remarks.append(
            f"{named}{more}: other values, as by another seed; what is computed from there on is "
            "not compared"
        )
    if altered:
        told = {one.label: one for one in found.drifts if one.role == "parameters"}
        labels = [pair.new.label(now[0], now[2]) for _, now in altered]
        places = [_place(told[one], one) if one in told else Place(one) for one in labels]
        changes.append(Change("weights", "weights", tuple(places)))
    if drifts and _is_another_mask(found, drifts[0]):
        label = drifts[0].label
        remarks.append(f"{label} drew another mask: what is computed from it is not compared")
        drifts = []
    is_told = batch is None and not (drawn or are_most) and (drifts or altered)
    return [*changes, *_stages(drifts)], found.story if is_told else "", remarks


def _stages(drifts: Sequence[Drift]) -> Iterator[Change]:
    """Yield what of each stage drifted, by the first drift of each layer."""
    for stage, roles in _STAGES.items():
        first_of_each: dict[str, Place] = {}
        for drift in drifts:
            if drift.role in roles and drift.label not in first_of_each:
                first_of_each[drift.label] = _place(drift, drift.label)
        if first_of_each:
            yield Change("statistic", stage, tuple(first_of_each.values()))


def _is_watched(side: Snapshot) -> bool:
    """Whether it can be told that the batch and the weights are the same."""
    model = side.layers.get("")
    has_weights = any(record.parameters for record in side.layers.values())
    return model is not None and model.inputs is not None and has_weights


def _sides(found: DriftReport, names: Names) -> tuple[TensorStatistics, TensorStatistics]:
    (old, new), pair = names, found.pair
    return pair.old.tensors[old[0]][old], pair.new.tensors[new[0]][new]


def _place(drift: Drift, label: str) -> Place:
    # the input of a layer that drifts first tells of what happens before it
    what = f"{'input ' if drift.role == 'inputs' and drift.layer else ''}{drift.statistic}"
    sides = f"{what} {drift.before}", f"{what} {drift.now}"
    return Place(label, *sides, drift.moved.replace("fixed ", ""))


DEVIATIONS = 6.0
"""So many standard errors apart two draws may be: by chance once in a billion, for normal ones."""

KURTOSIS = 5.0
"""Of what is drawn, at most: of a normal distribution it is 3, of a uniform one 1.8."""

TRAINED = 0.25
"""Weights that were trained apart are no samples of one distribution: by this part of their
deviation they may differ in any case."""


def _is_another_mask(found: DriftReport, first: Drift) -> bool:
    """Whether the first drift is another mask of a dropout."""
    type_name = found.pair.new.layers[first.layer].type_name if first.layer else ""
    if first.role != "activations" or "dropout" not in type_name.lower():
        return False
    key = first.layer, "activations", ""
    return _is_drawn(found, next(one for one in found.pair.tensors if one[1] == key))


def _is_drawn(
    found: DriftReport, names: Names, samples: tuple[int, int] | None = None, least: float = 0.0
) -> bool:
    """Whether the two sides of a tensor may be two draws from one distribution.

    Of a batch each of the `samples` is drawn, of a weight each element. By the part `least` of
    their deviation they may differ in any case.
    """
    before, now = sides = _sides(found, names)
    if before.dtype != now.dtype or before.shape[1:] != now.shape[1:]:
        return samples is None and before.shape not in (now.shape, now.shape[::-1])
    sizes = [one.count for one in sides]
    if samples is not None:
        rows = (one.shape[0] if one.shape else 1 for one in sides)
        sizes = [known or count for known, count in zip(samples, rows, strict=True)]
    elif before.shape != now.shape:
        return True
    if min(sizes) < 1 or (before.nan_count, before.inf_count) != (now.nan_count, now.inf_count):
        return False
    if not (before.std > 0 and now.std > 0):  # what is constant is not drawn
        return False
    spread = math.sqrt(before.std) * math.sqrt(now.std)
    step = max(DEVIATIONS * math.sqrt(1 / sizes[0] + 1 / sizes[1]), least)
    part = (before.zero_fraction + now.zero_fraction) / 2
    return (
        abs(now.mean - before.mean) <= step * spread
        and abs(math.log(now.std / before.std)) <= step * math.sqrt(KURTOSIS - 1) / 2
        and abs(now.zero_fraction - before.zero_fraction)
        <= step * math.sqrt(max(part * (1 - part), 0.0))
    )


# An inspection of the file of a run as a snapshot, so that drift is judged as a snapshot's is

_ACTIVATIONS = {module.__name__: name for module, name in ACTIVATION_MODULES.items()}
_ACTIVATIONS |= {name: name for name in _ACTIVATIONS.values()}
"""The canonical name of an activation by the class of the module, or by the function."""


def snapshot_of(inspection: Data) -> Snapshot:
    """Return what a snapshot of an inspection would keep, as far as the file of a run has it."""
    layers: Sequence[Data] = inspection["layers"]
    records = {layer["name"]: _record(layer, place) for place, layer in _as_returned(layers)}
    observation = Observation(records, inspection["model"], loss=inspection["loss"])
    epsilon = coarsest_epsilon(observation)
    if any(layer["device"].startswith("cuda") for layer in layers):
        epsilon = max(epsilon, TF32)  # of convolutions, unless told not to
    return Snapshot("", "", "", calibrated=False, epsilon=epsilon, observation=observation)


def _as_returned(layers: Sequence[Data]) -> Iterator[tuple[int, Data]]:
    """Yield the layers in the order in which they returned: each after all that it holds.

    The file has the order in which they were entered.
    """
    last: dict[str, int] = {}
    for place, layer in enumerate(layers):
        holding = ancestors(layer["name"]) if layer["calls"] else ()
        last |= dict.fromkeys((layer["name"], *holding), place)
    return enumerate(
        sorted(
            layers,
            key=lambda layer: (last[layer["name"]], -layer["name"].count("."), not layer["name"]),
        )
    )


def _record(layer: Data, place: int) -> LayerRecord:
    tensors: dict[str, dict[str, TensorStatistics]] = {role: {} for role in ROLES}
    for tensor in layer["tensors"]:
        if tensor["role"] in ROLES:
            real = {key: math.nan if tensor[key] is None else tensor[key] for key in REAL}
            seen = statistics(tuple(tensor["shape"]), {**tensor, **real})
            tensors[tensor["role"]][tensor["name"]] = seen
    status = layer["status"]
    return LayerRecord(
        name=layer["name"],
        type_name=layer["type"],
        status=Status(status) if status in set(Status) else Status.OBSERVED,
        activation=_ACTIVATIONS.get(layer["type"]),
        entered=place if layer["calls"] else None,
        calls=layer["calls"],
        tied=layer["tied"],
        **of_roles(tensors),
    )


# Layers and costs

Layers = Sequence[tuple[Data | None, Data | None]]
"""The layers of base and head, those that are the same side by side."""

PARAMETERS = {"parameters": "parameters", "trainable": "trainable parameters"}
COSTS = {
    "parameter_bytes": "bytes of parameters",
    "multiply_adds": "multiply-adds",
    "activation_bytes": "bytes of activations",
    "saved_bytes": "bytes saved for the backward pass",
    "peak_bytes": "peak memory in bytes",
}
TOLERANCE = {"parameters": 0.0, "trainable": 0.0, "peak_bytes": 0.05}
"""Costs may differ by this part; those that are not named, which are counted, by a thousandth."""


def structural_changes(found: DriftReport, before: Data, now: Data) -> Iterator[Change]:
    """Yield what changed from one inspection to another, layers first and costs last."""
    old, new = ({layer["name"]: layer for layer in side["layers"]} for side in (before, now))
    layers = [
        (old.get(one.reference), new.get(one.candidate)) for one in found.pair.alignment.pairs
    ]
    samples = before["samples"], now["samples"]
    ratio = samples[1] / samples[0] if all(samples) else 1.0
    # one kind of change often is that of many layers
    for same in grouped(found.changes, "renamed", "added", "removed"):
        words = same[0].what.replace("_", " ").removesuffix(" of")
        texts = (change.rest.strip(" :()").removeprefix("to ") for change in same)
        places = [Place(one.label, "", text) for one, text in zip(same, texts, strict=True)]
        yield Change("layer", words, tuple(places))
    for key, what, form in (("shape", "output shape", shape), ("dtype", "dtype", str)):
        places = [
            Place(y["label"], form(x[key]), form(y[key]))
            for x, y in layers
            if x and y and x["shape"] is not None and y["shape"] is not None
            if x[key] != y[key] and not (key == "shape" and _grew(x[key], y[key], ratio))
        ]
        if places:
            yield Change(key, what, tuple(places))
    said: list[list[str]] = []
    for key, what in (PARAMETERS | COSTS).items():
        if ratio != 1 and key not in (*PARAMETERS, "parameter_bytes"):
            continue  # they grow with the batch
        places = list(_costs(before, now, layers, key))
        steps = [place.note.partition(", ")[0] for place in places]
        if places and not (key == "trainable" and steps in said):  # mostly as many as parameters
            yield Change("parameters" if key in PARAMETERS else "cost", what, tuple(places))
        said.append(steps)


def _grew(old: Sequence[int], new: Sequence[int], ratio: float) -> bool:
    """Whether two shapes differ in one dimension, by as much as the batches do."""
    differing = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    return len(old) == len(new) and [a * ratio == b for a, b in differing] == [True]


def _costs(before: Data, now: Data, layers: Layers, key: str) -> Iterator[Place]:
    """Yield the model and the layers of which a number differs, those that moved most first."""
    old, new = before["totals"].get(key), now["totals"].get(key)
    if old is None or new is None:
        return
    inner = []
    for x, y in layers:
        layer = y or x or {}
        sides = [0 if one is None else one.get(key) or 0 for one in (x, y)]
        if sides[0] != sides[1] and layer["name"]:
            inner.append((abs(sides[1] - sides[0]), _numbers(layer["label"], *sides)))
    if abs(new - old) <= TOLERANCE.get(key, 1e-3) * max(new, old) and not (
        inner and key in PARAMETERS
    ):
        return
    yield _numbers(now["model"], old, new)
    if key not in PARAMETERS:
        inner.sort(key=lambda one: -one[0])
    yield from (place for _, place in inner)


def _numbers(label: str, before: float, now: float) -> Place:
    """Return two numbers and by how much they differ: ``"+1,024, +50%"``."""
    note = f"{now - before:+,}" if now != before else ""
    if note and before:
        part = (now - before) / before
        note += f", {part:+,.{0 if abs(part) >= 0.1 else 1}%}"
    return Place(label, f"{before:,}", f"{now:,}", note)
