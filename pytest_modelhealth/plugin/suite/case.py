"""One test of a suite, and the one model that the tests of a suite share."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest
from torch import nn

from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.modes import in_mode
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import InspectionError, ModelHealthError, SettingsError
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.plugin.inspections import (
    UNASKED_FAILURE,
    InspectorFixture,
    MadeResult,
    UnaskedFailure,
    warn,
)
from pytest_modelhealth.plugin.suite.making import Made, made_by, seeded
from pytest_modelhealth.plugin.suite.suite import ModelHealthSuite
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import Finding, HealthReport, Judgement, Observation, Verdict
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.comparison.comparison import Comparison


T = TypeVar("T")

FEW_STEPS = 3
"""After so many, what is at rest at the start only has begun to move: zeros open in two."""

PROBES = {
    "test_causal": "causality",
    "test_padding_ignored": "padding",
    "test_samples_independent": "sample_independence",
    "test_deterministic": "repeatability",
    "test_inputs_used": "input_effect",
}
"""The probe that a test reads."""


class Unjudged(Exception):  # noqa: N818 - no error: the test that it ends is skipped
    """A test cannot judge, or has nothing to judge; the text says why."""


@dataclass
class Subject:
    """The model of one suite.

    Args:
        suite: an instance of it.
        name: what it is called.
        place: the file and line that make the model.
        wanted: the tests of the suite that run.
        settings: those of the whole suite.
        calibrates: whether the noise of a snapshot is to be measured.
        test: the test that runs.
    """

    suite: ModelHealthSuite
    name: str
    place: tuple[Path, int]
    wanted: frozenset[str]
    settings: Settings
    calibrates: bool = False
    test: str = ""
    _kept: dict[str, Any] = field(default_factory=dict)
    _failed: dict[str, tuple[Exception, str]] = field(default_factory=dict)

    def _once(self, what: str, make: Callable[[], T]) -> T:
        """Return what is made once; what it raises is raised in the test that asked first.

        Raises:
            Unjudged: it failed in another test, which shows the error.
        """
        if what in self._failed:
            error, test = self._failed[what]
            if test == self.test:  # run again
                raise error
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
    def maker(self) -> str:
        """What makes the model, for people."""
        return f"{self.suite._maker or f'{self.name}.make'}()"

    @property
    def label(self) -> str:
        """The class of the model, for people."""
        return type(self.made.model).__name__

    def ran(self, training: bool) -> HealthReport:
        """Return the inspection of the batch in one of the modes, with the probes in training."""
        made, mode = self.made, mode_of(training)
        calibrates = self.calibrates and not training and "test_snapshot" in self.wanted
        probes = [PROBES[t] for t in PROBES if t in self.wanted] if training else []
        chosen = [name for name in probes if self.settings.chooses(name)]

        def run() -> HealthReport:
            try:
                return self.inspected(made, training, self.settings, chosen, calibrate=calibrates)
            except Exception as error:
                error.add_note(f"raised in {mode} mode, where {self.maker} gave {made.described}")
                raise

        return self._once(f"the run in {mode} mode", run)

    def inspected(
        self,
        made: Made,
        training: bool,
        settings: Settings,
        probes: Sequence[str],
        *,
        calibrate: bool = False,
    ) -> HealthReport:
        """Inspect a model in a mode, with some probes."""
        batch, names = made.batch, ("causal", "batch_dim", "time_dim", "padding")
        says = {name: getattr(self.suite, name) for name in names if probes}
        settings = settings.override({"probes": list(probes) or False}, "the suite")
        with seeded(self.suite.seed), in_mode(made.model, _mode(made.model, training)):
            inspector = Inspector(made.model, settings=settings, calibrate=calibrate)
            return inspector.run_inspection(
                batch["inputs"], batch["target"], loss=batch["loss"], **says
            )

    @property
    def stepped(self) -> Observation:
        """The run in training mode, with what a few training steps do."""
        made, seen = self.made, self.ran(training=True).observation
        return self._once("the training step", lambda: self._step(made, seen))

    def _step(self, made: Made, seen: Observation) -> Observation:
        model, batch = made.model, made.batch
        with seeded(self.suite.seed), in_mode(model, _mode(model, training=True)):
            optimizer = self.optimizer(model)
            given = wing("training.stepping.session:TrainingStep")(
                model, None, optimizer, None, (), batch["inputs"], batch["target"], batch["loss"]
            )
            with wing("training.stepping.givers:step_of")(given) as step:
                stepped = wing("training.stepping.contract:run_contract")(step, Selection()).stepped
            return replace(seen, stepped=stepped)

    def optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer of the suite.

        Raises:
            Unjudged: nothing is trained.
            Exception: whatever the user's function raises.
        """
        if not any(p.requires_grad for p in model.parameters()):
            raise Unjudged(f"{type(model).__name__} has no trainable parameter")
        return self.suite.make_optimizer(model)

    @property
    def trained(self) -> Made:
        """The model made anew, after a few training steps; or as it is, where nothing learns."""
        made = self.made
        return self._once("training for a few steps", lambda: self._train(made))

    def _train(self, made: Made) -> Made:
        anew = self.anew(self.suite.seed)
        if anew is None:
            anew = replace(made, model=copy.deepcopy(made.model))
        model = anew.model
        if not any(p.requires_grad for p in model.parameters()):
            return anew
        usual_step = wing("training.stepping.givers:UsualStep")(anew.loss)
        with seeded(self.suite.seed):
            model.train(_mode(model, training=True) or model.training)
            optimizer = self.optimizer(model)
            for _ in range(FEW_STEPS):
                batch = anew.batch
                request = Request(model, **batch, by_training_step=True)
                with find_engine(model).called(request) as call:
                    usual_step(model, optimizer, (call.inputs, batch["target"]))
        return anew

    def anew(self, seed: int) -> Made | None:
        """Return what `make` gives when it is called again; ``None`` where it is the same model."""
        made = made_by(self.suite, self.maker, seed)
        ours = {id(t) for t in _tensors(self.made.model)}
        if made.model is self.made.model or any(id(t) in ours for t in _tensors(made.model)):
            return None
        return made


