"""Samples overwritten by others, and what the rest of their batch sees of that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.probes.intervening.batches import (
    Samples,
    all_equal,
    along,
    first_samples,
    kept,
    overwritten,
    rows_of,
    samples_in,
)
from pytest_modelhealth.probes.intervening.differences import Apart, largest
from pytest_modelhealth.probes.intervening.grouped import (
    GROUPS_CHANGED,
    differing,
    groups_in,
    nodes_in,
    what_groups_see,
)
from pytest_modelhealth.probes.intervening.locating import Place, parting_at, where_they_part
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.report import LayerRecord, Parting

CHANGED = "every second sample overwritten by its neighbour"
_NO_ROWS = (
    "no output has a row for each of the {} samples, so that nothing tells them apart; return what "
    "is computed for each, not only a loss"
)


class Seen(NamedTuple):
    """What samples see of each other.

    Args:
        partings: where they do, and a dimension that one sample alone loses.
        notes: what else a reader should know.
        doubt: why nothing can be told; ``""`` where something can.
        tried: whether samples were overwritten at all.
        changed: what was changed.
        unsuited: why the rows of this batch are no samples; ``""`` where that is not known.
    """

    partings: tuple[Parting, ...] = ()
    notes: tuple[str, ...] = ()
    doubt: str = ""
    tried: bool = True
    changed: str = CHANGED
    unsuited: str = ""


def what_samples_see(runs: Runs) -> Seen:
    """Overwrite every second sample, then the others, then run one sample alone.

    Where rows are no samples, or see each other, and a vector in the batch puts them into groups,
    as nodes into graphs, the groups are the samples.
    """
    seen = _what_rows_see(runs)
    is_judged = not seen.doubt and not any(one.kind != "lost dimension" for one in seen.partings)
    groups = None if is_judged else groups_in(runs)
    if groups is None:
        return seen._replace(unsuited=nodes_in(runs)) if seen.doubt else seen
    partings, doubt = what_groups_see(runs, groups)
    if partings and seen.partings:
        return seen
    note = (
        f"the samples are the {groups.count} groups that a vector in the batch puts its "
        f"{groups.rows} rows into"
    )
    return Seen(tuple(partings), (note,), doubt, changed=GROUPS_CHANGED)


def _what_rows_see(runs: Runs) -> Seen:
    samples, doubt = _samples(runs)
    if samples is None or doubt:
        return Seen(doubt=doubt, tried=False)
    if runs.base.error:
        return Seen(doubt=f"in evaluation mode the model raises {runs.base.error}", tried=False)
    first = _Overwriting(runs, samples)
    seen = first.seen()
    second = _second(runs, samples)
    if second is None or not (seen.doubt or seen.partings):
        return seen
    other = _Overwriting(runs, second)
    if first.outputs:
        is_other = not seen.doubt and other.are_independent()
        return _beside(runs, seen, samples, second) if is_other else seen
    if not other.outputs:
        return seen
    along = other.seen()
    if along.doubt or not along.partings or _leads(runs, second):
        return along._replace(notes=(_ELSEWHERE.format(second.number), *along.notes))
    return Seen(doubt=f"outputs have a row for each of {second.number} along {_SECOND}")


_SECOND = "the second dimension of the batch: if that is the one of samples, say batch_dim=1"
_ELSEWHERE = "by the sizes of outputs and target, the samples are the {} of the second dimension"


def _beside(runs: Runs, seen: Seen, first: Samples, second: Samples) -> Seen:
    """Return what is known of rows that see each other, but not along the second dimension.

    Time in front looks so, and a layer that takes samples for time, as without batch_first.
    """
    if first.number != second.number and _leads(runs, second):
        return Seen(notes=(_ELSEWHERE.format(second.number),))
    is_moved = any(list(t.shape[:2]) == [second.number, first.number] for t in runs.base.outputs)
    if is_moved and _leads(runs, first):
        return seen
    return Seen(doubt=f"outputs are independent instead along {_SECOND}")


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


def _samples(runs: Runs) -> tuple[Samples | None, str]:
    """Return where the samples lie, or why it is not known."""
    tensors, said = runs.tensors, runs.conventions.batch_dim
    dimensional = [t for t in tensors if t.ndim]
    if runs.has_others:
        return None, "the batch holds a tensor that is sparse, nested or quantized; give dense ones"
    if not dimensional:
        return None, "the batch holds no tensor with dimensions"
    samples = samples_in(runs)
    if samples is None and said is not None:
        shape = tuple(dimensional[0].shape)
        return None, f"batch_dim={said} is no dimension of the batch, whose shape is {shape}"
    if samples is None or (not samples.is_sure and (groups_in(runs) or nodes_in(runs))):
        return None, _not_in_common(dimensional)
    if samples.number < 2:
        few = "one sample" if samples.number else "no samples"
        return None, f"the batch has {few}; give two or more"
    if all_equal(tensors, samples):
        return None, "all samples of the batch are equal; give samples that differ"
    return samples, ""


def _not_in_common(tensors: list[Tensor]) -> str:
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
    return (
        f"the tensors of the batch have no first dimension in common ({shapes}), and no other that "
        "outputs follow, so that it is not known which is that of samples; say it by batch_dim="
    )


class _Rows(NamedTuple):
    """Where an output has its samples.

    Args:
        axis: the dimension.
        each: how many rows a sample has there, as where steps and samples are flattened into one.
    """

    axis: int
    each: int = 1


class _Overwriting:
    """What follows from overwriting samples.

    Attributes:
        outputs: the outputs that have rows for the samples, by number.
    """

    def __init__(self, runs: Runs, samples: Samples) -> None:
        self._runs, self._samples = runs, samples
        rows = {n: self._rows(n, output) for n, output in enumerate(runs.base.outputs)}
        self.outputs = {n: one for n, one in rows.items() if one is not None}

    @cached_property
    def _fewer(self) -> Ran:
        return self._runs.forward(self._first(self._samples.number - 1))

    @cached_property
    def _ran(self) -> list[Ran]:
        return [self._runs.forward(overwritten(self._runs, self._samples, p)) for p in (0, 1)]

    def _rows(self, number: int, output: Tensor) -> _Rows | None:
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
        fewer = self._fewer.outputs[number : number + 1]
        rows = [_Rows(axis, output.shape[axis] // count) for axis in (*exact, *axes)]
        return next((one for one in rows if fewer and self._follows(output, one, fewer[0])), None)

    def _follows(self, output: Tensor, rows: _Rows, fewer: Tensor) -> bool:
        """Whether of one sample less an output has its rows less, and is else of the same shape."""
        shape = list(output.shape)
        shape[rows.axis] -= rows.each
        return list(fewer.shape) == shape

    def _is_row(self, output: int, fewer: Ran) -> bool:
        """Whether of one sample less an output has its rows less, and pairs no samples."""
        before, after = self._runs.base.outputs[output], fewer.outputs[output : output + 1]
        return bool(after) and self._follows(before, self.outputs[output], after[0])

    def seen(self) -> Seen:
        """Return what samples see of each other."""
        if not self.outputs:
            tensors = [t for t in self._runs.tensors if t.ndim]
            no_rows = _NO_ROWS.format(self._samples.number)
            doubt = no_rows if self._samples.is_sure else _not_in_common(tensors)
            return Seen(doubt=doubt, tried=False)
        if error := self._ran[0].error or self._ran[1].error:
            return Seen(doubt=f"with {CHANGED} the model raises {error}")
        seen, doubt = self._differing(), self._without_effect()
        if seen and not doubt:
            fewer = self._fewer
            seen = [] if fewer.error else [one for one in seen if self._is_row(one[1], fewer)]
            doubt = "" if seen else self._no_samples(fewer)
        partings: list[Parting] = []
        if seen and not doubt:
            found, _, parity = max(seen)
            parting, doubt = self._parting(found, parity)
            partings.append(parting)
        if doubt:
            return Seen(doubt=doubt)
        alone = self._runs.forward(self._first(1))
        notes = (f"of one sample alone the model raises {alone.error}",) if alone.error else ()
        if not alone.error:
            partings += self._lost(alone)
        return Seen(tuple(partings), notes)

    def are_independent(self) -> bool:
        """Whether samples have an effect on themselves alone."""
        if not self.outputs or self._ran[0].error or self._ran[1].error:
            return False
        return not self._differing() and not self._without_effect()

    def _without_effect(self) -> str:
        """Return why no sample has an effect, on itself neither; ``""`` where one has."""
        outputs = {n: self._runs.base.outputs[n] for n in self.outputs}
        if not any(bool(output.isfinite().any()) for output in outputs.values()):
            return "its outputs hold no finite number"
        if any(_moved(outputs[n], one.outputs[n : n + 1]) for n in outputs for one in self._ran):
            return ""
        return (
            "the output is the same for all samples, so that none can be seen to have an effect; "
            "train for a step first"
        )

    def _differing(self) -> list[tuple[Apart, int, int]]:
        def kept(n: int, parity: int) -> Iterator[Tensor]:
            output, rows = self._runs.base.outputs[n], self.outputs[n]
            return _kept_in(output, rows, self._samples.number, parity)

        return differing(self._runs, self._ran, self.outputs, kept)

    def _no_samples(self, fewer: Ran) -> str:
        """Return why rows that see each other are no samples; ``""`` where they pair samples."""
        if fewer.error:
            return (
                f"with one sample less the model raises {fewer.error}: it is bound to the size of "
                "this batch, whose rows are no samples"
            )
        base, outputs = self._runs.base.outputs, fewer.outputs
        if all(n < len(outputs) and outputs[n].shape == base[n].shape for n in self.outputs):
            return (
                f"of one sample less its output still has {self._samples.number} rows, which are "
                "no samples; give a batch of another size"
            )
        return ""

    def _first(self, count: int) -> Inputs:
        return first_samples(self._runs, count, self._samples)

    def _lost(self, alone: Ran) -> Iterator[Parting]:
        for n in self.outputs:
            whole = tuple(self._runs.base.outputs[n].shape)
            if n >= len(alone.outputs) or alone.outputs[n].ndim >= len(whole):
                continue
            shape = tuple(alone.outputs[n].shape)
            detail = f"returns the shape {shape}, of {self._samples.number} samples {whole}"
            yield Parting("lost dimension", 0.0, "", detail=detail)
            return

    def _parting(self, found: Apart, parity: int) -> tuple[Parting, str]:
        """Return where samples see each other first, or why nothing can be told."""
        runs, samples = self._runs, self._samples
        before, after = runs.batch(), overwritten(runs, samples, parity)
        place = where_they_part(runs, before, after, rows_of(samples.number, parity))
        parting = parting_at(_kind(place), found, place)
        doubt = "" if place is None else self._doubt(place)
        return parting, doubt or runs.unsteady

    def _doubt(self, place: Place) -> str:
        """Return why samples may see each other by design; ``""`` where none is known."""
        assert place.observation is not None
        record = place.observation.layers[place.layer]
        options = record.options
        if options.get("track_running_stats") is False:
            return (
                f"{record.label!r} has no running statistics (track_running_stats=False), so that "
                "it normalises by the batch in evaluation mode too"
            )
        if _has_weights_from_elsewhere(place, record, self._samples.number):
            return (
                f"{record.label!r} gives another output for equal inputs: its weights are made of "
                "the batch, as where a model adapts to it"
            )
        return ""


def _kept_in(output: Tensor, rows: _Rows, samples: int, parity: int) -> Iterator[Tensor]:
    """Yield which places of an output are of samples that were left alone.

    Where samples are flattened with other dimensions there is one for each order that these may
    have.
    """
    index = torch.arange(samples * rows.each)
    for inner in range(1, rows.each + 1):
        if rows.each % inner == 0:
            yield along(kept(samples, parity)[index // inner % samples], output, rows.axis)


def _has_weights_from_elsewhere(place: Place, record: LayerRecord, samples: int) -> bool:
    """Whether a layer that takes each row by itself gave another output for an equal one.

    One whose forward does more than a product (a subclass of Linear) need not take rows so.
    """
    width = record.options.get("in_features")
    if place.given or width is None or width == samples or place.observation is None:
        return False
    flow = flow_of(place.observation)
    return len({flow.graph.vertices[n].function for n in flow.inside(place.layer)}) <= 1


def _moves_inputs(place: Place) -> bool:
    """Whether a layer takes rows of the batch that were only put in another order."""
    flow = None if place.observation is None else place.observation.flow
    if flow is None or not place.given:
        return False
    sources = set(flow.producers(place.given))
    return sources <= set(flow.inputs) and set(place.between) <= _MOVES and bool(place.between)


_MOVES = frozenset({"roll", "flip", "index", "index_select", "gather"})


def _is_one_sequence(record: LayerRecord) -> bool:
    """Whether a layer of torch is given one sequence, by its dimensions."""
    is_sequential = "batch_first" in record.options or record.type_name == "MultiheadAttention"
    shape = () if record.inputs is None else record.inputs.shape
    return is_sequential and (len(shape) == 2 or (len(shape) == 3 and 1 in shape[:2]))


def _kind(place: Place | None) -> str:
    """Return by what samples see each other: what may be meant so is a kind of its own."""
    if place is None or place.observation is None:
        return "values"
    if place.chosen:
        return "choice"
    if _moves_inputs(place):
        return "order"
    return "sequence" if _is_one_sequence(place.observation.layers[place.layer]) else "values"


def _moved(before: Tensor, after: list[Tensor]) -> bool:
    """Whether an output, if there is one, is another."""
    found = largest([before], after)
    return found is not None and found.effect > 0.0
