"""Samples whose outputs are next to equal, and steps of training that may part them, undone."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.guard import Leaves
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.checks import Check
from pytest_modelhealth.checks.facts import (
    HEALTHY_SPREAD,
    flow_of,
    leaves,
    seems_trained,
    spread_of,
    units_of,
)
from pytest_modelhealth.checks.grad_norm import lost_behind_sigmoids
from pytest_modelhealth.checks.paths import factors, nearest
from pytest_modelhealth.checks.zero_gradients import (
    COLUMNS,
    STEPS,
    ZERO,
    zero_parameters,
    zero_slices,
)
from pytest_modelhealth.errors import in_one_line
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Finding, LayerRecord, Observation, Parting
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import dotted

_RATE = 1e-3
"""Adam's default: its first steps move every weight by about as much, whatever its gradient."""
_FAR = 10.0
_HEALED = 3.0
"""Branches that start near zero part samples more than this many times further in three steps."""


def is_called_for(observation: Observation, settings: Settings) -> bool:
    """Whether samples are alike in a model that is not trained."""
    return are_alike(observation, settings) and not seems_trained(observation)


def judge(
    probe: Check, parting: Parting, observation: Observation, settings: Settings
) -> Iterator[Finding]:
    """Yield that training does not part them, at the layer where they become alike."""
    limit, deviation = settings["min_sample_deviation"], observation.sample_deviation
    if deviation is None or parting.after is None or parting.after >= limit.value:
        return
    culprit, before = _where(observation)
    cause = "an input drowned by another or by a constant, or a signal that fades on its way"
    if culprit is not None and before is not None:
        cause = (
            f"the signal of {before.label!r} is lost on the way through here"
            f"{factors(observation, [before.name], culprit.name)}, in a bias, an offset or a mean "
            "that is larger by far, or in weights that are too small"
        )
    yield probe.violation(
        culprit or observation.layers[""],  # the model, where positions hide the place
        f"its samples deviate by {deviation:.2g} of what all its numbers deviate by, and "
        f"by {parting.after:.2g} after {STEPS} training steps",
        value=deviation,
        limit=limit,
        cause=f"what all samples share is far larger than what they differ by: {cause}",
    )


def are_alike(observation: Observation, settings: Settings) -> bool:
    """Whether the samples of the outputs differ by next to nothing.

    Batches whose samples are equal, and outputs whose samples all are, are another matter. So are
    offsets that the targets have as well: years in a column beside months.
    """
    deviation, root = observation.sample_deviation, observation.layers.get("")
    if deviation is None or deviation >= settings["min_sample_deviation"].value or root is None:
        return False
    needed = settings["min_collapse_samples"].value * observation.batches
    if root.equal_samples or root.equal_input_samples is not False or observation.samples < needed:
        return False
    out = root.activations
    for asked in (call.target for call in observation.loss_calls if not call.classes):
        if asked is not None and out is not None and asked.shape == out.shape:
            is_there = abs(out.mean - asked.mean) <= 0.5 * asked.std
            if is_there and 0.5 * asked.std <= out.std <= 2.0 * asked.std:
                return False
    flow, layers = flow_of(observation), observation.layers
    ends = flow.producers("output") if flow.graph.outputs else ()
    offsets = [offset.rms for name, offset in root.parameters.items() if name in ends]
    sizes = [layers[n].activations for n in ends if n in layers]
    if any(out is not None and offset > _FAR * out.rms for offset in offsets for out in sizes):
        return False  # learnt, it may stand for targets that lie far apart: quantiles of prices
    return not lost_behind_sigmoids(observation, settings)  # which `grad_norm` tells


def _where(observation: Observation) -> tuple[LayerRecord | None, LayerRecord | None]:
    """Return the first layer that feeds none with a healthy spread, and the last that has it."""
    flow, layers = flow_of(observation), observation.layers
    feeding = flow.feeding("output") if flow.graph.outputs else layers.keys()
    seen = [r for r in leaves(observation) if r.name in feeding and units_of(r.activations)]
    spreads = {record.name: spread_of(record.activations) for record in seen}
    healthy = {name: spread for name, spread in spreads.items() if spread >= HEALTHY_SPREAD}
    after = nearest(observation, healthy, back=True)
    first = next((name for name in spreads if name not in healthy and name not in after), None)
    if first is None:
        return None, None
    before = nearest(observation, healthy).get(first)
    return layers[first], layers[before[1]] if before else None


# ---- steps of training ---------------------------------------------------------------------------


def what_training_parts(runs: Runs) -> Effects:
    """Train a model whose samples are alike for three steps of Adam, and put it back."""
    if not are_alike(runs.observation, runs.settings):
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
    batches = [runs.whole.copy() for _ in range(STEPS + 1)]
    with runs.kept([(batch.args, batch.kwargs) for batch in batches]):
        try:
            wanted = [p for p in runs.model.parameters() if p.requires_grad]
            adam, learns = _Adam(wanted), set(map(id, wanted))
            for batch in batches:
                output = runs.output(batch)
                if differentiates_last or batch is not batches[-1]:
                    loss = runs.loss_of(output, runs.whole.target)
                    if loss is None or not loss.requires_grad:
                        raise ValueError("the loss has no gradient")
                    nn.Module.zero_grad(runs.model)  # a model's own may do more
                    leaves = graph_leaves([loss.grad_fn])
                    with Leaves([leaf for leaf in leaves if id(leaf) not in learns]) as others:
                        others.set_aside()
                        loss.backward()  # through parameters of the loss itself, too
                    runs.count["backwards"] += 1
                yield output
                adam.step()
        except Exception as error:  # the user's, of weights that we changed
            raise UntellableError(
                f"{STEPS} training steps cannot be tried: {in_one_line(error)}"
            ) from error


class _Adam:
    """Adam with torch's defaults: `torch.optim` loads torch's compiler, which takes a second."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in map(_real, parameters)]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        self._steps += 1
        unbiased = 1.0 - 0.9**self._steps, math.sqrt(1.0 - 0.999**self._steps)
        for parameter, (mean, square) in zip(self._parameters, self._moments, strict=True):
            if parameter.grad is not None:
                gradient = _real(parameter.grad)
                mean.lerp_(gradient, 0.1)
                square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                size = square.sqrt().div_(unbiased[1]).add_(1e-8)
                _real(parameter).addcdiv_(mean, size, value=-_RATE / unbiased[0])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _deviation(outputs: list[Tensor], samples: int) -> float:
    """Return by how much samples deviate, as `Observation.sample_deviation` is."""
    deviations = list[float]()
    for output in outputs:
        is_batch = output.ndim > 0 and output.shape[0] == samples < output.numel()
        if output.is_floating_point() and is_batch:
            values = output.detach().double()
            between = values.var(dim=0, correction=0).mean()
            deviations.append(float((between / values.var(correction=0)).sqrt()))
    return max(filter(math.isfinite, deviations), default=math.nan)
