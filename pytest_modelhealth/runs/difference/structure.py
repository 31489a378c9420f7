"""What became of layers, shapes, dtypes, parameters and costs, in execution order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_modelhealth.rendering.notation import number, shape
from pytest_modelhealth.runs.difference.result import Change, Place
from pytest_modelhealth.snapshot.changes import LayerChange, SnapshotPair

Data = Mapping[str, Any]

PARAMETERS = {"parameters": "parameters", "trainable": "trainable parameters"}
COSTS = {
    "parameter_bytes": "bytes of parameters",
    "multiply_adds": "multiply-adds",
    "activation_bytes": "bytes of activations",
    "saved_bytes": "bytes saved for the backward pass",
    "peak_bytes": "peak memory in bytes",
}
PER_BATCH = ("multiply_adds", "activation_bytes", "saved_bytes")
"""Costs that grow with the batch; between batches of other sizes they are compared by sample."""

EXACT = 1e-3
"""Costs that are counted may differ by this part."""

MEASURED = 0.05
"""The same of those that are measured, and of what is compared by sample."""


class Structure:
    """The layers of two inspections side by side.

    Args:
        pair: which layer is which.
        before: the inspection of the base.
        now: that of the head.
    """

    def __init__(self, pair: SnapshotPair, before: Data, now: Data) -> None:
        self._pair, self._before, self._now = pair, before, now
        old = {layer["name"]: layer for layer in before["layers"]}
        new = {layer["name"]: layer for layer in now["layers"]}
        self._layers = [
            (
                None if one.reference is None else old[one.reference],
                None if one.candidate is None else new[one.candidate],
            )
            for one in pair.alignment.pairs
        ]
        samples = before["samples"], now["samples"]
        self._ratio = samples[1] / samples[0] if all(samples) else 1.0

    def changes(self) -> Iterator[Change]:
        """Yield what changed, layers first and costs last."""
        yield from self._changed_layers()
        yield from self._of_form("shape", "output shape")
        yield from self._of_form("dtype", "dtype")
        said: list[list[str]] = []
        for name, what in (PARAMETERS | COSTS).items():
            for change in self._total(name, what):
                steps = [_step(place) for place in change.places]
                if name != "trainable" or steps not in said:  # mostly as many as parameters
                    yield change
                said.append(steps)

    def _changed_layers(self) -> Iterator[Change]:
        renamed = [
            Place(self._pair.old.label(pair.reference), pair.reference, pair.candidate)
            for pair in self._pair.alignment.pairs
            if pair.aligned and pair.reference != pair.candidate
            if pair.reference is not None and pair.candidate is not None
        ]
        models = self._pair.old.label(""), self._pair.new.label("")
        if models[0] != models[1]:
            renamed.insert(0, Place(models[0], *models))
        if renamed:
            yield Change("layer", "renamed", tuple(renamed))
        groups: dict[tuple[str, str], list[LayerChange]] = {}
        for change in self._pair.changes():
            is_the_model = change.label == models[1] and change.rest.startswith(": type ")
            if change.what != "renamed" and not is_the_model:
                how = "" if change.what in ("added", "removed") else change.rest
                groups.setdefault((change.what, how), []).append(change)
        for (what, _), same in groups.items():
            words = what.replace("_", " ").removesuffix(" of")
            places = (Place(change.label, "", change.rest.strip(" :()")) for change in same)
            yield Change("layer", words, tuple(places))

    def _of_form(self, key: str, what: str) -> Iterator[Change]:
        places = []
        for old, new in self._layers:
            if not old or not new or old["shape"] is None or new["shape"] is None:
                continue
            before, now = old[key], new[key]
            if key == "shape" and self._is_of_other_batch(before, now):
                continue
            if before != now:
                texts = (shape(before), shape(now)) if key == "shape" else (before, now)
                places.append(Place(new["label"], *texts))
        if places:
            yield Change(key, what, tuple(places))

    def _is_of_other_batch(self, old: Sequence[int], new: Sequence[int]) -> bool:
        """Whether two shapes differ in one dimension, by as much as the batches do."""
        differing = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
        return len(old) == len(new) and [a * self._ratio == b for a, b in differing] == [True]

    def _total(self, key: str, what: str) -> Iterator[Change]:
        before, now = self._before["totals"].get(key), self._now["totals"].get(key)
        if before is None or now is None or (key == "peak_bytes" and self._ratio != 1):
            return
        ratio = self._ratio if key in PER_BATCH else 1.0
        inner = list(self._differing(key)) if ratio == 1 else []
        if key in PARAMETERS:
            is_same = before == now and not inner
        else:
            tolerance = MEASURED if ratio != 1 or key == "peak_bytes" else EXACT
            is_same = abs(now - before * ratio) <= tolerance * max(now, before * ratio)
            inner.sort(key=lambda place: -abs(float(_step(place).replace(",", "") or 0)))
        if is_same:
            return
        if ratio != 1:
            what = f"{what} a sample"
            before, now = before / self._before["samples"], now / self._now["samples"]
        total = _numbers(self._pair.new.label(""), before, now)
        yield Change("parameters" if key in PARAMETERS else "cost", what, (total, *inner))

    def _differing(self, key: str) -> Iterator[Place]:
        """Yield the layers, but not the model, of which a number differs."""
        for old, new in self._layers:
            layer = new or old or {}
            before, now = (0 if one is None else one.get(key) or 0 for one in (old, new))
            if before != now and layer["name"]:
                yield _numbers(layer["label"], before, now)


def _numbers(label: str, before: float, now: float) -> Place:
    """Return two numbers and by how much they differ: ``"+1,024, +50%"``."""
    step = now - before
    sign = "+" if step > 0 else "-"
    note = f"{sign}{_count(abs(step))}" if step else ""
    if before and step:
        part = abs(step) / before
        times = f"{now / before:,.0f} times"
        note += f", {times if part >= 10 else f'{sign}{part:.{0 if part >= 0.1 else 1}%}'}"
    return Place(label, _count(before), _count(now), note)


def _count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)


def _step(place: Place) -> str:
    return place.note.partition(", ")[0]
