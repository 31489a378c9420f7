"""Finds the units of a model that can go, and proves that they can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pytest_modelhealth.capture import Engine, Request
from pytest_modelhealth.capture.costing.further import measured_forward
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.data_sets.batches import noted, opened, pair
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

    def __iter__(self) -> Iterator[tuple[int, Any, bool]]:
        """Yield each batch after its number, and whether it is held out; those come last."""
        with opened(self.found) as found:
            shown = track(found, "looking for removable units", most=self.most, shown=self.shown)
            numbered = enumerate(shown)
            if self.held_out is None:
                parts = parted(numbered, count(self.found, self.most))
            else:
                parts = ((batch, False) for batch in numbered)
            for (index, batch), is_held_out in parts:
                yield index, batch, is_held_out
        if self.held_out is not None:
            with opened(self.held_out) as held_out:
                shown = track(held_out, "proving that they can go", shown=self.shown)
                for index, batch in enumerate(shown):
                    yield index, batch, True

    def whose(self, *, is_held_out: bool) -> str:
        """Return whose batch one is, for messages."""
        return "held_out" if is_held_out and self.held_out is not None else "removable"

    def split(self, batch: Any, index: int) -> tuple[Any, Any]:
        """Return inputs and target of a batch; ``None`` for the target without a loss.

        Raises:
            InspectionError: it is no pair although there is a loss, or there is no tensor in it.
        """
        inputs, target = pair(batch, index, _LOSS) if self.with_target else (batch, None)
        if not find_tensors(inputs):
            raise InspectionError(
                f"batch {index} is a {type(inputs).__name__} without any tensor: batches are what "
                "the model is called with, such as those of a DataLoader"
            )
        return inputs, target


_LOSS = "a loss needs the target; leave loss out where batches are inputs alone"


def search(
    engine: Engine, request: Request, observe: Observe, batches: Batches
) -> tuple[Removable, Observation, Any]:
    """Return the units of a model that can go, and what the batches they were found on showed.

    The third is the inputs of the last held-out batch, for more proofs.

    Args:
        engine: runs the model.
        request: what is asked of it, but for the batch.
        observe: has a request run.
        batches: the batches.

    Raises:
        InspectionError: there is no batch, or none for the proof, or the model cannot be run again.
        Exception: whatever the batches, the user's model or loss raise, with a note on the batch.
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
    for index, batch, is_held_out in batches:
        with noted(index, batches.whose(is_held_out=is_held_out)):
            inputs, target = batches.split(batch, index)
            if not any(tensor.numel() for tensor in find_tensors(inputs)):
                continue  # of no sample, it would prove anything
            is_empty = False
            if is_held_out and merged is None:
                break
            observation, said = finder.run(inputs, target)
            if is_held_out and merged is not None:
                prover = prover or _prover(beside, modules, found, coarsest_epsilon(merged))
                prover.add(inputs, said, observation.samples)
                continue
            if merged is None:
                costs = multiply_adds(engine, request, beside, inputs)
            merged = observation if merged is None else merged.merge(observation)
            for name, one in said.items():
                found[name] = found[name].merge(one) if name in found else one
    if merged is None or prover is None:
        raise InspectionError(_why_too_few(batches, is_empty=is_empty))
    record = summarised(prover, found, costs, merged.samples)
    return record, replace(merged, removable=record), prover.latest


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
