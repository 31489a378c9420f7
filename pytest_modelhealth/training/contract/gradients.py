"""The gradients of a step: where they come from, by which factor, and what was left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Finding, LossSlope, Stepped, SteppedParameter
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.contract.fault import broken, fault, listed, looks_for

# ---- where they come from ------------------------------------------------------------------------

_MIN_SLOPE = 1e-6
_LEAST = 1e-6
"""A gradient that is zero but for rounding stays below."""


@looks_for("gradient_path")
def _cut(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield that what is returned depends on parameters that get no gradient."""
    names, slope = step.unlearned
    if names and abs(slope) > _MIN_SLOPE:
        yield broken(
            check,
            f"the loss that the step returns depends on {len(names)} parameters that the optimizer "
            f"holds and that never get a gradient: {listed(names)}",
            "a part of the loss is added after backward(), as a number (.item()), or from a "
            "detached output",
            [name.rpartition(".")[0] for name in names],
            value=abs(slope),
            tensor=names[0].rpartition(".")[2],
            details=(f"moved along a random direction, the loss has a slope of {slope:.3g}",),
        )


def _if_most(subjects: Sequence[SteppedParameter], step: Stepped) -> Severity:
    """Fail where it is more than half of what gets a gradient: no expert, no skipped block."""
    reached = [p for p in step.parameters if any(p.added)]
    is_most = 2 * len(subjects) > len(reached) and all(p.trainable for p in subjects)
    return "fail" if is_most else "warn"


def _fading(step: Stepped) -> list[SteppedParameter]:
    """Return parameters that have a gradient in the first call only, though all calls step.

    Where others get their first one later, what runs is drawn. A generator may step in some calls.
    """
    is_drawn = any(any(p.added[1:]) and not p.added[0] for p in step.trained)
    if is_drawn or len(step.losses) < 3 or not all(all(o.steps) for o in step.optimizers):
        return []
    return [p for p in step.trained if (p.added[0] or 0.0) > _LEAST and not any(p.added[1:])]


fault(
    "gradient_path",
    lambda step: filter(attrgetter("erased"), step.parameters),
    "{names} has a gradient after the backward pass, and zeros in its place when the "
    "optimizer steps",
    "a mask on gradients that is the wrong way round, or a clip to zero",
    grade=_if_most,
    independent=False,
)
fault(
    "gradient_path",
    _fading,
    "{names} gets a gradient in the first call, and none in later ones",
    "what the first call computed is kept and used again, or a flag is not reset",
    grade=_if_most,
    independent=False,
)
fault(
    "gradient_path",
    lambda step: (p for p in step.parameters if p.is_zero and not p.trainable),
    "{names} is a matrix of zeros and frozen: what passes through it is zero for good",
    "adapters or gates that start at zero were frozen with the rest",
    independent=False,
)
fault(
    "gradient_path",
    lambda step: (p for p in step.trained if p.is_zero and set(p.added) == {0.0}),
    "{names} is a matrix of zeros whose gradient is zero in every call: it waits for "
    "another factor",
    "two factors of a product both start at zero; one of them has to start at random",
    grade=_if_most,
    independent=False,
)

# ---- by which factor -----------------------------------------------------------------------------

_DOUBTFUL = 1.5
_STEEP = 10.0
"""Above such a slope clipping the gradient to 1e-2 is usual."""
_UNSCALED = 1e-3
_EXACT = 0.01
_MOST_PASSES = 256
_MOST_OWN = 1000.0


@looks_for("gradient_factor")
def _other_factor(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield what the gradient is instead of the slope."""
    slope, limit = step.slope, settings["max_gradient_factor"]
    if slope is None or not slope.slope or not (cause := _why(slope)):
        return
    factor = slope.factor
    is_beyond = factor > limit.value or (0.0 < factor < 1.0 / limit.value and slope.slope < _STEEP)
    # as many times the slope, or such a share of it, as there were passes
    is_exact = factor > 0.0 and step.passes > 1
    is_many = is_exact and abs(factor - step.passes) < _EXACT * step.passes
    is_few = is_exact and abs(1.0 / factor - step.passes) < _EXACT * step.passes
    what = f"the gradient that the optimizer steps on is {factor:.4g} times the slope of the loss "
    what += "that the step returns"
    if factor < 0.0:
        what = "the optimizer climbs the loss that the step returns: its gradient is "
        what += f"{factor:.3g} times the slope"
    yield broken(
        check,
        what,
        cause,
        value=factor,
        limit=limit if is_beyond else None,
        severity="fail" if is_beyond or is_many or (is_few and _is_divided(slope)) else "warn",
        details=(
            (
                f"the gradient at the step has a norm of {slope.gradient:.4g}; along it the loss "
                f"that is returned has a slope of {slope.slope:.4g}"
            ),
        ),
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
        return "a flipped sign: -loss is differentiated, or a reward returned, not its negative"
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
        return (
            "gradients of more than this loss are added up: of an earlier call, of a second "
            "backward pass, of a term that is not returned; or a term is detached, or a scale "
            "never removed"
        )
    is_clipped = is_own or (slope.added or 0.0) > slope.gradient * (1.0 + _UNSCALED)
    is_clipped = is_clipped and not _is_divided(slope)
    if factor > 1.0 / _DOUBTFUL or (is_clipped and factor > _UNSCALED):
        return ""
    if is_clipped:
        return "it is clipped before scaler.unscale_, to far too little, or unscaled twice"
    return (
        "only a part of the loss is differentiated, or it is divided once too often, by the number "
        "of micro-batches or of samples, say"
    )


# ---- what was left -------------------------------------------------------------------------------

fault(
    "left_over_gradients",
    lambda step: filter(attrgetter("used_again"), step.parameters),
    "gradients that the optimizer has stepped on are still there when it steps again: {names}",
    "zero_grad() is missing, is called between backward() and step() only, outside of a closure, "
    "or for another optimizer; or step() is called twice, by the loop and by a scaler or a "
    "wrapper, say",
)
