"""Finds units that look removable: runs batches in evaluation mode and looks at every unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.removal.seeing import Seen, UnitWatch
from pytest_modelhealth.removal.ways import Place, Route, held, read, routes
from pytest_modelhealth.report import LayerRecord, Observation

_WITHOUT_GRADIENTS = (
    "parameters were made under torch.inference_mode, and take no gradient, by which units "
    "are found that nothing reads: make or load the model outside of it"
)

Observe = Callable[[Request], Observation]


@dataclass
class Found:
    """What some batches said of the units of one layer.

    Args:
        route: where they go.
        seen: what was seen of them behind their activation.
        unread: whether no gradient came to a unit; on the CPU, an element a unit.
    """

    route: Route
    seen: Seen
    unread: Tensor

    def merge(self, other: Found) -> Found:
        """Return what both said."""
        return Found(
            self.route.joined(other.route),
            self.seen.merge(other.seen),
            self.unread & other.unread,
        )

    @property
    def inactive(self) -> list[int]:
        """The units that were zero."""
        return _indices(self.seen.zero)

    @property
    def unused(self) -> list[int]:
        """The units that were not, and to which no gradient came."""
        return _indices(self.unread & ~self.seen.zero)


def _indices(units: Tensor) -> list[int]:
    return units.nonzero().flatten().tolist()


class Finder:
    """Runs batches and tells what each said.

    Args:
        request: what is asked of the engine, but for the batch.
        observe: has it run.
        beside: the model, to be run again and again.
        modules: its layers by name.
    """

    def __init__(
        self, request: Request, observe: Observe, beside: Beside, modules: Mapping[str, nn.Module]
    ) -> None:
        self._request, self._observe, self._beside = request, observe, beside
        self._modules = modules
        self._routes: dict[str, Route] = {}
        self._sequence: list[str] | None = None

    def run(self, inputs: Any, target: Any) -> tuple[Observation, dict[str, Found]]:
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
                if self._is_watched(name)
            }
            observation, watch = self._run_watched(inputs, target)
        found = {}
        for name, route in self._routes.items():
            seen = _joined(watch, route)
            if seen is not None:
                found[name] = Found(route, seen, self._unread(observation, route))
        return observation, found

    def _is_watched(self, layer: str) -> bool:
        watched = self._request.selection.roles(layer, self._modules[layer])
        return "activations" in watched

    def _run_watched(self, inputs: Any, target: Any) -> tuple[Observation, UnitWatch]:
        places: dict[Place, int] = {}
        for route in self._routes.values():
            places.update(dict.fromkeys(route.places, route.dimension))
        watch = UnitWatch(places)
        batch = Inputs.of(copied_batch(inputs))
        request = replace(self._request, inputs=batch, target=copied_batch(target), visitor=watch)
        given = batch.args, batch.kwargs, request.target
        with (
            self._beside.put_back(given, evaluation=True, watched=True),
            torch.backends.cudnn.flags(enabled=not _has_recurrence_on_cuda(self._modules)),
        ):
            for parameter in self._request.model.parameters():
                if parameter.is_inference():
                    raise InspectionError(_WITHOUT_GRADIENTS)
                if parameter.is_leaf and parameter.is_floating_point():
                    parameter.requires_grad_(True)  # a frozen one shows no gradient
            return self._observe(request), watch

    def _unread(self, observation: Observation, route: Route) -> Tensor:
        """Return which units no output depended on, as far as the batch shows."""
        record, flow = observation.layers[route.layer], observation.flow
        is_known = record.gradients is None and flow is not None and flow.is_exact
        if is_known and flow is not None and route.layer not in flow.used:
            return torch.ones(route.units, dtype=torch.bool)
        return _without_gradient(record, route.units) | self._by_zero_columns(route)

    def _by_zero_columns(self, route: Route) -> Tensor:
        """Return which units are read by nothing but weights that are all zero."""
        unread = torch.ones(route.units, dtype=torch.bool)
        if route.read_by or route.is_output or not route.readers:
            return ~unread
        for part in read(route, self._modules):
            owner, _, own = part.parameter.rpartition(".")
            kept = held(self._modules[owner], own)
            assert kept is not None
            columns = kept[1].detach().movedim(part.dimension, 0)
            unread &= (columns.reshape(route.units, -1) == 0).all(1).cpu()
        return unread


def _joined(watch: UnitWatch, route: Route) -> Seen | None:
    """Return what was seen at all calls of a layer; ``None`` if one could not be looked at."""
    joined: Seen | None = None
    for place in route.places:
        seen = watch.seen.get(place)
        if seen is None or len(seen.zero) != route.units:
            return None
        joined = seen if joined is None else joined.merge(seen)
    return joined


def _without_gradient(record: LayerRecord, units: int) -> Tensor:
    found = None if record.gradients is None else record.gradients.units
    if found is None or len(found.minimum) != units:
        return torch.zeros(units, dtype=torch.bool)
    return torch.from_numpy((found.minimum == 0.0) & (found.maximum == 0.0))


def _has_recurrence_on_cuda(modules: Mapping[str, nn.Module]) -> bool:
    """Whether cuDNN would run a recurrent layer, which it differentiates in training alone."""
    recurrent = (m for m in modules.values() if isinstance(m, nn.RNNBase))
    return any(p.is_cuda for module in recurrent for p in module.parameters())
