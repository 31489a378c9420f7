"""Tells a model, or a batch normalisation, that was just initialised from one that was trained.

`is_fresh` and `looks_trained` each want evidence of their own; of a model that gives neither, both
are false.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import called, trainable
from pytest_modelhealth.checks.weights import linear_maps

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics

_FEW = 16
_UNIFORM = 1.8  # largest magnitude over standard deviation; the square root of 3 if it is uniform
_MOST = 0.8


def is_fresh(observation: Observation) -> bool:
    """Whether the parameters look as initialisers leave them, whatever their scale.

    Training makes biases leave zero, scales of normalisations leave one, and gives a uniform
    distribution, torch's default for weights, a tail. At least 80 % of the layers that tell must
    tell of an initialiser, and no normalisation may have counted more than the batch of this run.
    """
    votes = []
    for record in observation.layers.values():
        batches = record.buffers.get("num_batches_tracked")
        if batches is not None and batches.max > observation.batches:
            return False
        vote = _looks_initialised(record)
        if vote is not None:
            votes.append(vote)
    return bool(votes) and sum(votes) >= _MOST * len(votes)


def _looks_initialised(record: LayerRecord) -> bool | None:
    weight, bias = record.parameters.get("weight"), record.parameters.get("bias")
    if weight is None or not weight.finite_count or "weight" in record.zero_slices:
        return None  # a part of zeros hides how the rest is distributed
    if len(weight.shape) < 2:
        return weight.std == 0.0 and (bias is None or bias.abs_max == 0.0)
    if bias is None:
        return True if _is_uniform(weight) else None
    return bias.abs_max == 0.0 or _is_uniform(weight)


def _is_uniform(weight: TensorStatistics) -> bool:
    return weight.count >= _FEW and 0.0 < weight.abs_max <= _UNIFORM * weight.std


def is_unfitted(record: LayerRecord) -> bool:
    """Whether a batch normalisation has seen no batch yet, so that it normalises nothing.

    It takes its running mean of 0 and variance of 1 for those of its inputs. In training mode it
    normalises by the batch, and has counted it by the time its buffers are read.
    """
    tracked = record.buffers.get("num_batches_tracked")
    return has_initial_statistics(record) and (tracked is None or tracked.max == 0.0)


def has_initial_statistics(record: LayerRecord) -> bool:
    """Whether a layer's running mean is 0 and its running variance 1 throughout, as they start."""
    mean, variance = record.buffers.get("running_mean"), record.buffers.get("running_var")
    if variance is None or not variance.min == variance.max == 1.0:
        return False
    return mean is None or mean.abs_max == 0.0


def looks_trained(observation: Observation) -> bool:
    """Whether parameters are as no initialiser leaves them.

    Initialisers set scales of normalisations to a constant and biases to one or to a uniform
    distribution that ends at ``1 / sqrt(fan_in)`` (the fan-out in transposed convolutions); the
    first training steps leave neither.
    """
    return any(_is_moved(record) for record in called(observation))


def _is_moved(record: LayerRecord) -> bool:
    bias, scale = record.parameters.get("bias"), record.parameters.get("weight")
    if scale is not None and len(scale.shape) == 1:
        return bool(scale.std > 0.0 or (bias is not None and bias.std > 0.0))
    maps = linear_maps(record)
    if bias is None or not maps or len(bias.shape) != 1 or not bias.std > 0.0:
        return False
    return bias.abs_max > _BIAS_MARGIN / math.sqrt(min(maps[0].fan_in, maps[0].fan_out))


def seems_trained(observation: Observation) -> bool:
    """Whether something tells of training, and not only a batch that this run has counted."""
    return looks_trained(observation) or (was_trained(observation) and not is_fresh(observation))


def was_trained(observation: Observation) -> bool:
    """Whether parameters or counted batches are as training alone leaves them.

    Some initialisers draw the scales of normalisations, around 1 (DCGAN) or around 0 (MobileViT in
    transformers), or scales and shifts (RepVGG in timm). A step moves the scales and shifts of all,
    and every bias.
    """
    ran = called(observation)
    norms = [record for record in ran if _scales(record) and trainable(record)]
    return (
        (bool(norms) and all(map(has_moved, norms)) and not any(map(_has_zero_bias, ran)))
        or any(t.max > 0.0 for r in ran if (t := r.buffers.get("num_batches_tracked")) is not None)
        or any(_is_moved(r) for r in ran if linear_maps(r))
    )


def _has_zero_bias(record: LayerRecord) -> bool:
    bias = trainable(record).get("bias")
    return bias is not None and bias.abs_max == 0.0


def has_moved(record: LayerRecord) -> bool:
    """Whether both scale and shift of a normalisation vary."""
    return _scales(record) and all(record.parameters[n].std > 0.0 for n in ("weight", "bias"))


def _scales(record: LayerRecord) -> bool:
    """Whether a layer has a scale and a shift of each channel."""
    shapes = [s.shape for n in ("weight", "bias") if (s := record.parameters.get(n)) is not None]
    return len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 1


_BIAS_MARGIN = 1.01
"""bfloat16 rounds the bound by up to 0.4 %."""
