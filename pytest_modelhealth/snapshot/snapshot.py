"""What a snapshot is: the statistics of one run, how far rounding moves each, and how far it may.

The usual noise of a number follows from the machine epsilon and the roundings in a row, which are
those of the layers before, and for gradients of those behind too. It is not in the file. What is,
are the numbers that were measured to move further, as multiples of it. A statistic may move by a
multiple of its noise; where that was not measured, by a fixed part of its scale: the root mean
square of the tensor, or the value itself where that is larger.
``docs/decisions/0003-snapshot-format.md`` has the measurements behind the fixed parts,
``docs/decisions/0008-calibrated-snapshots.md`` those behind the multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord, Noises, Observation
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import (
    LOSS,
    TensorName,
    coarsest_epsilon,
    epsilon_of,
    floor,
    product_epsilon,
)

REAL = ("mean", "std", "min", "max")
"""The real numbers that are kept of a tensor; the root mean square follows from the first two."""

NAMED = ("parameters", "parameter_gradients", "buffers")
"""The roles of which a layer has several tensors, each with a name of its own."""

GRADIENTS = ("gradients", "parameter_gradients")

FACTOR = 20.0  # how many times its noise a statistic may move

GRADIENT_FACTOR = 50.0
"""The same of gradients: with SSE 4.1 kernels one in the last stage of a ResNet-50 moved by 24."""

GRADIENT_EXTREME = 1e-3
"""The least and the greatest gradient may move by this part of it in any case: an activation next
to zero that rounding takes across it changes single gradients, by 5e-4 there."""

FORWARD = 5e-4
"""Without a noise: batch, parameters, buffers, activations and loss, as a part of the scale. A
layer whose weights are scaled by 1.001 drifts."""

BACKWARD = 5e-3
"""Without a noise: gradients, as a part of the scale. For those of parameters, the largest root
mean square among the gradients of the same layer is added to it: the gradient of a bias before a
batch norm, or of an attention key's bias, is zero but for rounding, and has no scale of its own."""

FRACTION = 1e-3  # the zero fraction, absolute: one element in a thousand

LOW_PRECISION = {FORWARD: 4, BACKWARD: 8, FRACTION: 2}
"""In half precision these multiples of the machine epsilon (0.0078 for bfloat16) take the place of
the fixed tolerances that are smaller."""

KEPT_FRACTION = 1e-4  # a noise of a zero fraction that is smaller is far within the fixed tolerance


@dataclass(frozen=True)
class Snapshot:
    """The content of a snapshot file."""

    test: str  # the test it belongs to, and which of the test's snapshots it is
    profile: str  # device and dtype, ``"cpu float32"``
    recorded: str  # versions; for people, never compared
    calibrated: bool  # whether the noise of its numbers was measured
    epsilon: float  # machine epsilon of the coarsest dtype that the model computed in
    observation: Observation  # the layers, in the order in which they returned, and the loss
    # of what rounding moves further than usual, how many times as far; of the zero fraction, how
    # far
    noise: Noises = field(default_factory=dict)
    # what its run warned of, by check, layer and kind; ``None`` where that was not recorded
    warnings: Mapping[tuple[str, str, str], str] | None = None

    @property
    def layers(self) -> Mapping[str, LayerRecord]:
        """The layers by name."""
        return self.observation.layers

    @cached_property
    def holders(self) -> frozenset[str]:
        """Names of the layers that others lie in; the model itself always is one."""
        return containers(self.layers) | {""}

    @cached_property
    def place(self) -> dict[str, int]:
        """Place of each layer in the order in which they returned."""
        return {name: place for place, name in enumerate(self.layers)}

    def label(self, layer: str, own_name: str = "") -> str:
        """Return the name of a layer or tensor for people."""
        return shown(dotted(layer or self.observation.model_type, own_name))

    @cached_property
    def tensors(self) -> dict[str, dict[TensorName, TensorStatistics]]:
        """The tensors of each layer; the inputs of a container are those of its first layer."""
        return {
            layer: {
                (layer, role, own): seen
                for role in ROLES
                if role != "inputs" or not layer or layer not in self.holders
                for own, seen in record.tensors(role).items()
            }
            for layer, record in self.layers.items()
        }

    def with_tensors(
        self, made: Callable[[TensorName, TensorStatistics], TensorStatistics]
    ) -> Snapshot:
        """Return the snapshot with each tensor replaced by what `made` returns for it."""
        layers = {}
        for name, record in self.layers.items():
            roles: dict[str, dict[str, TensorStatistics]] = {role: {} for role in ROLES}
            for key, seen in self.tensors[name].items():
                roles[key[1]][key[2]] = made(key, seen)
            layers[name] = replace(record, **of_roles(roles))
        return replace(self, observation=replace(self.observation, layers=layers))


