"""The optimizer descends the loss that the step returns: its gradient is the slope of that loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import LossSlope, Observation, Stepped
    from pytest_modelhealth.settings import Settings

_DOUBTFUL = 1.5
_STEEP = 10.0
"""Above such a slope clipping the gradient to 1e-2 is usual."""
_UNSCALED = 1e-3
_EXACT = 0.01
_MOST_PASSES = 256
_MOST_OWN = 1000.0


class GradientFactor(StepCheck):
    """How the gradient at the optimizer's step lies to the slope of the loss that is returned."""

    name = "gradient_factor"
    summary = "The gradient that the optimizer steps on is the slope of the loss that is returned."
    rank = 62
    role = "parameter_gradients"
    definition = (
        "The norm of the gradient at the optimizer's first step, by the slope of the returned loss "
        "along it, from central differences at 1e-3 and 3e-4 of the weights' norm that agree "
        "within 20 %. More than max_gradient_factor, or less than its inverse where the slope is "
        "below 10, is a violation; more than 1.5, less than 1 / 1.5 although nothing was clipped, "
        "or a negative one is warned of. As many times the slope, or one by so many, as the call "
        "has backward passes is a violation."
    )
    source = (
        "healthy steps give 1.000, clipping less, sharpness-aware ones 1.03; 4.000 is four "
        "micro-batches that are not divided, 65536 a scale that is never removed; detach() in a "
        "loss moves it to 1.5 to 4.4 on purpose in 4 of 35 healthy steps, hence the warning"
    )
    settings = (
        Setting(
            "max_gradient_factor",
            float,
            default=1000.0,
            minimum=1.0,
            help="largest gradient at the optimizer's step by the slope of the loss that the step "
            "returns, and the inverse of the least",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what the gradient is instead of the slope."""
        slope = stepped.slope
        if slope is None or slope.why_not:
            return
        limit = settings["max_gradient_factor"]
        factor = slope.factor
        said = _said(slope)
        if said is None:
            return
        breaks = _fails(slope, float(limit.value))
        fails = breaks or _is_undivided(slope, stepped.passes)
        what, cause = said
        samples = sum(half.samples for half in stepped.halves)
        if factor > 0.0 and samples > 1 and abs(1.0 / factor - samples) < _EXACT * samples:
            cause = f"what is returned is a sum over the {samples} samples, or times their number"
        yield self.violation(
            place(observation),
            what,
            value=factor,
            limit=limit if breaks else None,
            cause=cause,
            independent=True,
            severity="fail" if fails else "warn",
            details=[
                (
                    f"the gradient at the step has a norm of {slope.gradient:.4g}; along it the "
                    f"loss that is returned has a slope of {slope.slope:.4g}"
                )
            ],
        )


def _fails(slope: LossSlope, limit: float) -> bool:
    if not slope.slope:
        return False
    if slope.factor > limit:
        return True
    return 0.0 < slope.factor < 1.0 / limit and slope.slope < _STEEP


def _is_undivided(slope: LossSlope, passes: int) -> bool:
    """Whether the gradient is as many times the slope, or its share, as there were passes."""
    for factor in (slope.factor, 1.0 / slope.factor if slope.factor else 0.0):
        if passes > 1 and abs(factor - passes) < _EXACT * passes:
            return slope.factor > 1.0 or _is_unclipped(slope)
    return False


def _is_unclipped(slope: LossSlope) -> bool:
    """Whether what backward passes left is the slope, and was divided by a whole number since."""
    if slope.added is None or not slope.gradient:
        return False
    divided = slope.added / slope.gradient
    is_slope = abs(slope.added / slope.slope - 1.0) < 2.0 * _EXACT
    return (
        is_slope
        and _DOUBTFUL < divided < _MOST_PASSES
        and abs(divided - round(divided)) < 1e-4 * divided
    )


def _said(slope: LossSlope) -> tuple[str, str] | None:
    """Return what is wrong with the factor, and the likely cause; ``None`` if nothing is."""
    factor = slope.factor
    if not slope.slope or not math.isfinite(factor):
        return (
            (
                "the loss that the step returns does not depend on the parameters, although the "
                "gradient that the optimizer steps on is not zero"
            ),
            (
                "it returns another number than the loss it differentiates: a running mean, a "
                "metric, the loss before the forward"
            ),
        )
    if factor < 0.0:
        return (
            (
                f"the optimizer climbs the loss that the step returns: its gradient is "
                f"{factor:.3g} times the slope"
            ),
            (
                "a flipped sign: -loss is differentiated, or returned; where a reward is returned "
                "on purpose, return its negative"
            ),
        )
    is_own = slope.added is None  # a sign, a projection, noise: another gradient on purpose
    if factor > (_MOST_OWN if is_own else _DOUBTFUL):
        return (
            (
                f"the gradient that the optimizer steps on is {factor:.4g} times the slope of the "
                "loss that the step returns"
            ),
            _why_large(factor),
        )
    is_clipped = slope.added is None or slope.added > slope.gradient * (1.0 + _UNSCALED)
    divided = is_clipped and _is_unclipped(slope)
    if divided:
        is_clipped = False
    if factor < 1.0 / _DOUBTFUL and (not is_clipped or factor < _UNSCALED):
        return (
            (
                f"the gradient that the optimizer steps on is {factor:.3g} times the slope of the "
                "loss that the step returns"
            ),
            "it is scaled down after the backward pass: clipped before scaler.unscale_, clipped to "
            "far too little, or unscaled twice"
            if is_clipped
            else "only a part of the loss is differentiated, or it is divided once too often: by "
            "the number of micro-batches, say",
        )
    return None


def _why_large(factor: float) -> str:
    if factor > 1000.0 and abs(math.log2(factor) - round(math.log2(factor))) < 0.01:
        return (
            f"a loss scale of {2 ** round(math.log2(factor))} that is never removed: "
            "scaler.step(optimizer) in place of optimizer.step(), or scaler.unscale_ first"
        )
    if factor < 1000.0 and abs(factor - round(factor)) < 0.01 * factor:
        return (
            f"{round(factor)} micro-batches, or a sum over {round(factor)} samples, that are not "
            "divided by their number; or a backward pass that runs so often"
        )
    return (
        "gradients of more than this loss are added up: of an earlier call, of a second backward "
        "pass, of a term that is not returned; a returned term that is detached here and pulls the "
        "other way; or a scale that is never removed"
    )
