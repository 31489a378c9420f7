"""Judges the records of probes: what differs is held against limits, maybe under other ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_modelhealth.checks.facts import at, place
from pytest_modelhealth.probes.catalogue import Kind
from pytest_modelhealth.report import Finding, Observation, Outcome, Parting
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.wings import wing

_FEW = 3


def findings(probe: Any, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what the record of a probe shows, if it ran.

    What could not be judged leaves the verdict alone, unless the probe was asked for by name.
    """
    record, root = observation.probes.get(probe.name), observation.layers.get("")
    if record is None or root is None:
        return
    if record.outcome is Outcome.JUDGED:
        judge_parting = wing(probe.judge)
        for parting in record.partings:
            yield from judge_parting(probe, parting, observation, settings)
    elif probe.name in settings["probes"].value:
        yield probe.inconclusive(root, record.reason)


def judge(
    probe: Any, parting: Parting, observation: Observation, settings: Settings
) -> Iterator[Finding]:
    """Yield a violation if what differs breaks a limit, at the layer where it begins."""
    kind = probe.kinds.get(parting.kind, Kind())
    limit = settings[probe.settings[0].name] if kind.is_limited else None
    if limit is not None and parting.effect <= limit.value:
        return
    culprit = place(observation, parting.layer)
    began, where = f"; it begins there{at(parting.line)}" if parting.line else "", "its output"
    if parting.taker:
        steps = ", ".join(f"`{step}`" for step in parting.between[-_FEW:])
        by = f" by {steps}" if steps else ""
        began = f"; it begins in its own code{by}, before {parting.taker!r}{at(parting.line)}"
        where = f"what {parting.taker!r} is given"
    if parting.role == "loss":
        where = "the loss"
    details = []
    if parting.before is not None and parting.after is not None:
        there = f" at {parting.place}" if parting.place else ""
        changed = observation.probes[probe.name].changed
        details = [f"{where}{there} is {parting.before:.4g}; with {changed}, {parting.after:.4g}"]
    names = {step.rstrip("_").lower() for step in parting.between}
    class_name = "" if parting.taker else culprit.type_name.lower()
    fitting = (
        text
        for words, text in probe.causes.items()
        if any(word in names or word in class_name for word in words.split())
    )
    yield probe.violation(
        culprit,
        (kind.said or probe.said).format(
            effect=f"{parting.effect:.2g}",
            began=began,
            detail=parting.detail,
            more=f"; {parting.detail}" if parting.detail else "",
        ),
        value=parting.effect,
        limit=limit,
        role=None if parting.taker else parting.role,
        tensor=parting.tensor,
        cause=kind.cause or next(fitting, probe.otherwise),
        independent=True,
        severity="warn" if kind.may_be_meant else "fail",
        details=details,
    )


def has_own_functions(observation: Observation, settings: Settings) -> bool:
    """Whether a custom function of autograd ran."""
    return observation.own_functions
