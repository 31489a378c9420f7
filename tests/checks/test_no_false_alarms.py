"""Healthy models of many architectures, freshly initialised: none may be called unhealthy."""

from __future__ import annotations

import pytest

from corpus.models.hooked import seeded
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.report import Verdict
from tests.capture.architectures import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about small configurations

# Its codes are an argmin, which passes no gradient: this model cannot train its encoder, and that
# is no false alarm.
CUT = "encodec"
# In evaluation it writes in place to what backward needs, with and without an inspection.
FORWARD_ONLY = {("rwkv", False)}


def healthy_cases() -> list[object]:
    """Return each architecture, in training and in evaluation mode in turns."""
    names = [name for name in ARCHITECTURES if name != CUT]
    return [
        pytest.param(name, place % 2 == 0, id=f"{name}-{('train', 'eval')[place % 2]}")
        for place, name in enumerate(names)
    ]


def report_on(name: str, *, training: bool) -> HealthReport:
    """Return the report on a fresh model under default settings."""
    seeded(0)
    model = ARCHITECTURES[name].build().train(training)
    seeded(100)
    backward = False if (name, training) in FORWARD_ONLY else None
    return Inspector(model).run_inspection(ARCHITECTURES[name].inputs(), backward=backward)


@pytest.mark.parametrize(("name", "training"), healthy_cases())
def test_a_fresh_architecture_is_not_unhealthy(name: str, training: bool) -> None:
    """Default settings find nothing wrong with a model that its library initialised."""
    report = report_on(name, training=training)
    assert report.observation.errors == ()
    assert report.verdict is not Verdict.UNHEALTHY, report.render("failure")


def test_a_graph_that_is_cut_is_no_false_alarm() -> None:
    """EnCodec's encoder gets no gradient through its codes, and is said not to."""
    report = report_on(CUT, training=True)
    assert [violation.check for violation in report.violations] == ["missing_gradients"]
    assert report.violations[0].layer.startswith("encoder.")
