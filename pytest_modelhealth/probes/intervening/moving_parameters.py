"""Parameters moved, in a float64 copy or by a few steps of training, and what follows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import converted_batch, converted_copy, default_dtype
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.isolation import gradients_set_aside
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.checks.zero_gradients import (
    COLUMNS,
    STEPS,
    ZERO,
    zero_parameters,
    zero_slices,
)
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.probes.alike_samples import alike_outputs
from pytest_modelhealth.probes.conventions import Found, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import Runs, said
from pytest_modelhealth.probes.parameter_effect import Lacking, without_gradient
from pytest_modelhealth.report import Observation, Parting
from pytest_modelhealth.report.flow import near

_FAR = (1e-5, 1e-6)
"""How far parameters are moved along a direction of independent standard normal numbers."""
_SEED = 20_240_229
_RATE = 1e-3
"""Adam's default: its first steps move every weight by about as much, whatever its gradient."""
_HEALED = 3.0
"""Branches that start near zero part samples more than this many times further in three steps."""


def what_parameters_do(runs: Runs) -> Found:
    """Move parameters without gradient in a float64 copy, one part of the model after the other.

    Raises:
        UntellableError: the copy cannot be made or run, or there is nothing to miss.
    """
    observation, trained = runs.observation, runs.conventions.trained
    if not observation.backward:
        raise NotApplicableError("no backward pass ran, so that no gradient is missed")
    parts: dict[str, list[Lacking]] = defaultdict(list)
    for lacking in without_gradient(observation):
        parts[lacking.part].append(lacking)
    if not parts:
        return Found("nothing: every trainable parameter that ran has a gradient")
    try:
        copy = runs.over(converted_copy(runs.model, torch.float64))
    except InspectionError as error:
        raise UntellableError(str(error)) from error
    there = dict(copy.model.named_parameters(remove_duplicate=False))
    movable = {name for name, tensor in there.items() if tensor.dtype is torch.float64}
    movable &= movable if trained is None else trained
    partings = []
    for part in parts.values():
        moved = [one for one in part if one.name in movable]
        slope = _slope(copy, [there[one.name] for one in moved]) if moved else 0.0
        if slope:
            last, line = _last_before_a_cut(moved, observation)
            partings.append(
                Parting(
                    "unsettled" if trained is None else "trained",
                    abs(slope),
                    last.layer,
                    role="parameter_gradients",
                    tensor=last.own,
                    line=line,
                    names=tuple(one.name for one in moved),
                )
            )
    changed = "parameters without gradient, a part of the model at a time, along a random direction"
    return Found(changed, partings)


def _last_before_a_cut(part: list[Lacking], observation: Observation) -> tuple[Lacking, str]:
    """Return the last of the parameters before a cut, and the line that cuts, if that is known."""
    flow = flow_of(observation)
    asked = {one.layer: one for one in part if one.layer in flow.layers}
    asked |= {one.name: one for one in part if one.layer not in asked and one.name in flow}
    ends = flow.endings(asked).values()
    cuts = [(asked[end.last], near(end.cut.line)) for end in ends if end.cut is not None]
    return cuts[0] if cuts else (part[-1], "")


def _slope(copy: Runs, parameters: Sequence[Tensor]) -> float:
    """Return the slope of the loss where parameters are moved together; 0 where it jumps.

    It takes four forwards, or two where the loss is the same on both sides of the wider step.
    """
    generator = torch.Generator().manual_seed(_SEED)
    directions = [(parameter, _normal(parameter, generator)) for parameter in parameters]

    def along(step: float) -> float:
        return (_loss_at(copy, directions, step) - _loss_at(copy, directions, -step)) / (2 * step)

    wide = along(_FAR[0])
    narrow = along(_FAR[1]) if wide else 0.0
    is_smooth = abs(wide - narrow) <= 0.1 * max(abs(wide), abs(narrow))
    return narrow if is_smooth else 0.0


