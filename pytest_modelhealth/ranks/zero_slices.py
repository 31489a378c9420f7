"""Rows and columns of parameters that are zero with all their gradients, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.placing import Key
from pytest_modelhealth.ranks.rounds import Rounds, Steps
from pytest_modelhealth.report import LayerRecord, Observation, ZeroSlices
from pytest_modelhealth.statistics import TensorStatistics


def joined_slices(
    company: Company,
    own: Observation,
    keys: Sequence[Key],
    whole: Mapping[Key, TensorStatistics | None],
) -> dict[str, dict[str, ZeroSlices]]:
    """Return by layer and parameter what is zero on every rank that has a part of it.

    A bit a row and column.

    Args:
        company: the ranks.
        own: what this rank saw.
        keys: the parameters that some rank found such slices in.
        whole: statistics of the whole tensors.
    """
    shapes = [_shape(whole[key]) for key in keys]
    alive = [_alive(own, key, shape) for key, shape in zip(keys, shapes, strict=True)]
    if not alive:
        return {}
    bits = company.either(np.packbits(np.concatenate(alive)))
    flat = np.unpackbits(bits).astype(np.bool_)
    found: dict[str, dict[str, ZeroSlices]] = {}
    start = 0
    for (layer, _, name), (rows, columns) in zip(keys, shapes, strict=True):
        ends = (start, start + rows, start + rows + columns)
        found.setdefault(layer, {})[name] = ZeroSlices(
            frozenset(np.flatnonzero(~flat[ends[0] : ends[1]]).tolist()),
            frozenset(np.flatnonzero(~flat[ends[1] : ends[2]]).tolist()),
        )
        start = ends[2]
    return found


def sliced(rounds: Rounds, own: Observation, keys: Sequence[Key]) -> Steps[list[Key]]:
    """Return the parameters that some rank found slices in whose gradients are zero."""
    keys = [key for key in keys if key[1] == "parameter_gradients"]
    own_has = np.array([_slices(own, key) is not None for key in keys], dtype=np.bool_)
    has = rounds.either(np.packbits(own_has))
    yield
    bits = np.unpackbits(has.result, count=len(keys)).tolist()
    return [key for key, some in zip(keys, bits, strict=True) if some]


def _slices(own: Observation, key: Key) -> ZeroSlices | None:
    record = own.layers.get(key[0])
    return None if record is None else record.zero_slices.get(key[2])


def _shape(seen: TensorStatistics | None) -> tuple[int, int]:
    shape = () if seen is None else seen.shape
    return (shape[0] if shape else 0), (shape[1] if len(shape) > 1 else 0)


def _alive(own: Observation, key: Key, shape: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Return which rows and columns of the whole something here is not zero in."""
    rows, columns = np.zeros(shape[0], np.bool_), np.zeros(shape[1], np.bool_)
    record = own.layers.get(key[0])
    seen = None if record is None else record.parameter_gradients.get(key[2])
    if record is not None and seen is not None and seen.count:
        slices = _slices(own, key) or ZeroSlices(frozenset(), frozenset())
        for dimension, (alive, zero) in enumerate(((rows, slices.rows), (columns, slices.columns))):
            start, size = _extent(record, key, seen, dimension)
            here = alive[start : start + size]
            here[:] = True
            here[[index for index in zero if index < len(here)]] = False
    return np.concatenate([rows, columns])


def _extent(
    record: LayerRecord, key: Key, seen: TensorStatistics, dimension: int
) -> tuple[int, int]:
    """Return where this rank's part begins along a dimension, and how long it is."""
    size = seen.shape[dimension] if dimension < len(seen.shape) else 0
    placement = record.placements.get(f"{key[1]}.{key[2]}")
    if placement is None or not placement.offset or dimension >= len(placement.offset):
        return 0, size
    return placement.offset[dimension], size
