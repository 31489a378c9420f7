"""What became of layers, shapes, dtypes, parameters and costs, in execution order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pytest_modelhealth.alignment.result import Pair
from pytest_modelhealth.rendering.notation import number, shape
from pytest_modelhealth.runs.difference.result import Change, Place
from pytest_modelhealth.snapshot.changes import LayerChange, SnapshotPair

Data = Mapping[str, Any]

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
        self._old = {layer["name"]: layer for layer in before["layers"]}
        self._new = {layer["name"]: layer for layer in now["layers"]}
        place = {name: index for index, name in enumerate(self._new)}
        # Each removed layer after what ran before it, all others where the head runs them.
        last = -1
        order = {}
        for one in pair.alignment.pairs:
            last = place.get(one.candidate, last) if one.candidate is not None else last
            order[one] = last
        self._pairs = sorted(order, key=order.__getitem__)
        old, new = before["samples"], now["samples"]
        self._ratio = new / old if old and new else 1.0

    def changes(self) -> Iterator[Change]:
        """Yield what changed, layers first and costs last."""
        yield from self._layers()
        yield from self._of_form("shape", "output shape", self._shapes)
        yield from self._of_form("dtype", "dtype", self._dtypes)
        parameters = list(self._counts("parameters", "parameters"))
        trainable = list(self._counts("trainable", "trainable parameters"))
        yield from parameters
        if list(map(_steps, parameters)) != list(map(_steps, trainable)):
            yield from trainable
        for name, what in COSTS.items():
            yield from self._cost(name, what)

    def _layers(self) -> Iterator[Change]:
        renamed = [
            Place(self._pair.old.label(pair.reference), pair.reference, pair.candidate)
            for pair in self._pairs
            if pair.aligned and pair.reference != pair.candidate
            if pair.reference is not None and pair.candidate is not None
        ]
        if self._pair.old.model != self._pair.new.model:
            models = self._pair.old.model, self._pair.new.model
            renamed.insert(0, Place(models[0], *models))
        if renamed:
            yield Change("layer", "renamed", tuple(renamed))
        groups: dict[tuple[str, str], list[LayerChange]] = {}
        for change in self._pair.changes():
            if change.what != "renamed" and not self._is_told(change):
                on_one_side = change.what in ("added", "removed")
                how = "" if on_one_side else change.rest
                groups.setdefault((change.what, how), []).append(change)
        for (what, _), same in groups.items():
            words = what.replace("_", " ").removesuffix(" of")
            places = (Place(change.label, "", change.rest.strip(" :()")) for change in same)
            yield Change("layer", words, tuple(places))

    def _is_told(self, change: LayerChange) -> bool:
        """Whether the model itself is another class, which is told as a rename."""
        return change.label == self._pair.new.model and change.rest.startswith(": type ")

    def _of_form(self, kind: str, what: str, read: Any) -> Iterator[Change]:
        places = []
        for pair in self._pairs:
            if pair.reference is None or pair.candidate is None:
                continue
            old, new = self._old[pair.reference], self._new[pair.candidate]
            if old["shape"] is None or new["shape"] is None:
                continue
            texts = read(old, new)
            if texts is not None:
                places.append(Place(new["label"], *texts))
        if places:
            yield Change(kind, what, tuple(places))

    def _shapes(self, old: Data, new: Data) -> tuple[str, str] | None:
        before, now = old["shape"], new["shape"]
        if before == now or _is_of_other_batch(before, now, self._ratio):
            return None
        return shape(before), shape(now)

    def _dtypes(self, old: Data, new: Data) -> tuple[str, str] | None:
        return None if old["dtype"] == new["dtype"] else (old["dtype"], new["dtype"])

    def _counts(self, key: str, what: str) -> Iterator[Change]:
        before, now = self._before["totals"].get(key), self._now["totals"].get(key)
        inner = list(self._differing(key))
        if before is None or now is None or (before == now and not inner):
            return
        total = Place(self._pair.new.model, _count(before), _count(now), _by(before, now))
        yield Change("parameters", what, (total, *inner))

    def _cost(self, key: str, what: str) -> Iterator[Change]:
        before, now = self._before["totals"].get(key), self._now["totals"].get(key)
        if before is None or now is None or (key == "peak_bytes" and self._ratio != 1):
            return
        ratio = self._ratio if key in PER_BATCH else 1.0
        tolerance = MEASURED if ratio != 1 or key == "peak_bytes" else EXACT
        if abs(now - before * ratio) <= tolerance * max(now, before * ratio):
            return
        if ratio != 1:
            what = f"{what} a sample"
            before, now = before / self._before["samples"], now / self._now["samples"]
        total = Place(self._pair.new.model, _count(before), _count(now), _by(before, now))
        inner = () if ratio != 1 else self._differing(key)
        yield Change("cost", what, (total, *sorted(inner, key=_step, reverse=True)))

    def _differing(self, key: str) -> Iterator[Place]:
        """Yield the layers of which a number differs, those that hold none."""
        for pair in self._pairs:
            old, new = self._of(pair)
            before, now = (0 if one is None else one.get(key) or 0 for one in (old, new))
            if before != now and (pair.candidate or pair.reference):
                label = (new or old or {})["label"]
                yield Place(label, _count(before), _count(now), _by(before, now))

    def _of(self, pair: Pair) -> tuple[Data | None, Data | None]:
        old = None if pair.reference is None else self._old[pair.reference]
        new = None if pair.candidate is None else self._new[pair.candidate]
        return old, new


def _steps(change: Change) -> list[str]:
    """Return how many came or went: mostly as many parameters as trainable ones."""
    return [place.note.partition(", ")[0] for place in change.places]


def _is_of_other_batch(before: Iterable[int], now: Iterable[int], ratio: float) -> bool:
    """Whether two shapes differ in one dimension, by as much as the batches do."""
    old, new = list(before), list(now)
    if len(old) != len(new):
        return False
    differing = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    return len(differing) == 1 and differing[0][0] * ratio == differing[0][1]


def _count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else number(value)


def _by(before: float, now: float) -> str:
    """Return ``"+1,024, +50%"``."""
    step = now - before
    sign = "+" if step > 0 else "-"
    distance = f"{sign}{_count(abs(step))}"
    if not before or not step:
        return distance if step else ""
    part = abs(step) / before
    if part >= 10:
        return f"{distance}, {now / before:,.0f} times"
    return f"{distance}, {sign}{part:.1%}" if part < 0.1 else f"{distance}, {sign}{part:.0%}"


def _step(place: Place) -> float:
    return abs(float(place.note.partition(", ")[0].replace(",", "") or 0))