def _loss_at(copy: Runs, directions: list[tuple[Tensor, Tensor]], step: float) -> float:
    in_double = partial(converted_batch, dtype=torch.float64)
    batch = copy.batch()
    batch = Inputs(*in_double(batch.args), **in_double(batch.kwargs))
    with default_dtype(torch.float64), copy.kept((batch.args, batch.kwargs)):
        with torch.no_grad():
            for parameter, direction in directions:
                parameter.add_(direction, alpha=step)
        try:
            output = copy.output(batch)
            loss = copy.loss_of(output, in_double(copy.request.target))
        except Exception as error:
            raise UntellableError(f"in float64 the model raises {said(error)}") from error
        if loss is None:
            raise UntellableError("there is no number to differentiate")
        if copy.request.loss is None and loss.dtype is not torch.float64:
            loss = _projected(output)
    if loss.dtype is not torch.float64:
        raise UntellableError(f"its loss is computed in {loss.dtype} whatever it is given")
    if not math.isfinite(value := float(loss.detach())):
        raise UntellableError("its loss is not finite in float64")
    return value


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


def what_training_parts(runs: Runs) -> Found:
    """Train a model whose samples are alike for three steps of Adam, and put it back.

    Raises:
        UntellableError: it cannot be trained, or its samples are not alike.
    """
    if alike_outputs(runs.observation, runs.settings) is None:
        raise NotApplicableError("the samples of its outputs are not alike")
    samples = runs.observation.samples // max(runs.observation.batches, 1)
    with closing(_trained(runs, differentiates_last=False)) as outputs:
        deviations = [_deviation(find_tensors(output), samples) for output in outputs]
    before, after, changed = deviations[0], deviations[-1], f"{STEPS} steps of Adam"
    if after >= _HEALED * before:
        return Found(
            changed, notes=(f"{changed} part the samples, from {before:.2g} to {after:.2g}",)
        )
    return Found(changed, [Parting("alike", before, before=before, after=after)])


def what_stays_zero(runs: Runs) -> Found:
    """Train for three steps of Adam, put it back, and return whose gradient was zero at each.

    Raises:
        UntellableError: it cannot be trained.
    """
    zero = dict.fromkeys(zero_parameters(runs.observation))
    slices = {(r.name, name): (kind, set(i)) for r, name, kind, i in zero_slices(runs.observation)}
    parameters = dict(runs.model.named_parameters(remove_duplicate=False))
    with closing(_trained(runs)) as outputs:
        for _ in outputs:
            gradients = {name: parameter.grad for name, parameter in parameters.items()}
            zero = {n: None for n in zero if (grad := gradients[n]) is None or not grad.any()}
            for (layer, name), (kind, idle) in list(slices.items()):
                gradient = gradients[f"{layer}.{name}".removeprefix(".")]
                if gradient is not None:
                    rows = gradient.transpose(0, 1) if kind == COLUMNS else gradient
                    idle.difference_update(rows.flatten(1).any(1).nonzero().flatten().tolist())
                if not idle:
                    del slices[layer, name]
            if not zero and not slices:
                break
    partings = [Parting(ZERO, 0.0, names=tuple(zero))] if zero else []
    for (layer, name), (kind, idle) in slices.items():
        size = parameters[f"{layer}.{name}".removeprefix(".")].shape[kind == COLUMNS]
        is_range = max(idle) - min(idle) + 1 == len(idle)
        detail = f"{len(idle)} of the {size} {kind}"
        detail += f" ({min(idle)} to {max(idle)})" if is_range else ""
        partings.append(Parting(kind, len(idle) / size, layer, tensor=name, detail=detail))
    return Found(f"{STEPS} steps of Adam", partings)


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
            optimizer = torch.optim.Adam(wanted, lr=_RATE)
            for batch in batches:
                output = runs.output(batch)
                if differentiates_last or batch is not batches[-1]:
                    _take_gradients(runs, output, optimizer)
                yield output
                optimizer.step()
        except Exception as error:  # the user's, of weights that we changed
            raise UntellableError(
                f"{STEPS} training steps cannot be tried: {said(error)}"
            ) from error


def _take_gradients(runs: Runs, output: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = runs.loss_of(output, runs.request.target)
    if loss is None or not loss.requires_grad:
        raise ValueError("the loss has no gradient")
    optimizer.zero_grad()
    learns = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [leaf for leaf in graph_leaves([loss.grad_fn]) if id(leaf) not in learns]
    with gradients_set_aside(others):  # those of the loss itself among them
        loss.backward()
    runs.count["backwards"] += 1


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
