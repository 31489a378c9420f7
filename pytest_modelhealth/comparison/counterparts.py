"""Which call, and which tensor, of the candidate stands beside which of the reference.

What two runs tell of an alignment beyond its layers comes first: which call is which. An activation
may be one module called several times, several modules, or functions. So such calls are aligned by
their place in the flow: by the layers with parameters whose values come to them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from torch import Tensor

from pytest_modelhealth.alignment.result import (
    Alignment,
    Change,
    Pair,
    Reason,
    fingerprint,
    fingerprints,
    kind,
    order,
)
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.runs import Key, Trace, TwoRuns
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Flow, LayerRecord, Status
from pytest_modelhealth.report.flow.graph import Kind

CallKey = tuple[str, int]  # a layer and which of its calls, from 0


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
            others = images[ours] if theirs is None else origins[theirs]
            pair = replace(pair, reason=Reason("calls", parts=tuple(others)))
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

    What is aligned goes by its name in the reference; anchors have parameters and are called alike.
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


def out_of_sight(alignment: Alignment, a: Trace, b: Trace) -> Alignment:
    """Return an alignment that says which functions may well run in the candidate, unseen.

    In scripts and compiled code none is seen, inside a transform of `torch.func` each is seen
    once for all samples, and where a value is rounded to few bits, its ends cut off what is
    outside as a ReLU does.
    """
    kinds = {kind(y) for y in b.layers.values() if y.status is Status.UNSUPPORTED}
    kinds |= having("hinge", "clamp") if b.rounds else set()
    pairs = []
    for pair in alignment.pairs:
        if pair.reference is not None and pair.candidate is None and pair.reason is None:
            layer = a.layers[pair.reference]
            if layer.functional and (not b.engine.shows_functions or kind(layer) in kinds):
                pair = replace(pair, reason=Reason("unseen"))
        pairs.append(pair)
    return replace(alignment, pairs=tuple(pairs))


FLOWING = ("inputs", "activations", "gradients")
BACKWARD = ("gradients", "parameter_gradients")


@dataclass(frozen=True)
class Link:
    """One tensor of the reference and what it is compared with."""

    reference: Key  # the tensor in the reference
    candidate: Key  # the tensor in the candidate
    transposed: bool = False  # whether the candidate keeps it transposed

    def read(self, store: TensorStore, a: Trace, b: Trace) -> tuple[Tensor, Tensor]:
        """Return both tensors in the reference's shape; in their own where these do not fit."""
        expected, found = (
            store[a.entries[self.reference].slot],
            store[b.entries[self.candidate].slot],
        )
        found = found.T if self.transposed else found
        if found.shape != expected.shape and found.numel() == expected.numel():
            found = found.reshape(expected.shape)
        return expected, found


def link(runs: TwoRuns, given: Set[str], merged: Container[str]) -> list[Link]:
    """Return every tensor of the reference that has a counterpart, in order of appearance.

    The buffers of `given` layers differ before the step already; `merged` ones are compared with
    others by the module around them.
    """
    a, b, alignment = runs.a, runs.b, runs.alignment
    links = [Link(key, key) for key in a.of_role["", "outputs"] if key in b.entries]
    told = {layer for layer, _ in alignment.calls}
    links += [
        Link(left[number], right[other])
        for (ours, number), (theirs, other) in alignment.calls.items()
        for role in ("inputs", "activations")  # which call a gradient came to is not known
        for left, right in [(a.of_role[ours, role], b.of_role[theirs, role])]
        if (len(left), len(right)) == (a.layers[ours].calls, b.layers[theirs].calls)
    ]
    for pair, x, y in alignment.aligned:
        if pair.is_folded:
            continue  # what it gave, the layer that it is folded into gives
        if x.name not in told:
            links += _flowing(pair, x.name, y.name, runs)
        if x.name in told or pair.output_of is None:
            links += _parameter_gradients(x.name, y.name, runs)
        for key in a.of_role[x.name, "buffers"] if x.name not in given else ():
            # What is kept from step to step, as the forward left it; counters are left out.
            other, own = key._replace(layer=y.name), a.entries[key]
            found = b.entries.get(other)
            if found is not None and own.dtype.is_floating_point and own.shape == found.shape:
                links.append(Link(key, other))
    kept = (
        one
        for one in links
        if one.reference.layer not in merged
        and (b.observation.backward or one.reference.role not in BACKWARD)
    )
    return sorted(kept, key=lambda one: a.entries[one.reference].moment)


