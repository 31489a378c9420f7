"""What a snapshot keeps of an observation."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.alignment.alignable import containers
from pytest_modelhealth.report import ROLES, LayerRecord, Noises, Observation
from pytest_modelhealth.snapshot.noise import Noise
from pytest_modelhealth.snapshot.snapshot import (
    LayerLine,
    Snapshot,
    TensorLine,
    is_judged_whole,
    judges_zeros,
)
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import BFLOAT16, TF32, coarsest_epsilon


def from_observation(observation: Observation, noise: Noises | None = None) -> Snapshot:
    """Return what a snapshot keeps of `observation`.

    Args:
        observation: what a run saw.
        noise: how far rounding moves each statistic, as an inspection measured it; ``None`` leaves
            everything but the noise of what was given to the model unknown.
    """
    records = sorted(observation.layers.values(), key=_completed)
    holders = containers(observation.layers)
    snapshot = Snapshot(
        profile=profile_of_observation(observation),
        model=observation.model_type,
        recorded=f"pytest-modelhealth {__version__}, torch {torch.__version__}",
        calibrated=noise is not None,
        epsilon=max(coarsest_epsilon(observation), matmul_epsilon(observation)),
        loss=observation.loss,
        layers={record.name: _layer_line(record, holders) for record in records},
    )
    if noise is None:
        return snapshot
    noises, measured = Noise(snapshot), noise
    snapshot = replace(snapshot, loss_noise=noises.multiple_of_loss(observation.loss, noise))
    return snapshot.with_tensors(
        lambda layer, key, line: replace(line, noise=noises.multiples(layer, key, line, measured))
    )


def profile_of_observation(observation: Observation) -> str:
    """Return the profile of a run, which chooses a section of a snapshot file.

    It has the devices, and the floating dtype of most activations.
    """
    seen = [
        statistics
        for record in observation.layers.values()
        for role in ("activations", "parameters")
        for statistics in record.tensors(role).values()
    ]
    dtypes = [r.activations.dtype for r in observation.layers.values() if r.activations is not None]
    floating = [dtype for dtype in dtypes if "float" in dtype or "complex" in dtype]
    # Of equally frequent ones the first by name, so that the choice does not hang on the order.
    dtype = max(sorted(set(floating)), key=floating.count, default="")
    devices = sorted({s.device.partition(":")[0] for s in seen})
    return " ".join([*devices, dtype]).strip() or "unknown"


def matmul_epsilon(observation: Observation) -> float:
    """Return the machine epsilon of float32 matrix products, where torch was told to be coarser."""
    precision = torch.get_float32_matmul_precision()
    seen = [r.activations for r in observation.layers.values() if r.activations is not None]
    devices = {s.device.partition(":")[0] for s in seen if s.dtype == "float32"}
    if "cuda" in devices and precision != "highest":
        return TF32
    return BFLOAT16 if "cpu" in devices and precision == "medium" else 0.0


def _completed(record: LayerRecord) -> float:
    return math.inf if record.completed is None else record.completed


def _layer_line(record: LayerRecord, holders: frozenset[str]) -> LayerLine:
    # What goes into a container goes into its first layer too.
    is_inner = record.name and record.name in holders
    tensors = {
        (role, own_name): _tensor_line(role, record.name, statistics)
        for role in ROLES
        if role != "inputs" or not is_inner
        for own_name, statistics in record.tensors(role).items()
    }
    activation = record.activation or ""
    status, calls = record.status.value, record.calls
    return LayerLine(record.type_name, status, calls, activation, record.tied, tensors)


def _tensor_line(role: str, layer: str, s: TensorStatistics) -> TensorLine:
    return TensorLine(
        dtype=s.dtype,
        shape=s.shape,
        count=s.count,
        mean=s.mean,
        std=s.std,
        min=s.min,
        max=s.max,
        zeros=s.zero_fraction if judges_zeros(role, layer) else 0.0,
        dead=s.dead_fraction if is_judged_whole(role, layer) else None,
        nan=s.nan_count,
        inf=s.inf_count,
    )