def shown(text: str) -> str:
    """Return a text of a file with what a terminal would obey written as an escape."""
    return text if text.isprintable() else repr(text)[1:-1]


def of_roles(tensors: Mapping[str, Mapping[str, TensorStatistics]]) -> dict[str, Any]:
    """Return the tensors of each role of a layer as its record has them."""
    return {role: seen if role in NAMED else seen.get("") for role, seen in tensors.items()}


def is_given(name: TensorName) -> bool:
    """Whether a tensor is given to the model rather than computed: its batch, a parameter."""
    layer, role, _ = name
    return role == "parameters" or (role == "inputs" and not layer)


def is_judged_whole(name: TensorName) -> bool:
    """Whether more than the real statistics of a tensor are compared.

    Inputs of inner layers serve the story: their form may change.
    """
    return name[1] != "inputs" or not name[0]


def judges_zeros(name: TensorName) -> bool:
    """Whether the zero fraction of a tensor is compared.

    Zeros of gradients are free: where terms cancel, the machine decides between zero and 1e-12,
    and a zero that matters shows among the activations or moves the other statistics.
    """
    return name[1] not in GRADIENTS and is_judged_whole(name)


def shape_text(shape: tuple[int, ...]) -> str:
    """Spell a shape: ``64x10``, that of a scalar ``()``."""
    return "x".join(map(str, shape)) or "()"


def of_report(report: HealthReport, test: str = "-") -> Snapshot:
    """Return what a snapshot keeps of a report, with every digit."""
    layers = ((f, layer) for f in report.warnings for layer in (f.layer, *f.affected))
    warned = {(f.check, layer, f.kind): f.message for f, layer in layers}
    return replace(from_observation(report.observation, report._noise, test), warnings=warned)


def from_observation(
    observation: Observation, noise: Noises | None = None, test: str = "-"
) -> Snapshot:
    """Return what a snapshot keeps of a run; `noise` is ``None`` where it was not measured."""
    records = sorted(
        observation.layers.values(),
        key=lambda one: math.inf if one.completed is None else one.completed,
    )
    # As a file has them: it does not say when a layer was entered, nor what is a function.
    layers = {
        record.name: replace(record, entered=place if record.calls else None, functional=False)
        for place, record in enumerate(records)
    }
    outputs = [one.activations for one in records if one.activations is not None]
    devices = {one.device.partition(":")[0] for one in outputs if one.dtype == "float32"}
    products = max((product_epsilon(device) for device in devices), default=0.0)
    parameters = [one for record in records for one in record.parameters.values()]
    places = {one.device.partition(":")[0] for one in (*outputs, *parameters)}
    floating = [one.dtype for one in outputs if "float" in one.dtype or "complex" in one.dtype]
    # Of equally frequent ones the first by name, so that the choice does not hang on the order.
    dtype = max(sorted(set(floating)), key=floating.count, default="")
    snapshot = Snapshot(
        test=test,
        profile=" ".join([*sorted(places), dtype]).strip() or "unknown",
        recorded=f"pytest-modelhealth {__version__}, torch {torch.__version__}",
        calibrated=noise is not None,
        epsilon=max(coarsest_epsilon(observation), products),
        observation=Observation(layers, observation.model_type, loss=observation.loss),
    )
    if noise is None:
        return snapshot
    return replace(snapshot, noise=Tolerances(snapshot).multiples(noise))


class Allowance(NamedTuple):
    """How far a statistic may move, and the noise that this is a multiple of, if it is one."""

    distance: float
    noise: float | None = None


