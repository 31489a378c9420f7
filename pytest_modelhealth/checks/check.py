"""`Check`: one invariant, and which of them there are: those of a catalogue, and a project's own.

A project's own check is a subclass too, registered by the hook ``pytest_modelhealth_checks`` or
given to an inspector.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from inspect import isabstract
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.settings import SEVERITIES, Limit, Setting, Settings, Severity
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.report import Finding, LayerRecord, Observation

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
    """What is measured and compared with which limit; the page of reference has it of ours."""

    source: ClassVar[str] = ""
    """Where the definition and the default limits come from: a paper, a tool, a measurement."""

    minimum_evidence: ClassVar[str] = ""
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
        record: LayerRecord | str,
        message: str,
        *,
        value: float,
        limit: Limit | None = None,
        role: str | None = None,
        tensor: str = "",
        seen_in: Iterable[str] = (),
        severity: Literal[Severity, "note"] = "fail",
        affected: Iterable[str] = (),
        details: Iterable[str] = (),
        **more: Any,
    ) -> Finding:
        """Return what this check objects to in a layer.

        Args:
            record: the culprit, or its name.
            message: what is wrong, one sentence that stands alone.
            value: what was measured.
            limit: what `Settings.limit` gave; ``None`` where the invariant knows no number.
            role: which tensor of the layer, unless it is the one this check is about.
            tensor: own name of the tensor (``"weight"``), where the role has several.
            seen_in: names of other layers whose tensors of this role were read for the value.
            severity: ``"warn"`` where what was seen may be meant so, and nothing seen tells;
                ``"note"`` where it is worth knowing and never fails.
            affected: names of the layers that only show what this one began.
            details: what else was seen, a sentence each, the most telling first.
            more: what else a `Finding` holds: ``cause``, the likely one in a sentence, and
                ``independent``, whether no fault elsewhere can bring this about.
        """
        from pytest_modelhealth.report import Finding, Reference

        layer = record if isinstance(record, str) else record.name
        role = cls.role if role is None else role
        others = tuple(Reference(name, role) for name in seen_in)
        return Finding(
            cls.name,
            layer,
            role,
            value,
            limit=None if limit is None else limit.value,
            origin="always" if limit is None else limit.origin,
            message=message,
            tensor=tensor,
            grade=severity,
            evidence=(Reference(layer, role, tensor), *others) if others else (),
            affected=tuple(affected),
            details=tuple(details),
            **more,
        )

    @classmethod
    def fault(cls, record: LayerRecord | str, message: str, **more: Any) -> Finding:
        """Return a `violation` by what may never happen, whatever the settings say."""
        return cls.violation(record, message, **{"value": 0.0, "limit": ALWAYS, **more})

    @classmethod
    def inconclusive(cls, record: LayerRecord | str, reason: str) -> Finding:
        """Return that this check had too little evidence to judge a layer.

        Args:
            record: the layer, or its name.
            reason: what was seen, and what the check would need.
        """
        from pytest_modelhealth.report import Finding

        layer = record if isinstance(record, str) else record.name
        return Finding(cls.name, layer, message=reason, grade="unsure")


_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_RESERVED = {"artifacts", "compiled", "explain", "model", "on_report", "own_checks", "waive"}
_RESERVED |= {"replay", "replay_from"}
"""Names that an option or an argument of `Inspector` has, which is no setting."""


class Listed(Check):
    """A check of this package, a row of a `Catalogue`; what runs it loads when it first runs."""

    runs: ClassVar[str]
    """What returns its findings of an observation, under settings: ``"checks.finite:findings"``."""

    home: ClassVar[str]
    """The catalogue that has it."""

    is_shared: ClassVar[bool]
    """Whether that runs others, too, and is told which."""

    part: ClassVar[str] = ""
    """The part of an observation that it judges, where not every run has it: ``"stepped"``."""

    def run(self, observation: Observation, settings: Settings) -> Iterable[Finding]:
        """Yield what is violated and what could not be judged, in execution order."""
        if self.part and getattr(observation, self.part) is None:
            return ()  # nothing of its wing is loaded
        findings: Iterable[Finding] = self._findings(observation, settings)
        return findings

    @cached_property
    def _findings(self) -> Callable[[Observation, Settings], Iterable[Finding]]:
        function = wing(self.runs)
        return partial(function, self) if self.is_shared else function

    def __reduce__(self) -> tuple[Any, ...]:
        return _listed, (self.home, self.name)


def _listed(home: str, name: str) -> Listed:
    """Return a check of a catalogue, as it is unpickled."""
    catalogue: Catalogue = wing(home)
    return catalogue[name]


class Catalogue(dict[str, Listed]):
    """Checks by name, the gravest first.

    Args:
        home: where it stands, ``"checks.catalogue:CHECKS"``.
        run: what returns the findings of any of them; it is told which.
        first: the rank of the first, where those after it have the next ones.
        shared: what all of them have in common.
    """

    def __init__(self, home: str, run: str = "", first: int = 0, **shared: Any) -> None:
        super().__init__()
        self._first = first
        own = {"__module__": __name__, "home": home, "runs": run, "is_shared": bool(run)}
        self._shared = own | shared

    def add(self, name: str, summary: str, *settings: Setting, run: str = "", **row: Any) -> None:
        """Add a check: a row of literals.

        Args:
            name, summary, settings: as of `Check`.
            run: what returns its findings, where neither all have that in common nor its own file
                does, ``"checks.<name>:findings"``.
            row: what else a `Check` declares.
        """
        runs = run or self._shared["runs"] or f"checks.{name}:findings"
        own = {"name": name, "rank": self._first + len(self), "summary": summary, "runs": runs}
        own["settings"] = settings
        self[name] = type(name, (Listed,), {**self._shared, **own, **row})()


def by_rank(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return checks in order, the gravest first."""
    return tuple(sorted(checks, key=lambda check: (check.rank, check.name)))


