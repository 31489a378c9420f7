"""`judge`: every check that is chosen, what is waived, what only warns, and what could not run."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from pytest_modelhealth.checks.check import Check
from pytest_modelhealth.checks.facts import called, flow_of, is_unfitted, trainable
from pytest_modelhealth.errors import LayerNotFoundError, SettingsError, suggest, suggest_layer
from pytest_modelhealth.report import Finding, Grade, Judgement, Observation, Status
from pytest_modelhealth.report.flow import near
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.report.observation import BACKWARD_ROLES, STATE_ROLES
from pytest_modelhealth.settings import Settings


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
    # every record is asked for, and again by most checks: what makes them would be asked each time
    observation = replace(observation, layers=dict(observation.layers))
    if observation.is_of_own_step:
        checks = [check for check in checks if check.judges_steps]
    else:
        observation = with_flow(observation)
    judged = _judged_layers(observation, settings)
    findings, broken = list[Finding](), list[Finding]()
    for check in checks:
        try:
            for finding in _findings(check, observation, settings):
                findings += [_graded(finding, settings)]  # those before an exception stand
        except SettingsError:
            raise  # the caller's, who learns of it at once
        except Exception as error:  # noqa: BLE001 - a project's check may raise anything
            code, text = type(check).run.__code__, str(error)
            place = f"{near(code.co_filename)}:{code.co_firstlineno}"
            if not isinstance(error, _RubbishError):
                text = f"it raised {type(error).__name__}: {error}".removesuffix(": ")
                frame = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{near(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"
            broken.append(Finding(check.name, "", message=text, place=place, grade="broken"))
    unfitted = Unfitted(observation, settings.checks)
    notes = [f for f in findings if f.grade == "note" and not judged.isdisjoint(f.layers)]
    findings = [f for f in findings if f.grade != "note"]
    folded = _folded(observation, findings, settings, unfitted)
    # a fault is about all layers that show it
    shown = _waived((f for f in folded if not judged.isdisjoint(f.layers)), settings, unfitted)
    # a check on gradients was to run, and none has said what is missing
    on_gradients = {check.name for check in checks if check.role == "parameter_gradients"}
    is_missed = bool(on_gradients) and on_gradients.isdisjoint(f.check for f in findings)
    is_missed &= not any(f.grade == "fail" and f.waiver is None for f in shown)
    nothing = why_nothing(observation, gradients=is_missed)
    used = {finding.waiver for finding in shown}
    return Judgement(
        (*([] if nothing is None else [nothing]), *shown, *broken, *notes),
        unused_waivers=tuple(  # those that accepted nothing, of those for a check that ran
            waiver
            for waiver in settings.waivers
            if waiver not in used and any(waiver.concerns(c.name) for c in _chosen_checks(settings))
        ),
    )


def _chosen_checks(settings: Settings) -> list[Check]:
    chosen = [check for check in settings.checks if settings.chooses(check.name)]
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
    if not isinstance(finding, Finding):
        return f"{finding!r}, which is no Finding"
    if finding.check != check.name:
        return f"a finding of another check, {finding.check!r}"
    if finding.layer not in observation.layers and finding.layer != "":
        nearest = suggest(str(finding.layer), observation.layers)
        model = observation.model_type
        return f"a finding in layer {finding.layer!r}, which {model} does not have{nearest}"
    value: Any = finding.value
    if not isinstance(value, int | float):
        return f"a finding whose value is no number: {value!r}"
    return ""


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
    if not findings:
        return []
    from pytest_modelhealth.checks.judging.diagnosis import diagnose  # where something is wrong

    folded = diagnose(observation, findings)

    def fails(violation: Finding) -> bool:
        return violation.grade == "fail" and not unfitted.explain(violation)

    mild = [finding for finding in folded if not fails(finding)]
    hidden = [v for root in mild for v in root.folded if fails(v)]
    if not hidden:
        return folded
    shown = [replace(f, folded=tuple(v for v in f.folded if v not in hidden)) for f in folded]
    order = [check.name for check in settings.checks]
    return sorted([*shown, *diagnose(observation, hidden)], key=lambda f: order.index(f.check))


def _graded(finding: Finding, settings: Settings) -> Finding:
    """Return a finding as grave as its check is set; unset, it may only warn by itself.

    What warns so fails where all is strict. A note stays one.
    """
    chosen, strict = settings.severity(finding.check), settings["strict"]
    is_unset = chosen.origin == "default"
    grade: Grade = chosen.value
    if is_unset and "warn" in (finding.grade, grade):
        grade = "fail" if strict.value else "warn"
    if finding.grade in ("unsure", "note", grade):
        return finding
    message, details = finding.message, finding.details
    if grade == "fail" and is_unset:
        message = f"{message} (strict)"
        details = (f"a warning, which fails as strict is set ({strict.origin})", *details)
    return replace(finding, grade=grade, message=message, details=details)


def _waived(findings: Iterable[Finding], settings: Settings, unfitted: Unfitted) -> list[Finding]:
    """Return findings with what a waiver accepts marked, and one line for what depth explains."""
    shown: list[Finding] = []
    explained: list[Finding] = []
    for finding in findings:
        is_unsure = finding.grade == "unsure"
        waiver = next((w for w in settings.waivers if w.covers(finding.check, finding.layer)), None)
        if waiver is not None:
            shown += [] if is_unsure else [replace(finding, waiver=waiver)]
        else:
            (explained if not is_unsure and unfitted.explain(finding) else shown).append(finding)
    if not explained:
        return shown
    others = [f for f in shown if not (f.grade == "unsure" and unfitted.doubt(f))]
    return [unfitted.line(explained), *others]


def why_nothing(observation: Observation, *, gradients: bool) -> Finding | None:
    """Return why nothing could be judged, or no gradient where they were asked for, if so.

    Gradients are left out by ``backward=False`` and by a ``watch()`` without them. A model that has
    no parameters has nothing to learn. The loss that a model returns is an output of it, and has a
    gradient of one.
    """
    ran = [record for record in called(observation) if "activations" in record.watched]
    outputs = [(record.activations, record.status is not Status.UNSUPPORTED) for record in ran]
    numbers = [is_known if out is None else out.count > 0 for out, is_known in outputs]
    is_silent = bool(ran) and ran[0].name == "" and ran[0].reason.endswith(", no tensor")
    if ran and (is_silent or not any(numbers)):
        reason = f"nothing came ({ran[0].reason}): return what it computes, consume generators"
        if ran[0].activations is not None:
            reason = "every activation is empty: the batch has no samples; give at least one"
        elif "meta device" in ran[0].reason:
            reason = f"no layer that ran returned a number to judge ({ran[0].reason}); move model "
            reason += "and batch to a device with values, such as the CPU"
        return Finding("observation", ran[0].name, message=reason, grade="unsure")
    if only := observation.outputs_only:
        reason = f"its inputs and outputs alone were judged, and no layer inside: {only}"
        return Finding("observation", "", message=reason, grade="unsure")
    back = [r for r in called(observation) if not r.watched.isdisjoint(BACKWARD_ROLES)]
    reason = observation.no_gradients
    seen = any(r.parameter_gradients or (r.name and r.gradients is not None) for r in back)
    if observation.backward and any(map(trainable, back)) and not seen:
        reason = reason or "the backward pass reached no layer; compute the loss from the output"
    if not (gradients and back and reason):
        return None
    text = f"no gradient could be judged: {reason}, or say backward=False"
    return Finding("observation", "", message=text, grade="unsure")


class Unfitted:
    """The batch normalisations of one observation that have seen no batch.

    In evaluation mode such a model is as deep as it looks: its activations grow, fade or line up
    layer by layer, and so do its gradients, with nothing wrong.
    """

    def __init__(self, observation: Observation, checks: Iterable[Check]) -> None:
        self._observation = observation
        self._checks = frozenset(check.name for check in checks if check.reads_scale)

    def explain(self, violation: Finding) -> bool:
        """Whether depth behind one of them may have brought a violation about.

        Activations are made behind it; gradients pass it on their way back, or begin behind it.
        """
        if violation.check not in self._checks or violation.independent:
            return False
        is_before = violation.role in BACKWARD_ROLES and violation.layer in self._before
        is_behind = any(seen.layer in self._behind for seen in violation.evidence)
        return violation.role not in STATE_ROLES and (is_before or is_behind)

    def doubt(self, finding: Finding) -> bool:
        """Whether a finding was in doubt for other reasons where depth explains it, too."""
        return finding.check in self._checks and finding.layer in self._behind

    def line(self, explained: list[Finding]) -> Finding:
        """Return the one line that stands for all that they explain."""
        first, *others = self._norms
        so_do = f", as in {len(others)} more" if others else ""
        every = [violation for root in explained for violation in (root, *root.folded)]
        checks = ", ".join(dict.fromkeys(violation.check for violation in every))
        reason = (
            f"its running mean is 0 and its variance 1, as they start{so_do}, so that evaluation "
            f"mode normalises nothing, and what depth explains is not judged ({checks}); train "
            "for a step first, or inspect in training mode"
        )
        return Finding("normalization", first, message=reason, grade="unsure")

    @cached_property
    def _norms(self) -> tuple[str, ...]:
        return tuple(r.name for r in called(self._observation) if is_unfitted(r))

    @cached_property
    def _behind(self) -> frozenset[str]:
        return flow_of(self._observation).reach(*self._norms).union(self._norms)

    @cached_property
    def _before(self) -> frozenset[str]:
        return flow_of(self._observation).feeding(*self._norms).union(self._norms)
