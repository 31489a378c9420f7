"""The model that the tests of a suite share, and the one of them that runs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import pytest
from torch import nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import in_mode
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.comparison.comparison import Comparison
from pytest_modelhealth.errors import InspectionError, ModelHealthError, SettingsError
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.plugin.inspections import (
    UNASKED_FAILURE,
    InspectorFixture,
    MadeResult,
    UnaskedFailure,
    warn,
)
from pytest_modelhealth.plugin.options import settings_for
from pytest_modelhealth.plugin.suite.collecting import place_of
from pytest_modelhealth.plugin.suite.making import Made, made_by, seeded
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import Finding, HealthReport, Judgement, Observation, Verdict
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.wings import wing

T = TypeVar("T")

FEW_STEPS = 3  # after so many, what is at rest at the start only moves: zeros open in two

PROBES = {  # that a test reads
    "test_causal": "causality",
    "test_padding_ignored": "padding",
    "test_samples_independent": "sample_independence",
    "test_deterministic": "repeatability",
    "test_inputs_used": "input_effect",
}


class Unjudged(Exception):  # noqa: N818 - no error: the test that it ends is skipped
    """A test cannot judge, or has nothing to judge; the text says why."""


class Case:
    """The model of a suite, made once for all of its tests, and the test that runs."""

    item: pytest.Function  # the test that runs
    settings: Settings  # those of the test that runs

    def __init__(self, node: pytest.Class) -> None:
        self.suite, self._place = node.cls(), place_of(node.cls)
        # what makes the model, for people
        self.maker = f"{self.suite._maker or f'{node.name}.make'}()"
        tests = (one for one in node.session.items if one.parent is node)
        self.wanted = {  # the tests of the suite that run
            one.originalname
            for one in tests
            if isinstance(one, pytest.Function) and not any(one.iter_markers("skip"))
        }
        self._settings = settings_for(node)
        self._kept: dict[str, Any] = {}
        self._failed: dict[str, tuple[Exception, str]] = {}

    def begin(self, item: pytest.Function, fixture: InspectorFixture) -> None:
        """Take the test that runs now, and what keeps its reports.

        Raises:
            SettingsError: a marker or limit of the test is wrong.
        """
        self.item, self.test, self._fixture = item, item.originalname, fixture
        suite, settings = type(self.suite).__name__, settings_for(item)
        if self.suite.strict is not None:
            settings = settings.override({"strict": self.suite.strict}, f"{suite}.strict")
        limits = self.suite.limits.get(self.test, {})
        self.settings = settings.override(limits, f"{suite}.limits[{self.test!r}]")

    def judge(self, verdict: Callable[[Case], None]) -> None:
        """Run the verdict of the test; skip it where there is nothing to judge.

        Raises:
            ModelHealthError: it fails.
            Exception: whatever the user's code raises, in the first test that runs it.
        """
        __tracebackhide__ = True
        reason = problem = ""
        try:
            verdict(self)
        except Unjudged as unjudged:
            reason = str(unjudged)
        except (InspectionError, SettingsError) as error:  # whose traceback is all ours
            problem = "\n".join([str(error), *getattr(error, "__notes__", ())])
        # out here, as pytest would show the error that these came of, too
        if reason:
            pytest.skip(reason)
        if problem:
            pytest.fail(problem, pytrace=False)

    # The model, and what several tests read.

    def _once(self, what: str, make: Callable[[], T]) -> T:
        """Return what is made once; what it raises is raised in the test that asked first.

        Raises:
            Unjudged: it failed in another test, which shows the error.
        """
        if what in self._failed and self._failed[what][1] != self.test:
            error, test = self._failed[what]
            text = str(error).partition("\n")[0]
            said = f"{type(error).__name__}: {text}".removesuffix(": ")
            raise Unjudged(f"{what} failed, {said}: see {test}")
        if what not in self._kept:
            try:
                self._kept[what] = make()
            except Unjudged:
                raise
            except Exception as error:
                self._failed[what] = error, self.test
                raise
        made: T = self._kept[what]
        return made

    @property
    def made(self) -> Made:
        """The model and its batch."""
        return self._once(self.maker, lambda: made_by(self.suite, self.maker, self.suite.seed))

    @property
    def label(self) -> str:
        """The class of the model, for people."""
        return type(self.made.model).__name__

    def ran(self, training: bool) -> HealthReport:
        """Return the inspection of the batch in one of the modes, with the probes in training."""
        made, mode = self.made, mode_of(training)
        probes = [PROBES[t] for t in PROBES if t in self.wanted] if training else []
        probes = [name for name in probes if self._settings.chooses(name)]

        def run() -> HealthReport:
            try:
                return self.inspected(made, training, probes)
            except Exception as error:
                error.add_note(f"raised in {mode} mode, where {self.maker} gave {made.described}")
                raise

        return self._once(f"the run in {mode} mode", run)

    def inspected(self, made: Made, training: bool, probes: Sequence[str]) -> HealthReport:
        """Inspect a model in a mode, with some probes."""
        option, batch = self.item.config.option, made.batch
        updates = ("update_snapshots", "update_new_snapshots_only")
        records = any(getattr(option, name, False) for name in updates)
        names = ("causal", "batch_dim", "time_dim", "padding")
        says = {name: getattr(self.suite, name) for name in names if probes}
        settings = self._settings.override({"probes": list(probes) or False}, "the suite")
        with seeded(self.suite.seed), in_mode(made.model, _mode(made.model, training)):
            inspector = Inspector(
                made.model,
                settings=settings,
                calibrate=records and not training and "test_snapshot" in self.wanted,
            )
            return inspector.run_inspection(
                batch["inputs"], batch["target"], loss=batch["loss"], **says
            )

    @property
    def stepped(self) -> Observation:
        """The run in training mode, with what a few training steps do."""
        model, seen = self.made.model, self.ran(training=True).observation

        def step() -> Observation:
            with seeded(self.suite.seed), in_mode(model, _mode(model, training=True)):
                optimizer = self._optimizer(model)
                report = Inspector(model).run_step(optimizer=optimizer, **self.made.batch)
            return replace(seen, stepped=report.observation.stepped)

        return self._once("the training step", step)

    def _optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer of the suite, where there is something to train."""
        self.require_trainable()
        return self.suite.make_optimizer(model)

    @property
    def trained(self) -> Made:
        """The model made anew, after a few training steps; or as it is, where nothing learns."""
        made = self.made

        def train() -> Made:
            anew = self.anew(self.suite.seed) or replace(made, model=copy.deepcopy(made.model))
            model = anew.model
            if not any(p.requires_grad for p in model.parameters()):
                return anew
            usual_step = wing("training.stepping.givers:UsualStep")(anew.loss)
            with seeded(self.suite.seed):
                model.train(_mode(model, training=True) or model.training)
                optimizer = self._optimizer(model)
                for _ in range(FEW_STEPS):
                    batch = anew.batch
                    usual_step(model, optimizer, (batch["inputs"], batch["target"]))
            return anew

        return self._once("training for a few steps", train)

    def anew(self, seed: int) -> Made | None:
        """Return what `make` gives when it is called again; ``None`` where it is the same model."""
        made = made_by(self.suite, self.maker, seed)
        ours = {id(tensor) for tensor in _tensors(self.made.model)}
        is_same = made.model is self.made.model
        return None if is_same or any(id(t) in ours for t in _tensors(made.model)) else made

    # What several verdicts require.

    def require_healthy(
        self, own: Iterable[str], training: bool = True, why: str = "", **options: Any
    ) -> None:
        """Do nothing if checks do not object to the run in a mode.

        Raises:
            Unjudged: they do, so that what another test asks cannot be told.
        """
        seen = self.ran(training).observation
        violations = self.report(seen, own, **options)._judgement.violations
        if violations:
            mode, first = mode_of(training), violations[0]
            raise Unjudged(
                f"{why}{self.label} is not healthy in {mode} ({first.layer or self.label}: "
                f"{first.check}); see test_healthy_in_{mode}"
            )

    def require_numbers(self) -> None:
        """Do nothing if the run in training mode has neither NaN nor infinity.

        Raises:
            Unjudged: it has, so that no other property can be told.
        """
        self.ran(training=True)
        if self.settings.chooses("finite"):
            self.require_healthy({"finite"}, only=True)

    def require_chosen(self, check: str) -> None:
        """Do nothing if the settings have a check run.

        Raises:
            Unjudged: they leave it out.
        """
        if not self.settings.chooses(check):
            raise Unjudged(f"the settings leave {check} out")

    def require_trainable(self) -> None:
        """Do nothing if there is a parameter to train.

        Raises:
            Unjudged: there is none.
        """
        if not any(p.requires_grad for p in self.made.model.parameters()):
            raise Unjudged(f"{self.label} has no trainable parameter")

    # How a verdict ends.

    def report(
        self,
        observation: Observation,
        own: Iterable[str],
        *,
        only: bool = False,
        warns: Collection[str] = (),
        but: Collection[tuple[str, str]] = (),
        noise: Any = None,
        **settings: object,
    ) -> HealthReport:
        """Return a report that judges what is this test's own.

        Args:
            observation: what was seen.
            own: names of the checks whose findings count; all checks run, so that what follows
                from a fault of another test is told from one of its own.
            only: whether no other check runs.
            warns: names of other checks, of which only what warns counts.
            but: check and layer of findings that fail another test.
            noise: as in `HealthReport`.
            **settings: laid over those of the test.
        """
        own = frozenset(own)
        if only:
            settings = {"checks": sorted(own), **settings}

        def is_own(finding: Finding) -> bool:
            is_graded = finding.waiver is None and finding.grade in ("fail", "warn")
            is_told = is_graded and (finding.check, finding.layer) in but
            is_of_all = finding.grade == "unsure" and finding.check == _WHOLE_RUN
            is_mild = finding.grade == "warn" and finding.check in warns
            return is_of_all or is_mild or (finding.check in own and not is_told)

        def judged(observation: Observation, settings: Settings) -> Judgement:
            return Judgement(tuple(filter(is_own, judge(observation, settings).findings)))

        laid = self.settings.override(settings, "the suite")
        return HealthReport(observation, laid, judged, noise, renderer=renderer)

    def settle(self, report: HealthReport, *, designs: bool = False) -> None:
        """Keep a report, and end the test as its verdict has it.

        Raises:
            ModelHealthError: it is unhealthy.
            Unjudged: it is inconclusive.
        """
        __tracebackhide__ = True
        error = report._failure()
        if error is not None:
            self.fail(str(error), report)
        self.keep(report)
        if designs and report.warnings:
            texts = report._take_warnings()
            for text in texts:
                warn(self.item, text)
            first = texts[0].partition("\n")[0]
            raise Unjudged(f"{first}; whether that is meant, nothing tells")
        is_doubt = report.verdict is Verdict.INCONCLUSIVE and report.inconclusive
        if is_doubt and report._settings["inconclusive"].value == "warn":
            raise Unjudged(report._take_doubt()[0])

    def keep(self, result: Any) -> MadeResult:
        """Have the page and other destinations show a report or comparison."""
        made = MadeResult(result, *self._place, auto_check=False)
        if result is not None:
            self._fixture._inspections.append(made)
        return made

    def fail(self, text: str, result: HealthReport | Comparison | None = None) -> NoReturn:
        """Fail, with the line that makes the model as the place.

        Raises:
            ModelHealthError: always; it names the ways out that there are without a file.
        """
        __tracebackhide__ = True
        if ":" in self.item.nodeid.partition("::")[0]:  # no file
            text = _LIMIT.sub(r"--modelhealth-set \1=...", text)
            text = _WAIVER.sub(r'--modelhealth-set "waive=\2 \3: ..."', text)
        text = _LOOK.sub("pytest --modelhealth-html=page.html", text)
        error = ModelHealthError(text, result)
        self.item.stash[UNASKED_FAILURE] = UnaskedFailure(self.keep(result), error)
        raise error


_WHOLE_RUN = "observation"  # what stands for a check where a run showed nothing to judge
_LIMIT = re.compile(r"@pytest\.mark\.modelhealth\(\s*(\w+)=\.\.\.\)")
_WAIVER = re.compile(
    r"@pytest\.mark\.modelhealth_waive\(\s*([\"'])(.*?)\1,\s+check=\"(\w+)\",\s+reason=\"\.\.\.\"\)"
)
_LOOK = re.compile(r"(?<=look:         )(report\.|print\().*(?:\n {14}.*)*")
"""The failure of a report advises to look at it; in a suite nobody has it by a name."""


def _tensors(model: nn.Module) -> list[Any]:
    return [*model.parameters(), *model.buffers(), *find_tensors(list(vars(model).values()))]


def _mode(model: nn.Module, training: bool) -> bool | None:
    """Return the mode to bring a model to; ``None`` where it is in training as it was made."""
    return None if training and model.training else training


def mode_of(training: bool) -> str:
    """Return the name of a mode."""
    return "training" if training else "evaluation"
