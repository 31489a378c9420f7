"""What checks ask of a layer's weights: which are linear maps, and how wide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord
    from pytest_modelhealth.statistics import TensorStatistics


IN_PROJECTION = "in_proj_weight"
"""What `torch.nn.MultiheadAttention` calls the projections of queries, keys and values in one."""


class LinearMap(NamedTuple):
    """A parameter that multiplies a layer's inputs: of a linear, convolution or recurrent layer.

    Args:
        tensor: the parameter's own name.
        weights: its statistics.
        fan_in: how many inputs each output sums over.
        fan_out: how many outputs each input reaches.
    """

    tensor: str
    weights: TensorStatistics
    fan_in: int
    fan_out: int

    @property
    def scale(self) -> float:
        """Standard deviation times the root of the fan-in: the gain of independent weights.

        1.41 as He et al. (2015) initialise, 1 as Glorot and Bengio (2010) do, 0.58 by torch's
        default.
        """
        return self.weights.std * math.sqrt(self.fan_in)

    @property
    def scale_by_fan_out(self) -> float:
        """The same by the fan-out, which initialisers for the backward pass go by."""
        return self.weights.std * math.sqrt(self.fan_out)


def linear_maps(record: LayerRecord) -> list[LinearMap]:
    """Return the parameters of a layer that are linear maps.

    They are known by their shape: ``(outputs, inputs)`` or its transpose for a matrix, channels and
    kernel for a convolution, and by their name (``weight_ih_l0``) in recurrent layers. What can be
    broadcast over another parameter is a scale of it: the gain of weight standardisation, one for
    each unit.
    """
    maps = []
    for name, statistics in record.parameters.items():
        if any(_scales(statistics.shape, other.shape) for other in record.parameters.values()):
            continue
        fans = _fans(record, name, statistics.shape)
        if fans is not None and statistics.count and not statistics.nonfinite_count:
            maps.append(LinearMap(name, statistics, *fans))
    return maps


def _scales(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a parameter of `shape` can be broadcast over a larger one of as many dimensions."""
    if len(shape) < 3 or len(shape) != len(other) or shape == other:
        return False
    return all(own in (1, size) for own, size in zip(shape, other, strict=True))


def is_scale(shape: tuple[int, ...]) -> bool:
    """Whether a parameter holds one number a channel, or one for all: ``(C,)``, ``(C, 1, 1)``."""
    return sum(size > 1 for size in shape) <= 1


def _fans(record: LayerRecord, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    if len(shape) == 2 and name.startswith(("weight_ih", "weight_hh")):
        return shape[1], shape[0]
    if len(shape) == 2 and name == IN_PROJECTION and shape[0] == 3 * shape[1]:
        return shape[1], shape[1]  # queries, keys and values, each a square
    given, returned = record.inputs, record.activations
    if given is None or returned is None or not given.shape or not returned.shape:
        return None
    if len(shape) == 2 and shape == (returned.shape[-1], given.shape[-1]):
        return shape[1], shape[0]
    if len(shape) == 2 and shape == (given.shape[-1], returned.shape[-1]):
        return shape[0], shape[1]
    if len(shape) > 2 and "Conv" in record.type_name and not name.startswith("bias"):
        if len(given.shape) not in (len(shape), len(shape) - 1):
            return None  # a scale of each channel, (channels, 1, 1), is no kernel
        kernel = math.prod(shape[2:])
        transposed = "Transpose" in record.type_name
        inputs, outputs = (shape[0], shape[1]) if transposed else (shape[1], shape[0])
        return inputs * kernel, outputs * kernel
    return None
