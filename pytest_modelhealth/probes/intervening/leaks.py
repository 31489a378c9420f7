"""A change of a batch, its effect on outputs that it should leave alone, and where that begins.

A probe of a leak says which batch is changed and which places of a tensor should stay: `effects`
runs it, and `parting` looks for the layer where what should stay does not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import Values, is_number
from pytest_modelhealth.probes.intervening.running import Difference, Runs, least_difference
from pytest_modelhealth.report import LayerRecord, Observation, Parting, Vertex


class Change(NamedTuple):
    """What is run beside the unchanged batch."""

    text: str  # what is changed, for people
    values: Values
    # gives, for a tensor of the model, the places in it that should be equal: a mask for each way
    # in which its dimensions can be read, none where they cannot
    same: Callable[[Tensor], Iterator[Tensor]]
    of_loss: bool = False  # whether outputs count only where the loss reads them, if any is read
    seed: int | None = None  # of the random numbers; ``None`` takes those of every run
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  # where that changes the run
    # gives, for a tensor and that of the changed run, what selects the rows of the second from the
    # first, in each way to read its dimensions; ``None`` has them stay in place
    rows: Callable[[Tensor, Tensor], Iterator[Callable[[Tensor], Tensor]]] | None = None

    def difference(
        self, before: Tensor, after: Tensor, read: Tensor | None = None
    ) -> Difference | None:
        """Return how far two tensors are apart in places that should be equal.

        Args:
            read: which places count; ``None`` is all.
        """
        masks = list(self.same(before))
        if read is not None:
            masks = [mask & read for mask in masks]
        if self.rows is None:
            return least_difference((before, after, mask) for mask in masks)
        return least_difference(
            (rows(before), after, rows(mask.expand_as(before)))
            for rows in (self.rows(before, after) if masks else ())
            for mask in masks
        )


class Effect(NamedTuple):
    """What a change does to an output where it should do nothing; a difference of 0 is none."""

    difference: Difference
    output: int
    change: Change


def effects(runs: Runs, *changes: Change, lacking: str, must_move: bool = True) -> list[Effect]:
    """Run changes, and return what each does to every output with places for it to leave alone.

    Where no output has such places, `lacking` is why nothing can be told.
    """
    effects, is_moved, has_places, text = list[Effect](), False, False, changes[0].text
    base = runs.base
    is_read = changes[0].of_loss and any(gradient is not None for gradient in base.read)
    reads = base.read if is_read else [None] * len(base.outputs)
    for change in changes:
        with change.within():
            ran = runs.forward(runs.batch.copy(change.values))
        if ran.error:
            raise UntellableError(f"with {text} the model raises {ran.error}", text)
        outputs = zip(base.outputs, ran.outputs, reads, strict=False)
        for n, (before, after, read) in enumerate(outputs):
            if not is_number(before) or (is_read and read is None):
                continue
            has_places = has_places or any(True for _ in change.same(before))
            difference = change.difference(before, after, None if read is None else read != 0)
            if difference is not None:
                effects.append(Effect(difference, n, change))
                is_moved = is_moved or not torch.equal(before, after)
    if not has_places:
        raise NotApplicableError(lacking, text)
    if must_move and not is_moved:
        raise UntellableError(
            f"with {text} no finite number of an output changes: give a batch that differs there, "
            "or train for a step first",
            text,
        )
    return effects or [Effect(Difference(0.0, (), 0.0, 0.0), -1, change)]


def moved_by(runs: Runs, *changes: Change, lacking: str) -> list[Effect]:
    """Return what changes do to outputs where they should do nothing."""
    return [one for one in effects(runs, *changes, lacking=lacking) if one.difference.effect > 0.0]


def along(which: Tensor, tensor: Tensor, *axes: int) -> Tensor:
    """Return a mask of some dimensions, in ascending order, so that it broadcasts to a tensor."""
    shape = [1] * tensor.ndim
    for axis, size in zip(axes, which.shape, strict=True):
        shape[axis] = size
    return which.reshape(shape).to(tensor.device)


def readings(which: Tensor, tensor: Tensor) -> Iterator[Tensor]:
    """Yield the places of a tensor that are meant, in each way to read its dimensions.

    Each dimension as long as the mask may be the one, and where several are, as of scores of
    attention, all at once. A longer one may be folded: so many groups, or groups of so many.
    """
    count = len(which)
    axes = [axis for axis, size in enumerate(tensor.shape) if size == count]
    masks = [along(which, tensor, axis) for axis in axes]
    yield from masks
    if len(masks) > 1:
        yield functools.reduce(torch.logical_and, masks)
    if 0 not in axes:  # features may be a multiple by chance
        for axis, size in enumerate(tensor.shape[:2] if axes else tensor.shape):
            if size > count and size % count == 0:
                yield along(which.repeat_interleave(size // count), tensor, axis)
                yield along(which.repeat(size // count), tensor, axis)


def rows_of(
    index: Tensor, count: int, before: Tensor, after: Tensor
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield what selects rows of an index out of so many, in each way to read a tensor.

    Where there are fewer rows than before, sizes tell which way. Otherwise ways are those of
    `readings`; it may hold no such rows, too.
    """
    is_cut, index = len(index) < count, index.to(before.device)

    def select(tensor: Tensor, axes: Sequence[int] = (), fold: Sequence[int] = ()) -> Tensor:
        if not fold:
            for axis in axes:
                tensor = tensor.index_select(axis, index)
            return tensor
        rows: Tensor = tensor.unflatten(axes[0], fold)
        return rows.index_select(axes[0] + fold.index(count), index).flatten(axes[0], axes[0] + 1)

    sizes = list(zip(before.shape, after.shape, strict=False))
    axes = [axis for axis, pair in enumerate(sizes) if pair == (count, len(index))]
    for way in [axes] if is_cut else [*([axis] for axis in axes), axes, []]:
        yield functools.partial(select, axes=way)
    for axis, (size, changed) in enumerate(sizes[:2] if 0 not in axes else ()):
        if size > count and size % count == 0 and changed * count == size * len(index):
            yield functools.partial(select, axes=[axis], fold=(count, -1))
            yield functools.partial(select, axes=[axis], fold=(-1, count))


