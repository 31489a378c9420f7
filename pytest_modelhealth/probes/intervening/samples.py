"""Samples overwritten by others, of all inputs or of one: what of the outputs follows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.operations import having
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.leaks import (
    Change,
    Effect,
    Place,
    along,
    effects,
    parting,
    readings,
    rows_of,
)
from pytest_modelhealth.probes.intervening.running import (
    SEED,
    Runs,
    Values,
    are_apart,
    changeable,
    is_number,
)
from pytest_modelhealth.report import Parting
from pytest_modelhealth.report.flow import Kind

_FEWEST = 4
NO_EFFECT = "has no effect on the output"
_HELD, _WAVES = {Kind.PARAMETER, Kind.BUFFER, Kind.CALL, Kind.UNKNOWN}, {"sin", "cos"}
"""What a table is kept in or looked up by, and what it is made with."""
_PERMUTED = "samples permuted"
_SECOND = "the second dimension of the batch: if that is the one of samples, say batch_dim=1"


class Samples(NamedTuple):
    """Where the samples of a batch lie."""

    number: int
    axes: tuple[int | None, ...]  # in each of `Runs.tensors`; ``None``: no row for each

    @classmethod
    def along(cls, runs: Runs, axis: int) -> Samples:
        """Return those along a dimension, as many as the first tensor that has it tells."""
        count = next((t.shape[axis] for t in runs.tensors if t.ndim > axis), 0)
        has = (t.ndim > axis and t.shape[axis] == count for t in runs.tensors)
        return cls(count, tuple(axis if one else None for one in has))

    def is_common(self, runs: Runs) -> bool:
        """Whether every tensor with dimensions has them."""
        return not any(a is None and t.ndim for t, a in zip(runs.tensors, self.axes, strict=True))

    def select(self, index: Tensor) -> Values:
        """Return the change to the samples of an index, in all tensors that have some at once."""

        def values(number: int, tensor: Tensor) -> Tensor | None:
            axis = self.axes[number]
            return None if axis is None else tensor.index_select(axis, index.to(tensor.device))

        return values


def samples_in(runs: Runs) -> Samples:
    """Return where the samples lie: in the first dimension that all tensors have in common."""
    asked, tensors = runs.conventions.batch_dim, [t for t in runs.tensors if t.ndim]
    if runs.has_others:
        raise UntellableError(
            "the batch holds a tensor that is sparse, nested or quantized; give dense ones"
        )
    if not tensors:
        raise UntellableError("the batch holds no tensor with dimensions")
    samples = Samples.along(runs, asked or 0)
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
    if asked is not None and not samples.number:
        raise UntellableError(f"batch_dim={asked} is no dimension of the batch ({shapes})")
    if asked is None and not samples.is_common(runs):
        raise UntellableError(
            f"the tensors of the batch have no first dimension in common ({shapes}), so that it is "
            "not known which is that of samples; say it by batch_dim="
        )
    if samples.number < 2:
        raise UntellableError("the batch has one sample, or none; give two or more")
    if all(
        torch.equal(t, t.narrow(axis, 0, 1).expand_as(t))
        for t, axis in zip(runs.tensors, samples.axes, strict=True)
        if axis is not None
    ):
        raise UntellableError("all samples of the batch are equal; give samples that differ")
    return samples


def what_samples_see(runs: Runs) -> Effects:
    """Overwrite every second sample, then the others, permute all, then run one sample alone.

    Where rows are no samples, or see each other, and a vector in the batch puts them into groups,
    as nodes into graphs, the groups are the samples.
    """
    groups = _groups_in(runs)
    try:
        of_rows = _what_rows_see(runs)
    except UntellableError:
        if groups is None:
            _check_for_edges(runs)
            raise
        return _what_groups_see(runs, groups)
    if groups is None or not of_rows.partings:
        return of_rows
    of_groups = _what_groups_see(runs, groups)
    return of_rows if of_groups.partings else of_groups


def _what_rows_see(runs: Runs) -> Effects:
    samples = samples_in(runs)
    count, partings, notes = samples.number, list[Parting](), tuple[str, ...]()
    lacking = (
        f"no output has a row for each of the {count} samples: return what is computed for each, "
        "not only a loss; if they are along another dimension, say batch_dim="
    )
    seen = effects(runs, *_overwritten(runs, samples), lacking=lacking)
    text = seen[0].change.text
    moved = [one for one in seen if one.difference.effect > 0.0]
    if moved and (moved := _of_samples(runs, samples, moved)):
        worst = max(moved, key=lambda one: one.difference)
        partings = [parting(runs, worst.change, worst.difference, partial(_kind, count))]
    else:
        with suppress(UntellableError):  # that which samples see is told
            partings = _misplaced(runs, _out_of_order(runs, rows_in_order(runs)))
    alone = runs.forward(runs.changed(samples.select(torch.arange(1))))
    if alone.error:
        notes = (f"of one sample alone the model raises {alone.error}",)
    for whole, one in zip(runs.base.outputs, alone.outputs, strict=False):
        if one.ndim < whole.ndim and count in whole.shape:
            shapes = tuple(one.shape), tuple(whole.shape)
            detail = f"returns the shape {shapes[0]}, of {count} samples {shapes[1]}"
            partings.append(Parting("lost dimension", 0.0, detail=detail))
            break
    return Effects(text, partings, notes)


def whose_order_matters(runs: Runs) -> Effects:
    """Permute the samples; where outputs do not follow, look at what samples see of each other.

    What no reader of the model would doubt is told alone: of a recurrent layer, of a softmax, and
    of a table along the samples.
    """
    if not _out_of_order(runs, rows_in_order(runs)):
        return Effects(_PERMUTED)
    seen = what_samples_see(runs)
    return seen._replace(partings=[one for one in seen.partings if _is_certain(runs, one)])


def reordered(runs: Runs, samples: Samples, most: int | None = None) -> Change:
    """Return the change of the samples to another order, of all or of so many."""
    count = samples.number
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    order = (order.roll(1) if torch.equal(order, torch.arange(count)) else order)[:most]
    everywhere = torch.ones((), dtype=torch.bool)
    return Change(
        _PERMUTED,
        samples.select(order),
        lambda tensor: iter([everywhere.to(tensor.device)] * (count in tensor.shape)),
        rows=partial(rows_of, order, count),
    )


def rows_in_order(runs: Runs) -> Samples:
    """Return the samples, the order of which should not matter."""
    if _groups_in(runs) is not None:
        raise NotApplicableError("the rows of the batch are no samples: a vector groups them")
    samples = samples_in(runs)
    if any(t.shape[:2] == (samples.number, samples.number) for t in runs.tensors):
        raise NotApplicableError(f"the batch holds pairs of its {samples.number} samples")
    return samples


def _out_of_order(runs: Runs, samples: Samples) -> list[Effect]:
    """Return the effects on outputs that do not follow their samples into another order."""

    def moved(samples: Samples) -> list[Effect]:
        lacking = f"no output has a row for each of {samples.number}"
        seen = effects(runs, reordered(runs, samples), lacking=lacking)
        return [one for one in seen if one.difference.effect > 0.0]

    effects_of_order = moved(samples)
    if effects_of_order and not _repeats(runs):
        raise NotApplicableError("it draws random numbers, or keeps something from call to call")
    second = Samples.along(runs, 1)
    if effects_of_order and runs.conventions.batch_dim is None and second.is_common(runs):
        with suppress(UntellableError):
            if second.number > 1 and not moved(second):
                raise NotApplicableError(f"outputs follow instead {_SECOND}")
    return effects_of_order


def _repeats(runs: Runs) -> bool:
    """Whether a second call in a row, with other random numbers, gives the same."""
    batches = runs.batch(), runs.batch()
    with runs.kept([(batch.args, batch.kwargs) for batch in batches]):
        first, second = map(runs.take, batches)
    return not second.error and not are_apart(first.outputs, second.outputs)


def _misplaced(runs: Runs, moved: list[Effect]) -> list[Parting]:
    """Return where something that differs by sample and is not of the samples comes in."""
    worst = max(moved, key=lambda one: one.difference, default=None)
    if worst is None:
        return []
    return [parting(runs, worst.change, worst.difference, _by_table)]


def _by_table(place: Place | None) -> str:
    """Return the kind of a table that comes in along the samples where runs part.

    Raises:
        UntellableError: none does: marks made of the place in a batch, noise from a fixed seed.
    """
    flow = None if place is None else place.observation.flow
    if place is not None and flow is not None:
        vertices, calls = flow.graph.vertices, flow.graph.calls
        for vertex in vertices:
            is_own = vertex.call >= 0 and calls[vertex.call].layer == place.parting.layer
            if not is_own or not vertex.has("sum", "product", "join"):
                continue
            made_of = [[vertices[n] for n in flow.walk([o], back=True)] for o in vertex.operands]
            tables = [made for made in made_of if all(v.kind is not Kind.INPUT for v in made)]
            held = [v for made in tables for v in made if v.kind in _HELD or v.function in _WAVES]
            drawn = (v.kind is Kind.CONSTANT and not v.has("constant") for t in tables for v in t)
            if len(tables) < len(made_of) and held and not any(drawn):
                return "table"
    raise UntellableError("samples are told apart by something else than a table of the model's")


def _is_certain(runs: Runs, parting: Parting) -> bool:
    """Whether runs part at a recurrent layer, a softmax or a table along the samples."""
    record, flow = runs.observation.layers.get(parting.layer), runs.observation.flow
    if parting.kind in ("table", "lost dimension") or record is None:
        return parting.kind == "table"
    names, inside = set(parting.between), () if flow is None else flow.inside(record.name)
    if not parting.taker and flow is not None:
        names |= {flow.graph.vertices[number].function for number in inside}
    is_layer = not parting.taker and "batch_first" in record.options
    return parting.kind == "values" and (is_layer or bool(names & having("softmax")))


def _overwritten(runs: Runs, samples: Samples) -> list[Change]:
    """Return two changes: every second sample by its neighbour, then the others.

    Lengths in descending order stay so: it is always a valid batch.
    """
    text, rows = "every second sample overwritten by its neighbour", torch.arange(samples.number)
    halves = rows - rows % 2, (rows | 1).clamp(max=samples.number - 1)
    return [
        Change(text, samples.select(index), partial(readings, index == rows)) for index in halves
    ]


def _of_samples(runs: Runs, samples: Samples, seen: list[Effect]) -> list[Effect]:
    """Return those of the effects on outputs that are of samples; a pair of samples is none."""
    text, count, why = seen[0].change.text, samples.number, ""
    fewer = runs.forward(runs.changed(samples.select(torch.arange(count - 1))))
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
    elif runs.conventions.batch_dim is None:
        second = Samples.along(runs, 1)
        if second.is_common(runs) and second.number > 1:
            with suppress(UntellableError):
                others = effects(runs, *_overwritten(runs, second), lacking=_SECOND)
                if not any(one.difference.effect for one in others):
                    why = f"outputs are independent instead along {_SECOND}"
    if why:
        raise UntellableError(why, text)
    return [one for one in seen if differs[one.output] == 1]


def _kind(samples: int, place: Place | None) -> str:
    """Return by what samples see each other: what may be meant so is a kind of its own."""
    if place is None:
        return "values"
    record, at, flow = place.record, place.parting, place.observation.flow
    if place.chosen:
        return "choice"
    if record.options.get("track_running_stats") is False:
        return "statistics"
    if flow is not None and not at.taker and record.options.get("in_features", samples) != samples:
        functions = {flow.graph.vertices[n].function for n in flow.inside(at.layer)}
        if len(functions) <= 1:  # a product with each row by itself
            raise UntellableError(
                f"{record.label!r} gives another output for equal inputs: its weights are made of "
                "the batch, as where a model adapts to it"
            )
    is_moved = at.taker and at.between and set(at.between) <= having("move")
    if is_moved and flow is not None and set(flow.producers(at.taker)) <= set(flow.inputs):
        return "order"
    is_sequential = "batch_first" in record.options or record.type_name == "MultiheadAttention"
    shape = () if record.inputs is None else record.inputs.shape
    is_one = len(shape) == 2 or (len(shape) == 3 and 1 in shape[:2])
    return "sequence" if is_sequential and is_one else "values"


# ---- groups of rows, as the nodes of several graphs ----------------------------------------------


def _is_whole(tensor: Tensor) -> bool:
    return not is_number(tensor) and tensor.dtype is not torch.bool


def _groups_in(runs: Runs) -> Tensor | None:
    """Return the vector of the batch that numbers the group of each row, where there is one.

    It is of whole numbers, ascending from 0 without a gap, and some come more than once.
    """
    tensors = [] if runs.has_others or runs.conventions.batch_dim is not None else runs.tensors
    for tensor in tensors:
        if tensor.ndim != 1 or len(tensor) < _FEWEST or not _is_whole(tensor):
            continue
        ascends = int(tensor[0]) == 0 and set(tensor.diff().tolist()) == {0, 1}
        rows = [t for t in tensors if t.ndim and len(t) == len(tensor) and t is not tensor]
        edges = [t for t in tensors if t.ndim > 1 and t.shape[1] == len(tensor) and _is_whole(t)]
        if ascends and rows and not edges:  # what as many edges carry could not be told from rows
            return tensor.detach().cpu()
    return None


def _what_groups_see(runs: Runs, numbers: Tensor) -> Effects:
    """Overwrite the rows of every second group by its first row, then those of the others.

    The numbers of the groups stay the same, and so does what is no row of them, such as edges.
    """
    rows, groups = torch.arange(len(numbers)), torch.arange(int(numbers[-1]) + 1)
    has = (t.shape[:1] == rows.shape for t in runs.tensors)
    samples = Samples(len(rows), tuple(0 if one else None for one in has))
    first = torch.searchsorted(numbers, numbers)

    def overwritten(parity: int) -> Change:
        index = torch.where(numbers % 2 == parity, rows, first)
        return Change(
            "the rows of every second group overwritten by its first row",
            samples.select(index),
            lambda tensor: (
                along(of % 2 == parity, tensor, 0)
                for of in (numbers, groups)
                if tensor.shape[:1] == of.shape
            ),
        )

    lacking = f"no output has a row for each of the {len(rows)} rows or {len(groups)} groups"
    seen = effects(runs, overwritten(0), overwritten(1), lacking=lacking)
    worst, partings = max(seen, key=lambda one: one.difference), list[Parting]()
    if worst.difference.effect > 0.0:
        partings = [parting(runs, worst.change, worst.difference, lambda _: "groups")]
    note = f"the samples are the {len(groups)} groups that a vector in the batch puts its rows into"
    return Effects(worst.change.text, partings, (note,))


def _check_for_edges(runs: Runs) -> None:
    """Raise `NotApplicableError` where the rows of a batch are nodes of one graph.

    Whole numbers in pairs, shape (2, edges) or (edges, 2), are rows of what has floating numbers.
    """
    tensors = [t for t in runs.tensors if t.numel() and runs.conventions.batch_dim is None]
    for pairs in tensors:
        if pairs.ndim != 2 or 2 not in pairs.shape or not _is_whole(pairs):
            continue
        for nodes in tensors:
            is_table = nodes.is_floating_point() and nodes.ndim and len(nodes) > 2
            if is_table and pairs.min() >= 0 and len(nodes) // 2 <= pairs.max() < len(nodes):
                raise NotApplicableError(
                    f"the batch pairs its {len(nodes)} rows, as edges do, by a tensor of the shape "
                    f"{tuple(pairs.shape)}: they are nodes, which see each other, and no samples"
                )


# ---- one input after the other -------------------------------------------------------------------


def what_inputs_do(runs: Runs) -> Effects:
    """Replace one input after the other by that of other samples.

    Some samples come twice: a mean over the batch would not see them change places.
    """
    base, notes, is_judged = runs.base, list[str](), False
    try:
        samples = samples_in(runs)
    except UntellableError as error:
        raise NotApplicableError(f"no input can be replaced: {error}") from error
    if not base.outputs:
        raise NotApplicableError("the model returns no tensor on which an input could show")
    rows = torch.arange(samples.number)
    indices = rows - rows % 2, torch.zeros_like(rows), torch.full_like(rows, samples.number - 1)
    names = names_of(runs)
    for number, (tensor, axis) in enumerate(zip(runs.tensors, samples.axes, strict=True)):
        others = [
            tensor.index_select(axis, i.to(tensor.device)) for i in indices if axis is not None
        ]
        others = [other.detach() for other in others if not torch.equal(tensor, other)]
        if not others:
            continue
        ran = runs.forward(runs.changed(lambda n, _: others[0] if n == number else None))  # noqa: B023
        is_judged = is_judged or not ran.error
        if ran.error:
            notes.append(
                f"with input {names[number]!r} of other samples the model raises {ran.error}"
            )
        elif not are_apart(base.outputs, ran.outputs):
            notes.append(f"input {names[number]!r} {NO_EFFECT}")
    if not is_judged:
        raise NotApplicableError(
            f"no input could be replaced: {'; '.join(notes)}", notes=tuple(notes)
        )
    return Effects("each input by itself, by that of other samples", notes=tuple(notes))


def names_of(runs: Runs) -> list[str]:
    """Return what people call the tensors of the batch, in the order of `Runs.tensors`."""
    batch, names = runs.batch(), list[str]()
    forward = vars(runs.model).get("forward")  # looked up in a script, it would be kept there
    with suppress(TypeError, ValueError):
        declared = inspect.signature(forward or partial(type(runs.model).forward, None))
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [p.name for p in declared.parameters.values() if p.kind in kinds]
    names += map(str, range(len(names), len(batch.args)))
    known: dict[int, str] = {}
    for name, value in [*zip(names, batch.args, strict=False), *batch.kwargs.items()]:
        for tensor, path in _paths(value, name):
            known.setdefault(id(tensor), path)
    return [known.get(id(tensor), str(n)) for n, tensor in enumerate(changeable(batch))]


def _paths(value: Any, name: str) -> Iterator[tuple[Tensor, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, f"{name}[{key!r}]")
        return
    tensors = find_tensors(value)
    for n, tensor in enumerate(tensors):
        yield tensor, name if len(tensors) == 1 else f"{name}[{n}]"
