"""One test of a suite: its settings, what it shares with the others, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.errors import InspectionError, ModelHealthError, SettingsError
from pytest_modelhealth.plugin.inspections import (
    UNASKED_FAILURE,
    InspectorFixture,
    MadeResult,
    UnaskedFailure,
    warn,
)
from pytest_modelhealth.plugin.suite.subject import Subject, Unjudged
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import HealthReport, Judgement, Observation, Verdict, Violation
from pytest_modelhealth.settings import Settings

if TYPE_CHECKING:
    from pytest_modelhealth.comparison.comparison import Comparison

IN_TRAINING = "test_healthy_in_training"
_WHOLE_RUN = "observation"
"""What stands for a check where a run showed nothing to judge."""


class Case:
    """One test of a suite.

    Args:
        item: the test.
        name: its name.
        subject: what the tests of the suite share.
        settings: of this test.
        fixture: keeps the reports of the test.
        verdicts: the verdict of each test, by its name without ``test_``.
    """

    def __init__(
        self,
        item: pytest.Item,
        name: str,
        subject: Subject,
        settings: Settings,
        fixture: InspectorFixture,
        verdicts: Mapping[str, Callable[..., None]],
    ) -> None:
        self._verdicts = verdicts
        self.item, self.name, self.subject, self.settings = item, name, subject, settings
        self._fixture = fixture

    def judge(self, verdict: str, *arguments: Any) -> None:
        """Run the verdict of this name; skip the test where there is nothing to judge.

        Raises:
            ModelHealthError: it fails.
            Exception: whatever the user's code raises, in the first test that runs it.
        """
        __tracebackhide__ = True
        self.subject.test = self.name
        reason = problem = ""
        try:
            self._verdicts[verdict](self, *arguments)
        except Unjudged as unjudged:
            reason = str(unjudged)
        except (InspectionError, SettingsError) as error:  # whose traceback is all ours
            problem = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if reason:
            pytest.skip(reason)
        if problem:
            pytest.fail(problem, pytrace=False)

    # What several verdicts ask.

    def require_numbers(self) -> None:
        """Do nothing if the run in training mode has neither NaN nor infinity.

        Raises:
            Unjudged: it has, so that no other property can be told.
        """
        seen = self.subject.ran(training=True)
        if not self.settings.chooses("finite"):
            return
        settings = self.settings.override({"checks": ["finite"]}, "the suite")
        found = judge(seen.observation, settings).violations
        if found:
            where = "; see test_healthy_in_training" if IN_TRAINING in self.subject.wanted else ""
            place = f"{found[0].layer or self.subject.label}: {found[0].message}"
            raise Unjudged(f"{self.subject.label} is not healthy in training ({place}){where}")

    def require_chosen(self, check: str) -> None:
        """Do nothing if the settings have a check run.

        Raises:
            Unjudged: they leave it out.
        """
        if not self.settings.chooses(check):
            left = self.settings["skip_checks"] if self.settings["skip_checks"].value else None
            origin = (left or self.settings["checks"]).origin
            raise Unjudged(f"the settings leave {check} out ({origin})")

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
        own = frozenset(own)
        if only:
            settings = {"checks": sorted(own), **settings}
        laid = self.settings.override(settings, "the suite")
        judged = partial(judge_own, own=own, but=frozenset(but))
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
        self._keep(report)
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

    def settle_comparison(self, comparison: Comparison) -> None:
        """Keep a comparison, and fail where the two are not equivalent."""
        __tracebackhide__ = True
        self._keep(comparison)
        error = comparison._failure()
        if error is not None:
            self.fail(error, comparison)

    def fail(self, error: ModelHealthError, result: HealthReport | Comparison | None) -> NoReturn:
        """Fail, with the line that makes the model as the place."""
        __tracebackhide__ = True
        self.item.stash[UNASKED_FAILURE] = UnaskedFailure(self._result(result), error)
        raise error

    def _reworded(self, text: str) -> str:
        """Return a failure's text with the ways out that a suite has, for those of a test."""
        if self.has_file:
            limit = f'limits = {{"{self.name}": {{"\\1": ...}}}}'
            waiver = 'waivers = ["{} {}: ..."]'
        else:
            limit = r"--modelhealth-set \1=..."
            waiver = '--modelhealth-set "waive={} {}: ..."'
        text = _LIMIT.sub(limit, text)
        text = _WAIVER.sub(lambda found: waiver.format(found[2] or "*", found[3]), text)
        return _LOOK.sub("pytest --modelhealth-html=page.html", text)

    @property
    def has_file(self) -> bool:
        """Whether the suite stands in a test file, rather than in no file."""
        return ":" not in self.item.nodeid.partition("::")[0]

    def _result(self, result: Any) -> MadeResult:
        return MadeResult(result, *self.subject.place, auto_check=False)

    def _keep(self, result: HealthReport | Comparison) -> None:
        self._fixture._inspections.append(self._result(result))


_LIMIT = re.compile(r"@pytest\.mark\.modelhealth\((\w+)=\.\.\.\)")
_WAIVER = re.compile(
    r"@pytest\.mark\.modelhealth_waive\(([\"'])(.*?)\1, check=\"(\w+)\", reason=\"\.\.\.\"\)"
)
_LOOK = re.compile(r"(?<=look:         )(report\.|print\().*")


def judge_own(
    observation: Observation,
    settings: Settings,
    own: frozenset[str],
    but: frozenset[tuple[str, str]] = frozenset(),
) -> Judgement:
    """Judge by all checks, and keep the findings of `own` ones that fail no other test."""
    judgement = judge(observation, settings)

    def mine(violation: Violation) -> bool:
        return violation.check in own and (violation.check, violation.layer) not in but

    return replace(
        judgement,
        violations=tuple(v for v in judgement.violations if mine(v)),
        warned=tuple(v for v in judgement.warned if mine(v)),
        inconclusive=tuple(i for i in judgement.inconclusive if i.check in (*own, _WHOLE_RUN)),
        broken=tuple(b for b in judgement.broken if b.check in own),
        waived=tuple((v, w) for v, w in judgement.waived if v.check in own),
        unused_waivers=(),
    )
