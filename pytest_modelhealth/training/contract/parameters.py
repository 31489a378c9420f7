"""Which parameters a step trains, and how they move: whether at all, which way, and how far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from pytest_modelhealth.report import Finding, Stepped
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import parent
from pytest_modelhealth.training.catalogue import STEP
from pytest_modelhealth.training.contract import Broken, listed


def trained_parameters(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield what gets a gradient and is in no optimizer, and the other way round."""
    if step.parameters and not any(p.held or any(p.changes) for p in step.parameters):
        yield broken(
            f"{step.optimizers[0].type_name} holds {sum(o.holds for o in step.optimizers)} "
            f"tensors, and none of them is one of the model's {len(step.parameters)} parameters",
            "the optimizer was made from another model or copy, before parameters were replaced, "
            "or from a generator that was used up: make it of list(model.parameters()), last",
        )
        return
    if step.strays:
        yield broken(
            f"{len(step.strays)} parameters get a gradient, and no optimizer made before knows of "
            f"them: {listed(step.strays)}",
            "modules in a plain list or dictionary are not registered (use nn.ModuleList, "
            "nn.ModuleDict), or parameters are made in the forward or the step: write into them",
            [parent(step.strays[0])],
            value=float(len(step.strays)),
        )
    if step.unheld:
        yield broken(
            f"{len(step.unheld)} parameters outside of the model get a gradient in each call, and "
            f"no optimizer holds them: {listed(step.unheld)}",
            "a loss, a head or a second network has parameters: give them to an optimizer, or "
            "freeze them by requires_grad_(False)",
            severity="warn",
        )
    trainable = [p for p in step.parameters if p.trainable]
    missing = [p for p in trainable if any(p.added) and not p.held and not any(p.changes)]
    if missing:
        where = "in no optimizer" if step.optimizers else "not moved by the step"
        yield broken(
            f"{len(missing)} of {len(trainable)} trainable parameters get a gradient and are "
            f"{where}, so that they never learn: {listed(missing)}",
            "the groups leave them out, or they were made or replaced after the optimizer was; "
            "what should not learn is frozen by requires_grad_(False)",
            missing,
        )
    off = {mode.layer for mode in step.modes if set(mode.training) == {None}}
    idle = [p for p in step.trained if set(p.added) == {None} and not any(p.changes)]
    if cut := [p for p in idle if p.layer in off]:
        yield broken(
            f"{len(cut)} parameters that the optimizer holds never get a gradient: their layers "
            f"only run with gradients off: {listed(cut)}",
            "torch.no_grad() is around a part that should learn, or a reentrant checkpoint whose "
            "input needs no gradient: input.requires_grad_(), or use_reentrant=False",
            cut,
        )


_STEEPEST, _TINY = 0.1, 0.01


