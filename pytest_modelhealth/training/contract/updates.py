"""What a step does to the weights: descent, size, precision, and whether it can learn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from operator import attrgetter

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Stepped, SteppedOptimizer, SteppedParameter
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.training.contract.fault import broken, fault, looks_for, untold

_UP = 0.1
_OUTSIDE = 0.3


@looks_for("update_direction")
def _climbing(check: Listed, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield the optimizers that climb."""
    if stepped.sign < 0 and stepped.slope is not None and stepped.slope.factor > 0.0:
        yield broken(
            check,
            "the loss that the step returns cannot be positive, and is minimised: it falls "
            f"without bound (from {stepped.losses[0]:.4g} to {stepped.losses[-1]:.4g})",
            "the minus of a negative log-likelihood, or of a similarity, is missing",
            value=-1.0,
        )
    losses = [loss for loss in stepped.losses if loss is not None]
    rises = len(losses) > 1 and losses[-1] > losses[0]
    climbs = max(stepped.climbs or 0.0, _OUTSIDE)
    rise = f"the loss rises from {losses[0]:.4g} to {losses[-1]:.4g}" if rises else ""
    if climbs > _OUTSIDE and stepped.optimizers:
        yield broken(
            check,
            "beside the optimizer something moves the weights up their gradient (cosine "
            f"{climbs:.2f}), and does not take it back",
            "a perturbation, as of sharpness-aware training, that is not undone before the step",
            value=climbs,
        )
    elif climbs > _OUTSIDE and rises:
        yield broken(
            check,
            f"the step moves the weights up their gradient (cosine {climbs:.2f}), and {rise}",
            "the update is added where it should be subtracted: alpha=-lr in p.add_",
            value=climbs,
        )
    for optimizer in stepped.optimizers if rises else ():
        cosine = optimizer.direction or 0.0
        what = f"{optimizer.type_name} climbs its own gradient (cosine {cosine:.2f}), and {rise}"
        if cosine > _UP and "maximizes" in optimizer.traits and not stepped.is_loss:
            yield untold(check, f"{what}: it is told to maximize: right for a reward, not a loss")
        elif cosine > _UP:
            cause = "a negative learning rate, or an update that is added, not subtracted"
            yield broken(check, what, cause, value=cosine)


_EPS = 1e-3
_DROWNED = 1000.0
_DOUBTFUL = 10.0


