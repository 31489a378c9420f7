"""An inspection of a run's file as a `Snapshot`, so that drift is judged as a snapshot's is.

The file holds no measured noise. The tolerances are then those of snapshots recorded without it:
fixed parts of each statistic's scale, which rounding, other threads and other kernels stay within.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.alignable import containers
from pytest_modelhealth.layers import ACTIVATION_MODULES
from pytest_modelhealth.report import ROLES
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.snapshot.snapshot import (
    LayerLine,
    Snapshot,
    TensorKey,
    TensorLine,
    is_judged_whole,
    judges_zeros,
)
from pytest_modelhealth.tolerance import TF32, epsilon_of

Data = Mapping[str, Any]

_ACTIVATIONS = {module.__name__: name for module, name in ACTIVATION_MODULES.items()}
_ACTIVATIONS |= {name: name for name in _ACTIVATIONS.values()}
"""The canonical name of an activation by the class of the module, or by the function."""


def snapshot_of(inspection: Data) -> Snapshot:
    """Return what a snapshot of an inspection would keep, as far as the file of a run has it."""
    layers: Sequence[Data] = inspection["layers"]
    holders = containers(layer["name"] for layer in layers)
    devices = {layer["device"].partition(":")[0] for layer in layers if layer["device"]}
    return Snapshot(
        profile=" ".join(sorted(devices)),
        model=inspection["model"],
        recorded="",
        calibrated=False,
        epsilon=_coarsest_epsilon(layers),
        loss=inspection["loss"],
        layers={layer["name"]: _line(layer, holders) for layer in _as_returned(layers)},
    )


def in_one_dtype(one: Snapshot, other: Snapshot) -> tuple[Snapshot, Snapshot]:
    """Return two snapshots whose tensors of one name have the coarser dtype of the two.

    A change of the dtype is told of the layers; statistics are compared by its tolerances.
    """
    return _with_coarser_dtypes(one, other), _with_coarser_dtypes(other, one)


def _with_coarser_dtypes(one: Snapshot, other: Snapshot) -> Snapshot:
    def with_coarser(layer: str, key: TensorKey, tensor: TensorLine) -> TensorLine:
        line = other.layers.get(layer)
        counterpart = None if line is None else line.tensors.get(key)
        if counterpart is None or counterpart.dtype == tensor.dtype:
            return tensor
        dtypes = sorted((tensor.dtype, counterpart.dtype))
        return replace(tensor, dtype=max(dtypes, key=epsilon_of))

    return one.with_tensors(with_coarser)


def _as_returned(layers: Sequence[Data]) -> list[Data]:
    """Return the layers in the order in which they returned: each after all that it holds.

    The file has the order in which they were entered.
    """
    last: dict[str, int] = {}
    for place, layer in enumerate(layers):
        holding = ancestors(layer["name"]) if layer["calls"] else ()
        for name in (layer["name"], *holding):
            last[name] = place
    return sorted(
        layers,
        key=lambda layer: (last[layer["name"]], -layer["name"].count("."), not layer["name"]),
    )


def _coarsest_epsilon(layers: Sequence[Data]) -> float:
    dtypes = {
        tensor["dtype"]
        for layer in layers
        for tensor in layer["tensors"]
        if tensor["role"] in ("activations", "parameters")
    }
    on_gpu = any(layer["device"].startswith("cuda") for layer in layers)
    coarse = [TF32] if on_gpu and "float32" in dtypes else []  # convolutions, unless told not to
    return max([*map(epsilon_of, dtypes), *coarse], default=0.0)


def _line(layer: Data, holders: frozenset[str]) -> LayerLine:
    name = layer["name"]
    is_inner = bool(name) and name in holders
    tensors = {
        (tensor["role"], tensor["name"]): _tensor(tensor, name)
        for tensor in layer["tensors"]
        if tensor["role"] in ROLES and (tensor["role"] != "inputs" or not is_inner)
    }
    return LayerLine(
        type=layer["type"],
        status=layer["status"],
        calls=layer["calls"],
        activation=_ACTIVATIONS.get(layer["type"], ""),
        tied=layer["tied"],
        tensors=tensors,
    )


def _tensor(tensor: Data, layer: str) -> TensorLine:
    role, count = tensor["role"], tensor["count"]
    zeros = tensor["zeros"] / count if count else math.nan
    return TensorLine(
        dtype=tensor["dtype"],
        shape=tuple(tensor["shape"]),
        count=count,
        mean=_number(tensor["mean"]),
        std=_number(tensor["std"]),
        min=_number(tensor["min"]),
        max=_number(tensor["max"]),
        zeros=zeros if judges_zeros(role, layer) else 0.0,
        dead=tensor["dead"] if is_judged_whole(role, layer) else None,
        nan=tensor["nan"],
        inf=tensor["inf"],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
