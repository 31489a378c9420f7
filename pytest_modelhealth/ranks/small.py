"""The few numbers a layer has beside statistics, of all ranks, in one round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.ranks.rounds import Rounds, Steps
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.observation import MEASURED

_NEVER = 2**31
_CALLED = ("inputs", "activations")
_UNKNOWN = 2


def small_numbers(
    rounds: Rounds, records: Mapping[str, LayerRecord], own: Observation, has_measured: bool
) -> Steps[dict[str, dict[str, Any]]]:
    """Return the fields of each record that are numbers or truths, of all ranks.

    The first call with a NaN is the first of any rank. Samples are equal where they are on every
    rank and all ranks have the same ones. Options that were measured are averaged.

    Args:
        rounds: what is sent at once.
        records: the layers of all ranks.
        own: what this rank saw.
        has_measured: whether some rank has measured an option.
    """
    table, extremes = [], []
    for name in records:
        record = own.layers.get(name)
        table.append(_row(record))
        seen = None if record is None or not record.equal_samples else record.activations
        mean = math.inf if seen is None or not seen.finite_count else seen.mean
        extremes.append((mean, math.inf if math.isinf(mean) else -mean))
    size = len(records)
    calls = rounds.smallest(np.array(table, dtype=np.int64).reshape(size, 4))
    spread = rounds.smallest(np.array(extremes, dtype=np.float64).reshape(size, 2))
    names = sorted(MEASURED) if has_measured else []
    values, known = _measured(records, own, names)
    sums, counts = rounds.sum(values), rounds.sum(known)
    yield
    low, high = spread.result.T
    alike = (low == -high) | np.isinf(low)
    means = sums.result / np.maximum(counts.result, 1)
    every = zip(
        *(records.items(), calls.result.tolist(), alike.tolist()),
        *(means.tolist(), counts.result.tolist()),
        strict=True,
    )
    return {
        name: {
            "nonfinite_calls": {r: n for r, n in zip(_CALLED, row, strict=False) if n < _NEVER},
            "equal_samples": _truth(row[2]) if is_alike else row[2] == _UNKNOWN and None,
            "equal_input_samples": _truth(row[3]),
            "options": {
                **{key: value for key, value in record.options.items() if key not in MEASURED},
                **{key: mean for key, mean, n in zip(names, mine, having, strict=True) if n},
            },
        }
        for (name, record), row, is_alike, mine, having in every
    }


def has_measured(own: Observation) -> bool:
    """Whether this rank has measured an option."""
    return any(not MEASURED.isdisjoint(record.options) for record in own.layers.values())


def _row(record: LayerRecord | None) -> tuple[int, int, int, int]:
    if record is None:
        return _NEVER, _NEVER, _UNKNOWN, _UNKNOWN
    first, second = (record.nonfinite_calls.get(role, _NEVER) for role in _CALLED)
    return first, second, _code(record.equal_samples), _code(record.equal_input_samples)


def _code(truth: bool | None) -> int:
    return _UNKNOWN if truth is None else int(truth)


def _truth(code: int) -> bool | None:
    return None if code == _UNKNOWN else bool(code)


def _measured(
    records: Mapping[str, LayerRecord], own: Observation, names: list[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return what this rank has measured, a row a layer and a column an option, and where."""
    values = np.zeros((len(records), len(names)))
    known = np.zeros((len(records), len(names)), dtype=np.int64)
    for row, name in enumerate(records) if names else ():
        options = own.layers[name].options if name in own.layers else {}
        for column, option in enumerate(names):
            value = options.get(option)
            if isinstance(value, float | int):
                values[row, column], known[row, column] = value, 1
    return values, known
