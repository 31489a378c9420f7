"""Checks of which parameters a step trains, and of how they move."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped, SteppedParameter, Violation
    from pytest_modelhealth.settings import Settings


class TrainedParameters(StepCheck):
    """What should learn is in the optimizer."""

    name = "trained_parameters"
    summary = "The optimizer holds every trainable parameter that gets a gradient."
    rank = 60
    definition = (
        "A violation: an optimizer that was given holds none of the model's parameters; a "
        "parameter gets a gradient that is not zero, is held by no optimizer that was given or "
        "stepped, and does not move otherwise; a parameter is held, and its layer only ran with "
        "gradients off, unless something else moves it, as a moving average is."
    )
    source = "exact: of 35 healthy and look-alike steps of the first measurement none breaks it"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Violation]:
        """Yield what is not held, then what is held in vain."""
        if _holds_none(stepped):
            yield self._none(stepped, observation)
            return
        if stepped.strays:
            yield self._strays(stepped, observation)
        missing = [p for p in stepped.parameters if _is_missing(p)]
        if missing:
            yield self._missing(missing, stepped, observation)
        unreached = [p for p in stepped.parameters if _is_unreached(p, stepped)]
        if unreached:
            yield self._unreached(unreached, observation)

    def _none(self, stepped: Stepped, observation: Observation) -> Violation:
        held = sum(optimizer.holds for optimizer in stepped.optimizers)
        kind = stepped.optimizers[0].type_name
        return self.violation(
            place(observation),
            f"{kind} holds {held} tensors, and none of them is one of the model's "
            f"{len(stepped.parameters)} parameters: nothing of it is in an optimizer",
            value=0.0,
            cause="the optimizer was made from another model or copy, before parameters were "
            "replaced, or from a generator that was used up: make it after the model is complete, "
            "from list(model.parameters())",
            independent=True,
        )

    def _strays(self, stepped: Stepped, observation: Observation) -> Violation:
        layer = stepped.strays[0].rpartition(".")[0]
        return self.violation(
            place(observation, layer),
            f"{len(stepped.strays)} parameters get a gradient, and no optimizer made before knows "
            f"of them: {listed(stepped.strays)}",
            value=float(len(stepped.strays)),
            cause="modules in a plain list or dictionary are not registered (use nn.ModuleList, "
            "nn.ModuleDict), or parameters are made, or replaced by new ones, in the forward or "
            "the step: make the optimizer after them, and write into them in place",
            independent=True,
        )

    def _missing(
        self, missing: list[SteppedParameter], stepped: Stepped, observation: Observation
    ) -> Violation:
        names = [p.name for p in missing]
        layers = list(dict.fromkeys(p.layer for p in missing))
        foreign = sum(optimizer.foreign for optimizer in stepped.optimizers)
        details = (
            [f"the optimizer holds {foreign} tensors that are not the model's"] if foreign else []
        )
        total = sum(p.trainable for p in stepped.parameters)
        return self.violation(
            place(observation, layers[0]),
            f"{len(missing)} of {total} trainable parameters get a gradient and are "
            f"{'in no optimizer' if stepped.optimizers else 'not moved by the step'}, so that they "
            f"never learn: {listed(names)}",
            value=float(len(missing)),
            tensor=missing[0].own,
            cause=(
                "they were made or replaced after the optimizer was, which holds the old ones"
                if foreign
                else "the parameter groups leave them out, or they were made after the optimizer; "
                "what should not learn is frozen by requires_grad_(False)"
            ),
            affected=layers[1:],
            independent=True,
            details=details,
        )

    def _unreached(self, unreached: list[SteppedParameter], observation: Observation) -> Violation:
        layers = list(dict.fromkeys(p.layer for p in unreached))
        return self.violation(
            place(observation, layers[0]),
            f"{len(unreached)} parameters that the optimizer holds never get a gradient: their "
            f"layers only run with gradients off: {listed([p.name for p in unreached])}",
            value=float(len(unreached)),
            tensor=unreached[0].own,
            cause="torch.no_grad() or inference_mode() is around a part that should learn; what "
            "should not is frozen by requires_grad_(False) and left out of the optimizer",
            affected=layers[1:],
            independent=True,
        )


def _holds_none(stepped: Stepped) -> bool:
    """Whether no optimizer holds a parameter of the model, and nobody moves one by hand."""
    moved = any(any(p.changes) for p in stepped.parameters)
    return bool(stepped.parameters) and not moved and not any(p.held for p in stepped.parameters)


def _is_missing(parameter: SteppedParameter) -> bool:
    gets = any(size for size in parameter.added if size is not None)
    return parameter.trainable and gets and not parameter.held and not any(parameter.changes)


def _is_unreached(parameter: SteppedParameter, stepped: Stepped) -> bool:
    if not (parameter.trainable and parameter.held) or any(parameter.changes):
        return False
    if any(size is not None for size in parameter.added):
        return False
    return any(mode.layer == parameter.layer and mode.without_gradient for mode in stepped.modes)


_UNDONE = 0.02
_MANY = 16
"""A scaler that starts at 65536 is at 1 by then."""
_TINY = 1e-8
"""Adam's epsilon: below it nothing is expected to move."""
_MORE_CALLS = "give run_step more calls, such as calls=8"


