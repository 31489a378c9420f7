"""Samples overwritten by others, and what the rest of their batch sees of that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.probes.intervening.batches import (
    all_equal,
    along,
    first_samples,
    kept,
    overwritten,
    rows_of,
)
from pytest_modelhealth.probes.intervening.differences import Apart, apart, is_rounding, largest
from pytest_modelhealth.probes.intervening.grouped import (
    GROUPS_CHANGED,
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
    dimension = runs.conventions.batch_dim or 0
    samples, doubt = _samples(runs, dimension)
    if doubt:
        return Seen(doubt=doubt, tried=False)
    base = runs.base
    if base.error:
        return Seen(doubt=f"in evaluation mode the model raises {base.error}", tried=False)
    rows = {n: _rows(t, samples, dimension) for n, t in enumerate(base.outputs)}
    outputs = {n: axis for n, axis in rows.items() if axis is not None}
    if not outputs:
        return Seen(doubt=_NO_ROWS.format(samples), tried=False)
    ran = [runs.forward(overwritten(runs, samples, dimension, parity)) for parity in (0, 1)]
    if error := ran[0].error or ran[1].error:
        return Seen(doubt=f"with {CHANGED} the model raises {error}")
    return _Overwriting(runs, samples, dimension, outputs).of(ran)


def _samples(runs: Runs, dimension: int) -> tuple[int, str]:
    """Return the size of the batch, or why it is not known."""
    tensors = [t for t in runs.tensors if t.ndim]
    if runs.has_others:
        return 0, "the batch holds a tensor that is sparse, nested or quantized; give dense ones"
    if not tensors:
        return 0, "the batch holds no tensor with dimensions"
    if runs.conventions.batch_dim is not None and not -1 < dimension < tensors[0].ndim:
        shape = tuple(tensors[0].shape)
        return 0, f"batch_dim={dimension} is no dimension of the batch, whose shape is {shape}"
    samples = tensors[0].shape[dimension]
    sizes = [t.shape[dimension] if t.ndim > dimension else 0 for t in tensors]
    if runs.conventions.batch_dim is None and set(sizes) != {samples}:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
        return 0, (
            f"the tensors of the batch have no first dimension in common ({shapes}), so that it is "
            "not known which is that of samples; say batch_dim=0 if it is the first"
        )
    if samples < 2:
        return 0, f"the batch has {'one sample' if samples else 'no samples'}; give two or more"
    if all_equal(tensors, samples, dimension):
        return 0, "all samples of the batch are equal; give samples that differ"
    return samples, ""


def _rows(output: Tensor, samples: int, dimension: int) -> int | None:
    """Return the dimension of samples of an output: that of the batch, or the one of their number.

    Time in front is pooled away, or comes in front, as a loss over sequences asks for it.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return None
    axes = [axis for axis, size in enumerate(output.shape) if size == samples]
    return dimension if dimension in axes else axes[0] if len(axes) == 1 else None


