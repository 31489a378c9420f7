"""Finds the layer at which two runs part, where nothing that was changed should be seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import KnownTensors, TensorStore, version
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.differences import Apart, least_apart
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Call, Flow, LayerRecord, Observation, Parting, Vertex

MEMORY_BUDGET = 1 << 30
"""Bytes of tensors of a run that are kept in memory; the rest lies in a temporary file."""


class Place(NamedTuple):
    """Where two runs part.

    Args:
        parting: the first layer in execution order that differs, or in whose own code they part.
        chosen: whether it comes of a choice among values (``topk``), as of experts among tokens.
        observation: what the run showed, with who feeds whom.
    """

    parting: Parting
    chosen: bool
    observation: Observation

    @property
    def record(self) -> LayerRecord:
        """What was seen of the layer."""
        return self.observation.layers[self.parting.layer]


Same = Callable[[Tensor], Iterator[Tensor]]
"""Gives, for a tensor of a layer, the places in it that should be equal: a mask for each way in
which its dimensions can be read, none where they cannot."""


def where_they_part(
    runs: Runs,
    before: Inputs,
    after: Inputs,
    same: Same,
    within: AbstractContextManager[Any] | None = None,
    seed: int | None = None,
) -> Place | None:
    """Run both batches again, watched, and return the first place where a layer differs.

    Args:
        runs: runs the model.
        before: the one batch; both are written to at will.
        after: the other one.
        same: which places of a tensor should be equal. Of several ways to read its dimensions, that
            with the smallest difference counts.
        within: what the run of the other batch takes place in, where that is what changes it.
        seed: of the random numbers of the other run; ``None`` takes those of every run.

    Returns:
        ``None`` where no layer differs, or what the layers compute cannot be read.
    """
    with TensorStore(MEMORY_BUDGET) as store:
        visitor = _Visitor(store, same)
        _watch(runs, before, visitor)
        visitor.start_again()
        with within or nullcontext():
            observation = _watch(runs, after, visitor, seed)
        if visitor.found is None or observation is None:
            return None
        return _place(visitor.found, observation)


def where_seeds_part(runs: Runs, batch: tuple[Inputs, Inputs], seed: int) -> Place | None:
    """Run a batch with the usual random numbers and with others; both copies are its own."""
    everywhere = torch.ones((), dtype=torch.bool)
    return where_they_part(runs, *batch, lambda tensor: iter([everywhere]), seed=seed)


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

    def __init__(self, store: TensorStore, same: Same) -> None:
        self._store, self._same = store, same
        self._counts: dict[tuple[str, str], int] = defaultdict(int)
        self._slots: dict[Event, int] = {}
        self._known = KnownTensors[int]()
        self._is_second = False
        self.found: tuple[Event, Apart] | None = None

    def start_again(self) -> None:
        """Take what follows for the other run."""
        self._counts.clear()
        self._is_second = True

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """See one tensor of a layer."""
        is_number = value.is_floating_point() or value.is_complex()
        is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if role not in ("inputs", "activations") or not (is_number and is_plain):
            return
        if value.is_meta or not value.numel():
            return
        event = layer, role, self._counts[layer, role]
        self._counts[layer, role] += 1
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if self._is_second:
                self._compare(event, value)
            else:
                self._keep(event, value)

    def _keep(self, event: Event, value: Tensor) -> None:
        """Keep a tensor, once if it is shown several times unchanged."""
        slot = self._known.get(value)
        if slot is None:
            slot = self._store.put(value)
            if version(value) is not None:  # a write would not show
                self._known.put(value, slot)
        self._slots[event] = slot

    def _compare(self, event: Event, value: Tensor) -> None:
        slot = self._slots.get(event)
        if self.found is not None or slot is None:
            return
        before = self._store[slot]
        found = least_apart(before, value.detach().cpu(), self._same(before))
        if found is not None and found.effect > 0.0:
            self.found = event, found

    def see_output(self, output: Any) -> None:
        """See what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before."""


def _place(found: tuple[Event, Apart], observation: Observation) -> Place:
    (layer, role, _), (effect, index, before, after) = found
    parting = Parting("values", effect, layer, role, "", str(index), before, after)
    flow = observation.flow
    if flow is None or layer not in flow or not flow.calls(layer):
        return Place(parting, False, observation)
    call, calls, vertices = flow.calls(layer)[0], flow.graph.calls, flow.graph.vertices
    if role == "activations":
        chosen = any(_chooses(vertices[n]) for n in flow.inside(layer))
        return Place(replace(parting, line=flow.line(layer)), chosen, observation)
    near = [v for name in flow.producers(layer) for v in flow.operations(name, layer)]
    inner = sorted(near, key=vertices.index)  # those of parameters may come last otherwise
    named = (v.function.removeprefix("unsafe_") for v in inner if v.function != "clone")
    parting = replace(
        parting,
        layer=calls[call.parent].layer if 0 <= call.parent < len(calls) else "",
        between=tuple(dict.fromkeys(filter(None, named))),
        line=next((v.line for v in near if v.line), "") or flow.line(layer),
        taker=layer,
    )
    chosen = any(_chooses(vertices[n]) for n in _own_code(call, flow))
    return Place(parting, chosen, observation)


_CHOICES = frozenset({"topk", "sort", "argsort", "nonzero", "kthvalue"})
_COUNTS = frozenset({"cumsum", "bincount"})


def _chooses(vertex: Vertex) -> bool:
    """Whether an operation chooses among values, or counts what was chosen, as capacities do."""
    function = vertex.function.rstrip("_")
    return function in _CHOICES or (function in _COUNTS and not vertex.live)


def _own_code(call: Call, flow: Flow) -> set[int]:
    """Return the operations of the caller's own code that what a call is given is made by."""
    vertices, found = flow.graph.vertices, set[int]()
    pending = list(call.inputs)
    while pending:
        number = pending.pop()
        if number not in found and vertices[number].call == call.parent:
            found.add(number)
            pending += vertices[number].operands
    return found


def parting_at(kind: str, found: Apart, place: Place | None) -> Parting:
    """Return what was found at the output, and where in the model it begins.

    Args:
        kind: which of the things that the probe looks at.
        found: how far outputs are apart.
        place: where layers part, if that was found.
    """
    if place is not None:
        return replace(place.parting, kind=kind, effect=found.effect)
    where = str(found.place)
    return Parting(kind, found.effect, place=where, before=found.before, after=found.after)
