"""`Check`: one invariant. A new one is one new file in this folder; it is found by itself.

A project's own check is a subclass too, registered by the hook ``pytest_modelhealth_checks`` or
given to an inspector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from pytest_modelhealth.settings import Limit, Setting, Settings, Severity

if TYPE_CHECKING:
    from pytest_modelhealth.report import Inconclusive, LayerRecord, Observation, Violation

Finding: TypeAlias = "Violation | Inconclusive"

ALWAYS = Limit(0.0, "always")
"""The limit of what may never happen, whatever the settings say."""


class Check(ABC):
    """One invariant of a model, read off the statistics of one `Observation`.

    Subclasses are stateless. They import neither torch nor numpy: statistics carry the numbers. The
    report they import for types alone, since a run that sets a limit loads every check.
    """

    name: ClassVar[str]
    """Its name in violations, waivers and the reference."""

    summary: ClassVar[str] = ""
    """What must hold, in one sentence."""

    rank: ClassVar[int] = 1000
    """Its place in the verdict: findings of a lower number come first, and explain later ones."""

    severity: ClassVar[Severity] = "fail"
    """Whether its violations fail a test or only warn, unless the setting ``severity`` says it."""

    definition: ClassVar[str] = ""
    """What is measured, and what is compared with which limit, in one to three sentences."""

    source: ClassVar[str] = ""
    """Where the definition and the default limits come from: a paper, a tool, a measurement."""

    minimum_evidence: ClassVar[str] = "one batch"
    """What it must see to judge; with less it says ``inconclusive``, or nothing."""

    occasion: ClassVar[str] = "Every inspection"
    """What a test does that it judges: the heading that it stands under where all are listed."""

    role: ClassVar[str] = "activations"
    """Which tensor of a layer its violations are about, where they do not say it."""

    is_probe: ClassVar[bool] = False
    """Whether it changes something and runs the model again; see `pytest_modelhealth.probes`."""

    judges_steps: ClassVar[bool] = False
    """Whether it judges a training step of the user's own, too, of which only statistics are seen:
    neither the loss's way nor who feeds whom."""

    reads_scale: ClassVar[bool] = False
    """Whether depth alone brings about what it finds where nothing is normalised.

    Behind batch normalisations that have seen no batch its findings in evaluation mode are then no
    violations, those apart that are `independent`.
    """

    settings: ClassVar[tuple[Setting, ...]] = ()
    """The thresholds it declares, each under the name it has everywhere."""

    @abstractmethod
    def run(self, observation: Observation, settings: Settings) -> Iterable[Finding]:
        """Yield what is violated and what could not be judged, in execution order."""

    @classmethod
    def violation(
        cls,
        record: LayerRecord,
        message: str,
        *,
        value: float,
        limit: Limit | None = None,
        role: str | None = None,
        tensor: str = "",
        cause: str = "",
        affected: Iterable[str] = (),
        seen_in: Iterable[str] = (),
        independent: bool = False,
        severity: Severity = "fail",
        details: Iterable[str] = (),
    ) -> Violation:
        """Return this check's violation in a layer.

        Args:
            record: the culprit.
            message: what is wrong, one sentence that stands alone.
            value: what was measured.
            limit: what `Settings.limit` gave; ``None`` where the invariant knows no number.
            role: which tensor of the layer, unless it is the one this check is about.
            tensor: own name of the tensor (``"weight"``), where the role has several.
            cause: the likely cause, one sentence.
            affected: names of the layers that only show what this one began.
            seen_in: names of other layers whose tensors of this role were read for the value.
            independent: whether no fault elsewhere can bring this about.
            severity: ``"warn"`` where what was seen may be meant so, and nothing seen tells.
            details: what else was seen, a sentence each, the most telling first.
        """
        from pytest_modelhealth.report import Reference, Violation

        role = cls.role if role is None else role
        others = tuple(Reference(name, role) for name in seen_in)
        return Violation(
            check=cls.name,
            layer=record.name,
            role=role,
            value=value,
            limit=None if limit is None else limit.value,
            origin="always" if limit is None else limit.origin,
            message=message,
            cause=cause,
            tensor=tensor,
            affected=tuple(affected),
            evidence=(Reference(record.name, role, tensor), *others) if others else (),
            independent=independent,
            severity=severity,
            details=tuple(details),
        )

    @classmethod
    def inconclusive(cls, record: LayerRecord, reason: str) -> Inconclusive:
        """Return that this check had too little evidence to judge a layer.

        Args:
            record: the layer.
            reason: what was seen, and what the check would need.
        """
        from pytest_modelhealth.report import Inconclusive

        return Inconclusive(cls.name, record.name, reason)
