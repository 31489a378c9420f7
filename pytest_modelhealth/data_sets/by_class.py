"""Splits the activations of each batch by the class of their samples, and summarises each class."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.data_sets.labels import require_few
from pytest_modelhealth.report import ByClass, Label, SilentUnits
from pytest_modelhealth.statistics import (
    Entry,
    Ledger,
    TensorStatistics,
    UnsupportedTensorError,
    unseen,
)

IsSilent = Callable[[str, TensorStatistics, float], Any]
"""Tells which units of a layer are silent, by the largest magnitude of the layer: booleans."""


class Classes:
    """A collector of statistics by class."""

    def __init__(self) -> None:
        self._samples: Counter[Label] = Counter()
        self._statistics: dict[Label, dict[str, TensorStatistics]] = {}
        self._left_out: dict[str, str] = {}
        self._given, self._made = _Sameness(), _Sameness()
        self._size = 0
        self._order: Tensor | None = None
        self._parts: list[tuple[Label, int]] = []
        self._ledger = Ledger()
        self._entries: list[tuple[str, Label, Entry]] = []

    def begin(self, batch: int, labels: Sequence[Label], inputs: Any) -> None:
        """Take the classes of the batch that comes now.

        Raises:
            InspectionError: there are more classes than can be kept apart.
        """
        places: dict[Label, list[int]] = {}
        for place, label in enumerate(labels):
            places.setdefault(label, []).append(place)
        require_few(len(self._samples.keys() | places.keys()), batch)
        self._size = len(labels)
        self._order = torch.tensor([place for of in places.values() for place in of])
        self._parts = [(label, len(of)) for label, of in places.items()]
        self._samples.update(dict(self._parts))
        with unseen():
            for tensor in find_tensors(inputs):
                if self._has_samples(tensor):
                    self._given.add(self._split(tensor))

    def see(
        self, layer: str, role: str, tensor: Tensor, entry: Entry, unit_dimension: int | None
    ) -> None:
        """See one tensor; those without a dimension of samples are left out."""
        if role != "activations":
            return
        if not self._has_samples(tensor):
            self._left_out[layer] = (
                f"dimension 0 of its output is no dimension of the {self._size} samples"
            )
            return
        with unseen():
            try:
                for label, part in self._split(tensor):
                    self._entries.append((layer, label, self._ledger.add(part, unit_dimension)))
            except UnsupportedTensorError as error:
                self._left_out[layer] = str(error)
                return
            if layer == "":
                self._made.add(self._split(tensor))

    def end(self) -> None:
        """Merge what was found in this batch."""
        for layer, label, entry in self._entries:
            found = self._statistics.setdefault(label, {})
            known = found.get(layer)
            found[layer] = entry.statistics if known is None else known.merge(entry.statistics)
        self._entries, self._ledger = [], Ledger()
        self._given.end()
        self._made.end()

    def result(self, layers: Iterable[str], can_die: Sequence[str], is_silent: IsSilent) -> ByClass:
        """Return what was found.

        Args:
            layers: names of all layers, in order.
            can_die: those whose units can fall silent.
            is_silent: tells which do.
        """
        labels = _sorted(self._samples)
        order = [name for name in layers if any(name in of for of in self._statistics.values())]
        silent = [found for name in can_die for found in self._silent(name, labels, is_silent)]
        silent.sort(key=lambda found: len(found.units) / found.of, reverse=True)
        return ByClass(
            samples={label: self._samples[label] for label in labels},
            statistics={
                label: {name: of[name] for name in order if name in of}
                for label in labels
                for of in [self._statistics.get(label, {})]
            },
            silent=tuple(silent),
            alike=tuple(c for c in labels if self._made.all_same(c, self._given)),
            judged=tuple(name for name in can_die if name in order),
            left_out={n: why for n, why in self._left_out.items() if n not in order},
        )

    def _silent(
        self, layer: str, labels: Sequence[Label], is_silent: IsSilent
    ) -> Iterator[SilentUnits]:
        seen = {c: of[layer] for c in labels if layer in (of := self._statistics.get(c, {}))}
        sizes = {None if s.units is None else len(s.units.alive) for s in seen.values()}
        if len(sizes) != 1 or None in sizes:
            return
        largest = max((s.abs_max for s in seen.values() if s.finite_count), default=0.0)
        silent = {label: is_silent(layer, s, largest) for label, s in seen.items()}
        # a unit with a NaN is neither silent nor does it fire: it is ill
        fires = sum(~silent[c] & ~np.isnan(_maximum(s)) for c, s in seen.items()) > 0
        for label, units in silent.items():
            never = (units & fires).nonzero()[0].tolist()
            if never:
                count = int(fires.sum())
                yield SilentUnits(layer, label, tuple(never), count, self._samples[label])

    def _has_samples(self, tensor: Tensor) -> bool:
        return not tensor.is_nested and tensor.ndim > 0 and tensor.shape[0] == self._size

    def _split(self, tensor: Tensor) -> Iterator[tuple[Label, Tensor]]:
        """Yield each class with its samples."""
        assert self._order is not None
        ordered = tensor.detach()
        if len(self._parts) > 1:
            ordered = ordered.index_select(0, self._order.to(tensor.device))
        parts = ordered.split([count for _, count in self._parts])
        yield from zip((label for label, _ in self._parts), parts, strict=True)


def _maximum(seen: TensorStatistics) -> npt.NDArray[np.float64]:
    assert seen.units is not None
    return seen.units.maximum


class _Sameness:
    """Whether all samples of a class are the same, as far as was seen; a digest of each is kept."""

    def __init__(self) -> None:
        self._counts: Counter[Label] = Counter()
        self._digests: dict[Label, bytes | None] = {}
        self._now: dict[Label, Any] = {}

    def add(self, parts: Iterable[tuple[Label, Tensor]]) -> None:
        """Look at the samples of a batch, one tensor of maybe several."""
        for label, part in parts:
            if not len(part):
                continue
            self._counts[label] += len(part)
            if label in self._digests and self._digests[label] is None:
                continue
            is_same = torch.equal(part[1:], part[:1].expand_as(part[1:]))
            digest = self._now.setdefault(label, hashlib.blake2b())
            if is_same:
                digest.update(str(tuple(part.shape[1:])).encode() + _bytes(part[0]))
            else:
                self._digests[label] = None

    def end(self) -> None:
        """Compare the batch with those before."""
        for label, made in self._now.items():
            digest = made.digest()
            if self._digests.setdefault(label, digest) != digest:
                self._digests[label] = None
        self._now = {}

    def all_same(self, label: Label, given: _Sameness) -> bool:
        """Whether two samples of a class or more are all the same, and were not given the same."""
        is_same = self._counts[label] > 1 and self._digests.get(label) is not None
        return is_same and given._digests.get(label) is None


def _bytes(row: Tensor) -> bytes:
    return row.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _sorted(labels: Iterable[Label]) -> list[Label]:
    """Return classes in order: of several types one after the other."""
    return sorted(labels, key=lambda label: (type(label).__name__ == "str", *_key(label)))


def _key(label: Label) -> tuple[float, str]:
    return (0.0, label) if isinstance(label, str) else (float(label), "")
