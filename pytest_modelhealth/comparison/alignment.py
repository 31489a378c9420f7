"""Which layer of one model is which of another: read off what was observed, no model needed.

Parameters identify a layer best, then its name, then its type and its place in execution order.
Layers with parameters of the same values anchor the alignment; names are believed where they keep
the order of these anchors; what is left between two anchors is aligned as a sequence. So neither a
rename nor a shift of all numbers in a `Sequential` tears the models apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from pytest_modelhealth.report import LayerRecord, Status
from pytest_modelhealth.statistics import TensorStatistics


class Change(StrEnum):
    """What became of a layer between the reference and the candidate."""

    MATCHED = "matched"
    RENAMED = "renamed"
    MOVED = "moved"
    RETYPED = "retyped"
    INSERTED = "inserted"
    REMOVED = "removed"


@dataclass(frozen=True)
class Pair:
    """One layer on both sides.

    Args:
        reference: its name in the reference; ``None`` where it was inserted.
        candidate: its name in the candidate; ``None`` where it was removed.
        change: what became of it. Of several, the first that holds of: retyped, moved, renamed.
        note: what explains the change, where something does.
        output_of: the layer of the reference whose outputs the candidate's are, where that is
            another: the batch norm that was folded into this convolution.
    """

    reference: str | None
    candidate: str | None
    change: Change
    note: str = ""
    output_of: str | None = None

    @property
    def name(self) -> str:
        """Its name in the reference where it has one there, else in the candidate."""
        return self.candidate or "" if self.reference is None else self.reference

    @property
    def aligned(self) -> bool:
        """Whether it is on both sides."""
        return self.reference is not None and self.candidate is not None


@dataclass(frozen=True)
class Split:
    """One layer's parameters, found again as those of several, their rows one below the other.

    Args:
        whole: name of the one layer.
        parts: names of the several, in the order of the rows.
        fused: whether the one is in the candidate, and the several are in the reference.
    """

    whole: str
    parts: tuple[str, ...]
    fused: bool = False


@dataclass(frozen=True)
class Alignment:
    """Every layer of both models, each in one pair.

    Args:
        pairs: in execution order of the reference; inserted layers stand where they run, layers
            that were never called come last.
        splits: layers that were cut into several, or fused into one.
    """

    pairs: tuple[Pair, ...]
    splits: tuple[Split, ...] = ()

    @cached_property
    def to_candidate(self) -> dict[str, str]:
        """The candidate's name of each aligned layer, by the reference's."""
        return {
            pair.reference: pair.candidate
            for pair in self.pairs
            if pair.reference is not None and pair.candidate is not None
        }

    @cached_property
    def by_reference(self) -> dict[str, Pair]:
        """Each pair that has a layer of the reference, by its name there."""
        return {pair.reference: pair for pair in self.pairs if pair.reference is not None}

    @cached_property
    def by_candidate(self) -> dict[str, Pair]:
        """Each pair that has a layer of the candidate, by its name there."""
        return {pair.candidate: pair for pair in self.pairs if pair.candidate is not None}

    def of(self, *changes: Change) -> tuple[Pair, ...]:
        """Return the pairs with one of these changes."""
        return tuple(pair for pair in self.pairs if pair.change in changes)

    @property
    def same_names(self) -> bool:
        """Whether every layer has kept its name, type and place."""
        return all(pair.change is Change.MATCHED for pair in self.pairs)


def align(reference: Mapping[str, LayerRecord], candidate: Mapping[str, LayerRecord]) -> Alignment:
    """Return which layer of `candidate` is which of `reference`.

    Args:
        reference: layers by name, as ``report.layers`` and ``observation.layers`` have them.
        candidate: likewise.
    """
    a, b = _Side(reference), _Side(candidate)
    matching = _Matching()
    if a.structure == b.structure:
        matching.add_all((name, name) for name in a.records)
    else:
        _match_leaves(a, b, matching)
        _match_idle(a, b, matching)
        _match_containers(a, b, matching)
    splits = tuple(_splits(a, b, matching))
    pairs = _with_folds(_pairs(a, b, matching), a, b)
    return Alignment(tuple(_with_splits(pairs, splits)), splits)


@dataclass
class _Matching:
    """The layers matched so far, by name in both directions."""

    forward: dict[str, str] = field(default_factory=dict)
    backward: dict[str, str] = field(default_factory=dict)

    def add(self, reference: str, candidate: str) -> None:
        self.forward[reference] = candidate
        self.backward[candidate] = reference

    def add_all(self, pairs: Iterable[tuple[str, str]]) -> None:
        for reference, candidate in pairs:
            self.add(reference, candidate)


Key = tuple[object, ...]


class _Side:
    """One model's layers, sorted into what is aligned how.

    Attributes:
        leaves: names of the layers that compute something themselves, in execution order.
        idle: names of layers that were never called and hold parameters.
        containers: names of all others; they are what their leaves make them.
    """

    def __init__(self, records: Mapping[str, LayerRecord]) -> None:
        self.records = records
        holders = {""} if len(records) > 1 else set()
        for name in records:
            while "." in name:
                name = name.rpartition(".")[0]
                holders.add(name)
        self.leaves: list[str] = []
        self.idle: list[str] = []
        self.containers: list[str] = []
        for name, record in records.items():
            if name in holders and not record.parameters:
                self.containers.append(name)
            elif record.entered is None:
                self.idle.append(name)
            else:
                self.leaves.append(name)
        self.leaves.sort(key=lambda name: records[name].entered or 0)
        self.place = {name: place for place, name in enumerate(self.leaves)}

    @cached_property
    def structure(self) -> list[Key]:
        """All that names, types and shapes say of the model, in execution order."""
        ordered = sorted(self.records.values(), key=lambda record: _entered(record))
        return [(record.name, kind(record), _parameter_shapes(record)) for record in ordered]

    def by_fingerprint(self, names: Iterable[str]) -> dict[Key, list[str]]:
        found: dict[Key, list[str]] = defaultdict(list)
        for name in names:
            key = fingerprint(self.records[name])
            if key:
                found[key].append(name)
        return found


def kind(record: LayerRecord) -> str:
    """Return what a layer is: `F.relu` and `nn.ReLU` are the same kind."""
    return record.activation or record.type_name


def fingerprint(record: LayerRecord) -> Key:
    """Return a key of the values of a layer's own parameters; empty where it has none.

    It holds the number of elements, of zeros, and the extremes to five digits: the shape, and so a
    transposition, does not change it.
    """
    return tuple(sorted(_fingerprint(tensor) for tensor in record.parameters.values()))


def _fingerprint(tensor: TensorStatistics) -> tuple[int, int, str, str]:
    return tensor.count, tensor.zero_count, f"{tensor.min:.4e}", f"{tensor.max:.4e}"


def _entered(record: LayerRecord) -> float:
    return math.inf if record.entered is None else record.entered


def _parameter_shapes(record: LayerRecord) -> Key:
    return tuple(sorted(tensor.shape for tensor in record.parameters.values()))


def _parameter_counts(record: LayerRecord) -> Key:
    return tuple(sorted(tensor.count for tensor in record.parameters.values()))


def _output_shape(record: LayerRecord) -> Key:
    return () if record.activations is None else record.activations.shape


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _match_leaves(a: _Side, b: _Side, matching: _Matching) -> None:
    _match_merged(a, b, matching)
    anchors = _anchors(a, b)
    matching.add_all(anchors)
    _match_called_on_one_side(a, b, matching, lambda x, y: bool(x.parameters) and _same_form(x, y))
    backbone = _rising(sorted((a.place[x], b.place[y]) for x, y in anchors))
    backbone = _add_names(a, b, matching, backbone)
    for left, right in _gaps(a, b, matching, backbone):
        matching.add_all(_aligned_sequences(a, b, left, right))
    _match_moved(a, b, matching)


def _match_merged(a: _Side, b: _Side, matching: _Matching) -> None:
    """Match a layer with the container of its name that holds several, where none is this layer.

    So are adapters that were merged into the weights they stood beside.
    """
    for one, other in ((a, b), (b, a)):
        inside, known = _held(one), one.by_fingerprint(one.leaves)
        for name in one.containers:
            layer = other.records.get(name)
            if name not in other.place or layer is None or not layer.parameters:
                continue
            held = [leaf for leaf in inside[name] if one.records[leaf].parameters]
            same_output = _output_shape(one.records[name]) == _output_shape(layer)
            if len(held) > 1 and same_output and fingerprint(layer) not in known:
                matching.add(name, name)


def _anchors(a: _Side, b: _Side) -> list[tuple[str, str]]:
    """Return the layers whose parameters have values that no other layer's have.

    Where such pairs with different names cross one another, layers swapped their weights or their
    places: there the names count.
    """
    ours, theirs = a.by_fingerprint(a.leaves), b.by_fingerprint(b.leaves)
    unique = [
        (ours[key][0], theirs[key][0])
        for key in ours
        if len(ours[key]) == 1 and len(theirs.get(key, ())) == 1
    ]
    kept = [(x, y) for x, y in unique if x == y or not _name_is_taken(a, b, x)]
    doubtful = sorted(
        (a.place[x], b.place[y]) for x, y in unique if x != y and _name_is_taken(a, b, x)
    )
    straight = set(_uncrossed(doubtful))
    return kept + [(a.leaves[i], b.leaves[j]) for i, j in doubtful if (i, j) in straight]


def _name_is_taken(a: _Side, b: _Side, name: str) -> bool:
    """Whether the other side has a layer of this name that could as well be the same one."""
    if name not in b.place:
        return False
    return _same_form(a.records[name], b.records[name])


def _same_form(x: LayerRecord, y: LayerRecord) -> bool:
    return kind(x) == kind(y) and _parameter_counts(x) == _parameter_counts(y)


def _uncrossed(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs that cross no other, of pairs in ascending order of their first number."""
    highest_before, highest = [], -1
    for _, j in pairs:
        highest_before.append(highest)
        highest = max(highest, j)
    kept, lowest_after = [], math.inf
    for (i, j), before in zip(reversed(pairs), reversed(highest_before), strict=True):
        if before < j < lowest_after:
            kept.append((i, j))
        lowest_after = min(lowest_after, j)
    return kept[::-1]


