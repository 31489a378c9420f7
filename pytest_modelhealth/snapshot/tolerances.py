"""How far a statistic may move from its snapshot: every number of it stands here.

Where the noise of a statistic was measured, it is a multiple of that noise. Where it was not, as in
a snapshot of format 1, it is a fixed part of the statistic's scale: the root mean square of the
tensor, or the value itself where that is larger.
``docs/decisions/0003-snapshot-format.md`` has the measurements behind the fixed parts,
``docs/decisions/0008-calibrated-snapshots.md`` those behind the multiple.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from pytest_modelhealth.snapshot.file_format import Snapshot, TensorLine, layer_of
from pytest_modelhealth.tolerance import epsilon_of

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

_GRADIENTS = ("gradients", "parameter_gradients")


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
        recorded = snapshot.epsilon or _coarsest_epsilon(snapshot)
        self.widened = max(epsilon / recorded, 1.0) if recorded else 1.0
        coarsest = max(recorded, epsilon)
        self._forward = max(FORWARD, LOW_PRECISION["forward"] * coarsest)
        self._backward = max(BACKWARD, LOW_PRECISION["backward"] * coarsest)
        self._fraction = max(FRACTION, LOW_PRECISION["fraction"] * coarsest)
        self._largest: defaultdict[str, float] = defaultdict(float)
        for name, tensor in snapshot.tensors.get("parameter_gradients", {}).items():
            layer = layer_of("parameter_gradients", name)
            self._largest[layer] = max(self._largest[layer], _magnitude(tensor.rms))

    def real(
        self, role: str, layer: str, tensor: TensorLine, statistic: str, value: float
    ) -> Allowance:
        """Return how far `value`, a real statistic of `tensor`, may move."""
        noise = tensor.noise.get(statistic)
        if noise is not None:
            noise *= 1.0 if role == "parameters" else self.widened
            if role not in _GRADIENTS:
                return Allowance(FACTOR * noise, noise)
            is_extreme = statistic in ("min", "max")
            least = GRADIENT_EXTREME * _magnitude(value) if is_extreme else 0.0
            return Allowance(max(GRADIENT_FACTOR * noise, least), noise)
        scale = max(_magnitude(tensor.rms), _magnitude(value))
        if role == "parameter_gradients":
            scale += self._largest[layer]
        return Allowance(scale * (self._backward if role in _GRADIENTS else self._forward))

    def fraction(self, role: str, tensor: TensorLine, statistic: str) -> Allowance:
        """Return how far a zero or dead fraction may move.

        Zeros of gradients are free: where terms cancel, the machine decides between zero and
        1e-12, and a zero that matters shows among the activations or moves the other statistics.
        """
        if statistic == "zeros" and role in _GRADIENTS:
            return Allowance(math.inf)
        noise = tensor.noise.get(statistic, 0.0) * self.widened
        if FACTOR * noise > self._fraction:
            return Allowance(FACTOR * noise, noise)
        return Allowance(self._fraction)

    def loss(self, loss: float, noise: float | None) -> Allowance:
        """Return how far the loss may move."""
        if noise is not None:
            return Allowance(FACTOR * noise * self.widened, noise * self.widened)
        return Allowance(self._forward * _magnitude(loss))


def _magnitude(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0


def _coarsest_epsilon(snapshot: Snapshot) -> float:
    """Return the machine epsilon of the least precise dtype that the model computes in."""
    tensors = snapshot.tensors.get("activations", {}).values()
    return max((epsilon_of(tensor.dtype) for tensor in tensors), default=0.0)
