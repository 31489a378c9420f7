"""Updates survive the precision of the weights that they are added to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped, SteppedParameter
    from pytest_modelhealth.settings import Settings

_RELATIVE = 1e-7
"""float32 rounds at 6e-8."""
_GRADIENT = 1e-6
_MOST = 0.5


class UpdatePrecision(StepCheck):
    """What the optimizer adds is not rounded away."""

    name = "update_precision"
    summary = "Updates are large enough for the precision of the weights."
    rank = 69
    definition = (
        "Of weights in bfloat16 or float16 the share that has a gradient and is the same, bit for "
        "bit, after all calls, in all that an optimizer moves: more than max_swallowed is a "
        "violation, more than 0.5 a warning. In any precision: the largest relative change of any "
        "matrix is below 1e-7 while a gradient exceeds 1e-6, and rates do not rise."
    )
    source = (
        "bfloat16 keeps 8 bits: an update below 1/512 of a weight is rounded away; healthy steps "
        "in float32 change some matrix by 1e-6 or more, of Adam by 2e-3"
    )
    settings = (
        Setting(
            "max_swallowed",
            float,
            default=0.9,
            minimum=0.0,
            maximum=1.0,
            help="largest share of the weights with a gradient that no call of a training step "
            "changes",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
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
                yield self.violation(
                    place(observation, worst.layer),
                    f"{share:.0%} of the {worst.dtype} weights that have a gradient stay the same, "
                    f"bit for bit: their updates are below its precision ({worst.name})",
                    value=share,
                    limit=limit,
                    tensor=worst.own,
                    cause="weights in half precision at a small learning rate: keep them in "
                    "float32 and compute under torch.autocast, or keep a float32 copy",
                    independent=True,
                    severity="fail" if share > limit.value else "warn",
                )
            return
        yield from self._swallowed(held, observation, settings, rising=rising)
        matrices = [p for p in held if p.dimensions > 1]
        largest = max((max(p.updates, default=0.0) for p in matrices), default=1.0)
        if matrices and 0.0 < largest < _RELATIVE and not rising:
            worst = max(matrices, key=lambda p: max(p.updates))
            yield self.violation(
                place(observation, worst.layer),
                f"the largest change of any matrix in a call is {largest:.1g} of its norm "
                f"({worst.name}), although its gradient is not zero",
                value=largest,
                tensor=worst.own,
                cause="the learning rate is far too small, the gradient is clipped to next to "
                "nothing, or eps is too large",
                independent=True,
            )

    def _swallowed(
        self,
        held: list[SteppedParameter],
        observation: Observation,
        settings: Settings,
        *,
        rising: bool,
    ) -> Iterator[Finding]:
        """Yield matrices in full precision of which next to nothing moves while others do."""
        limit = settings["max_swallowed"]
        matrices = [p for p in held if p.dimensions > 1 and p.dtype not in _HALF]
        still = [p for p in matrices if p.swallowed > limit.value and any(p.updates)]
        moving = any(max(p.updates) > _MOVING for p in matrices if p.updates)
        if not still or not moving or rising:
            return
        yield self.violation(
            place(observation, still[0].layer),
            f"{still[0].swallowed:.0%} of the weights of {still[0].name} that have a gradient stay "
            f"the same, bit for bit, while others move ({len(still)} such matrices)",
            value=still[0].swallowed,
            limit=limit,
            tensor=still[0].own,
            cause="the learning rate of its group is below the precision of the weights: a decay "
            "by layer that is applied to each parameter, say",
            affected=[p.layer for p in still[1:] if p.layer != still[0].layer],
            severity="fail",
        )


_MOVING = 1e-4
_HALF = ("bfloat16", "float16")


def _is_asked(parameter: SteppedParameter) -> bool:
    return any(size > _GRADIENT for size in parameter.added if size is not None)
