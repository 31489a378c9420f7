"""What each rank holds of each tensor, and whether it counts: by role and placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_modelhealth.ranks.evidence import Key, Seen
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from pytest_modelhealth.report.ranks import Placement
from pytest_modelhealth.statistics import TensorStatistics

FLOWING = ("inputs", "activations", "gradients")
"""Roles of what goes through a layer; the others are of what it owns."""

LOSS_INPUT, LOSS_TARGET = "loss input", "loss target"

Units = tuple[int, int]
"""Where the units of a rank begin in the whole, and how many the whole has."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one tensor.

    Args:
        seen: its statistics.
        key: which part: ranks with equal keys hold replicas, of which the first counts.
        scale: what its values are divided by.
        whole: shape of the whole tensor; ``None`` where it is this one's, or grows by its samples.
        offset: where this one begins in the whole.
        units: where its units lie; ``None`` where each rank has all of them.
        counts_samples: whether its samples of units are others than those of its neighbours.
        rows: by how many rows the whole grows, where it is one of samples.
    """

    seen: TensorStatistics
    key: tuple[object, ...] = ()
    scale: int = 1
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()
    units: Units | None = None
    counts_samples: bool = True
    rows: int | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, as far as its rank knows it."""
        return self.whole or self.seen.shape


def parts_of(ranks: Sequence[Seen]) -> list[dict[Key, Part]]:
    """Return what each rank has of each tensor that it kept statistics of, in order."""
    found = [
        {key: _part(one, key, seen) for key, seen in _tensors(one.observation)} for one in ranks
    ]
    if len(ranks[0].place.tensor) > 1:
        widths = [_widths(one, parts) for one, parts in zip(ranks, found, strict=True)]
        for key in dict.fromkeys(key for parts in found for key in parts):
            if key[1] in (*FLOWING, LOSS_INPUT, LOSS_TARGET):
                _settle(key, ranks, widths, found)
    return found


def _tensors(observation: Observation) -> Iterator[tuple[Key, TensorStatistics]]:
    for name, record in observation.layers.items():
        for role in ROLES:
            for own, statistics in record.tensors(role).items():
                yield (name, role, own), statistics
    for number, call in enumerate(observation.loss_calls):
        for role, seen in ((LOSS_INPUT, call.input), (LOSS_TARGET, call.target)):
            if seen is not None:
                yield ("", role, str(number)), seen


def _part(one: Seen, key: Key, seen: TensorStatistics) -> Part:
    """Return what one rank knows of its part; each has another of what goes through a layer."""
    layer, role, own = key
    record = one.observation.layers[layer] if role in ROLES else None
    placement = None
    if record is not None:
        placement = record.placements.get(f"{role}.{own}" if own else role)
    part = Part(seen)
    if placement is not None:
        offset = () if placement.strided else placement.offset
        part = Part(seen, placement.offset, whole=placement.shape, offset=offset)
    if role in ROLES and role not in FLOWING:
        return part
    units = None if record is None else _units(one, record, role, placement, seen)
    is_of_samples = part.full_shape[:1] == (one.observation.samples,)
    return replace(
        part,
        key=(one.rank,) if placement is None else (one.place.tensor, *part.key),
        scale=len(one.place.data) if role == "gradients" else 1,
        units=units,
        counts_samples=one.is_first or (units is None and seen.shape != part.whole),
        rows=(one.observation.samples if one.is_first else 0) if is_of_samples else None,
    )


def _cut_dimensions(placement: Placement) -> list[int]:
    """Return the dimensions of a tensor that a mesh cuts it along."""
    cuts = [kind for kind in placement.placements if kind.startswith("S")]
    return [int(kind[2:-1]) % max(len(placement.shape), 1) for kind in cuts]


def _units(
    one: Seen, record: LayerRecord, role: str, placement: Placement | None, seen: TensorStatistics
) -> Units | None:
    """Return where the units of a tensor lie that is cut along them.

    A placement says it itself; so does the weight of a linear layer that is wider than what the
    layer returns.
    """
    if len(one.place.tensor) == 1 or seen.units is None:
        return None
    size = len(seen.units.alive)
    if placement is None:
        weight = record.placements.get("parameters.weight")
        if role == "inputs" or weight is None or not weight.offset:
            return None
        begin, whole = weight.offset[0], weight.shape[0]
        is_cut = 0 in _cut_dimensions(weight) and size < whole and begin + size <= whole
        return (begin, whole) if is_cut else None
    is_whole = seen.shape == placement.shape  # a `DTensor` says the shape of the whole
    if is_whole and size in seen.shape:
        return None
    for dimension in _cut_dimensions(placement) if placement.offset else ():
        is_of_units = is_whole or seen.shape[dimension : dimension + 1] == (size,)
        if is_of_units and placement.shape[dimension] > size:
            return placement.offset[dimension], placement.shape[dimension]
    return None


def _widths(one: Seen, parts: dict[Key, Part]) -> dict[int, Units]:
    """Return by width where the units of activations lie: layers that follow carry that on."""
    found = {}
    records = one.observation.layers.values()
    for record in sorted(records, key=lambda r: math.inf if r.entered is None else r.entered):
        part = parts.get((record.name, "activations", ""))
        if part is not None and part.units is not None and part.seen.units is not None:
            found[len(part.seen.units.alive)] = part.units
    return found


def _settle(
    key: Key,
    ranks: Sequence[Seen],
    widths: Sequence[dict[int, Units]],
    found: Sequence[dict[Key, Part]],
) -> None:
    """Tell replicas from pieces where nothing says it: on ranks that see the same samples.

    Statistics that are equal to the last bit are of replicas, all others of pieces.
    """
    layer, role, _ = key
    groups: dict[tuple[int, ...], set[object]] = {}
    for one, parts in zip(ranks, found, strict=True):
        groups.setdefault(one.place.tensor, set()).add(_numbers(parts.get(key)))
    is_replica = all(len(distinct) == 1 for distinct in groups.values())
    for one, known, parts in zip(ranks, widths, found, strict=True):
        part, record = parts.get(key), one.observation.layers.get(layer)
        if part is None or (record is not None and role in record.placements):
            continue
        if is_replica:
            parts[key] = replace(part, key=one.place.tensor)
        elif part.units is None and part.seen.units is not None:
            size = len(part.seen.units.alive)
            units = known.get(size)
            if units is not None:
                parts[key] = replace(
                    part,
                    units=units,
                    counts_samples=one.is_first,
                    whole=_widened(part.seen.shape, size, units[1]),
                )


def _widened(shape: tuple[int, ...], size: int, whole: int) -> tuple[int, ...] | None:
    """Return the shape with the last dimension that has the units made as wide as the whole."""
    for dimension in range(len(shape) - 1, -1, -1):
        if shape[dimension] == size:
            return (*shape[:dimension], whole, *shape[dimension + 1 :])
    return None


def _numbers(part: Part | None) -> object:
    """Return what tells statistics apart, to the last bit."""
    if part is None:
        return None
    seen = part.seen
    return (
        seen.count,
        seen.nan_count,
        seen.zero_count,
        repr((seen.mean, seen.std, seen.min, seen.max)),
    )