def with_own_checks(settings: Settings, own: Iterable[type[Check]], origin: str) -> Settings:
    """Return `settings` for the checks it has and a project's `own`.

    Args:
        settings: the settings to add to; values and waivers stay.
        own: subclasses of `Check`. One that is there already is not added twice.
        origin: who gave them, for messages.

    Raises:
        SettingsError: one of them is no sound check: the message says which and why.
    """
    checks: tuple[Check, ...] = settings.checks
    if not isinstance(own, Iterable):
        raise SettingsError(f"{origin}: give a list of subclasses of Check, not {own!r}")
    if own == () and checks:  # as a rule: theirs are in order already
        return settings
    for kind in own:
        if not any(type(check) is kind for check in checks):
            reason = _why_unsound(kind, checks, settings)
            if reason:
                is_class = isinstance(kind, type)
                where = f"{kind.__module__}.{kind.__qualname__}" if is_class else repr(kind)
                raise SettingsError(f"{origin}: {where}: {reason}")
            checks = (*checks, kind())
    return settings.with_checks(by_rank(checks))


def _why_unsound(kind: Any, checks: tuple[Check, ...], settings: Settings) -> str | None:
    """Return what is wrong with a project's check, if anything is."""
    if not (isinstance(kind, type) and issubclass(kind, Check)):
        return "it is no subclass of pytest_modelhealth.Check; give the class itself"
    if isabstract(kind):
        return "it has no run(self, observation, settings)"
    try:
        kind()
    except Exception as error:  # noqa: BLE001 - whatever its __init__ raises
        return f"it cannot be made without arguments: {type(error).__name__}: {error}"
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"name must be words in lower case joined by underscores, not {name!r}"
    if any(check.name == name for check in checks):
        return f"there is a check {name!r} already; give it another name"
    rank: object = kind.rank
    if not isinstance(rank, int | float):
        return f"rank must be a number, not {rank!r}"
    if kind.severity not in SEVERITIES:
        return f"severity must be 'warn' or 'fail', not {kind.severity!r}"
    for text in ("summary", "definition", "source", "minimum_evidence", "role"):
        if not isinstance(getattr(kind, text), str):
            return f"{text} must be a string, not {getattr(kind, text)!r}"
    return _why_settings_unsound(kind.settings, {*settings, *_RESERVED})


def _why_settings_unsound(declared: Any, taken: set[str]) -> str | None:
    if not isinstance(declared, tuple) or not all(isinstance(s, Setting) for s in declared):
        return "settings must be a tuple of pytest_modelhealth.Setting"
    for setting in declared:
        if not _NAME.fullmatch(setting.name):
            return f"the name of a setting must be words in lower case, not {setting.name!r}"
        if setting.name in taken:
            return f"there is a setting {setting.name!r} already; give it another name"
        if setting.type not in (float, int, bool, str):
            return f"the type of {setting.name} must be float, int, bool or str"
        taken.add(setting.name)
        try:
            setting.validate(setting.default, "its default")
        except SettingsError as error:
            return str(error)
    return None