class ParameterUpdates(StepCheck):
    """Calling the step changes the model."""

    name = "parameter_updates"
    summary = "A training step moves the parameters that the optimizer holds."
    rank = 61
    definition = (
        "A violation: no parameter moves in any call, or a learning rate falls to exactly 0 after "
        "the first call and stays there. Warned of: parameters whose group has a rate of 0 while "
        "others move. Inconclusive: gradients below 1e-8 or that only add up from call to call, a "
        "scaler that skips every call, a rate of 0 by a schedule that the step does not advance."
    )
    source = "exact; 1e-8 is the epsilon of Adam"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield why nothing moves, or what does not."""
        root = place(observation)
        if not any(p.trainable for p in stepped.parameters):
            yield self.violation(
                root,
                "no parameter of the model requires a gradient: there is nothing to train",
                value=0.0,
                cause="requires_grad_(False) left over from another stage, or a model in "
                "inference mode",
                independent=True,
            )
        elif not any(any(p.changes) for p in stepped.parameters if p.trainable):
            yield self._nothing_moves(stepped, observation)
        else:
            yield from self._fallen(stepped, observation)
            yield from self._standing(stepped, observation)
            yield from self._idle_optimizers(stepped, observation)
            yield from self._put_back(stepped, observation)

    def _nothing_moves(self, stepped: Stepped, observation: Observation) -> Finding:
        calls = len(stepped.losses)
        held = [p for p in stepped.parameters if p.trainable and p.held]
        added = [size for p in held for size in p.added if size is not None]
        doubt = _doubt(stepped, held, added)
        if doubt:
            return self.inconclusive(place(observation), doubt)
        why, cause = _why_nothing(stepped, held, added)
        return self.violation(
            place(observation),
            f"no parameter moves in {calls} calls of the step: {why}",
            value=0.0,
            cause=cause,
            independent=True,
        )

    def _fallen(self, stepped: Stepped, observation: Observation) -> Iterator[Finding]:
        for optimizer in stepped.optimizers:
            rates = [r for r, n in zip(optimizer.rates, optimizer.steps, strict=True) if n]
            if len(rates) > 1 and rates[0] > 0.0 and not any(rates[1:]):
                yield self.violation(
                    place(observation),
                    f"the learning rate of {optimizer.type_name} falls from {rates[0]:.3g} to "
                    "exactly 0 after the first call, and stays there",
                    value=0.0,
                    cause="the schedule is stepped each batch although it counts epochs, is given "
                    "too few steps, or divides where it should multiply",
                    independent=True,
                )

    def _idle_optimizers(self, stepped: Stepped, observation: Observation) -> Iterator[Finding]:
        for number, optimizer in enumerate(stepped.optimizers, 1):
            if not optimizer.given:
                continue
            which = f"{optimizer.type_name}, optimizer {number} of {len(stepped.optimizers)},"
            others = [o for o in stepped.optimizers if o.anew]
            if not any(optimizer.steps) and others:
                yield self.violation(
                    place(observation),
                    f"{optimizer.type_name}, which was given, never steps; "
                    f"another {others[0].type_name} that the step has itself does",
                    value=0.0,
                    cause="an optimizer is made anew in each step, and forgets its momentum, or "
                    "the step reads another one from around it",
                    independent=True,
                )
            elif any(optimizer.steps) and not optimizer.reached and optimizer.holds:
                yield self.violation(
                    place(observation, optimizer.layer),
                    f"{which} steps, and none of the {optimizer.holds} parameters that it holds "
                    "ever gets a gradient",
                    value=0.0,
                    cause="what its loss is computed from is detached: .detach(), no_grad, .item() "
                    "or numpy between this part and the loss",
                    independent=True,
                )

    def _put_back(self, stepped: Stepped, observation: Observation) -> Iterator[Finding]:
        mostly = [p for p in stepped.parameters if _is_undone(p)]
        if 2 * len(mostly) > sum(any(p.updates) for p in stepped.parameters):
            yield self.violation(
                place(observation, mostly[0].layer),
                f"of what the optimizer changes, less than {_UNDONE:.0%} is left when the call is "
                f"over: {listed([p.name for p in mostly])}",
                value=_UNDONE,
                tensor=mostly[0].own,
                cause="weights are copied back after optimizer.step(): a moving average that is "
                "copied into the model in place of the other way round",
                severity="warn",
            )
        back = [p for p in stepped.parameters if any(p.updates) and not any(p.changes)]
        if back:
            layers = list(dict.fromkeys(p.layer for p in back))
            yield self.violation(
                place(observation, layers[0]),
                f"{len(back)} parameters that the optimizer changes are what they were when the "
                f"call is over: {listed([p.name for p in back])}",
                value=0.0,
                tensor=back[0].own,
                cause="weights are rounded, reset or written over after optimizer.step()",
                affected=layers[1:],
                independent=True,
            )

    def _standing(self, stepped: Stepped, observation: Observation) -> Iterator[Finding]:
        still = [p for p in stepped.parameters if _stands_by_its_rate(p)]
        if still:
            layers = list(dict.fromkeys(p.layer for p in still))
            yield self.violation(
                place(observation, layers[0]),
                f"{len(still)} parameters get a gradient and do not move: the learning rate of "
                f"their group is 0: {listed([p.name for p in still])}",
                value=0.0,
                tensor=still[0].own,
                cause="a schedule, or a group without its rate; what should not learn is frozen "
                "by requires_grad_(False)",
                affected=layers[1:],
                severity="warn",
            )


def _is_undone(parameter: SteppedParameter) -> bool:
    kept = zip(parameter.changes, parameter.updates, strict=True)
    known = [(change, update) for change, update in kept if update]
    return len(known) > 1 and all(0.0 < change < _UNDONE * update for change, update in known)


def _stands_by_its_rate(parameter: SteppedParameter) -> bool:
    rates = [rate for rate in parameter.rates if rate is not None]
    gets = any(size for size in parameter.gradients if size is not None)
    return gets and bool(rates) and not any(rates) and not any(parameter.changes)


def _doubt(stepped: Stepped, held: list[SteppedParameter], added: list[float]) -> str:
    """Return why it cannot be told that nothing moves; ``""`` if it can."""
    stepping = any(any(o.steps) for o in stepped.optimizers)
    few = len(stepped.losses) < _MANY
    if few and any(not math.isfinite(size) for size in added):
        return f"the gradients overflow in every call, and a scaler skips them: {_MORE_CALLS}"
    if added and 0.0 < max(added) < _TINY:
        return f"the largest gradient is {max(added):.2g}, too small to move anything"
    if few and not stepping and _add_up(held):
        return (
            f"no optimizer steps in {len(stepped.losses)} calls, and gradients add up from call to "
            f"call, as micro-batches do: {_MORE_CALLS}"
        )
    for optimizer in stepped.optimizers:
        is_scheduled = bool(optimizer.initial_rate) and not stepped.advances
        if any(optimizer.steps) and not any(optimizer.rates) and is_scheduled:
            return (
                f"the learning rate of {optimizer.type_name} is 0 by its schedule, whose start is "
                f"{optimizer.initial_rate:.3g}: advance it first, or in the step"
            )
    return ""


def _add_up(held: list[SteppedParameter]) -> bool:
    """Whether the gradients left by a call grow in every later one."""
    grown = [p.added for p in held if len(p.added) > 1 and None not in p.added and any(p.added)]
    return bool(grown) and all(added[-1] > added[0] for added in grown)  # type: ignore[operator]


def _why_nothing(
    stepped: Stepped, held: list[SteppedParameter], added: list[float]
) -> tuple[str, str]:
    """Return why nothing moves, and the likely cause."""
    stepping = [o for o in stepped.optimizers if any(o.steps)]
    if not added:
        return (
            "no backward pass reaches a parameter that an optimizer holds",
            (
                "loss.backward() is missing, the loss is detached (.item(), .detach(), no_grad), "
                "or it was made from a new tensor: torch.tensor(loss)"
            ),
        )
    if not max(added):
        return (
            "every gradient is exactly zero",
            "the loss is multiplied by zero or masked out whole, or all of the model is saturated",
        )
    if not all(map(math.isfinite, added)):
        return (
            "the gradients are not finite in any call, so that a scaler skips every step",
            "a loss scale that is set anew in each step, or NaN in the loss",
        )
    if not stepping:
        return (
            "no optimizer steps, although there are gradients",
            (
                "optimizer.step() is missing, waits for a micro-batch or a condition that never "
                "comes, or is called on another optimizer than the one given"
                if stepped.optimizers
                else "optimizer.step() is missing; or the update is written to new tensors, as by "
                "p = p - lr * p.grad, and not in place"
            ),
        )
    if all(optimizer.foreign == optimizer.holds for optimizer in stepping):
        return (
            f"the {stepping[0].type_name} that steps holds none of the model's parameters",
            "another optimizer than the one given is stepped: of another model, or another run",
        )
    if not any(size for p in held for size in p.gradients if size is not None):
        return (
            "when the optimizer steps there is no gradient any more",
            "zero_grad() stands between backward() and step(); or step() stands before backward()",
        )
    if not any(any(o.rates) for o in stepping):
        return (
            f"the learning rate of {stepping[0].type_name} is 0",
            "a rate of 0 was given, or a schedule ends there",
        )
    largest = max(size for p in held for size in p.gradients if size is not None)
    return (
        (
            f"{stepping[0].type_name} steps at a rate of {max(stepping[0].rates):.3g} on gradients "
            f"of a norm up to {largest:.3g}, and no value changes"
        ),
        "updates too small for the precision of the weights, or values that are put back",
    )
