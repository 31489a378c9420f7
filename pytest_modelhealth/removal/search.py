"""Finds the units of a model that can go, and proves that they can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from operator import length_hint
from typing import Any, NamedTuple

from pytest_modelhealth.capture import Engine, Request
from pytest_modelhealth.capture.costing.measure import measured_forward
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.data_sets.running import noted, opened, pair
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.progress import track
from pytest_modelhealth.removal.evidence import Evidence, Finder, Observe
from pytest_modelhealth.removal.proving import Prover
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.removable import Removable, RemovableLayer
from pytest_modelhealth.tolerance import coarsest_epsilon


class Batch(NamedTuple):
    """One batch of a search.

    Args:
        name: what it is called, for messages.
        inputs: what the model is called with.
        target: what the loss compares with; ``None`` without a loss.
        is_held_out: whether units are proven on it.
    """

    name: str
    inputs: Any
    target: Any
    is_held_out: bool


def read(
    found: Iterable[Any],
    held_out: Iterable[Any] | None,
    most: int | None,
    *,
    with_target: bool,
    shown: bool | None,
) -> Iterator[Batch]:
    """Yield the batches of a search that have samples; those held out come last.

    Args:
        found: those on which units are found, and proven where `held_out` is ``None``.
        held_out: those on which they are proven.
        most: take so many of the first at most.
        with_target: whether they are pairs of inputs and target.
        shown: whether it is shown how far it is.
    """
    said = "with a loss batches are pairs; leave loss out where they are inputs alone"
    for name, batch, is_held_out in _named(found, held_out, most, shown):
        inputs, target = pair(batch, name, said) if with_target else (batch, None)
        tensors = find_tensors(inputs)
        if not tensors:
            raise InspectionError(
                f"{name} is a {type(inputs).__name__} without any tensor: batches are what the "
                "model is called with, such as those of a DataLoader"
            )
        if any(tensor.numel() for tensor in tensors):  # of no sample, it would prove anything
            yield Batch(name, inputs, target, is_held_out)


def _named(
    found: Iterable[Any], held_out: Iterable[Any] | None, most: int | None, shown: bool | None
) -> Iterator[tuple[str, Any, bool]]:
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


def search(
    engine: Engine,
    request: Request,
    observe: Observe,
    batches: Iterable[Batch],
    *,
    has_held_out: bool,
) -> tuple[Removable, Observation]:
    """Return the units of a model that can go, and what the batches they were found on showed.

    Args:
        engine: runs the model.
        request: what is asked of it, but for the batch.
        observe: has a request run.
        batches: the batches, those held out at the end.
        has_held_out: whether these were given by themselves.

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
    found: dict[str, Evidence] = {}
    merged: Observation | None = None
    prover: Prover | None = None
    costs, is_empty = None, True
    for batch in batches:
        is_empty = False
        if batch.is_held_out and merged is None:
            break
        with noted(batch.name, "removable"):
            observation, said = finder.run(batch.inputs, batch.target)
        if batch.is_held_out and merged is not None:
            if prover is None:
                prover = Prover(beside, modules, coarsest_epsilon(merged))
                for name, evidence in found.items():
                    prover.propose(finder.routes[name], evidence)
            prover.add(batch.inputs, said, observation.samples)
            continue
        if merged is None:
            costs = _multiply_adds(engine, request, beside, batch.inputs)
        merged = observation if merged is None else merged.merge(observation)
        for name, evidence in said.items():
            found[name] = found[name].merge(evidence) if name in found else evidence
    if merged is None or prover is None:
        raise InspectionError(_why_too_few(is_empty=is_empty, has_held_out=has_held_out))
    kept, reasons = prover.layers, prover.refused
    layers = {name: _priced(kept[name], costs) for name in found if name in kept}
    going = _gone([layer for layer in layers.values() if not layer.read_by], costs)
    sizes = {name: finder.routes[name] for name in found if not finder.routes[name].is_output}
    record = Removable(
        layers=layers,
        refused={name: "; ".join(reasons[name]) for name in found if name in reasons},
        sizes={name: route.layer.units for name, route in sizes.items()},
        samples=merged.samples,
        proof=prover.proof,
        parameters=sum(parameter.numel() for parameter in beside.model.parameters()),
        multiply_adds=None if costs is None else costs[_WHOLE],
        removable_parameters=going[0],
        removable_multiply_adds=going[1],
    )
    return record, replace(merged, removable=record)


def _why_too_few(*, is_empty: bool, has_held_out: bool) -> str:
    if is_empty:
        return "there was no batch to run: batches is empty or without samples, or max_batches=0"
    few = "units are proven on batches that were not used to find them"
    if has_held_out:
        return f"held_out has no batch with samples: {few}"
    return f"there is one batch only, and {few}: give two at least, or others as held_out="


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
