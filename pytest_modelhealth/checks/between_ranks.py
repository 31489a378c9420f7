"""`BetweenRanks`: a check that reads in what the ranks of a process group disagree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pytest_modelhealth.checks.check import ALWAYS, Check
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Limit, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Violation
    from pytest_modelhealth.report.ranks import Disagreement


class BetweenRanks(Check):
    """Its violations are the disagreements of its kind: found by all ranks, the same on each."""

    minimum_evidence = "one batch on two ranks that inspect together"
    occasion = "An inspection on several ranks"
    limit_name: ClassVar[str] = ""
    """The setting that a disagreement's value must exceed; ``""`` where there is none."""

    def run(self, observation: Observation, settings: Settings) -> Iterator[Violation]:
        """Yield one violation for each thing in which ranks disagree."""
        if observation.ranks is None:
            return
        for found in observation.ranks.disagreements:
            if found.kind == self.name:
                limit = settings.limit(self.limit_name, found.layer) if self.limit_name else ALWAYS
                if self.is_beyond(found.value, limit):
                    yield self._violation(found, limit, observation)

    def is_beyond(self, value: float, limit: Limit) -> bool:
        """Whether so much of it is a violation."""
        return limit is ALWAYS or value > limit.value

    @abstractmethod
    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return the likely cause and the next move, one sentence."""

    def _violation(self, found: Disagreement, limit: Limit, observation: Observation) -> Violation:
        made = self.violation(
            place(observation, found.layer),
            found.message,
            value=found.value,
            limit=limit,
            role=found.role,
            tensor=found.tensor,
            cause=self.cause(found, observation),
            affected=[layer for layer in found.layers if layer != found.layer],
            severity="fail" if found.is_sure else "warn",
        )
        return replace(made, between_ranks=True)
