"""`judge`: every check that is chosen, what is waived, what only warns, and what could not run."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.judging.diagnosis import (
    Unfitted,
    diagnose,
    why_nothing,
)
from pytest_modelhealth.errors import LayerNotFoundError, SettingsError, suggest, suggest_layer
from pytest_modelhealth.report import BrokenCheck, Inconclusive, Judgement, Observation, Violation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import Waiver


def judge(observation: Observation, settings: Settings) -> Judgement:
    """Run every check that is chosen, and sort out what is waived and what only warns.

    A check that raises is named in the judgement; the others still run. A run that showed no number
    is inconclusive, and so is one without any gradient although nobody left them out.

    Raises:
        LayerNotFoundError: a pattern of the setting ``layers``, or of ``thresholds``, matches no
            layer.
        SettingsError: no check is left to run.
    """
    checks = _chosen_checks(settings)
    if observation.is_of_own_step:
        checks = [check for check in checks if check.judges_steps]
    else:
        observation = with_flow(observation)
    judged = _judged_layers(observation, settings)
    findings: list[Finding] = []
    broken: list[BrokenCheck] = []
    for check in checks:
        try:
            for finding in _findings(check, observation, settings):
                findings.append(finding)  # noqa: PERF402 - those before an exception stand
        except _RubbishError as error:
            code = type(check).run.__code__
            where = f"{_shown(code.co_filename)}:{code.co_firstlineno}"
            broken.append(BrokenCheck(check.name, str(error), where))
        except SettingsError:
            raise  # the caller's, who learns of it at once
        except Exception as error:  # noqa: BLE001 - a project's check may raise anything
            text = f"it raised {type(error).__name__}: {error}".removesuffix(": ")
            broken.append(BrokenCheck(check.name, text, _place(error)))
    unfitted = Unfitted(observation, cast("tuple[Check, ...]", settings.checks))
    shown = [  # a fault is about all layers that show it
        f
        for f in _folded(observation, findings, settings, unfitted)
        if not judged.isdisjoint(f.layers if isinstance(f, Violation) else (f.layer,))
    ]
    judgement = _sort_out(shown, settings, unfitted, tuple(broken))
    # a check on gradients was to run, and none has said what is missing
    on_gradients = {check.name for check in checks if check.role == "parameter_gradients"}
    is_missed = bool(on_gradients) and on_gradients.isdisjoint(f.check for f in findings)
    nothing = why_nothing(observation, gradients=is_missed and not judgement.violations)
    if nothing is None:
        return judgement
    return replace(judgement, inconclusive=(nothing, *judgement.inconclusive))


def _chosen_checks(settings: Settings) -> list[Check]:
    checks = cast("tuple[Check, ...]", settings.checks)
    chosen = [check for check in checks if settings.chooses(check.name)]
    if not chosen:
        named = ", ".join(
            f"{name}={settings[name].value!r} ({settings[name].origin})"
            for name in ("checks", "skip_checks")
        )
        raise SettingsError(f"no check is left to run: {named}")
    return chosen


class _RubbishError(Exception):
    """What a check gave is no finding."""


def _findings(check: Check, observation: Observation, settings: Settings) -> Iterator[Finding]:
    found = check.run(observation, settings)
    if not isinstance(found, Iterable):
        raise _RubbishError(f"run() returned {found!r}: yield findings, or return a list of them")
    for finding in found:
        if why := _why_rubbish(finding, check, observation):
            raise _RubbishError(f"run() gave {why}")
        yield finding


def _why_rubbish(finding: Any, check: Check, observation: Observation) -> str:
    if not isinstance(finding, Violation | Inconclusive):
        return f"{finding!r}, which is no Violation and no Inconclusive"
    if finding.check != check.name:
        return f"a finding of another check, {finding.check!r}"
    if finding.layer not in observation.layers and finding.layer != "":
        nearest = suggest(str(finding.layer), observation.layers)
        model = observation.model_type
        return f"a finding in layer {finding.layer!r}, which {model} does not have{nearest}"
    value: Any = finding.value if isinstance(finding, Violation) else 0.0
    if not isinstance(value, int | float):
        return f"a violation whose value is no number: {value!r}"
    return ""


def _place(error: Exception) -> str:
    """Return the line that raised, and its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_shown(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _judged_layers(observation: Observation, settings: Settings) -> set[str]:
    """Return the layers that the setting ``layers`` names.

    Each threshold by layer must have a layer, too; shared ones may be for other models.
    """
    patterns, origin = settings["layers"]

    def matched(pattern: str, said: str) -> set[str]:
        found = {name for name in observation.layers if fnmatchcase(name, pattern)}
        if not found:
            nearest, model = suggest_layer(pattern, observation.layers), observation.model_type
            raise LayerNotFoundError(f"{said} matches no layer of {model}{nearest}")
        return found

    for special in settings.layer_limits:
        if not special.shared:
            said = f"thresholds={{{special.layers!r}: ...}} ({special.limit.origin})"
            matched(special.layers, said)
    return {
        name for pattern in patterns for name in matched(pattern, f"layers={pattern!r} ({origin})")
    }


def _folded(
    observation: Observation, findings: list[Finding], settings: Settings, unfitted: Unfitted
) -> list[Finding]:
    """Return the findings with consequences folded, none that fails under one that does not."""
    folded = diagnose(observation, findings)

    def fails(violation: Violation) -> bool:
        return not (_only_warns(violation, settings) or unfitted.explain(violation))

    mild = [f for f in folded if isinstance(f, Violation) and not fails(f)]
    hidden = [v for root in mild for v in root.folded if fails(v)]
    if not hidden:
        return folded
    shown = [
        replace(finding, folded=tuple(v for v in finding.folded if v not in hidden))
        if isinstance(finding, Violation)
        else finding
        for finding in folded
    ]
    order = [check.name for check in settings.checks]
    return sorted([*shown, *diagnose(observation, hidden)], key=lambda f: order.index(f.check))


def _only_warns(violation: Violation, settings: Settings) -> bool:
    """Whether its check only warns, or it does itself and nobody set that the check fails."""
    chosen = settings.severity(violation.check)
    is_mild = violation.severity == "warn" and chosen.origin == "default"
    return is_mild or bool(chosen.value == "warn")


def _sort_out(
    findings: Iterable[Finding],
    settings: Settings,
    unfitted: Unfitted,
    broken: tuple[BrokenCheck, ...],
) -> Judgement:
    violations: list[Violation] = []
    warned: list[Violation] = []
    inconclusive: list[Inconclusive] = []
    explained: list[Violation] = []
    waived: list[tuple[Violation, Waiver]] = []
    for finding in findings:
        waiver = next((w for w in settings.waivers if w.covers(finding.check, finding.layer)), None)
        if isinstance(finding, Inconclusive):
            inconclusive += [] if waiver else [finding]
        elif waiver is not None:
            waived.append((finding, waiver))
        elif unfitted.explain(finding):
            explained.append(finding)
        else:
            (warned if _only_warns(finding, settings) else violations).append(finding)
    used = {waiver for _, waiver in waived}
    if explained:
        others = [finding for finding in inconclusive if not unfitted.doubt(finding)]
        inconclusive = [unfitted.line(explained), *others]
    return Judgement(
        violations=tuple(violations),
        inconclusive=tuple(inconclusive),
        waived=tuple(waived),
        unused_waivers=tuple(  # those that accepted nothing, of those for a check that ran
            waiver
            for waiver in settings.waivers
            if waiver not in used and any(waiver.concerns(c.name) for c in _chosen_checks(settings))
        ),
        warned=tuple(warned),
        broken=broken,
    )
