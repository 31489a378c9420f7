"""Runs the probes that are asked for beside an inspection, by what a user says of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pytest_modelhealth.checks.zero_gradients import TRIAL, call_for_steps
from pytest_modelhealth.errors import InspectionError, in_one_line
from pytest_modelhealth.probes.conventions import (
    Conventions,
    Effects,
    NotApplicableError,
    UntellableError,
)
from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.progress import track

if TYPE_CHECKING:
    from pytest_modelhealth.capture.engine import Engine, Request
    from pytest_modelhealth.probes.intervening.running import Runs
    from pytest_modelhealth.report import Observation, Parting, ProbeRecord
    from pytest_modelhealth.settings import Settings


MISSING_GRADIENTS = "missing_gradients"
"""The check that asks for steps of training where it saw a gradient of zero."""


class Probing:
    """The probes of one inspection: begun before it runs, since a run may write to its batch."""

    def __init__(
        self, engine: Engine, request: Request, settings: Settings, conventions: Conventions
    ) -> None:
        probes = cast("tuple[Probe, ...]", settings.checks)
        self._probes = [probe for probe in probes if probe.is_probe]
        self._asked = {probe.name: settings.probes(probe.name) for probe in self._probes}
        self._may_train = bool(settings["probes"].value) and settings.chooses(MISSING_GRADIENTS)
        self._engine, self._conventions, self._settings = engine, conventions, settings
        self._request = request
        if any(self._asked.values()):
            from pytest_modelhealth.capture.step.batch import copied_batch

            copies = copied_batch(request.inputs), copied_batch(request.target)
            self._request = replace(request, inputs=copies[0], target=copies[1])

    def after(self, observation: Observation) -> Observation:
        """Return what the inspection saw, with what the probes find."""
        chosen = [probe for probe in self._probes if self._runs(probe, observation)]
        has_trial = self._may_train and call_for_steps(observation)
        if not (chosen or has_trial):
            return observation
        from pytest_modelhealth.probes.intervening.running import Runs
        from pytest_modelhealth.report import Probed

        with self._engine.called(self._request) as request:
            runs = Runs(self._engine, request, observation, self._settings, self._conventions)
            tried = [(probe.name, probe.probe) for probe in chosen]
            tried += [(TRIAL, _what_stays_zero)] if has_trial else []
            records = [_timed(name, probe, runs) for name, probe in track(tried, "probing")]
        probed = Probed(tuple(records), runs.base_forwards, runs.base_seconds)
        return replace(observation, probes=probed)

    def _runs(self, probe: Probe, observation: Observation) -> bool:
        asked = self._asked[probe.name]
        if probe.automatic and not probe.is_named(self._settings) and asked is not False:
            return probe.is_called_for(observation, self._settings)
        return bool(asked)


def _what_stays_zero(runs: Runs) -> Effects:
    from pytest_modelhealth.probes.intervening.alike import what_stays_zero

    return what_stays_zero(runs)


def _timed(name: str, probe: Callable[[Runs], Effects], runs: Runs) -> ProbeRecord:
    """Return the record of a probe, with what it took beside the runs that all share."""
    from pytest_modelhealth.report import Outcome, ProbeRecord

    runs.count.clear()
    base, start = runs.base_seconds, time.perf_counter()
    reason, outcome, changed, notes = runs.why_not, Outcome.NOT_TOLD, "", tuple[str, ...]()
    partings: Sequence[Parting] = ()
    try:
        if not reason:
            changed, partings, notes = probe(runs)
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
