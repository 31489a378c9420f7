"""How far a statistic may move from its snapshot: every number of it stands here.

Rounding differs between machines, thread counts and memory layouts, and a statistic inherits it in
proportion to its scale: the root mean square of the tensor, or the value itself where that is
larger (an outlier's last digits). ``docs/decisions/0003-snapshot-format.md`` has the measurements:
in float32 the noise stays below a hundredth of a tolerance in the forward pass, and below a
fortieth in the backward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import torch

from pytest_modelhealth.snapshot.file_format import Snapshot, TensorLine, layer_of

FORWARD = 5e-4
"""Batch, parameters, buffers, activations and loss, as a part of the scale. A layer whose weights
are scaled by 1.001 drifts."""

BACKWARD = 5e-3
"""Gradients, as a part of the scale. For those of parameters, the largest root mean square among
the gradients of the same layer is added to it: the gradient of a bias before a batch norm, or of an
attention key's bias, is zero but for rounding, and has no scale of its own."""

FRACTION = 1e-3
"""Zero and dead fractions, absolute: one element or unit in a thousand."""

LOW_PRECISION = {"forward": 4, "backward": 8, "fraction": 2}
"""In half precision these multiples of the machine epsilon (0.0078 for bfloat16) take the place of
the tolerances above that are smaller."""

EXACT = ("dtype", "shape", "count", "nan", "inf")
REAL = ("rms", "std", "mean", "min", "max")
FRACTIONS = ("zeros", "dead")

_GRADIENTS = ("gradients", "parameter_gradients")


class Tolerances:
    """The tolerances around one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        epsilon = _coarsest_epsilon(snapshot)
        self._forward = max(FORWARD, LOW_PRECISION["forward"] * epsilon)
        self._backward = max(BACKWARD, LOW_PRECISION["backward"] * epsilon)
        self._fraction = max(FRACTION, LOW_PRECISION["fraction"] * epsilon)
        self._largest: defaultdict[str, float] = defaultdict(float)
        for name, tensor in snapshot.tensors.get("parameter_gradients", {}).items():
            layer = layer_of("parameter_gradients", name)
            self._largest[layer] = max(self._largest[layer], _magnitude(tensor.rms))

    def real(self, role: str, layer: str, tensor: TensorLine, value: float) -> float:
        """Return how far `value`, a real statistic of `tensor`, may move."""
        scale = max(_magnitude(tensor.rms), _magnitude(value))
        if role == "parameter_gradients":
            scale += self._largest[layer]
        return scale * (self._backward if role in _GRADIENTS else self._forward)

    def fraction(self, role: str, statistic: str) -> float:
        """Return how far a zero or dead fraction may move.

        Zeros of gradients are free: where terms cancel, the machine decides between zero and
        1e-12, and a zero that matters shows among the activations or moves the other statistics.
        """
        is_free = statistic == "zeros" and role in _GRADIENTS
        return math.inf if is_free else self._fraction

    def loss(self, loss: float) -> float:
        """Return how far the loss may move."""
        return self._forward * _magnitude(loss)


def _magnitude(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0


def _coarsest_epsilon(snapshot: Snapshot) -> float:
    """Return the machine epsilon of the least precise dtype that the model computes in."""
    tensors = snapshot.tensors.get("activations", {}).values()
    return max((_epsilon(tensor.dtype) for tensor in tensors), default=0.0)


@cache
def _epsilon(dtype: str) -> float:
    """Return the machine epsilon of a real floating dtype, 0 for any other."""
    found = getattr(torch, dtype, None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return torch.finfo(found).eps
    return 0.0
