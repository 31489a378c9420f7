"""What two runs tell of an alignment beyond its layers: which call is which, and what was folded.

An activation may be one module called several times, several modules, or functions. So such calls
are aligned by their place in the flow: by the layers with parameters whose values come to them.

A fused layer gives what the last of a chain gave: a convolution, batch norm and activation in one.
The chain is what the reference computed one after the other, and what the candidate has no layer
for any more. Of the outputs along it, the candidate's is the nearest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from pytest_modelhealth.alignment.result import (
    Alignment,
    Reason,
    is_inert,
    kind,
    order,
)
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.measures import gap
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Flow, LayerRecord, Status
from pytest_modelhealth.report.flow.graph import Kind
from pytest_modelhealth.settings.setting import ancestors

CallKey = tuple[str, int]
"""A layer and which of its calls, from 0."""


def with_calls(alignment: Alignment, a: Trace, b: Trace) -> Alignment:
    """Return an alignment that says which call is which of layers that are not called alike."""
    layers = alignment.reference, alignment.candidate
    run = [(order(x), order(y)) for _, x, y in alignment.aligned if x.parameters]
    is_ordered = [at for _, at in sorted(run)] == sorted(at for _, at in run)
    alike = [
        (x, y)
        for _, x, y in alignment.aligned
        if x.calls == y.calls
        # A function is named by its place, and the calls of a layer stand in order alone.
        and (is_ordered or x.parameters or not (x.calls > 1 or (x.functional and y.functional)))
    ]
    known = {x.name for x, _ in alike}, {y.name for _, y in alike}
    free = [pair for pair in alignment.pairs if pair.reason is None]
    loose = {p.reference for p in free} - known[0], {p.candidate for p in free} - known[1]
    flows = a.observation.flow, b.observation.flow
    if not all(loose) or None in flows:
        return alignment
    names = {name: name for name in layers[0]}, {y.name: x.name for _, x, y in alignment.aligned}
    anchors = {x.name for x, _ in alike if x.parameters}
    left, right = (
        _places(flow, own, some, back, anchors)
        for flow, own, some, back in zip(flows, layers, loose, names, strict=True)
        if flow is not None
    )
    calls = {
        one: other
        for place, every in left.items()
        for one, other in zip(every, right.get(place, ()), strict=False)
    }
    return _with_reasons(alignment, calls)


def _with_reasons(alignment: Alignment, calls: Mapping[CallKey, CallKey]) -> Alignment:
    """Return an alignment with these calls, and the reason where a layer's are those of others."""
    images: dict[str | None, dict[str, None]] = defaultdict(dict)
    origins: dict[str | None, dict[str, None]] = defaultdict(dict)
    for (one, _), (other, _) in calls.items():
        images[one][other] = origins[other][one] = None
    counts = Counter(ours for ours, _ in calls), Counter(theirs for theirs, _ in calls.values())
    whole = [
        {None} | {name for name, count in of.items() if count == layers[name].calls}
        for of, layers in zip(counts, (alignment.reference, alignment.candidate), strict=True)
    ]
    pairs = []
    for pair in alignment.pairs:
        ours, theirs = pair.reference, pair.candidate
        if ours in whole[0] and theirs in whole[1]:
            if len(images[ours]) > 1 or ours is None:
                name = ours or next(iter(origins[theirs]))
                reason = Reason("split", name, tuple(images[name]))
            else:
                name = theirs or next(iter(images[ours]))
                reason = Reason("fused", name, tuple(origins[name]))
            pair = replace(pair, reason=reason)
        pairs.append(pair)
    return replace(alignment, calls=calls, pairs=tuple(pairs))


