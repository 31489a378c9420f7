"""How far a statistic may move from its snapshot, and how far rounding alone moves it.

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
from typing import NamedTuple

from pytest_modelhealth.report import Noises
from pytest_modelhealth.snapshot.snapshot import (
    FRACTIONS,
    GRADIENTS,
    REAL,
    Snapshot,
    TensorKey,
    TensorLine,
    is_given,
    is_judged_whole,
    judges_zeros,
)
from pytest_modelhealth.tolerance import LOSS, epsilon_of, floor

FACTOR = 20.0
"""How many times its noise a statistic may move."""

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

FRACTION = 1e-3
"""Zero and dead fractions, absolute: one element or unit in a thousand."""

LOW_PRECISION = {FORWARD: 4, BACKWARD: 8, FRACTION: 2}
"""In half precision these multiples of the machine epsilon (0.0078 for bfloat16) take the place of
the fixed tolerances that are smaller."""

KEPT_FRACTION = 1e-4
"""A noise of a zero or dead fraction that is smaller is far within the fixed tolerance."""


def coarse(times: float) -> float:
    """Return the least of 1, 1.5, 2, 3, 4, 6, 8, ... that is not below `times`.

    So coarse that measuring again mostly gives the same.
    """
    power = 2.0 ** max(math.floor(math.log2(times)), 0)
    return next(power * step for step in (1, 1.5, 2) if times <= power * step * (1 + 1e-6))


class Allowance(NamedTuple):
    """How far a statistic may move, and the noise that this is a multiple of, if it is one."""

    distance: float
    noise: float | None = None


class Tolerances:
    """The noise of each number of a snapshot, and the tolerance around it.

    Args:
        snapshot: sets noise and scale.
        epsilon: machine epsilon of what is compared with it. Where that is coarser, as with
            products in bfloat16, the noise grows by as much.
    """

    def __init__(self, snapshot: Snapshot, epsilon: float = 0.0) -> None:
        recorded = snapshot.epsilon
        self._epsilon = recorded if snapshot.calibrated else 0.0
        called = [name for name, line in snapshot.layers.items() if line.calls]
        self._place = {name: place for place, name in enumerate(called, start=1)}
        self._layers = snapshot.layers
        self.widened = max(epsilon / recorded, 1.0) if recorded else 1.0
        coarsest = max(recorded, epsilon)
        self._fixed = {part: max(part, n * coarsest) for part, n in LOW_PRECISION.items()}

    def of(
        self, role: str, layer: str, tensor: TensorLine, statistic: str, value: float
    ) -> Allowance:
        """Return how far `value`, a statistic of `tensor` that is no count, may move."""
        noise = self.noise(role, layer, tensor, statistic)
        if noise is not None and role != "parameters":
            noise *= self.widened
        if statistic in FRACTIONS:
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
            scale += self._layers[layer].largest_gradient
        return Allowance(scale * self._fixed[BACKWARD if role in GRADIENTS else FORWARD])

    def loss(self, loss: float, times: float | None) -> Allowance:
        """Return how far the loss may move, whose noise is so many times the usual."""
        noise = (times or (1.0 if loss else 0.0)) * self._usual_of_loss(loss) * self.widened
        if noise:
            return Allowance(FACTOR * noise, noise)
        return Allowance(self._fixed[FORWARD] * _magnitude(loss))

    def noise(self, role: str, layer: str, tensor: TensorLine, statistic: str) -> float | None:
        """Return how far rounding moves a statistic; ``None`` where that is not known."""
        if statistic in FRACTIONS:
            return tensor.noise.get(statistic)
        if statistic == "rms":  # which follows from the other two
            parts = [
                getattr(tensor, name) / tensor.rms * (self.noise(role, layer, tensor, name) or 0.0)
                for name in ("mean", "std")
                if tensor.rms
            ]
            return math.hypot(*parts) or None
        # A zero that no perturbation moves is exact: the least of a ReLU.
        times = tensor.noise.get(statistic, 1.0 if getattr(tensor, statistic) else 0.0)
        return times * self._usual(role, layer, tensor, statistic) or None

    def _usual(self, role: str, layer: str, tensor: TensorLine, statistic: str) -> float:
        """Return the usual noise: a part of the rms or of the value, where that is larger."""
        value: float = getattr(tensor, statistic)
        if not (math.isfinite(value) and math.isfinite(tensor.rms)):
            return 0.0
        scale = max(tensor.rms, abs(value))
        if is_given(role, layer):  # random numbers differ by an epsilon between sets of kernels
            return epsilon_of(tensor.dtype) * scale
        if role == "parameter_gradients":
            scale += self._sum_scale(layer, tensor)
        depth = len(self._place)
        place = self._place.get(layer, depth)
        return floor(self._epsilon, 2 * depth - place if role in GRADIENTS else place) * scale

    def _usual_of_loss(self, loss: float) -> float:
        scale = (abs(loss) or 1.0) if math.isfinite(loss) else 0.0
        return floor(self._epsilon, len(self._place)) * scale

    def _sum_scale(self, layer: str, tensor: TensorLine) -> float:
        """Return what the terms that sum to a parameter's gradient let it be, if they cancel.

        The gradient of a bias before a batch norm, or of an attention key's bias, is zero but for
        rounding: its scale is that of the other gradients of its layer, and of the terms
        themselves.
        """
        line = self._layers[layer]
        scale, seen = line.largest_gradient, line.tensors.get(("gradients", ""))
        if seen is not None and len(tensor.shape) == 1 and math.isfinite(seen.rms):
            terms = max(seen.count // max(tensor.count, 1), 1)
            scale = max(scale, math.sqrt(terms) * seen.rms)
        return scale

    def multiples(
        self, layer: str, key: TensorKey, tensor: TensorLine, measured: Noises
    ) -> dict[str, float]:
        """Return what a line keeps of the noise that was measured."""
        role, own_name = key
        if is_given(role, layer):
            return {}
        moved = measured.get((layer, role, own_name), {})
        found = {}
        for name in REAL:
            usual, noise = self._usual(role, layer, tensor, name), moved.get(name, 0.0)
            if usual and (noise > usual or (noise and not getattr(tensor, name))):
                found[name] = coarse(noise / usual)
        fractions = {
            "zeros": moved.get("zero_fraction", 0.0) * judges_zeros(role, layer),
            "dead": moved.get("dead_fraction", 0.0) * is_judged_whole(role, layer),
        }
        return found | {name: noise for name, noise in fractions.items() if noise > KEPT_FRACTION}

    def multiple_of_loss(self, loss: float | None, measured: Noises) -> float | None:
        """Return the same of the loss."""
        noise = measured.get(LOSS, {}).get("value", 0.0)
        usual = self._usual_of_loss(loss or 0.0)
        return coarse(noise / usual) if usual and noise > (usual if loss else 0.0) else None


def _magnitude(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0
