"""Calls a step a few times from the beginning, watched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from pytest_modelhealth.capture.observing.autograd_graph import is_made_by_a_loss, sign_of
from pytest_modelhealth.capture.passive.hooks import named_values
from pytest_modelhealth.errors import InspectionError, in_one_line
from pytest_modelhealth.report import LayerMode, Observation
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.training.stepping.reached import opened
from pytest_modelhealth.training.stepping.session import Session, loss_in
from pytest_modelhealth.training.stepping.watching import (
    Call,
    cosine,
    distance,
    inner,
    norm,
    widened,
)


@dataclass
class Calls:
    """What the first series of calls showed.

    Args:
        seen: a record a call.
        observation: the layers of the first call.
        names: every parameter after the first call: its name, its `id`, whether it is trainable.
        swallowed: share of elements with a gradient that did not change.
        ends_at: where every call leaves the random numbers, if it draws any and all end there.
        facts: fields of `Stepped` that are known by then.
    """

    seen: list[Call] = field(default_factory=list)
    observation: Observation | None = None
    names: list[tuple[str, int, bool]] = field(default_factory=list)
    swallowed: dict[int, float] = field(default_factory=dict)
    ends_at: Tensor | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def moved(self) -> set[int]:
        """The parameters that any call changed."""
        return {key for seen in self.seen for key, size in seen.changes.items() if size}


_MOST_CALLS = 32
"""A step that seems to wait for its turn is called so often to see whether it comes."""


def call_step(session: Session, calls: int) -> Calls:
    """Call the step several times from the beginning."""
    made, watch = Calls(), session.watch()
    containers = session.reached.containers
    graphs = [_graphs_in(containers)]
    asked, ends = dict[int, Tensor](), [torch.get_rng_state()]
    schedules = [one for one in session.reached.objects if isinstance(one, LRScheduler)]
    begun = [repr(one.state_dict()) for one in schedules]  # a count of epochs may stand still
    while (number := len(made.seen)) < calls or (number < _MOST_CALLS and _waits(made)):
        before = {key: p.detach().clone() for key, p in session.parameters.items()}
        try:
            if number:
                seen = session.watched(watch)
            else:
                seen, made.observation = session.observed(watch)
        except Exception as error:
            if not number:
                raise
            made.facts["raised"] = in_one_line(error)
            break
        if not number:
            start = before
            _take_first(session, made, seen, before)
        made.seen.append(seen)
        ends.append(torch.get_rng_state())
        graphs.append(_graphs_in(containers))
        sizes = {key: norm(value) or 1.0 for key, value in before.items()}
        seen.changes = {
            key: distance(session.parameters[key].detach(), value) / sizes[key]
            for key, value in before.items()
        }
        seen.updated = {key: size / sizes[key] for key, size in seen.updated.items()}
        for key in seen.at_step:  # of which elements there ever was a gradient
            asked[key] = (seen.gradients[key] != 0) | asked.get(key, False)
        # keep no graph of a call, and of gradients that nothing is held against the norm alone
        seen.result, seen.at_first = loss_in(seen.result), {}
        if number:
            seen.gradients = {k: torch.tensor(norm(g)) for k, g in seen.gradients.items()}
    for key, elements in asked.items():
        still = elements & (session.parameters[key].detach() == start[key])
        made.swallowed[key] = float(still.sum()) / max(int(elements.sum()), 1)
    growing = [
        one
        for one, *counts in zip(containers, *graphs, strict=True)
        if len(counts) > 2 and counts == sorted(set(counts))
    ]
    made.facts["growing"] = _named(session, growing)
    made.facts["advances"] = begun != [repr(one.state_dict()) for one in schedules]
    begin, end, *later = ends
    if later and not torch.equal(begin, end) and all(torch.equal(end, one) for one in later):
        made.ends_at = end
    return made


def _waits(made: Calls) -> bool:
    """Whether nothing has moved so far, and more calls may tell: gradients add up, say."""
    if made.moved or len(made.seen) < 2:  # it may step first, on the gradient of the call before
        return not made.moved
    overflows = any(not math.isfinite(size) for seen in made.seen for size in seen.added.values())
    first, last = made.seen[0].added, made.seen[-1].added
    adds_up = any(last.get(key, 0.0) > size for key, size in first.items() if size)
    return overflows or (adds_up and not any(seen.steps for seen in made.seen))


def _take_first(session: Session, made: Calls, seen: Call, before: dict[int, Tensor]) -> None:
    """Take down what only the first call shows."""
    result = seen.result
    if loss_in(result) is None:
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        kind = "nothing" if result is None else type(result).__name__
        raise InspectionError(
            f"{session.given.name} returned {kind}{shape}, not the loss: return "
            "it as a scalar tensor, a number, or under the key 'loss' of a mapping"
        )
    if isinstance(result, Tensor):
        made.facts |= {"sign": sign_of(result), "is_loss": is_made_by_a_loss(result)}
    product, moves, gradients = 0.0, 0.0, 0.0  # what moved before an optimizer stepped
    for key, now in seen.at_first.items():
        gradient, start = seen.gradients.get(key), before[key]
        if gradient is not None and now.shape == start.shape and not torch.equal(now, start):
            moved, wide = widened(now) - widened(start), widened(gradient)
            product += inner(moved, wide)
            moves += norm(moved) ** 2
            gradients += norm(wide) ** 2
    made.facts["climbs"] = cosine(product, moves, gradients)
    made.names = [(n, id(p), p.requires_grad) for n, p in session.model.named_parameters()]


def _graphs_in(containers: list[Any]) -> list[int]:
    """Return how many tensors with a graph each container has."""
    contents = (one.values() if isinstance(one, dict) else one for one in containers)
    return [
        sum(isinstance(value, Tensor) and value.grad_fn is not None for value in values)
        for values in contents
    ]


def _named(session: Session, containers: list[Any]) -> tuple[str, ...]:
    """Return what containers are called where a step names them, or a module of the model."""
    names = {id(value): name for name, value in named_values(opened(session.given.step)[0]).items()}
    for layer, module in session.model.named_modules() if containers else ():
        for attribute, value in vars(module).items():
            names[id(value)] = dotted(layer, attribute)
    return tuple(names.get(id(one), f"a {type(one).__name__}") for one in containers)


def layer_modes(session: Session, made: Calls) -> Iterator[LayerMode]:
    """Yield the modes of each layer that ran."""
    moved = made.moved
    for name, module in session.model.named_modules():
        ran = [seen.modes.get(module, set()) for seen in made.seen]
        if not any(ran):
            continue
        own, kind = list(module.parameters(recurse=False)), _kind(module)
        is_trainable, traits = any(p.requires_grad for p in own), dict[str, Any]()
        if (before := session.first_statistics.get(module)) is not None:
            moves = not torch.equal(before, module.running_mean)
            is_frozen = own and not is_trainable and not any(id(p) in moved for p in own)
            traits = {
                "still": not moves and any((True, True) in modes for modes in ran),
                "drifts": moves and is_frozen,
            }
        if kind == "batch_norm":
            traits["unseen"] = any({(True, False), (True, True)} <= modes for modes in ran)
            traits["hasty"] = (getattr(module, "momentum", 0) or 0) > 0.5
        with_gradient = [{training for training, enabled in modes if enabled} for modes in ran]
        yield LayerMode(
            layer=name,
            training=tuple(any(modes) if modes else None for modes in with_gradient),
            trainable=is_trainable,
            kind=kind,
            traits=frozenset(name for name, applies in traits.items() if applies),
        )


def _kind(module: nn.Module) -> str:
    if (
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0)
        or (isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout)
    ):
        return "dropout"
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return "batch_norm" if is_norm and module.running_mean is not None else ""
