"""Runs the probes that are asked for beside an inspection, by what a user says of the batch."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.probes.probe import NotApplicableError, Probe, UntellableError
from pytest_modelhealth.progress import track

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_modelhealth.capture.engine import Engine, Request
    from pytest_modelhealth.probes.intervening.running import Runs
    from pytest_modelhealth.report import Observation, ProbeRecord
    from pytest_modelhealth.settings import Settings


class Conventions(NamedTuple):
    """How a batch is laid out, and what a model promises of it.

    Args:
        batch_dim: the dimension of samples, where it is not the first; ``None`` infers it.
        time_dim: the dimension of the steps of a sequence, as of a batch ``(N, C, T)``, where its
            sizes do not tell; counted from behind if negative.
        causal: whether no output may depend on later inputs; ``None`` reads that off the target.
        padding: a boolean tensor ``(N, T)``, true where there is padding, as for the
            ``key_padding_mask`` of torch; ``None`` reads it off masks and lengths in the batch.
        trained: full names of the parameters that an optimizer holds; ``None`` where none is known.
    """

    batch_dim: int | None = None
    time_dim: int | None = None
    causal: bool | None = None
    padding: Tensor | None = None
    trained: frozenset[str] | None = None

    @classmethod
    def of(cls, batch_dim: Any, time_dim: Any, causal: Any, padding: Any) -> Conventions:
        """Return what was said, once it is sound.

        Raises:
            InspectionError: one of them is of a wrong type; the message says what is expected.
        """
        is_first = batch_dim is None or (_is_number(batch_dim) and batch_dim >= 0)
        if not is_first:
            raise InspectionError(
                "batch_dim must be the number of a dimension, counted from 0, such as 1, not "
                f"{batch_dim!r}"
            )
        if not (time_dim is None or _is_number(time_dim)):
            raise InspectionError(
                f"time_dim must be the number of a dimension, such as 2 or -1, not {time_dim!r}"
            )
        if not (causal is None or isinstance(causal, bool)):
            raise InspectionError(f"causal must be True, False or None, not {causal!r}")
        shape, dtype = getattr(padding, "shape", None), getattr(padding, "dtype", None)
        if padding is not None and (str(dtype) != "torch.bool" or len(shape or ()) != 2):
            given = repr(padding) if shape is None else f"{dtype} of shape {tuple(shape)}"
            raise InspectionError(
                "padding must be a boolean tensor of shape (samples, length), true where there is "
                f"padding, such as ids == 0, not {given}"
            )
        return cls(batch_dim, time_dim, causal, padding)

    def asked(self, settings: Settings) -> Settings:
        """Return settings under which what is promised of a model is asked for by name.

        Raises:
            InspectionError: no probe is asked for.
        """
        said = [name for name in self._fields[:4] if getattr(self, name) is not None]
        asked = (settings.probes(check.name) for check in settings.checks if check.is_probe)
        if said and not any(asked):
            raise InspectionError(
                f"{said[0]}= is for probes, and none is asked for: say probes=True, or name one"
            )
        promised = {"causality": self.causal, "padding": self.padding is not None}
        probes = settings["probes"]
        more = [n for n in promised if promised[n] and settings.probes(n) and n not in probes.value]
        return settings.override({"probes": [*probes.value, *more]}, probes.origin)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Probing:
    """The probes of one inspection: begun before it runs, since a run may write to its batch.

    Args:
        engine: runs the model.
        request: what is inspected.
        settings: which probes are to run.
        conventions: what cannot be inferred from the batch.
    """

    def __init__(
        self, engine: Engine, request: Request, settings: Settings, conventions: Conventions
    ) -> None:
        probes = cast("tuple[Probe, ...]", settings.checks)
        self._probes = [probe for probe in probes if probe.is_probe]
        self._asked = {probe.name: settings.probes(probe.name) for probe in self._probes}
        self._engine, self._conventions, self._settings = engine, conventions, settings
        self._request = request
        if any(self._asked.values()):
            from pytest_modelhealth.capture.step.batch import copied_batch

            copies = copied_batch(request.inputs), copied_batch(request.target)
            self._request = replace(request, inputs=copies[0], target=copies[1])

    def after(self, observation: Observation) -> Observation:
        """Return what the inspection saw, with what the probes find."""
        chosen = [probe for probe in self._probes if self._runs(probe, observation)]
        if not chosen:
            return observation
        from pytest_modelhealth.probes.intervening.running import Runs
        from pytest_modelhealth.report import Probed

        with self._engine.called(self._request) as request:
            runs = Runs(self._engine, request, observation, self._settings, self._conventions)
            records = [_timed(probe, runs) for probe in track(chosen, "probing")]
        probed = Probed(tuple(records), runs.base_forwards, runs.base_seconds)
        return replace(observation, probes=probed)

    def _runs(self, probe: Probe, observation: Observation) -> bool:
        asked = self._asked[probe.name]
        if probe.automatic and not probe.is_named(self._settings) and asked is not False:
            return probe.is_called_for(observation, self._settings)
        return bool(asked)


def _timed(probe: Probe, runs: Runs) -> ProbeRecord:
    """Return what a probe finds, with what it took beside the runs that all share."""
    runs.count.clear()
    base, start = runs.base_seconds, time.perf_counter()
    record = _record(probe, runs)
    seconds = time.perf_counter() - start - (runs.base_seconds - base)
    forwards, backwards = runs.count["forwards"], runs.count["backwards"]
    return replace(record, forwards=forwards, backwards=backwards, seconds=seconds)


def _record(probe: Probe, runs: Runs) -> ProbeRecord:
    from pytest_modelhealth.probes.intervening.running import said
    from pytest_modelhealth.report import Outcome, ProbeRecord

    reason, outcome = runs.why_not, Outcome.NOT_TOLD
    try:
        if not reason:
            found = probe.probe(runs)
            return ProbeRecord(
                probe.name,
                changed=found.changed,
                partings=tuple(found.partings),
                notes=found.notes,
            )
    except UntellableError as end:
        if isinstance(end, NotApplicableError):
            outcome = Outcome.NOT_APPLICABLE
        return ProbeRecord(probe.name, outcome, str(end), end.changed, notes=end.notes)
    except InspectionError as error:  # another thread inspects this model by now
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - ours, as in a hook: the inspection stands
        reason = f"an error in pytest-modelhealth: {said(error)}"
    return ProbeRecord(probe.name, outcome, reason)
