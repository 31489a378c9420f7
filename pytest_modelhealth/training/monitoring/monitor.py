"""`TrainingMonitor`: sees steps of the user's own training loop."""

from __future__ import annotations

import html
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
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
from pytest_modelhealth.report import HealthReport, Observation, Status, Verdict, Violation
from pytest_modelhealth.report.verdict import Renderer
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.bridges import callback_of
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.judging import Reaction, TrainingJudge
from pytest_modelhealth.training.monitoring.row import Event, StepRow, require_statistic, row_of
from pytest_modelhealth.training.monitoring.writing import CsvLines, JsonLines, Lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Observer = Callable[[StepRow], object]
MakeReport = Callable[[Observation], HealthReport]
Path = str | os.PathLike[str]

_MOST_MARKED = 8
"""Events of rules that are marked in a picture."""


class TrainingMonitor(NamesItsAttributes):
    """Watches steps of a training loop; made by `Inspector.monitor`.

    It is a context. Inside, the loop calls `step_end` after each step. It runs nothing of its own,
    holds no tensor and changes no number; between watched steps nothing of it is on the model.

    Args:
        model: the model that is trained.
        selection: which roles of which layers to observe.
        make_report: makes the report of a step.
        every: watch the first step, and those in which the number reaches a multiple of it.
        csv, json: files to write a line to for each watched step.
        scaler: the gradient scaler of the training.
        keep: the most watched steps that the history holds.
        histograms: whether the history holds histograms of activations and their gradients.
        renderer: what shows the history.
        settings: the limits of rules in force.
        on_report: told of the report of the training when the monitor is closed.
        on_violation: as in `Inspector.monitor`.

    Attributes:
        history: the watched steps as arrays.
        observers: called with each new `StepRow`, in order, when the step is in the history and in
            the files.
        unfinished: the step that an exception ended, if it was watched; ``None`` otherwise.

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
        json: Path | None = None,
        scaler: Any = None,
        keep: int = 1024,
        histograms: bool = False,
        renderer: Renderer | None = None,
        settings: Settings,
        on_report: Callable[[HealthReport], object] | None = None,
        on_violation: Reaction = None,
    ) -> None:
        self.every = _whole(every, "every", 1)
        self.history = History(
            _whole(keep, "keep", 2),
            histograms=histograms,
            renderer=renderer,
            model_type=type(model).__name__,
        )
        self.observers: list[Observer] = []
        LossScale.of(scaler)
        self._model = model
        self._selection = selection
        self._make_report = make_report
        self._judge = TrainingJudge(settings, make_report, on_report, on_violation)
        names = [n.name for n in named_modules(model) if selection.roles(n.name, n.module)]
        self._files: list[Lines] = []
        if csv is not None:
            self._files.append(CsvLines(_path(csv, "csv"), names))
        if json is not None:
            self._files.append(JsonLines(_path(json, "json"), names))
        if csv is not None and json is not None and self._files[0].path == self._files[1].path:
            raise InspectionError(f"csv and json are the same file, {str(csv)!r}: give two")
        self.unfinished: StepRow | None = None
        self._watch = PassiveWatch(model, selection, scaler)
        self._state = "new"
        self._on_close: list[Callable[[], object]] = []
        self._last: int | None = None
        self._latest: StepRow | None = None
        self._observation: Observation | None = None  # of the latest step
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
            if error is not None:
                self._take_unfinished()
            elif self._last is None and self._watch.has_seen:
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

    def _take_unfinished(self) -> None:
        """Keep what was seen of the step that an exception ended."""
        with suppress(Exception):  # the user's exception is what matters
            if self._watch.is_on:
                seen = self._watch.end()
                number = 0 if self._last is None else self._last + 1
                self.unfinished = row_of(number, seen) if seen.passes else None

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
            for file in self._files:
                file.open()
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
        """Take everything off the model, and close the files; the numbers stay."""
        self._watch.close()
        for file in self._files:
            file.close()
        if self._state == "started" and self._observation is not None:
            self.report_of_training()
            self._judge.hand_out()
        self._state = "closed"
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
        number = self._number(step)
        seen = self._end_watching(number, _scalar(loss)) if self._watch.is_on else None
        self._advance(number)
        row = None if seen is None else self._take(number, seen)
        if row is not None:
            self._tell(row)

    def _end_watching(self, number: int, loss: Tensor | float | None) -> WatchedStep | None:
        try:
            return self._watch.end(loss)
        except Exception as error:  # noqa: BLE001 - ours
            self._warn_of_loss(number, error)
            return None

    def _warn_of_loss(self, number: int, error: Exception) -> None:
        """Say what cost a step's numbers, an error of ours say: it does not end the training."""
        why = f"by an error in pytest-modelhealth: {type(error).__name__}: {error}"
        if isinstance(error, InspectionError):
            why = str(error)
        warnings.warn(
            f"step {number} is lost to the monitor, {why}",
            ModelHealthWarning,
            stacklevel=4,
        )

    def _advance(self, number: int) -> None:
        """Watch the next step if it is to be watched, as far as its number can be guessed."""
        stride = 1 if self._last is None else number - self._last
        self._last = number
        if (number + stride) // self.every != number // self.every:
            self._watch.begin()

    def _number(self, step: object) -> int:
        if self._state != "started":
            why = "has ended" if self._state == "closed" else "has not begun"
            raise InspectionError(
                f"step_end() was called, but the monitor {why}: call it inside "
                "'with inspector.monitor(...) as monitor:'"
            )
        last = self._last
        if step is None:
            return 0 if last is None else last + 1
        number = _whole(step, "step", 0)
        if last is not None and number <= last:
            what = "twice" if number == last else f"after step {last}"
            raise InspectionError(
                f"step_end({number}) was called {what}: numbers of steps must rise; call it once a "
                "training step, or leave the number out to have steps counted"
            )
        return number

    def _take(self, number: int, seen: WatchedStep) -> StepRow | None:
        if self._latest is None:
            self._check_first(number, seen)
        try:
            row = row_of(number, seen, histograms=self.history.has_histograms)
        except Exception as error:  # noqa: BLE001 - ours
            self._warn_of_loss(number, error)
            return None
        self._latest, self._observation, self._report = row, seen.observation, None
        return row

    def _check_first(self, number: int, seen: WatchedStep) -> None:
        """Warn if nothing was seen of the model, and refuse patterns without a layer."""
        if seen.passes:
            modules = {named.name: named.module for named in named_modules(self._model)}
            named = [(name, modules.get(name)) for name in seen.observation.layers]
            ensure_match(self._selection.rules, named, self._model)
        elif not any(layer.status is Status.OPAQUE for layer in seen.observation.layers.values()):
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

    def _tell(self, row: StepRow) -> None:
        assert self._observation is not None
        self._latest = row = self._judge.follow(row, self._observation)
        self.history.add(row)
        for file in self._files:
            file.write(row)
        for observer in self.observers:
            observer(row)
        self._judge.react(row)

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
            assert self._observation is not None
            self._report = self._make_report(self._observation)
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
    def violations(self) -> tuple[Violation, ...]:
        """What of the training so far breaks a rule and is not waived, the gravest first."""
        return self.report_of_training().violations

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """What of the training so far is worth a look and fails nothing."""
        return self.report_of_training().warnings

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

    def top(
        self, k: int = 5, by: str = "gradient_norm", *, containers: bool = False
    ) -> list[tuple[str, float]]:
        """Return the layers of the latest watched step with the largest values of a statistic.

        Args:
            k: how many at most.
            by: the statistic, one of `STATISTICS`.
            containers: whether layers that hold others are among them.

        Raises:
            InspectionError: no step was watched yet, or there is no such statistic.
        """
        require_statistic(by)
        row, most = self.latest, _whole(k, "k", 1)
        holders = {layer.rpartition(".")[0] for layer in row.layers if layer}
        values = row.values[by]
        order = np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")
        ranked = [(row.layers[at], float(values[at])) for at in order if values[at] == values[at]]
        return [found for found in ranked if containers or found[0] not in holders][:most]

    # How it is shown.

    @property
    def events(self) -> tuple[Event, ...]:
        """What rules object to in the training so far, and since which step, the gravest first."""
        return self._judge.events()

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

    def plot_layer(
        self,
        layer: str,
        path: Path | None = None,
        *,
        events: Iterable[tuple[int, str, str]] | None = None,
    ) -> Figure:
        """Return a figure of one layer through time: `History.plot_layer`.

        Args:
            layer: its name.
            path: a file to save it to.
            events: of which to mark those of this layer; ``None`` takes what rules object to.
        """
        return self.history.plot_layer(
            layer, path, events=self.events if events is None else events
        )

    def summary(self, k: int = 10) -> str:
        """Return a line on the training so far, and the `k` layers to look at first, as text."""
        return self.history.summary(_whole(k, "k", 1), worst=self._worst)

    @property
    def _worst(self) -> Event | None:
        """The gravest of what fails; what only warns is none."""
        failures = self._judge.events(warnings=False)
        return failures[0] if failures else None

    def __repr__(self) -> str:
        return self.summary().partition("\n")[0]

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary())}</pre>"


