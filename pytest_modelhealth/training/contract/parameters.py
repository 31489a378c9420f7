"""Checks of which parameters a step trains, and of how they move."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.report import Stepped, SteppedParameter, Violation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.contract.step_check import StepCheck, listed


class TrainedParameters(StepCheck):
    """What should learn is in the optimizer."""

    name = "trained_parameters"
    summary = "The optimizer holds every trainable parameter that gets a gradient."
    rank = 60

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Violation]:
        """Yield what is not held, then what is held in vain."""
        moves = any(any(p.changes) for p in stepped.parameters)
        if stepped.parameters and not moves and not any(p.held for p in stepped.parameters):
            held = sum(optimizer.holds for optimizer in stepped.optimizers)
            yield self.broken(
                f"{stepped.optimizers[0].type_name} holds {held} tensors, and none of them is one "
                f"of the model's {len(stepped.parameters)} parameters: nothing of it is in an "
                "optimizer",
                "the optimizer was made from another model or copy, before parameters were "
                "replaced, or from a generator that was used up: make it after the model is "
                "complete, from list(model.parameters())",
            )
            return
        if stepped.strays:
            yield self.broken(
                f"{len(stepped.strays)} parameters get a gradient, and no optimizer made before "
                f"knows of them: {listed(stepped.strays)}",
                "modules in a plain list or dictionary are not registered (use nn.ModuleList, "
                "nn.ModuleDict), or parameters are made, or replaced, in the forward or the step: "
                "make the optimizer after them, and write into them in place",
                layer=stepped.strays[0].rpartition(".")[0],
                value=float(len(stepped.strays)),
            )
        missing = [p for p in stepped.parameters if _is_missing(p)]
        if missing:
            yield self._missing(missing, stepped)
        unreached = [p for p in stepped.parameters if _is_unreached(p, stepped)]
        if unreached:
            yield self.broken(
                f"{len(unreached)} parameters that the optimizer holds never get a gradient: their "
                f"layers only run with gradients off: {listed([p.name for p in unreached])}",
                "torch.no_grad() or inference_mode() is around a part that should learn; what "
                "should not is frozen by requires_grad_(False) and left out of the optimizer",
                found=unreached,
                value=float(len(unreached)),
            )

    def _missing(self, missing: list[SteppedParameter], stepped: Stepped) -> Violation:
        names = [p.name for p in missing]
        foreign = sum(optimizer.foreign for optimizer in stepped.optimizers)
        total = sum(p.trainable for p in stepped.parameters)
        return self.broken(
            f"{len(missing)} of {total} trainable parameters get a gradient and are "
            f"{'in no optimizer' if stepped.optimizers else 'not moved by the step'}, so that they "
            f"never learn: {listed(names)}",
            "they were made or replaced after the optimizer was, which holds the old ones"
            if foreign
            else "the parameter groups leave them out, or they were made after the optimizer; "
            "what should not learn is frozen by requires_grad_(False)",
            found=missing,
            value=float(len(missing)),
        )


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

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield why nothing moves, or what does not."""
        if not any(p.trainable for p in stepped.parameters):
            yield self.broken(
                "no parameter of the model requires a gradient: there is nothing to train",
                "requires_grad_(False) left over from another stage, or a model in inference mode",
            )
        elif not any(any(p.changes) for p in stepped.parameters if p.trainable):
            yield self._nothing_moves(stepped)
        else:
            yield from self._fallen(stepped)
            yield from self._standing(stepped)
            yield from self._idle_optimizers(stepped)
            yield from self._put_back(stepped)

    def _nothing_moves(self, stepped: Stepped) -> Finding:
        calls = len(stepped.losses)
        held = [p for p in stepped.parameters if p.trainable and p.held]
        added = [size for p in held for size in p.added if size is not None]
        doubt = _doubt(stepped, held, added)
        if doubt:
            return self.untold(doubt)
        why, cause = _why_nothing(stepped, held, added)
        return self.broken(f"no parameter moves in {calls} calls of the step: {why}", cause)

    def _fallen(self, stepped: Stepped) -> Iterator[Finding]:
        for optimizer in stepped.optimizers:
            rates = [r for r, n in zip(optimizer.rates, optimizer.steps, strict=True) if n]
            if len(rates) > 1 and rates[0] > 0.0 and not any(rates[1:]):
                yield self.broken(
                    f"the learning rate of {optimizer.type_name} falls from {rates[0]:.3g} to "
                    "exactly 0 after the first call, and stays there",
                    "the schedule is stepped each batch although it counts epochs, is given "
                    "too few steps, or divides where it should multiply",
                )

    def _idle_optimizers(self, stepped: Stepped) -> Iterator[Finding]:
        for number, optimizer in enumerate(stepped.optimizers, 1):
            if not optimizer.given:
                continue
            which = f"{optimizer.type_name}, optimizer {number} of {len(stepped.optimizers)},"
            others = [o for o in stepped.optimizers if "anew" in o.traits]
            if not any(optimizer.steps) and others:
                yield self.broken(
                    f"{optimizer.type_name}, which was given, never steps; "
                    f"another {others[0].type_name} that the step has itself does",
                    "an optimizer is made anew in each step, and forgets its momentum, or "
                    "the step reads another one from around it",
                )
            elif any(optimizer.steps) and "reached" not in optimizer.traits and optimizer.holds:
                yield self.broken(
                    f"{which} steps, and none of the {optimizer.holds} parameters that it holds "
                    "ever gets a gradient",
                    "what its loss is computed from is detached: .detach(), no_grad, .item() "
                    "or numpy between this part and the loss",
                    layer=optimizer.layer,
                )

    def _put_back(self, stepped: Stepped) -> Iterator[Finding]:
        mostly = [p for p in stepped.parameters if _is_undone(p)]
        if 2 * len(mostly) > sum(any(p.updates) for p in stepped.parameters):
            yield self.broken(
                f"of what the optimizer changes, less than {_UNDONE:.0%} is left when the call is "
                f"over: {listed([p.name for p in mostly])}",
                "weights are copied back after optimizer.step(): a moving average that is "
                "copied into the model in place of the other way round",
                found=mostly[:1],
                value=_UNDONE,
                warns=True,
            )
        back = [p for p in stepped.parameters if any(p.updates) and not any(p.changes)]
        if back:
            yield self.broken(
                f"{len(back)} parameters that the optimizer changes are what they were when the "
                f"call is over: {listed([p.name for p in back])}",
                "weights are rounded, reset or written over after optimizer.step()",
                found=back,
            )

    def _standing(self, stepped: Stepped) -> Iterator[Finding]:
        still = [p for p in stepped.parameters if _stands_by_its_rate(p)]
        if still:
            yield self.broken(
                f"{len(still)} parameters get a gradient and do not move: the learning rate of "
                f"their group is 0: {listed([p.name for p in still])}",
                "a schedule, or a group without its rate; what should not learn is frozen "
                "by requires_grad_(False)",
                found=still,
                warns=True,
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
        cause = "loss.backward() is missing, or the loss is detached (.item(), no_grad), or made "
        cause += "anew by torch.tensor(loss)"
        return "no backward pass reaches a parameter that an optimizer holds", cause
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
        cause = "optimizer.step() is missing, waits for what never comes, or another's is called"
        if not stepped.optimizers:
            cause = "optimizer.step() is missing, or p = p - lr * p.grad is not in place"
        return "no optimizer steps, although there are gradients", cause
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
    why = f"{stepping[0].type_name} steps at a rate of {max(stepping[0].rates):.3g} on gradients "
    why += f"of a norm up to {largest:.3g}, and no value changes"
    return why, "updates too small for the precision of the weights, or values that are put back"