@looks_for("update_size")
def _large(check: Listed, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
    limit = settings["max_step_ratio"]
    if any("closure" in optimizer.traits for optimizer in stepped.optimizers):
        return
    matrices = [p for p in stepped.parameters if p.dimensions > 1 and any(p.updates)]
    for call in range(len(stepped.losses)):
        ratios = [p.updates[call] for p in matrices]
        if not ratios or statistics.median(ratios) <= limit.value or _falls(stepped):
            continue
        worst = max(matrices, key=lambda p: p.updates[call])
        yield broken(
            check,
            f"call {call + 1} changes weights by {statistics.median(ratios):.2g} of their "
            f"norm, the median over {len(ratios)} matrices; {worst.name} by "
            f"{worst.updates[call]:.2g}",
            "the learning rate is too large for these weights, or a scale of the "
            "gradient is never removed",
            [worst.layer, *(p.layer for p in matrices)],
            tensor=worst.own,
            value=statistics.median(ratios),
            limit=limit,
        )
        return


def _falls(stepped: Stepped) -> bool:
    """Whether the loss is lower after the calls: small weights grow by large steps at first."""
    first, last = stepped.losses[0], stepped.losses[-1]
    return first is not None and last is not None and last < first


def _is_drowned(optimizer: SteppedOptimizer, times: float) -> bool:
    eps, moment = optimizer.eps, optimizer.second_moment
    return eps is not None and bool(moment) and eps > _EPS and eps > times * (moment or 0.0)


_RELATIVE = 1e-7
"""float32 rounds at 6e-8."""
_GRADIENT = 1e-6
_MOST = 0.5


@looks_for("update_precision")
def _rounded_away(check: Listed, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield what is rounded away."""
    limit = settings["max_swallowed"]
    held = [p for p in stepped.parameters if p.trainable and p.held and _is_asked(p)]
    half = [p for p in held if p.dtype in _HALF and p.dimensions > 1]
    rising = any(o.rates and o.rates[-1] > o.rates[0] for o in stepped.optimizers)
    stepping = any(any(o.rates) and any(o.steps) for o in stepped.optimizers)
    if stepped.optimizers and not stepping:
        return
    if half:
        worst = max(half, key=lambda p: p.swallowed)
        share = sum(p.swallowed for p in half) / len(half)
        if share > _MOST and not rising:
            yield broken(
                check,
                f"{share:.0%} of the {worst.dtype} weights that have a gradient stay the same, "
                f"bit for bit: their updates are below its precision ({worst.name})",
                "weights in half precision at a small learning rate: keep them in "
                "float32 and compute under torch.autocast, or keep a float32 copy",
                [worst.layer],
                tensor=worst.own,
                value=share,
                limit=limit,
                severity="fail" if share > limit.value else "warn",
            )
        return
    if not rising:
        yield from _swallowed(check, held, limit)
    matrices = [p for p in held if p.dimensions > 1]
    largest = max((max(p.updates, default=0.0) for p in matrices), default=1.0)
    if matrices and 0.0 < largest < _RELATIVE and not rising:
        worst = max(matrices, key=lambda p: max(p.updates))
        yield broken(
            check,
            f"the largest change of any matrix in a call is {largest:.1g} of its norm "
            f"({worst.name}), although its gradient is not zero",
            "the learning rate is far too small, the gradient is clipped to next to "
            "nothing, or eps is too large",
            [worst.layer],
            tensor=worst.own,
            value=largest,
        )


def _swallowed(check: Listed, held: list[SteppedParameter], limit: Limit) -> Iterator[Finding]:
    """Yield matrices in full precision of which next to nothing moves while others do."""
    matrices = [p for p in held if p.dimensions > 1 and p.dtype not in _HALF]
    still = [p for p in matrices if p.swallowed > limit.value and any(p.updates)]
    moving = any(max(p.updates) > _MOVING for p in matrices if p.updates)
    if not still or not moving:
        return
    yield broken(
        check,
        f"{still[0].swallowed:.0%} of the weights of {still[0].name} that have a gradient stay "
        f"the same, bit for bit, while others move ({len(still)} such matrices)",
        "the learning rate of its group is below the precision of the weights: a decay "
        "by layer that is applied to each parameter, say",
        [p.layer for p in still],
        tensor=still[0].own,
        value=still[0].swallowed,
        limit=limit,
        independent=False,
    )


_MOVING = 1e-4
_HALF = ("bfloat16", "float16")


def _is_asked(parameter: SteppedParameter) -> bool:
    return any(size > _GRADIENT for size in parameter.added if size is not None)


_ENOUGH = 0.5


@looks_for("overfitting")
def _does_not_learn(check: Listed, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield that it does not fall, or too little to tell."""
    if stepped.overfit is None:
        return
    limit = settings["min_loss_fall"]
    first, best, call = stepped.overfit
    fall = (first - best) / abs(first) if first else 0.0
    what = (
        f"on one batch the loss falls from {first:.4g} to {best:.4g} at best (call {call}), by "
        f"{fall:.1%}"
    )
    if not fall >= limit.value:
        yield broken(
            check,
            what,
            "the model cannot tell the samples apart, the target has nothing to do with "
            "them, or the rate is far off",
            value=fall,
            limit=limit,
        )
    elif fall < _ENOUGH:
        yield untold(check, f"{what}; give it more calls, or a larger rate")


fault(
    "update_size",
    lambda step: step.optimizers,
    "the weight decay of {one.type_name} takes {value:.0%} of the weights in each step",
    "weight_decay is far too large, or meant for another learning rate",
    each=True,
    measure=attrgetter("decay"),
    limit="max_decay",
)
fault(
    "update_size",
    lambda step: (o for o in step.optimizers if _is_drowned(o, _DOUBTFUL)),
    "the eps of {one.type_name} is {one.eps:g}, and the root of the second moment beside "
    "it {one.second_moment:.2g}: it sets the size of every update, which then is next to "
    "nothing",
    "eps was given in the place of another argument, or meant for another optimizer: 1e-8 "
    "is the default",
    each=True,
    measure=attrgetter("eps"),
    grade=lambda some, _: "fail" if _is_drowned(some[0], _DROWNED) else "warn",
)
