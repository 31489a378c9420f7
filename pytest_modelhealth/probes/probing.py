"""Runs the probes that are asked for beside an inspection, and judges what their records show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.checks.facts import at, place
from pytest_modelhealth.checks.zero_gradients import TRIAL, call_for_steps
from pytest_modelhealth.errors import InspectionError, in_one_line
from pytest_modelhealth.probes.catalogue import Kind
from pytest_modelhealth.probes.conventions import (
    Conventions,
    Effects,
    NotApplicableError,
    UntellableError,
    on_several_ranks,
)
from pytest_modelhealth.probes.intervening.batches import copied
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Finding, Observation, Outcome, Parting, Probed, ProbeRecord
from pytest_modelhealth.settings import APPLICABLE, Settings
from pytest_modelhealth.wings import wing

_FEW = 3


class Probing:
    """The probes of one inspection: begun before it runs, since a run may write to its batch."""

    def __init__(
        self, engine: Engine, request: Request, settings: Settings, conventions: Conventions
    ) -> None:
        self._probes: list[Any] = [check for check in settings.checks if check.is_probe]
        self._asked = {probe.name: settings.probes(probe.name) for probe in self._probes}
        self._may_train = bool(settings["probes"].value) and settings.chooses("missing_gradients")
        self._engine, self._conventions, self._settings = engine, conventions, settings
        self._request = request
        self._by_default = APPLICABLE in settings["probes"].value and not on_several_ranks()
        if any(self._asked.values()) or self._by_default:
            for name in ("inputs", "target"):
                with suppress(Exception):  # an object of the user's, as `Runs.why_not` says
                    self._request = replace(self._request, **{name: copied(vars(request)[name])})

    def after(self, observation: Observation) -> Observation:
        """Return what the inspection saw, with what the probes find."""
        chosen = {p.name: p.experiment for p in self._probes if self._runs(p, observation)}
        unasked = [p for p in self._probes if p.by_default and self._asked[p.name] is None]
        unasked = unasked if self._by_default else []
        chosen |= {probe.name: probe.by_default for probe in unasked}
        if self._may_train and call_for_steps(observation):
            chosen[TRIAL] = "alike:what_stays_zero"
        if not chosen:
            return observation
        runs = Runs(self._engine, self._request, observation, self._settings, self._conventions)
        ends = _ends(runs, [probe.name for probe in unasked])
        items: Iterable[tuple[str, str]] = [*chosen.items()]
        if chosen.keys() - ends.keys():  # the others take no time
            items = wing("progress:track")(items, "probing")
        records = tuple(_record(name, asked, runs, ends.get(name)) for name, asked in items)
        probed = Probed(records, runs.base_forwards, runs.base_seconds)
        return replace(observation, probes=probed)

    def _runs(self, probe: Any, observation: Observation) -> bool:
        asked, is_named = self._asked[probe.name], probe.name in self._settings["probes"].value
        if probe.called_for and not is_named and asked is not False:
            return bool(wing(probe.called_for)(observation, self._settings))
        return bool(asked)


def _ends(runs: Runs, names: Sequence[str]) -> dict[str, Effects | UntellableError]:
    """Return how those probes end that one run of all their changes is enough for."""
    ends, start = dict[str, Effects | UntellableError](), time.perf_counter()
    with suppress(Exception):  # ours, or the user's, who is told by the probe that runs by itself
        if names and not runs.why_not:
            ends = wing("probes.intervening.combination:ends_of")(runs, names)
    runs.base_seconds = time.perf_counter() - start
    runs.base_forwards += runs.count["forwards"]
    return ends


def _record(
    name: str, experiment: str, runs: Runs, end: Effects | UntellableError | None
) -> ProbeRecord:
    """Return the record of a probe, with what it took beside the runs that all share.

    Args:
        experiment: what changes something and runs again, ``module:function`` of `intervening`.
        end: how it ends, where that is known without.
    """
    runs.count.clear()
    base, start = runs.base_seconds, time.perf_counter()
    reason, outcome, changed, notes = runs.why_not, Outcome.NOT_TOLD, "", tuple[str, ...]()
    partings: Sequence[Parting] = ()
    try:
        if isinstance(end, UntellableError):
            raise end
        if not reason:
            changed, partings, notes = end or wing(f"probes.intervening.{experiment}")(runs)
            outcome = Outcome.JUDGED
    except UntellableError as end:
        if isinstance(end, NotApplicableError):
            outcome = Outcome.NOT_APPLICABLE
        reason, changed, notes = str(end), end.changed, end.notes
    except InspectionError as error:  # another thread inspects this model by now
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - ours, as in a hook: the inspection stands
        reason = f"an error in pytest-modelhealth: {in_one_line(error)}"
    return ProbeRecord(
        name,
        outcome,
        reason,
        changed,
        tuple(partings),
        notes,
        forwards=runs.count["forwards"],
        backwards=runs.count["backwards"],
        seconds=time.perf_counter() - start - (runs.base_seconds - base),
    )


# ---- what a record shows -------------------------------------------------------------------------


def findings(probe: Any, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what the record of a probe shows, if it ran.

    What could not be judged leaves the verdict alone, unless the probe was asked for by name.
    """
    record, root = observation.probes.get(probe.name), observation.layers.get("")
    if record is None or root is None:
        return
    if record.outcome is Outcome.JUDGED:
        for parting in record.partings:
            yield from wing(probe.judge)(probe, parting, observation, settings)
    elif probe.name in settings["probes"].value:
        yield probe.inconclusive(root, record.reason)


def judge(
    probe: Any, parting: Parting, observation: Observation, settings: Settings
) -> Iterator[Finding]:
    """Yield a violation if what differs breaks a limit, at the layer where it begins."""
    kind = probe.kinds.get(parting.kind, Kind())
    if kind.is_asked_for and not settings.probes(probe.name):
        return
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
