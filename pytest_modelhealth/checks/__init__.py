"""The shelf of checks: a file an invariant, found by looking into this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from inspect import isabstract
from types import ModuleType

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.diagnosis import diagnose
from pytest_modelhealth.errors import LayerNotFoundError, SettingsError, suggest
from pytest_modelhealth.report import Inconclusive, Judgement, Observation, Violation
from pytest_modelhealth.settings import LAYERS, Settings, Waiver

__all__ = ["Check", "Finding", "all_checks", "default_settings", "judge", "validate_waiver"]


@cache
def all_checks() -> tuple[Check, ...]:
    """Return one of each check that a file of this folder defines, the gravest first."""
    names = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    checks = [check() for name in names for check in _defined_in(importlib.import_module(name))]
    return tuple(sorted(checks, key=lambda check: check.gravity))


def _defined_in(module: ModuleType) -> Iterator[type[Check]]:
    for defined in vars(module).values():
        is_check = isinstance(defined, type) and issubclass(defined, Check)
        if is_check and defined.__module__ == module.__name__ and not isabstract(defined):
            yield defined


@cache
def default_settings() -> Settings:
    """Return every declared setting at its default."""
    return Settings((LAYERS, *(s for check in all_checks() for s in check.settings)))


def judge(observation: Observation, settings: Settings) -> Judgement:
    """Run every check and sort out what is waived.

    Raises:
        LayerNotFoundError: the setting ``layers`` matches no layer.
        SettingsError: a waiver names no existing check.
    """
    judged = _judged_layers(observation, settings)
    found = [finding for check in all_checks() for finding in check.run(observation, settings)]
    findings = [
        finding
        for finding in diagnose(observation, found)
        if not judged.isdisjoint(_layers(finding))
    ]
    return _apply_waivers(findings, settings.waivers)


def _judged_layers(observation: Observation, settings: Settings) -> set[str]:
    pattern = settings["layers"]
    matched = {name for name in observation.layers if fnmatchcase(name, pattern.value)}
    if not matched:
        nearest = suggest(pattern.value, observation.layers)
        raise LayerNotFoundError(
            f"layers={pattern.value!r} ({pattern.origin}) matches no layer of "
            f"{observation.model_type}{nearest}"
        )
    return matched


def _layers(finding: Finding) -> tuple[str, ...]:
    """Return the layers that a finding is about: for a fault, all that show it."""
    return finding.layers if isinstance(finding, Violation) else (finding.layer,)


def _apply_waivers(findings: Iterable[Finding], waivers: tuple[Waiver, ...]) -> Judgement:
    for waiver in waivers:
        validate_waiver(waiver)
    violations: list[Violation] = []
    inconclusive: list[Inconclusive] = []
    waived: list[tuple[Violation, Waiver]] = []
    for finding in findings:
        covering = next((w for w in waivers if _covers(w, finding)), None)
        if isinstance(finding, Inconclusive):
            if covering is None:
                inconclusive.append(finding)
        elif covering is None:
            violations.append(finding)
        else:
            waived.append((finding, covering))
    used = {waiver for _, waiver in waived}
    unused = tuple(waiver for waiver in waivers if waiver not in used)
    return Judgement(tuple(violations), tuple(inconclusive), tuple(waived), unused)


def validate_waiver(waiver: Waiver) -> None:
    """Do nothing if the check that `waiver` names exists.

    Raises:
        SettingsError: it does not; the message suggests the nearest.
    """
    names = [check.name for check in all_checks()]
    if waiver.check is not None and waiver.check not in names:
        raise SettingsError(
            f"{waiver.origin}: unknown check {waiver.check!r}{suggest(waiver.check, names)} "
            f"Known checks: {', '.join(names)}."
        )


def _covers(waiver: Waiver, finding: Finding) -> bool:
    return waiver.check in (None, finding.check) and fnmatchcase(finding.layer, waiver.layers)
