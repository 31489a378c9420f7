"""Room between the values of a model and the ends of a dtype: the one in use, or one planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import largest_at, leaves
from pytest_modelhealth.report import LayerRecord, Observation, Violation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.statistics import TensorStatistics

HEADROOM = CHECKS["headroom"]


class _Range(NamedTuple):
    """The ends of a dtype: its largest value, and the exponents of its smallest ones."""

    largest: float
    smallest_normal: int
    smallest: int


_RANGES = {
    "float16": _Range(65504.0, -14, -24),
    "bfloat16": _Range(3.39e38, -126, -133),
    "float32": _Range(3.4028e38, -126, -149),
    "float8_e4m3fn": _Range(448.0, -6, -9),
    "float8_e5m2": _Range(57344.0, -14, -16),
}
_PLANNED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_MASK = 0.9
_FEWEST_VALUES = 16
_PEAKED = 4.0
"""Where the root mean square of the non-zero values is more times the smallest normal number, few
large values carry a gradient (one through a smooth maximum), and nothing that counts is lost. Of
normally distributed values with half of them below it, it is 1.5 times that number."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the first layer of each role that comes too near an end."""
    planned = settings["planned_dtype"].value
    inner = leaves(observation)
    for role in ("activations", "parameters", "gradients", "parameter_gradients"):
        judged = list(_tensors(inner, role, planned))
        yield from list(_overflow(role, judged, settings))[:1]
        if role != "activations":
            yield from list(_underflow(role, judged, settings))[-1:]


_Tensor: TypeAlias = "tuple[LayerRecord, str, TensorStatistics, str]"


def _tensors(records: list[LayerRecord], role: str, planned: str | None) -> Iterator[_Tensor]:
    """Yield each tensor of a role with its layer, its name and each dtype it is judged by."""
    for record in records:
        for tensor, statistics in record.tensors(role).items():
            if statistics.count - statistics.zero_count >= _FEWEST_VALUES:
                for dtype in dict.fromkeys((statistics.dtype, planned or statistics.dtype)):
                    if dtype in _RANGES:
                        yield record, tensor, statistics, dtype


def _overflow(role: str, judged: list[_Tensor], settings: Settings) -> Iterator[Violation]:
    for record, tensor, statistics, dtype in judged:
        if statistics.nonfinite_count or dtype.startswith("float8"):
            continue
        limit, largest = settings.limit("max_range_used", record.name), _RANGES[dtype].largest
        # leaving out the lowest number of a dtype, which masks use
        lowest = _RANGES.get(statistics.dtype, _RANGES["float32"]).largest
        is_mask = statistics.min <= -_MASK * lowest
        reached = statistics.max if is_mask else statistics.abs_max
        used = reached / largest
        if used > limit.value:
            message = (
                f"its {role.replace('_', ' ')} reach {reached:.4g}, {used:.3g} times the largest "
                f"number of {dtype} ({largest:.5g})"
            )
            cause = "the next batch may overflow: scale down, normalise, or use bfloat16 or float32"
            yield HEADROOM.violation(
                record,
                message,
                value=used,
                limit=limit,
                role=role,
                tensor=tensor,
                cause=cause,
                details=largest_at(record, role) if reached == statistics.abs_max else (),
            )


def _underflow(role: str, judged: list[_Tensor], settings: Settings) -> Iterator[Violation]:
    """Yield layers whose small values are lost; those of float32 and bfloat16 are `grad_norm`'s."""
    for record, tensor, statistics, dtype in judged:
        exponents = statistics.exponents
        is_half = statistics.dtype == "float16" and len(exponents.counts) > 0
        # gradients divided by a loss scale: float16 itself holds none so small
        is_unscaled = is_half and exponents.lowest < _RANGES["float16"].smallest
        if _RANGES[dtype].smallest_normal <= -126 or is_unscaled:
            continue
        limit = settings.limit("max_subnormal_fraction", record.name)
        bound, scaled = 2.0 ** _RANGES[dtype].smallest_normal, ""
        if dtype.startswith("float8"):
            bound *= statistics.abs_max / _RANGES[dtype].largest
            scaled = " with a scale for the tensor"
        counts = exponents.counts.sum(axis=1)  # of non-zero values by powers of two, from `lowest`
        ends = (2.0 ** (exponents.lowest + row + 1) for row in range(len(counts)))
        below = sum(int(n) for n, end in zip(counts, ends, strict=True) if end <= bound)
        lost = below / max(1, int(counts.sum()))
        if lost <= limit.value:
            continue  # also where no value is finite
        cause = "weights this small lose their precision: keep them in float32 or bfloat16"
        if "gradients" in role:
            typical = statistics.norm / math.sqrt(statistics.finite_count - statistics.zero_count)
            if typical > _PEAKED * bound:
                continue
            cause = (
                "gradients underflow without a loss scale: use torch.amp.GradScaler, or bfloat16"
            )
        message = (
            f"{lost:.0%} of its non-zero {role.replace('_', ' ')} lie below {bound:.2g}, the "
            f"smallest normal number of {dtype}{scaled}"
        )
        yield HEADROOM.violation(
            record, message, value=lost, limit=limit, role=role, tensor=tensor, cause=cause
        )
