"""Runs a model over batches and merges what is seen of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pytest_modelhealth.capture import Engine, Request
from pytest_modelhealth.capture.observing.collector import Collector
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs, batch_size
from pytest_modelhealth.data_sets.batches import Batches, noted, pair, require_how_many
from pytest_modelhealth.data_sets.extremes import Extremes
from pytest_modelhealth.data_sets.modes import in_mode
from pytest_modelhealth.data_sets.odd_samples import OddSamples
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.probes.conventions import Conventions
from pytest_modelhealth.probes.probing import Probing
from pytest_modelhealth.report import Observation
from pytest_modelhealth.settings import Settings

MakeRequest = Callable[[Any, Any], Request]
Observe = Callable[[Request, tuple[Collector, ...]], Observation]


@dataclass(frozen=True)
class Limits:
    """What ends a run, in which mode it is and what it shows; as in `Inspector.run_batches`.

    Raises:
        InspectionError: one is of a wrong type.
    """

    training: bool | None
    max_batches: int | None
    max_seconds: float | None
    progress: bool | None

    def __post_init__(self) -> None:
        require_how_many(self.max_batches, self.progress)
        seconds = self.max_seconds
        if not (seconds is None or (type(seconds) in (int, float) and 0 <= seconds < math.inf)):
            raise InspectionError(
                f"max_seconds must be a number of seconds from 0 on, or None, not {seconds!r}"
            )
        if not isinstance(self.training, bool | None):
            raise InspectionError(f"training must be True, False or None, not {self.training!r}")


class Run:
    """One run over batches.

    Args:
        engine: runs the model.
        model: the model.
        settings: the limits in force.
        limits: what was asked for.
        has_loss: whether a loss needs a target.
        request: makes what is asked of the engine, of inputs and target of a batch.
        observe: runs it.
        agreed: as in `Batches`.
    """

    def __init__(
        self,
        engine: Engine,
        model: Any,
        settings: Settings,
        limits: Limits,
        has_loss: bool,
        request: MakeRequest,
        observe: Observe,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        self._agreed = agreed
        self._engine, self._model, self._settings = engine, model, settings
        self._limits, self._has_loss = limits, has_loss
        self._request, self._observe = request, observe
        self._extremes, self._odd_samples = Extremes(), OddSamples()

    def over(self, batches: Any) -> Observation:
        """Return what was seen of all batches.

        Raises:
            InspectionError: there was none, or one is not as it must be.
            Exception: whatever loader, model or loss raise, untouched.
        """
        limits = self._limits
        taken = Batches(
            batches, limits.max_batches, limits.max_seconds, limits.progress, self._agreed
        )
        merged: Observation | None = None
        with self._mode():
            for index, batch in enumerate(taken):
                with noted(f"batch {index}", "run_batches"):
                    seen = self._seen(batch, index)
                merged = seen if merged is None else merged.merge(seen)
        if merged is None:
            raise InspectionError(
                "there was no batch to run: batches is empty, an iterator that is used up, or a "
                "loader with drop_last of fewer samples than a batch; or max_batches=0"
            )
        merged = replace(self._extremes.after(merged), part=taken.part)
        return replace(merged, odd_samples=dict(self._odd_samples.found()))

    @contextmanager
    def _mode(self) -> Iterator[None]:
        if self._limits.training is None:
            yield
            return
        with in_mode(self._model, self._limits.training):
            yield

    def _seen(self, batch: Any, index: int) -> Observation:
        inputs, target = self._split(batch, index)
        arguments = Inputs.of(inputs)
        given = arguments.args, arguments.kwargs
        samples = batch_size(find_tensors((*given, target)))
        self._extremes.begin(index, samples)
        self._odd_samples.see(index, samples, find_tensors(given), target)
        request = self._request(inputs, target if self._has_loss else None)
        probing = None
        if index == 0:
            probing = Probing(self._engine, request, self._settings, Conventions())
        seen = self._observe(request, (self._extremes,))
        self._extremes.end()
        return seen if probing is None else probing.after(seen)

    def _split(self, batch: Any, index: int) -> tuple[Any, Any]:
        if self._has_loss:
            return pair(batch, f"batch {index}", _LOSS)
        return batch, None


_LOSS = (
    "a loss needs the target. One batch goes into run_inspection(inputs, target=..., loss=...); "
    "without a target leave loss out or bind it beforehand"
)
