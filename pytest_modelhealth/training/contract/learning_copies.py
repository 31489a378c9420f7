"""A slow copy of a part follows it, and does not learn by gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


class LearningCopies(StepCheck):
    """Targets and teachers do not learn by themselves."""

    name = "learning_copies"
    summary = (
        "A target, teacher or moving average that starts as a copy does not learn by gradient."
    )
    rank = 74
    severity: ClassVar[Severity] = "warn"
    definition = (
        "A part called target, teacher, ema, momentum, shadow, slow or average starts equal to "
        "another part, and an optimizer moves it. It goes by names, and only warns."
    )
    source = "no healthy step of the first measurement does so"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield the copies that learn."""
        for name, other in stepped.copies:
            yield self.violation(
                place(observation, name),
                f"{name!r} starts as a copy of {other!r}, and an optimizer moves it",
                value=1.0,
                cause="a slow copy is updated from the other's weights under no_grad: freeze it by "
                "requires_grad_(False) and leave it out of the optimizer",
                severity="warn",
            )
