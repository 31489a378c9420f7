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
from functools import cache
from itertools import accumulate, islice, takewhile

from pytest_modelhealth.alignment.result import (
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

Layers = Mapping[str, LayerRecord]
Places = Sequence[tuple[int, int]]
"""Pairs of places in the execution order of the reference and of the candidate."""

MOST_CELLS = 250_000  # up to this product of two lengths, sequences are aligned in full


def align(reference: Layers, candidate: Layers, *, is_blind: bool = False) -> Alignment:
    """Return which layer of `candidate` is which; a blind run shows nothing inside of it."""
    a, b = _Side(reference), _Side(candidate)
    if a.structure == b.structure:
        a.taken = b.taken = {name: name for name in reference}
    else:
        _match(a, b)
    pairs = _with_folds(_pairs(a, b), a, b)
    if is_blind:
        unseen = Reason("unseen", is_all=True)
        pairs = [p if p.aligned or p.is_folded else replace(p, reason=unseen) for p in pairs]
    return Alignment(tuple(pairs), reference, candidate)


class _Side:
    """One model's layers, sorted into what is aligned how."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.taken: dict[str, str] = {}  # counterpart of each layer that is matched
        holders = containers(layers)
        self.ordered = sorted(layers.values(), key=order)
        # the leaves compute something themselves; idle layers hold parameters and were never called
        own = [one for one in self.ordered if one.name not in holders or one.parameters]
        self.leaves = [one.name for one in own if one.entered is not None]
        self.idle = [one.name for one in own if one.entered is None]
        self.place = {name: place for place, name in enumerate(self.leaves)}
        known = {one.name for one in own}
        self.held: dict[str, set[str]] = {
            n.name: set() for n in self.ordered if n.name not in known
        }
        for leaf in known:
            for above in self.held.keys() & ancestors(leaf):
                self.held[above].add(leaf)
        self.fingerprint = cache(lambda name: fingerprints(layers[name]))

    @property
    def structure(self) -> list[tuple[object, ...]]:
        """All that names, types and shapes say of the model, in execution order."""
        return [
            (one.name, kind(one), sorted(p.shape for p in one.parameters.values()))
            for one in self.ordered
        ]

    def free(self, names: Iterable[str]) -> list[str]:
        """Return those of these layers that are not matched yet."""
        return [name for name in names if name not in self.taken]

    def by_values(self, names: Iterable[str]) -> dict[object, list[str]]:
        """Return layers with parameters by the values of these."""
        found: dict[object, list[str]] = defaultdict(list)
        for name in names:
            if self.layers[name].parameters:
                found[self.fingerprint(name)].append(name)
        return found


def _match(a: _Side, b: _Side) -> None:
    """Find the pairs: leaves first, then what was never called, then what holds them."""
    if all("" in side.layers and len(side.layers) > 1 for side in (a, b)):
        _add(a, b, [("", "")])  # whatever parameters a model has besides those of its layers
    _match_merged(a, b)
    _match_merged(b, a)
    anchors = _anchors(a, b)
    _add(a, b, anchors)
    idle = (*a.idle, *b.idle)
    heads = [n for n in idle if _is_same(a, b, n) and a.layers[n].parameters]
    _add(a, b, _named(a, b, heads))  # another of several was called
    backbone = _rising(sorted((a.place[x], b.place[y]) for x, y in anchors))
    same = [n for n in a.leaves if n in b.place and _is_same(a, b, n)]
    rising = _rising([p for n in same if _fits(p := (a.place[n], b.place[n]), backbone)])
    _add(a, b, ((a.leaves[i], b.leaves[j]) for i, j in rising))
    i = j = 0  # what is not matched yet between each two neighbours
    for next_i, next_j in [*sorted([*backbone, *rising]), (len(a.leaves), len(b.leaves))]:
        left = [a.layers[name] for name in a.free(a.leaves[i:next_i])]
        right = [b.layers[name] for name in b.free(b.leaves[j:next_j])]
        _add(a, b, _aligned_sequences(left, right))
        i, j = next_i + 1, next_j + 1
    _add(a, b, _named(a, b, [name for name in a.leaves if name in b.place]))  # in any order
    _add_values(a, b, a.leaves, b.leaves)
    _add(a, b, _named(a, b, idle))
    _add_values(a, b, a.idle, b.idle)
    _match_containers(a, b)


def _add(a: _Side, b: _Side, pairs: Iterable[tuple[str, str]]) -> None:
    for ours, theirs in pairs:
        a.taken[ours], b.taken[theirs] = theirs, ours


def _named(a: _Side, b: _Side, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the layers of one name, without a counterpart, that both have."""
    return ((name, name) for name in names if _is_free(a, b, name))


def _is_free(a: _Side, b: _Side, name: str) -> bool:
    """Whether both have a layer of this name without a counterpart, modules or functions.

    A function is named by its place among others of its kind: ``relu`` is the first one.
    """
    if not all(name in side.place or name in side.idle for side in (a, b)):
        return False
    same = a.layers[name].functional == b.layers[name].functional
    return same and name not in a.taken and name not in b.taken


def _is_same(a: _Side, b: _Side, name: str) -> bool:
    """Whether they are of one form, too."""
    return _is_free(a, b, name) and _are_of_one_form(a.layers[name], b.layers[name])


def _add_values(a: _Side, b: _Side, ours: list[str], theirs: list[str]) -> None:
    """Match layers with parameters of the same values, in order."""
    known = b.by_values(b.free(theirs))
    for name in a.free(ours):
        if same := known.get(a.fingerprint(name)):
            _add(a, b, [(name, same.pop(0))])


def _match_merged(one: _Side, other: _Side) -> None:
    """Match a layer with the container of its name that holds several, where none is it.

    So are adapters that were merged into the weights they stood beside.
    """
    known = one.by_values(one.leaves)
    for name, inside in one.held.items():
        held = [leaf for leaf in inside if one.layers[leaf].parameters and leaf in one.place]
        parts = name.split(".")  # a wrapper may have been taken off around it
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        leaf = next((end for end in ends if end in other.place), None)
        if len(held) < 2 or leaf is None or leaf in other.taken:
            continue
        layer = other.layers[leaf]
        same_output = _output(one.layers[name]) == _output(layer)
        if layer.parameters and same_output and other.fingerprint(leaf) not in known:
            one.taken[name], other.taken[leaf] = leaf, name


def _anchors(a: _Side, b: _Side) -> list[tuple[str, str]]:
    """Return the layers whose parameters have values that no other layer's have.

    Where such pairs with different names cross one another, layers swapped their weights or
    their places: there the names count.
    """
    theirs = b.by_values(b.free(b.leaves))
    unique = [
        (names[0], theirs[key][0])
        for key, names in a.by_values(a.free(a.leaves)).items()
        if len(names) == 1 and len(theirs.get(key, ())) == 1
    ]
    kept = [(x, y) for x, y in unique if x == y or x not in b.place or not _is_same(a, b, x)]
    doubtful = sorted((a.place[x], b.place[y]) for x, y in set(unique) - set(kept))
    places = [place for _, place in doubtful]
    highest, lowest = accumulate(places, max), [*accumulate(reversed(places), min)][::-1]
    straight = [p for p, x, y in zip(doubtful, highest, lowest, strict=True) if x == p[1] == y]
    return kept + [(a.leaves[i], b.leaves[j]) for i, j in straight]


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

    Gaps cost nothing: a pair has to be worth it. Of two very long sequences without anything in
    common, the layers are taken in order.
    """
    if len(left) * len(right) > MOST_CELLS:
        pairs = zip(left, right, strict=False)
        yield from ((x.name, y.name) for x, y in pairs if _are_of_one_form(x, y))
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
    return float(same_output and same_weight and (same_kind or same_own_name))


def _output(layer: LayerRecord) -> tuple[int, ...]:
    return () if layer.activations is None else layer.activations.shape


def _sizes(layer: LayerRecord) -> tuple[int, ...]:
    return tuple(sorted(p.count for p in layer.parameters.values()))


def _are_of_one_form(x: LayerRecord, y: LayerRecord) -> bool:
    """Whether two layers are of one kind, with parameters of the same sizes."""
    return kind(x) == kind(y) and _sizes(x) == _sizes(y)


def _match_containers(a: _Side, b: _Side) -> None:
    """Match containers by the layers in them; of those that hold the same, by type and name."""
    found: list[tuple[float, int, str, str]] = []
    outermost_first = a.free(sorted(a.held, key=lambda name: name.count(".")))
    for place, name in enumerate(outermost_first):
        images = {a.taken[leaf] for leaf in a.held[name] if leaf in a.taken}
        around = Counter(above for image in images for above in ancestors(image))
        for other in b.free(around if images else (name,)):
            if other not in b.held:
                continue
            same_type = b.layers[other].type_name == a.layers[name].type_name
            overlap = around[other] / len(images | b.held[other]) if images else 0.4 * same_type
            worth = overlap + 0.2 * same_type + 0.2 * (name == other)
            if 2 * around[other] >= len(images) and worth > 0.5:
                found.append((-worth - (name == other == ""), place, name, other))
    for _, _, name, other in sorted(found):
        if name not in a.taken and other not in b.taken:
            a.taken[name], b.taken[other] = other, name


def _pairs(a: _Side, b: _Side) -> list[Pair]:
    """Return all layers of both sides, in execution order of the reference.

    Inserted layers stand after the layer that runs before them.
    """
    inserted: dict[str | None, list[Pair]] = defaultdict(list)
    last = None
    for layer in b.ordered:
        if layer.name in b.taken:
            last = layer.name
        else:
            inserted[last].append(Pair(None, layer.name, Change.INSERTED))
    orders = ((name, b.layers[a.taken[name]].entered) for name in a.leaves if name in a.taken)
    known = [(name, order) for name, order in orders if order is not None]
    straight = {place for place, _ in _rising([(i, order) for i, (_, order) in enumerate(known)])}
    moved = {name for i, (name, _) in enumerate(known) if i not in straight}
    hidden = any(layer.status is Status.OPAQUE for layer in b.layers.values())
    pairs = inserted[None]
    for layer in a.ordered:
        other = a.taken.get(layer.name)
        if other is None:
            unseen = Reason("unseen") if layer.functional and hidden else None
            pairs.append(Pair(layer.name, None, Change.REMOVED, unseen))
            continue
        change = Change.MATCHED if layer.name == other else Change.RENAMED
        change = Change.MOVED if layer.name in moved else change
        if layer.name and kind(b.layers[other]) not in (kind(layer), ""):  # not told if deployed
            change = Change.RETYPED
        pairs += [Pair(layer.name, other, change), *inserted[other]]
    return pairs


def _with_folds(pairs: list[Pair], a: _Side, b: _Side) -> list[Pair]:
    """Return the pairs with the reason where layers were taken over by the one before them.

    A fused layer gives what the last of a chain gave: a convolution, batch norm and activation in
    one. The chain is what the reference computed one after the other, and what the candidate has no
    layer for any more. Of the outputs along it, the candidate's is the nearest.
    """
    place = {pair.reference: index for index, pair in enumerate(pairs)}

    def is_gone(name: str) -> bool:
        other = pairs[place[name]].candidate
        return other is None or (is_inert(b.layers[other]) and not is_inert(a.layers[name]))

    for at, name in enumerate(a.leaves):
        host = pairs[place[name]]
        chain = [name, *takewhile(is_gone, islice(a.leaves, at + 1, None))]
        if host.candidate is None or host.reason is not None or len(chain) == 1:
            continue
        x, y = a.layers[name], b.layers[host.candidate]
        distances = [_distance(a.layers[one], y) for one in chain]
        parts = chain[1 : distances.index(min(distances)) + 1]
        rms = [[p.rms for p in one.parameters.values()] for one in (x, y)]
        # with the weights that it had, it has taken over none of another layer
        if parts and not (rms[0] == rms[1] and a.layers[parts[0]].parameters):
            fold = Reason("folded", host.candidate, tuple(parts))
            for one in (name, *parts):
                pairs[place[one]] = replace(pairs[place[one]], reason=fold)
    return pairs


def _distance(x: LayerRecord, y: LayerRecord) -> float:
    """Return how far the outputs of two layers are apart, by what is known of their values."""
    ours, theirs = x.activations, y.activations
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return math.inf
    return math.hypot(
        *(getattr(ours, n) - getattr(theirs, n) for n in ("mean", "std", "min", "max"))
    )