def _whole(value: object, name: str, least: int) -> int:
    """Return a whole number, given as int or as an integer of NumPy.

    Raises:
        InspectionError: it is none, or too small.
    """
    try:
        number = operator.index(value) if not isinstance(value, bool | Tensor) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise InspectionError(f"{name} must be a whole number from {least} on, not {_shown(value)}")
    return number


def _shown(value: object) -> str:
    """Return a plain value as it is written, and of anything else what it is."""
    if isinstance(value, str | bytes | int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"


def _path(path: object, name: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InspectionError(
            f"{name} must be the path of the file to write, such as 'health.{name}', "
            f"not {_shown(path)}"
        )
    return path


def _scalar(loss: Any) -> Tensor | float | None:
    """Return a loss that was given.

    Raises:
        InspectionError: it is no scalar.
    """
    if loss is None:
        return None
    if isinstance(loss, Tensor):
        if loss.numel() == 1 and not loss.is_complex():
            return loss.detach()
        shape = f"a tensor of shape {tuple(loss.shape)}"
        what = "a complex tensor" if loss.is_complex() else shape
        raise InspectionError(f"the loss given to step_end() is {what}, not a real scalar")
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise InspectionError(
            f"the loss given to step_end() is {_shown(loss)}, not a scalar tensor or a number"
        ) from None