# ---- the layer where it begins -------------------------------------------------------------------


class Place(NamedTuple):
    """Where two runs part: the first layer that differs, or in whose own code they part."""

    parting: Parting
    chosen: bool  # whether values are chosen among there (``topk``), as by experts among tokens
    observation: Observation

    @property
    def record(self) -> LayerRecord:
        """What was seen of the layer."""
        return self.observation.layers[self.parting.layer]


DESIGN = "design"
"""The kind of what some designs do on purpose, as where values are chosen among others."""


def by_choice(place: Place | None) -> str:
    """Return whether values are chosen where runs part, as a kind."""
    return DESIGN if place is not None and place.chosen else "values"


def parting(
    runs: Runs,
    change: Change,
    difference: Difference,
    kind: Callable[[Place | None], str] = by_choice,
) -> Parting:
    """Return what a change does to an output, and where in two more, watched runs that begins."""
    if not runs.is_steady:
        raise UntellableError(
            "the same model, batch and random numbers give another output each time: the forward "
            "keeps something outside of its modules (a global, an object of your own), or draws "
            "numbers that no seed sets",
            change.text,
        )
    with TensorStore(1 << 30) as store:  # bytes in memory; the rest lies in a temporary file
        visitor = _Visitor(store, change)
        _watch(runs, runs.batch.copy(), visitor)
        visitor.counts, visitor.is_second = Counter(), True
        with change.within():
            observation = _watch(runs, runs.batch.copy(change.values), visitor, change.seed)
    if visitor.first is None or observation is None:
        effect, at, before, after = difference
        return Parting(kind(None), effect, place=str(at), before=before, after=after)
    place = _place(*visitor.first, observation)
    return replace(place.parting, kind=kind(place), effect=difference.effect)


def _watch(runs: Runs, batch: Inputs, visitor: Any, seed: int | None = None) -> Observation | None:
    with runs.watched(batch) as request:
        if seed is not None:
            torch.manual_seed(seed)
        try:
            return runs.engine.run(replace(request, visitor=visitor))
        except Exception:  # noqa: BLE001 - it ran before: then there is no place to name
            return None


Event = tuple[str, str, int]
"""Layer, role, and how many of its tensors came before."""


class _Visitor:
    """Keeps the tensors of one run, and looks for the first one of another run that differs."""

    def __init__(self, store: TensorStore, change: Change) -> None:
        self._store, self._change = store, change
        self._numbers: dict[Event, int] = {}  # of tensors in the store
        self.counts = Counter[tuple[str, str]]()
        self.is_second = False
        self.first: tuple[Event, Difference] | None = None

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """See one tensor of a layer."""
        is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if role not in ("inputs", "activations") or not (is_number(value) and is_plain):
            return
        if value.is_meta or not value.numel():
            return
        event = layer, role, self.counts[layer, role]
        self.counts[layer, role] += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if not self.is_second:
                self._numbers[event] = self._store.put(value)
            elif self.first is None and event in self._numbers:
                before = self._store[self._numbers[event]]
                difference = self._change.difference(before, value.detach().cpu())
                if difference is not None and difference.effect > 0.0:
                    self.first = event, difference

    def see_output(self, output: Any) -> None:
        """See what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before."""


def _place(event: Event, difference: Difference, observation: Observation) -> Place:
    """Return the layer of a tensor; what a layer takes is made by its caller's own code."""
    (layer, role, _), (effect, index, before, after) = event, difference
    place = Parting("values", effect, layer, role, "", str(index), before, after)
    flow = observation.flow
    if flow is None or layer not in flow or not flow.calls(layer):
        return Place(place, False, observation)
    call, calls, vertices = flow.calls(layer)[0], flow.graph.calls, flow.graph.vertices
    if role == "activations":
        chosen = any(_chooses(vertices[n]) for n in flow.inside(layer))
        return Place(replace(place, line=flow.line(layer)), chosen, observation)
    near = [v for name in flow.producers(layer) for v in flow.operations(name, layer)]
    inner = sorted(near, key=vertices.index)  # those of parameters may come last otherwise
    names = (v.function.removeprefix("unsafe_") for v in inner if v.function != "clone")
    place = replace(
        place,
        layer=calls[call.parent].layer if 0 <= call.parent < len(calls) else "",
        between=tuple(dict.fromkeys(filter(None, names))),
        line=next((v.line for v in near if v.line), "") or flow.line(layer),
        taker=layer,
    )
    own = {number for number, vertex in enumerate(vertices) if vertex.call == call.parent}
    own &= flow.walk(call.inputs, back=True, through=own)
    return Place(place, any(_chooses(vertices[n]) for n in own), observation)


def _chooses(vertex: Vertex) -> bool:
    """Whether an operation chooses among values, or counts what was chosen, as capacities do."""
    return vertex.has("order") or (vertex.has("count") and not vertex.live)
