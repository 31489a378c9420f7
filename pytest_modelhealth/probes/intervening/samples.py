"""Samples overwritten by others, of all inputs or of one: what of the outputs follows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.operations import having
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import Samples, names_of
from pytest_modelhealth.probes.intervening.combination import reordered
from pytest_modelhealth.probes.intervening.leaks import (
    Change,
    Effect,
    moved_by,
    readings,
)
from pytest_modelhealth.probes.intervening.partings import DESIGN, Place, parting
from pytest_modelhealth.probes.intervening.positions import tables_met
from pytest_modelhealth.probes.intervening.running import Runs, are_apart
from pytest_modelhealth.report import Parting
from pytest_modelhealth.report.flow import Flow, Graph, Kind

_OVERWRITTEN = "every second sample overwritten"
NO_EFFECT = "has no effect on the output"
_SECOND = "the second dimension of the batch: if that is the one of samples, say batch_dim=1"


def overwritten(samples: Samples) -> list[Change]:
    """Return two changes: every second sample by its neighbour, then the others.

    Lengths in descending order stay so: it is always a valid batch.
    """
    rows = torch.arange(samples.number)
    sources = (rows ^ 1).clamp(max=samples.number - 1)
    changes = []
    for parity in (1, 0):
        index = torch.where(rows % 2 == parity, sources, rows)
        same = partial(readings, index == rows)
        changes.append(Change(_OVERWRITTEN, samples.select(index), same))
    return changes


def whose_order_matters(runs: Runs) -> Effects:
    """Look at what samples see of each other, and whether outputs follow them in another order.

    Where they do not, no reader of the model would doubt what begins at a recurrent layer, at a
    softmax, and at a table along the samples; the rest may be meant.
    """
    moved, seen = _out_of_order(runs), what_samples_see(runs)
    partings = [
        replace(one, kind="doubt")
        if one.kind == "values" and not (moved and _is_certain(runs, one))
        else one
        for one in seen.partings
    ]
    return seen._replace(partings=partings)


def what_samples_see(runs: Runs) -> Effects:
    """Overwrite every second sample, then the others, permute all, then run one sample alone."""
    samples, partings, notes = runs.batch.samples, list[Parting](), tuple[str, ...]()
    count = samples.number
    lacking = (
        f"no output has a row for each of the {count} samples: return what is computed for each, "
        "not only a loss; if they are along another dimension, say batch_dim="
    )
    moved = moved_by(runs, *overwritten(samples), lacking=lacking)
    if moved and (moved := _of_samples(runs, samples, moved)):
        partings = [_parting(runs, moved, partial(_kind, count))]
    else:
        with suppress(UntellableError):  # that which samples see is told
            out_of_order = _out_of_order(runs)
            partings = [_parting(runs, out_of_order, _by_table)] if out_of_order else []
    alone = runs.forward(runs.batch.copy(samples.select(torch.arange(1))))
    if alone.error:
        notes = (f"of one sample alone the model raises {alone.error}",)
    for whole, one in zip(runs.base.outputs, alone.outputs, strict=False):
        if one.ndim < whole.ndim and count in whole.shape:
            shapes = tuple(one.shape), tuple(whole.shape)
            detail = f"returns the shape {shapes[0]}, of {count} samples {shapes[1]}"
            partings.append(Parting("lost dimension", 0.0, detail=detail))
            break
    return Effects(_OVERWRITTEN, partings, notes)


def _parting(runs: Runs, moved: list[Effect], kind: Any) -> Parting:
    worst = max(moved, key=lambda one: one.difference)
    return parting(runs, worst.change, worst.difference, kind)


def _of_samples(runs: Runs, samples: Samples, seen: list[Effect]) -> list[Effect]:
    """Return those of the effects on outputs that are of samples; a pair of samples is none."""
    count, why = samples.number, ""
    fewer = runs.forward(runs.batch.copy(samples.select(torch.arange(count - 1))))
    shapes = [(a.shape, b.shape) for a, b in zip(runs.base.outputs, fewer.outputs, strict=False)]
    differs = [sum(a != b for a, b in zip(*pair, strict=False)) for pair in shapes]
    differs += [0] * (len(runs.base.outputs) - len(differs))
    if fewer.error:
        why = (
            f"with one sample less the model raises {fewer.error}: it is bound to the size of "
            "this batch, whose rows are no samples"
        )
    elif not any(differs[one.output] for one in seen):
        why = (
            f"of one sample less its output still has {count} rows, which are no samples; give a "
            "batch of another size"
        )
    elif runs.batch.conventions.batch_dim is None:  # that of samples may be the second
        second = Samples.along(runs.batch, 1)
        may_be = second.is_common(runs.batch) and second.number > 1
        with suppress(UntellableError):
            if may_be and not moved_by(runs, *overwritten(second), lacking=_SECOND):
                why = f"outputs are independent instead along {_SECOND}"
    if why:
        raise NotApplicableError(why, _OVERWRITTEN)
    return [one for one in seen if differs[one.output] == 1]


def _out_of_order(runs: Runs) -> list[Effect]:
    """Return the effects on outputs that do not follow their samples into another order."""
    lacking = "no output has a row for each of them"
    moved = moved_by(runs, reordered(runs), lacking=lacking)
    if moved:
        with runs.kept(()):
            first, second = (runs.take(runs.batch.copy()) for _ in range(2))
        if second.error or are_apart(first.outputs, second.outputs):
            raise NotApplicableError("it draws numbers, or keeps something from call to call")
    return moved


# ---- what runs part by ---------------------------------------------------------------------------


def _by_table(place: Place | None) -> str:
    """Return the kind of a table that comes in along the samples where runs part.

    Raises:
        UntellableError: none does: marks made of the place in a batch, noise from a fixed seed.
    """
    flow = flow_of(place.observation) if place is not None else Flow(Graph)
    for vertex, made_of in tables_met(flow):
        is_own = place and flow.graph.calls[max(vertex.call, 0)].layer == place.parting.layer
        if is_own and not any(v.kind is Kind.CONSTANT and not v.has("constant") for v in made_of):
            return "table"
    raise UntellableError("samples are told apart by something else than a table of the model's")


def _is_certain(runs: Runs, parting: Parting) -> bool:
    """Whether runs part at a recurrent layer, a softmax or a table along the samples."""
    record, flow = runs.observation.layers.get(parting.layer), runs.observation.flow
    if parting.kind != "values" or record is None:
        return parting.kind == "table"
    names = set(parting.between)
    if not parting.taker and flow is not None:
        names |= {flow.graph.vertices[number].function for number in flow.inside(record.name)}
    is_recurrent = not parting.taker and "batch_first" in record.options
    return is_recurrent or bool(names & having("softmax"))


def _kind(samples: int, place: Place | None) -> str:
    """Return by what samples see each other: what may be meant so is a kind of its own."""
    if place is None or place.chosen:
        return "values" if place is None else DESIGN
    record, at, flow = place.record, place.parting, flow_of(place.observation)
    is_meant = record.options.get("track_running_stats") is False
    inside = frozenset() if at.taker else flow.inside(at.layer)
    is_product = len({flow.graph.vertices[n].function for n in inside}) <= 1
    if is_product and not at.taker and record.options.get("in_features", samples) != samples:
        raise NotApplicableError(f"the weights of {record.label!r} are made of the batch")
    if at.taker and at.between and set(at.between) <= having("move"):
        is_meant |= set(flow.producers(at.taker)) <= set(flow.inputs)  # negatives, replayed steps
    is_sequential = "batch_first" in record.options or record.type_name == "MultiheadAttention"
    shape = () if record.inputs is None else record.inputs.shape
    if is_sequential:
        is_one = len(shape) == 2 or (len(shape) == 3 and 1 in shape[:2])  # one sequence
    else:  # the scores of one
        is_one = record.activation == "softmax" and len(shape) > 2 and shape[0] == 1
    return DESIGN if is_meant or is_one else "values"


# ---- one input after the other -------------------------------------------------------------------


def what_inputs_do(runs: Runs) -> Effects:
    """Replace one input after the other by that of other samples.

    Some samples come twice: a mean over the batch would not see them change places.
    """
    notes, is_judged = list[str](), False
    try:
        samples = runs.batch.samples
    except UntellableError as error:
        raise NotApplicableError(f"no input can be replaced: {error}") from error
    if not runs.base.outputs:
        raise NotApplicableError("the model returns no tensor on which an input could show")
    rows = torch.arange(samples.number)
    indices = rows - rows % 2, torch.zeros_like(rows), torch.full_like(rows, samples.number - 1)
    for number, name in enumerate(names_of(runs.batch, runs.model)):
        axes = (axis if n == number else None for n, axis in enumerate(samples.axes))
        one = samples._replace(axes=tuple(axes))
        change = next(filter(runs.batch.is_changed, map(one.select, indices)), None)
        if change is None:
            continue
        ran = runs.forward(runs.batch.copy(change))
        is_judged = is_judged or not ran.error
        if ran.error:
            notes.append(f"with input {name!r} of other samples the model raises {ran.error}")
        elif not are_apart(runs.base.outputs, ran.outputs):
            notes.append(f"input {name!r} {NO_EFFECT}")
    if not is_judged:
        reason = f"no input could be replaced: {'; '.join(notes)}"
        raise NotApplicableError(reason, notes=tuple(notes))
    return Effects("each input by itself, by that of other samples", notes=tuple(notes))
