"""What each rank holds of each tensor, and whether it counts: by role and placement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pytest_modelhealth.ranks.evidence import Evidence, Record
from pytest_modelhealth.ranks.layout import Place
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from pytest_modelhealth.report.ranks import How, Placement
from pytest_modelhealth.statistics import TensorStatistics

Key = tuple[str, str, str]
"""Layer, role and own name of a tensor."""

FLOWING = ("inputs", "activations", "gradients")
"""Roles of what goes through a layer; the others are of what it owns."""

LOSS_INPUT, LOSS_TARGET = "loss input", "loss target"


@dataclass(frozen=True)
class Seen:
    """What a rank saw of one step, and where it stands.

    Args:
        rank: the rank.
        place: where it stands among the others.
        observation: what it saw.
        record: what it noted for the checks between ranks.
    """

    rank: int
    place: Place
    observation: Observation
    record: Record


@dataclass(frozen=True)
class Gathered:
    """All records, and what this rank has of its own.

    Args:
        seen: what each rank saw and noted, in order of ranks.
        own: what this rank noted, by which layers and tensors have their names.
        joint: what all saw, put together.
    """

    seen: Mapping[int, Seen]
    own: Evidence
    joint: Observation

    def others(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks but these."""
        these = set(ranks)
        return tuple(rank for rank in self.seen if rank not in these)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return layers once each, in execution order."""
        places = {name: place for place, name in enumerate(self.joint.layers)}
        return tuple(sorted(dict.fromkeys(names), key=lambda name: places.get(name, len(places))))

    def same_of_others(self, numbers: Mapping[int, int]) -> list[tuple[int, ...]]:
        """Return the ranks that have the same number, 0 for none, and see other samples."""
        having: dict[int, list[int]] = {}
        for rank, number in numbers.items():
            if number:
                having.setdefault(number, []).append(rank)
        return sorted(
            tuple(ranks)
            for ranks in having.values()
            if len({self.seen[rank].place.tensor for rank in ranks}) > 1
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of one tensor.

    Args:
        seen: its statistics.
        is_replica: whether what other ranks have is the same thing, so that one counts.
        counts: whether this rank's may count; of replicas that may, the first one does.
        scale: what its values are divided by.
        whole: shape of the whole tensor; ``None`` where it is this one's, or grows by its samples.
        offset: where this one begins in the whole.
        units: where its units begin in the whole, and how many the whole has; ``None`` where each
            rank has all of them.
        counts_samples: whether its samples of units are others than those of its neighbours.
        grows: whether it is longer when all are put together: it is one of samples.
        adds_rows: whether its rows are others than those of its neighbours.
        how: how it becomes one with the others, for people.
    """

    seen: TensorStatistics
    is_replica: bool = False
    counts: bool = True
    scale: int = 1
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()
    units: tuple[int, int] | None = None
    counts_samples: bool = True
    grows: bool = False
    adds_rows: bool = True
    how: How = "pieces"

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, as far as its rank knows it."""
        return self.whole or self.seen.shape


def parts_of(ranks: Sequence[Seen]) -> list[dict[Key, Part]]:
    """Return what each rank has of each tensor that it kept statistics of, in order."""
    cuts = [_Cuts(one) for one in ranks]
    found = [
        {key: _part(one, cut, key, seen) for key, seen in _tensors(one.observation)}
        for one, cut in zip(ranks, cuts, strict=True)
    ]
    if len(ranks[0].place.tensor) > 1:
        for key in dict.fromkeys(key for parts in found for key in parts):
            _settle(key, ranks, cuts, found)
    return found


def _tensors(observation: Observation) -> Iterator[tuple[Key, TensorStatistics]]:
    for name, record in observation.layers.items():
        for role in ROLES:
            seen = getattr(record, role)
            if isinstance(seen, TensorStatistics):
                yield (name, role, ""), seen
            elif seen:
                for own, statistics in seen.items():
                    yield (name, role, own), statistics
    for number, call in enumerate(observation.loss_calls):
        for role, statistics in ((LOSS_INPUT, call.input), (LOSS_TARGET, call.target)):
            if statistics is not None:
                yield ("", role, str(number)), statistics


def _part(one: Seen, cuts: _Cuts, key: Key, seen: TensorStatistics) -> Part:
    layer, role, own = key
    place, samples = one.place, one.observation.samples
    adds_rows = _is_first(place.tensor, one.rank)
    if role in (LOSS_INPUT, LOSS_TARGET):
        return Part(seen, grows=_has_rows(seen.shape, samples), adds_rows=adds_rows)
    record = one.observation.layers[layer]
    placement = record.placements.get(f"{role}.{own}" if own else role)
    if role not in FLOWING:
        if placement is None:
            return Part(seen, is_replica=True, how="replicas")
        return Part(
            seen,
            counts=_counts_once(place, one.rank, placement),
            whole=placement.shape,
            offset=() if placement.strided else placement.offset,
            how="pieces" if any(map(_is_cut, placement.placements)) else "replicas",
        )
    units = cuts.of(record, role, placement, seen)
    part = Part(
        seen,
        scale=len(place.data) if role == "gradients" else 1,
        units=units,
        counts_samples=units is None or adds_rows,
        grows=_has_rows(seen.shape, samples),
        adds_rows=adds_rows,
        how="pieces" if units is None else "units",
    )
    if placement is None:
        return part
    is_whole = len(place.data) == 1 and not any(map(_is_cut, placement.placements))
    return replace(
        part,
        counts=_is_first_replica(placement, one.rank),
        whole=placement.shape,
        offset=() if placement.strided else placement.offset,
        counts_samples=adds_rows or (units is None and seen.shape != placement.shape),
        grows=_has_rows(placement.shape, samples),
        how="replicas" if is_whole and units is None else part.how,
    )


def _has_rows(shape: tuple[int, ...], samples: int) -> bool:
    """Whether a tensor is one of samples: as long along dimension 0 as the batch of its rank."""
    return bool(shape) and shape[0] == samples


def _is_first(ranks: Sequence[int], rank: int) -> bool:
    return ranks[0] == rank


def _is_first_replica(placement: Placement, rank: int) -> bool:
    """Whether this rank stands first along each dimension of the mesh that holds replicas."""
    if rank not in placement.ranks:
        return True
    flat = placement.ranks.index(rank)
    place = np.unravel_index(flat, placement.mesh_shape)
    return all(
        where == 0 or _is_cut(kind) for where, kind in zip(place, placement.placements, strict=True)
    )


def _is_cut(placement: str) -> bool:
    return placement[:1] not in ("R", "P")


def _counts_once(place: Place, rank: int, placement: Placement) -> bool:
    """Whether a rank's part of a parameter is counted: meshes beside its own hold replicas."""
    beside = [r for r in (place.data, place.tensor) if not set(r) <= set(placement.ranks)]
    is_first = all(_is_first(ranks, rank) for ranks in beside)
    return is_first and _is_first_replica(placement, rank)


