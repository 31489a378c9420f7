"""Steps of training for a model whose samples are alike, and what they part."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.isolation import gradients_set_aside
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.probes.alike_samples import STEPS, alike_outputs
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import Runs, said
from pytest_modelhealth.report import Parting

_RATE = 1e-3
"""Adam's default: its first steps move every weight by about as much, whatever its gradient."""
_HEALED = 3.0
"""Branches that start near zero part samples more than this many times further in three steps."""


def what_training_parts(runs: Runs) -> Effects:
    """Train a model whose samples are alike for three steps of Adam, and put it back."""
    if alike_outputs(runs.observation, runs.settings) is None:
        raise NotApplicableError("the samples of its outputs are not alike")
    batches = [runs.batch() for _ in range(STEPS + 1)]
    samples = runs.observation.samples // max(runs.observation.batches, 1)
    deviations = []
    with runs.kept([(batch.args, batch.kwargs) for batch in batches]):
        try:
            wanted = [p for p in runs.model.parameters() if p.requires_grad]
            optimizer, learns = torch.optim.Adam(wanted, lr=_RATE), set(map(id, wanted))
            for batch in batches:
                output = runs.output(batch)
                deviations.append(_deviation(find_tensors(output), samples))
                if len(deviations) > STEPS:
                    break
                loss = runs.loss_of(output, runs.request.target)
                if loss is None or not loss.requires_grad:
                    raise ValueError("the loss has no gradient")
                optimizer.zero_grad()
                leaves = graph_leaves([loss.grad_fn])
                with gradients_set_aside([leaf for leaf in leaves if id(leaf) not in learns]):
                    loss.backward()  # through parameters of the loss itself, too
                runs.count["backwards"] += 1
                optimizer.step()
        except Exception as error:  # the user's, of weights that we changed
            raise UntellableError(
                f"{STEPS} training steps cannot be tried: {said(error)}"
            ) from error
    before, after, changed = deviations[0], deviations[-1], f"{STEPS} steps of Adam"
    if after >= _HEALED * before:
        note = f"{changed} part the samples, from {before:.2g} to {after:.2g}"
        return Effects(changed, notes=(note,))
    return Effects(changed, [Parting("alike", before, before=before, after=after)])


def _deviation(outputs: list[Tensor], samples: int) -> float:
    """Return by how much samples deviate, as `Observation.sample_deviation` is."""
    deviations = [math.nan]
    for output in outputs:
        is_batch = output.ndim > 0 and output.shape[0] == samples < output.numel()
        if output.is_floating_point() and is_batch:
            values = output.detach().double()
            whole = float(values.var(correction=0))
            between = float(values.var(dim=0, correction=0).mean())
            deviations += [math.sqrt(between / whole)] if whole > 0.0 else []
    return max(filter(math.isfinite, deviations), default=math.nan)
