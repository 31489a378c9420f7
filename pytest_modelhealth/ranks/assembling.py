"""One observation of what several ranks saw, the same on each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from pytest_modelhealth.ranks.evidence import Seen, of_statistics
from pytest_modelhealth.ranks.layout import Place
from pytest_modelhealth.report import ROLES, LayerRecord, LossCall, Observation
from pytest_modelhealth.report.merging import merged
from pytest_modelhealth.report.parts import Placement, Ranks
from pytest_modelhealth.statistics import LOWEST_EXPONENT, ExponentCounts, TensorStatistics

_OWNED = ("parameters", "parameter_gradients", "buffers")
"""Roles of what a layer owns; of the others each rank has its own samples."""


class Part(NamedTuple):
    """What a rank has of a tensor: its statistics, and where the part lies if that is known."""

    of: Seen
    seen: TensorStatistics
    placement: Placement | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, but for the samples of other ranks."""
        return self.seen.shape if self.placement is None else self.placement.shape


def assembled(place: Place, ranks: Sequence[Seen]) -> Observation:
    """Return what all ranks saw of one step, put together from what each saw.

    Counts, extremes and histograms are exact, moments right to rounding. Gradients of activations
    are divided by the number of ranks that share the batch out, as their losses are averaged: so
    all numbers are those of one process that has the whole batch. Each rank puts it together in the
    order of the ranks: so all have the same, to the last bit.
    """
    joint = merged([_counted_once(one) for one in ranks], over="ranks")
    first = ranks[0].observation
    return replace(
        joint,
        layers={name: _filled(record, ranks) for name, record in joint.layers.items()},
        given=tuple(
            replace(given, shape=(joint.samples, *given.shape[1:]))
            if given.shape[:1] == (first.samples,)
            else given
            for given in first.given
        ),
        loss_calls=tuple(
            _loss_call(call, [(one, one.observation.loss_calls[n : n + 1]) for one in ranks])
            for n, call in enumerate(joint.loss_calls)
        ),
        ranks=Ranks(place.ranks, place.engine),
    )


def _counted_once(one: Seen) -> Observation:
    """Return what a rank saw: losses and samples are those of the first rank that has them."""
    own = one.observation
    if one.is_first:
        return own
    nothing: dict[str, Any] = dict.fromkeys(("value", "log_normalizer", "targets"))
    calls = tuple(replace(call, **nothing) for call in own.loss_calls)
    return replace(own, samples=0, loss=None, loss_calls=calls)


def _filled(record: LayerRecord, ranks: Sequence[Seen]) -> LayerRecord:
    """Return the record with the statistics of all ranks, by role and own name."""
    roles: dict[str, Any] = {}
    ill: dict[str, tuple[int, ...]] = {}
    slices = dict(record.zero_slices)
    losses = [(one.rank, one.observation.loss) for one in ranks if not record.name]
    unknown = tuple(r for r, loss in losses if loss is not None and not math.isfinite(loss))
    if unknown:
        ill["loss"] = unknown
    records = [(one, one.observation.layers.get(record.name)) for one in ranks]
    for role in ROLES:
        parts: dict[str, list[Part]] = {}
        for one, own in records:
            if own is None:
                continue
            for name, seen in own.tensors(role).items():
                placement = own.placements.get(f"{role}.{name}" if name else role)
                parts.setdefault(name, []).append(Part(one, seen, placement))
        whole = {name: _joined(role, each) for name, each in parts.items()}
        if whole:
            roles[role] = whole if role in _OWNED else whole[""]
        sick = {p.of.rank for each in parts.values() for p in each if p.seen.nonfinite_count}
        if sick:
            ill[role] = tuple(sorted(sick))
        for name, each in parts.items():
            if role == "parameter_gradients" and each[0].placement and each[0].placement.is_cut:
                slices.pop(name, None)  # of this rank's part alone
    return replace(record, **roles, zero_slices=slices, ill_ranks=ill)


def _loss_call(call: LossCall, each: Sequence[tuple[Seen, Sequence[LossCall]]]) -> LossCall:
    tensors: dict[str, Any] = {}
    for name in ("input", "target"):
        seen = [(one, getattr(own, name)) for one, calls in each for own in calls]
        parts = [Part(one, statistics, None) for one, statistics in seen if statistics is not None]
        tensors[name] = _joined("loss", parts) if parts else None
    return replace(call, **tensors)


def _counting(role: str, parts: Iterable[Part]) -> list[Part]:
    """Return those that count: of replicas the first, or the first with a NaN or infinity.

    What a layer owns is the same on all ranks, but for what a placement cuts. What flows is another
    on ranks that see other samples; on those that see the same, statistics that are equal to the
    last bit are of replicas where no placement tells, all others of pieces.
    """
    counting: dict[object, Part] = {}
    for part in parts:
        key: object = () if part.placement is None else part.placement.offset
        if role not in _OWNED:
            key = part.of.place.tensor, key if part.placement else of_statistics(part.seen)
        known = counting.setdefault(key, part)
        if part.seen.nonfinite_count and not known.seen.nonfinite_count:
            counting[key] = part
    return list(counting.values())


def _joined(role: str, parts: Sequence[Part]) -> TensorStatistics:
    """Return the tensor of which several ranks have parts, merged in their order."""
    counting = _counting(role, parts)
    groups = {part.of.place.tensor: part.of.observation.samples for part in counting}
    # units that lie on several ranks stand in no common row
    have_units = role in _OWNED or len(counting) == len(groups)
    shares = len(parts[0].of.place.data) if role == "gradients" else 1
    each = []
    for part in counting:
        seen = _divided(part.seen, shares)
        if part.placement is not None and part.placement.is_cut:
            seen = replace(seen, first_nonfinite=None)  # it is counted in the part
        each.append(seen if have_units else replace(seen, units=None))
    whole = reduce(TensorStatistics.merge, [one for one in each if one.count] or each[:1])
    shape = counting[0].shape
    if role not in _OWNED and shape[:1] == (counting[0].of.observation.samples,):
        shape = (sum(groups.values()), *shape[1:])
    return replace(whole, shape=shape)


def _divided(seen: TensorStatistics, by: int) -> TensorStatistics:
    """Return the statistics of all values divided by a number.

    Exponents move by whole steps; the histogram counts as sampled where that is not exact.
    """
    if by == 1:
        return seen
    rows, units = seen.exponents, seen.units
    if units is not None:
        units = replace(units, minimum=units.minimum / by, maximum=units.maximum / by)
    lowest = max(rows.lowest - round(math.log2(by)), LOWEST_EXPONENT)
    return replace(
        seen,
        mean=seen.mean / by,
        std=seen.std / by,
        min=seen.min / by,
        max=seen.max / by,
        units=units,
        exponents=ExponentCounts.of_rows(lowest, rows.counts) if len(rows.counts) else rows,
        histogram_sampled=seen.histogram_sampled or by & (by - 1) != 0,
    )
