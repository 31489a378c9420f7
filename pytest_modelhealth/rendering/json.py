"""Everything in the report as plain data and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from pytest_modelhealth.rendering.places import called_at, class_place, defined_at
from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import HealthReport, Violation
from pytest_modelhealth.statistics import TensorStatistics

FORMAT_VERSION = 1
"""Raised when a key changes its name or meaning."""


def render(report: HealthReport) -> str:
    """Return `to_dict` as strict JSON (RFC 8259) in ASCII, ending in a newline."""
    return json.dumps(to_dict(report), indent=1, allow_nan=False) + "\n"


def to_dict(report: HealthReport) -> dict[str, Any]:
    """Return the report as dictionaries, lists, numbers, strings and ``None``.

    Numbers are exact. NaN and infinity, which JSON cannot write, are ``None``: how many there were
    stands in ``nan_count`` and the two infinity counts. Of the units, the dead ones are listed.
    """
    judgement = report._judgement

    def found(violation: Violation) -> dict[str, Any]:
        layer = violation.layer
        places = {"defined_at": defined_at(report, layer), "called_at": called_at(report, layer)}
        return {**plain(violation), **places}

    return {
        "format_version": FORMAT_VERSION,
        "verdict": judgement.verdict.value,
        **plain(report.observation),
        "violations": [found(violation) for violation in judgement.violations],
        "warned": [found(violation) for violation in judgement.warned],
        "broken_checks": plain(judgement.broken),
        "inconclusive": plain(judgement.inconclusive),
        "waived": [{"violation": plain(one), "waiver": plain(by)} for one, by in judgement.waived],
        "unused_waivers": plain(judgement.unused_waivers),
        "settings": plain(dict(report._settings)),
        "layers": [
            {
                **plain(record),
                "source": called_at(report, record.name),
                "defined_at": class_place(record),
            }
            for record in report
        ],
    }


def _statistics(seen: TensorStatistics) -> dict[str, Any]:
    units, exponents = seen.units, seen.exponents
    names = ("shape", "dtype", "device", *STATISTICS, "histogram_sampled", "first_nonfinite")
    return {
        **{name: plain(getattr(seen, name)) for name in names},
        "exponents": {"lowest": exponents.lowest, "counts": exponents.counts.tolist()},
        "units": units
        and {
            "count": len(units.alive),
            "dead": np.flatnonzero(~units.alive).tolist(),
            "observations": units.observations,
        },
    }


def plain(value: Any) -> Any:
    """Return `value` in dictionaries and lists, with ``None`` for floats that are not finite.

    A record has a key for each field, but for those whose metadata says ``"json": False``.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, TensorStatistics):
        return _statistics(value)
    if is_dataclass(value):
        kept = (one.name for one in fields(value) if one.metadata.get("json", True))
        return {name: plain(getattr(value, name)) for name in kept}
    if hasattr(value, "_asdict"):  # a named tuple, as limits are
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
