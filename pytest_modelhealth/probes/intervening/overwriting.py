"""Samples overwritten by others, and what the rest of their batch sees of that."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.probes.conventions import Found, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import (
    Samples,
    all_equal,
    along,
    folded,
    groups_in,
    nodes_in,
    samples_in,
    selected,
)
from pytest_modelhealth.probes.intervening.differences import Apart, apart, least_apart
from pytest_modelhealth.probes.intervening.locating import Place, parting_at, where_they_part
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.report import LayerRecord, Parting


def what_samples_see(runs: Runs) -> Found:
    """Overwrite every second sample, then the others, then run one sample alone.

    Where rows are no samples, or see each other, and a vector in the batch puts them into groups,
    as nodes into graphs, the groups are the samples.

    Raises:
        UntellableError: nothing can be told, or rows are no samples.
    """
    seen = doubt = None
    try:
        seen = _what_rows_see(runs)
    except UntellableError as error:
        doubt = error
    numbers = None
    if seen is None or any(one.kind != "lost dimension" for one in seen.partings):
        numbers = groups_in(runs)
    if numbers is not None:
        groups = _OfGroups(runs, numbers)
        found = groups.seen()
        return seen if seen is not None and found.partings else found
    if seen is not None:
        return seen
    if nodes := nodes_in(runs):
        raise NotApplicableError(nodes)
    assert doubt is not None
    raise doubt


def _what_rows_see(runs: Runs) -> Found:
    samples = _samples(runs)
    first, second = _OfSamples(runs, samples), _second(runs, samples)
    if second is not None and not first.outputs:
        other = _OfSamples(runs, second)
        if other.outputs:
            seen = other.seen()
            if seen.partings and not _leads(runs, second):
                raise UntellableError(
                    f"outputs have a row for each of {second.number} along {_SECOND}",
                    other.changed,
                )
            return seen._replace(notes=(_ELSEWHERE.format(second.number), *seen.notes))
    seen = first.seen()
    if second is None or not seen.partings or not _OfSamples(runs, second).are_independent():
        return seen
    # Time in front looks so, and a layer that takes samples for time, as without batch_first.
    if samples.number != second.number and _leads(runs, second):
        return Found(first.changed, notes=(_ELSEWHERE.format(second.number),))
    shape = [second.number, samples.number]
    is_moved = any(list(t.shape[:2]) == shape for t in runs.base.outputs)
    if is_moved and _leads(runs, samples):
        return seen
    raise UntellableError(f"outputs are independent instead along {_SECOND}", first.changed)


_SECOND = "the second dimension of the batch: if that is the one of samples, say batch_dim=1"
_ELSEWHERE = "by the sizes of outputs and target, the samples are the {} of the second dimension"


def _leads(runs: Runs, samples: Samples) -> bool:
    """Whether a target is given that has a row for each sample."""
    sizes = {tensor.shape[0] for tensor in find_tensors(runs.request.target) if tensor.ndim}
    return sizes == {samples.number}


def _second(runs: Runs, samples: Samples) -> Samples | None:
    """Return the samples along the second dimension, where every tensor has it too."""
    if runs.conventions.batch_dim is not None or not samples.is_sure:
        return None
    second = Samples.along(runs.tensors, 1, is_sure=False)
    has_all = all(axis == 1 for axis, t in zip(second.axes, runs.tensors, strict=True) if t.ndim)
    return second if has_all and second.number > 1 else None


def _samples(runs: Runs) -> Samples:
    """Return where the samples lie, and raise `UntellableError` where it is not known."""
    tensors, said = runs.tensors, runs.conventions.batch_dim
    dimensional = [t for t in tensors if t.ndim]
    samples, why = samples_in(runs) if dimensional else None, ""
    if runs.has_others:
        why = "the batch holds a tensor that is sparse, nested or quantized; give dense ones"
    elif not dimensional:
        why = "the batch holds no tensor with dimensions"
    elif samples is None and said is not None:
        shape = tuple(dimensional[0].shape)
        why = f"batch_dim={said} is no dimension of the batch, whose shape is {shape}"
    elif samples is None or (
        not samples.is_sure and (groups_in(runs) is not None or nodes_in(runs))
    ):
        why = _not_in_common(dimensional)
    elif samples.number < 2:
        why = f"the batch has {'one sample' if samples.number else 'no samples'}; give two or more"
    elif all_equal(tensors, samples):
        why = "all samples of the batch are equal; give samples that differ"
    if samples is None or why:
        raise UntellableError(why)
    return samples


def _not_in_common(tensors: list[Tensor]) -> str:
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
    return (
        f"the tensors of the batch have no first dimension in common ({shapes}), and no other that "
        "outputs follow, so that it is not known which is that of samples; say it by batch_dim="
    )


class _Overwriting(ABC):
    """What follows from overwriting one half of the samples, and then the other half.

    Attributes:
        changed: what that is, for people.
        outputs: the numbers of the outputs that have rows for the samples.
    """

    changed = "every second sample overwritten by its neighbour"
    outputs: list[int]

    def __init__(self, runs: Runs, samples: Samples) -> None:
        self._runs, self._samples = runs, samples

    @abstractmethod
    def index(self, parity: int) -> Tensor:
        """Return which row each is overwritten by; of samples of a parity it is that itself."""

    @abstractmethod
    def kept(self, output: int, parity: int) -> Iterator[Tensor]:
        """Yield which places of an output are of samples left alone, in each way to read it."""

    @abstractmethod
    def same(self, tensor: Tensor, parity: int) -> Iterator[Tensor]:
        """Yield the same of any tensor of the model."""

    def differing(self) -> list[tuple[Apart, int, int]]:
        """Return what differs where nothing was overwritten, with its output and the parity.

        Raises:
            UntellableError: the model raises, or samples have no effect on themselves either.
        """
        batches = [selected(self._runs, self._samples, self.index(parity)) for parity in (0, 1)]
        ran = [self._runs.tried(batch, self.changed) for batch in batches]
        before = {n: self._runs.base.outputs[n] for n in self.outputs}
        pairs = [
            (one.outputs[n], n, parity)
            for parity, one in enumerate(ran)
            for n in self.outputs
            if n < len(one.outputs)
        ]
        moved = (apart(before[n], after) for after, n, _ in pairs)
        if not any(one is not None and one.effect > 0.0 for one in moved):
            raise UntellableError(
                f"with {self.changed} no finite number of an output changes: give samples "
                "that differ, or train for a step first",
                self.changed,
            )
        found = [
            (least_apart(before[n], after, self.kept(n, parity)), n, parity)
            for after, n, parity in pairs
        ]
        return [
            (one, n, parity) for one, n, parity in found if one is not None and one.effect > 0.0
        ]

    def place(self, parity: int) -> Place | None:
        """Return where samples of a parity first see the others."""
        after = selected(self._runs, self._samples, self.index(parity))
        same = functools.partial(self.same, parity=parity)
        return where_they_part(self._runs, self._runs.batch(), after, same)


class _OfGroups(_Overwriting):
    """Groups of rows, which are overwritten by their first row.

    The numbers of the groups stay the same, and so does what is no row of them, such as edges.
    """

    changed = "the rows of every second group overwritten by its first row"

    def __init__(self, runs: Runs, numbers: Tensor) -> None:
        rows, self._numbers = len(numbers), numbers
        axes = tuple(0 if t.ndim and len(t) == rows else None for t in runs.tensors)
        super().__init__(runs, Samples(rows, axes))
        self.outputs = [
            n
            for n, output in enumerate(runs.base.outputs)
            if (output.is_floating_point() or output.is_complex()) and [*self.same(output, 0)]
        ]

    def index(self, parity: int) -> Tensor:
        """Return the first row of its group, or the row itself."""
        first = torch.searchsorted(self._numbers, self._numbers)
        return torch.where(self._numbers % 2 == parity, torch.arange(len(first)), first)

    def kept(self, output: int, parity: int) -> Iterator[Tensor]:
        """Yield the places of an output that has a row for each row, or for each group."""
        return self.same(self._runs.base.outputs[output], parity)

    def same(self, tensor: Tensor, parity: int) -> Iterator[Tensor]:
        """Yield the places of any tensor that has a row for each row, or for each group."""
        for numbers in (self._numbers, torch.arange(int(self._numbers[-1]) + 1)):
            if tensor.ndim and len(tensor) == len(numbers):
                yield along(numbers % 2 == parity, tensor, 0)
                return

    def seen(self) -> Found:
        """Return what groups see of each other."""
        rows, count = len(self._numbers), int(self._numbers[-1]) + 1
        if not self.outputs:
            raise UntellableError(
                f"no output has a row for each of the {rows} rows or {count} groups of the batch, "
                "so that nothing tells them apart"
            )
        partings = []
        if differing := self.differing():
            found, _, parity = max(differing)
            partings = [parting_at("groups", found, self.place(parity))]
            self._runs.check_steady(self.changed)
        note = f"the samples are the {count} groups that a vector in the batch puts its {rows} rows"
        return Found(self.changed, partings, (f"{note} into",))


class _Rows(NamedTuple):
    """Where an output has its samples.

    Args:
        axis: the dimension.
        each: how many rows a sample has there, as where steps and samples are flattened into one.
    """

    axis: int
    each: int = 1


class _OfSamples(_Overwriting):
    """Samples that lie along one dimension, each overwritten by its neighbour.

    Lengths in descending order stay so: it is always a valid batch.
    """

    def __init__(self, runs: Runs, samples: Samples) -> None:
        super().__init__(runs, samples)
        rows = {n: self._rows_of(n, output) for n, output in enumerate(runs.base.outputs)}
        self._rows = {n: one for n, one in rows.items() if one is not None}
        self.outputs = list(self._rows)

    @cached_property
    def _fewer(self) -> Ran:
        return self._first(self._samples.number - 1)

    def _first(self, count: int) -> Ran:
        return self._runs.forward(selected(self._runs, self._samples, torch.arange(count)))

    def _rows_of(self, number: int, output: Tensor) -> _Rows | None:
        """Return where the samples of an output are; ``None`` where it has no row for each.

        It is the dimension that they have in the batch. Elsewhere, pooled, moved or flattened with
        another, it is that which becomes smaller with the batch.
        """
        if not (output.is_floating_point() or output.is_complex()):
            return None
        count, sure = self._samples.number, self._samples.is_sure
        axes = [axis for axis, size in enumerate(output.shape) if size and size % count == 0]
        exact = [axis for axis in axes if output.shape[axis] == count]
        if sure and self._samples.axis in exact:
            return _Rows(self._samples.axis)
        if not axes or self._fewer.error:
            return _Rows(exact[0]) if sure and len(exact) == 1 else None
        rows = [_Rows(axis, output.shape[axis] // count) for axis in (*exact, *axes)]
        return next((one for one in rows if self._follows(number, one)), None)

    def _follows(self, number: int, rows: _Rows) -> bool:
        """Whether of one sample less an output has its rows less, and is else of the same shape."""
        shape = list(self._runs.base.outputs[number].shape)
        shape[rows.axis] -= rows.each
        return [list(t.shape) for t in self._fewer.outputs[number : number + 1]] == [shape]

    def index(self, parity: int) -> Tensor:
        """Return the sample before or after it, or itself."""
        count = self._samples.number
        rows = torch.arange(count)
        return rows - rows % 2 if parity == 0 else (rows | 1).clamp(max=count - 1)

    def _alone(self, parity: int) -> Tensor:
        return self.index(parity) == torch.arange(self._samples.number)

    def kept(self, output: int, parity: int) -> Iterator[Tensor]:
        """Yield the places of an output that are of samples left alone.

        Where samples are flattened with other dimensions there is one for each order that these may
        have.
        """
        rows, alone = self._rows[output], self._alone(parity)
        for inner in (n for n in range(1, rows.each + 1) if rows.each % n == 0):
            which = alone.repeat_interleave(inner).repeat(rows.each // inner)
            yield along(which, self._runs.base.outputs[output], rows.axis)

    def same(self, tensor: Tensor, parity: int) -> Iterator[Tensor]:
        """Yield the places of any tensor that are of samples left alone."""
        alone = self._alone(parity)
        exact = [axis for axis, size in enumerate(tensor.shape) if size == len(alone)]
        for axis in exact:
            yield along(alone, tensor, axis)
        if 0 not in exact:
            yield from folded(alone, tensor, is_exact=bool(exact))

    def are_independent(self) -> bool:
        """Whether samples have an effect on themselves alone."""
        try:
            return bool(self.outputs) and not self.differing()
        except UntellableError:
            return False

    def seen(self) -> Found:
        """Return what samples see of each other."""
        if not self.outputs:
            raise UntellableError(
                f"no output has a row for each of the {self._samples.number} samples, so that "
                "nothing tells them apart; return what is computed for each, not only a loss"
                if self._samples.is_sure
                else _not_in_common([t for t in self._runs.tensors if t.ndim])
            )
        seen = self.differing()
        if seen:
            self._check_rows()
            seen = [one for one in seen if self._follows(one[1], self._rows[one[1]])]
        partings = []
        if seen:
            found, _, parity = max(seen)
            place = self.place(parity)
            if doubt := "" if place is None else self._doubt(place):
                raise UntellableError(doubt, self.changed)
            self._runs.check_steady(self.changed)
            partings.append(parting_at(_kind(place), found, place))
        alone = self._first(1)
        if alone.error:
            note = f"of one sample alone the model raises {alone.error}"
            return Found(self.changed, partings, (note,))
        for n in self.outputs:
            whole = tuple(self._runs.base.outputs[n].shape)
            if n < len(alone.outputs) and alone.outputs[n].ndim < len(whole):
                shape = tuple(alone.outputs[n].shape)
                detail = f"returns the shape {shape}, of {self._samples.number} samples {whole}"
                partings.append(Parting("lost dimension", 0.0, detail=detail))
                break
        return Found(self.changed, partings)

    def _check_rows(self) -> None:
        """Raise `UntellableError` where rows that see each other are no samples."""
        fewer, base = self._fewer, self._runs.base.outputs
        why = ""
        if fewer.error:
            why = (
                f"with one sample less the model raises {fewer.error}: it is bound to the size of "
                "this batch, whose rows are no samples"
            )
        elif all(base[n].shape == t.shape for n in self.outputs for t in fewer.outputs[n : n + 1]):
            why = (
                f"of one sample less its output still has {self._samples.number} rows, which are "
                "no samples; give a batch of another size"
            )
        if why:
            raise UntellableError(why, self.changed)

    def _doubt(self, place: Place) -> str:
        """Return why samples may see each other by design; ``""`` where none is known."""
        record = place.record
        if record.options.get("track_running_stats") is False:
            return (
                f"{record.label!r} has no running statistics (track_running_stats=False), so that "
                "it normalises by the batch in evaluation mode too"
            )
        if _has_weights_from_elsewhere(place, self._samples.number):
            return (
                f"{record.label!r} gives another output for equal inputs: its weights are made of "
                "the batch, as where a model adapts to it"
            )
        return ""


def _has_weights_from_elsewhere(place: Place, samples: int) -> bool:
    """Whether a layer that takes each row by itself gave another output for an equal one.

    One whose forward does more than a product (a subclass of Linear) need not take rows so.
    """
    width = place.record.options.get("in_features")
    if place.parting.taker or width is None or width == samples:
        return False
    flow = flow_of(place.observation)
    return len({flow.graph.vertices[n].function for n in flow.inside(place.parting.layer)}) <= 1


def _moves_inputs(place: Place) -> bool:
    """Whether a layer takes rows of the batch that were only put in another order."""
    flow, parting = place.observation.flow, place.parting
    if flow is None or not parting.taker:
        return False
    is_given = set(flow.producers(parting.taker)) <= set(flow.inputs)
    return is_given and set(parting.between) <= _MOVES and bool(parting.between)


_MOVES = frozenset({"roll", "flip", "index", "index_select", "gather"})


def _is_one_sequence(record: LayerRecord) -> bool:
    """Whether a layer of torch is given one sequence, by its dimensions."""
    is_sequential = "batch_first" in record.options or record.type_name == "MultiheadAttention"
    shape = () if record.inputs is None else record.inputs.shape
    return is_sequential and (len(shape) == 2 or (len(shape) == 3 and 1 in shape[:2]))


def _kind(place: Place | None) -> str:
    """Return by what samples see each other: what may be meant so is a kind of its own."""
    if place is None:
        return "values"
    if place.chosen:
        return "choice"
    if _moves_inputs(place):
        return "order"
    return "sequence" if _is_one_sequence(place.record) else "values"
