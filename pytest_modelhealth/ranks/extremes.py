"""Where the largest values and the first NaNs of a run over batches stood, of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.data_sets import Extreme

_FIELDS = ("largest", "nonfinite")
_ROLES = ("inputs", "activations", "gradients")
_DIMENSIONS = 16


def joined_extremes(company: Company, own: Observation) -> dict[str, dict[str, Any]]:
    """Return by layer the largest magnitudes of all ranks, and the first NaN: of the first batch.

    Of equal ones it is that of the first rank. Gradients are divided as their statistics are.
    """
    names = [(layer, field, role) for layer in own.layers for field in _FIELDS for role in _ROLES]
    seen = [getattr(own.layers[layer], field).get(role) for layer, field, role in names]
    result: dict[str, dict[str, Any]] = {layer: {f: {} for f in _FIELDS} for layer in own.layers}
    has = company.largest(np.array([any(one is not None for one in seen)], dtype=np.int64))
    if not has[0]:
        return result
    shares = len(company.place.data)
    scales = [shares if role == "gradients" else 1 for _, _, role in names]
    order = [_order(one, name[1]) for one, name in zip(seen, names, strict=True)]
    best = company.smallest(np.array(order))
    mine = np.isfinite(order) & (best == order)
    ranks = company.smallest(np.where(mine, company.rank, 2**31).astype(np.int64))
    mine &= ranks == company.rank
    table = np.zeros((len(names), _DIMENSIONS + 3), dtype=np.int64)
    values = np.zeros(len(names))
    for row in np.flatnonzero(mine).tolist():
        table[row], values[row] = _packed(seen[row]), seen[row].value / scales[row]
    table, values = company.sum(table), company.sum(values)
    found = zip(names, table.tolist(), values.tolist(), ranks.tolist(), strict=True)
    for (layer, field, role), packed, value, rank in found:
        if packed[2]:
            result[layer][field][role] = _unpacked(packed, value, rank)
    return result


def _order(extreme: Extreme | None, field: str) -> float:
    """Return a number that is smallest where an extreme stands out most."""
    if extreme is None:
        return np.inf
    return float(extreme.batch) if field == "nonfinite" else -abs(extreme.value)


def _packed(extreme: Extreme) -> list[int]:
    """Return batch, sample from 1, dimensions of the index and two more, and the index."""
    index = () if extreme.index is None else extreme.index[:_DIMENSIONS]
    sample = 0 if extreme.sample is None else extreme.sample + 1
    length = 1 if extreme.index is None else len(index) + 2
    return [extreme.batch, sample, length, *index, *(0,) * (_DIMENSIONS - len(index))]


def _unpacked(row: list[int], value: float, rank: int) -> Extreme:
    batch, sample, length, *index = row
    return Extreme(
        value,
        batch,
        None if sample == 0 else sample - 1,
        None if length == 1 else tuple(index[: length - 2]),
        rank,
    )