def _when(record: LayerRecord) -> float:
    return math.inf if record.entered is None else record.entered


class _Cuts:
    """Which activations are cut along their units, and where the units of a rank begin.

    A layer with a placement says it itself; so does the weight of a linear layer that is wider than
    what it returns here. Layers after it, as wide, carry that on.
    """

    def __init__(self, one: Seen) -> None:
        self._tensor = one.place.tensor
        self._known: dict[int, tuple[int, int]] = {}
        for record in sorted(one.observation.layers.values(), key=_when):
            self._learn(record)

    def _learn(self, record: LayerRecord) -> None:
        """Note how wide the activations of a layer are, where they are cut along their units."""
        seen = record.activations
        if len(self._tensor) == 1 or seen is None or seen.units is None:
            return
        cut = self.of(record, "activations", record.placements.get("activations"), seen)
        if cut is not None:
            self._known[len(seen.units.alive)] = cut

    def of(
        self, record: LayerRecord, role: str, placement: Placement | None, seen: TensorStatistics
    ) -> tuple[int, int] | None:
        """Return where the units of this rank begin and how many there are; ``None`` if not cut."""
        if len(self._tensor) == 1 or seen.units is None:
            return None
        if placement is not None:
            return _placed_units(placement, seen.shape, len(seen.units.alive))
        return None if role == "inputs" else _weighed_units(record, len(seen.units.alive))

    def carried(self, seen: TensorStatistics) -> tuple[int, int] | None:
        """Return the same for a tensor that nothing states, by its width."""
        return None if seen.units is None else self._known.get(len(seen.units.alive))


