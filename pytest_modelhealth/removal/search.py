"""Finds the units of a model that can go, and proves that they can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture import Engine, Request
from pytest_modelhealth.capture.costing.measure import measured_forward
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.data_sets.running import noted, opened, pair
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.progress import track
from pytest_modelhealth.removal.evidence import Evidence, UnitWatch
from pytest_modelhealth.removal.proving import Prover
from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.removal.routes import Place, Route, parameter_of, routes
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.removable import RemovableLayer
from pytest_modelhealth.tolerance import coarsest_epsilon

Observe = Callable[[Request], Observation]
Batch = tuple[str, Any, Any, bool]
"""A name for messages, inputs, target, and whether units are proven on it."""


class Finder:
    """Runs batches and keeps what they say together of the units of each layer.

    Args:
        request: what is asked of the engine, but for the batch.
        observe: has it run.
        beside: the model, to be run again and again.
        modules: its layers by name.

    Attributes:
        routes: where the units of each layer went, joined over the batches.
        evidence: what was seen of them.
    """

    def __init__(
        self, request: Request, observe: Observe, beside: Beside, modules: Mapping[str, nn.Module]
    ) -> None:
        self._request, self._observe, self.beside = request, observe, beside
        self._modules = modules
        self._routes: dict[str, Route] = {}  # of the latest batch
        self._sequence: list[Place] | None = None
        self.routes: dict[str, Route] = {}
        self.evidence: dict[str, Evidence] = {}

    def run(self, inputs: Any, target: Any) -> Observation:
        """Return what a batch showed.

        Where units are to be looked at is known once the model has run: the first batch, and one in
        which the model goes another way, are run twice.
        """
        observation, watch = self._run_watched(inputs, target)
        if watch.sequence != self._sequence:
            self._sequence = watch.sequence
            self._routes = {
                name: route
                for name, route in routes(observation, self._modules).items()
                if "activations" in self._request.selection.roles(name, self._modules[name])
            }
            observation, watch = self._run_watched(inputs, target)
        for name, route in self._routes.items():
            calls = [watch.seen[place] for place in route.places if place in watch.seen]
            if [len(call.zero) for call in calls] != [route.layer.units] * len(route.places):
                continue  # a call of it returned something else
            unread = self._unread(observation, route)
            known = [self.evidence[name]] if name in self.evidence else []
            first, *others = (*known, *(replace(call, unread=unread) for call in calls))
            for other in others:
                first = first.merge(other)
            self.evidence[name] = first
            self.routes[name] = self.routes[name].joined(route) if known else route
        return observation

    def _run_watched(self, inputs: Any, target: Any) -> tuple[Observation, UnitWatch]:
        watch = UnitWatch({p: r.layer.dimension for r in self._routes.values() for p in r.places})
        batch = Inputs.of(copied_batch(inputs))
        request = replace(self._request, inputs=batch, target=copied_batch(target), visitor=watch)
        given = batch.args, batch.kwargs, request.target
        # cuDNN differentiates recurrent layers in training alone
        recurrent = (m for m in self._modules.values() if isinstance(m, nn.RNNBase))
        is_on_cuda = any(p.is_cuda for module in recurrent for p in module.parameters())
        with (
            self.beside.put_back(given, evaluation=True, watched=True),
            torch.backends.cudnn.flags(enabled=not is_on_cuda),
        ):
            for parameter in self._request.model.parameters():
                if parameter.is_inference():
                    raise InspectionError(
                        "parameters were made under torch.inference_mode, and take no gradient, by "
                        "which units are found that nothing reads: make or load the model outside "
                        "of it"
                    )
                if parameter.is_leaf and parameter.is_floating_point():
                    parameter.requires_grad_(True)  # a frozen one shows no gradient
            return self._observe(request), watch

    def _unread(self, observation: Observation, route: Route) -> Tensor:
        """Return which units no output depended on, as far as the batch shows."""
        layer, flow = route.layer, observation.flow
        gradients = observation.layers[layer.name].gradients
        if gradients is None and flow is not None and flow.is_exact and layer.name not in flow.used:
            return torch.ones(layer.units, dtype=torch.bool)
        unread = torch.zeros(layer.units, dtype=torch.bool)
        units = None if gradients is None else gradients.units
        if units is not None and len(units.minimum) == layer.units:
            unread = torch.from_numpy((units.minimum == 0.0) & (units.maximum == 0.0))
        if layer.read_by or route.is_output or not layer.read:
            return unread
        columns = torch.ones_like(unread)  # that are all zero
        for part in layer.read:
            weight = parameter_of(part.parameter, self._modules).movedim(part.dimension, 0)
            columns &= (weight.reshape(layer.units, -1) == 0).all(1).cpu()
        return unread | columns


def search(
    engine: Engine,
    request: Request,
    observe: Observe,
    batches: Iterable[Any],
    held_out: Iterable[Any] | None,
    most: int | None,
    shown: bool | None,
) -> tuple[Observation, Callable[..., RemovableUnits]]:
    """Return what the batches showed that units were found on, and what makes the result.

    Args:
        engine: runs the model.
        request: what is asked of it, but for the batch; with a loss batches are pairs.
        observe: has a request run.
        batches: those on which units are found, and proven where `held_out` is ``None``.
        held_out: those on which they are proven.
        most: take so many of the first at most.
        shown: whether it is shown how far it is.

    Raises:
        InspectionError: there is no batch, or none for the proof, or the model cannot be run again.
        Exception: whatever the user's model or loss raises, untouched.
    """
    beside = Beside(engine.module(request.model), request.loss)
    if beside.is_lazy:
        raise InspectionError(
            "the model is lazy, and has no units yet: run one batch through it first"
        )
    modules = {named.name: named.module for named in named_modules(beside.model)}
    finder = Finder(request, observe, beside, modules)
    merged: Observation | None = None
    prover: Prover | None = None
    costs: _Costs = None
    few = "units are proven on batches that were not used to find them"
    lacking = "there was no batch to run: batches is empty or without samples, or max_batches=0"
    named = _named(batches, held_out, most, shown)
    for name, inputs, target, is_held_out in _read(named, with_target=request.loss is not None):
        lacking = f"there is one batch only, and {few}: give two at least, or others as held_out="
        if held_out is not None:
            lacking = f"held_out has no batch with samples: {few}"
        if is_held_out and merged is None:
            break
        if is_held_out and prover is None:
            assert merged is not None
            prover = Prover(beside, modules, coarsest_epsilon(merged))
            for layer, evidence in finder.evidence.items():
                prover.propose(finder.routes[layer], evidence)
        with noted(name, "removable"):
            observation = finder.run(inputs, target)
        if prover is not None:
            prover.confirm(finder.evidence)
            prover.prove(inputs, observation.samples)
        elif merged is None:
            merged, costs = observation, _multiply_adds(engine, request, beside, inputs)
        else:
            merged = merged.merge(observation)
    if merged is None or prover is None:
        raise InspectionError(lacking)
    return _result(finder, prover, merged, costs)


def _result(
    finder: Finder, prover: Prover, merged: Observation, costs: _Costs
) -> tuple[Observation, Callable[..., RemovableUnits]]:
    ordered = [name for name in finder.evidence if name in prover.layers]
    layers = {name: _priced(prover.layers[name], costs) for name in ordered}
    parameters, multiply_adds = _gone([one for one in layers.values() if not one.read_by], costs)
    inner = {name: route for name, route in finder.routes.items() if not route.is_output}
    result = partial(
        RemovableUnits,
        layers=layers,
        refused={n: "; ".join(prover.refused[n]) for n in finder.evidence if n in prover.refused},
        sizes={name: route.layer.units for name, route in inner.items()},
        samples=merged.samples,
        proof=prover.proof,
        parameters=parameters,
        multiply_adds=multiply_adds,
        of_parameters=sum(parameter.numel() for parameter in finder.beside.model.parameters()),
        of_multiply_adds=None if costs is None else costs[_WHOLE],
    )
    return replace(merged, removable=layers), result


def _read(named: Iterable[tuple[str, Any, bool]], *, with_target: bool) -> Iterator[Batch]:
    """Yield the batches of a search that have samples."""
    why = "with a loss batches are pairs; leave loss out where they are inputs alone"
    for name, batch, is_held_out in named:
        inputs, target = pair(batch, name, why) if with_target else (batch, None)
        tensors = find_tensors(inputs)
        if not tensors:
            raise InspectionError(
                f"{name} is a {type(inputs).__name__} without any tensor: batches are what the "
                "model is called with, such as those of a DataLoader"
            )
        if any(tensor.numel() for tensor in tensors):  # of no sample, it would prove anything
            yield name, inputs, target, is_held_out


def _named(
    found: Iterable[Any], held_out: Iterable[Any] | None, most: int | None, shown: bool | None
) -> Iterator[tuple[str, Any, bool]]:
    """Yield batches with their names for messages, and whether they are held out: the last."""
    with opened(found) as own:
        tracked = enumerate(track(own, "looking for removable units", most=most, shown=shown))
        is_parted = held_out is None
        parts = parted(tracked, count(found, most)) if is_parted else ((b, False) for b in tracked)
        for (index, batch), is_held_out in parts:
            yield f"batch {index}", batch, is_held_out
    if held_out is not None:
        with opened(held_out) as own:
            for index, batch in enumerate(track(own, "proving that they can go", shown=shown)):
                yield f"batch {index} of held_out", batch, True


_WHOLE = None
"""The key of the multiply-adds of a whole forward, beside those of layers by name."""

_Costs = Mapping[str | None, int] | None


def _multiply_adds(engine: Engine, request: Request, beside: Beside, inputs: Any) -> _Costs:
    """Return the multiply-adds of a forward, a sample; ``None`` where they are not known."""
    batch = Inputs.of(copied_batch(inputs))
    with beside.put_back((batch.args, batch.kwargs), evaluation=True, watched=True):
        seen = measured_forward(engine, replace(request, inputs=batch))
    if seen.costs is None or seen.costs.why_not or not seen.samples:
        return None
    counts: dict[str | None, int] = {_WHOLE: seen.costs.multiply_adds}
    counts |= {name: costs.multiply_adds for name, costs in seen.costs.layers.items()}
    return {name: count // seen.samples for name, count in counts.items()}


def _priced(layer: RemovableLayer, costs: _Costs) -> RemovableLayer:
    parameters, multiply_adds = _gone([layer], costs)
    return replace(layer, parameters=parameters, multiply_adds=multiply_adds)


def _gone(layers: Iterable[RemovableLayer], costs: _Costs) -> tuple[int, int | None]:
    """Return how many elements of parameters and multiply-adds go with the units of layers.

    Each element counts once: a weight may lose rows and columns.
    """
    sizes, kept = dict[str, int](), dict[str, float]()
    for layer in layers:
        for part in (*layer.produced, *layer.read):
            name = part.parameter
            sizes[name] = prod(part.shape)
            gone = len(layer.removable) * part.each / part.shape[part.dimension]
            kept[name] = kept.get(name, 1.0) * (1.0 - gone)
    parameters = sum(round(size * (1.0 - kept[name])) for name, size in sizes.items())
    if costs is None:
        return parameters, None
    owners = {name: name.rpartition(".") for name in kept}
    weights = {owner: kept[name] for name, (owner, _, own) in owners.items() if own == "weight"}
    return parameters, round(sum(costs.get(n, 0) * (1.0 - part) for n, part in weights.items()))


HELD_OUT = 5
"""One in so many batches is held out."""

_MOST_KEPT = 8
"""Batches that are kept for the proof where nobody knows how many there are."""


def parted(batches: Iterable[Any], total: int) -> Iterator[tuple[Any, bool]]:
    """Yield batches, each with whether it is held out: the last fifth, and one at least.

    Where their number is not known, the last one is held out and some of those before, which are
    kept and come again at the end.

    Args:
        batches: batches.
        total: how many there are; 0 where nobody knows.
    """
    first_held_out = total - -(-total // HELD_OUT) if total else None
    kept: list[Any] = []
    latest: list[Any] = []  # held back until it is known that it is not the last
    for index, batch in enumerate(batches):
        for before in latest:
            if first_held_out is not None:
                yield before, index > first_held_out
            elif index % HELD_OUT == 0 and len(kept) < _MOST_KEPT:
                kept.append(before)
            else:
                yield before, False
        latest = [batch]
    for batch in (*kept, *latest):
        yield batch, True


def count(batches: Iterable[Any], most: int | None) -> int:
    """Return how many batches there are, at most so many; 0 where nobody knows."""
    try:
        known = length_hint(batches)
    except Exception:  # noqa: BLE001 - a loader of the user's
        return 0
    return known if most is None else min(known, most)