class Tolerances:
    """The noise of each number of a snapshot, and the tolerance around it.

    Where the machine epsilon of what is compared with it is coarser, as with products in bfloat16,
    the noise grows by as much.
    """

    def __init__(self, snapshot: Snapshot, epsilon: float = 0.0) -> None:
        recorded = snapshot.epsilon
        self._epsilon = recorded if snapshot.calibrated else 0.0
        called = [name for name, record in snapshot.layers.items() if record.calls]
        self._place = {name: place for place, name in enumerate(called, start=1)}
        self._snapshot = snapshot
        self.widened = max(epsilon / recorded, 1.0) if recorded else 1.0
        coarsest = max(recorded, epsilon)
        self._fixed = {part: max(part, n * coarsest) for part, n in LOW_PRECISION.items()}

    def of(self, name: TensorName, tensor: TensorStatistics, statistic: str) -> Allowance:
        """Return how far a statistic of a tensor, which is no count, may move."""
        role, value = name[1], getattr(tensor, statistic)
        noise = self.noise(name, tensor, statistic)
        if noise is not None and role != "parameters":
            noise *= self.widened
        if statistic == "zero_fraction":
            fixed, moved = self._fixed[FRACTION], FACTOR * (noise or 0.0)
            return Allowance(moved, noise) if moved > fixed else Allowance(fixed)
        if noise is not None and role in GRADIENTS:
            least = GRADIENT_EXTREME * _magnitude(value) if statistic in ("min", "max") else 0.0
            is_less = least > GRADIENT_FACTOR * noise
            return Allowance(least) if is_less else Allowance(GRADIENT_FACTOR * noise, noise)
        if noise is not None:
            return Allowance(FACTOR * noise, noise)
        scale = max(_magnitude(tensor.rms), _magnitude(value))
        if role == "parameter_gradients":
            scale += self._largest_gradient(name[0])
        return Allowance(scale * self._fixed[BACKWARD if role in GRADIENTS else FORWARD])

    def of_loss(self, loss: float) -> Allowance:
        """Return how far the loss may move."""
        times = self._snapshot.noise.get(LOSS, {}).get("value") or (1.0 if loss else 0.0)
        noise = times * self._usual_of_loss(loss) * self.widened
        if noise:
            return Allowance(FACTOR * noise, noise)
        return Allowance(self._fixed[FORWARD] * _magnitude(loss))

    def noise(self, name: TensorName, tensor: TensorStatistics, statistic: str) -> float | None:
        """Return how far rounding moves a statistic; ``None`` where that is not known."""
        measured = self._snapshot.noise.get(name, {})
        if statistic == "zero_fraction":
            return measured.get(statistic)
        if statistic == "rms":  # which follows from the other two
            parts = [
                getattr(tensor, part) / tensor.rms * (self.noise(name, tensor, part) or 0.0)
                for part in ("mean", "std")
                if tensor.rms
            ]
            return math.hypot(*parts) or None
        # A zero that no perturbation moves is exact: the least of a ReLU.
        times = measured.get(statistic, 1.0 if getattr(tensor, statistic) else 0.0)
        return times * self._usual(name, tensor, statistic) or None

    def _usual(self, name: TensorName, tensor: TensorStatistics, statistic: str) -> float:
        """Return the usual noise: a part of the rms or of the value, where that is larger."""
        layer, role, _ = name
        value: float = getattr(tensor, statistic)
        if not (math.isfinite(value) and math.isfinite(tensor.rms)):
            return 0.0
        scale = max(tensor.rms, abs(value))
        if is_given(name):  # random numbers differ by an epsilon between sets of kernels
            return epsilon_of(tensor.dtype) * scale
        if role == "parameter_gradients":
            # The gradient of a bias before a batch norm, or of an attention key's bias, is zero but
            # for rounding: its scale is that of the other gradients of its layer, and of the terms
            # that sum to it.
            least, gradients = self._largest_gradient(layer), self._snapshot.layers[layer].gradients
            if gradients is not None and len(tensor.shape) == 1 and math.isfinite(gradients.rms):
                terms = max(gradients.count // max(tensor.count, 1), 1)
                least = max(least, math.sqrt(terms) * gradients.rms)
            scale += least
        depth = len(self._place)
        place = self._place.get(layer, depth)
        return floor(self._epsilon, 2 * depth - place if role in GRADIENTS else place) * scale

    def _usual_of_loss(self, loss: float) -> float:
        scale = (abs(loss) or 1.0) if math.isfinite(loss) else 0.0
        return floor(self._epsilon, len(self._place)) * scale

    def _largest_gradient(self, layer: str) -> float:
        """Return the largest root mean square among the gradients of a layer's parameters."""
        gradients = self._snapshot.layers[layer].parameter_gradients.values()
        return max((_magnitude(one.rms) for one in gradients), default=0.0)

    def multiples(self, measured: Noises) -> Noises:
        """Return what a snapshot keeps of the noise that was measured."""
        found = {}
        for layer in self._snapshot.layers:
            for name, tensor in self._snapshot.tensors[layer].items():
                moved, kept = {} if is_given(name) else measured.get(name, {}), {}
                for one in REAL:
                    noise, usual = moved.get(one, 0.0), self._usual(name, tensor, one)
                    if usual and (noise > usual or (noise and not getattr(tensor, one))):
                        kept[one] = coarse(noise / usual)
                if judges_zeros(name) and moved.get("zero_fraction", 0.0) > KEPT_FRACTION:
                    kept["zero_fraction"] = moved["zero_fraction"]
                if kept:
                    found[name] = kept
        loss = self._snapshot.observation.loss or 0.0
        noise, usual = measured.get(LOSS, {}).get("value", 0.0), self._usual_of_loss(loss)
        if usual and noise > (usual if loss else 0.0):
            found[LOSS] = {"value": coarse(noise / usual)}
        return found


def coarse(times: float) -> float:
    """Return the least of 1, 1.5, 2, 3, 4, 6, 8, ... that is not below `times`.

    So coarse that measuring again mostly gives the same.
    """
    power = 2.0 ** max(math.floor(math.log2(times)), 0)
    return next(power * step for step in (1, 1.5, 2) if times <= power * step * (1 + 1e-6))


def _magnitude(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0
