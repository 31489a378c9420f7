"""Which parameters a step trains, and how they move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Stepped, SteppedOptimizer, SteppedParameter
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.contract.fault import broken, fault, looks_for, untold, whole

# ---- what is held --------------------------------------------------------------------------------


def _moves(step: Stepped) -> bool:
    return any(any(p.changes) for p in step.parameters)


def _is_missing(parameter: SteppedParameter) -> bool:
    gets = any(size for size in parameter.added if size is not None)
    return parameter.trainable and gets and not parameter.held and not any(parameter.changes)


def _is_unreached(parameter: SteppedParameter, step: Stepped) -> bool:
    if not (parameter.trainable and parameter.held) or any(parameter.changes):
        return False
    if any(size is not None for size in parameter.added):
        return False
    return any(mode.layer == parameter.layer and mode.without_gradient for mode in step.modes)


fault(
    "trained_parameters",
    whole(
        lambda step: (
            step.parameters and not _moves(step) and not any(p.held for p in step.parameters)
        )
    ),
    "{step.optimizers[0].type_name} holds {held} tensors, and none of them is one of the "
    "model's {total} parameters: nothing of it is in an optimizer",
    "the optimizer was made from another model or copy, before parameters were replaced, or "
    "from a generator that was used up: make it after the model is complete, from "
    "list(model.parameters())",
    facts=lambda _, step: {
        "held": sum(optimizer.holds for optimizer in step.optimizers),
        "total": len(step.parameters),
    },
    is_last=True,
)
fault(
    "trained_parameters",
    lambda step: step.strays,
    "{count} parameters get a gradient, and no optimizer made before knows of them: {names}",
    "modules in a plain list or dictionary are not registered (use nn.ModuleList, "
    "nn.ModuleDict), or parameters are made, or replaced, in the forward or the step: make the "
    "optimizer after them, and write into them in place",
    at=lambda name: (name.rpartition(".")[0], ""),
)
fault(
    "trained_parameters",
    lambda step: filter(_is_missing, step.parameters),
    "{count} of {total} trainable parameters get a gradient and are {where}, so that they "
    "never learn: {names}",
    "{why}",
    facts=lambda _, step: {
        "total": sum(p.trainable for p in step.parameters),
        "where": "in no optimizer" if step.optimizers else "not moved by the step",
        "why": "they were made or replaced after the optimizer was, which holds the old ones"
        if any(optimizer.foreign for optimizer in step.optimizers)
        else "the parameter groups leave them out, or they were made after the optimizer; what "
        "should not learn is frozen by requires_grad_(False)",
    },
)
fault(
    "trained_parameters",
    lambda step: (p for p in step.parameters if _is_unreached(p, step)),
    "{count} parameters that the optimizer holds never get a gradient: their layers only run "
    "with gradients off: {names}",
    "torch.no_grad() or inference_mode() is around a part that should learn; what should not "
    "is frozen by requires_grad_(False) and left out of the optimizer",
)

# ---- how they move -------------------------------------------------------------------------------

_UNDONE = 0.02
_MANY = 16
"""A scaler that starts at 65536 is at 1 by then."""
_TINY = 1e-8
"""Adam's epsilon: below it nothing is expected to move."""
_MORE_CALLS = "give run_step more calls, such as calls=8"


fault(
    "parameter_updates",
    whole(lambda step: not any(p.trainable for p in step.parameters)),
    "no parameter of the model requires a gradient: there is nothing to train",
    "requires_grad_(False) left over from another stage, or a model in inference mode",
    is_last=True,
)


