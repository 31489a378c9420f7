"""The natural numerical noise of a model, measured: how far rounding alone moves its numbers.

Copies whose parameters and inputs are multiplied by ``1 + u``, with ``|u|`` up to one machine
epsilon, tell how far a change that no one can be blamed for moves each number. Where they say next
to nothing, the epsilon and the depth of the layer are the floor.
``docs/concepts/tolerance.md`` explains, ``docs/decisions/0007-comparison.md`` has the measurements.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import copied
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.progress import track
from pytest_modelhealth.report import ROLES, Noises, Observation
from pytest_modelhealth.statistics import TensorStatistics

RUNS = 3
"""Perturbed runs: each costs a step, and the largest deviation grows slowly with their number."""

STATISTICS = ("mean", "std", "min", "max", "zero_fraction")
"""The statistics whose noise is measured."""

TensorName = tuple[str, str, str]  # layer, role and own name of a tensor


def observed(request: Request) -> Observation:
    """Return what the run of a request shows."""
    return find_engine(request.model).run(request)


Run = Callable[[Request], Observation]


def perturbed(
    request: Request, epsilon: float, seed: int, coarser: Mapping[str, float] | None = None
) -> Request:
    """Return a request for copies of the model and of the batch that rounding moved.

    Every element is multiplied by ``1 + u`` with ``|u|`` up to `epsilon`, of the parameters of
    layers that are `coarser`, by name, up to another.

    Raises:
        InspectionError: the model cannot be copied.
    """
    model = copied(find_engine(request.model).module(request.model))
    own = {
        id(parameter): other
        for name, other in (coarser or {}).items()
        for parameter in model.get_submodule(name).parameters(recurse=False)
    }
    batch = copied_batch(request.inputs)
    leaves = [tensor for tensor in find_tensors(batch) if tensor.is_leaf]
    for tensors, offset in ((State(model).leaves, 0), (leaves, 1_000_003)):
        generator = torch.Generator().manual_seed(seed + offset)
        for tensor in tensors:
            is_real = tensor.is_floating_point() or tensor.is_complex()
            if is_real and tensor.layout == torch.strided:
                u = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                u = u.mul_(2).sub_(1).mul_(own.get(id(tensor), epsilon)).add_(1)
                wide = tensor.data.to(torch.promote_types(tensor.dtype, torch.float64))
                tensor.data = (wide * u.to(tensor.device)).to(tensor.dtype)
    return replace(request, model=model, inputs=batch)


LOSS = ("", "loss", "")


class Calibration:
    """The further runs of one inspection, merged over its batches."""

    def __init__(self) -> None:
        self._perturbed: list[Observation] | None = []  # ``None`` where a run failed

    def add(self, request: Request, base: Observation, run: Run = observed) -> None:
        """Run copies for one batch as it was run; a model that cannot be copied has no noise."""
        if self._perturbed is None:
            return
        epsilon = coarsest_epsilon(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the copies are not the user's
            try:
                runs = [
                    run(perturbed(request, epsilon, seed))
                    for seed in track(range(RUNS), "measuring noise")
                ]
            except Exception:  # noqa: BLE001 - what the model itself raises, the run has raised
                self._perturbed = None
                return
        merged = zip(self._perturbed, runs, strict=True) if self._perturbed else ()
        self._perturbed = [a.merge(b) for a, b in merged] or runs

    def noise(self, base: Observation) -> Noises | None:
        """Return how far each statistic of `base` is from the farthest run, if there were any."""
        if not self._perturbed:
            return None
        losses = [one.loss for one in self._perturbed if one.loss is not None]
        moved = [abs(loss - base.loss) for loss in losses] if base.loss is not None else []
        noise = {LOSS: {"value": max(filter(math.isfinite, moved), default=0.0)}}
        for name, statistics in _tensors(base):
            layer, role, tensor = name
            records = [one.layers[layer] for one in self._perturbed if layer in one.layers]
            rivals = [record.tensors(role).get(tensor) for record in records]
            noise[name] = {}
            for one in STATISTICS:
                value = float(getattr(statistics, one))
                moved = [abs(value - float(getattr(r, one))) for r in rivals if r is not None]
                noise[name][one] = max(filter(math.isfinite, moved), default=0.0)
        return noise


def _tensors(observation: Observation) -> Iterator[tuple[TensorName, TensorStatistics]]:
    for layer, record in observation.layers.items():
        for role in ROLES:
            for tensor, statistics in record.tensors(role).items():
                yield (layer, role, tensor), statistics


def coarsest_epsilon(observation: Observation) -> float:
    """Return the machine epsilon of the least precise dtype a model keeps or computes in."""
    dtypes = {
        statistics.dtype
        for (_, role, _), statistics in _tensors(observation)
        if role in ("activations", "parameters")
    }
    return max(map(epsilon_of, dtypes), default=0.0)


def epsilon_of(dtype: str | torch.dtype) -> float:
    """Return the machine epsilon of a dtype; half a step for quantised ones, 0 for integers."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        return 0.0
    if found in (torch.qint8, torch.quint8):
        return QUANTISED
    if found.is_floating_point or found.is_complex:
        return torch.finfo(found).eps
    return 0.0


TF32 = 2.0**-11  # half the step of the inputs to a matrix product in TensorFloat-32

BFLOAT16 = 2.0**-8
"""The same of bfloat16, in which CPUs multiply where the precision is ``"medium"``."""

QUANTISED = 2**-7  # the step of eight quantised bits, by the largest magnitude


def product_epsilon(device: str, *, convolutions: bool = False) -> float:
    """Return the machine epsilon of products of float32 matrices on a kind of device.

    It is 0.0 where they are as fine as their dtype. Torch is told otherwise for all backends at
    once (`torch.set_float32_matmul_precision`) or for one (``fp32_precision``, since torch 2.9),
    after which it refuses to tell that of all.
    """
    backends: Any = torch.backends
    parts = {"cpu": [backends.mkldnn.matmul], "cuda": [backends.cuda.matmul]}.get(device, [])
    parts += [backends.cudnn.conv] if convolutions else []
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        told = {part.fp32_precision for part in parts}
        told = {backends.fp32_precision if one == "none" else one for one in told}
    else:
        overall = torch.get_float32_matmul_precision()
        told = {{"medium": "bf16" if device == "cpu" else "tf32", "high": "tf32"}.get(overall, "")}
        told |= {"tf32"} if convolutions and backends.cudnn.allow_tf32 else set()
    if device == "cpu":
        return BFLOAT16 if "bf16" in told else 0.0
    return TF32 if "tf32" in told else 0.0


def floor(epsilon: float, roundings: int) -> float:
    """Return the least relative noise to expect of a tensor after so many roundings in a row.

    Independent ones, one a layer, add up as a random walk; an eighth of the epsilon is about half
    the standard deviation of one.
    """
    return epsilon * math.sqrt(max(roundings, 1)) / 8
