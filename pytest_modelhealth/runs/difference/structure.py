"""What became of layers, shapes, dtypes, parameters and costs, in execution order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_modelhealth.rendering.notation import shape
from pytest_modelhealth.runs.difference.result import Change, Place
from pytest_modelhealth.snapshot.changes import grouped
from pytest_modelhealth.snapshot.drift import DriftReport

Data = Mapping[str, Any]
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
    yield from _changed_layers(found)
    for key, what in (("shape", "output shape"), ("dtype", "dtype")):
        places = [
            Place(
                y["label"],
                *((shape(x[key]), shape(y[key])) if key == "shape" else (x[key], y[key])),
            )
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
        places = list(_costs(found, before, now, layers, key))
        steps = [place.note.partition(", ")[0] for place in places]
        if places and not (key == "trainable" and steps in said):  # mostly as many as parameters
            yield Change("parameters" if key in PARAMETERS else "cost", what, tuple(places))
        said.append(steps)


def _changed_layers(found: DriftReport) -> Iterator[Change]:
    for same in grouped(found.changes, "renamed", "added", "removed"):
        words = same[0].what.replace("_", " ").removesuffix(" of")
        texts = (change.rest.strip(" :()").removeprefix("to ") for change in same)
        places = (Place(one.label, "", text) for one, text in zip(same, texts, strict=True))
        yield Change("layer", words, tuple(places))


def _grew(old: Sequence[int], new: Sequence[int], ratio: float) -> bool:
    """Whether two shapes differ in one dimension, by as much as the batches do."""
    differing = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
    return len(old) == len(new) and [a * ratio == b for a, b in differing] == [True]


def _costs(
    found: DriftReport, before: Data, now: Data, layers: Layers, key: str
) -> Iterator[Place]:
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
    yield _numbers(found.pair.new.label(""), old, new)
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
