"""Checks of the gradients of a step: where they come from, by which factor, and what was left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.report import LossSlope, Stepped, SteppedParameter
from pytest_modelhealth.settings import Factor, Ratio, Settings
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

_MIN_SLOPE = 1e-6
_LEAST = 1e-6
"""A gradient that is zero but for rounding stays below."""


class GradientPath(StepCheck):
    """Between the loss that is returned and the optimizer no gradient is lost."""

    name = "gradient_path"
    summary = "Parameters on which the returned loss depends get a gradient, and keep it."
    rank = 66
    role = "parameter_gradients"

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield where gradients are lost."""
        names, slope = stepped.unlearned
        if names and abs(slope) > _MIN_SLOPE:
            yield self._cut(names, slope)
        for is_lost, what, cause in _LOSSES:
            found = [p for p in stepped.parameters if is_lost(p)]
            if found and not (is_lost is _fades and _takes_turns(stepped)):
                fails = is_lost in _CERTAIN or _is_most(found, stepped)
                yield self.broken(
                    f"{listed([p.name for p in found])} {what}",
                    cause,
                    found,
                    severity="fail" if fails else "warn",
                    independent=False,
                )

    def _cut(self, names: tuple[str, ...], slope: float) -> Finding:
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        return self.broken(
            f"the loss that the step returns depends on {len(names)} parameters that the optimizer "
            f"holds and that never get a gradient: {listed(names)}",
            "a part of the loss is added after backward(), as a number (.item()), or from a "
            "detached output",
            layer=layers[0],
            value=abs(slope),
            tensor=names[0].rpartition(".")[2],
            affected=layers[1:],
            details=(f"moved along a random direction, the loss has a slope of {slope:.3g}",),
        )


def _is_most(found: list[SteppedParameter], stepped: Stepped) -> bool:
    """Whether it is more than half of what gets a gradient: no expert, no skipped block."""
    reached = [p for p in stepped.parameters if any(p.added)]
    return 2 * len(found) > len(reached) and all(p.trainable for p in found)


def _fades(parameter: SteppedParameter) -> bool:
    """Whether only the first call has a gradient, although its optimizer steps in all of them."""
    if not (parameter.trainable and parameter.held) or len(parameter.added) < 3:
        return False
    if None in parameter.rates:  # a generator that is trained every fifth call
        return False
    return (parameter.added[0] or 0.0) > _LEAST and not any(parameter.added[1:])


def _takes_turns(stepped: Stepped) -> bool:
    """Whether parameters that get none in the first call get one later: what runs is drawn."""
    return any(
        any(p.added[1:]) and not p.added[0] for p in stepped.parameters if p.trainable and p.held
    )


def _is_zero_for_good(parameter: SteppedParameter) -> bool:
    return parameter.is_zero and not parameter.trainable


def _waits(parameter: SteppedParameter) -> bool:
    is_idle = bool(parameter.added) and all(size == 0.0 for size in parameter.added)
    return parameter.is_zero and parameter.trainable and parameter.held and is_idle


_CERTAIN = (_is_zero_for_good,)
_LOSSES = (
    (
        attrgetter("erased"),
        "has a gradient after the backward pass, and zeros in its place when the optimizer steps",
        "a mask on gradients that is the wrong way round, or a clip to zero",
    ),
    (
        _fades,
        "gets a gradient in the first call, and none in later ones",
        "what the first call computed is kept and used again, or a flag is not reset",
    ),
    (
        _is_zero_for_good,
        "is a matrix of zeros and frozen: what passes through it is zero for good",
        "adapters or gates that start at zero were frozen with the rest",
    ),
    (
        _waits,
        "is a matrix of zeros whose gradient is zero in every call: it waits for another factor",
        "two factors of a product both start at zero; one of them has to start at random",
    ),
)


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
    settings = (
        Factor(
            "max_gradient_factor",
            default=1000.0,
            help="largest gradient at the optimizer's step by the slope of the loss that the step "
            "returns, and the inverse of the least",
            per_layer=False,
        ),
    )

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
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
        yield self.broken(
            what,
            cause,
            value=factor,
            limit=limit if breaks else None,
            severity="fail" if fails else "warn",
            details=(
                (
                    f"the gradient at the step has a norm of {slope.gradient:.4g}; along it the "
                    f"loss that is returned has a slope of {slope.slope:.4g}"
                ),
            ),
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
        what = "the loss that the step returns does not depend on the parameters, although the "
        what += "gradient that the optimizer steps on is not zero"
        return what, "another number than the loss is returned: a running mean, a metric"
    if factor < 0.0:
        what = "the optimizer climbs the loss that the step returns: its gradient is "
        what += f"{factor:.3g} times the slope"
        return (
            what,
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
        "pass, of a term that is not returned; or a term is detached, or a scale never removed"
    )


class LeftOverGradients(StepCheck):
    """Gradients that an optimizer has stepped on are cleared before the next ones are added."""

    name = "left_over_gradients"
    summary = "No optimizer steps twice on the same gradient."
    rank = 63
    role = "parameter_gradients"
    settings = (
        Ratio(
            "max_left_over",
            default=1e-3,
            help="largest effect of gradients that were stepped on and not cleared, on where two "
            "calls bring a parameter, by how far they move it",
            per_layer=False,
        ),
    )

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what is stepped on twice."""
        limit, found, mixed = settings["max_left_over"], stepped.left_over, stepped.mixed
        for own, what, cause in _TWICE:
            kind = next((o.type_name for o in stepped.optimizers if own in o.traits), None)
            if kind is not None:
                yield self.broken(what.format(kind), cause, value=1.0)
                return
        if mixed:
            yield self.broken(
                f"{mixed} steps on gradients of two losses, one of which trains the part that "
                "another optimizer holds: of the generator's, say, in the discriminator's step",
                "both losses go backward before either optimizer steps: clear or detach in "
                "between, unless both are meant for this part",
                value=1.0,
                warns=True,
            )
        elif found is not None and found.effect > limit.value:
            yield self.broken(
                "gradients that the optimizer has stepped on are still there when it steps again: "
                f"cleared in between, two calls move parameters by {found.effect:.0%} less or more",
                "zero_grad() is missing, is called between backward() and step() only, or "
                "for another optimizer or other parameters",
                layer=found.layer,
                tensor=found.own,
                value=found.effect,
                limit=limit,
            )


_TWICE = (
    (
        "stale",
        "{} steps before the backward pass of its call: on no gradient, or on an older one",
        "the order of backward(), step() and zero_grad() is another one than this",
    ),
    (
        "repeated",
        "{} steps twice in a call on the very same gradient",
        "optimizer.step() is called by the loop and by a scaler or a wrapper, say",
    ),
    (
        "piled",
        "each evaluation of the closure of {} adds to the gradient of the one before",
        "zero_grad() stands before optimizer.step(closure) and not in the closure",
    ),
)
"""What an optimizer that notes it stepped on: its trait, what is wrong, the likely cause."""
