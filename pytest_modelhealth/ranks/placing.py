"""What this rank holds of each tensor, and whether it counts: by role and placement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.part import Part
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from pytest_modelhealth.report.ranks import Placement
from pytest_modelhealth.statistics import TensorStatistics

Key = tuple[str, str, str]
"""Layer, role and own name of a tensor."""

FLOWING = ("inputs", "activations", "gradients")
"""Roles of what goes through a layer; the others are of what it owns."""

LOSS_INPUT, LOSS_TARGET = "loss input", "loss target"


def keys_of(observation: Observation) -> list[Key]:
    """Return every tensor that statistics were kept of, in order."""
    return [key for key, _ in _tensors(observation)]


def parts_of(company: Company, observation: Observation, keys: Sequence[Key]) -> list[Part]:
    """Return what this rank has of each tensor of `keys`, which are the same on every rank."""
    held = dict(_tensors(observation))
    cuts = _Cuts(company)
    order = sorted(observation.layers.values(), key=_when)
    placed = {record.name: record for record in order}
    for record in order:
        cuts.learn(record)
    parts = [_part(company, cuts, placed.get(key[0]), key, held.get(key)) for key in keys]
    _settle_unplaced(company, cuts, placed, keys, parts)
    return parts


def firsts_of(parts: Sequence[Part]) -> list[int]:
    """Return for each part the place of the first one that is the same: the number is its own
    where none is.

    What one layer returns and the next is given is one tensor, with the same statistics.
    """
    known: dict[tuple[object, ...], int] = {}
    found = []
    for place, part in enumerate(parts):
        told = (part.is_replica, part.counts, part.scale, part.grows, part.adds_rows, part.how)
        placed = (part.whole, part.offset, part.units, part.counts_samples, part.has_extremes)
        own = (place,) if part.seen is None else (id(part.seen), *told, *placed)
        found.append(known.setdefault(own, place))
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


def _part(
    company: Company,
    cuts: _Cuts,
    record: LayerRecord | None,
    key: Key,
    seen: TensorStatistics | None,
) -> Part:
    if seen is None or record is None:
        return Part(None)
    _, role, own = key
    placement = record.placements.get(f"{role}.{own}" if own else role)
    if role in FLOWING:
        scale = len(company.place.data) if role == "gradients" else 1
        part = _flowing(company, placement, seen, scale)
        part.has_extremes = role != "gradients"
        part.units = cuts.of(record, role, placement, seen)
        if part.units is not None:
            part.how = "units"
        if part.units is not None or seen.shape == part.whole:
            part.counts_samples = _is_first(company.place.tensor, company.rank)
        return part
    if role in (LOSS_INPUT, LOSS_TARGET):
        return Part(seen, grows=True, adds_rows=_is_first(company.place.tensor, company.rank))
    if placement is None:
        return Part(seen, is_replica=True, how="replicas")
    return Part(
        seen,
        counts=_counts_once(company, placement),
        whole=placement.shape,
        offset=() if placement.strided else placement.offset,
        how="pieces" if any(map(_is_cut, placement.placements)) else "replicas",
    )


def _flowing(
    company: Company, placement: Placement | None, seen: TensorStatistics, scale: int
) -> Part:
    """Return a part of what goes through a layer: other samples on each rank that shares them."""
    part = Part(
        seen, scale=scale, grows=True, adds_rows=_is_first(company.place.tensor, company.rank)
    )
    if placement is not None:
        part.counts = _is_first_replica(placement, company.rank)
        part.whole = placement.shape
        part.offset = () if placement.strided else placement.offset
        if len(company.place.data) == 1 and not any(map(_is_cut, placement.placements)):
            part.how = "replicas"
    return part


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


def _counts_once(company: Company, placement: Placement) -> bool:
    """Whether this rank's part of a parameter is counted: meshes beside its own hold replicas."""
    beside = [
        ranks
        for ranks in (company.place.data, company.place.tensor)
        if not set(ranks) <= set(placement.ranks)
    ]
    is_first = all(_is_first(ranks, company.rank) for ranks in beside)
    return is_first and _is_first_replica(placement, company.rank)


def _when(record: LayerRecord) -> float:
    return math.inf if record.entered is None else record.entered


class _Cuts:
    """Which activations are cut along their units, and where this rank's units begin.

    A layer with a placement says it itself; so does the weight of a linear layer that is wider than
    what it returns here. Layers after it, as wide, carry that on.
    """

    def __init__(self, company: Company) -> None:
        self._tensor = company.place.tensor
        self._known: dict[int, tuple[int, int]] = {}

    def learn(self, record: LayerRecord) -> None:
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


def _settle_unplaced(
    company: Company,
    cuts: _Cuts,
    records: Mapping[str, LayerRecord],
    keys: Sequence[Key],
    parts: Sequence[Part],
) -> None:
    """Tell replicas from pieces where nothing says it: on ranks that see the same samples.

    Statistics that are equal to the last bit are of replicas, all others of pieces.
    """
    if len(company.place.tensor) == 1:
        return
    open_ones = [
        index
        for index, (name, role, own) in enumerate(keys)
        if role in (*FLOWING, LOSS_INPUT, LOSS_TARGET)
        and (name not in records or (own or role) not in records[name].placements)
    ]
    prints = np.array([_fingerprint(parts[index].seen) for index in open_ones], dtype=np.int64)
    low = company.smallest(prints, company.place.tensor)
    high = company.largest(prints, company.place.tensor)
    equal = company.smallest((low == high).astype(np.int64))
    first = _is_first(company.place.tensor, company.rank)
    for index, is_replica in zip(open_ones, equal.tolist(), strict=True):
        part = parts[index]
        if part.seen is None:
            continue
        if is_replica:
            part.counts = first
            part.how = "replicas" if len(company.place.data) == 1 else "pieces"
        elif part.units is None and (cut := cuts.carried(part.seen)) is not None:
            part.units, part.counts_samples, part.how = cut, first, "units"
            part.whole = _widened(part.seen.shape, len(part.seen.units.alive), cut[1])  # type: ignore[union-attr]


def _widened(shape: tuple[int, ...], size: int, whole: int) -> tuple[int, ...] | None:
    """Return the shape with the last dimension that has the units made as wide as the whole."""
    for dimension in range(len(shape) - 1, -1, -1):
        if shape[dimension] == size:
            return (*shape[:dimension], whole, *shape[dimension + 1 :])
    return None


def _fingerprint(seen: TensorStatistics | None) -> int:
    """Return a number that tells statistics apart, to the last bit."""
    if seen is None:
        return 0
    numbers = np.array(
        [seen.count, seen.nan_count, seen.zero_count, seen.mean, seen.std, seen.min, seen.max]
    )
    words = numbers.view(np.uint64) * np.array(_ODD, dtype=np.uint64)
    return int(np.bitwise_xor.reduce(words) >> np.uint64(2))


_ODD = tuple(0x9E3779B97F4A7C15 * (2 * n + 1) % 2**64 for n in range(7))
