"""Finds what stands out in a data set: the largest values, the first NaN, odd samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.report import ROLES, Extreme, Label, LayerRecord, Observation
from pytest_modelhealth.statistics import Entry, UnsupportedTensorError, unseen
from pytest_modelhealth.statistics.dense import dense_values

_FEWEST_VALUES = 16
_FEWEST = 8
"""Blank samples of a class, or in a batch, that are no chance."""
_FEWEST_SAMPLES = 16
_FAR = 100.0
_FEW = 0.01


class OddSamples:
    """Takes the batches of a run one after the other."""

    def __init__(self) -> None:
        self._largest: dict[int, list[np.ndarray]] = defaultdict(list)  # by tensor of the batch
        self._all, self._blank = Counter[Label | None](), Counter[Label | None]()
        self._first: dict[Label | None, Extreme] = {}
        self._blank_batch: tuple[int, Extreme] | None = None

    def see(self, batch: int, samples: int, given: list[Tensor], target: Any) -> None:
        """See the tensors of a batch, and the class of each sample where the target holds it."""
        are_blank, first = np.ones(samples, dtype=bool), None
        for number, tensor in enumerate(given):
            if tensor.ndim < 2 or len(tensor) != samples or not tensor.numel():
                continue
            if tensor.layout != torch.strided or tensor.is_complex() or tensor.dtype == torch.bool:
                return
            with unseen():
                ends = torch.stack(torch.aminmax(tensor.detach().reshape(samples, -1), dim=1))
                low, high = ends.double().cpu().numpy()
            are_blank &= low == high
            if tensor.is_floating_point():
                self._largest[number].append(np.maximum(abs(low), abs(high)))
                is_enough = tensor.numel() >= _FEWEST_VALUES * samples
                first = low if first is None and is_enough else first
        if first is None:
            return
        for sample, label in enumerate(_classes(target, samples)):
            self._all[label] += 1
            if are_blank[sample]:
                self._blank[label] += 1
                place = Extreme(float(first[sample]), batch, sample)
                self._first.setdefault(label, place)
        if are_blank.all() and samples >= _FEWEST and self._blank_batch is None:
            self._blank_batch = samples, Extreme(float(first[0]), batch, 0)

    def found(self) -> Iterator[tuple[str, tuple[str, Extreme]]]:
        """Yield what stands out by its kind: who it is, in words, and where the first stood."""
        whole = [label for label, n in self._blank.items() if _FEWEST <= n == self._all[label]]
        classes = [label for label in whole if label is not None]
        if classes:
            label, more = classes[0], f" and of {len(classes) - 1} more" * (len(classes) > 1)
            who = f"all {self._blank[label]} samples of class {label}{more}"
            yield "blank", (who, self._first[label])
        elif self._blank_batch is not None:
            samples, place = self._blank_batch
            yield "blank", (f"all {samples} samples of one batch", place)
        for largest in self._largest.values():
            values = np.concatenate(largest)
            usual = float(np.median(values))
            far = np.isfinite(values) & (values > _FAR * usual)
            if len(values) < _FEWEST_SAMPLES or not usual or not far.any():
                continue
            if far.sum() > max(1.0, _FEW * len(values)):
                continue
            worst = int(np.where(far, values, 0.0).argmax())
            batch = int(np.searchsorted(np.cumsum([len(part) for part in largest]), worst, "right"))
            sample = worst - sum(len(part) for part in largest[:batch])
            who = f"{far.sum()} of {len(values)} samples"
            yield "outlier", (who, Extreme(float(values[worst]), batch, sample))
            return


def _classes(target: Any, samples: int) -> Iterable[Label | None]:
    """Return the class of each sample: of a target with a whole number for each."""
    is_one = isinstance(target, Tensor) and target.shape == (samples,)
    if is_one and not target.is_floating_point() and not target.is_complex():
        return target.tolist()  # type: ignore[no-any-return]
    return repeat(None, samples)


_Key = tuple[str, str]
_Row = npt.NDArray[np.float32]


@dataclass
class _Waiting:
    """A tensor of another device, and what that will have found in each of its samples.

    Args:
        key: its layer and role.
        entry: what will have been found in all of it.
        reach: the smallest and the largest value of each sample, shape ``(2, samples)``.
        has_samples: whether it has a dimension of samples; else all of it counts as one.
    """

    key: _Key
    entry: Entry
    reach: Tensor
    has_samples: bool


class Extremes:
    """A collector of where values stand out, by layer and role."""

    def __init__(self) -> None:
        self._largest: dict[_Key, Extreme] = {}
        self._nonfinite: dict[_Key, Extreme] = {}
        self._batch, self._samples = 0, 0
        self._waiting: list[_Waiting] = []
        self._found: dict[int, tuple[Entry, Extreme]] = {}  # a container returns what a layer did

    def begin(self, batch: int, samples: int) -> None:
        """Take the number of the batch that comes now, and how many samples it has."""
        self._batch, self._samples = batch, samples

    def see(
        self, layer: str, role: str, tensor: Tensor, entry: Entry, unit_dimension: int | None
    ) -> None:
        """See one tensor."""
        key, reach = (layer, role), entry.reach
        if reach is None:
            self._leave_on_device(key, tensor, entry)
            return
        value, ill = reach
        known = self._largest.get(key)
        if ill and key not in self._nonfinite:
            self._note_nonfinite(key, tensor)
        if abs(value) > (0.0 if known is None else abs(known.value)):
            self._note_largest(key, tensor, entry, value)

    def end(self) -> None:
        """Fetch what stayed on other devices in this batch, in one transfer from each."""
        by_device: dict[torch.device, list[_Waiting]] = {}
        for one in self._waiting:
            by_device.setdefault(one.reach.device, []).append(one)
        self._waiting, self._found = [], {}
        for waiting in by_device.values():
            with unseen():
                fetched = torch.cat([one.reach for one in waiting], dim=1).cpu().numpy()
            ends = np.cumsum([one.reach.shape[1] for one in waiting])[:-1]
            for one, reach in zip(waiting, np.split(fetched, ends, axis=1), strict=True):
                self._note_fetched(one, *reach)

    def after(self, observation: Observation) -> Observation:
        """Return what was seen with the places in it."""
        layers = {name: self._told(record) for name, record in observation.layers.items()}
        return replace(observation, layers=layers)

    def _told(self, record: LayerRecord) -> LayerRecord:
        largest, nonfinite = (
            {role: found[record.name, role] for role in ROLES if (record.name, role) in found}
            for found in (self._largest, self._nonfinite)
        )
        return replace(record, largest=largest, nonfinite=nonfinite)

    def _note_largest(self, key: _Key, tensor: Tensor, entry: Entry, value: float) -> None:
        found = self._found.get(id(entry))
        if found is None:
            with unseen():
                values = _values(tensor)
                if values is None:
                    return
                flat = _index_of_extreme(values, is_largest=value > 0.0)
            # of a gradient under a loss scale the tensor holds another value than is reported
            found = self._found[id(entry)] = entry, self._extreme(value, tensor, flat)
        self._largest[key] = found[1]

    def _note_nonfinite(self, key: _Key, tensor: Tensor) -> None:
        with unseen():
            values = _values(tensor)
            if values is None:
                return
            flat = int((values.isnan() | values.isposinf()).reshape(-1).to(torch.uint8).argmax())
            value = float(values.reshape(-1)[flat])
        self._nonfinite[key] = self._extreme(value, tensor, flat)

    def _extreme(self, value: float, tensor: Tensor, flat: int) -> Extreme:
        shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
        index = tuple(map(int, np.unravel_index(flat, shape)))
        sample = index[0] if self._has_samples(tensor) else None
        return Extreme(value, self._batch, sample, index)

    def _has_samples(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self._samples

    def _leave_on_device(self, key: _Key, tensor: Tensor, entry: Entry) -> None:
        with unseen():
            values = _values(tensor)
            if values is None:
                return
            has_samples = self._has_samples(tensor)
            rows = values.reshape(self._samples if has_samples else 1, -1)
            reach = torch.stack(torch.aminmax(rows, dim=1)).to(torch.float32)
        self._waiting.append(_Waiting(key, entry, reach, has_samples))

    def _note_fetched(self, one: _Waiting, low: _Row, high: _Row) -> None:
        seen, known = one.entry.statistics, self._largest.get(one.key)
        if seen.nan_count + seen.positive_inf_count and one.key not in self._nonfinite:
            sample = int((np.isnan(high) | np.isposinf(high)).argmax())
            self._nonfinite[one.key] = self._fetched(one, float(high[sample]), sample)
        if seen.abs_max > (0.0 if known is None else abs(known.value)):
            value = seen.max if seen.max >= -seen.min else seen.min
            found = high if value > 0.0 else -low
            sample = int(np.where(np.isfinite(found), found, -np.inf).argmax())
            self._largest[one.key] = self._fetched(one, value, sample)

    def _fetched(self, one: _Waiting, value: float, sample: int) -> Extreme:
        return Extreme(value, self._batch, sample if one.has_samples else None)


def _values(tensor: Tensor) -> Tensor | None:
    """Return the values as they lie in the tensor's dimensions, if there are such."""
    try:
        dense = dense_values(tensor)
    except UnsupportedTensorError:
        return None
    return dense.values if dense.keeps_dimensions and dense.values.numel() else None


def _index_of_extreme(values: Tensor, *, is_largest: bool) -> int:
    """Return the index, in row-major order, of the largest finite value, or of the smallest."""
    flat = values.reshape(-1)
    if flat.dtype in _OF_NUMPY and flat.is_cpu:  # whose search takes a fifth of torch's
        array = flat.numpy()
        index = int(array.argmax() if is_largest else array.argmin())
    else:
        index = int(flat.argmax() if is_largest else flat.argmin())
    if bool(flat[index].isfinite()):
        return index
    signed = flat if is_largest else -flat
    return int(signed.where(signed.isfinite(), -torch.inf).argmax())


_OF_NUMPY = frozenset({torch.float32, torch.float64})
