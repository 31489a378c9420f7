"""How near a report came to each limit.

A check says what it measured only where a limit is broken. So each is asked again under the
tightest limit that there is: the value furthest on is how near it came.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

from pytest_modelhealth.checks import Check
from pytest_modelhealth.report import HealthReport, Observation, Violation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.settings import LAYERS, Setting, Settings


class Margin(NamedTuple):
    """The value of a report that came nearest to a limit."""

    setting: str
    violation: Violation  # what a check says of it under a tighter limit
    limit: float  # in force for the layer
    used: float  # the part of the limit that is used up, 1 at the limit
    is_least: bool  # whether the value may not fall below the limit, rather than rise above it


def margins(report: HealthReport) -> list[Margin]:
    """Return how near a report came to each limit, the nearest first; it asks for no verdict.

    A value beyond its limit that nothing was found for is one that the judge explains otherwise.
    """
    settings, observation, judgement = report._settings, report.observation, report._judgement
    is_own_step = observation.is_of_own_step
    observation = observation if is_own_step else with_flow(observation)
    waived = [violation for violation, _ in judgement.waived]
    grave = [*judgement.violations, *judgement.warned, *waived]
    objected = {(one.check, one.layer) for each in grave for one in (each, *each.folded)}
    nearest = []
    for check in cast("tuple[Check, ...]", settings.checks):
        if settings.chooses(check.name) and (check.judges_steps or not is_own_step):
            for setting in check.settings:
                measured = _measured(check, setting, settings, observation)
                nearest += [max(measured, key=lambda one: one.used)] if measured else []
    kept = [m for m in nearest if m.used <= 1 or (m.violation.check, m.violation.layer) in objected]
    return sorted(kept, key=lambda margin: -margin.used)


def _measured(
    check: Check, setting: Setting, settings: Settings, observation: Observation
) -> list[Margin]:
    """Return what a check measures beside a limit: one from above, else one from below."""
    if setting.type is not float or settings[setting.name].value is None:
        return []
    judged = settings[LAYERS.name].value
    least = 0.0 if setting.minimum is None else setting.minimum
    for tightest in (least, 1e300 if setting.maximum is None else setting.maximum):
        limits = {setting.name: tightest}
        everywhere = {"thresholds": {"*": limits}} if setting.per_layer else {}
        tightened = settings.override({**limits, **everywhere}, "margins")
        try:
            found = [v for v in check.run(observation, tightened) if isinstance(v, Violation)]
        except Exception:  # noqa: BLE001 - no check is written for such limits, and a project's least of all
            continue
        measured = []
        for one in found:
            limit = settings.limit(setting.name, one.layer).value
            is_measured = one.limit == tightest and math.isfinite(one.value) and limit is not None
            if is_measured and any(fnmatchcase(one.layer, each) for each in judged):
                is_least = one.value < tightest
                above, below = (limit, one.value) if is_least else (one.value, limit)
                used = above / below if below else math.inf if above else 1.0
                measured.append(Margin(setting.name, one, limit, used, is_least))
        if measured:
            return measured
    return []
