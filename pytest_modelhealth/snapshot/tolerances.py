"""How far a statistic may move from its snapshot: every number of it stands here.

Where the noise of a statistic is known, it is a multiple of that noise. Where it was not measured,
it is a fixed part of the statistic's scale: the root mean square of the tensor, or the value itself
where that is larger.
``docs/decisions/0003-snapshot-format.md`` has the measurements behind the fixed parts,
``docs/decisions/0008-calibrated-snapshots.md`` those behind the multiple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_modelhealth.snapshot.noise import Noise
from pytest_modelhealth.snapshot.snapshot import FRACTIONS, GRADIENTS, Snapshot, TensorLine

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

LOW_PRECISION = {"forward": 4, "backward": 8, "fraction": 2}
"""In half precision these multiples of the machine epsilon (0.0078 for bfloat16) take the place of
the fixed tolerances that are smaller."""


@dataclass(frozen=True)
class Allowance:
    """How far a statistic may move.

    Args:
        distance: that far.
        noise: the measured noise it is a multiple of; ``None`` where it is a fixed part.
    """

    distance: float
    noise: float | None = None


class Tolerances:
    """The tolerances around one snapshot.

    Args:
        snapshot: sets noise and scale.
        epsilon: machine epsilon of what is compared with it. Where that is coarser, as with
            products in bfloat16, the noise grows by as much.
    """

    def __init__(self, snapshot: Snapshot, epsilon: float = 0.0) -> None:
        recorded = snapshot.epsilon
        self.noise = Noise(snapshot)
        self._layers = snapshot.layers
        self.widened = max(epsilon / recorded, 1.0) if recorded else 1.0
        coarsest = max(recorded, epsilon)
        self._forward = max(FORWARD, LOW_PRECISION["forward"] * coarsest)
        self._backward = max(BACKWARD, LOW_PRECISION["backward"] * coarsest)
        self._fraction = max(FRACTION, LOW_PRECISION["fraction"] * coarsest)

    def of(
        self, role: str, layer: str, tensor: TensorLine, statistic: str, value: float
    ) -> Allowance:
        """Return how far `value`, a statistic of `tensor` that is no count, may move."""
        if statistic in FRACTIONS:
            return self._of_fraction(tensor, statistic)
        noise = self.noise.of(role, layer, tensor, statistic)
        if noise is not None:
            noise *= 1.0 if role == "parameters" else self.widened
            if role not in GRADIENTS:
                return Allowance(FACTOR * noise, noise)
            least = GRADIENT_EXTREME * _magnitude(value) if statistic in ("min", "max") else 0.0
            if least > GRADIENT_FACTOR * noise:
                return Allowance(least)
            return Allowance(GRADIENT_FACTOR * noise, noise)
        scale = max(_magnitude(tensor.rms), _magnitude(value))
        if role == "parameter_gradients":
            scale += self._layers[layer].largest_gradient
        return Allowance(scale * (self._backward if role in GRADIENTS else self._forward))

    def _of_fraction(self, tensor: TensorLine, statistic: str) -> Allowance:
        noise = tensor.noise.get(statistic, 0.0) * self.widened
        if FACTOR * noise > self._fraction:
            return Allowance(FACTOR * noise, noise)
        return Allowance(self._fraction)

    def loss(self, loss: float, times: float | None) -> Allowance:
        """Return how far the loss may move, whose noise is so many times the usual."""
        noise = self.noise.of_loss(loss, times)
        if noise is not None:
            return Allowance(FACTOR * noise * self.widened, noise * self.widened)
        return Allowance(self._forward * _magnitude(loss))


def _magnitude(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0
