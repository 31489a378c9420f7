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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import accumulate, pairwise

from pytest_modelhealth.alignment.result import (
    MOST_PARTS,
    Alignment,
    Change,
    Pair,
    Reason,
    containers,
    fingerprints,
    is_inert,
    kind,
    order,
)
from pytest_modelhealth.report import LayerRecord, Status
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import TensorStatistics

Layers = Mapping[str, LayerRecord]
Places = Sequence[tuple[int, int]]
"""Pairs of places in the execution order of the reference and of the candidate."""

MOST_CELLS = 250_000
"""Up to this product of two lengths, sequences are aligned in full."""


def align(reference: Layers, candidate: Layers, *, is_blind: bool = False) -> Alignment:
    """Return which layer of `candidate` is which of `reference`.

    Args:
        reference: layers by name.
        candidate: likewise.
        is_blind: whether nothing inside the candidate was seen.
    """
    a, b = _Side(reference), _Side(candidate)
    matcher = _Matcher(a, b)
    if a.structure == b.structure:
        matcher.add_all((name, name) for name in reference)
    else:
        matcher.match_leaves()
        matcher.match_called_by_one(by_form=False)
        matcher.match_values(a.idle, b.idle)
        matcher.match_containers()
    pairs = _pairs(matcher)
    if is_blind:
        unseen = (
            p if p.aligned else replace(p, reason=Reason("unseen", is_all=True)) for p in pairs
        )
        return Alignment(tuple(unseen), (), reference, candidate)
    splits = tuple(_splits(matcher))
    reasons: dict[tuple[bool, str], Reason] = {}
    for split in splits:
        is_fused = split.word == "fused"
        reasons[is_fused, split.whole] = split
        reasons |= {(not is_fused, part): split for part in split.parts}
    pairs = [
        pair
        if pair.aligned
        else replace(pair, reason=reasons.get((pair.reference is None, pair.name), pair.reason))
        for pair in _with_folds(pairs, a, b)
    ]
    return Alignment(tuple(pairs), splits, reference, candidate)


class _Side:
    """One model's layers, sorted into what is aligned how.

    Attributes:
        layers: all of them, by name.
        leaves: names of the layers that compute something themselves, in execution order.
        idle: names of layers that were never called and hold parameters.
        containers: names of all others; they are what their leaves make them.
        own: names of the leaves and of the idle ones.
        place: place of each leaf in execution order.
        holds_layers: whether the model holds layers, rather than being the only one.
        taken: counterpart of each layer that is matched.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.taken: dict[str, str] = {}
        self._fingerprints: dict[str, tuple[object, ...]] = {}
        holders = containers(layers)
        self.holds_layers = "" in holders and "" in layers
        self.containers: list[str] = []
        self.idle: list[str] = []
        self.leaves: list[str] = []
        for one in self.in_order():
            if one.name in holders and not one.parameters:
                self.containers.append(one.name)
            else:
                (self.idle if one.entered is None else self.leaves).append(one.name)
        self.own = {*self.leaves, *self.idle}
        self.place = {name: place for place, name in enumerate(self.leaves)}

    @property
    def structure(self) -> list[tuple[object, ...]]:
        """All that names, types and shapes say of the model, in execution order."""
        return [
            (one.name, kind(one), sorted(p.shape for p in one.parameters.values()))
            for one in self.in_order()
        ]

    def in_order(self) -> list[LayerRecord]:
        """Return the layers in execution order; those never called come last."""
        return sorted(self.layers.values(), key=order)

    def free(self, names: Iterable[str]) -> list[str]:
        """Return those of these layers that are not matched yet."""
        return [name for name in names if name not in self.taken]

    def fingerprint(self, name: str) -> tuple[object, ...]:
        """Return the key of the values of a layer's parameters, which are spelled once."""
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprints(self.layers[name])
        return self._fingerprints[name]

    def by_fingerprint(self, names: Iterable[str]) -> dict[object, list[str]]:
        """Return layers with parameters by the values of these."""
        found: dict[object, list[str]] = defaultdict(list)
        for name in names:
            if self.layers[name].parameters:
                found[self.fingerprint(name)].append(name)
        return found

    def held(self) -> dict[str, set[str]]:
        """Return the names of the leaves in each container."""
        held: dict[str, set[str]] = {name: set() for name in self.containers}
        for leaf in self.own:
            for above in held.keys() & ancestors(leaf):
                held[above].add(leaf)
        return held


