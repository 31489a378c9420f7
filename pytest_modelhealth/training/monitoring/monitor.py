"""`TrainingMonitor`: sees steps of the user's own training loop."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import WHY_NOT_SEEN, LossScale
from pytest_modelhealth.capture.passive.step import PassiveWatch, WatchedStep
from pytest_modelhealth.errors import (
    InspectionError,
    ModelHealthWarning,
    NamesItsAttributes,
)
from pytest_modelhealth.layers import Selection, ensure_match, named_modules
from pytest_modelhealth.report import Finding, HealthReport, Observation, Status, Verdict
from pytest_modelhealth.report.verdict import Renderer
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.training.bridges import callback_of
from pytest_modelhealth.training.monitoring.clearing import Clearing
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.judging import Reaction, TrainingJudge
from pytest_modelhealth.training.monitoring.row import Event, StepRow, row_of
from pytest_modelhealth.training.monitoring.writing import CsvLines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MakeReport = Callable[[Observation], HealthReport]
Path = str | os.PathLike[str]

_MOST_MARKED = 8
"""Events of rules that are marked in a picture."""


class TrainingMonitor(NamesItsAttributes):
    """Watches steps of a training loop; made by `Inspector.monitor`.

    It is a context. Inside, the loop calls `step_end` after each step. It runs nothing of its own,
    holds no tensor and changes no number; between watched steps nothing of it is on the model, but
    for one hook in the step after one whose gradients added up.

    Args:
        model: the model that is trained.
        selection: which roles of which layers to observe.
        make_report: makes the report of a step.
        renderer: what shows the history.
        settings: the limits of rules in force.
        on_report: told of the report of the training when the monitor is closed.
        every, csv, scaler, keep, on_violation: as in `Inspector.monitor`.

    Attributes:
        history: the watched steps as arrays.
        observers: called with each new `StepRow`, in order, when the step is in the history and in
            the files.

    Raises:
        InspectionError: an argument is of a wrong type.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        make_report: MakeReport,
        *,
        every: int = 1,
        csv: Path | None = None,
        scaler: Any = None,
        keep: int = 1024,
        renderer: Renderer | None = None,
        settings: Settings,
        on_report: Callable[[HealthReport], object] | None = None,
        on_violation: Reaction = None,
    ) -> None:
        self.every = _whole(every, "every", 1)
        self.history = History(
            _whole(keep, "keep", 2), renderer=renderer, model_type=type(model).__name__
        )
        self.observers: list[Callable[[StepRow], object]] = []
        LossScale.of(scaler)
        self._model = model
        self._selection = selection
        self._make_report = make_report
        self._on_report = on_report
        self._judge = TrainingJudge(settings, make_report, on_violation)
        names = [n.name for n in named_modules(model) if selection.roles(n.name, n.module)]
        self._table = None if csv is None else CsvLines(csv, names)
        self._watch = PassiveWatch(model, selection, scaler)
        self._clearing = Clearing(model, self._watch)
        self._state = "new"
        self._on_close: list[Callable[[], object]] = []
        self._last: int | None = None
        self._latest: StepRow | None = None
        self._report: HealthReport | None = None

    # Begin and end.

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            step = self._watch.step
            if error is None and self._last is None and step is not None and step.hooks.passes:
                warnings.warn(
                    "the monitor saw no step: step_end() was never called; call it after each "
                    "training step",
                    ModelHealthWarning,
                    stacklevel=2,
                )
            self.close()
        except BaseException:  # Ctrl-C, once more
            self.close()
            raise

    def __del__(self) -> None:
        """Leave nothing on the model, nor on optimizers, though nobody closed this."""
        with suppress(Exception):  # the interpreter may be shutting down
            self._clearing.close()

    def start(self) -> Self:
        """Begin to watch: what entering the context does, for loops that cannot be put into one.

        Raises:
            InspectionError: the model is monitored already, a file cannot be written, or this
                monitor was started before.
        """
        if self._state != "new":
            raise InspectionError(
                f"this monitor was {self._state} already: each watches one training; "
                "make another, inspector.monitor(...)"
            )
        try:
            self._watch.open()
            if self._table is not None:
                self._table.open()
            self._watch.begin()
        except BaseException:
            self.close()
            self._state = "new"
            raise
        self._state = "started"
        return self

    @property
    def _is_started(self) -> bool:
        """Whether it watches: it was started, and not closed yet."""
        return self._state == "started"

    def callback(self, library: str) -> Any:
        """Return a callback for the trainer of another library, which then ends the steps.

        It starts this monitor when the training begins, unless it runs already, and closes it in
        the end. An exception ends it too, but that transformers tells no callback of one: put
        ``with monitor:`` around the training there.

        Args:
            library: ``"lightning"``, ``"pytorch_lightning"`` or ``"transformers"``.

        Raises:
            InspectionError: there is none for this library, or it cannot be imported.
        """
        return callback_of(self, library)

    def close(self) -> None:
        """Take everything off the model, and close the table; the numbers stay."""
        self._watch.close()
        self._clearing.close()
        if self._table is not None:
            self._table.close()
        was_started, self._state = self._state == "started", "closed"
        if was_started and self._latest is not None and self._on_report is not None:
            self._on_report(self.report_of_training())
        while self._on_close:
            self._on_close.pop()()

    # Steps.

    def step_end(self, step: int | None = None, loss: Any = None) -> None:
        """Say that a training step is over, its optimizer's step included.

        Args:
            step: its number, higher than that of the step before; ``None`` counts from 0.
            loss: its loss, a scalar tensor or a number. It is looked at only in watched steps.

        Raises:
            InspectionError: the monitor is not running, the number is no higher than the one
                before, or the loss is no scalar.
        """
        number, value = self._number(step), _scalar(loss)
        row: StepRow | None = None
        lost = ""
        if self._watch.step is not None:
            try:
                seen = self._watch.end(value)
                row = row_of(number, seen)
            except InspectionError as error:
                lost = str(error)
            except Exception as error:  # noqa: BLE001 - ours: it does not end the training
                lost = f"by an error in pytest-modelhealth: {type(error).__name__}: {error}"
        if lost:
            warnings.warn(
                f"step {number} is lost to the monitor, {lost}", ModelHealthWarning, stacklevel=2
            )
        # the next step is watched if it is one of those, as far as its number can be guessed
        stride = 1 if self._last is None else number - self._last
        self._last = number
        is_next = (number + stride) // self.every != number // self.every
        moved = () if row is None else starmap(dotted, seen.updates)
        self._clearing.end_step(moved, is_next)
        if is_next:
            self._watch.begin()
        if row is not None:
            self._take(replace(row, **self._clearing.taken()), seen)

    def _number(self, step: object) -> int:
        if self._state != "started":
            why = "has ended" if self._state == "closed" else "has not begun"
            raise InspectionError(
                f"step_end() was called, but the monitor {why}: call it inside "
                "'with inspector.monitor(...) as monitor:'"
            )
        last = -1 if self._last is None else self._last
        number = last + 1 if step is None else _whole(step, "step", 0)
        if number <= last:
            raise InspectionError(
                f"step_end({number}) was called after step {last}: numbers of steps must rise; "
                "call it once a training step, or leave the number out to have steps counted"
            )
        return number

    def _take(self, row: StepRow, seen: WatchedStep) -> None:
        """Have rules, history, files and observers take a step, in this order."""
        if self._latest is None:
            self._check_first(row.step, seen)
        row = self._judge.follow(row, seen.observation)
        self._latest, self._report = row, None
        self.history.add(row)
        if self._table is not None:
            self._table.write(row)
        for observer in self.observers:
            observer(row)
        self._judge.react(row)

    def _check_first(self, number: int, seen: WatchedStep) -> None:
        """Warn if nothing was seen of the model, and refuse patterns without a layer."""
        layers = seen.observation.layers
        if seen.hooks.passes:
            modules = {named.name: named.module for named in named_modules(self._model)}
            named = [(name, modules.get(name)) for name in layers]
            ensure_match(self._selection.rules, named, self._model)
        elif not any(layer.status is Status.OPAQUE for layer in layers.values()):
            why = (
                "does the loop train this very object, with gradients on, before step_end()? The "
                "replay of a CUDA graph calls no hooks"
            )
            if WHY_NOT_SEEN in seen.observation.notes:
                why = WHY_NOT_SEEN
            warnings.warn(
                f"no forward pass of {type(self._model).__name__} was seen in step {number}: {why}",
                ModelHealthWarning,
                stacklevel=4,
            )

    # What was seen.

    @property
    def latest(self) -> StepRow:
        """The latest watched step; as text, one line.

        Raises:
            InspectionError: none was watched yet.
        """
        if self._latest is None:
            raise InspectionError("no step was watched yet: step_end() ends the first one")
        return self._latest

    @property
    def report(self) -> HealthReport:
        """The report of the latest watched step, without what only an inspection can know.

        Raises:
            InspectionError: none was watched yet.
        """
        if self._report is None:
            assert self.latest is not None
            self._report = self._make_report(self._judge.observation)
        return self._report

    def report_of_training(self) -> HealthReport:
        """Return the report of the training so far: the latest watched step, judged by rules.

        Raises:
            InspectionError: none was watched yet.
        """
        assert self.latest is not None
        report = self._judge.report
        report._history = self.history
        return report

    @property
    def violations(self) -> tuple[Finding, ...]:
        """What of the training so far breaks a rule and is not waived, the gravest first."""
        return self.report_of_training().violations

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What of the training so far is worth a look and fails nothing."""
        return self.report_of_training().warnings

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that rules say of the training so far: `violations`, then `warnings`."""
        return self.violations + self.warnings

    @property
    def verdict(self) -> Verdict:
        """``healthy``, ``unhealthy`` or ``inconclusive``: the verdict on the training so far."""
        return self.report_of_training().verdict

    def assert_healthy(self, **thresholds: object) -> None:
        """Do nothing if the training so far breaks no rule; `thresholds` override its own.

        A limit that is stricter than the one in force is held against what was noted under that.

        Raises:
            ModelHealthError: a rule is broken: the first line names step and layer.
            InspectionError: no step was watched yet.
            SettingsError: a threshold has an unknown name, a wrong type or an impossible value.
        """
        __tracebackhide__ = True
        self.report_of_training().assert_healthy(**thresholds)

    # How it is shown.

    @property
    def events(self) -> tuple[Event, ...]:
        """What rules object to in the training so far, and since which step, the gravest first."""
        return self._judge.events

    def plot(
        self, path: Path | None = None, *, events: Iterable[tuple[int, str, str]] | None = None
    ) -> Figure:
        """Return a figure of the training so far: `History.plot`.

        Args:
            path: a file to save it to.
            events: what to mark; ``None`` marks the gravest of what rules object to.
        """
        marked = self.events[:_MOST_MARKED] if events is None else events
        return self.history.plot(path, events=marked, worst=self._worst)

    def summary(self, k: int = 10) -> str:
        """Return a line on the training so far, and the `k` layers to look at first, as text."""
        return self.history.summary(_whole(k, "k", 1), worst=self._worst)

    @property
    def _worst(self) -> Event | None:
        """The gravest of what fails; what only warns is none."""
        events = self.events
        return events[0] if events and self._judge.report._judgement.violations else None

    def __repr__(self) -> str:
        return self.summary().partition("\n")[0]

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        html: str = self.history._shown("training", "document", worst=self._worst).html()
        return html


def _whole(value: object, name: str, least: int) -> int:
    """Return a whole number, given as int or as an integer of NumPy.

    Raises:
        InspectionError: it is none, or too small.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least:  # type: ignore[operator]
        what = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
        raise InspectionError(f"{name} must be a whole number from {least} on, not {what}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _scalar(loss: Any) -> Tensor | float | None:
    """Return a loss that was given.

    Raises:
        InspectionError: it is no scalar.
    """
    if loss is None or isinstance(loss, int | float | np.number):
        return None if loss is None else float(loss)
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach()
    what = repr(loss) if isinstance(loss, str) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
    raise InspectionError(
        f"the loss given to step_end() is {what}, not a real scalar: give a tensor of one element "
        "or a number"
    )
