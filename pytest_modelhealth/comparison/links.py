"""Which tensor of the candidate stands beside which of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_modelhealth.alignment.result import Alignment, Change, Pair, Split
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.trace import Key, Trace
from pytest_modelhealth.report import Status

FLOWING = ("inputs", "activations", "gradients")
BACKWARD = ("gradients", "parameter_gradients")


@dataclass(frozen=True)
class Link:
    """One tensor of the reference and what it is compared with.

    Args:
        reference: the tensor in the reference.
        candidate: the tensor in the candidate; several that together are the one.
        part: the rows of the candidate's tensor that are compared, if not all: first and last + 1.
        transposed: whether the candidate keeps it transposed.
    """

    reference: Key
    candidate: tuple[Key, ...]
    part: tuple[int, int] | None = None
    transposed: bool = False

    def is_laid_out_otherwise(self, a: Trace, b: Trace) -> bool:
        """Whether the candidate's tensor flows through the layer in another shape."""
        if self.reference.role not in FLOWING or len(self.candidate) > 1 or self.part is not None:
            return False
        return a.entries[self.reference].shape != b.entries[self.candidate[0]].shape

    def slots(self, b: Trace) -> tuple[int, ...]:
        """Return where the candidate's tensors are kept."""
        return tuple(b.entries[key].slot for key in self.candidate)

    def read(self, store: TensorStore, a: Trace, b: Trace) -> tuple[Tensor, Tensor]:
        """Return both tensors in the reference's shape; in their own where these do not fit."""
        expected = store[a.entries[self.reference].slot]
        return expected, self.fit([store[slot] for slot in self.slots(b)], expected.shape)

    def fit(self, tensors: list[Tensor], shape: torch.Size) -> Tensor:
        """Return the candidate's tensors as one of the reference's shape, if they can be."""
        tensors = [tensor.T for tensor in tensors] if self.transposed else tensors
        found = tensors[0]
        if len(tensors) > 1:
            found = _joined(tensors, shape)
        elif self.part is not None:
            found = _narrowed(found, shape, *self.part)
        if found.shape != shape and found.numel() == shape.numel():
            found = found.reshape(shape)
        return found


def _joined(tensors: list[Tensor], shape: torch.Size) -> Tensor:
    for dim in range(tensors[0].ndim - 1, -1, -1):
        size = sum(tensor.shape[dim] for tensor in tensors)
        if size == shape[dim : dim + 1].numel() and len(shape) == tensors[0].ndim:
            return torch.cat(tensors, dim)
    return tensors[0]


