"""The few numbers a layer has beside statistics, of all ranks, in a handful of reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.observation import MEASURED

_NEVER = 2**31
_CALLED = ("inputs", "activations")
_UNKNOWN = 2


def small_numbers(
    company: Company, records: Mapping[str, LayerRecord], own: Observation
) -> dict[str, dict[str, Any]]:
    """Return the fields of each record that are numbers or truths, of all ranks.

    The first call with a NaN is the first of any rank. Samples are equal where they are on every
    rank and all ranks have the same ones. Options that were measured are averaged.
    """
    table, extremes = [], []
    for name in records:
        record = own.layers.get(name)
        table.append(_row(record))
        seen = None if record is None or not record.equal_samples else record.activations
        mean = math.inf if seen is None or not seen.finite_count else seen.mean
        extremes.append((mean, math.inf if math.isinf(mean) else -mean))
    calls = company.smallest(np.array(table, dtype=np.int64).reshape(len(records), 4)).tolist()
    spread = company.smallest(np.array(extremes).reshape(len(records), 2))
    alike = (spread[:, 0] == -spread[:, 1]) | np.isinf(spread[:, 0])
    measured = _measured(company, records, own)
    return {
        name: {
            "nonfinite_calls": {r: n for r, n in zip(_CALLED, row, strict=False) if n < _NEVER},
            "equal_samples": _truth(row[2]) if is_alike else row[2] == _UNKNOWN and None,
            "equal_input_samples": _truth(row[3]),
            "options": {**record.options, **measured.get(name, {})},
        }
        for (name, record), row, is_alike in zip(
            records.items(), calls, alike.tolist(), strict=True
        )
    }


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
    company: Company, records: Mapping[str, LayerRecord], own: Observation
) -> dict[str, dict[str, float]]:
    """Return the means of the options that were measured, where every rank has them."""
    names = sorted(MEASURED)
    values = np.zeros((len(records), len(names)))
    known = np.zeros((len(records), len(names)), dtype=np.int64)
    for row, name in enumerate(records):
        options = own.layers[name].options if name in own.layers else {}
        for column, option in enumerate(names):
            value = options.get(option)
            if isinstance(value, float | int):
                values[row, column], known[row, column] = value, 1
    known = company.sum(known)
    if not known.any():
        return {}
    means = company.sum(values) / np.maximum(known, 1)
    return {
        name: {
            option: float(means[row, column])
            for column, option in enumerate(names)
            if known[row, column]
        }
        for row, name in enumerate(records)
    }
