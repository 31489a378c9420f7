"""What the loss depends on gets a gradient, and keeps it until the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped, SteppedParameter
    from pytest_modelhealth.settings import Settings

_MIN_SLOPE = 1e-6
_LEAST = 1e-6
"""A gradient that is zero but for rounding stays below."""


class GradientPath(StepCheck):
    """Between the loss that is returned and the optimizer no gradient is lost."""

    name = "gradient_path"
    summary = "Parameters on which the returned loss depends get a gradient, and keep it."
    rank = 66
    role = "parameter_gradients"
    definition = (
        "A violation: parameters that an optimizer holds and steps get no gradient in any call, "
        "and the returned loss has a slope of more than 1e-6 when they are moved along one random "
        "direction, at two shifts that agree within 20 %; matrices of zeros that are frozen. "
        "Warned of, and a violation where it is more than half of what gets a gradient: matrices "
        "of zeros that have zeros for a gradient in every call; parameters whose gradient is "
        "exactly zero at the optimizer's step in every call, although backward passes left "
        "another; that get one in the first call only, although their optimizer steps in all."
    )
    source = "exact, but for the slope, whose rounding in float32 is passed over"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield where gradients are lost."""
        names, slope = stepped.unlearned
        if names and abs(slope) > _MIN_SLOPE:
            yield self._cut(names, slope, observation)
        for is_lost, what, cause in _LOSSES:
            found = [p for p in stepped.parameters if is_lost(p)]
            if found and not (is_lost is _fades and _takes_turns(stepped)):
                fails = is_lost in _CERTAIN or _is_most(found, stepped)
                yield self._lost(found, what, cause, observation, "fail" if fails else "warn")

    def _cut(self, names: tuple[str, ...], slope: float, observation: Observation) -> Finding:
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        details = [f"moved along a random direction, the loss has a slope of {slope:.3g}"]
        return self.violation(
            place(observation, layers[0]),
            f"the loss that the step returns depends on {len(names)} parameters that the optimizer "
            f"holds and that never get a gradient: {listed(names)}",
            value=abs(slope),
            tensor=names[0].rpartition(".")[2],
            cause="a part of the loss is added after backward(), as a number (.item()), or from a "
            "detached output",
            affected=layers[1:],
            independent=True,
            details=details,
        )

    def _lost(
        self,
        found: list[SteppedParameter],
        what: str,
        cause: str,
        observation: Observation,
        severity: Severity,
    ) -> Finding:
        layers = list(dict.fromkeys(p.layer for p in found))
        return self.violation(
            place(observation, layers[0]),
            f"{listed([p.name for p in found])} {what}",
            value=0.0,
            tensor=found[0].own,
            cause=cause,
            affected=layers[1:],
            severity=severity,
        )


def _is_most(found: list[SteppedParameter], stepped: Stepped) -> bool:
    """Whether it is more than half of what gets a gradient: no expert, no skipped block."""
    reached = [p for p in stepped.parameters if any(p.added)]
    return 2 * len(found) > len(reached) and all(p.trainable for p in found)


def _is_erased(parameter: SteppedParameter) -> bool:
    return parameter.erased


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
        _is_erased,
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
