"""What quantisation does to the numbers of a model, measured by the steps that a candidate has.

Copies of the reference are moved by up to half a step wherever the candidate has rounded: weights
that it keeps quantised, tensors that were quantised when it ran, and what layers with quantised
weights take, as these may round it inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.capture.step.bare import copied
from pytest_modelhealth.comparison.links import Link, parameter_names
from pytest_modelhealth.comparison.trace import Key, Trace
from pytest_modelhealth.comparison.weights import fitted, scale_of_folding
from pytest_modelhealth.layers import named_modules, own_parameters
from pytest_modelhealth.statistics.dense import step, step_of_grid
from pytest_modelhealth.tolerance import perturbed_batch

INSIDE = 2.0**-7
"""The step in which a layer may round what it takes, by the range of that: seven bits, which torch
uses on some processors for the eight that it says."""

Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Quantisation:
    """The steps of a candidate, as tensors of the reference have them.

    Args:
        weights: those of parameters, by the names of the layer and of the parameter.
        values: those of what flows.
        rounding: what goes into layers that may round it inside.
    """

    weights: Mapping[tuple[str, str], Tensor]
    values: Mapping[Key, float]
    rounding: frozenset[Key]

    def rounded(self, request: Request, epsilon: float, seed: int) -> Request:
        """Return a request for a copy with the weights moved by up to half a step.

        Raises:
            InspectionError: the model cannot be copied.
        """
        module = copied(find_engine(request.model).module(request.model))
        generator = torch.Generator().manual_seed(seed)
        modules = {named.name: named.module for named in named_modules(module)}
        for (layer, name), distance in self.weights.items():
            weight = modules[layer]._parameters[name]
            assert weight is not None
            weight.data += _noise(distance, weight, generator)
        inputs = perturbed_batch(request.inputs, epsilon, seed)
        return replace(request, model=module, inputs=inputs, backward=False)

    def step_of(self, key: Key, value: Tensor) -> float:
        """Return the step in which the candidate rounds a tensor of the reference; 0 for none."""
        if key in self.rounding and value.numel():
            return INSIDE * float(value.max().clamp_min(0) - value.min().clamp_max(0))
        return self.values.get(key, 0.0)


def move(value: Tensor, distance: float, seed: int) -> None:
    """Move each element of a tensor of a copy by up to half a step, in place."""
    if distance and value.is_floating_point() and 0 not in value.stride():
        generator = torch.Generator().manual_seed(seed)
        value += _noise(torch.tensor(distance), value, generator)


def _noise(distance: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    u = torch.rand(like.shape, generator=generator, dtype=torch.float64) - 0.5
    return (u * distance.cpu()).to(like)


def quantisation(
    alignment: Alignment,
    links: Iterable[Link],
    a: Trace,
    b: Trace,
    store: TensorStore,
    modules: tuple[Modules, Modules],
) -> Quantisation:
    """Return what is known of the steps of a candidate; the store holds the tensors of both."""
    weights: dict[tuple[str, str], Tensor] = {}
    for pair, ours, theirs in alignment.aligned:
        if ours.name not in modules[0] or theirs.name not in modules[1]:
            continue
        names = parameter_names(ours.name, theirs.name, a, b)
        module, other = modules[0][ours.name], modules[1][theirs.name]
        for name, distance in _weight_steps(module, other, names):
            folded = scale_of_folding(pair, modules[0])
            if folded is not None:
                distance = distance / _rows(folded, distance)
            weights[ours.name, name] = distance
    layers = {layer for layer, _ in weights}
    return Quantisation(weights, *_flowing(links, a, b, store, layers))


def _weight_steps(
    module: nn.Module, other: nn.Module, names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the steps of each parameter that the candidate keeps quantised, by its name."""
    held = own_parameters(other)
    for name, theirs in names.items():
        own, found = module._parameters.get(name), held.get(theirs)
        distance = None if found is None else step(found)
        if own is not None and found is not None and distance is not None:
            yield name, fitted(distance, found, own).expand(own.shape)


def _flowing(
    links: Iterable[Link], a: Trace, b: Trace, store: TensorStore, layers: Set[str]
) -> tuple[dict[Key, float], frozenset[Key]]:
    """Return the steps of what flows, and what may be rounded inside the layers that take it.

    A tensor that appears several times is rounded once.
    """
    values: dict[Key, float] = {}
    inside, seen = set(), set()
    for link in links:
        key, entry = link.reference, b.entries[link.candidate[0]]
        slot = a.entries[key].slot
        if key.role not in ("inputs", "activations") or slot in seen:
            continue
        is_taken = key.role == "inputs" and key.layer in layers
        distance = entry.step or _step_of_grid(store[slot], store[entry.slot])
        if distance:
            values[key] = distance
        elif is_taken and entry.dtype.is_floating_point:
            inside.add(key)
        if distance or key in inside:
            seen.add(slot)
    return values, frozenset(inside)


def _step_of_grid(expected: Tensor, found: Tensor) -> float:
    """Return the step of a candidate's tensor whose values were rounded and are floats again.

    Where the reference's lie on a grid as well, as pixels do, nobody has rounded them.
    """
    if not found.is_floating_point() or not found.numel():
        return 0.0
    distance = step_of_grid(found)
    return 0.0 if distance and step_of_grid(expected) else distance


def _rows(scale: Tensor, like: Tensor) -> Tensor:
    """Return numbers of the output channels so that they can be broadcast to a weight."""
    return scale.abs().clamp_min(1e-12).reshape(-1, *[1] * (like.ndim - 1))
