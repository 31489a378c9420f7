"""How near a report came to each limit.

A check says what it measured only where a limit is broken. So each is asked again under the
tightest limit that there is: the value furthest on is how near it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

from pytest_modelhealth.checks import Check
from pytest_modelhealth.report import HealthReport, Observation, Violation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.settings import LAYERS, Setting, Settings

_ORIGIN = "margins"


class Margin(NamedTuple):
    """The value of a report that came nearest to a limit.

    Args:
        setting: the setting that holds the limit.
        violation: what a check says of it under a tighter limit.
        limit: the limit in force for the layer.
        used: the part of the limit that is used up, 1 at the limit.
        is_least: whether the value may not fall below the limit, rather than rise above it.
    """

    setting: str
    violation: Violation
    limit: float
    used: float
    is_least: bool


def margins(report: HealthReport) -> list[Margin]:
    """Return how near a report came to each limit, the nearest first; it asks for no verdict."""
    settings, observation = report._settings, report.observation
    if not observation.is_of_own_step:
        observation = with_flow(observation)
    found = []
    for check in cast("tuple[Check, ...]", settings.checks):
        judges = check.judges_steps or not observation.is_of_own_step
        if judges and settings.chooses(check.name):
            found += [m for s in check.settings for m in _nearest(check, s, settings, observation)]
    objected = _objected(report)
    kept = (m for m in found if m.used <= 1 or (m.violation.check, m.violation.layer) in objected)
    return sorted(kept, key=lambda margin: -margin.used)


def _objected(report: HealthReport) -> set[tuple[str, str]]:
    """Return the checks and layers of all that was found, whatever became of it.

    A value beyond its limit that is not among it is one that the judge explains otherwise.
    """
    judgement = report._judgement
    accepted = [violation for violation, _ in judgement.waived]
    found = [*judgement.violations, *judgement.warned, *accepted]
    return {(one.check, one.layer) for each in found for one in (each, *each.folded)}


def _nearest(
    check: Check, setting: Setting, settings: Settings, observation: Observation
) -> Iterator[Margin]:
    """Yield the value nearest to a limit, if the check measured any."""
    if setting.type is not float or settings[setting.name].value is None:
        return
    for extreme in _extremes(setting):
        tight = {setting.name: extreme}
        everywhere = {"thresholds": {"*": tight}} if setting.per_layer else {}
        tightened = settings.override({**tight, **everywhere}, _ORIGIN)
        met = [
            _margin(setting, violation, limit, is_least=violation.value < extreme)
            for violation in _violations(check, observation, tightened, extreme)
            if (limit := settings.limit(setting.name, violation.layer).value) is not None
            and any(fnmatchcase(violation.layer, p) for p in settings[LAYERS.name].value)
        ]
        if met:
            yield max(met, key=lambda margin: margin.used)
            return


def _extremes(setting: Setting) -> Iterator[float]:
    """Yield the values of a limit that let the least pass: of one from above, and from below."""
    yield 0.0 if setting.minimum is None else setting.minimum
    yield 1e300 if setting.maximum is None else setting.maximum


def _violations(
    check: Check, observation: Observation, settings: Settings, limit: float
) -> list[Violation]:
    """Return what a check finds that breaks this very limit; nothing where it cannot be asked."""
    try:
        findings = list(check.run(observation, settings))
    except Exception:  # noqa: BLE001 - no check is written for such limits, and a project's least of all
        return []
    return [
        found
        for found in findings
        if isinstance(found, Violation) and found.limit == limit and math.isfinite(found.value)
    ]


def _margin(setting: Setting, violation: Violation, limit: float, *, is_least: bool) -> Margin:
    above, below = (limit, violation.value) if is_least else (violation.value, limit)
    used = above / below if below else math.inf if above else 1.0
    return Margin(setting.name, violation, limit, used, is_least)