def _flowing(pair: Pair, ours: str, theirs: str, runs: TwoRuns) -> Iterator[Link]:
    a, b = runs.a, runs.b
    if a.layers[ours].calls != b.layers[theirs].calls and any(
        name.startswith(f"{ours}.") for name in a.layers
    ):
        return  # its layers may be called by themselves, and these are compared
    for role in FLOWING:
        source = ours if role == "inputs" or pair.output_of is None else pair.output_of
        left, right = a.of_role[source, role], b.of_role[theirs, role]
        if role == "gradients" and len(left) != len(right):
            continue  # they come in reverse: the first of two calls is the last
        if role == "gradients" and len(left) > 1:  # of several outputs, in any order
            left = sorted(left, key=lambda key: a.entries[key].shape)
            right = sorted(right, key=lambda key: b.entries[key].shape)
        for one, other in zip(left, right, strict=False):
            yield Link(one, other)


def _parameter_gradients(ours: str, theirs: str, runs: TwoRuns) -> Iterator[Link]:
    a, b = runs.a, runs.b
    names = parameter_names(runs, ours, theirs)
    types = a.layers[ours].type_name, b.layers[theirs].type_name
    for key in a.of_role[ours, "parameter_gradients"]:
        other = Key(theirs, "parameter_gradients", names.get(key.tensor, key.tensor))
        if other in b.entries:
            shape, found = a.entries[key].shape, b.entries[other].shape
            turned = shape != found or (types[0] != types[1] and "Conv1D" in types)
            turned = turned and len(shape) == 2 and found == shape[::-1]
            yield Link(key, other, turned)


def parameter_names(runs: TwoRuns, ours: str, theirs: str) -> dict[str, str]:
    """Return the candidate's name of each parameter of a layer: the same, or that of its values."""
    x, y = runs.a.layers[ours], runs.b.layers[theirs]
    held = [{*t.observation.layers[n].buffers} for t, n in ((runs.a, ours), (runs.b, theirs))]
    others = len(x.parameters) != len(y.parameters) or held[0] != held[1]
    if set(x.parameters) & set(y.parameters) or others:
        return {name: name for name in x.parameters if name in y.parameters}
    if fingerprints(x) != fingerprints(y):
        return dict(zip(x.parameters, y.parameters, strict=True))
    by_values = (
        sorted(one.parameters, key=lambda n: fingerprint(one.parameters[n])) for one in (x, y)
    )
    return dict(zip(*by_values, strict=True))


def is_adapted(runs: TwoRuns) -> bool:
    """Whether a candidate trains layers that were added, and most of the others are frozen."""
    layers = runs.b.observation.layers
    added = [layers[p.name] for p in runs.alignment.of(Change.INSERTED)]
    if not any(set(layer.parameters) - set(layer.frozen) for layer in added):
        return False
    kept = [layers[theirs.name] for _, _, theirs in runs.alignment.aligned if theirs.parameters]
    frozen = [layer for layer in kept if set(layer.parameters) <= set(layer.frozen)]
    return 2 * len(frozen) > len(kept)


def missing_gradients(runs: TwoRuns) -> Iterator[tuple[Link, str]]:
    """Yield what has a gradient in the reference and none in the candidate, and why.

    Where the candidate's layers cannot be seen, nothing is missed; nor where what is trained there
    was added, and the rest frozen for it.
    """
    a, b = runs.a.observation, runs.b.observation
    if not (a.backward and b.backward):
        return
    adapted = is_adapted(runs)
    lost = (Status.NO_GRAD_PATH, Status.UNUSED_IN_LOSS)
    for pair, ours, theirs in runs.alignment.aligned:
        if pair.output_of is not None:
            continue
        there = Key(theirs.name, "gradients")
        y = b.layers[theirs.name]
        if ours.status is Status.OBSERVED and y.status in lost and not adapted:
            for key in runs.a.of_role[ours.name, "gradients"][:1]:
                yield Link(key, there), y.reason
        names = parameter_names(runs, ours.name, theirs.name)
        for key in runs.a.of_role[ours.name, "parameter_gradients"]:
            other = names.get(key.tensor, key.tensor)
            frozen = other in y.frozen
            is_lost = other in y.parameters and other not in y.parameter_gradients
            if is_lost and not (frozen and adapted):
                why = f"{other} is frozen there" if frozen else "the loss does not reach it"
                yield Link(key, there), why
