"""Room between the values of a model and the ends of a dtype: the one in use, or one planned."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import largest_at, leaves
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.statistics import TensorStatistics

HEADROOM = CHECKS["headroom"]


_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028e38}
_SMALLEST_NORMAL, _SMALLEST = -14, -24
"""Exponents of float16. What float32 and bfloat16 cannot hold is `grad_norm`'s."""
_MASK = 0.9
_FEWEST_VALUES = 16
_PEAKED = 4.0
"""Where the root mean square of the non-zero values is more times the smallest normal number, few
large values carry a gradient (one through a smooth maximum), and nothing that counts is lost. Of
normally distributed values with half of them below it, it is 1.5 times that number."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the first layer of each role that comes too near an end of its dtype, or the last."""
    planned, inner = settings["planned_dtype"].value, leaves(observation)
    for role in ("activations", "parameters", "gradients", "parameter_gradients"):
        large: list[Finding] = []
        small: list[Finding] = []
        for record in inner:
            for tensor, statistics in record.tensors(role).items():
                if statistics.count - statistics.zero_count < _FEWEST_VALUES:
                    continue
                for dtype in sorted({statistics.dtype, str(planned)} & _LARGEST.keys()):
                    large += _overflow(record, role, tensor, statistics, dtype, settings)
                    if dtype == "float16" and role != "activations":
                        small += _underflow(record, role, tensor, statistics, settings)
        yield from large[:1]
        yield from small[-1:]


def _overflow(
    record: LayerRecord,
    role: str,
    tensor: str,
    statistics: TensorStatistics,
    dtype: str,
    settings: Settings,
) -> Iterator[Finding]:
    # leaving out the lowest number of a dtype, which masks use
    is_mask = statistics.min <= -_MASK * _LARGEST.get(statistics.dtype, _LARGEST["float32"])
    reached = statistics.max if is_mask else statistics.abs_max
    used = reached / _LARGEST[dtype]
    limit = settings.exceeded("max_range_used", record.name, used)
    if limit is not None and not statistics.nonfinite_count:
        yield HEADROOM.violation(
            record,
            f"its {role.replace('_', ' ')} reach {reached:.4g}, {used:.3g} times the largest "
            f"number of {dtype} ({_LARGEST[dtype]:.5g})",
            value=used,
            limit=limit,
            role=role,
            tensor=tensor,
            cause="the next batch may overflow: scale down, normalise, or use bfloat16 or float32",
            details=largest_at(record, role) if reached == statistics.abs_max else (),
        )


def _underflow(
    record: LayerRecord, role: str, tensor: str, statistics: TensorStatistics, settings: Settings
) -> Iterator[Finding]:
    """Yield values most of which lie below the normal numbers of float16."""
    exponents, bound = statistics.exponents, 2.0**_SMALLEST_NORMAL
    counts = exponents.counts.sum(axis=1)  # of non-zero values by powers of two, from `lowest`
    lost = counts[: max(0, _SMALLEST_NORMAL - exponents.lowest)].sum() / max(1, counts.sum())
    limit = settings.exceeded("max_subnormal_fraction", record.name, float(lost))
    # gradients divided by a loss scale: float16 itself holds none so small
    is_unscaled = statistics.dtype == "float16" and exponents.lowest < _SMALLEST
    if limit is None or is_unscaled:
        return  # also where no value is finite
    cause = "weights this small lose their precision: keep them in float32 or bfloat16"
    if "gradients" in role:
        typical = statistics.norm / math.sqrt(statistics.finite_count - statistics.zero_count)
        if typical > _PEAKED * bound:
            return
        cause = "gradients underflow without a loss scale: use torch.amp.GradScaler, or bfloat16"
    message = (
        f"{lost:.0%} of its non-zero {role.replace('_', ' ')} lie below {bound:.2g}, the smallest "
        "normal number of float16"
    )
    yield HEADROOM.violation(
        record, message, value=float(lost), limit=limit, role=role, tensor=tensor, cause=cause
    )
