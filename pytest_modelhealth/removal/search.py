"""Finds the units of a model that can go, and proves that they can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from pytest_modelhealth.capture import Engine, Request
from pytest_modelhealth.capture.costing.further import measured_forward
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.data_sets.running import noted, opened, pair
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.progress import track
from pytest_modelhealth.removal.batches import count, parted
from pytest_modelhealth.removal.finding import Finder, Found, Observe
from pytest_modelhealth.removal.proving import Prover
from pytest_modelhealth.removal.summarising import MultiplyAdds, candidates, summarised
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.removable import Removable
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


@dataclass(frozen=True)
class Batches:
    """The batches of a search.

    Args:
        found: those on which units are found, and proven where `held_out` is ``None``.
        held_out: those on which they are proven.
        most: take so many of the first at most.
        with_target: whether batches are pairs of inputs and target.
        shown: whether it is shown how far it is.
    """

    found: Iterable[Any]
    held_out: Iterable[Any] | None
    most: int | None
    with_target: bool
    shown: bool | None

    def __iter__(self) -> Iterator[Batch]:
        """Yield those that have samples; those held out come last."""
        for name, batch, is_held_out in self._all():
            inputs, target = pair(batch, name, _LOSS) if self.with_target else (batch, None)
            tensors = find_tensors(inputs)
            if not tensors:
                raise InspectionError(
                    f"{name} is a {type(inputs).__name__} without any tensor: batches are what the "
                    "model is called with, such as those of a DataLoader"
                )
            if any(tensor.numel() for tensor in tensors):  # of no sample, it would prove anything
                yield Batch(name, inputs, target, is_held_out)

    def _all(self) -> Iterator[tuple[str, Any, bool]]:
        with opened(self.found) as found:
            tracked = track(found, "looking for removable units", most=self.most, shown=self.shown)
            if self.held_out is None:
                total = count(self.found, self.most)
                for (index, batch), is_held_out in parted(enumerate(tracked), total):
                    yield f"batch {index}", batch, is_held_out
                return
            for index, batch in enumerate(tracked):
                yield f"batch {index}", batch, False
        with opened(self.held_out) as held_out:
            tracked = track(held_out, "proving that they can go", shown=self.shown)
            for index, batch in enumerate(tracked):
                yield f"batch {index} of held_out", batch, True


_LOSS = "with a loss batches are pairs; leave loss out where they are inputs alone"


def search(
    engine: Engine, request: Request, observe: Observe, batches: Batches
) -> tuple[Removable, Observation]:
    """Return the units of a model that can go, and what the batches they were found on showed.

    Args:
        engine: runs the model.
        request: what is asked of it, but for the batch.
        observe: has a request run.
        batches: the batches.

    Raises:
        InspectionError: there is no batch, or none for the proof, or the model cannot be run again.
        Exception: whatever the user's model or loss raises, untouched.
    """
    model = engine.module(request.model)
    beside = Beside(model, request.loss)
    if beside.is_lazy:
        raise InspectionError(
            "the model is lazy, and has no units yet: run one batch through it first"
        )
    modules = {named.name: named.module for named in named_modules(model)}
    finder = Finder(request, observe, beside, modules)
    found: dict[str, Found] = {}
    merged: Observation | None = None
    prover: Prover | None = None
    costs, is_empty = MultiplyAdds(None, {}), True
    for batch in batches:
        is_empty = False
        if batch.is_held_out and merged is None:
            break
        with noted(batch.name, "removable"):
            observation, said = finder.run(batch.inputs, batch.target)
        if batch.is_held_out and merged is not None:
            prover = prover or _prover(beside, modules, found, coarsest_epsilon(merged))
            prover.add(batch.inputs, said, observation.samples)
            continue
        if merged is None:
            costs = multiply_adds(engine, request, beside, batch.inputs)
        merged = observation if merged is None else merged.merge(observation)
        for name, one in said.items():
            found[name] = found[name].merge(one) if name in found else one
    if merged is None or prover is None:
        raise InspectionError(_why_too_few(batches, is_empty=is_empty))
    record = summarised(prover, found, costs, merged.samples)
    return record, replace(merged, removable=record)


def _why_too_few(batches: Batches, *, is_empty: bool) -> str:
    if is_empty:
        return "there was no batch to run: batches is empty or without samples, or max_batches=0"
    if batches.held_out is None:
        return (
            "there is one batch only, and units are proven on batches that were not used to find "
            "them: give two at least, or others as held_out="
        )
    return (
        "held_out has no batch with samples: units are proven on batches that were not used to "
        "find them"
    )


def _prover(
    beside: Beside, modules: Mapping[str, nn.Module], found: Mapping[str, Found], epsilon: float
) -> Prover:
    """Return what proves the units that were found."""
    prover = Prover(beside, modules, {}, epsilon)
    for name, one in found.items():
        layer, reasons = candidates(one, modules)
        for reason in reasons:
            prover.refuse(name, reason)
        if layer.removable:
            prover.layers[name] = layer
    return prover


def multiply_adds(engine: Engine, request: Request, beside: Beside, inputs: Any) -> MultiplyAdds:
    """Return the multiply-adds of a forward."""
    batch = Inputs.of(copied_batch(inputs))
    with beside.put_back((batch.args, batch.kwargs), evaluation=True, watched=True):
        seen = measured_forward(engine, replace(request, inputs=batch))
    if seen.costs is None or seen.costs.why_not or not seen.samples:
        return MultiplyAdds(None, {})
    layers = seen.costs.layers.items()
    return MultiplyAdds(
        seen.costs.multiply_adds // seen.samples,
        {name: costs.multiply_adds // seen.samples for name, costs in layers},
    )
