"""`StepCheck`: what a training step must do. A new one is one new file here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Check, Finding

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


class StepCheck(Check):
    """One promise of a training step, held against what a few calls of it did.

    It judges what `Inspector.run_step` saw, and says nothing of other runs.
    """

    judges_steps = True
    minimum_evidence = "run_step: three calls of the step"
    occasion = "A training step: inspector(model).run_step(...)"
    role = "parameters"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield what the step breaks, if one was run."""
        if observation.stepped is not None:
            yield from self.judge(observation.stepped, observation, settings)

    @abstractmethod
    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what is broken."""


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names as a phrase: the first few, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
