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
from pytest_modelhealth.report import ROLES, UNCALLED, LayerRecord, Observation, ZeroSlices
from pytest_modelhealth.report.observation import (
    FULLNESS,
    MEASURED,
    mean_of,
    merged_targets,
)
from pytest_modelhealth.report.ranks import Assembly, Dimension, Group, How, Ranks
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
    names = dict.fromkeys(name for one in ranks for name in one.observation.layers)
    merged = (_merged(_records(name, ranks)) for name in names)
    of_layer: dict[str, dict[tuple[str, str], Joined]] = {name: {} for name in names}
    for (layer, role, name), tensor in tensors.items():
        if role in ROLES:
            of_layer[layer][role, name] = tensor
    layers = {
        record.name: _filled(record, of_layer[record.name], ranks)
        for record in sorted(merged, key=lambda record: record.status in UNCALLED)
    }
    return _observation(group, ranks, tensors, layers)


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


_JOINED: dict[str, Any] = {
    **{role: None if role in FLOWING else {} for role in ROLES},
    "zero_slices": {},
    "largest": {},
    "nonfinite": {},
    "placements": {},
    "assembled": {},
}
"""What of a layer is put together by tensor."""


def _merged(records: Sequence[LayerRecord]) -> LayerRecord:
    """Return what all ranks saw of a layer, but for the statistics."""
    fullest = sorted(records, key=lambda record: FULLNESS.index(record.status))
    whole = reduce(LayerRecord.merge, (replace(record, **_JOINED) for record in fullest))
    means = {
        r.activations.mean
        for r in records
        if r.equal_samples and r.activations is not None and r.activations.finite_count
    }
    calls: dict[str, int] = {}
    for record in records:
        for role, call in record.nonfinite_calls.items():
            calls[role] = min(call, calls.get(role, call))
    averages = {}
    for name in sorted({name for r in records for name in r.options if name in MEASURED}):
        values = (record.options.get(name) for record in records)
        averages[name] = mean_of(float(v) for v in values if isinstance(v, float | int))
    return replace(
        whole,
        calls=max(record.calls for record in records),
        nonfinite_calls=calls,
        unreached=frozenset.intersection(*(record.unreached for record in records)),
        read_in_vain=frozenset.intersection(*(record.read_in_vain for record in records)),
        frozen=frozenset.intersection(*(record.frozen for record in records)),
        equal_samples=whole.equal_samples and len(means) < 2,
        options={**whole.options, **averages},
    )


def _filled(
    record: LayerRecord, tensors: Mapping[tuple[str, str], Joined], ranks: Sequence[Seen]
) -> LayerRecord:
    """Return the record with the statistics of all ranks."""
    roles: dict[str, Any] = {role: None if role in FLOWING else {} for role in ROLES}
    assembled: dict[str, Assembly] = {}
    sizes: dict[str, float] = {}
    for (role, name), one in tensors.items():
        if role in FLOWING:
            roles[role] = one.seen
        else:
            roles[role][name] = one.seen
        before, size = assembled.get(role), one.seen.abs_max
        is_larger = not size <= sizes.get(role, -1.0)
        assembled[role] = one.assembly if before is None else before.merge(one.assembly, is_larger)
        sizes[role] = size if is_larger else sizes[role]
    each = _records(record.name, ranks)
    slices = {
        name: _zero_slices(name, seen.shape, each)
        for name, seen in roles["parameter_gradients"].items()
        if any(name in mine.zero_slices for mine in each)
    }
    return replace(record, **roles, zero_slices=slices, assembled=assembled)


def _records(layer: str, ranks: Sequence[Seen]) -> list[LayerRecord]:
    layers = (one.observation.layers for one in ranks)
    return [each[layer] for each in layers if layer in each]


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


def _observation(
    group: RankGroup,
    ranks: Sequence[Seen],
    tensors: Mapping[Key, Joined],
    layers: dict[str, LayerRecord],
) -> Observation:
    """Return all but the layers, too, as one process that has the whole batch would."""
    every = [one.observation for one in ranks]
    firsts = [one for one in ranks if one.is_first]
    shares = [one.observation for one in firsts]
    losses = [(o.observation.loss, o.rank) for o in firsts if o.observation.loss is not None]
    merged = reduce(Observation.merge, (replace(seen, layers={}, flow=None) for seen in every))
    path = every[0].loss_path
    if path is not None:
        widened = (seen.loss_path.widened for seen in every if seen.loss_path is not None)
        path = replace(path, widened=next(filter(None, widened), None))
    samples = sum(seen.samples for seen in shares)
    finite = [pair for pair in losses if not math.isnan(pair[0])]
    largest = max(finite, key=lambda pair: (pair[0], -pair[1]), default=None)
    return replace(
        every[0],
        layers=layers,
        loss=mean_of(loss for loss, _ in losses),
        backward=merged.backward,
        no_gradients=merged.no_gradients,
        samples=samples,
        sample_deviation=merged.sample_deviation,
        notes=merged.notes,
        errors=_errors(ranks),
        given=tuple(
            replace(given, shape=(samples, *given.shape[1:]))
            if given.shape[:1] == (shares[0].samples,)
            else given
            for given in shares[0].given
        ),
        loss_calls=tuple(
            replace(
                call,
                input=_seen(tensors, ("", LOSS_INPUT, str(number))),
                target=_seen(tensors, ("", LOSS_TARGET, str(number))),
                value=mean_of(one.value for one in calls),
                log_normalizer=mean_of(one.log_normalizer for one in calls),
                targets=merged_targets(one.targets for one in calls),
            )
            for number, call in enumerate(every[0].loss_calls)
            for calls in [[seen.loss_calls[number] for seen in shares if seen.loss_calls[number:]]]
        ),
        loss_path=path,
        flow=next((seen.flow for seen in every if seen.flow is not None), None),
        own_functions=merged.own_functions,
        ranks=Ranks(
            group.ranks,
            group.place.engine,
            _groups(ranks),
            losses=() if largest is None else (min(finite), largest),
        ),
    )


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


def _errors(ranks: Sequence[Seen]) -> tuple[str, ...]:
    """Return the errors of all ranks; what only some have with the first of those."""
    having: dict[str, list[int]] = {}
    for one in ranks:
        for error in dict.fromkeys(one.observation.errors):
            having.setdefault(error, []).append(one.rank)
    return tuple(
        error if len(some) == len(ranks) else f"rank {some[0]}: {error}"
        for error, some in having.items()
    )


def _seen(tensors: Mapping[Key, Joined], key: Key) -> TensorStatistics | None:
    return tensors[key].seen if key in tensors else None


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
