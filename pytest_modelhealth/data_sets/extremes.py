"""Finds the batch and the sample where the largest value of a layer stood, and the first NaN.

The largest magnitude of each tensor is known. Only where it exceeds that of all batches before is
the tensor looked at again: of n batches, about as often as the logarithm of n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.report import ROLES, Extreme, LayerRecord, Observation
from pytest_modelhealth.statistics import Entry, UnsupportedTensorError, unseen
from pytest_modelhealth.statistics.dense import dense_values

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