def parameter_updates(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield why nothing moves, or else what steps in vain."""
    if not any(any(p.changes) for p in step.parameters if p.trainable):
        yield _nothing_moves(step, broken)
        return
    for optimizer in step.optimizers:
        name, rates, start = optimizer.type_name, optimizer.rates, optimizer.initial_rate or 0.0
        if rates and 0.0 < rates[0] <= _TINY * start and rates[-1] <= rates[0]:
            yield broken(
                f"{name} steps with a rate of {rates[0]:.3g}, where its schedule starts from "
                f"{start:.3g}, and the rate does not rise",
                "a schedule that multiplies, as LambdaLR, is given the rate in place of a factor",
                severity="warn",
            )
        if len(rates) > 1 and rates[0] > 0.0 and not any(rates[1:]):
            yield broken(
                f"the learning rate of {name} falls from {rates[0]:.3g} to exactly 0 after the "
                "first call, and stays there",
                "the schedule is stepped each batch though it counts epochs, or has too few steps",
            )
        if len(rates) > 1 and 0.0 < rates[-1] <= _STEEPEST * rates[0]:
            yield broken(
                f"the learning rate of {name} falls from {rates[0]:.3g} to {rates[-1]:.3g} in "
                f"{len(rates)} calls",
                "the schedule is stepped each batch though it counts epochs, or several times",
                severity="warn",
            )
        others = (other for other in step.optimizers if "anew" in other.traits)
        if "unused" in optimizer.traits and not any("anew" in o.traits for o in step.optimizers):
            yield broken(
                f"{name}, which holds {optimizer.first}, never steps, and gradients of what it "
                "holds are cleared in each call",
                "step() is missing for this one of several optimizers",
                [parent(optimizer.first)],
            )
        if optimizer.given and not any(optimizer.steps) and any(others):
            yield broken(
                f"{name}, which was given, never steps; another that the step has itself does",
                "an optimizer is made anew in each step, or read from around it",
            )
        if "unreached" in optimizer.traits:
            yield broken(
                f"{name}, which holds {optimizer.first}, steps, and none of the {optimizer.holds} "
                "parameters that it holds ever gets a gradient",
                "what its loss is computed from is detached: .detach(), no_grad, .item() or numpy",
                [parent(optimizer.first)],
            )
    yield from _frozen_that_move(step, broken)
    undone = [p for p in step.parameters if any(p.updates) and not any(p.changes)]
    if undone:
        yield broken(
            f"{len(undone)} parameters that the optimizer changes are as before: {listed(undone)}",
            "weights are rounded, reset or written over after optimizer.step()",
            undone,
        )


def _frozen_that_move(step: Stepped, broken: Broken) -> Iterator[Finding]:
    """Yield frozen parameters that move, or will; a gradient that is set by hand trains them."""
    frozen = [p for p in step.parameters if not p.trainable]
    thawed = [p for p in frozen if any(p.updates) and any(p.added)]
    idle = [p for p in frozen if not any(p.added) and not any(p.gradients)]
    if thawed:
        yield broken(
            f"the step sets requires_grad of {len(thawed)} frozen parameters and trains them: "
            f"{listed(thawed)}",
            "a loop over all parameters thaws them, or a phase does: freeze after it",
            thawed,
            severity="warn",
        )
    if moved := [p for p in idle if any(p.updates) or ("kept" in p.traits and p.held)]:
        yield broken(
            f"{len(moved)} frozen parameters go on moving, without a gradient or with one of "
            f"zeros: {listed(moved)}",
            "weight decay or momentum goes on: set .grad to None as you freeze, or leave them out",
            moved,
        )


def _nothing_moves(step: Stepped, broken: Broken) -> Finding:
    """Return why nothing moves, or why that cannot be told."""
    for optimizer in step.optimizers:
        is_at_zero = any(optimizer.steps) and not any(optimizer.rates)
        if optimizer.initial_rate and is_at_zero and not step.advances:
            return STEP["parameter_updates"].inconclusive(
                "",
                f"the learning rate of {optimizer.type_name} is 0 by its schedule, whose start is "
                f"{optimizer.initial_rate:.3g}: advance it first, or in the step",
            )
    why, cause = _why_still(step)
    return broken(f"no parameter moves in {len(step.losses)} calls of the step: {why}", cause)


def _why_still(step: Stepped) -> tuple[str, str]:
    """Return why nothing moves, and the likely cause: the first that applies."""
    added = [size for p in step.trained for size in p.added if size is not None]
    stepping = [optimizer for optimizer in step.optimizers if any(optimizer.steps)]
    name, rates = (stepping[0].type_name, stepping[0].rates) if stepping else ("", ())
    reasons = (
        (
            not any(p.trainable for p in step.parameters),
            "none of the model requires a gradient",
            "requires_grad_(False) left over from another stage, or a model in inference mode",
        ),
        (
            not added,
            "no backward pass reaches a parameter that an optimizer holds",
            "loss.backward() is missing, or the loss is detached (.item(), no_grad), or made anew",
        ),
        (
            not any(added),
            "every gradient is exactly zero",
            "the loss is multiplied by zero or masked out whole, or all of the model is saturated",
        ),
        (
            not all(map(math.isfinite, added)),
            "the gradients are not finite in any call, so that a scaler skips every step",
            "a loss scale that is set anew in each step, or NaN in the loss",
        ),
        (
            not stepping,
            "no optimizer steps, although there are gradients",
            "optimizer.step() is missing, or is another's, or p = p - lr * p.grad is not in place",
        ),
        (
            all(optimizer.foreign == optimizer.holds for optimizer in stepping),
            f"the {name} that steps holds none of the model's parameters",
            "another optimizer than the one given is stepped: of another model, or another run",
        ),
        (
            not any(size for p in step.trained for size in p.gradients),
            "when the optimizer steps there is no gradient any more",
            "zero_grad() stands between backward() and step(); or step() stands before backward()",
        ),
        (
            True,
            f"{name} steps at a rate of {max(rates, default=0.0):.3g}, and no value changes",
            "a rate too small for the precision of the weights, or values that are put back",
        ),
    )
    return next((why, cause) for applies, why, cause in reasons if applies)


_UP = 0.1
_OUTSIDE = 0.3


def update_direction(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield what climbs."""
    losses = [loss for loss in step.losses if loss is not None]
    if step.sign < 0 and step.slope is not None and step.slope.factor > 0.0:
        yield broken(
            "the loss that the step returns cannot be positive, and is minimised: it falls "
            f"without bound (from {losses[0]:.4g} to {losses[-1]:.4g})",
            "the minus of a negative log-likelihood, or of a similarity, is missing",
            value=-1.0,
        )
    rises = len(losses) > 1 and losses[-1] > losses[0]
    outside = step.climbs or 0.0
    if outside > _OUTSIDE and (step.optimizers or rises):
        yield broken(
            f"the step moves the weights up their gradient (cosine {outside:.2f}), beside any "
            "optimizer",
            "an update is added where it should be subtracted (alpha=-lr in p.add_), or a "
            "perturbation, as of sharpness-aware training, is not undone before the step",
            value=outside,
        )
    for optimizer in step.optimizers if rises else ():
        up = optimizer.direction or 0.0
        what = f"{optimizer.type_name} climbs its own gradient (cosine {up:.2f}), and the loss "
        what += f"rises from {losses[0]:.4g} to {losses[-1]:.4g}"
        if up > _UP and "maximizes" in optimizer.traits and not step.is_loss:
            why = f"{what}: it is told to maximize: right for a reward, not a loss"
            yield STEP["update_direction"].inconclusive("", why)
        elif up > _UP:
            cause = "a negative learning rate, or an update that is added, not subtracted"
            yield broken(what, cause, value=up)


def update_size(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield the first call that changes weights by more than their size, and decay that does."""
    for call, loss in enumerate(step.losses):
        sound = [p for p in step.trained if math.isfinite(p.added[call] or 0.0)]
        spoilt = [p for p in sound if not math.isfinite(p.updates[call])]
        if spoilt and len(sound) == len(step.trained) and math.isfinite(loss or 0.0):
            yield broken(
                f"the optimizer writes NaN or infinity into {listed(spoilt)} in call {call + 1}, "
                "though the loss and all gradients are finite",
                "it divides by zero (eps=0), or its own state is not finite",
                spoilt,
            )
            return
    limit = settings["max_step_ratio"]
    matrices = [p for p in step.parameters if p.dimensions > 1 and any(p.updates)]
    losses = [loss for loss in step.losses if loss is not None]
    falls = len(losses) > 1 and losses[-1] < losses[0]  # small weights grow by large steps at first
    has_closure = any("closure" in optimizer.traits for optimizer in step.optimizers)
    for call in range(len(step.losses) if matrices and not (falls or has_closure) else 0):
        median = statistics.median(p.updates[call] for p in matrices)
        if median > limit.value:
            worst = max(matrices, key=lambda p: p.updates[call])
            yield broken(
                f"call {call + 1} changes weights by {median:.2g} of their norm, the median over "
                f"{len(matrices)} matrices; {worst.name} by {worst.updates[call]:.2g}",
                "the learning rate is too large for these weights, or a scale is never removed",
                [worst, *matrices],
                value=median,
                limit=limit,
            )
            break
    limit = settings["max_decay"]
    for optimizer in step.optimizers:
        if optimizer.decay > limit.value:
            yield broken(
                f"the weight decay of {optimizer.type_name} takes {optimizer.decay:.0%} of the "
                "weights in each step",
                "weight_decay is far too large, or meant for another learning rate",
                value=optimizer.decay,
                limit=limit,
            )


_MOST = 0.5


def update_precision(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield the weights in half precision whose updates are rounded away."""
    limit = settings["max_swallowed"]
    kinds = ("bfloat16", "float16")
    half = [p for p in step.trained if p.dtype in kinds and p.dimensions > 1 and any(p.added)]
    rates = [optimizer.rates for optimizer in step.optimizers if optimizer.rates]
    warms_up = any(each[-1] > each[0] for each in rates)
    if not half or warms_up or (step.optimizers and not any(map(any, rates))):
        return
    worst = max(half, key=lambda p: p.swallowed)
    share = sum(p.swallowed for p in half) / len(half)
    if share > _MOST:
        yield broken(
            f"{share:.0%} of the {worst.dtype} weights that have a gradient stay the same, bit "
            f"for bit: their updates are below its precision ({worst.name})",
            "keep weights in float32 and compute under torch.autocast, or keep a float32 copy",
            [worst],
            value=share,
            limit=limit,
            severity="fail" if share > limit.value else "warn",
        )


_ENOUGH = 0.5


def overfitting(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield that the loss does not fall when asked to, or too little to tell."""
    if step.overfit is None:
        return
    limit = settings["min_loss_fall"]
    first, best, call = step.overfit
    fall = (first - best) / abs(first) if first else 0.0
    what = (
        f"on one batch the loss falls from {first:.4g} to {best:.4g} (call {call}), by {fall:.1%}"
    )
    if not fall >= limit.value:
        yield broken(
            what,
            "the model cannot tell the samples apart, or the target, or the rate is far off",
            value=fall,
            limit=limit,
        )
    elif fall < _ENOUGH:
        why = f"{what}; give it more calls, or a larger rate"
        yield STEP["overfitting"].inconclusive("", why)