def _rising(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence whose second numbers rise, of pairs in ascending order."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        place = bisect_left(tails, j)
        before.append(ends[place - 1] if place else -1)
        if place == len(tails):
            tails.append(j)
            ends.append(index)
        else:
            tails[place], ends[place] = j, index
    found = []
    index = ends[-1] if ends else -1
    while index >= 0:
        found.append(pairs[index])
        index = before[index]
    return found[::-1]


def _add_names(
    a: _Side, b: _Side, matching: _Matching, backbone: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Match layers of one name and form that keep the order of the backbone; return the new one."""
    same = [
        (a.place[name], b.place[name])
        for name in a.leaves
        if name not in matching.forward
        and name in b.place
        and name not in matching.backward
        and _same_form(a.records[name], b.records[name])
    ]
    longer = _rising([pair for pair in same if _fits(pair, backbone)])
    matching.add_all((a.leaves[i], b.leaves[j]) for i, j in longer)
    return sorted([*backbone, *longer])


def _fits(pair: tuple[int, int], backbone: Sequence[tuple[int, int]]) -> bool:
    place = bisect_left(backbone, pair)
    after_previous = place == 0 or backbone[place - 1][1] < pair[1]
    return after_previous and (place == len(backbone) or pair[1] < backbone[place][1])


def _gaps(
    a: _Side, b: _Side, matching: _Matching, backbone: Sequence[tuple[int, int]]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what is not matched yet between each two neighbours of the backbone."""
    i = j = 0
    for next_i, next_j in [*backbone, (len(a.leaves), len(b.leaves))]:
        left = [name for name in a.leaves[i:next_i] if name not in matching.forward]
        right = [name for name in b.leaves[j:next_j] if name not in matching.backward]
        if left and right:
            yield left, right
        i, j = next_i + 1, next_j + 1


MOST_CELLS = 250_000
"""Up to this product of two lengths, sequences are aligned in full."""


def _aligned_sequences(
    a: _Side, b: _Side, left: list[str], right: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of the best alignment of two sequences (Needleman and Wunsch, 1970).

    Gaps cost nothing: a pair has to be worth it. Two very long sequences without anything in common
    are aligned by the runs of equal layers in them.
    """
    ours, theirs = [a.records[x] for x in left], [b.records[y] for y in right]
    if len(left) * len(right) > MOST_CELLS:
        matcher = SequenceMatcher(None, [*map(_token, ours)], [*map(_token, theirs)], False)
        for i, j, length in matcher.get_matching_blocks():
            yield from zip(left[i : i + length], right[j : j + length], strict=True)
        return
    worth = [[_likeness(x, y) for y in theirs] for x in ours]
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            skip = max(best[i + 1][j], best[i][j + 1])
            pair = worth[i][j] + best[i + 1][j + 1] if worth[i][j] > 0 else 0.0
            best[i][j] = max(skip, pair)
    i = j = 0
    while i < len(left) and j < len(right):
        if worth[i][j] > 0 and best[i][j] == worth[i][j] + best[i + 1][j + 1]:
            yield left[i], right[j]
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1


def _token(record: LayerRecord) -> Key:
    return kind(record), _parameter_counts(record), _output_shape(record)


def _likeness(x: LayerRecord, y: LayerRecord) -> float:
    """Return how well two layers go together; 0 if they cannot be the same."""
    same_name = x.name == y.name
    same_output = _output_shape(x) == _output_shape(y)
    same_parameters = _parameter_counts(x) == _parameter_counts(y)
    if kind(x) == kind(y) and same_parameters:
        return 4.0 + 2 * same_output + (_last(x.name) == _last(y.name)) + 2 * same_name
    if kind(x) == kind(y) and same_output and bool(x.tied) != bool(y.tied):
        return 3.0  # a tied weight is among the parameters of another layer
    if _is_inert(x) or _is_inert(y):
        return 0.0
    if same_name or (kind(x) == kind(y) and _last(x.name) == _last(y.name) and same_output):
        return 2.0 + same_output + same_parameters
    if same_output and same_parameters and x.parameters:
        return 1.0 + (_last(x.name) == _last(y.name))
    return 0.0


def _is_inert(record: LayerRecord) -> bool:
    idle = record.status in (Status.ALIAS_OF_INPUT, Status.NOT_CALLED)
    return idle or record.type_name == "Identity"


def _match_moved(a: _Side, b: _Side, matching: _Matching) -> None:
    """Match what is left where name or parameters tell, whatever the order."""
    for name in a.leaves:
        if name not in matching.forward and name in b.place and name not in matching.backward:
            matching.add(name, name)
    theirs = b.by_fingerprint(name for name in b.leaves if name not in matching.backward)
    for name in a.leaves:
        same = theirs.get(fingerprint(a.records[name]))
        if name not in matching.forward and same:
            matching.add(name, same.pop(0))


def _match_called_on_one_side(
    a: _Side, b: _Side, matching: _Matching, fits: Callable[[LayerRecord, LayerRecord], bool]
) -> None:
    """Match layers of one name of which one was never called: it is still the same layer."""
    for idle, called in ((a.idle, b), (b.idle, a)):
        for name in idle:
            known = name in matching.forward or name in matching.backward
            if name in called.place and not known and fits(a.records[name], b.records[name]):
                matching.add(name, name)


def _match_idle(a: _Side, b: _Side, matching: _Matching) -> None:
    """Match layers that were never called, by name, then by their parameters."""
    _match_called_on_one_side(a, b, matching, lambda x, y: True)
    free = [name for name in b.idle if name not in matching.backward]
    theirs = b.by_fingerprint(free)
    for name in a.idle:
        if name in matching.forward:
            continue
        same = theirs.get(fingerprint(a.records[name]), [])
        if name in b.idle and name not in matching.backward:
            matching.add(name, name)
        elif same and same[0] not in matching.backward:
            matching.add(name, same.pop(0))


def _match_containers(a: _Side, b: _Side, matching: _Matching) -> None:
    """Match containers by the layers in them; of those that hold the same, by type and name."""
    ours, theirs = _held(a), _held(b)
    free = {name for name in b.containers if name not in matching.backward}
    if "" in free and "" in a.containers:
        matching.add("", "")
        free.discard("")
    for name in sorted(a.containers, key=lambda name: name.count(".")):
        if name in matching.forward:
            continue
        images = {matching.forward[leaf] for leaf in ours[name] if leaf in matching.forward}
        found = _container_of(a.records[name], images, theirs, b, free)
        if found is not None:
            matching.add(name, found)
            free.discard(found)


def _held(side: _Side) -> dict[str, set[str]]:
    """Return the names of the leaves in each container."""
    held: dict[str, set[str]] = {name: set() for name in side.containers}
    for leaf in (*side.leaves, *side.idle):
        for above in _ancestors(leaf):
            if above in held:
                held[above].add(leaf)
    return held


def _ancestors(name: str) -> Iterator[str]:
    """Yield the names of the layers around one, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _container_of(
    record: LayerRecord,
    images: set[str],
    held: Mapping[str, set[str]],
    side: _Side,
    free: set[str],
) -> str | None:
    """Return the container that holds most of `images` and little else."""
    if not images:
        alike = record.name in free and side.records[record.name].type_name == record.type_name
        return record.name if alike else None
    around = Counter(above for image in images for above in _ancestors(image) if above in free)
    best, best_worth = None, 0.5
    for name, count in around.items():
        same_type = side.records[name].type_name == record.type_name
        overlap = count / len(images | held[name])
        worth = overlap + 0.2 * same_type + 0.2 * (name == record.name)
        if 2 * count >= len(images) and worth > best_worth:
            best, best_worth = name, worth
    return best


def _pairs(a: _Side, b: _Side, matching: _Matching) -> list[Pair]:
    """Return all layers of both sides, in execution order of the reference."""
    stable = _stable(a, b, matching)
    pairs = []
    for name in sorted(a.records, key=lambda name: _entered(a.records[name])):
        if name in matching.forward:
            other = matching.forward[name]
            change = _change(a.records[name], b.records[other], name in stable)
            pairs.append(Pair(name, other, change))
        else:
            note = _why_invisible(a.records[name], b.records)
            pairs.append(Pair(name, None, Change.REMOVED, note))
    return _with_inserted(pairs, b, matching)


def _stable(a: _Side, b: _Side, matching: _Matching) -> set[str]:
    """Return the layers that kept their order, and those that have none."""
    ours = [name for name in a.records if _has_order(name, a, b, matching)]
    ours.sort(key=lambda name: a.records[name].entered or 0)
    order = {name: place for place, name in enumerate(ours)}
    places = [(i, b.records[matching.forward[n]].entered or 0) for i, n in enumerate(ours)]
    kept = {ours[i] for i, _ in _rising(places)}
    return {name for name in a.records if name in kept or name not in order}


def _has_order(name: str, a: _Side, b: _Side, matching: _Matching) -> bool:
    other = matching.forward.get(name)
    return name in a.place and other is not None and b.records[other].entered is not None


def _change(x: LayerRecord, y: LayerRecord, stable: bool) -> Change:
    if kind(x) != kind(y) and x.name:
        return Change.RETYPED
    if not stable:
        return Change.MOVED
    return Change.MATCHED if x.name == y.name else Change.RENAMED


def _why_invisible(record: LayerRecord, others: Mapping[str, LayerRecord]) -> str:
    """Return why a layer cannot be seen on the other side, where that is so."""
    if record.functional and any(o.status is Status.OPAQUE for o in others.values()):
        return "a functional layer, which cannot be seen in the candidate"
    return ""


def _with_inserted(pairs: list[Pair], b: _Side, matching: _Matching) -> list[Pair]:
    """Return the pairs with the inserted layers after the layer that runs before them."""
    place = {
        pair.candidate: index for index, pair in enumerate(pairs) if pair.candidate is not None
    }
    following: dict[int, list[Pair]] = defaultdict(list)
    last = -1
    for name in sorted(b.records, key=lambda name: _entered(b.records[name])):
        if name in matching.backward:
            last = place[name]
        else:
            following[last].append(Pair(None, name, Change.INSERTED))
    result = list(following[-1])
    for index, pair in enumerate(pairs):
        result += [pair, *following[index]]
    return result


def _with_folds(pairs: list[Pair], a: _Side, b: _Side) -> list[Pair]:
    """Return the pairs with a note where a batch norm was folded into the layer before it."""
    place = {pair.reference: index for index, pair in enumerate(pairs)}
    for host_name, name in pairwise(a.leaves):
        norm, host = pairs[place[name]], pairs[place[host_name]]
        if host.candidate is None or not _is_folded(norm, host, a, b):
            continue
        note = f"has {name} folded into it"
        pairs[place[host_name]] = replace(host, note=note, output_of=name)
        pairs[place[name]] = replace(norm, note=f"is folded into {host.candidate}")
    return pairs


def _is_folded(norm: Pair, host: Pair, a: _Side, b: _Side) -> bool:
    """Whether a batch norm is gone and the layer before it has other parameters."""
    gone = norm.candidate is None or _is_inert(b.records[norm.candidate])
    was_norm = "BatchNorm" in a.records[norm.reference or ""].type_name
    ours, theirs = a.records[host.reference or ""], b.records[host.candidate or ""]
    return gone and was_norm and fingerprint(ours) != fingerprint(theirs)


def _with_splits(pairs: Iterable[Pair], splits: Iterable[Split]) -> Iterator[Pair]:
    """Yield the pairs with a note on those that are one layer or its parts."""
    notes = {}
    for split in splits:
        verb = "is fused from" if split.fused else "is split into"
        notes[split.fused, split.whole] = f"{verb} {', '.join(split.parts)}"
        notes |= {(not split.fused, part): f"is a part of {split.whole}" for part in split.parts}
    for pair in pairs:
        note = notes.get((pair.reference is None, pair.name), "")
        yield pair if pair.aligned or not note else replace(pair, note=note)


MOST_PARTS = 8


def _splits(a: _Side, b: _Side, matching: _Matching) -> Iterator[Split]:
    """Yield the layers whose parameters are those of several unmatched layers of the other side."""
    for one, other, to, back, fused in (
        (a, b, matching.forward, matching.backward, False),
        (b, a, matching.backward, matching.forward, True),
    ):
        parts = [name for name in (*other.leaves, *other.idle) if name not in back]
        taken = [name for name in parts if other.records[name].parameters]
        for whole in one.leaves:
            record, counterpart = one.records[whole], other.records.get(to.get(whole, ""))
            if not record.parameters or (
                counterpart and fingerprint(record) == fingerprint(counterpart)
            ):
                continue
            found = _parts_of(record, [other.records[name] for name in taken])
            if found:
                yield Split(whole, found, fused)
                taken = [name for name in taken if name not in found]


def _parts_of(whole: LayerRecord, parts: Sequence[LayerRecord]) -> tuple[str, ...]:
    """Return the names of the neighbouring layers whose parameters together are those of one."""
    for start in range(len(parts)):
        for length in range(2, min(MOST_PARTS, len(parts) - start) + 1):
            group = parts[start : start + length]
            if all(_is_union(whole, [*group], tensor) for tensor in whole.parameters):
                return tuple(record.name for record in group)
    return ()


def _is_union(whole: LayerRecord, parts: Sequence[LayerRecord], tensor: str) -> bool:
    if not all(tensor in part.parameters for part in parts):
        return False
    merged = parts[0].parameters[tensor]
    for part in parts[1:]:
        merged = merged.merge(part.parameters[tensor])
    same_mean = math.isclose(merged.rms, whole.parameters[tensor].rms, rel_tol=1e-5, abs_tol=1e-12)
    return _fingerprint(merged) == _fingerprint(whole.parameters[tensor]) and same_mean