class _Still(NamedTuple):
    """A step that moves nothing: what is held, the gradients that came, and which were left."""

    step: Stepped
    held: list[SteppedParameter]
    added: list[float]
    left: list[float]

    @property
    def is_few(self) -> bool:
        """Whether more calls may tell."""
        return len(self.step.losses) < _MANY

    @property
    def optimizers(self) -> list[SteppedOptimizer]:
        """The optimizers that step."""
        return [o for o in self.step.optimizers if any(o.steps)]

    @property
    def largest(self) -> float:
        """The largest gradient that came."""
        return max(self.added, default=0.0)

    @property
    def scheduled(self) -> SteppedOptimizer | None:
        """The first optimizer whose rate is 0 by a schedule that no call advances."""
        idle = (o for o in self.optimizers if o.initial_rate and not any(o.rates))
        return None if self.step.advances else next(idle, None)

    @property
    def adds_up(self) -> bool:
        """Whether the gradients left by a call grow in every later one."""
        sizes = (p.added for p in self.held if len(p.added) > 1 and None not in p.added)
        grown = [added for added in sizes if any(added)]
        return bool(grown) and all(added[-1] > added[0] for added in grown)  # type: ignore[operator]


_Applies = Callable[[_Still], Any]
_DOUBTS: tuple[tuple[_Applies, str], ...] = (
    (
        lambda still: still.is_few and not all(map(math.isfinite, still.added)),
        "the gradients overflow in every call, and a scaler skips them: " + _MORE_CALLS,
    ),
    (
        lambda still: 0.0 < still.largest < _TINY,
        "the largest gradient is {0.largest:.2g}, too small to move anything",
    ),
    (
        lambda still: still.is_few and not still.optimizers and still.adds_up,
        "no optimizer steps in {calls} calls, and gradients add up from call to call, as "
        "micro-batches do: " + _MORE_CALLS,
    ),
    (
        lambda still: still.scheduled,
        (
            "the learning rate of {0.scheduled.type_name} is 0 by its schedule, whose start is "
            "{0.scheduled.initial_rate:.3g}: advance it first, or in the step"
        ),
    ),
)
"""Why it cannot be told that nothing moves."""

_REASONS: tuple[tuple[_Applies, str, str], ...] = (
    (
        lambda still: not still.added,
        "no backward pass reaches a parameter that an optimizer holds",
        (
            "loss.backward() is missing, or the loss is detached (.item(), no_grad), or made anew "
            "by torch.tensor(loss)"
        ),
    ),
    (
        lambda still: not still.largest,
        "every gradient is exactly zero",
        "the loss is multiplied by zero or masked out whole, or all of the model is saturated",
    ),
    (
        lambda still: not all(map(math.isfinite, still.added)),
        "the gradients are not finite in any call, so that a scaler skips every step",
        "a loss scale that is set anew in each step, or NaN in the loss",
    ),
    (
        lambda still: not still.step.optimizers,
        "no optimizer steps, although there are gradients",
        "optimizer.step() is missing, or p = p - lr * p.grad is not in place",
    ),
    (
        lambda still: not still.optimizers,
        "no optimizer steps, although there are gradients",
        "optimizer.step() is missing, waits for what never comes, or another's is called",
    ),
    (
        lambda still: all(o.foreign == o.holds for o in still.optimizers),
        "the {0.optimizers[0].type_name} that steps holds none of the model's parameters",
        "another optimizer than the one given is stepped: of another model, or another run",
    ),
    (
        lambda still: not any(still.left),
        "when the optimizer steps there is no gradient any more",
        "zero_grad() stands between backward() and step(); or step() stands before backward()",
    ),
    (
        lambda still: not any(any(o.rates) for o in still.optimizers),
        "the learning rate of {0.optimizers[0].type_name} is 0",
        "a rate of 0 was given, or a schedule ends there",
    ),
    (
        lambda still: True,
        (
            "{0.optimizers[0].type_name} steps at a rate of {rate:.3g} on gradients of a norm up "
            "to {left:.3g}, and no value changes"
        ),
        "updates too small for the precision of the weights, or values that are put back",
    ),
)
"""Why nothing moves, and the likely cause: the first that applies."""


