"""Finds where the largest values and the first NaN of a data set are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pytest_modelhealth.report import ROLES, Extreme, LayerRecord, Observation
from pytest_modelhealth.statistics import Entry, UnsupportedTensorError, unseen
from pytest_modelhealth.statistics.dense import dense_values

_Key = tuple[str, str]


class Extremes:
    """A collector of where values stand out, by layer and role."""

    def __init__(self) -> None:
        self._largest: dict[_Key, Extreme] = {}
        self._nonfinite: dict[_Key, Extreme] = {}
        self._batch, self._samples = 0, 0
        self._waiting: list[tuple[_Key, Entry]] = []  # of other devices, whose values come later
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
            self._waiting.append((key, entry))
            return
        value, ill = reach
        known = self._largest.get(key)
        if ill and key not in self._nonfinite:
            self._note_nonfinite(key, tensor)
        if abs(value) > (0.0 if known is None else abs(known.value)):
            self._note_largest(key, tensor, entry, value)

    def end(self) -> None:
        """Take what other devices have found in this batch; which sample it was is not fetched."""
        for key, entry in self._waiting:
            seen, known = entry.statistics, self._largest.get(key)
            if seen.nan_count + seen.positive_inf_count and key not in self._nonfinite:
                value = math.nan if seen.nan_count else math.inf
                self._nonfinite[key] = Extreme(value, self._batch)
            if seen.abs_max > (0.0 if known is None else abs(known.value)):
                value = seen.max if seen.max >= -seen.min else seen.min
                self._largest[key] = Extreme(value, self._batch)
        self._waiting, self._found = [], {}

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
        has_samples = tensor.ndim > 0 and tensor.shape[0] == self._samples
        return Extreme(value, self._batch, index[0] if has_samples else None, index)


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
