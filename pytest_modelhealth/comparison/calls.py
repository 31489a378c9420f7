"""Which call of one model is which of another, where two layers are not called equally often.

An activation may be one module called several times, several modules, or functions. So such calls
are aligned by their place in the flow: by the layers with parameters whose values come to them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from pytest_modelhealth.alignment.alignable import Alignable
from pytest_modelhealth.alignment.result import Alignment, Change, Pair, Split
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.report import Flow
from pytest_modelhealth.report.flow.graph import Kind

CallKey = tuple[str, int]
"""A layer and which of its calls, from 0."""


def with_calls(alignment: Alignment, a: Trace, b: Trace) -> Alignment:
    """Return an alignment that says which call is which of layers that are not called alike."""
    layers = alignment.reference, alignment.candidate
    run = [(x.place, y.place) for _, x, y in alignment.aligned if x.parameters]
    is_ordered = [place for _, place in sorted(run)] == sorted(place for _, place in run)
    alike = [
        (x, y)
        for _, x, y in alignment.aligned
        if x.calls == y.calls and (is_ordered or x.parameters or not _is_of_many(x, y))
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


def _is_of_many(x: Alignable, y: Alignable) -> bool:
    """Whether a layer is called several times, or is a function, which is named by its place."""
    return max(x.calls, y.calls) > 1 or (x.functional and y.functional)


def _with_reasons(alignment: Alignment, calls: Mapping[CallKey, CallKey]) -> Alignment:
    """Return an alignment with these calls, and the reason where a layer's are those of others."""
    images: dict[str | None, dict[str, None]] = defaultdict(dict)
    origins: dict[str | None, dict[str, None]] = defaultdict(dict)
    for (one, _), (other, _) in calls.items():
        images[one][other] = origins[other][one] = None
    counts = Counter(ours for ours, _ in calls), Counter(theirs for theirs, _ in calls.values())
    whole = (
        {x for x in counts[0] if counts[0][x] == alignment.reference[x].calls} | {None},
        {y for y in counts[1] if counts[1][y] == alignment.candidate[y].calls} | {None},
    )
    single = {
        x: y
        for x in counts[0]
        for y in images[x]
        if len(images[x]) == len(origins[y]) == 1 and x in whole[0] and y in whole[1]
    }
    pairs = []
    for pair in _paired_anew(alignment.pairs, single):
        ours, theirs = pair.reference, pair.candidate
        is_whole = ours in whole[0] and theirs in whole[1]
        if ours in single or not is_whole:
            pairs.append(pair)
        elif len(images[ours]) > 1 or ours is None:
            one = ours or next(iter(origins[theirs]))
            pairs.append(replace(pair, reason=Split(one, tuple(images[one]))))
        else:
            other = theirs or next(iter(images[ours]))
            pairs.append(replace(pair, reason=Split(other, tuple(origins[other]), fused=True)))
    kept = {x: y for x, y in calls.items() if x[0] not in single or x[1] != y[1]}
    return replace(alignment, calls=kept, pairs=tuple(pairs))


def _paired_anew(pairs: Iterable[Pair], found: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the pairs, those layers together that are found to be the same."""
    taken = set(found.values())
    for pair in pairs:
        theirs = found.get(pair.reference or "")
        if theirs is None and pair.candidate not in taken:
            yield pair
        elif theirs is None and pair.reference is not None:
            yield replace(pair, candidate=None, change=Change.REMOVED)
        elif theirs == pair.candidate:
            yield pair
        elif theirs is not None:
            change = Change.MATCHED if theirs == pair.reference else Change.RENAMED
            yield replace(pair, candidate=theirs, change=change)
            if pair.candidate is not None and pair.candidate not in taken:
                yield Pair(None, pair.candidate, Change.INSERTED)


def _places(
    flow: Flow,
    layers: Mapping[str, Alignable],
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
            found[layer.kind, own, by].append((call.layer, numbers[index]))
    return found


def _joined(sets: Set[frozenset[object]]) -> frozenset[object]:
    return next(iter(sets)) if len(sets) == 1 else frozenset[object]().union(*sets)
