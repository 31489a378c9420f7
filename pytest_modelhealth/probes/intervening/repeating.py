"""Calls of a model in a row, and what one leaves behind for the next."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.guard import restore_random_state
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.operations import having
from pytest_modelhealth.probes.conventions import Effects, UntellableError
from pytest_modelhealth.probes.intervening.batches import SEED, Samples, names_of
from pytest_modelhealth.probes.intervening.leaks import Change
from pytest_modelhealth.probes.intervening.partings import Place, parting
from pytest_modelhealth.probes.intervening.running import Ran, Runs, are_apart, largest_difference
from pytest_modelhealth.report import Parting

_MOVED = 1e-4
"""`Embedding(max_norm=...)` moves its rows by rounding from call to call, which is less."""
_TORCH_S_OWN = frozenset(vars(torch.nn.Module()))
_AGAIN = "another seed, or a call before"

State = dict[tuple[str, str, str], Tensor]
"""What a model keeps, by layer, kind and own name."""


def what_calls_change(runs: Runs) -> Effects:
    """Return what another seed and a call before change, and what calls leave behind.

    The model is called on another batch, then on the usual one, and then with another seed, without
    being put back between: what it keeps of the other batch shows.
    """
    base = runs.base
    if not base.outputs:
        raise UntellableError("the model returns no tensor to hold against another run's")
    samples, another = Samples.along(runs.batch, 0), runs.batch.copy()
    if samples.is_common(runs.batch) and not runs.batch.has_others:
        another = runs.batch.copy(samples.select(torch.arange(samples.number).roll(1)))
    calls = (another, None), (runs.batch.copy(), None), (runs.batch.copy(), SEED)
    (_, again, other), left = _called_in_a_row(runs, *calls)
    if are_apart(base.outputs, again.outputs):
        other = runs.forward(runs.batch.copy(), seed=SEED)
    if left and are_apart(base.outputs, other.outputs):  # which may be by the random numbers alone
        _, left = _called_in_a_row(runs, (runs.batch.copy(), None), (runs.batch.copy(), None))
    if error := again.error or other.error:
        raise UntellableError(f"called again, the model raises {error}", _AGAIN)
    states = [one for one in left if one.kind == "state"][:1]
    difference = largest_difference(base.outputs, again.outputs)
    if difference is not None and difference.effect > 0.0:
        one = states[0] if states else Parting("again", 0.0)
        states = [replace(one, kind="again", **difference._asdict())]
    by_seed = largest_difference(base.outputs, other.outputs)
    partings = [*states, *[p for p in left if p.kind == "parameters" and p.effect > _MOVED][:1]]
    if by_seed is not None and by_seed.effect > 0.0 and runs.is_steady:
        anywhere = torch.ones((), dtype=torch.bool)
        seed = Change("another seed", lambda *_: None, lambda _: iter([anywhere]), seed=SEED)
        partings.insert(0, parting(runs, seed, by_seed, _by_what))
    if base.wrote:
        names = names_of(runs.batch, runs.model)
        detail = ", ".join(f"input {names[number]!r}" for number in base.wrote)
        partings.append(Parting("batch", 1.0, role="inputs", detail=detail))
    return Effects(_AGAIN, partings)


def _by_what(place: Place | None) -> str:
    """Return what draws where runs of two seeds part: a dropout, or other noise."""
    if place is None:
        return "noise"
    name, options = place.record.type_name.lower(), place.record.options
    is_asked = bool(options.get("dropout_p") and options.get("dropout_training", True))
    steps = {step.rstrip("_") for step in place.parting.between}
    is_dropout = "dropout" in name or "droppath" in name or is_asked or steps & having("dropout")
    return "dropout" if is_dropout else "noise"


def _called_in_a_row(
    runs: Runs, *calls: tuple[Inputs, int | None]
) -> tuple[list[Ran], list[Parting]]:
    """Call the model without putting it back between; return also what the last call changes.

    A call is a batch and the seed of its random numbers; ``None`` takes the usual ones.
    """
    ran, before = list[Ran](), State()
    with runs.kept([(b.args, b.kwargs) for b, _ in calls]) as guard:
        for batch, seed in calls:
            before = _state(runs) if len(ran) == len(calls) - 1 else before
            restore_random_state(guard.numbers)  # those of the model's own generators go on
            ran.append(runs.take(batch, seed=seed))
        return ran, _changes(before, _state(runs))


def _state(runs: Runs) -> State:
    """Return what a model keeps: floating tensors and numbers, lengths of containers."""
    state = State()
    for layer in named_modules(runs.model):
        plain = {n: v for n, v in vars(layer.module).items() if n not in _TORCH_S_OWN}
        for own, value in {**plain, **layer.module._buffers, **layer.module._parameters}.items():
            kind = "parameters" if own in layer.module._parameters else "state"
            if (figures := _figures(value)) is not None:
                state[layer.name, kind, own] = figures
    return state


def _figures(value: Any) -> Tensor | None:
    if isinstance(value, list | deque | dict | set | float):
        return torch.tensor(float(value if isinstance(value, float) else len(value)))
    is_number = isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta
    if not is_number or value.layout is not torch.strided:
        return None
    figures: Tensor = value.detach()
    if isinstance(value, Parameter):  # less to keep than a copy of it
        return torch.stack([figures.norm(dtype=torch.float64), figures.sum(dtype=torch.float64)])
    return figures.clone()


def _changes(before: State, after: State) -> list[Parting]:
    """Return what is not as it was, in order. What was not there before was filled once."""
    changes = []
    for (layer, kind, own), value in after.items():
        old = before.get((layer, kind, own), value)
        difference = largest_difference([old], [value])
        effect = 1.0 if difference is None else difference.effect
        if old.shape == value.shape and (difference is None or not effect > 0.0):
            continue
        detail, role, tensor = f"{own!r} changes", "activations", ""
        if kind == "parameters":
            detail, role, tensor = f"its parameter {detail} by {effect:.2g} of its size", kind, own
        elif old.ndim == value.ndim == 0:
            detail = f"{own!r} goes from {float(old):.6g} to {float(value):.6g}"
        changes.append(Parting(kind, effect, layer, role, tensor, detail=detail))
    return changes
