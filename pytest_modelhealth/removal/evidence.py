"""Runs batches in evaluation mode and looks at every unit: some numbers of each, no tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.removal.routes import Place, Route, held, routes
from pytest_modelhealth.report import Observation

_SEED = 20_241_122
_PROJECTIONS = 4
_AT_ONCE = 2**20
"""Elements that are brought to float64 at a time."""

_ROUNDINGS = 4
"""Machine epsilons, times the norm of a unit, by which projections of equal units may differ."""

Observe = Callable[[Request], Observation]


@dataclass
class Evidence:
    """What was seen of the units of one layer; tensors are on the CPU, an element a unit.

    Args:
        zero: whether a unit was exactly zero everywhere.
        unread: whether no output depended on it.
        marks: random projections of its values, which equal units share, and the sum of their
            squares; float64.
        samples: how many samples of each unit there were.
        epsilon: machine epsilon of the values.
    """

    zero: Tensor
    unread: Tensor
    marks: Tensor
    samples: int
    epsilon: float

    def merge(self, other: Evidence) -> Evidence:
        """Return what was seen in both."""
        return Evidence(
            self.zero & other.zero,
            self.unread & other.unread,
            self.marks + other.marks,
            self.samples + other.samples,
            max(self.epsilon, other.epsilon),
        )

    @property
    def inactive(self) -> tuple[int, ...]:
        """The units that were zero."""
        return tuple(self.zero.nonzero().flatten().tolist())

    @property
    def unused(self) -> tuple[int, ...]:
        """The units that were not, and that nothing read."""
        return tuple((self.unread & ~self.zero).nonzero().flatten().tolist())

    def twins(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of a unit and the first one that has the same values, in order.

        They are sorted by one projection and compared with their neighbours there, so that the cost
        is that of sorting. Units that are zero have no twin.
        """
        marks = torch.cat([self.marks[:-1], self.marks[-1:].sqrt()]).T.tolist()

        def agree(one: int, other: int, projections: int) -> bool:
            limit = _ROUNDINGS * self.epsilon * max(marks[one][-1], marks[other][-1])
            pairs = zip(marks[one][:projections], marks[other][:projections], strict=True)
            return all(abs(a - b) <= limit for a, b in pairs)

        groups: list[list[int]] = []
        near: list[list[int]] = []  # groups that a unit further on may still be of
        for unit in sorted((~self.zero).nonzero().flatten().tolist(), key=marks.__getitem__):
            near = [group for group in near if agree(unit, group[0], 1)]
            group = next((g for g in near if agree(unit, g[0], len(marks[unit]))), None)
            if group is None:
                group = []
                near.append(group)
                groups.append(group)
            group.append(unit)
        return tuple(sorted((u, min(group)) for group in groups for u in group if u != min(group)))


def look(value: Tensor, dimension: int) -> Evidence:
    """Return what is to be seen of the units of a tensor, of which none is known to be read.

    Args:
        value: of any shape, floating.
        dimension: where its units lie, counted from the end.
    """
    axis = value.ndim + dimension
    units, inner = value.shape[axis], math.prod(value.shape[axis + 1 :])
    rows = value.reshape(-1, units, inner)
    generator = torch.Generator().manual_seed(_SEED)
    zero = torch.ones(units, dtype=torch.bool, device=value.device)
    marks = torch.zeros(_PROJECTIONS + 1, units, dtype=torch.float64, device=value.device)
    step = max(1, _AT_ONCE // max(1, units * inner))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].double()
        weights = torch.randn(len(part), inner, _PROJECTIONS, generator=generator)
        weights = weights.to(value.device, torch.float64)
        if inner == 1:
            marks[:-1] += weights[:, 0].T @ part[..., 0]
        else:
            marks[:-1] += (part @ weights).sum(0).T
        marks[-1] += part.square().sum((0, 2))
        zero &= (part == 0).all(2).all(0)
    unread, epsilon = torch.ones(units, dtype=torch.bool), torch.finfo(value.dtype).eps
    return Evidence(zero.cpu(), unread, marks.cpu(), len(rows), epsilon)


class UnitWatch:
    """A visitor that looks at the units behind some calls.

    Args:
        places: the calls, and where the units lie in what they return, counted from the end.

    Attributes:
        sequence: the layers, in the order in which their outputs appeared.
        seen: what was seen, by call.
    """

    def __init__(self, places: Mapping[Place, int]) -> None:
        self._places = places
        self._counts: Counter[str] = Counter()
        self.sequence: list[str] = []
        self.seen: dict[Place, Evidence] = {}

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """Look at a tensor, if it is behind one of the calls."""
        if role != "activations":
            return
        place = layer, self._counts[layer]
        self._counts[layer] += 1
        self.sequence.append(layer)
        dimension = self._places.get(place)
        is_open = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if dimension is None or not is_open or value.is_meta or not value.is_floating_point():
            return
        if value.ndim >= -dimension:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.seen[place] = look(value.detach(), dimension)

    def see_output(self, output: Any) -> None:
        """Take no notice of what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before, as none is known again."""


class Finder:
    """Runs batches and tells what each said.

    Args:
        request: what is asked of the engine, but for the batch.
        observe: has it run.
        beside: the model, to be run again and again.
        modules: its layers by name.

    Attributes:
        routes: where the units of each layer went, joined over the batches.
    """

    def __init__(
        self, request: Request, observe: Observe, beside: Beside, modules: Mapping[str, nn.Module]
    ) -> None:
        self._request, self._observe, self._beside = request, observe, beside
        self._modules = modules
        self._routes: dict[str, Route] = {}
        self._sequence: list[str] | None = None
        self.routes: dict[str, Route] = {}

    def run(self, inputs: Any, target: Any) -> tuple[Observation, dict[str, Evidence]]:
        """Return what a batch showed, and what it said of the units of each layer.

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
        found = {}
        for name, route in self._routes.items():
            seen = [watch.seen.get(place) for place in route.places]
            if all(one is not None and len(one.zero) == route.layer.units for one in seen):
                joined, *more = (one for one in seen if one is not None)
                for one in more:
                    joined = joined.merge(one)
                found[name] = replace(joined, unread=self._unread(observation, route))
                known = self.routes.get(name)
                self.routes[name] = route if known is None else known.joined(route)
        return observation, found

    def _run_watched(self, inputs: Any, target: Any) -> tuple[Observation, UnitWatch]:
        watch = UnitWatch({p: r.layer.dimension for r in self._routes.values() for p in r.places})
        batch = Inputs.of(copied_batch(inputs))
        request = replace(self._request, inputs=batch, target=copied_batch(target), visitor=watch)
        given = batch.args, batch.kwargs, request.target
        # cuDNN differentiates recurrent layers in training alone
        recurrent = (m for m in self._modules.values() if isinstance(m, nn.RNNBase))
        is_on_cuda = any(p.is_cuda for module in recurrent for p in module.parameters())
        with (
            self._beside.put_back(given, evaluation=True, watched=True),
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
        is_known = gradients is None and flow is not None and flow.is_exact
        if is_known and flow is not None and layer.name not in flow.used:
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


def parameter_of(full: str, modules: Mapping[str, nn.Module]) -> Tensor:
    """Return the values of a parameter, to write to as well: that raises no version."""
    owner, _, own = full.rpartition(".")
    found = held(modules[owner], own)
    assert found is not None
    return found.data
