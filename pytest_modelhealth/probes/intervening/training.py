"""A few steps of training, after which the model is put back: whether that heals what was seen."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.capture.step.untouched import gradients_set_aside
from pytest_modelhealth.probes.intervening.running import Runs, said

RATE = 1e-3
"""Adam's default: its first steps move every weight by about as much, whatever its gradient."""


class Trained(NamedTuple):
    """What a few steps made of a model.

    Args:
        before: by how much the samples of its outputs deviate, as `Observation.sample_deviation`.
        after: the same after the steps.
        error: why it could not be trained; ``""`` if it was.
    """

    before: float = math.nan
    after: float = math.nan
    error: str = ""


def trained(runs: Runs, steps: int) -> Trained:
    """Train the model on its batch by Adam, in the mode that was inspected, and put it back."""
    batches = [runs.batch() for _ in range(steps + 1)]
    with runs.beside.put_back([(b.args, b.kwargs) for b in batches], evaluation=False):
        wanted = [p for p in runs.model.parameters() if p.requires_grad]
        samples = runs.observation.samples // max(runs.observation.batches, 1)
        deviations = []
        try:
            optimizer = torch.optim.Adam(wanted, lr=RATE)
            for number, batch in enumerate(batches):
                runs.count(1)
                output = runs.model(*batch.args, **batch.kwargs)
                deviations.append(_deviation(find_tensors(output), samples))
                if number < steps:
                    _step(runs, output, optimizer)
        except Exception as error:  # noqa: BLE001 - the user's, of weights that we changed
            return Trained(error=said(error))
    return Trained(deviations[0], deviations[-1])


def _step(runs: Runs, output: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = runs.loss_of(output, runs.request.target)
    if loss is None or not loss.requires_grad:
        raise ValueError("the loss has no gradient")
    optimizer.zero_grad()
    learns = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [leaf for leaf in graph_leaves([loss.grad_fn]) if id(leaf) not in learns]
    with gradients_set_aside(others):  # those of the loss itself among them
        loss.backward()
    runs.count(0, backwards=1)
    optimizer.step()


def _deviation(outputs: list[Tensor], samples: int) -> float:
    with torch.no_grad():
        ratios = [_ratio(t.detach().double()) for t in outputs if _is_judged(t, samples)]
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=math.nan)


def _is_judged(output: Tensor, samples: int) -> bool:
    is_batch = output.ndim > 0 and output.shape[0] == samples
    return output.is_floating_point() and is_batch and output.numel() > samples


def _ratio(output: Tensor) -> float:
    between = float(output.var(dim=0, correction=0).mean())
    whole = float(output.var(correction=0))
    return math.sqrt(between / whole) if whole > 0.0 else math.nan
