"""A pytest run on a terminal shows how far a long call is, and its own lines stay as they are."""

from __future__ import annotations

import sys

import pytest

from tests.terminals import Screen, run_on_terminal

CONFTEST = """
from pytest_modelhealth import progress
progress.DELAY = progress.PAUSE = 0.0
"""

SUITE = """
import pytest
from pytest_modelhealth import progress

def work():
    for _ in progress.track(range(3), "inspecting batches"):
        pass

def test_before(): pass
def test_long(capfd):
    work()
    assert capfd.readouterr() == ("", "")
@pytest.mark.parametrize("name", ["a long name " * 7])
def test_long_name(name): work()
def test_fails():
    work()
    assert 0
def test_after(): print("printed"); work(); print("printed")
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Tests that show tasks at once, one of them failing, one with a name of a row and more."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=SUITE)
    return pytester


def run(suite: pytest.Pytester, *options: str, **environment: str) -> Screen:
    """Run the suite on a terminal."""
    command = [sys.executable, "-m", "pytest", "--no-header", "-rN", "--tb=no", *options]
    return run_on_terminal(command, suite.path, environment)


LINE = "modelhealth: inspecting batches "


def lines(screen: Screen) -> list[str]:
    """What stands there in the end, but how long it took."""
    return [line for line in screen.text.splitlines() if " in " not in line]


@pytest.mark.parametrize("options", [(), ("-v",), ("-s",), ("-q",), ("--capture=sys",)])
def test_the_line_comes_and_goes(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    """What stands there in the end is what stands there without us."""
    with_us = run(suite, *options, "-p", "no:xdist")
    without = run(suite, *options, "-p", "no:xdist", "-p", "no:modelhealth.progress")
    assert not without.shown
    assert {f"{LINE}0/3", f"{LINE}1/3, about 1 s left"} <= set(with_us.shown)
    assert lines(with_us) == lines(without)
    assert "1 failed, 4 passed" in with_us.text


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), {"CI": "true"}),
        (("-qq",), {}),
        (("-n", "1", "-s"), {}),
        (("-o", "log_cli=true"), {}),
        ((), {"TERM": "dumb"}),
    ],
)
def test_it_is_silent_where_it_would_be_noise(
    suite: pytest.Pytester, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    """A log, a quiet run, another process, live logs, a terminal that cannot erase."""
    screen = run(suite, *options, **environment)
    assert "modelhealth: " not in screen.text
    assert not screen.shown


def test_a_pipe_gets_no_byte_of_it(suite: pytest.Pytester) -> None:
    """Nor does captured output."""
    result = suite.runpytest_subprocess("-s")
    result.assert_outcomes(passed=4, failed=1)
    assert LINE not in result.stdout.str() + result.stderr.str()
    assert "\x1b" not in result.stdout.str() + result.stderr.str()