def _tensors(model: nn.Module) -> list[Any]:
    return [*model.parameters(), *model.buffers(), *find_tensors(list(vars(model).values()))]


def _mode(model: nn.Module, training: bool) -> bool | None:
    """Return the mode to bring a model to; ``None`` where it is in training as it was made."""
    return None if training and model.training else training


def mode_of(training: bool) -> str:
    """Return the name of a mode."""
    return "training" if training else "evaluation"


IN_TRAINING = "test_healthy_in_training"
_WHOLE_RUN = "observation"
"""What stands for a check where a run showed nothing to judge."""


class Case:
    """One test of a suite.

    Args:
        request: of the test.
        subject: what the tests of the suite share.
        settings: of this test.
        fixture: keeps the reports of the test.
        verdict: what the test runs.
    """

    def __init__(
        self,
        request: pytest.FixtureRequest,
        subject: Subject,
        settings: Settings,
        fixture: InspectorFixture,
        verdict: Callable[[Case], None],
    ) -> None:
        self.request, self.item, self.name = request, request.node, request.node.originalname
        self.subject, self.settings, self._fixture = subject, settings, fixture
        self._verdict = verdict

    def judge(self) -> None:
        """Run the verdict of the test; skip it where there is nothing to judge.

        Raises:
            ModelHealthError: it fails.
            Exception: whatever the user's code raises, in the first test that runs it.
        """
        __tracebackhide__ = True
        self.subject.test = self.name
        reason = problem = ""
        try:
            self._verdict(self)
        except Unjudged as unjudged:
            reason = str(unjudged)
        except (InspectionError, SettingsError) as error:  # whose traceback is all ours
            problem = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if reason:
            pytest.skip(reason)
        if problem:
            pytest.fail(problem, pytrace=False)

    # What several verdicts ask.

    def require_healthy(
        self, own: Iterable[str], training: bool = True, why: str = "", **options: Any
    ) -> None:
        """Do nothing if checks do not object to the run in a mode.

        Raises:
            Unjudged: they do, so that what another test asks cannot be told.
        """
        seen = self.subject.ran(training).observation
        found = self.report(seen, own, **options)._judgement.violations
        if found:
            label, mode = self.subject.label, mode_of(training)
            raise Unjudged(
                f"{why}{label} is not healthy in {mode} ({found[0].layer or label}: "
                f"{found[0].check}); see test_healthy_in_{mode}"
            )

    def require_numbers(self) -> None:
        """Do nothing if the run in training mode has neither NaN nor infinity.

        Raises:
            Unjudged: it has, so that no other property can be told.
        """
        self.subject.ran(training=True)
        if self.settings.chooses("finite"):
            self.require_healthy({"finite"}, only=True)

    def require_chosen(self, check: str) -> None:
        """Do nothing if the settings have a check run.

        Raises:
            Unjudged: they leave it out.
        """
        if not self.settings.chooses(check):
            raise Unjudged(f"the settings leave {check} out")

    def report(
        self,
        observation: Observation,
        own: Iterable[str],
        *,
        only: bool = False,
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
            but: check and layer of findings that fail another test.
            noise: as in `HealthReport`.
            **settings: laid over those of the test.
        """
        own, but = frozenset(own), frozenset(but)
        if only:
            settings = {"checks": sorted(own), **settings}

        def mine(found: Finding) -> bool:
            is_graded = found.waiver is None and found.grade in ("fail", "warn")
            is_of_all = found.grade == "unsure" and found.check == _WHOLE_RUN
            is_told = is_graded and (found.check, found.layer) in but
            return is_of_all or (found.check in own and not is_told)

        def judged(observation: Observation, settings: Settings) -> Judgement:
            return Judgement(tuple(filter(mine, judge(observation, settings).findings)))

        laid = self.settings.override(settings, "the suite")
        return HealthReport(observation, laid, judged, noise, renderer=renderer)

    def settle(self, report: HealthReport, *, designs: bool = False) -> None:
        """Keep a report, and end the test as its verdict has it.

        Args:
            report: what is asked for its verdict.
            designs: whether a finding that only warns leaves the property untold.

        Raises:
            ModelHealthError: it is unhealthy.
            Unjudged: it is inconclusive.
        """
        __tracebackhide__ = True
        self.keep(report)
        error = report._failure()
        if error is not None:
            self.fail(ModelHealthError(self._reworded(str(error)), report), report)
        if designs and report.warnings:
            texts = report._take_warnings()
            for text in texts:
                warn(self.item, text)
            raise Unjudged(f"{texts[0]}; whether that is meant, nothing tells")
        if report.verdict is not Verdict.INCONCLUSIVE:
            return
        if report._settings["inconclusive"].value == "warn" and report.inconclusive:
            raise Unjudged(report._take_doubt()[0])

    def fail(self, error: ModelHealthError, result: HealthReport | Comparison | None) -> NoReturn:
        """Fail, with the line that makes the model as the place."""
        __tracebackhide__ = True
        shown: Any = result
        made = MadeResult(shown, *self.subject.place, auto_check=False)
        self.item.stash[UNASKED_FAILURE] = UnaskedFailure(made, error)
        raise error

    def keep(self, result: HealthReport | Comparison) -> None:
        """Have the page and other destinations show a result."""
        made = MadeResult(result, *self.subject.place, auto_check=False)
        self._fixture._inspections.append(made)

    def _reworded(self, text: str) -> str:
        """Return a failure's text with the ways out that there are without a file, or a report."""
        if ":" in self.item.nodeid.partition("::")[0]:  # no file
            text = _LIMIT.sub(r"--modelhealth-set \1=...", text)
            text = _WAIVER.sub(r'--modelhealth-set "waive=\2 \3: ..."', text)
        return _LOOK.sub("pytest --modelhealth-html=page.html", text)


_LIMIT = re.compile(r"@pytest\.mark\.modelhealth\(\s*(\w+)=\.\.\.\)")
_WAIVER = re.compile(
    r"@pytest\.mark\.modelhealth_waive\(\s*([\"'])(.*?)\1,\s+check=\"(\w+)\",\s+reason=\"\.\.\.\"\)"
)
_LOOK = re.compile(r"(?<=look:         )(report\.|print\().*(?:\n {14}.*)*")
