"""Parameters moved, in a float64 copy or by a few steps of training, and what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import (
    Beside,
    converted_batch,
    converted_copy,
    default_dtype,
)
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.isolation import gradients_set_aside
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.probes.endings import UntellableError
from pytest_modelhealth.probes.intervening.running import Runs, said

STEPS = (1e-5, 1e-6)
"""How far parameters are moved along a direction of independent standard normal numbers."""

_SEED = 20_240_229


class Moved:
    """A float64 copy of the model, in the mode in which it was inspected.

    Args:
        runs: the model, and what is asked of it.

    Raises:
        UntellableError: the model cannot be copied.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        try:
            copy = converted_copy(runs.model, torch.float64)
        except InspectionError as error:
            raise UntellableError(str(error)) from error
        self._beside = Beside(copy, runs.request.loss)
        self._parameters = dict(copy.named_parameters(remove_duplicate=False))

    def has(self, name: str) -> bool:
        """Whether the copy has a parameter of this name, which can be moved."""
        parameter = self._parameters.get(name)
        return parameter is not None and parameter.dtype is torch.float64

    def slope(self, names: Sequence[str]) -> float:
        """Return the slope of the loss where parameters are moved together; 0 where it jumps.

        It takes four forwards, or two where the loss is the same on both sides of the wider step.

        Raises:
            UntellableError: the copy raises, or its loss is no number in float64.
        """
        generator = torch.Generator().manual_seed(_SEED)
        directions = {name: _normal(self._parameters[name], generator) for name in names}
        wide = self._along(directions, STEPS[0])
        narrow = self._along(directions, STEPS[1]) if wide else 0.0
        is_smooth = abs(wide - narrow) <= 0.1 * max(abs(wide), abs(narrow))
        return narrow if is_smooth else 0.0

    def _along(self, directions: dict[str, Tensor], step: float) -> float:
        return (self._loss(directions, step) - self._loss(directions, -step)) / (2 * step)

    def _loss(self, directions: dict[str, Tensor], step: float) -> float:
        self._runs.forwards += 1
        batch = self._runs.batch()
        batch = Inputs(
            *converted_batch(batch.args, torch.float64),
            **converted_batch(batch.kwargs, torch.float64),
        )
        given = (batch.args, batch.kwargs)
        with default_dtype(torch.float64), self._beside.put_back(given, evaluation=False):
            with torch.no_grad():
                for name, direction in directions.items():
                    self._parameters[name].add_(direction, alpha=step)
            try:
                loss = self._computed(batch)
            except UntellableError:
                raise
            except Exception as error:
                raise UntellableError(f"in float64 the model raises {said(error)}") from error
        if loss.dtype is not torch.float64:
            raise UntellableError(f"its loss is computed in {loss.dtype} whatever it is given")
        value = float(loss.detach())
        if not math.isfinite(value):
            raise UntellableError("its loss is not finite in float64")
        return value

    def _computed(self, batch: Inputs) -> Tensor:
        request = self._runs.request
        output = self._beside.model(*batch.args, **batch.kwargs)
        loss = self._runs.loss_of(output, converted_batch(request.target, torch.float64))
        if loss is None:
            raise UntellableError("there is no number to differentiate")
        is_projection = request.loss is None and loss.dtype is not torch.float64
        return _projected(output) if is_projection else loss


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return numbers.to(like.device)


def _projected(output: Any) -> Tensor:
    """Return the outputs times fixed random numbers: the usual one is rounded to float32."""
    generator = torch.Generator().manual_seed(_SEED)
    terms = []
    for tensor in find_tensors(output):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype is torch.float64 and tensor.numel():
            weighted = tensor * _normal(tensor, generator)
            terms.append(weighted.sum() / math.sqrt(tensor.numel()))
    if not terms:
        raise UntellableError("its outputs are computed in float32 whatever it is given")
    return torch.stack([term.cpu() for term in terms]).sum()


RATE = 1e-3
"""Adam's default: its first steps move every weight by about as much, whatever its gradient."""


def trained(runs: Runs, steps: int) -> tuple[float, float]:
    """Train the model on its batch by Adam, in the mode that was inspected, and put it back.

    Returns:
        By how much the samples of its outputs deviate before and after the steps, as
        `Observation.sample_deviation` is.

    Raises:
        UntellableError: it cannot be trained.
    """
    batches = [runs.batch() for _ in range(steps + 1)]
    with runs.beside.put_back([(b.args, b.kwargs) for b in batches], evaluation=False):
        wanted = [p for p in runs.model.parameters() if p.requires_grad]
        samples = runs.observation.samples // max(runs.observation.batches, 1)
        deviations = []
        try:
            optimizer = torch.optim.Adam(wanted, lr=RATE)
            for number, batch in enumerate(batches):
                runs.forwards += 1
                output = runs.model(*batch.args, **batch.kwargs)
                deviations.append(_deviation(find_tensors(output), samples))
                if number < steps:
                    _step(runs, output, optimizer)
        except Exception as error:  # the user's, of weights that we changed
            raise UntellableError(
                f"{steps} training steps cannot be tried: {said(error)}"
            ) from error
    return deviations[0], deviations[-1]


def _step(runs: Runs, output: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = runs.loss_of(output, runs.request.target)
    if loss is None or not loss.requires_grad:
        raise ValueError("the loss has no gradient")
    optimizer.zero_grad()
    learns = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [leaf for leaf in graph_leaves([loss.grad_fn]) if id(leaf) not in learns]
    with gradients_set_aside(others):  # those of the loss itself among them
        loss.backward()
    runs.backwards += 1
    optimizer.step()


def _deviation(outputs: list[Tensor], samples: int) -> float:
    deviations = [math.nan]
    for output in outputs:
        is_batch = output.ndim > 0 and output.shape[0] == samples < output.numel()
        if output.is_floating_point() and is_batch:
            values = output.detach().double()
            whole = float(values.var(correction=0))
            between = float(values.var(dim=0, correction=0).mean())
            deviations += [math.sqrt(between / whole)] if whole > 0.0 else []
    return max(filter(math.isfinite, deviations), default=math.nan)
