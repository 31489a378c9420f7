"""The units that layers make, and which of them look as if nothing would miss them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pytest_modelhealth.report import Kind, Observation, Vertex
from pytest_modelhealth.report.parts import RemovableLayer
from pytest_modelhealth.statistics import TensorStatistics

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Norms of each unit by itself."""


def parameter_named(name: str, modules: Mapping[str, nn.Module]) -> Tensor | None:
    """Return a parameter by its full name; pruned, its original."""
    owner, _, own = name.rpartition(".")
    if owner not in modules:
        return None
    parameters = modules[owner]._parameters
    parameter = parameters.get(own)
    return parameters.get(f"{own}_orig") if parameter is None else parameter


def _rows(module: nn.Module | None) -> int | None:
    """Return the dimension of a module's weight in which its units lie; ``None``: it makes none."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return 1 if module.groups == 1 else None
    if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return 0
    home = sys.modules.get("transformers.pytorch_utils")  # GPT-2's linear layer, of shape (in, out)
    return 1 if home is not None and isinstance(module, home.Conv1D) else None


def _has_weight(vertex: Vertex, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a vertex is a sum over units: a product with a matrix."""
    if vertex.kind is not Kind.CALL:
        return vertex.has("matrix")
    module = modules.get(vertex.name)
    return module is not None and any(
        p is not None and p.ndim > 1 for p in module._parameters.values()
    )


def inner_layers(
    observation: Observation, modules: Mapping[str, nn.Module]
) -> dict[str, RemovableLayer]:
    """Return the layers that make units inside of the model, with those that had no effect.

    Units that come to an output of the model with no weight in between have to be given, whatever
    they are: their layers are not among them, nor are those whose weight is computed from others.
    """
    flow = observation.flow
    if flow is None:
        return {}
    graph, takers, ends = flow.graph, defaultdict[int, list[Vertex]](list), set(flow.graph.outputs)
    for number, vertex in reversed([*enumerate(graph.vertices)]):
        for operand in vertex.operands:
            takers[operand].append(vertex)
        if number in ends and not _has_weight(vertex, modules):
            ends.update(vertex.operands)
    outputs = defaultdict[str, list[int]](list)
    for call in graph.calls:
        outputs[call.layer] += call.outputs
    layers = {}
    for name, vertices in outputs.items():
        rows, prefix = _rows(modules.get(name)), f"{name}." if name else ""
        weight = parameter_named(f"{prefix}weight", modules)
        if rows is None or weight is None or not ends.isdisjoint(vertices):
            continue
        behind = [one for number in vertices for one in takers[number] if one.kind is Kind.CALL]
        norms = dict.fromkeys(v.name for v in behind if isinstance(modules.get(v.name), _NORMS))
        parts = [(f"{prefix}weight", rows), (f"{prefix}bias", 0)]
        parts += [(f"{norm}.{part}", 0) for norm in norms for part in ("weight", "bias")]
        units, record = weight.shape[rows], observation.layers[name]
        inactive = _always_zero(record.gradients, units)
        if not norms:  # which would make something of zero
            inactive |= _always_zero(record.activations, units)
        if record.gradients is None and flow.is_exact and name not in flow.used:
            inactive[:] = True
        activations = None if record.activations is None else record.activations.units
        layers[name] = RemovableLayer(
            name,
            units,
            inactive=tuple(inactive.nonzero()[0].tolist()),
            samples=observation.samples if activations is None else activations.observations,
            produced=tuple(one for one in parts if parameter_named(one[0], modules) is not None),
        )
    return layers


def _always_zero(statistics: TensorStatistics | None, units: int) -> npt.NDArray[np.bool_]:
    """Return which units were exactly zero at every sample."""
    extremes = None if statistics is None else statistics.units
    if extremes is None or len(extremes.minimum) != units:
        return np.zeros(units, dtype=np.bool_)
    zero: npt.NDArray[np.bool_] = (extremes.minimum == 0.0) & (extremes.maximum == 0.0)
    return zero


def duplicates(
    layer: RemovableLayer, modules: Mapping[str, nn.Module]
) -> tuple[tuple[int, int], ...]:
    """Return pairs of a unit and the first one that is made by the same numbers, bit for bit."""
    if getattr(modules[layer.name], "groups", 1) != 1:
        return ()  # the same weights read other channels
    tensors = [(parameter_named(name, modules), dimension) for name, dimension in layer.produced]
    for norm in {name.rpartition(".")[0] for name, _ in layer.produced} - {layer.name}:
        buffers = (modules[norm]._buffers.get(name) for name in ("running_mean", "running_var"))
        tensors += [(buffer, 0) for buffer in buffers]
    rows = [
        tensor.detach().movedim(dimension, 0).reshape(layer.units, -1).cpu().contiguous()
        for tensor, dimension in tensors
        if tensor is not None and tensor.shape[dimension] == layer.units
    ]
    numbers = torch.cat([part.view(torch.uint8) for part in rows], dim=1).numpy()
    first = dict[bytes, int]()
    twins = [(unit, first.setdefault(row.tobytes(), unit)) for unit, row in enumerate(numbers)]
    gone = set(layer.inactive)
    return tuple(pair for pair in twins if pair[0] != pair[1] and gone.isdisjoint(pair))
