"""The gradients of a step: where they come from, by which factor, and what was left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pytest_modelhealth.report import Finding, LossSlope, Stepped
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import parent
from pytest_modelhealth.training.contract import Broken, Table, listed, marked

_MIN_SLOPE = 1e-6
_LEAST = 1e-6
"""A gradient that is zero but for rounding stays below."""


def gradient_path(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield parameters that the returned loss depends on, and that get or keep no gradient."""
    names, slope = step.unlearned
    if names and abs(slope) > _MIN_SLOPE:
        yield broken(
            f"the loss that the step returns depends on {len(names)} parameters that the optimizer "
            f"holds and that never get a gradient: {listed(names)}",
            "a part of the loss is added after backward(), as a number, or from what is detached",
            [parent(name) for name in names],
            value=abs(slope),
            tensor=names[0].rpartition(".")[2],
            details=(f"moved along a random direction, the loss has a slope of {slope:.3g}",),
        )
    late = [p for p in step.parameters if "late" in p.traits]
    if late or step.clips_late:  # they may be cleared since
        late = late or [p for p in step.trained if any(p.gradients)]
        yield broken(
            f"the gradient of {listed(late)} is written to after the optimizer stepped on it, "
            "which changes nothing",
            "gradients are clipped or scaled after optimizer.step(): do it before",
            late,
        )
    reached = [p for p in step.parameters if any(p.added)]
    # where others get their first gradient late, what runs is drawn; a generator skips calls
    is_drawn = any(any(p.added[1:]) and not p.added[0] for p in step.trained)
    all_step = len(step.losses) > 2 and all(all(o.steps) for o in step.optimizers)
    first = step.trained if all_step and not is_drawn else ()
    for parameters, what, cause in (
        (
            [p for p in step.parameters if "erased" in p.traits],
            "has a gradient after the backward pass, and zeros when the optimizer steps",
            "a mask on gradients that is the wrong way round, or a clip to zero",
        ),
        (
            [p for p in first if (p.added[0] or 0.0) > _LEAST and not any(p.added[1:])],
            "gets a gradient in the first call, and none in later ones",
            "what the first call computed is kept and used again, or a flag is not reset",
        ),
        (
            [p for p in step.parameters if "zero" in p.traits and not p.trainable],
            "is a matrix of zeros and frozen: what passes through it is zero for good",
            "adapters or gates that start at zero were frozen with the rest",
        ),
        (
            [p for p in step.trained if "zero" in p.traits and set(p.added) == {0.0}],
            "is a matrix of zeros whose gradient is zero in every call",
            "two factors of a product both start at zero; one of them has to start at random",
        ),
    ):
        # of less than half of what gets a gradient: an expert, a skipped block
        is_few = all(p.trainable for p in parameters) and 2 * len(parameters) <= len(reached)
        if parameters:
            grade = "warn" if is_few else "fail"
            what = f"{listed(parameters)} {what}"
            yield broken(what, cause, parameters, severity=grade, independent=False)


_DOUBTFUL = 1.5
_STEEP = 10.0
"""Above such a slope clipping the gradient to 1e-2 is usual."""
_UNSCALED = 1e-3
_EXACT = 0.01
_MOST_PASSES = 256
_MOST_OWN = 1000.0


