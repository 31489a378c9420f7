"""`Check`: one invariant. A new one is one new file in this folder; it is found by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from pytest_modelhealth.report import Inconclusive, Observation, Violation
from pytest_modelhealth.settings import Setting, Settings

Finding = Violation | Inconclusive


class Check(ABC):
    """One invariant of a model, read off the statistics of one `Observation`.

    Subclasses are stateless. They import neither torch nor numpy: statistics carry the numbers.
    """

    name: ClassVar[str]
    """Its name in violations, waivers and the reference."""

    summary: ClassVar[str]
    """What must hold, in one sentence."""

    gravity: ClassVar[int]
    """Its place in the verdict: findings of a lower number come first, and explain later ones."""

    definition: ClassVar[str] = ""
    """What is measured, and what is compared with which limit, in one to three sentences."""

    source: ClassVar[str] = ""
    """Where the definition and the default limits come from: a paper, a tool, a measurement."""

    minimum_evidence: ClassVar[str] = "one batch"
    """What it must see to judge; with less it says ``inconclusive``, or nothing."""

    settings: ClassVar[tuple[Setting, ...]] = ()
    """The thresholds it declares, each under the name it has everywhere."""

    @abstractmethod
    def run(self, observation: Observation, settings: Settings) -> Iterable[Finding]:
        """Yield what is violated and what could not be judged, in execution order."""
