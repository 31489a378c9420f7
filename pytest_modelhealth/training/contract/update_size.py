"""Steps of the optimizer are neither as large as the weights nor drowned by its epsilon."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped, SteppedOptimizer, SteppedParameter
    from pytest_modelhealth.settings import Settings

_EPS = 1e-3
_DROWNED = 1000.0
_DOUBTFUL = 10.0


class UpdateSize(StepCheck):
    """A step is a fraction of the weights that it changes."""

    name = "update_size"
    summary = "A step changes weights by a fraction of their size, as its gradient asks for."
    rank = 68
    definition = (
        "The norm of an update by that of the weights before it, the median over matrices, in any "
        "call: more than max_step_ratio, unless the loss falls, is a violation. So is a "
        "weight decay that takes more than max_decay of the weights a step, and an epsilon above "
        "1e-3 that is more than 1000 times the root of the second moment which it stands beside; "
        "more than 10 times is warned of."
    )
    source = (
        "the usual ratio is about 1e-3 (Karpathy, CS231n notes); healthy steps stay below 0.1, an "
        "epsilon of 1 in RMSprop below 1000 times"
    )
    settings = (
        Setting(
            "max_step_ratio",
            float,
            default=1.0,
            minimum=0.0,
            help="largest update of a training step by the weights that it changes, both L2 norms, "
            "the median over matrices",
            per_layer=False,
        ),
        Setting(
            "max_decay",
            float,
            default=0.02,
            minimum=0.0,
            help="largest share of the weights that weight decay takes in one step (0.02 halves "
            "them in 34)",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what is too large, or drowned."""
        yield from self._large(stepped, observation, settings)
        decay = settings["max_decay"]
        for optimizer in stepped.optimizers:
            if optimizer.decay > decay.value:
                yield self.violation(
                    place(observation),
                    f"the weight decay of {optimizer.type_name} takes {optimizer.decay:.0%} of the "
                    "weights in each step",
                    value=optimizer.decay,
                    limit=decay,
                    cause="weight_decay is far too large, or meant for another learning rate",
                    independent=True,
                )
            if _is_drowned(optimizer, _DOUBTFUL):
                yield self.violation(
                    place(observation),
                    f"the eps of {optimizer.type_name} is {optimizer.eps:g}, and the root of the "
                    f"second moment beside it {optimizer.second_moment:.2g}: it sets the size of "
                    "every update, which then is next to nothing",
                    value=optimizer.eps or 0.0,
                    cause="eps was given in the place of another argument, or meant for another "
                    "optimizer: 1e-8 is the default",
                    independent=True,
                    severity="fail" if _is_drowned(optimizer, _DROWNED) else "warn",
                )

    def _large(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        limit = settings["max_step_ratio"]
        if any(optimizer.closure for optimizer in stepped.optimizers):
            return
        matrices = [p for p in stepped.parameters if p.dimensions > 1 and any(p.updates)]
        for call in range(len(stepped.losses)):
            ratios = [p.updates[call] for p in matrices]
            if not ratios or statistics.median(ratios) <= limit.value or _falls(stepped):
                continue
            worst = max(matrices, key=lambda p: p.updates[call])
            yield self.violation(
                place(observation, worst.layer),
                f"call {call + 1} changes weights by {statistics.median(ratios):.2g} of their "
                f"norm, the median over {len(ratios)} matrices; {worst.name} by "
                f"{worst.updates[call]:.2g}",
                value=statistics.median(ratios),
                limit=limit,
                tensor=worst.own,
                cause="the learning rate is too large for these weights, or a scale of the "
                "gradient is never removed",
                affected=_others(matrices, worst),
                independent=True,
            )
            return


def _others(matrices: list[SteppedParameter], worst: SteppedParameter) -> list[str]:
    return [p.layer for p in matrices if p.layer != worst.layer]


def _falls(stepped: Stepped) -> bool:
    """Whether the loss is lower after the calls: small weights grow by large steps at first."""
    first, last = stepped.losses[0], stepped.losses[-1]
    return first is not None and last is not None and last < first


def _is_drowned(optimizer: SteppedOptimizer, times: float) -> bool:
    eps, moment = optimizer.eps, optimizer.second_moment
    return eps is not None and bool(moment) and eps > _EPS and eps > times * (moment or 0.0)