class _Overwriting:
    """What follows from the runs in which samples were overwritten."""

    def __init__(self, runs: Runs, samples: int, dimension: int, outputs: dict[int, int]) -> None:
        self._runs = runs
        self._samples, self._dimension = samples, dimension
        self._outputs = outputs

    def of(self, ran: list[Ran]) -> Seen:
        """Return what they see of each other."""
        seen = self._seen(ran)
        doubt = self._without_effect(ran)
        if seen and not doubt:
            fewer = self._runs.forward(self._first(self._samples - 1))
            seen = [] if fewer.error else [one for one in seen if not self._pairs(one[1], fewer)]
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

    def _without_effect(self, ran: list[Ran]) -> str:
        """Return why no sample has an effect, on itself neither; ``""`` where one has."""
        outputs = {n: self._runs.base.outputs[n] for n in self._outputs}
        if not any(bool(output.isfinite().any()) for output in outputs.values()):
            return "its outputs hold no finite number"
        if any(_moved(outputs[n], one.outputs[n : n + 1]) for n in outputs for one in ran):
            return ""
        return (
            "the output is the same for all samples, so that none can be seen to have an effect; "
            "train for a step first"
        )

    def _seen(self, ran: list[Ran]) -> list[tuple[Apart, int, int]]:
        """Return what differs in samples that were left alone, with its output and the parity."""
        return [
            (found, n, parity)
            for parity, one in enumerate(ran)
            for n, found in self._effects(one, parity).items()
            if not is_rounding(found, self._runs.base.outputs[n].dtype)
        ]

    def _no_samples(self, fewer: Ran) -> str:
        """Return why rows that see each other are no samples; ``""`` where they pair samples."""
        if fewer.error:
            return (
                f"with one sample less the model raises {fewer.error}: it is bound to the size of "
                "this batch, whose rows are no samples"
            )
        if all(self._is_bound(n, fewer) for n in self._outputs):
            return (
                f"of one sample less its output still has {self._samples} rows, which are no "
                "samples; give a batch of another size"
            )
        if self._dimension not in self._outputs.values():
            return _NO_ROWS.format(self._samples)
        return ""

    def _effects(self, ran: Ran, parity: int) -> dict[int, Apart]:

        effects = {}
        for n, axis in self._outputs.items():
            before = self._runs.base.outputs[n]
            same = along(kept(self._samples, parity), before, axis)
            found = apart(before, ran.outputs[n], same) if n < len(ran.outputs) else None
            if found is not None:
                effects[n] = found
        return effects

    def _first(self, count: int) -> Inputs:
        return first_samples(self._runs, count, self._samples, self._dimension)

    def _pairs(self, output: int, fewer: Ran) -> bool:
        """Whether another dimension of an output changes with the number of samples."""
        if output >= len(fewer.outputs):
            return True
        shape = list(self._runs.base.outputs[output].shape)
        shape[self._outputs[output]] -= 1
        return list(fewer.outputs[output].shape) != shape

    def _is_bound(self, output: int, fewer: Ran) -> bool:
        """Whether an output has as many rows as before, of one sample less."""
        return output < len(fewer.outputs) and (
            fewer.outputs[output].shape == self._runs.base.outputs[output].shape
        )

    def _lost(self, alone: Ran) -> Iterator[Parting]:
        for n, axis in self._outputs.items():
            expected = list(self._runs.base.outputs[n].shape)
            whole = tuple(expected)
            expected[axis] = 1
            if n >= len(alone.outputs) or alone.outputs[n].ndim >= len(expected):
                continue
            shape = tuple(alone.outputs[n].shape)
            detail = f"returns the shape {shape}, of {self._samples} samples {whole}"
            yield Parting("lost dimension", 0.0, "", detail=detail)
            return

    def _parting(self, found: Apart, parity: int) -> tuple[Parting, str]:
        """Return where samples see each other first, or why nothing can be told."""
        runs = self._runs
        before, after = runs.batch(), overwritten(runs, self._samples, self._dimension, parity)
        place = where_they_part(runs, before, after, rows_of(self._samples, parity))
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
        if _has_weights_from_elsewhere(place, record, self._samples):
            return (
                f"{record.label!r} gives another output for equal inputs: its weights are made of "
                "the batch, as where a model adapts to it"
            )
        if self._is_time_major():
            return (
                "outputs are independent along their second dimension instead: if that is the one "
                "of samples, say batch_dim=1"
            )
        return ""

    def _is_time_major(self) -> bool:
        """Whether the second dimension behaves as that of samples does."""

        runs, base = self._runs, self._runs.base
        tensors = [t for t in runs.tensors if t.ndim]
        sizes = {t.shape[1] if t.ndim > 1 else 0 for t in tensors}
        size = sizes.pop() if len(sizes) == 1 else 0
        judged = [base.outputs[n] for n in self._outputs]
        if self._dimension or size < 2 or any(t.ndim < 2 or t.shape[1] != size for t in judged):
            return False
        ran = runs.forward(overwritten(runs, size, 1))
        if ran.error:
            return False
        found = [
            apart(base.outputs[n], ran.outputs[n], along(kept(size, 0), base.outputs[n], 1))
            for n in self._outputs
        ]
        return all(one is not None and one.effect < 1e-6 for one in found)


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