def gradient_factor(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield what the gradient is instead of the slope."""
    slope, limit = step.slope, settings["max_gradient_factor"]
    if slope is None:
        return
    if not slope.slope:
        yield broken(
            "the loss that the step returns does not change along the gradient that the optimizer "
            f"steps on, whose norm is {slope.gradient:.3g}",
            "another number is returned, or the model is compared with itself: a reference or old "
            "probabilities that are its own, or made anew",
            severity="warn",
        )
        return
    is_hidden = slope.added is not None and slope.added > slope.gradient * (1.0 + _UNSCALED)
    if is_hidden and abs(slope.factor - 1.0) > _EXACT and step.passes > 1:
        # clipped since: by so many times too large a gradient the clip takes too much
        shown = replace(slope, gradient=slope.added or 0.0)
        slope = shown if abs(shown.factor - step.passes) < _EXACT * step.passes else slope
    added = slope.added or 0.0
    times = max(step.clips, default=0.0) / added if added else 0.0
    if slope.scale > 1.0 and abs(times - slope.scale) < _EXACT * slope.scale:
        yield broken(
            f"what is clipped has a loss scale of {times:.0f} in it still: its norm is "
            f"{max(step.clips):.4g}, that of the gradient {added:.4g}",
            "call scaler.unscale_(optimizer) before clip_grad_norm_",
            value=times,
        )
        return
    if not (cause := _why(slope)):
        return
    if step.wasted:
        cause = (
            f"{step.wasted} of {step.passes} backward passes are cleared before any optimizer "
            "steps on them: zero_grad() stands between two losses"
        )
    factor = slope.factor
    is_beyond = factor > limit.value or (0.0 < factor < 1.0 / limit.value and slope.slope < _STEEP)
    # as many times the slope, or such a share of it, as there were passes
    is_exact = factor > 0.0 and step.passes > 1
    is_many = is_exact and abs(factor - step.passes) < _EXACT * step.passes
    is_few = is_exact and abs(1.0 / factor - step.passes) < _EXACT * step.passes
    who = "that the optimizer steps on" if slope is step.slope else "that is clipped"
    what = f"the gradient {who} is {factor:.4g} times the slope of the loss that the step returns"
    if factor < 0.0 and step.passes < 2:  # of several losses another may outweigh the one returned
        what = "the optimizer climbs the loss that the step returns: its gradient is "
        what += f"{factor:.3g} times the slope"
    yield broken(
        what,
        cause,
        value=factor,
        limit=limit if is_beyond else None,
        severity="fail" if is_beyond or is_many or (is_few and _is_divided(slope)) else "warn",
        details=(f"its norm is {slope.gradient:.4g}, the slope along it {slope.slope:.4g}",),
        independent=True,
    )


def _is_divided(slope: LossSlope) -> bool:
    """Whether what backward passes left is the slope, and was divided by a whole number since."""
    if slope.added is None or abs(slope.added / slope.slope - 1.0) > 2.0 * _EXACT:
        return False
    times = slope.added / slope.gradient
    return _DOUBTFUL < times < _MOST_PASSES and abs(times - round(times)) < 1e-4 * times


def _why(slope: LossSlope) -> str:
    """Return the likely cause of another factor than 1; ``""`` where it is one, or meant so."""
    factor = slope.factor
    if factor < 0.0:
        return "one of several losses is returned, a reward, not its negative, or a flipped sign"
    is_own = slope.added is None  # a sign, a projection, noise: another gradient on purpose
    if factor > (_MOST_OWN if is_own else _DOUBTFUL):
        power = round(math.log2(factor))
        if factor > 1000.0 and abs(math.log2(factor) - power) < 0.01:
            return (
                f"a loss scale of {2**power} that is never removed: scaler.step(optimizer) in "
                "place of optimizer.step(), or scaler.unscale_ first"
            )
        if factor < 1000.0 and abs(factor - round(factor)) < _EXACT * factor:
            return (
                f"{round(factor)} micro-batches, or a sum over {round(factor)} samples, that are "
                "not divided by their number; or a backward pass that runs so often"
            )
        return "gradients of an earlier call, or of terms that are not returned, are added up"
    # where a scaler is, the forward is likely to be in half precision, and its slope is rough
    is_clipped = is_own or slope.scale > 1.0
    is_clipped |= (slope.added or 0.0) > slope.gradient * (1.0 + _UNSCALED)
    is_clipped = is_clipped and not _is_divided(slope)
    if factor > 1.0 / _DOUBTFUL or (is_clipped and factor > _UNSCALED):
        return ""
    if is_clipped:
        return "it is clipped before scaler.unscale_, to far too little, or unscaled twice"
    return "only a part of the loss is differentiated, or it is divided once too often"


_LEFT_OVER: Table = {
    "piled": (
        "another optimizer has stepped on a part of the gradient of {}, and more was added since",
        "the gradients of one loss are not cleared before the backward pass of another",
        "warn",
    ),
    "between": (
        "the gradient of {} is written to between two backward passes that add up",
        "clipping or scaling in the loop over micro-batches, where it belongs after it",
        "warn",
    ),
    "used_again": (
        "gradients that the optimizer has stepped on are still there when it steps again: {}",
        "zero_grad() is missing, outside of a closure or another's; or step() is called twice",
        "fail",
    ),
}


def left_over_gradients(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield the gradients on which an optimizer steps twice, or of which a part was used before."""
    yield from marked(step.parameters, _LEFT_OVER, broken)