def _placed_units(
    placement: Placement, shape: tuple[int, ...], size: int
) -> tuple[int, int] | None:
    """Return where the units begin of a tensor that is cut along them, and how many there are."""
    is_whole = shape == placement.shape  # a `DTensor` says the shape of the whole
    if is_whole and size in shape:
        return None
    for dimension in _cut_dimensions(placement):
        is_of_units = is_whole or shape[dimension : dimension + 1] == (size,)
        if is_of_units and placement.shape[dimension] > size and placement.offset:
            return placement.offset[dimension], placement.shape[dimension]
    return None


def _weighed_units(record: LayerRecord, size: int) -> tuple[int, int] | None:
    """Return the same of what a linear layer returned whose weight is wider than that."""
    weight = record.placements.get("parameters.weight")
    if weight is None or 0 not in _cut_dimensions(weight) or not weight.offset:
        return None
    is_cut = weight.shape[0] > size and weight.shape[0] - weight.offset[0] >= size
    return (weight.offset[0], weight.shape[0]) if is_cut else None


def _cut_dimensions(placement: Placement) -> list[int]:
    """Return the dimensions of a tensor that a mesh cuts it along."""
    found = []
    for kind in placement.placements:
        inner = kind.partition("(")[2].rstrip(")")
        number = inner.partition(",")[0].removeprefix("dim=")
        if _is_cut(kind) and number.lstrip("-").isdigit():
            found.append(int(number) % max(len(placement.shape), 1))
    return found


def _settle(
    key: Key, ranks: Sequence[Seen], cuts: Sequence[_Cuts], found: Sequence[dict[Key, Part]]
) -> None:
    """Tell replicas from pieces where nothing says it: on ranks that see the same samples.

    Statistics that are equal to the last bit are of replicas, all others of pieces.
    """
    layer, role, _ = key
    if role not in (*FLOWING, LOSS_INPUT, LOSS_TARGET):
        return
    groups: dict[tuple[int, ...], set[object]] = {}
    for one, parts in zip(ranks, found, strict=True):
        groups.setdefault(one.place.tensor, set()).add(_numbers(parts.get(key)))
    is_replica = all(len(distinct) == 1 for distinct in groups.values())
    for one, cut, parts in zip(ranks, cuts, found, strict=True):
        record = one.observation.layers.get(layer)
        part = parts.get(key)
        if part is None or (role in FLOWING and record is not None and role in record.placements):
            continue
        first = _is_first(one.place.tensor, one.rank)
        if is_replica:
            how: How = "replicas" if len(one.place.data) == 1 else "pieces"
            parts[key] = replace(part, counts=first, how=how)
        elif part.units is None and (units := cut.carried(part.seen)) is not None:
            assert part.seen.units is not None
            parts[key] = replace(
                part,
                units=units,
                counts_samples=first,
                how="units",
                whole=_widened(part.seen.shape, len(part.seen.units.alive), units[1]),
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
    moments = (seen.mean, seen.std, seen.min, seen.max)
    return seen.count, seen.nan_count, seen.zero_count, repr(moments)
