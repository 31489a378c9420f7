"""What changed in a model between two inspections: layers, statistics, shapes, dtypes and costs.

The file of a run holds no measured noise. The tolerances are those of snapshots without it: fixed
parts of each statistic's scale, which rounding, other threads and other kernels stay within.

Where no seed was set, every number moves from run to run, and what is computed tells nothing.
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
from pytest_modelhealth.tolerance import TF32, coarsest_epsilon

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


_FORWARD = ("buffers", "inputs", "activations")
_STAGES = {  # what is computed, from causes to effects, and the roles that belong to each
    "activations": _FORWARD,
    LOSS: (LOSS,),
    "gradients": ("gradients", "parameter_gradients"),
}


def moved(found: DriftReport) -> tuple[list[Change], str, list[str]]:
    """Return which statistics moved, what began it, and what was not compared and why.

    What is computed tells of a change where batch and weights are the same; of another batch, or of
    weights drawn under another seed, every number is another.
    """
    if not found.drifts:
        return [], "", []
    pair = found.pair
    if not all(map(_is_watched, (pair.old, pair.new))):
        unseen = "its batch or its weights were not watched: what is computed is not compared"
        return [], "", [unseen]
    if any((one.layer, one.role) == ("", "inputs") for one in found.drifts):
        return [], "", ["the batches differ: what is computed from them is not compared"]
    # another dtype or shape of what is computed is told of the layers
    drifts = [one for one in found.drifts if one.statistic not in ("dtype", "shape", "count")]
    weights = [one for one in drifts if one.role == "parameters"]
    drifts = [one for one in drifts if one.role != "parameters"]
    if drifts and not weights and _is_another_mask(found, drifts[0]):
        return [], "", [f"{drifts[0].label} drew another mask: what it gives is not compared"]
    changes = [Change("weights", "weights", tuple(_place(one) for one in weights))]
    if len(weights) > max(sum(len(r.parameters) for r in pair.new.layers.values()) / 2, 1):
        more = f" and {len(weights) - 1:,} more"
        seed = "other values, as by another seed; what is computed with them is not compared"
        return [], "", [f"{weights[0].label}{more}: {seed}"]
    return [*changes[: len(weights)], *_stages(drifts)], found.story, []


MASK = 0.1  # by less the parts differ that two masks of one dropout hide, of a hundred values on


def _stages(drifts: Sequence[Drift]) -> Iterator[Change]:
    """Yield what of each stage drifted, by the first drift of each layer."""
    for stage, roles in _STAGES.items():
        first_of_each: dict[str, Place] = {}
        for drift in drifts:
            if drift.role in roles and drift.label not in first_of_each:
                first_of_each[drift.label] = _place(drift)
        if first_of_each:
            yield Change("statistic", stage, tuple(first_of_each.values()))


def _is_watched(side: Snapshot) -> bool:
    """Whether it can be told that the batch and the weights are the same."""
    model = side.layers.get("")
    has_weights = any(record.parameters for record in side.layers.values())
    return model is not None and model.inputs is not None and has_weights


def _is_another_mask(found: DriftReport, first: Drift) -> bool:
    """Whether the first drift is that of a dropout, which drops as much as it did."""
    seen = [side.layers.get(first.layer) for side in (found.pair.old, found.pair.new)]
    made = [one.activations for one in seen if one is not None and one.activations is not None]
    if len(made) < 2 or seen[1] is None or "dropout" not in seen[1].type_name.lower():
        return False
    return abs(made[0].zero_fraction - made[1].zero_fraction) < MASK


def _place(drift: Drift) -> Place:
    # the input of a layer that drifts first tells of what happens before it
    what = f"{'input ' if drift.role == 'inputs' and drift.layer else ''}{drift.statistic}"
    sides = f"{what} {drift.before}", f"{what} {drift.now}"
    return Place(drift.label, *sides, drift.moved.replace("fixed ", ""))


# An inspection of the file of a run as a snapshot, so that drift is judged as a snapshot's is

# the canonical name of an activation by the class of the module, or by the function
_ACTIVATIONS = {module.__name__: name for module, name in ACTIVATION_MODULES.items()}
_ACTIVATIONS |= {name: name for name in _ACTIVATIONS.values()}


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

    def returned(layer: Data) -> tuple[int, int, bool]:
        return last[layer["name"]], -layer["name"].count("."), not layer["name"]

    return enumerate(sorted(layers, key=returned))


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

COUNTED = {  # the totals that are compared, and by which part they may differ
    "parameters": ("parameters", 0.0),
    "trainable": ("trainable parameters", 0.0),
    "parameter_bytes": ("bytes of parameters", 1e-3),
    "multiply_adds": ("multiply-adds", 1e-3),
    "activation_bytes": ("bytes of activations", 1e-3),
    "saved_bytes": ("bytes saved for the backward pass", 1e-3),
    "peak_bytes": ("peak memory in bytes", 0.05),
}


def structural_changes(found: DriftReport, before: Data, now: Data) -> Iterator[Change]:
    """Yield what changed from one inspection to another, layers first and costs last."""
    old, new = ({layer["name"]: layer for layer in side["layers"]} for side in (before, now))
    layers = [(old[x.name], new[y.name]) for _, x, y in found.pair.alignment.aligned]
    back = {y["name"]: x["name"] for x, y in layers}
    inside = [(old[back[name]] if name in back else {}, y) for name, y in new.items() if name]
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
            if x["shape"] is not None and y["shape"] is not None
            if x[key] != y[key] and not (key == "shape" and _grew(x[key], y[key], ratio))
        ]
        if places:
            yield Change(key, what, tuple(places))
    said: tuple[Place, ...] = ()
    for key, (what, tolerance) in COUNTED.items():
        totals = [side["totals"].get(key) for side in (before, now)]
        grows = ratio != 1 and key not in ("parameters", "trainable", "parameter_bytes")
        if None in totals or grows:
            continue
        every = ((y["label"], x.get(key) or 0, y.get(key) or 0) for x, y in inside)
        inner = sorted((o for o in every if o[1] != o[2]), key=lambda o: -abs(o[2] - o[1]))
        if abs(totals[1] - totals[0]) > tolerance * max(totals) or (inner and not tolerance):
            told = tuple(_numbers(*one) for one in ((now["model"], *totals), *inner))
            if key != "trainable" or told != said:  # mostly as many as parameters
                yield Change("cost" if tolerance else "parameters", what, told)
            said = told


def _numbers(label: str, before: float, now: float) -> Place:
    """Return two numbers and by how much they differ: ``"+1,024, +50%"``."""
    part = f", {(now - before) / before:+,.0%}" if before else ""
    return Place(label, f"{before:,}", f"{now:,}", f"{now - before:+,}{part}" * (now != before))


def _grew(old: Sequence[int], new: Sequence[int], ratio: float) -> bool:
    """Whether two shapes differ in one dimension, by as much as the batches do."""
    differing = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    return len(old) == len(new) and [a * ratio == b for a, b in differing] == [True]
