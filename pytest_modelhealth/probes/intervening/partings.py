"""The layer where two runs part: looked for by two more, watched runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import UntellableError
from pytest_modelhealth.probes.intervening.batches import is_number
from pytest_modelhealth.probes.intervening.leaks import Change
from pytest_modelhealth.probes.intervening.running import Difference, Runs
from pytest_modelhealth.report import LayerRecord, Observation, Parting, Vertex


class Place(NamedTuple):
    """Where two runs part: the first layer that differs, or in whose own code they part."""

    parting: Parting
    # whether values are chosen among there (``topk``), as by experts among tokens, or a number
    # without dimensions is made of all, as the size of a solver's step
    chosen: bool
    observation: Observation

    @property
    def record(self) -> LayerRecord:
        """What was seen of the layer."""
        return self.observation.layers[self.parting.layer]


DESIGN = "design"
"""The kind of what some designs do on purpose, as where values are chosen among others."""


def parting(
    runs: Runs,
    change: Change,
    difference: Difference,
    kind: Callable[[Place | None], str] = lambda at: DESIGN if at and at.chosen else "values",
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
        return Parting(kind(None), **difference._asdict())
    place = _place(*visitor.first, observation)
    place = place._replace(chosen=place.chosen or visitor.has_number)
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
        self.has_number = False

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """See one tensor of a layer."""
        is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if role not in ("inputs", "activations") or not (is_number(value) and is_plain):
            return
        if value.is_meta or not value.numel():
            return
        event = layer, role, self.counts[layer, role]
        before_it = layer, role, event[2] - 1
        self.counts[layer, role] += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if not self.is_second:
                self._numbers[event] = self._store.put(value)
            # a number may come behind what it was made for: f(x, time)
            elif event in self._numbers and (not self.first or self.first[0] == before_it):
                before, after = self._store[self._numbers[event]], value.detach().cpu()
                self.has_number |= role == "inputs" and not after.ndim and bool(before != after)
                difference = None if self.first else self._change.difference(before, after)
                if difference is not None and difference.effect > 0.0:
                    self.first = event, difference

    def see_output(self, output: Any) -> None:
        """See what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before."""


def _place(event: Event, difference: Difference, observation: Observation) -> Place:
    """Return the layer of a tensor; what a layer takes is made by its caller's own code."""
    layer, role, _ = event
    place = Parting("values", layer=layer, role=role, **difference._asdict())
    flow = observation.flow
    if flow is None or layer not in flow or not flow.calls(layer):
        return Place(place, False, observation)
    call, calls, vertices = flow.calls(layer)[0], flow.graph.calls, flow.graph.vertices
    if role == "activations":
        chosen = any(_chooses(vertices[n]) for n in flow.inside(layer))
        return Place(replace(place, line=flow.line(layer)), chosen, observation)
    near = [v for name in flow.producers(layer) for v in flow.operations(name, layer)]
    order = {id(vertex): number for number, vertex in enumerate(vertices)}
    inner = sorted(near, key=lambda v: order[id(v)])  # those of parameters may come last otherwise
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