def _places(
    flow: Flow,
    layers: Mapping[str, LayerRecord],
    loose: Set[str | None],
    names: Mapping[str, str],
    anchors: Set[str],
) -> dict[object, list[CallKey]]:
    """Return the calls of loose layers by what they compute and what feeds them, in order.

    Args:
        flow: the flow of a run.
        layers: the layers of that run.
        loose: the names of those whose calls are to be told apart.
        names: the names in the reference of all that are aligned.
        anchors: the names in the reference of those with parameters that are called alike.
    """
    graph, counts, numbers = flow.graph, Counter[str](), []
    for call in graph.calls:
        numbers.append(counts[call.layer])
        counts[call.layer] += 1
    fed: list[frozenset[object]] = []
    for vertex in graph.vertices:
        made_by = graph.calls[vertex.call] if vertex.call >= 0 else None
        if vertex.kind is Kind.INPUT:
            fed.append(frozenset([vertex.name]))
        elif (
            made_by is not None
            and made_by.last == vertex.call
            and names.get(made_by.layer) in anchors
        ):
            fed.append(frozenset([(names[made_by.layer], numbers[vertex.call])]))
        else:
            fed.append(_joined({fed[operand] for operand in vertex.operands}))
    found: dict[object, list[CallKey]] = defaultdict(list)
    for index, call in enumerate(graph.calls):
        if call.layer in loose and call.layer in layers and call.last == index:
            layer = layers[call.layer]
            owners = {full.rpartition(".")[0] for full in layer.tied.values()}
            owners |= {layer.name} if layer.parameters else set()
            own = frozenset(names.get(owner, owner) for owner in owners)
            by = _joined({fed[vertex] for vertex in call.inputs})
            found[kind(layer), own, by].append((call.layer, numbers[index]))
    return found


def _joined(sets: Set[frozenset[object]]) -> frozenset[object]:
    return next(iter(sets)) if len(sets) == 1 else frozenset[object]().union(*sets)


def with_folds(alignment: Alignment, a: Trace, b: Trace, store: TensorStore) -> Alignment:
    """Return an alignment that says which layers were taken over by the one before them."""
    holders = {above for name in a.layers for above in ancestors(name)}
    takers: dict[int, dict[str, None]] = defaultdict(dict)
    for key, entry in a.entries.items():
        if key.role == "inputs" and key.layer not in holders:
            takers[entry.slot][key.layer] = None
    reasons: dict[str | None, Reason] = dict(_out_of_sight(alignment, a, b))
    for pair, x, y in alignment.aligned:
        known = pair.folded_in
        if x.name in holders or pair.is_folded or (pair.reason is not None and not known):
            continue
        chain = [x.name, *known]
        chain += _gone_after(chain[-1], takers, alignment, a, b)
        choices = chain[len(known) :]
        if len(choices) > 1:
            distances = [_distance(name, y.name, a, b, store) for name in choices]
            best = distances.index(min(distances))
            if best:  # more was taken over than was known
                fold = Reason("folded", y.name, tuple(chain[1 : len(known) + best + 1]))
                reasons |= dict.fromkeys((x.name, *fold.parts), fold)
    pairs = (replace(p, reason=reasons.get(p.reference, p.reason)) for p in alignment.pairs)
    return replace(alignment, pairs=tuple(pairs))


def _gone_after(
    name: str, takers: Mapping[int, Iterable[str]], alignment: Alignment, a: Trace, b: Trace
) -> Iterator[str]:
    """Yield the layers of the reference in a row that are not in the candidate."""
    while True:
        slots = [a.entries[key].slot for key in a.of_role[name, "activations"]]
        after = {taker for slot in slots for taker in takers.get(slot, ())} - {name}
        if len(after) != 1:
            return
        (name,) = after
        pair = alignment.by_reference[name]
        is_gone = pair.candidate is None or (
            is_inert(b.layers[pair.candidate]) and not is_inert(a.layers[name])
        )
        if not is_gone or (pair.reason is not None and pair.reason.word != "unseen"):
            return
        yield name


def _distance(ours: str, theirs: str, a: Trace, b: Trace, store: TensorStore) -> float:
    """Return the squared error of a layer's outputs; infinity where the shapes differ."""
    left = [a.entries[key] for key in a.of_role[ours, "activations"]]
    right = [b.entries[key] for key in b.of_role[theirs, "activations"]]
    if not left or [x.shape for x in left] != [y.shape for y in right]:
        return math.inf
    both = zip(left, right, strict=True)
    return sum(gap(store[x.slot], store[y.slot])[0] ** 2 for x, y in both)


def _out_of_sight(alignment: Alignment, a: Trace, b: Trace) -> Iterator[tuple[str, Reason]]:
    """Yield the functions of the reference that may well run in the candidate, unseen.

    In scripts and compiled code none is seen, inside a transform of `torch.func` each is seen
    once for all samples, and where a value is rounded to few bits, its ends cut off what is
    outside as a ReLU does.
    """
    kinds = {kind(y) for y in b.layers.values() if y.status is Status.UNSUPPORTED}
    if b.rounds:
        kinds |= having("hinge", "clamp")
    for pair in alignment.pairs:
        if pair.reference is not None and pair.candidate is None and pair.reason is None:
            layer = a.layers[pair.reference]
            if layer.functional and (not b.shows_functions or kind(layer) in kinds):
                yield layer.name, Reason("unseen")
