"""``--modelhealth-html`` in runs of pytest; what the page holds stands in tests/runs."""

from __future__ import annotations

import re

import pytest

TESTS = """
import nets, pytest

@pytest.mark.parametrize("model", ["healthy", "with_nan"])
def test_it(inspector, model):
    inspector(getattr(nets, model)()).run_inspection(nets.BATCH)
"""


def test_the_page_has_passing_and_failing_tests(nets: pytest.Pytester) -> None:
    """It is written once at the end, whole, and the summary says where."""
    nets.makepyfile(TESTS)
    result = nets.runpytest("--modelhealth-html=out/page.html")
    result.assert_outcomes(passed=1, failed=1)
    path = nets.path / "out" / "page.html"
    result.stdout.fnmatch_lines([f"modelhealth: page in {path}"])
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]
    text = path.read_text(encoding="ascii")
    assert re.search(r"<b class=\"bad\">1 unhealthy</b>, <b class=\"good\">1 healthy</b>", text)
    assert text.index("test_it[with_nan]") < text.index("test_it[healthy]")
    assert len(re.findall('id="data-', text)) == 2
    assert text.endswith("</html>\n")


def test_nothing_asked_for_writes_nothing(nets: pytest.Pytester) -> None:
    """Without the option no file is written, and what makes pages is not loaded."""
    nets.makepyfile(TESTS)
    nets.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            print("loaded" if "pytest_modelhealth.runs.page" in sys.modules else "left alone")
        """
    )
    result = nets.runpytest_subprocess("-p", "no:cacheprovider", "-s")
    assert "left alone" in result.stdout.str()
    assert "modelhealth: page" not in result.stdout.str()
    assert not list(nets.path.rglob("*.html"))


def test_a_run_that_inspected_nothing_has_a_page(pytester: pytest.Pytester) -> None:
    """The page says so; the file of an earlier run does not stay."""
    pytester.makepyfile("def test_it(): pass")
    pytester.path.joinpath("page.html").write_text("of yesterday")
    pytester.runpytest("--modelhealth-html=page.html").assert_outcomes(passed=1)
    assert "nothing was inspected" in pytester.path.joinpath("page.html").read_text("ascii")


def test_a_path_that_cannot_be_written_is_a_usage_error(pytester: pytest.Pytester) -> None:
    """It is said before any test runs."""
    result = pytester.runpytest("--modelhealth-html=.")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--modelhealth-html: cannot write to '.': Is a directory" in result.stderr.str()


@pytest.mark.skipif("not __import__('os').path.exists('/dev/full')", reason="has no /dev/full")
def test_a_full_disk_costs_the_page_and_not_the_result(nets: pytest.Pytester) -> None:
    """One line says what happened, and the outcome of the run stays."""
    nets.makepyfile(TESTS)
    result = nets.runpytest("--modelhealth-html=/dev/full")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = "modelhealth: page could not be written to /dev/full: No space left on device"
    assert told in result.stdout.str()
