"""`StepCheck`: what a training step must do. A new one is a class in the file of its subject."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_modelhealth.checks import Check, Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import (
    Inconclusive,
    Observation,
    Stepped,
    SteppedParameter,
    Violation,
)
from pytest_modelhealth.settings import Limit, Settings


class StepCheck(Check):
    """One promise of a training step, held against what a few calls of it did.

    It judges what `Inspector.run_step` saw, and says nothing of other runs.
    """

    judges_steps = True
    occasion = "A training step: inspector(model).run_step(...)"
    role = "parameters"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield what the step breaks, if one was run, in the layers that were seen or the model."""
        if observation.stepped is not None:
            for found in self.judge(observation.stepped, settings):
                yield replace(found, layer=place(observation, found.layer).name)

    @abstractmethod
    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what is broken."""

    @classmethod
    def broken(
        cls, what: str, cause: str, found: Sequence[SteppedParameter] = (), **more: Any
    ) -> Violation:
        """Return a violation of the whole step, or of the parameters `found`.

        The first of them names the layer and the tensor; the layers of the others are affected.

        Args:
            what: what is wrong, one sentence that stands alone.
            cause: the likely cause, one sentence.
            found: the parameters, if it is about some.
            more: what a `Violation` holds beside them; ``warns=True`` is one that only warns, and
                that a fault may be the cause of.
        """
        layers = list(dict.fromkeys(p.layer for p in found)) or [""]
        own = found[0].own if found else ""
        if more.pop("warns", False):
            more |= {"severity": "warn", "independent": False}
        limit: Limit | None = more.pop("limit", None)
        made = {"value": 0.0, "tensor": own, "affected": layers[1:], "independent": True, **more}
        return Violation(
            cls.name,
            **{"layer": layers[0], "role": cls.role, **made, "affected": tuple(made["affected"])},
            limit=None if limit is None else limit.value,
            origin="always" if limit is None else limit.origin,
            message=what,
            cause=cause,
        )

    @classmethod
    def untold(cls, reason: str) -> Inconclusive:
        """Return that there was too little evidence to judge the step."""
        return Inconclusive(cls.name, "", reason)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names as a phrase: the first few, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
