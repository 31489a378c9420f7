"""`HealthReport`: an observation and the verdict on it, for users to read, show and assert."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.errors import (
    InspectionError,
    LayerNotFoundError,
    ModelHealthError,
    ModelHealthWarning,
    suggest,
)
from pytest_modelhealth.report.finding import Finding
from pytest_modelhealth.report.flow import Flow
from pytest_modelhealth.report.model_summary import ModelSummary
from pytest_modelhealth.report.observation import LayerRecord, Noises, Observation
from pytest_modelhealth.report.parts import Probed
from pytest_modelhealth.report.verdict import HasVerdict, Judge, Judgement, Renderer, Verdict
from pytest_modelhealth.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HealthReport(HasVerdict):
    """What an inspection saw, and the verdict on it.

    In a test, a report whose verdict was never asked for is checked when the test's body ends.
    `verdict`, `healthy`, `violations`, `inconclusive`, `assert_healthy`, `bool` of it and a
    comparison with a snapshot ask for it; numbers, tables and pictures do not.
    ``report["fc1"]`` is a `LayerRecord`, `str` a table, `repr` one line, `bool` is `healthy`. The
    report is immutable and can be pickled.
    """

    def __init__(
        self,
        observation: Observation,
        settings: Settings,
        judge: Judge,
        noise: Noises | None = None,
        *,
        renderer: Renderer,
    ) -> None:
        self._observation = observation
        self._noise = noise
        """How far rounding alone moves each statistic, where the inspector measured it."""
        self._settings = settings
        self._judge = judge
        self._renderer = renderer
        self._judged: Judgement | None = None
        self._judgements: list[Judgement] = []
        """Every judgement so far, those under thresholds of an `assert_healthy` call included."""
        self._history: Any = None
        """The watched steps of a training as arrays, a `History`, where a monitor made this."""
        self._warned_of: list[str] = []
        self._asked_as: HealthReport | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether both are one; `health_snapshot` compares itself with a report.

        Raises:
            TypeError: `other` is a snapshot of syrupy that would keep the ``repr`` alone.
        """
        if _keeps_a_line(other):
            raise TypeError(
                "syrupy's own snapshot keeps one line of a report, 'healthy', and passes whatever "
                "its statistics are: compare with the fixture health_snapshot, "
                "assert report == health_snapshot"
            )
        return NotImplemented

    __hash__ = object.__hash__

    @property
    def _as_asked(self) -> HealthReport:
        """The report as its verdict was last asked for: under thresholds of `assert_healthy`."""
        return self._asked_as or self

    @property
    def observation(self) -> Observation:
        """All that was seen, as data.

        `part` where a run over batches ended before the last one.
        """
        return self._observation

    @property
    def layers(self) -> Mapping[str, LayerRecord]:
        """Every layer by name, in execution order, those never called last."""
        return MappingProxyType(self.observation.layers)

    @property
    def flow(self) -> Flow | None:
        """Who feeds whom in the first batch; ``None`` where nothing was recorded."""
        return self.observation.flow

    @property
    def probes(self) -> Probed:
        """What each probe changed and found, with the runs that it took: plain data."""
        return self.observation.probes

    @property
    def loss(self) -> float | None:
        """The value of the loss, the mean over batches where there were several."""
        return self.observation.loss

    @property
    def _judgement(self) -> Judgement:
        """What the checks found under this report's settings, as data: it asks for no verdict."""
        if self._judged is None:
            self._judged = self._judge(self._observation, self._settings)
            self._judgements.append(self._judged)
        return self._judged

    @property
    def violations(self) -> tuple[Finding, ...]:
        """Every violation that is not waived, the gravest first."""
        return self._asked().violations

    @property
    def inconclusive(self) -> tuple[Finding, ...]:
        """What could not be judged, and what that would need."""
        return self._asked().inconclusive

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Every violation that only warns, by its check or by itself, the gravest first."""
        return self._judgement.warned

    @property
    def verdict(self) -> Verdict:
        """``healthy``, ``unhealthy`` or ``inconclusive``."""
        return self._asked().verdict

    @property
    def healthy(self) -> bool:
        """Whether the verdict is ``healthy``: nothing violated, and enough seen to say so."""
        return self.verdict is Verdict.HEALTHY

    def _passed(self) -> bool:
        return self.healthy

    def _asked(self) -> Judgement:
        self._verdict_asked = True
        return self._judgement

    def __getitem__(self, layer: str) -> LayerRecord:
        """Return one layer's record by its name or one of its aliases.

        Raises:
            LayerNotFoundError: no such layer; the message names the nearest.
        """
        layers = self.observation.layers
        asked: object = layer
        if isinstance(asked, str) and layer in layers:
            return layers[layer]
        for record in layers.values():
            if layer in record.aliases:
                return record
        raise LayerNotFoundError(
            f"{self._observation.model_type} has no layer {layer!r}{suggest(layer, layers)} "
            f"report.layers lists all {len(layers)}."
        )

    def __iter__(self) -> Iterator[LayerRecord]:
        """Iterate over the layers' records in execution order."""
        return iter(self.observation.layers.values())

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.observation.layers)

    def assert_healthy(self, **thresholds: object) -> None:
        """Do nothing if no invariant is broken; `thresholds` override the report's own.

        An ``inconclusive`` verdict passes with a `ModelHealthWarning`: too little evidence is no
        fault; the setting ``inconclusive`` makes it fail, or pass in silence. What only
        warns is given as a `ModelHealthWarning` for each cause.

        Raises:
            ModelHealthError: the verdict is ``unhealthy``, and the first line names the worst
                layer; or a check is broken, and the first line names it; or the verdict is
                ``inconclusive`` where the setting of this name is ``"fail"``.
            SettingsError: a threshold has an unknown name, a wrong type or an impossible value.
        """
        __tracebackhide__ = True
        report = self._with(thresholds)
        self._asked_as = None if report is self else report
        self._verdict_asked = True
        error = report._failure()
        if error is not None:
            raise error
        for text in (*report._take_warnings(), *report._take_doubt()):
            warnings.warn(text, ModelHealthWarning, stacklevel=2)

    def assert_samples_independent(self) -> None:
        """Do nothing if no sample has an effect on the output of another one.

        As its kin it asks for one property, not for the verdict on the whole, and needs the probe
        of this name: ``run_inspection(..., probes="sample_independence")``.

        Raises:
            ModelHealthError: samples see each other, or nothing could be told, with the reason.
            InspectionError: the inspection ran without this probe.
        """
        __tracebackhide__ = True
        self._assert_probed("sample_independence")

    def assert_causal(self) -> None:
        """Do nothing if no output depends on later steps: the probe ``causality``.

        Raises:
            ModelHealthError: the future leaks, or nothing could be told, with the reason.
            InspectionError: the inspection ran without this probe.
        """
        __tracebackhide__ = True
        self._assert_probed("causality")

    def assert_padding_ignored(self) -> None:
        """Do nothing if what stands in padding has no effect: the probe ``padding``.

        Raises:
            ModelHealthError: padding has an effect, or nothing could be told, with the reason.
            InspectionError: the inspection ran without this probe.
        """
        __tracebackhide__ = True
        self._assert_probed("padding")

    def assert_repeatable(self) -> None:
        """Do nothing if evaluation repeats itself: the probe ``repeatability``.

        Raises:
            ModelHealthError: it does not, or nothing could be told, with the reason.
            InspectionError: the inspection ran without this probe.
        """
        __tracebackhide__ = True
        self._assert_probed("repeatability")

    def _assert_probed(self, probe: str) -> None:
        __tracebackhide__ = True
        if self._observation.probes.get(probe) is None:
            raise InspectionError(
                f"{probe} was not probed: ask for it in run_inspection(..., probes={probe!r}), or "
                "probes=True for all"
            )
        asked = {"checks": (probe,), "skip_checks": (), "probes": (probe,), "severity": "fail"}
        report = self._with(asked)
        self._verdict_asked = True
        if not report.healthy:
            raise report._denial()

    def _failure(self) -> ModelHealthError | None:
        """Return the error that `assert_healthy` raises, if it does."""
        judgement = self._asked()
        doubtful = judgement.inconclusive and self._settings["inconclusive"].value == "fail"
        return self._denial() if doubtful or not judgement.passes else None

    def _denial(self) -> ModelHealthError:
        return ModelHealthError(self.render("failure"), self)

    def _warnings(self) -> dict[str, str]:
        """Return what the judgements so far warn of, a text a cause."""
        found = {one: None for judgement in self._judgements for one in judgement.warned}
        return dict(self._shown("failure", "warning_texts", tuple(found))) if found else {}

    def _take_warnings(self) -> list[str]:
        """Return the texts of what the judgements so far warn of, each only once."""
        return self._take([*self._warnings().values()])

    def _take_doubt(self) -> list[str]:
        """Return one sentence on what could not be judged, if it is to be warned of, only once."""
        doubts = self._judgement.inconclusive
        is_told = self._settings["inconclusive"].value == "warn"
        if not (is_told and doubts) or self._judgement.verdict is not Verdict.INCONCLUSIVE:
            return []
        return self._take([self._shown("summary", "headline")])

    def _take(self, texts: list[str]) -> list[str]:
        new = [text for text in dict.fromkeys(texts) if text not in self._warned_of]
        self._warned_of += new
        return new

    def _with(self, thresholds: Mapping[str, object]) -> HealthReport:
        if not thresholds:
            return self
        settings = self._settings.override(thresholds, "argument of assert_healthy")
        report = HealthReport(
            self._observation, settings, self._judge, self._noise, renderer=self._renderer
        )
        report._judgements, report._warned_of = self._judgements, self._warned_of
        return report

    def render(self, form: str, **options: Any) -> str:
        """Return the report in one of the text formats: a module of `rendering` by its name.

        Raises:
            InspectionError: there is no such format; the message names the nearest.
        """
        text: str = self._shown(form, "render", **options)
        return text

    def __repr__(self) -> str:
        return self.render("line")

    def __str__(self) -> str:
        return self.render("terminal")

    def _repr_html_(self) -> str:
        return self.render("html")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        return dict(self._shown("data", "to_dict"))

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict` as JSON.

        Raises:
            InspectionError: `path` is no path.
            OSError: the file cannot be written.
        """
        _path(path, "to_json").write_text(self.render("json"), encoding="utf-8")

    def to_csv(self, path: str | Path) -> None:
        """Write one row a layer, role and tensor.

        Raises:
            InspectionError: `path` is no path.
            OSError: the file cannot be written.
        """
        _path(path, "to_csv").write_text(self.render("csv"), encoding="utf-8", newline="")

    def summary(self, depth: int | None = None, max_rows: int | None = 200) -> ModelSummary:
        """Return the layers as a tree with shapes, parameters and bytes of activations.

        Multiply-adds, what autograd saves and the peak of memory are in it where the inspection was
        asked for them: ``run_inspection(..., costs=True)``.

        Args:
            depth: show layers in at most so many others; 0 is the model alone, ``None`` all.
            max_rows: show at most so many lines, ``None`` for all.

        Raises:
            InspectionError: one of them is no such number.
        """
        for name, most in (("depth", depth), ("max_rows", max_rows)):
            if most is not None and (type(most) is not int or most < 0):
                raise InspectionError(
                    f"{name} must be a whole number from 0 on, or None for no limit, not {most!r}"
                )
        summary: ModelSummary = self._shown("model_summary", "summarised", depth, max_rows)
        return summary

    def plot_histogram(self, layer: str, what: str = "activations") -> Figure:
        """Return a figure of one layer's histogram."""
        figure: Figure = self._shown("figures", "plot_histogram", layer, what)
        return figure

    def plot_histograms(self, pattern: str = "*", what: str = "activations") -> Figure:
        """Return a figure with a histogram for each layer that matches `pattern`."""
        figure: Figure = self._shown("figures", "plot_histograms", pattern, what)
        return figure

    def plot_flow(self) -> Figure:
        """Return a figure of who feeds whom; a large model is folded into its containers."""
        figure: Figure = self._shown("figures", "plot_flow")
        return figure

    def plot_gradient_flow(self) -> Figure:
        """Return a figure of gradient norms through the depth of the model."""
        figure: Figure = self._shown("figures", "plot_gradient_flow")
        return figure


def _path(path: object, method: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        form = method.removeprefix("to_")
        raise InspectionError(
            f"{method} takes the path of the file to write, such as 'health.{form}', not {path!r} "
            f"({type(path).__name__}); report.render({form!r}) is its text"
        )
    return Path(path)


def _keeps_a_line(other: object) -> bool:
    """Whether this is a snapshot of syrupy with one of syrupy's own formats."""
    if not any(kind.__module__ == "syrupy.assertion" for kind in type(other).__mro__):
        return False
    return type(getattr(other, "extension", None)).__module__.startswith("syrupy.")
