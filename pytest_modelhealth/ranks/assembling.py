"""One observation of what several ranks saw, the same on each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from pytest_modelhealth.ranks.evidence import Key, Seen
from pytest_modelhealth.ranks.group import RankGroup
from pytest_modelhealth.ranks.parts import FLOWING, LOSS_INPUT, LOSS_TARGET, Part, parts_of
from pytest_modelhealth.report import ROLES, LayerRecord, Observation, ZeroSlices
from pytest_modelhealth.report.merging import merged
from pytest_modelhealth.report.ranks import Assembly, Dimension, Group, How, Ranks, together
from pytest_modelhealth.statistics import (
    LOWEST_EXPONENT,
    ExponentCounts,
    TensorStatistics,
    UnitStatistics,
)


@dataclass(frozen=True)
class Joined:
    """One tensor of all ranks.

    Args:
        seen: its statistics.
        assembly: how it became one.
    """

    seen: TensorStatistics
    assembly: Assembly


def assembled(group: RankGroup, ranks: Sequence[Seen]) -> Observation:
    """Return what all ranks saw of one step, put together from what each saw.

    Counts, extremes and histograms are exact, moments right to rounding, units that ranks share
    out stand in a row. Gradients of activations are divided by the number of ranks that share the
    batch out, as their losses are averaged: so all numbers are those of one process that has the
    whole batch. Each rank puts it together in the order of the ranks: so all have the same, to the
    last bit.

    Args:
        group: the ranks.
        ranks: what each saw, in order.
    """
    tensors = _tensors(parts_of(ranks), group.ranks)
    of_layers: dict[str, dict[str, dict[str, Joined]]] = {}
    for (layer, role, name), one in tensors.items():
        of_layers.setdefault(layer, {}).setdefault(role, {})[name] = one
    first = next(one for one in ranks if one.is_first).observation
    joint = merged(_each_sample_once(ranks), over="ranks")
    losses = [(one.observation.loss, one.rank) for one in ranks if one.is_first]
    finite = [(loss, rank) for loss, rank in losses if loss is not None and not math.isnan(loss)]
    largest = max(finite, key=lambda pair: (pair[0], -pair[1]), default=None)
    return replace(
        joint,
        layers={n: _filled(r, of_layers.get(n, {}), ranks) for n, r in joint.layers.items()},
        given=tuple(
            replace(given, shape=(joint.samples, *given.shape[1:]))
            if given.shape[:1] == (first.samples,)
            else given
            for given in first.given
        ),
        loss_calls=tuple(
            replace(
                call, input=_seen(tensors, LOSS_INPUT, n), target=_seen(tensors, LOSS_TARGET, n)
            )
            for n, call in enumerate(joint.loss_calls)
        ),
        ranks=Ranks(
            group.ranks,
            group.place.engine,
            _groups(ranks),
            losses=() if largest is None else (min(finite), largest),
        ),
    )


def _each_sample_once(ranks: Sequence[Seen]) -> list[Observation]:
    """Return what each saw: losses and samples of the first rank that has them, errors likewise.

    An error that only some have is told with the first of these.
    """
    found = []
    known: set[str] = set()
    everywhere = frozenset.intersection(*(frozenset(one.observation.errors) for one in ranks))
    for one in ranks:
        own = one.observation
        errors = (
            e if e in everywhere else f"rank {one.rank}: {e}" for e in own.errors if e not in known
        )
        own = replace(own, errors=tuple(errors))
        known.update(one.observation.errors)
        if not one.is_first:
            nothing: dict[str, Any] = dict.fromkeys(("value", "log_normalizer", "targets"))
            calls = tuple(replace(call, **nothing) for call in own.loss_calls)
            own = replace(own, samples=0, loss=None, loss_calls=calls)
        found.append(own)
    return found


def _tensors(parts: Sequence[Mapping[Key, Part]], ranks: Sequence[int]) -> dict[Key, Joined]:
    """Return each tensor of all ranks; one that two layers share is put together once."""
    known: dict[tuple[object, ...], Joined] = {}
    found = {}
    for key in dict.fromkeys(key for mine in parts for key in mine):
        having = {rank: mine[key] for rank, mine in zip(ranks, parts, strict=True) if key in mine}
        shared = tuple(having.items())
        if shared not in known:
            known[shared] = joined(having)
        found[key] = known[shared]
    return found


def _filled(
    record: LayerRecord, tensors: Mapping[str, Mapping[str, Joined]], ranks: Sequence[Seen]
) -> LayerRecord:
    """Return the record with the statistics of all ranks, by role and own name."""
    seen = {role: {n: one.seen for n, one in own.items()} for role, own in tensors.items()}
    layers = (one.observation.layers for one in ranks)
    each = [own[record.name] for own in layers if record.name in own]
    roles: dict[str, Any] = {
        role: own[""] if role in FLOWING else own for role, own in seen.items() if role in ROLES
    }
    return replace(
        record,
        **roles,
        zero_slices={
            name: _zero_slices(name, gradient.shape, each)
            for name, gradient in seen.get("parameter_gradients", {}).items()
            if any(name in mine.zero_slices for mine in each)
        },
        assembled={
            role: together((one.assembly, one.seen.abs_max) for one in tensors[role].values())
            for role in roles
        },
    )


def _zero_slices(name: str, shape: tuple[int, ...], records: Sequence[LayerRecord]) -> ZeroSlices:
    """Return the rows and columns of a parameter that are zero wherever a rank has a part."""
    zero = [set(range(size)) for size in (*shape, 0, 0)[:2]]
    for record in records:
        seen = record.parameter_gradients.get(name)
        if seen is None or not seen.count:
            continue
        own = record.zero_slices.get(name)
        placement = record.placements.get(f"parameter_gradients.{name}")
        starts = (*(() if placement is None else placement.offset), 0, 0)
        held = ((), ()) if own is None else (own.rows, own.columns)
        for rest, start, size, indices in zip(
            zero, starts, (*seen.shape, 0, 0), held, strict=False
        ):
            rest -= {start + index for index in range(size) if index not in indices}
    return ZeroSlices(frozenset(zero[0]), frozenset(zero[1]))


def _groups(ranks: Sequence[Seen]) -> tuple[Group, ...]:
    """Return who shares what out."""
    dimensions: dict[Dimension, list[tuple[int, ...]]] = {
        "data": [one.place.data for one in ranks],
        "tensor": [one.place.tensor for one in ranks],
    }
    return tuple(
        Group(dimension, tuple(dict.fromkeys(groups)))
        for dimension, groups in dimensions.items()
        if any(len(group) > 1 for group in groups)
    )


def _seen(tensors: Mapping[Key, Joined], role: str, call: int) -> TensorStatistics | None:
    one = tensors.get(("", role, str(call)))
    return None if one is None else one.seen


def joined(parts: Mapping[int, Part]) -> Joined:
    """Return the tensor of which several ranks have parts, merged in their order.

    Args:
        parts: by rank, in order, at least one.
    """
    first: dict[object, int] = {}
    for rank, part in parts.items():
        first.setdefault(part.key, rank)
    counting = {rank: parts[rank] for rank in first.values()}
    how: How = "replicas" if len(counting) == 1 else "pieces"
    if len(parts) == 1:
        how = "one rank"
    elif any(part.units is not None for part in parts.values()):
        how = "units"
    each = {rank: _scaled(part.seen, part.scale) for rank, part in counting.items()}
    sizes = {rank: seen.abs_max for rank, seen in each.items() if seen.finite_count}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    abs_max = math.nan if largest is None else sizes[largest]
    placed = [_placed(each[rank], part, abs_max) for rank, part in counting.items()]
    whole = reduce(TensorStatistics.merge, [one for one in placed if one.count] or placed[:1])
    shapes = [part.full_shape for part in counting.values()]
    shape = shapes[0]
    rows = [part.rows for part in counting.values() if part.rows is not None]
    if len(rows) == len(counting) and len({shape[1:] for shape in shapes}) == 1:
        shape = (sum(rows), *shape[1:])
    ill = tuple(rank for rank, seen in each.items() if seen.nonfinite_count)
    return Joined(replace(whole, shape=shape), Assembly(how, len(parts), ill, largest))


def _placed(seen: TensorStatistics, part: Part, abs_max: float) -> TensorStatistics:
    """Return the statistics with units and the first NaN where they are in the whole.

    Other units than these are neither alive nor seen. Units live by the largest magnitude of all
    ranks where one tensor was seen.
    """
    first, units = seen.first_nonfinite, seen.units
    if first is not None and len(first) == len(part.offset):
        first = tuple(a + b for a, b in zip(first, part.offset, strict=True))
    if units is None or not seen.count:
        return replace(seen, first_nonfinite=first)
    alive = units.alive
    if math.prod(seen.shape) == seen.count:
        alive = UnitStatistics.of_extremes(units.minimum, units.maximum, 1, abs_max).alive
    begin, size = part.units or (0, len(alive))
    rows = (np.zeros(size, np.bool_), np.full(size, np.inf), np.full(size, -np.inf))
    for row, held in zip(rows, (alive, units.minimum, units.maximum), strict=True):
        row[begin : begin + len(alive)] = held
    samples = units.observations if part.counts_samples else 0
    return replace(seen, units=UnitStatistics(*rows, samples), first_nonfinite=first)


def _scaled(seen: TensorStatistics, by: int) -> TensorStatistics:
    """Return the statistics of all values divided by a number.

    Exponents move by whole steps; the histogram counts as sampled where that is not exact.
    """
    if by == 1:
        return seen
    units, rows = seen.units, seen.exponents
    if units is not None:
        units = replace(units, minimum=units.minimum / by, maximum=units.maximum / by)
    lowest, counts = rows.lowest - round(math.log2(by)), rows.counts
    below = min(max(0, LOWEST_EXPONENT - lowest), len(counts) - 1)
    if below > 0:  # what is smaller than all numbers stands with the smallest
        counts = np.concatenate(
            (counts[: below + 1].sum(axis=0, keepdims=True), counts[below + 1 :])
        )
        lowest += below
    return replace(
        seen,
        mean=seen.mean / by,
        std=seen.std / by,
        min=seen.min / by,
        max=seen.max / by,
        exponents=ExponentCounts.of_rows(lowest, counts) if len(counts) else rows,
        units=units,
        histogram_sampled=seen.histogram_sampled or by & (by - 1) != 0,
    )