def _narrowed(tensor: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor:
    for dim in range(tensor.ndim - 1, -1, -1):
        if len(shape) == tensor.ndim and shape[dim] == stop - start != tensor.shape[dim] >= stop:
            return tensor.narrow(dim, start, stop - start)
    return tensor


def link(
    alignment: Alignment, a: Trace, b: Trace, given: Set[str], merged: Container[str]
) -> list[Link]:
    """Return every tensor of the reference that has a counterpart, in order of appearance.

    Args:
        alignment: which layer is which.
        a: the reference's run.
        b: the candidate's run.
        given: layers of the reference whose buffers differ before the step already.
        merged: layers that are compared together with others, by the module around them.
    """
    links = [*_outputs(a, b), *_of_calls(alignment, a, b)]
    told = {layer for layer, _ in alignment.calls}
    for pair in alignment.pairs:
        if pair.reference is not None and pair.candidate is not None:
            if pair.is_folded:
                continue  # what it gave, the layer that it is folded into gives
            if pair.reference in told:
                links += _parameter_gradients(pair.reference, pair.candidate, a, b)
            else:
                links += _of_pair(pair, pair.reference, pair.candidate, a, b)
            if pair.reference not in given:
                links += _buffers(pair.reference, pair.candidate, a, b)
    for split in alignment.splits:
        links += _of_fusion(split, a, b) if split.fused else _of_split(split, a, b)
    kept = (
        one
        for one in links
        if one.reference.layer not in merged
        and (b.observation.backward or one.reference.role not in BACKWARD)
    )
    return sorted(kept, key=lambda one: a.entries[one.reference].moment)


def _outputs(a: Trace, b: Trace) -> Iterator[Link]:
    for key in a.of_role["", "outputs"]:
        if key in b.entries:
            yield Link(key, (key,))


def _of_calls(alignment: Alignment, a: Trace, b: Trace) -> Iterator[Link]:
    """Yield what layers that are not called equally often take and give, call by call.

    Of the gradients it is not known which call they came to.
    """
    for (ours, number), (theirs, other) in alignment.calls.items():
        for role in ("inputs", "activations"):
            left, right = a.of_role[ours, role], b.of_role[theirs, role]
            calls = a.layers[ours].calls, b.layers[theirs].calls
            if (len(left), len(right)) == calls:
                yield Link(left[number], (right[other],))


def _of_pair(pair: Pair, ours: str, theirs: str, a: Trace, b: Trace) -> Iterator[Link]:
    for role in FLOWING if _calls_fit(ours, theirs, a, b) else ():
        source = ours if role == "inputs" or pair.output_of is None else pair.output_of
        left, right = a.of_role[source, role], b.of_role[theirs, role]
        if role == "gradients" and len(left) != len(right):
            continue  # they come in reverse: the first of two calls is the last
        if role == "gradients" and len(left) > 1:  # of several outputs, in any order
            left = sorted(left, key=lambda key: a.entries[key].shape)
            right = sorted(right, key=lambda key: b.entries[key].shape)
        if not b.is_ordered:
            left, right = _told_apart(left, right, (ours, theirs), a, b)
        for one, other in zip(left, right, strict=False):
            yield Link(one, (other,))
    if pair.output_of is None:
        yield from _parameter_gradients(ours, theirs, a, b)


def _told_apart(
    left: list[Key], right: list[Key], layers: tuple[str, str], a: Trace, b: Trace
) -> tuple[list[Key], list[Key]]:
    """Return the tensors of a layer that are known to be the same ones in a run without order.

    They are those of a shape that each call has once. What nothing uses is not computed there, nor
    is what was computed before, so calls that are not as many are others.
    """
    calls = a.observation.layers[layers[0]].calls
    if calls != b.observation.layers[layers[1]].calls:
        return [], []
    ours = Counter(a.entries[key].shape for key in left)
    theirs = Counter(b.entries[key].shape for key in right)
    once = [shape for shape in ours if ours[shape] == theirs[shape] == calls]
    if len(ours) == len(theirs) == 1 and len(left) == len(right) == calls:
        return left, right  # in another layout, maybe
    return (
        [key for shape in once for key in left if a.entries[key].shape == shape],
        [key for shape in once for key in right if b.entries[key].shape == shape],
    )


def _calls_fit(ours: str, theirs: str, a: Trace, b: Trace) -> bool:
    """Whether the calls of two layers are the same, or can be compared in order.

    Those of a container cannot where its layers may be called by themselves; these are compared.
    """
    calls = a.observation.layers[ours].calls, b.observation.layers[theirs].calls
    prefix = f"{ours}."
    return calls[0] == calls[1] or not any(n.startswith(prefix) for n in a.observation.layers)


def _buffers(ours: str, theirs: str, a: Trace, b: Trace) -> Iterator[Link]:
    """Yield what a layer keeps from step to step, as the forward left it; counters are left out."""
    for key in a.of_role[ours, "buffers"]:
        other = key._replace(layer=theirs)
        own, found = a.entries[key], b.entries.get(other)
        if found is not None and own.dtype.is_floating_point and own.shape == found.shape:
            yield Link(key, (other,))


def _parameter_gradients(ours: str, theirs: str, a: Trace, b: Trace) -> Iterator[Link]:
    names = parameter_names(ours, theirs, a, b)
    for key in a.of_role[ours, "parameter_gradients"]:
        other = Key(theirs, "parameter_gradients", names.get(key.tensor, key.tensor))
        if other in b.entries:
            yield Link(key, (other,), transposed=_is_transposed(key, other, a, b))


def parameter_names(ours: str, theirs: str, a: Trace, b: Trace) -> dict[str, str]:
    """Return the candidate's name of each parameter of a layer: the same, or that of its values."""
    x, y = a.layers[ours], b.layers[theirs]
    held = [set(t.observation.layers[name].buffers) for t, name in ((a, ours), (b, theirs))]
    others = len(x.parameters) != len(y.parameters) or held[0] != held[1]
    if set(x.parameters) & set(y.parameters) or others:
        return {name: name for name in x.parameters if name in y.parameters}
    if x.fingerprint != y.fingerprint:
        return dict(zip(x.parameters, y.parameters, strict=True))
    by_values = (
        sorted(one.parameters, key=lambda n: one.parameters[n].fingerprint) for one in (x, y)
    )
    return dict(zip(*by_values, strict=True))


def _is_transposed(key: Key, other: Key, a: Trace, b: Trace) -> bool:
    shape, found = a.entries[key].shape, b.entries[other].shape
    types = [trace.observation.layers[one.layer].type_name for trace, one in ((a, key), (b, other))]
    square = shape == found and types[0] != types[1] and "Conv1D" in types
    return len(shape) == 2 and found == shape[::-1] and (shape != found or square)


def _of_split(split: Split, a: Trace, b: Trace) -> Iterator[Link]:
    """Yield the one layer's tensors beside those of its parts, joined."""
    for role in ("activations", "gradients"):
        groups = zip(*(b.of_role[part, role] for part in split.parts), strict=False)
        for one, others in zip(a.of_role[split.whole, role], groups, strict=False):
            yield Link(one, tuple(others))
    for one in a.of_role[split.whole, "inputs"][:1]:
        for other in b.of_role[split.parts[0], "inputs"][:1]:
            yield Link(one, (other,))
    for one in a.of_role[split.whole, "parameter_gradients"]:
        others = tuple(one._replace(layer=part) for part in split.parts)
        if all(other in b.entries for other in others):
            transposed = _is_other_way(
                a.entries[one].shape, [b.entries[other].shape for other in others]
            )
            yield Link(one, others, transposed=transposed)


def _of_fusion(split: Split, a: Trace, b: Trace) -> Iterator[Link]:
    """Yield the tensors of each part beside its rows of the candidate's one layer."""
    start = 0
    layers = a.observation.layers
    for part in split.parts:
        parameters = layers[part].parameters
        rows = next(iter(parameters.values())).shape[0]
        for role in (*FLOWING, "parameter_gradients"):
            for one in a.of_role[part, role]:
                other = one._replace(layer=split.whole)
                if other not in b.entries:
                    continue
                transposed = role == "parameter_gradients" and _is_other_way(
                    b.entries[other].shape,
                    [layers[name].parameters[one.tensor].shape for name in split.parts],
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


def trains_nothing(b: Trace) -> bool:
    """Whether all that can be trained lies in layers that are not called."""
    return not any(
        set(layer.parameters) - set(layer.frozen)
        for layer in b.observation.layers.values()
        if layer.calls
    )


def is_adapted(alignment: Alignment, b: Trace) -> bool:
    """Whether a candidate trains layers that were added, and most of the others are frozen."""
    layers = b.observation.layers
    added = [layers[p.candidate] for p in alignment.of(Change.INSERTED) if p.candidate is not None]
    if not any(set(layer.parameters) - set(layer.frozen) for layer in added):
        return False
    kept = [layers[theirs.name] for _, _, theirs in alignment.aligned]
    kept = [layer for layer in kept if layer.parameters]
    frozen = [layer for layer in kept if set(layer.parameters) <= set(layer.frozen)]
    return 2 * len(frozen) > len(kept)


def missing_gradients(alignment: Alignment, a: Trace, b: Trace) -> Iterator[tuple[Key, str]]:
    """Yield what has a gradient in the reference and none in the candidate, and why.

    Where the candidate's layers cannot be seen, nothing is missed; nor where what is trained there
    was added, and the rest frozen for it.
    """
    if not (a.observation.backward and b.observation.backward):
        return
    adapted = is_adapted(alignment, b)
    lost = (Status.NO_GRAD_PATH, Status.UNUSED_IN_LOSS)
    for pair in alignment.pairs:
        if pair.reference is None or pair.candidate is None or pair.output_of is not None:
            continue
        x, y = (
            a.observation.layers[pair.reference],
            b.observation.layers[pair.candidate],
        )
        if x.status is Status.OBSERVED and y.status in lost and not adapted:
            for key in a.of_role[pair.reference, "gradients"][:1]:
                yield key, y.reason
        names = parameter_names(pair.reference, pair.candidate, a, b)
        for key in a.of_role[pair.reference, "parameter_gradients"]:
            other = names.get(key.tensor, key.tensor)
            if other in y.parameters and other not in y.parameter_gradients:
                frozen = other in y.frozen
                if frozen and adapted:
                    continue
                yield key, f"{other} is frozen there" if frozen else "the loss does not reach it"
