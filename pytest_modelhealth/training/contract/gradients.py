"""The gradients of a step: where they come from, by which factor, and what was left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import LossSlope, Stepped, SteppedOptimizer, SteppedParameter
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.contract.fault import broken, fault, listed, looks_for, whole

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
            list(dict.fromkeys(name.rpartition(".")[0] for name in names)),
            value=abs(slope),
            tensor=names[0].rpartition(".")[2],
            details=(f"moved along a random direction, the loss has a slope of {slope:.3g}",),
        )


def _if_most(found: Sequence[SteppedParameter], step: Stepped) -> Severity:
    """Fail where it is more than half of what gets a gradient: no expert, no skipped block."""
    reached = [p for p in step.parameters if any(p.added)]
    is_most = 2 * len(found) > len(reached) and all(p.trainable for p in found)
    return "fail" if is_most else "warn"


def _fading(step: Stepped) -> list[SteppedParameter]:
    """Return parameters that have a gradient in the first call only, though all calls step.

    Where others get their first one later, what runs is drawn. A generator may step in some calls.
    """
    held = step.trained
    if any(any(p.added[1:]) and not p.added[0] for p in held):
        return []
    return [
        p
        for p in held
        if len(p.added) > 2 and None not in p.rates
        if (p.added[0] or 0.0) > _LEAST and not any(p.added[1:])
    ]


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
    lambda step: (
        p for p in step.trained if p.is_zero and p.added and not any(map(_is_some, p.added))
    ),
    "{names} is a matrix of zeros whose gradient is zero in every call: it waits for "
    "another factor",
    "two factors of a product both start at zero; one of them has to start at random",
    grade=_if_most,
    independent=False,
)


def _is_some(size: float | None) -> bool:
    return size != 0.0


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
    said = None if slope is None or slope.why_not else _said(slope)
    if slope is None or said is None:
        return
    (what, cause), factor = said, slope.factor
    is_beyond = slope.slope != 0.0 and (
        factor > limit.value or (0.0 < factor < 1.0 / limit.value and slope.slope < _STEEP)
    )
    samples = sum(half.samples for half in step.halves)
    if factor > 0.0 and samples > 1 and abs(1.0 / factor - samples) < _EXACT * samples:
        cause = f"what is returned is a sum over the {samples} samples, or times their number"
    yield broken(
        check,
        what,
        cause,
        value=factor,
        limit=limit if is_beyond else None,
        severity="fail" if is_beyond or _is_undivided(slope, step.passes) else "warn",
        details=(
            (
                f"the gradient at the step has a norm of {slope.gradient:.4g}; along it the loss "
                f"that is returned has a slope of {slope.slope:.4g}"
            ),
        ),
    )


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
            "another number than the loss is returned: a running mean, a metric",
        )
    if factor < 0.0:
        return (
            (
                "the optimizer climbs the loss that the step returns: its gradient is "
                f"{factor:.3g} times the slope"
            ),
            "a flipped sign: -loss is differentiated, or a reward returned, not its negative",
        )
    what = "the gradient that the optimizer steps on is {} times the slope of the loss that the "
    what += "step returns"
    is_own = slope.added is None  # a sign, a projection, noise: another gradient on purpose
    if factor > (_MOST_OWN if is_own else _DOUBTFUL):
        return what.format(f"{factor:.4g}"), _why_large(factor)
    is_clipped = slope.added is None or slope.added > slope.gradient * (1.0 + _UNSCALED)
    is_clipped = is_clipped and not _is_unclipped(slope)
    if factor < 1.0 / _DOUBTFUL and (not is_clipped or factor < _UNSCALED):
        cause = "only a part of the loss is differentiated, or it is divided once too often: by "
        cause += "the number of micro-batches, say"
        if is_clipped:
            cause = "it is clipped before scaler.unscale_, to far too little, or unscaled twice"
        return what.format(f"{factor:.3g}"), cause
    return None


def _why_large(factor: float) -> str:
    power = round(math.log2(factor))
    if factor > 1000.0 and abs(math.log2(factor) - power) < 0.01:
        return (
            f"a loss scale of {2**power} that is never removed: scaler.step(optimizer) in place "
            "of optimizer.step(), or scaler.unscale_ first"
        )
    if factor < 1000.0 and abs(factor - round(factor)) < 0.01 * factor:
        return (
            f"{round(factor)} micro-batches, or a sum over {round(factor)} samples, that are not "
            "divided by their number; or a backward pass that runs so often"
        )
    return (
        "gradients of more than this loss are added up: of an earlier call, of a second backward "
        "pass, of a term that is not returned; or a term is detached, or a scale never removed"
    )


# ---- what was left -------------------------------------------------------------------------------


def _noted(step: Stepped, trait: str) -> list[SteppedOptimizer]:
    return [optimizer for optimizer in step.optimizers if trait in optimizer.traits][:1]


fault(
    "left_over_gradients",
    lambda step: _noted(step, "stale"),
    "{one.type_name} steps before the backward pass of its call: on no gradient, or on an "
    "older one",
    "the order of backward(), step() and zero_grad() is another one than this",
    is_last=True,
)
fault(
    "left_over_gradients",
    lambda step: _noted(step, "repeated"),
    "{one.type_name} steps twice in a call on the very same gradient",
    "optimizer.step() is called by the loop and by a scaler or a wrapper, say",
    is_last=True,
)
fault(
    "left_over_gradients",
    lambda step: _noted(step, "piled"),
    "each evaluation of the closure of {one.type_name} adds to the gradient of the one before",
    "zero_grad() stands before optimizer.step(closure) and not in the closure",
    is_last=True,
)
fault(
    "left_over_gradients",
    whole(attrgetter("mixed")),
    "{one.mixed} steps on gradients of two losses, one of which trains the part that "
    "another optimizer holds: of the generator's, say, in the discriminator's step",
    "both losses go backward before either optimizer steps: clear or detach in between, "
    "unless both are meant for this part",
    grade="warn",
    is_last=True,
)
fault(
    "left_over_gradients",
    lambda step: filter(None, [step.left_over]),
    "gradients that the optimizer has stepped on are still there when it steps again: "
    "cleared in between, two calls move parameters by {value:.0%} less or more",
    "zero_grad() is missing, is called between backward() and step() only, or for another "
    "optimizer or other parameters",
    measure=attrgetter("effect"),
    limit="max_left_over",
    at=lambda left: (left.layer, left.own),
)
