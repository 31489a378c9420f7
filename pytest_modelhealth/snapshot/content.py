"""What a snapshot keeps of an observation, and the noise of each number it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.report import ROLES, LayerRecord, Noises, Observation
from pytest_modelhealth.snapshot.file_format import (
    REAL,
    LayerLine,
    Snapshot,
    TensorLine,
    profile_of,
)
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import LOSS, coarsest_epsilon, epsilon_of, floor

KEPT_FRACTION = 1e-4
"""A noise of a zero or dead fraction that is smaller is far within the fixed tolerance."""

_FRACTIONS = {"zeros": "zero_fraction", "dead": "dead_fraction"}
_BACKWARD = ("gradients", "parameter_gradients")


def from_observation(observation: Observation, noise: Noises | None = None) -> Snapshot:
    """Return what a snapshot keeps of `observation`.

    Args:
        observation: what a run saw.
        noise: how far rounding moves each statistic, as `HealthReport.noise`; ``None`` leaves
            everything but the noise of what was given to the model unknown.
    """
    records = sorted(observation.layers.values(), key=_completed)
    epsilon = max(coarsest_epsilon(observation), matmul_epsilon(observation))
    noises = _LineNoise(records, noise, epsilon)
    holders = containers(observation.layers)
    tensors: dict[str, dict[str, TensorLine]] = {role: {} for role in ROLES}
    for record in records:
        for role, own_name, statistics in _kept(record, holders):
            name = ".".join(filter(None, (record.name, own_name)))
            line_noise = noises.of(record, role, own_name, statistics)
            tensors[role][name] = _tensor_line(statistics, line_noise)
    return Snapshot(
        profile=profile_of_observation(observation),
        model=observation.model_type,
        recorded=f"pytest-modelhealth {__version__}, torch {torch.__version__}",
        calibrated=noise is not None,
        epsilon=epsilon,
        loss=observation.loss,
        loss_noise=noises.of_loss(observation.loss),
        layers={
            r.name: LayerLine(r.type_name, r.status.value, r.calls, r.activation or "")
            for r in records
        },
        tensors={role: lines for role, lines in tensors.items() if lines},
    )


def profile_of_observation(observation: Observation) -> str:
    """Return the device and dtype that choose a section of a snapshot file."""
    seen = [
        statistics
        for record in observation.layers.values()
        for role in ("activations", "parameters")
        for statistics in record.tensors(role).values()
    ]
    dtypes = [r.activations.dtype for r in observation.layers.values() if r.activations is not None]
    return profile_of((s.device.partition(":")[0] for s in seen), dtypes)


def matmul_epsilon(observation: Observation) -> float:
    """Return the machine epsilon of float32 matrix products, where torch was told to be coarser."""
    precision = torch.get_float32_matmul_precision()
    seen = [r.activations for r in observation.layers.values() if r.activations is not None]
    devices = {s.device.partition(":")[0] for s in seen if s.dtype == "float32"}
    if "cuda" in devices and precision != "highest":
        return TF32
    return BFLOAT16 if "cpu" in devices and precision == "medium" else 0.0


TF32 = 2.0**-11
"""Half the step of the inputs to a matrix product in TensorFloat-32."""

BFLOAT16 = 2.0**-8
"""The same of bfloat16, in which CPUs multiply where the precision is ``"medium"``."""


def _completed(record: LayerRecord) -> float:
    return math.inf if record.completed is None else record.completed


def _kept(
    record: LayerRecord, holders: frozenset[str]
) -> Iterator[tuple[str, str, TensorStatistics]]:
    for role in ROLES:
        # What goes into a container goes into its first layer too.
        if role == "inputs" and record.name and record.name in holders:
            continue
        for own_name, statistics in record.tensors(role).items():
            yield role, own_name, statistics


def containers(layers: Iterable[str]) -> frozenset[str]:
    """Return the names of the layers that others lie in; the model itself is one of them."""
    found = {""}
    for name in layers:
        while "." in name:
            name = name.rpartition(".")[0]
            found.add(name)
    return frozenset(found)


def _tensor_line(s: TensorStatistics, noise: Mapping[str, float]) -> TensorLine:
    return TensorLine(
        dtype=s.dtype,
        shape="x".join(map(str, s.shape)) or "()",
        count=s.count,
        mean=s.mean,
        std=s.std,
        min=s.min,
        max=s.max,
        rms=s.rms,
        zeros=s.zero_fraction,
        dead=s.dead_fraction,
        nan=s.nan_count,
        inf=s.inf_count,
        noise=noise,
    )


class _LineNoise:
    """The noise of each number: measured, and at least what epsilon and depth let one expect.

    The roundings in a row are those of the layers before, and for gradients of those behind too.
    """

    def __init__(self, records: list[LayerRecord], measured: Noises | None, epsilon: float) -> None:
        self._measured = measured
        self._epsilon = epsilon
        called = [record.name for record in records if record.calls]
        self._place = {name: place for place, name in enumerate(called, start=1)}

    def of(
        self, record: LayerRecord, role: str, own_name: str, statistics: TensorStatistics
    ) -> dict[str, float]:
        if role == "parameters" or (role == "inputs" and not record.name):
            # Random numbers differ by an epsilon from one set of kernels to another.
            given = _relative(statistics, epsilon_of(statistics.dtype), 0.0)
            return {name: value for name, value in given.items() if getattr(statistics, name)}
        if self._measured is None:
            return {}
        measured = self._measured.get((record.name, role, own_name), {})
        scale = _sum_scale(record, statistics) if role == "parameter_gradients" else 0.0
        least = _relative(statistics, self._floor(record.name, role), scale)
        # A zero that no perturbation moves is exact: the least of a ReLU.
        noise = {
            name: max(measured.get(name, 0.0), value)
            for name, value in least.items()
            if measured.get(name) or getattr(statistics, name)
        }
        for name, statistic in _FRACTIONS.items():
            if measured.get(statistic, 0.0) > KEPT_FRACTION:
                noise[name] = measured[statistic]
        return noise

    def of_loss(self, loss: float | None) -> float | None:
        if self._measured is None or loss is None:
            return None
        least = floor(self._epsilon, len(self._place)) * abs(loss)
        return max(self._measured.get(LOSS, {}).get("value", 0.0), least) or None

    def _floor(self, layer: str, role: str) -> float:
        depth = len(self._place)
        place = self._place.get(layer, depth)
        return floor(self._epsilon, 2 * depth - place if role in _BACKWARD else place)


def _relative(s: TensorStatistics, part: float, more: float) -> dict[str, float]:
    """Return a part of the scale of each statistic: the rms, or the value where that is larger."""
    noise = {}
    for name in REAL:
        value = getattr(s, name)
        if math.isfinite(value) and math.isfinite(s.rms):
            noise[name] = part * (max(s.rms, abs(value)) + more)
    return {name: value for name, value in noise.items() if value}


def _sum_scale(record: LayerRecord, statistics: TensorStatistics) -> float:
    """Return what the terms that sum to a parameter's gradient let it be, if they cancel.

    The gradient of a bias before a batch norm, or of an attention key's bias, is zero but for
    rounding: its scale is that of the other gradients of its layer, and of the terms themselves.
    """
    others = (s.rms for s in record.parameter_gradients.values() if math.isfinite(s.rms))
    scale = max(others, default=0.0)
    seen = record.gradients
    if seen is not None and len(statistics.shape) == 1 and math.isfinite(seen.rms):
        terms = max(seen.count // max(statistics.count, 1), 1)
        scale = max(scale, math.sqrt(terms) * seen.rms)
    return scale