@looks_for("parameter_updates", is_last=True)
def _nothing_moves(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield why nothing moves, or why that cannot be told."""
    if any(any(p.changes) for p in step.parameters if p.trainable):
        return
    held = [p for p in step.parameters if p.trainable and p.held]
    added = [size for p in held for size in p.added if size is not None]
    left = [size for p in held for size in p.gradients if size is not None]
    still = _Still(step, held, added, left)
    facts = {
        "calls": len(step.losses),
        "rate": max((rate for o in still.optimizers[:1] for rate in o.rates), default=0.0),
        "left": max(left, default=0.0),
    }
    doubt = next((doubt for applies, doubt in _DOUBTS if applies(still)), None)
    if doubt is not None:
        yield untold(check, doubt.format(still, **facts))
        return
    why, cause = next((why, cause) for applies, why, cause in _REASONS if applies(still))
    what = f"no parameter moves in {len(step.losses)} calls of the step: {why}"
    yield broken(check, what.format(still, **facts), cause)


def _rates(optimizer: SteppedOptimizer) -> list[float]:
    return [rate for rate, n in zip(optimizer.rates, optimizer.steps, strict=True) if n]


def _has_fallen(optimizer: SteppedOptimizer) -> bool:
    rates = _rates(optimizer)
    return len(rates) > 1 and rates[0] > 0.0 and not any(rates[1:])


def _stands_by_its_rate(parameter: SteppedParameter) -> bool:
    rates = [rate for rate in parameter.rates if rate is not None]
    gets = any(size for size in parameter.gradients if size is not None)
    return gets and bool(rates) and not any(rates) and not any(parameter.changes)


def _made_anew(step: Stepped) -> list[SteppedOptimizer]:
    return [optimizer for optimizer in step.optimizers if "anew" in optimizer.traits]


def _is_undone(parameter: SteppedParameter) -> bool:
    kept = zip(parameter.changes, parameter.updates, strict=True)
    known = [(change, update) for change, update in kept if update]
    return len(known) > 1 and all(0.0 < change < _UNDONE * update for change, update in known)


def _mostly_undone(step: Stepped) -> list[SteppedParameter]:
    undone = [p for p in step.parameters if _is_undone(p)]
    return undone if 2 * len(undone) > sum(any(p.updates) for p in step.parameters) else []


fault(
    "parameter_updates",
    lambda step: filter(_has_fallen, step.optimizers),
    "the learning rate of {one.type_name} falls from {first:.3g} to exactly 0 after the first "
    "call, and stays there",
    "the schedule is stepped each batch although it counts epochs, is given too few steps, or "
    "divides where it should multiply",
    each=True,
    facts=lambda some, _: {"first": _rates(some[0])[0]},
)
fault(
    "parameter_updates",
    lambda step: filter(_stands_by_its_rate, step.parameters),
    "{count} parameters get a gradient and do not move: the learning rate of their group is 0: "
    "{names}",
    "a schedule, or a group without its rate; what should not learn is frozen by "
    "requires_grad_(False)",
    grade="warn",
)
fault(
    "parameter_updates",
    lambda step: (o for o in step.optimizers if o.given and not any(o.steps) and _made_anew(step)),
    "{one.type_name}, which was given, never steps; another {other} that the step has itself does",
    "an optimizer is made anew in each step, and forgets its momentum, or the step reads "
    "another one from around it",
    each=True,
    facts=lambda _, step: {"other": _made_anew(step)[0].type_name},
)
fault(
    "parameter_updates",
    lambda step: (
        o
        for o in step.optimizers
        if o.given and any(o.steps) and "reached" not in o.traits and o.holds
    ),
    "{one.type_name}, optimizer {number} of {total}, steps, and none of the {one.holds} "
    "parameters that it holds ever gets a gradient",
    "what its loss is computed from is detached: .detach(), no_grad, .item() or numpy between "
    "this part and the loss",
    each=True,
    at=lambda optimizer: (optimizer.layer, ""),
    facts=lambda some, step: {
        "number": step.optimizers.index(some[0]) + 1,
        "total": len(step.optimizers),
    },
)
fault(
    "parameter_updates",
    _mostly_undone,
    f"of what the optimizer changes, less than {_UNDONE:.0%} is left when the call is over: "
    "{names}",
    "weights are copied back after optimizer.step(): a moving average that is copied into the "
    "model in place of the other way round",
    grade="warn",
)
fault(
    "parameter_updates",
    lambda step: (p for p in step.parameters if any(p.updates) and not any(p.changes)),
    "{count} parameters that the optimizer changes are what they were when the call is over: "
    "{names}",
    "weights are rounded, reset or written over after optimizer.step()",
)
