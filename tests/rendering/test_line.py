import pytest

from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.training import default_settings
from tests.builders import layer, observation
from tests.rendering import reports


def test_repr_of_an_unhealthy_report() -> None:
    """Verdict, culprit, check, message and counts stand in one line."""
    assert repr(reports.dead()) == (
        "<HealthReport unhealthy: relu (dead_units): 3 of 4 units are dead; 1 violation, 5 layers>"
    )


def test_repr_of_a_healthy_report() -> None:
    """Without findings it says so, and how many layers were looked at."""
    assert repr(reports.healthy()) == "<HealthReport healthy: no check objects to Model; 2 layers>"


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_repr_is_one_line(case) -> None:
    """Logs and debuggers get one line, whatever the names hold."""
    assert len(repr(case()).splitlines()) == 1


def test_repr_does_not_raise_where_a_check_does() -> None:
    """A broken check costs the verdict in `repr`, not the debugging session."""

    def broken(seen, settings):
        raise ZeroDivisionError("in a\ncheck")

    report = HealthReport(observation(layer("fc")), default_settings(), broken, renderer=renderer)
    assert repr(report) == ("<HealthReport not judged (ZeroDivisionError: in a\\ncheck); 1 layer>")