class _Matcher:
    """Finds the pairs: leaves first, then what was never called, then what holds them."""

    def __init__(self, a: _Side, b: _Side) -> None:
        self.a, self.b = a, b

    def add(self, ours: str, theirs: str) -> None:
        """Match two layers."""
        self.a.taken[ours] = theirs
        self.b.taken[theirs] = ours

    def add_all(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Match each two layers."""
        for ours, theirs in pairs:
            self.add(ours, theirs)

    def match_leaves(self) -> None:
        """Match the layers that compute something themselves."""
        a, b = self.a, self.b
        if a.holds_layers and b.holds_layers:
            self.add("", "")  # whatever parameters a model has besides those of its layers
        self._match_merged()
        anchors = self._anchors()
        self.add_all(anchors)
        self.match_called_by_one(by_form=True)  # as where heads changed
        backbone = _rising(sorted((a.place[x], b.place[y]) for x, y in anchors))
        for left, right in list(self._gaps(self._add_names(backbone))):
            self.add_all(_aligned_sequences(left, right))
        for name in a.free(a.leaves):  # what is left, whatever the order
            if name not in b.taken and self._has_name(name):
                self.add(name, name)
        self.match_values(a.leaves, b.leaves)

    def match_containers(self) -> None:
        """Match containers by the layers in them; of those that hold the same, by type and name."""
        a, b = self.a, self.b
        ours, theirs = a.held(), b.held()
        free = set(b.free(b.containers))
        if "" in free and "" in a.containers:
            self.add("", "")
            free.discard("")
        outermost_first = a.free(sorted(a.containers, key=lambda name: name.count(".")))
        found = [
            (-worth, place, name, other)
            for place, name in enumerate(outermost_first)
            for other, worth in _containers_of(
                a.layers[name],
                {a.taken[leaf] for leaf in ours[name] if leaf in a.taken},
                theirs,
                b,
                free,
            )
        ]
        for _, _, name, other in sorted(found):
            if name not in a.taken and other in free:
                self.add(name, other)
                free.discard(other)

    def _match_merged(self) -> None:
        """Match a layer with the container of its name that holds several, where none is it.

        So are adapters that were merged into the weights they stood beside.
        """
        for one, other in ((self.a, self.b), (self.b, self.a)):
            inside, known = one.held(), one.by_fingerprint(one.leaves)
            for name in one.containers:
                held = [leaf for leaf in inside[name] if one.layers[leaf].parameters]
                parts = name.split(".")  # a wrapper may have been taken off around it
                ends = (".".join(parts[start:]) for start in range(len(parts)))
                leaf = next((end for end in ends if end in other.place), None)
                if len(held) < 2 or leaf is None or leaf in other.taken:
                    continue
                layer = other.layers[leaf]
                if not layer.parameters:
                    continue
                same_output = _output(one.layers[name]) == _output(layer)
                if same_output and other.fingerprint(leaf) not in known:
                    one.taken[name], other.taken[layer.name] = layer.name, name

    def _anchors(self) -> list[tuple[str, str]]:
        """Return the layers whose parameters have values that no other layer's have.

        Where such pairs with different names cross one another, layers swapped their weights or
        their places: there the names count.
        """
        a, b = self.a, self.b
        ours = a.by_fingerprint(a.free(a.leaves))
        theirs = b.by_fingerprint(b.free(b.leaves))
        unique = [
            (names[0], theirs[key][0])
            for key, names in ours.items()
            if len(names) == 1 and len(theirs.get(key, ())) == 1
        ]
        kept = [(x, y) for x, y in unique if x == y or not self._may_be_named(x)]
        doubtful = [(a.place[x], b.place[y]) for x, y in set(unique) - set(kept)]
        straight = _uncrossed(sorted(doubtful))
        return kept + [(a.leaves[i], b.leaves[j]) for i, j in straight]

    def _may_be_named(self, name: str) -> bool:
        """Whether the candidate has a leaf of this name that could as well be the same one."""
        return self._has_name(name) and _are_of_one_form(self.a.layers[name], self.b.layers[name])

    def _has_name(self, name: str) -> bool:
        """Whether the candidate has a leaf of this name, and both are modules or both functions.

        A function is named by its place among others of its kind: ``relu`` is the first one.
        """
        b = self.b
        return name in b.place and self.a.layers[name].functional == b.layers[name].functional

    def match_called_by_one(self, *, by_form: bool) -> None:
        """Match layers of one name that one side or both never called, of one form if need be."""
        a, b = self.a, self.b
        for name in (*a.idle, *b.idle):
            if name not in a.own or name not in b.own or name in a.taken or name in b.taken:
                continue
            ours = a.layers[name]
            if not by_form or (ours.parameters and _are_of_one_form(ours, b.layers[name])):
                self.add(name, name)

    def match_values(self, ours: list[str], theirs: list[str]) -> None:
        """Match layers with parameters of the same values, in order."""
        a, b = self.a, self.b
        known = b.by_fingerprint(b.free(theirs))
        for name in a.free(ours):
            same = known.get(a.fingerprint(name))
            if same:
                self.add(name, same.pop(0))

    def _add_names(self, backbone: Places) -> Places:
        """Match layers of one name and form that keep the order of the backbone, and extend it."""
        a, b = self.a, self.b
        same = [
            (a.place[name], b.place[name])
            for name in a.free(a.leaves)
            if name not in b.taken and self._may_be_named(name)
        ]
        longer = _rising([pair for pair in same if _fits(pair, backbone)])
        self.add_all((a.leaves[i], b.leaves[j]) for i, j in longer)
        return sorted([*backbone, *longer])

    def _gaps(self, backbone: Places) -> Iterator[tuple[list[LayerRecord], list[LayerRecord]]]:
        """Yield what is not matched yet between each two neighbours of the backbone."""
        a, b = self.a, self.b
        i = j = 0
        for next_i, next_j in [*backbone, (len(a.leaves), len(b.leaves))]:
            left = [a.layers[name] for name in a.free(a.leaves[i:next_i])]
            right = [b.layers[name] for name in b.free(b.leaves[j:next_j])]
            if left and right:
                yield left, right
            i, j = next_i + 1, next_j + 1


def _uncrossed(pairs: Places) -> list[tuple[int, int]]:
    """Return the pairs that cross no other, of pairs in ascending order of their first number."""
    places = [place for _, place in pairs]
    highest = accumulate(places, max)
    lowest = [*accumulate(reversed(places), min)][::-1]
    return [one for one, x, y in zip(pairs, highest, lowest, strict=True) if x == one[1] == y]


def _rising(pairs: Places) -> list[tuple[int, int]]:
    """Return the longest subsequence whose second numbers rise, of pairs in ascending order."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, j) in enumerate(pairs):
        place = bisect_left(tails, j)
        before.append(ends[place - 1] if place else -1)
        tails[place : place + 1] = [j]
        ends[place : place + 1] = [index]
    found = []
    index = ends[-1] if ends else -1
    while index >= 0:
        found.append(pairs[index])
        index = before[index]
    return found[::-1]


def _fits(pair: tuple[int, int], backbone: Places) -> bool:
    place = bisect_left(backbone, pair)
    after_previous = place == 0 or backbone[place - 1][1] < pair[1]
    return after_previous and (place == len(backbone) or pair[1] < backbone[place][1])


def _aligned_sequences(
    left: list[LayerRecord], right: list[LayerRecord]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of the best alignment of two sequences (Needleman and Wunsch, 1970).

    Gaps cost nothing: a pair has to be worth it. Two very long sequences without anything in common
    are aligned by the runs of equal layers in them.
    """
    if len(left) * len(right) > MOST_CELLS:
        ours, theirs = ([(kind(x), _sizes(x), _output(x)) for x in side] for side in (left, right))
        matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
        for i, j, length in matcher.get_matching_blocks():
            for x, y in zip(left[i : i + length], right[j : j + length], strict=True):
                yield x.name, y.name
        return
    worth = [[_likeness(x, y) for y in map(_Traits, right)] for x in map(_Traits, left)]
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            skip = max(best[i + 1][j], best[i][j + 1])
            pair = worth[i][j] + best[i + 1][j + 1] if worth[i][j] > 0 else 0.0
            best[i][j] = max(skip, pair)
    i = j = 0
    while i < len(left) and j < len(right):
        if worth[i][j] > 0 and best[i][j] == worth[i][j] + best[i + 1][j + 1]:
            yield left[i].name, right[j].name
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1


class _Traits:
    """What two layers are likened by, read once a layer."""

    def __init__(self, layer: LayerRecord) -> None:
        self.name, self.own_name = layer.name, layer.name.rpartition(".")[2]
        self.kind, self.output, self.sizes = kind(layer), _output(layer), _sizes(layer)
        self.values, self.tied = fingerprints(layer), bool(layer.tied)
        self.inert = is_inert(layer)


def _likeness(x: _Traits, y: _Traits) -> float:
    """Return how well two layers go together; 0 if they cannot be the same."""
    same_name, same_own_name = x.name == y.name, x.own_name == y.own_name
    same_kind, same_output, same_sizes = x.kind == y.kind, x.output == y.output, x.sizes == y.sizes
    if same_kind and same_sizes:
        same_values = bool(x.values) and x.values == y.values
        return 4.0 + 2 * same_output + same_own_name + 2 * same_name + 3 * same_values
    if same_kind and same_output and x.tied != y.tied:
        return 3.0  # a tied weight is among the parameters of another layer
    if x.inert or y.inert:
        return 0.0
    if same_name or (same_kind and same_own_name and same_output):
        return 2.0 + same_output + same_sizes
    if same_output and same_sizes and x.values:
        return 1.0 + same_own_name
    has_more = len(x.sizes) < len(y.sizes)  # a fused layer has a bias, where it had none
    same_weight = has_more and x.sizes[-1:] == y.sizes[-1:] != ()
    if same_output and same_weight and (same_kind or same_own_name):
        return 1.0
    return 0.0


def _output(layer: LayerRecord) -> tuple[int, ...]:
    return () if layer.activations is None else layer.activations.shape


def _sizes(layer: LayerRecord) -> tuple[int, ...]:
    return tuple(sorted(p.count for p in layer.parameters.values()))


def _are_of_one_form(x: LayerRecord, y: LayerRecord) -> bool:
    """Whether two layers are of one kind, with parameters of the same sizes."""
    return kind(x) == kind(y) and _sizes(x) == _sizes(y)


def _containers_of(
    layer: LayerRecord, images: set[str], held: Mapping[str, set[str]], side: _Side, free: set[str]
) -> Iterator[tuple[str, float]]:
    """Yield the containers that hold most of `images` and little else, and how well they fit."""
    if not images:
        if layer.name in free and side.layers[layer.name].type_name == layer.type_name:
            yield layer.name, 1.0
        return
    around = Counter(above for image in images for above in ancestors(image) if above in free)
    for name, count in around.items():
        same_type = side.layers[name].type_name == layer.type_name
        overlap = count / len(images | held[name])
        worth = overlap + 0.2 * same_type + 0.2 * (name == layer.name)
        if 2 * count >= len(images) and worth > 0.5:
            yield name, worth


def _pairs(found: _Matcher) -> list[Pair]:
    """Return all layers of both sides, in execution order of the reference.

    Inserted layers stand after the layer that runs before them.
    """
    a, b = found.a, found.b
    inserted: dict[str | None, list[Pair]] = defaultdict(list)
    last = None
    for layer in b.in_order():
        if layer.name in b.taken:
            last = layer.name
        else:
            inserted[last].append(Pair(None, layer.name, Change.INSERTED))
    moved = _moved(a, b)
    hidden = any(layer.status is Status.OPAQUE for layer in b.layers.values())
    pairs = inserted[None]
    for layer in a.in_order():
        other = a.taken.get(layer.name)
        if other is None:
            unseen = Reason("unseen") if layer.functional and hidden else None
            pairs.append(Pair(layer.name, None, Change.REMOVED, unseen))
        else:
            change = Change.MATCHED if layer.name == other else Change.RENAMED
            change = Change.MOVED if layer.name in moved else change
            if layer.name and kind(b.layers[other]) not in (
                kind(layer),
                "",
            ):  # not told if deployed
                change = Change.RETYPED
            pairs += [Pair(layer.name, other, change), *inserted[other]]
    return pairs


def _moved(a: _Side, b: _Side) -> set[str]:
    """Return the leaves that run at another place among the others."""
    orders = ((name, b.layers[a.taken[name]].entered) for name in a.leaves if name in a.taken)
    known = [(name, order) for name, order in orders if order is not None]
    kept = {place for place, _ in _rising([(i, order) for i, (_, order) in enumerate(known)])}
    return {name for i, (name, _) in enumerate(known) if i not in kept}


def _with_folds(pairs: list[Pair], a: _Side, b: _Side) -> list[Pair]:
    """Return the pairs with the reason where a batch norm was folded into the layer before it."""
    place = {pair.reference: index for index, pair in enumerate(pairs)}
    for host_name, name in pairwise(a.leaves):
        norm, host = pairs[place[name]], pairs[place[host_name]]
        if host.candidate is None or "BatchNorm" not in a.layers[name].type_name:
            continue
        is_gone = norm.candidate is None or is_inert(b.layers[norm.candidate])
        if is_gone and _are_of_other_values(a.layers[host_name], b.layers[host.candidate]):
            fold = Reason("folded", host.candidate, (name,))
            pairs[place[host_name]] = replace(host, reason=fold)
            pairs[place[name]] = replace(norm, reason=fold)
    return pairs


def _are_of_other_values(x: LayerRecord, y: LayerRecord) -> bool:
    """Whether the values of their parameters differ, be it in the last digits."""
    ours, theirs = (sorted(p.rms for p in one.parameters.values()) for one in (x, y))
    return fingerprints(x) != fingerprints(y) or ours != theirs


def _splits(found: _Matcher) -> Iterator[Reason]:
    """Yield the layers whose parameters are those of several unmatched layers of the other side."""
    for one, other, word in ((found.a, found.b, "split"), (found.b, found.a, "fused")):
        free = [other.layers[name] for name in other.free((*other.leaves, *other.idle))]
        parts = [layer for layer in free if layer.parameters]
        for name in one.leaves:
            whole, counterpart = one.layers[name], one.taken.get(name, "")
            same = counterpart in other.layers and (
                one.fingerprint(name) == other.fingerprint(counterpart)
            )
            names = _parts_of(whole, parts) if whole.parameters and not same else ()
            if names:
                yield Reason(word, name, names)
                parts = [layer for layer in parts if layer.name not in names]


def _parts_of(whole: LayerRecord, layers: Sequence[LayerRecord]) -> tuple[str, ...]:
    """Return the names of the neighbouring layers whose parameters together are those of one."""
    own = whole.parameters
    for start in range(len(layers)):
        for length in range(2, min(MOST_PARTS, len(layers) - start) + 1):
            group = layers[start : start + length]
            parts = {n: [p.parameters[n] for p in group if n in p.parameters] for n in own}
            if all(len(parts[n]) == length and _is_joined(own[n], parts[n]) for n in own):
                return tuple(layer.name for layer in group)
    return ()


def _is_joined(whole: TensorStatistics, parts: Sequence[TensorStatistics]) -> bool:
    """Whether a parameter has the values of several together: their numbers, extremes and rms."""
    size = sum(part.count for part in parts)
    squares = sum(part.count * part.rms**2 for part in parts)
    mean = math.sqrt(squares / size) if size else math.nan
    return (
        (whole.count, whole.zero_count) == (size, sum(part.zero_count for part in parts))
        and f"{whole.min:.4e}" == f"{min(part.min for part in parts):.4e}"
        and f"{whole.max:.4e}" == f"{max(part.max for part in parts):.4e}"
        and math.isclose(mean, whole.rms, rel_tol=1e-5, abs_tol=1e-12)
    )
