"""Steps of training, undone: whether they part alike samples, and what stays at zero."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.guard import Leaves
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.checks.zero_gradients import (
    COLUMNS,
    STEPS,
    ZERO,
    zero_parameters,
    zero_slices,
)
from pytest_modelhealth.errors import in_one_line
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.probes.alike_samples import alike_outputs
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Parting
from pytest_modelhealth.settings.setting import dotted

_RATE = 1e-3
"""Adam's default: its first steps move every weight by about as much, whatever its gradient."""
_HEALED = 3.0
"""Branches that start near zero part samples more than this many times further in three steps."""


def what_training_parts(runs: Runs) -> Effects:
    """Train a model whose samples are alike for three steps of Adam, and put it back."""
    if alike_outputs(runs.observation, runs.settings) is None:
        raise NotApplicableError("the samples of its outputs are not alike")
    samples = runs.observation.samples // max(runs.observation.batches, 1)
    with closing(_trained(runs, differentiates_last=False)) as outputs:
        deviations = [_deviation(find_tensors(output), samples) for output in outputs]
    before, after, changed = deviations[0], deviations[-1], f"{STEPS} steps of Adam"
    if after >= _HEALED * before:
        note = f"{changed} part the samples, from {before:.2g} to {after:.2g}"
        return Effects(changed, notes=(note,))
    return Effects(changed, [Parting("alike", before, before=before, after=after)])


def what_stays_zero(runs: Runs) -> Effects:
    """Train for three steps of Adam, put it back, and return whose gradient was zero at each.

    Raises:
        UntellableError: it cannot be trained.
    """
    zero = dict.fromkeys(zero_parameters(runs.observation))
    slices = {(r.name, name): (kind, set(i)) for r, name, kind, i in zero_slices(runs.observation)}
    with closing(_trained(runs)) as outputs:
        for _ in outputs:
            # a replica has other parameters meanwhile
            gradients = {
                dotted(layer, name): parameter.grad
                for layer, module, *_ in named_modules(runs.model)
                for name, parameter in module.named_parameters(recurse=False)
            }
            zero = {n: None for n in zero if (grad := gradients[n]) is None or not grad.any()}
            for (layer, name), (kind, idle) in list(slices.items()):
                gradient = gradients[dotted(layer, name)]
                if gradient is not None:
                    rows = gradient.transpose(0, 1) if kind == COLUMNS else gradient
                    idle.difference_update(rows.flatten(1).any(1).nonzero().flatten().tolist())
                if not idle:
                    del slices[layer, name]
            if not zero and not slices:
                break
    partings = [Parting(ZERO, 0.0, names=tuple(zero))] if zero else []
    for (layer, name), (kind, idle) in slices.items():
        size = runs.observation.layers[layer].parameters[name].shape[kind == COLUMNS]
        is_range = max(idle) - min(idle) + 1 == len(idle)
        detail = f"{len(idle)} of the {size} {kind}"
        detail += f" ({min(idle)} to {max(idle)})" if is_range else ""
        partings.append(Parting(kind, len(idle) / size, layer, tensor=name, detail=detail))
    return Effects(f"{STEPS} steps of Adam", partings)


def _trained(runs: Runs, *, differentiates_last: bool = True) -> Generator[Any]:
    """Yield the output of a run and of one after each of three steps of Adam; then put all back.

    Its gradients lie with the parameters meanwhile.

    Raises:
        UntellableError: it cannot be trained.
    """
    batches = [runs.batch() for _ in range(STEPS + 1)]
    with runs.kept([(batch.args, batch.kwargs) for batch in batches]):
        try:
            wanted = [p for p in runs.model.parameters() if p.requires_grad]
            optimizer, learns = torch.optim.Adam(wanted, lr=_RATE), set(map(id, wanted))
            for batch in batches:
                output = runs.output(batch)
                if differentiates_last or batch is not batches[-1]:
                    loss = runs.loss_of(output, runs.request.target)
                    if loss is None or not loss.requires_grad:
                        raise ValueError("the loss has no gradient")
                    optimizer.zero_grad()
                    leaves = graph_leaves([loss.grad_fn])
                    with Leaves([leaf for leaf in leaves if id(leaf) not in learns]) as others:
                        others.set_aside()
                        loss.backward()  # through parameters of the loss itself, too
                    runs.count["backwards"] += 1
                yield output
                optimizer.step()
        except Exception as error:  # the user's, of weights that we changed
            raise UntellableError(
                f"{STEPS} training steps cannot be tried: {in_one_line(error)}"
            ) from error


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
