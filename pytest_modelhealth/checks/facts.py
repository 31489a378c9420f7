"""Facts about layers that several checks ask for: what ran, what learns, how wide, how fresh.

`is_fresh` and `seems_trained` each want evidence of their own; of a model that gives neither, both
are false.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pytest_modelhealth.report import Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.settings.setting import ancestors, parent
from pytest_modelhealth.statistics import TensorStatistics, UnitStatistics


def called(observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran, in the order in which they were entered."""
    return [record for record in observation.layers.values() if record.entered is not None]


def place(observation: Observation, layer: str = "") -> LayerRecord:
    """Return the record of a layer, or of the model where it has none of its own."""
    return observation.layers.get(layer, observation.layers[""])


def flow_of(observation: Observation) -> Flow:
    """Return who feeds whom; of observations that no verdict is made of, inferred at each call."""
    flow = observation.flow or with_flow(observation).flow
    assert flow is not None
    return flow


def largest_at(record: LayerRecord, role: str) -> tuple[str, ...]:
    """Return in which batch and sample the largest value of a layer stood, a sentence, if known."""
    found = record.largest.get(role)
    if found is None:
        return ()
    what = role.removesuffix("s")
    return (f"the largest {what} of {record.label!r}, {found.value:.4g}, was in {found}",)


def learns(record: LayerRecord) -> bool:
    """Whether a parameter of a layer gets a gradient that is not zero throughout."""
    return any(s.abs_max > 0.0 for s in record.parameter_gradients.values())


def is_closed(record: LayerRecord) -> bool:
    """Whether a layer multiplies by parameters of zero, and learns; a bias is only added.

    What is frozen or gets no gradient never opens: queries and keys that are both zero.
    """
    return learns(record) and any(
        s.abs_max == 0.0 and not name.rpartition(".")[2].startswith(("bias", "beta", "shift"))
        for name, s in record.parameters.items()
    )


def at(line: str) -> str:
    """Return where in the user's code something is, as a phrase; ``""`` if that is not known."""
    return f" at {line}" if line else ""


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return names as a phrase: the first few, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def enclosing(layer: str) -> Iterator[str]:
    """Yield a layer and the modules that it lies in, but the model itself."""
    while layer:
        yield layer
        layer = parent(layer)


def is_in_an_empty_part(record: LayerRecord, observation: Observation) -> bool:
    """Whether it or a module around it returned nothing that could pass a gradient back.

    What summarises windows of tokens returns an empty tensor where a sequence is shorter than a
    window. An indexer returns the places of tokens, and learns from a loss of its own.
    """
    modules = (observation.layers.get(name) for name in enclosing(record.name))
    return any(
        r.status == "unsupported" if r.activations is None else r.activations.count == 0
        for r in modules
        if r is not None and r.entered is not None
    )


