"""Finds the units of a model that can go, and proves on other batches that nothing misses them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture import Engine, Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.data_sets.running import noted, opened, pair
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.progress import track
from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.removal.units import duplicates, inner_layers, parameter_named
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.parts import RemovableLayer

_HELD_OUT, _MOST_HELD = 5, 8
"""One in so many batches is kept for the proof, and so many at most, as they are held."""

_Unit = tuple[str, int]  # the name of a layer, and an index


def search(
    engine: Engine,
    request: Request,
    observe: Callable[[Request], Observation],
    batches: Iterable[Any],
    shown: bool | None,
) -> tuple[Observation, Callable[..., RemovableUnits]]:
    """Return what the batches showed that units were found on, and what makes the result.

    One batch in five is for the proof; with a loss batches are pairs.

    Raises:
        InspectionError: there are fewer than two batches, or the model cannot be run again.
        Exception: whatever the user's model or loss raises, untouched.
    """
    beside = Beside(engine.module(request.model), request.loss)
    if beside.is_lazy or any(p.is_inference() for p in beside.model.parameters()):
        why = "lazy, and has no units yet" if beside.is_lazy else "made under torch.inference_mode"
        raise InspectionError(
            f"the model is {why}: units are found by gradients, which its parameters cannot have. "
            "Run one batch through a lazy model first; make or load any other outside of that mode"
        )
    held_out: list[tuple[int, Any, Any]] = []
    evidence: Observation | None = None
    with closing(_read(batches, request.loss, shown)) as read:
        for count, (index, inputs, target) in enumerate(read):
            if count % _HELD_OUT == 0 and len(held_out) < _MOST_HELD:
                held_out.append((index, inputs, target))
                continue
            with noted(f"batch {index}", "removable"):
                observation = _observed(beside, request, observe, inputs, target)
            evidence = observation if evidence is None else evidence.merge(observation)
    if evidence is None:
        raise InspectionError(
            "removable takes two batches with samples at least, and has "
            f"{len(held_out) or 'none'}: units are found on some batches, and proven on others"
        )
    whole = evidence
    for index, inputs, target in held_out:
        with noted(f"batch {index}", "removable"):
            whole = whole.merge(_observed(beside, request, observe, inputs, target))
    modules = {named.name: named.module for named in named_modules(beside.model)}
    layers = {
        name: layer
        for name, layer in inner_layers(evidence, modules).items()
        if "activations" in request.selection.roles(name, modules[name])
    }
    confirmed = inner_layers(whole, modules)  # a unit may fire on what is held out
    units = [(name, u) for name in layers for u in layers[name].inactive]
    firing = [(name, unit) for name, unit in units if unit not in confirmed[name].inactive]
    refused = _reasons(layers, firing, "not on held-out ones")
    units = [unit for unit in units if unit not in set(firing)]
    for _, inputs, _ in held_out:
        if not units:
            break
        units, reasons = _Prover(beside, layers, modules, inputs).proven(units)
        refused |= {n: "; ".join(filter(None, (refused.get(n), why))) for n, why in reasons.items()}
    result = {}
    for name, layer in layers.items():
        layer = replace(layer, inactive=tuple(unit for own, unit in units if own == name))
        layer = replace(layer, duplicates=duplicates(layer, modules))
        if layer.removable:
            result[name] = layer
    make = partial(
        RemovableUnits,
        layers=result,
        refused=refused,
        sizes={name: layer.units for name, layer in layers.items()},
        samples=evidence.samples,
        held_out_samples=whole.samples - evidence.samples,
    )
    return replace(evidence, removable=result), make


def _read(
    batches: Iterable[Any], loss: Any, shown: bool | None
) -> Generator[tuple[int, Any, Any], None, None]:
    """Yield the number, inputs and target of each batch that has samples."""
    with opened(batches) as own:
        for index, batch in enumerate(track(own, "looking for removable units", shown=shown)):
            inputs, target = batch, None
            if loss is not None:
                inputs, target = pair(batch, f"batch {index}", "with a loss batches are pairs")
            if any(tensor.numel() for tensor in find_tensors(inputs)):  # else it proves anything
                yield index, inputs, target


def _observed(
    beside: Beside,
    request: Request,
    observe: Callable[[Request], Observation],
    inputs: Any,
    target: Any,
) -> Observation:
    """Return what a batch shows in evaluation mode, in which dropout silences no unit."""
    batch = Inputs.of(copied_batch(inputs))
    request = replace(request, inputs=batch, target=copied_batch(target))
    # cuDNN differentiates recurrent layers in training alone
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in beside.model.modules())
    with (
        beside.put_back((batch.args, batch.kwargs, request.target), evaluation=True, watched=True),
        torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not is_recurrent),
    ):
        for parameter in beside.model.parameters():
            if parameter.is_leaf and parameter.is_floating_point():
                parameter.requires_grad_(True)  # behind a frozen one there is no gradient
        return observe(request)


def _reasons(
    layers: Mapping[str, RemovableLayer], units: Sequence[_Unit], but: str
) -> dict[str, str]:
    """Return by layer why units that had no effect are not listed."""
    names = [name for name, _ in units]
    return {
        name: f"{names.count(name):,} inactive over {layers[name].samples:,} samples, but {but}"
        for name in dict.fromkeys(names)
    }


class _Prover:
    """Runs the model on a batch with units masked, and compares every output, bit for bit."""

    def __init__(
        self,
        beside: Beside,
        layers: Mapping[str, RemovableLayer],
        modules: Mapping[str, nn.Module],
        inputs: Any,
    ) -> None:
        self._beside, self._layers, self._modules = beside, layers, modules
        self._inputs = inputs
        self._base = self._outputs(())

    def proven(self, units: list[_Unit]) -> tuple[list[_Unit], dict[str, str]]:
        """Return the units that nothing misses, and by layer why others stay."""
        if self._is_same(units):
            return units, {}
        if not self._is_same(()):
            why = "the same batch gives another output each time, so nothing is proven"
            return [], _reasons(self._layers, units, why)
        needed = set(self._needed(units))
        left = [unit for unit in units if unit not in needed]
        if not self._is_same(left):  # only together
            needed, left = set(units), []
        moving = [unit for unit in units if unit in needed]
        return left, _reasons(self._layers, moving, "masking moves an output")

    def _needed(self, units: list[_Unit]) -> list[_Unit]:
        """Return the units without which an output moves, by halving."""
        if self._is_same(units):
            return []
        half = len(units) // 2
        return self._needed(units[:half]) + self._needed(units[half:]) if half else units

    def _is_same(self, masked: Sequence[_Unit]) -> bool:
        outputs = self._outputs(masked)
        try:
            torch.testing.assert_close(outputs, self._base, rtol=0.0, atol=0.0, equal_nan=True)
        except AssertionError:
            return False
        return True

    def _outputs(self, masked: Sequence[_Unit]) -> list[Tensor]:
        batch = Inputs.of(copied_batch(self._inputs))
        put_back = self._beside.put_back((batch.args, batch.kwargs), evaluation=True)
        with put_back, torch.no_grad():
            for layer, unit in masked:
                for name, dimension in self._layers[layer].produced:
                    parameter = parameter_named(name, self._modules)
                    assert parameter is not None
                    parameter.data.select(dimension, unit).zero_()  # .data: no version is raised
            return [t.detach().clone() for t in find_tensors(batch.call(self._beside.model))]
