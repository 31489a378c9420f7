"""Which tensor of the candidate stands beside which of the reference."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_modelhealth.alignment.result import Change, Pair, Reason, fingerprint, fingerprints
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.trace import Key, Trace, TwoRuns
from pytest_modelhealth.report import Status

FLOWING = ("inputs", "activations", "gradients")
BACKWARD = ("gradients", "parameter_gradients")


@dataclass(frozen=True)
class Link:
    """One tensor of the reference and what it is compared with."""

    reference: Key  # the tensor in the reference
    candidate: tuple[Key, ...]  # the tensor in the candidate; several that together are the one
    # the rows of the candidate's tensor that are compared, if not all: first and last + 1
    part: tuple[int, int] | None = None
    transposed: bool = False  # whether the candidate keeps it transposed

    def read(self, store: TensorStore, a: Trace, b: Trace) -> tuple[Tensor, Tensor]:
        """Return both tensors in the reference's shape; in their own where these do not fit."""
        expected = store[a.entries[self.reference].slot]
        tensors = [store[b.entries[key].slot] for key in self.candidate]
        tensors = [tensor.T for tensor in tensors] if self.transposed else tensors
        found, shape = tensors[0], expected.shape
        for dim in range(found.ndim - 1, -1, -1) if found.ndim == len(shape) else ():
            if len(tensors) > 1 and sum(one.shape[dim] for one in tensors) == shape[dim]:
                found = torch.cat(tensors, dim)
                break
            if len(tensors) == 1 and self.part is not None:
                start, stop = self.part
                if shape[dim] == stop - start != found.shape[dim] >= stop:
                    found = found.narrow(dim, start, stop - start)
                    break
        if found.shape != shape and found.numel() == shape.numel():
            found = found.reshape(shape)
        return expected, found


def link(runs: TwoRuns, given: Set[str], merged: Container[str]) -> list[Link]:
    """Return every tensor of the reference that has a counterpart, in order of appearance.

    The buffers of `given` layers differ before the step already; `merged` ones are compared with
    others by the module around them.
    """
    a, b, alignment = runs.a, runs.b, runs.alignment
    links = [Link(key, (key,)) for key in a.of_role["", "outputs"] if key in b.entries]
    told = {layer for layer, _ in alignment.calls}
    links += [
        Link(left[number], (right[other],))
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
                links.append(Link(key, (other,)))
    for split in alignment.splits:
        links += _of_fusion(split, a, b) if split.word == "fused" else _of_split(split, a, b)
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
            yield Link(one, (other,))


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
            yield Link(key, (other,), transposed=turned)


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


def _of_split(split: Reason, a: Trace, b: Trace) -> Iterator[Link]:
    """Yield the one layer's tensors beside those of its parts, joined."""
    for role in ("activations", "gradients"):
        groups = zip(*(b.of_role[part, role] for part in split.parts), strict=False)
        for one, others in zip(a.of_role[split.whole, role], groups, strict=False):
            yield Link(one, tuple(others))
    for one in a.of_role[split.whole, "inputs"][:1]:
        yield from (Link(one, (other,)) for other in b.of_role[split.parts[0], "inputs"][:1])
    for one in a.of_role[split.whole, "parameter_gradients"]:
        others = tuple(one._replace(layer=part) for part in split.parts)
        if all(other in b.entries for other in others):
            shapes = [b.entries[other].shape for other in others]
            yield Link(one, others, None, _is_other_way(a.entries[one].shape, shapes))


def _of_fusion(split: Reason, a: Trace, b: Trace) -> Iterator[Link]:
    """Yield the tensors of each part beside its rows of the candidate's one layer."""
    start = 0
    parameters = {part: a.layers[part].parameters for part in split.parts}
    for part in split.parts:
        rows = next(iter(parameters[part].values())).shape[0]
        for role in (*FLOWING, "parameter_gradients"):
            for one in a.of_role[part, role]:
                other = one._replace(layer=split.whole)
                if other not in b.entries:
                    continue
                transposed = role == "parameter_gradients" and _is_other_way(
                    b.entries[other].shape, [own[one.tensor].shape for own in parameters.values()]
                )
                part_of = None if role == "inputs" else (start, start + rows)
                yield Link(one, (other,), part_of, transposed)
        start += rows


def _is_other_way(whole: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> bool:
    """Whether parts that stand one below the other stand side by side in the whole, transposed."""
    if len(whole) != 2 or any(len(part) != 2 for part in parts):
        return False
    stacked = sum(part[0] for part in parts), parts[0][1]
    return stacked != whole and whole == stacked[::-1]


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
        there = (Key(theirs.name, "gradients"),)
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