def members(layer: str, layers: Mapping[str, LayerRecord]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the members of each list that a layer lies in, the outermost list first.

    With them comes what stands in the layer's place in each that has it, both in order:
    ``["blocks.0", "blocks.1"]`` and ``["blocks.0.norm", "blocks.1.norm"]``.
    """
    parts = layer.split(".")
    for place in (place for place, part in enumerate(parts) if part.isdigit()):
        found: dict[str, str] = {}
        while (member := ".".join([*parts[:place], str(len(found))])) in layers:
            found[member] = ".".join([member, *parts[place + 1 :]])
        there = {member: name for member, name in found.items() if name in layers}
        yield list(there), list(there.values())


def innermost(records: Iterable[LayerRecord]) -> list[LayerRecord]:
    """Return the records that contain no other of them, in the order of completion."""
    records = list(records)
    around = {layer for record in records for layer in ancestors(record.name)}
    return sorted((r for r in records if r.name not in around), key=completed)


def leaves(observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran and contain no other that ran, in the order of completion."""
    return innermost(called(observation))


def completed(record: LayerRecord) -> int:
    """Return when a layer last returned; a layer that raised never did."""
    return -1 if record.completed is None else record.completed


SEQUENCES = 3
"""How many dimensions a batch of sequences has."""


def steps_of(record: LayerRecord, flow: Flow) -> int:
    """Return of how many steps a sequence is; 0 where that does not show (packed ones).

    A cell takes one step a call, if it is given what it made of the step before.
    """
    if "batch_first" not in record.options:
        calls = flow.calls(record.name) if record.name in flow else ()
        made = flow.after(*calls[0].outputs) if len(calls) > 1 else frozenset[int]()
        return 0 if made.isdisjoint(calls[1].inputs if made else ()) else len(calls)
    shape = () if record.inputs is None else record.inputs.shape
    return shape[bool(record.options["batch_first"])] if len(shape) == SEQUENCES else 0


def trainable(record: LayerRecord) -> Mapping[str, TensorStatistics]:
    """Return the layer's own parameters that require gradients."""
    if not record.frozen:
        return record.parameters
    return {name: s for name, s in record.parameters.items() if name not in record.frozen}


def gain(record: LayerRecord) -> float | None:
    """Return the root mean square of a layer's output relative to that of its inputs, if known."""
    given, returned = record.inputs, record.activations
    if given is None or returned is None or not given.finite_count or not given.rms:
        return None
    return returned.rms / given.rms


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
        if len(shape := statistics.shape) < 2:
            continue
        others = (s.shape for s in record.parameters.values() if len(s.shape) == len(shape))
        if len(shape) > 2 and any(
            shape != other and all(own in (1, size) for own, size in zip(shape, other, strict=True))
            for other in others
        ):
            continue
        fans = _fans(record, name, shape)
        if fans is not None and statistics.count and not statistics.nonfinite_count:
            maps.append(LinearMap(name, statistics, *fans))
    return maps


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


def seems_trained(observation: Observation) -> bool:
    """Whether parameters are as no initialiser leaves them, or a norm has counted batches before.

    Initialisers set scales of normalisations to a constant and biases to one or to a uniform
    distribution that ends at ``1 / sqrt(fan_in)`` (the fan-out in transposed convolutions); the
    first training steps leave neither. Some draw scales, around 1 (DCGAN) or around 0 (MobileViT in
    transformers), or scales and shifts (RepVGG in timm): a step moves all of these, and every bias.
    """
    ran = called(observation)
    if any(map(_is_moved, ran)):
        return True
    norms = [record for record in ran if _has_scale_and_shift(record) and trainable(record)]
    is_stepped = bool(norms) and all(map(has_moved, norms))
    if is_stepped:
        biases = [trainable(record).get("bias") for record in ran]
        is_stepped = not any(bias is not None and bias.abs_max == 0.0 for bias in biases)
    counts = [t.max for r in ran if (t := r.buffers.get("num_batches_tracked")) is not None]
    is_counted = any(count > observation.batches for count in counts)
    return (is_stepped or is_counted) and not is_fresh(observation)


def _is_moved(record: LayerRecord) -> bool:
    bias = record.parameters.get("bias")
    if (
        bias is None
        or len(bias.shape) != 1
        or not bias.std > 0.0
        or not (maps := linear_maps(record))
    ):
        return False
    return bias.abs_max > _BIAS_MARGIN / math.sqrt(min(maps[0].fan_in, maps[0].fan_out))


def has_moved(record: LayerRecord) -> bool:
    """Whether both scale and shift of a normalisation vary."""
    return _has_scale_and_shift(record) and all(
        record.parameters[n].std > 0.0 for n in ("weight", "bias")
    )


def _has_scale_and_shift(record: LayerRecord) -> bool:
    """Whether a layer has a scale and a shift of each channel."""
    shapes = [s.shape for n in ("weight", "bias") if (s := record.parameters.get(n)) is not None]
    return len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 1


_BIAS_MARGIN = 1.01
"""bfloat16 rounds the bound by up to 0.4 %."""

FEWEST_UNITS = 6
HEALTHY_SPREAD = 1e-2


def units_of(statistics: TensorStatistics | None) -> UnitStatistics | None:
    """Return the units of a tensor, where enough samples were seen, all finite."""
    units = None if statistics is None or statistics.nonfinite_count else statistics.units
    if units is None or len(units.minimum) == 0 or units.observations < FEWEST_UNITS:
        return None
    return units


def spread_of(statistics: TensorStatistics | None) -> float:
    """Return the largest range of a unit relative to the largest magnitude, 0 to 2."""
    if statistics is None or statistics.units is None or statistics.nonfinite_count:
        return 0.0
    if not statistics.abs_max > 0.0:
        return 0.0
    ranges = statistics.units.maximum - statistics.units.minimum
    return float(ranges.max()) / statistics.abs_max if len(ranges) else 0.0
