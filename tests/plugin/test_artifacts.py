"""The directory of evidence at its edges; the figures stand in test_failing_run."""

from __future__ import annotations

import inspect
import json
import re
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelhealth.plugin.output_files import folder_name

UNHEALTHY = (
    "import nets\ndef test_it(inspector): inspector(nets.with_nan()).run_inspection(nets.BATCH)\n"
)


@pytest.mark.parametrize("filters", [[], ["-W", "error"]], ids=["default", "error"])
def test_a_directory_lost_meanwhile_costs_one_warning(
    nets: pytest.Pytester, filters: list[str]
) -> None:
    """Both tests fail as they would, whatever the warning filters."""
    nets.makepyfile(
        """
        import shutil, nets, pytest

        @pytest.mark.parametrize("n", [1, 2])
        def test_it(inspector, n):
            shutil.rmtree("out", ignore_errors=True)
            open("out", "w").close()
            inspector(nets.with_nan()).run_inspection(nets.BATCH)
        """
    )
    options = filters or ["-W", "default"]
    result = nets.runpytest("--modelhealth-artifacts=out", *options)
    result.assert_outcomes(failed=2, warnings=0 if filters else 1)
    assert ("figures could not be written" in result.stdout.str()) == (not filters)
    assert "modelhealth: figures of" not in result.stdout.str()


def test_no_failure_writes_nothing(nets: pytest.Pytester) -> None:
    """The directory is made and stays empty, and the summary does not mention it."""
    nets.makepyfile(UNHEALTHY.replace("with_nan", "healthy"))
    result = nets.runpytest("--modelhealth-artifacts=deep/er")
    result.assert_outcomes(passed=1)
    assert list(nets.path.joinpath("deep", "er").iterdir()) == []
    assert "modelhealth:" not in result.stdout.str()


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_text_and_numbers_stand_beside_the_figures(nets: pytest.Pytester, kind: str) -> None:
    """The failure as it was shown, and all numbers as strict JSON, with the culprit's places."""
    compared = UNHEALTHY.replace("(nets.with_nan()).run_inspection(", ".compare(nets.healthy(), ")
    compared = compared.replace("healthy(), nets.BATCH", "healthy(), nets.with_nan(), nets.BATCH")
    nets.makepyfile(UNHEALTHY if kind == "report" else compared)
    result = nets.runpytest("--modelhealth-artifacts=out")
    (folder,) = nets.path.joinpath("out").iterdir()
    assert f"modelhealth: figures of 1 test in {folder}" in result.outlines
    text = folder.joinpath("failure.txt").read_text(encoding="utf-8")
    failure = [line[4:] for line in result.outlines if line.startswith("E   ")]
    assert failure[:5] == list(filter(None, text.splitlines()))[:5]
    assert text.endswith("\n")
    data = json.loads(folder.joinpath("report.json").read_text(), parse_constant=pytest.fail)
    assert len(data["layers"]) == (4 if kind == "report" else 5)  # the outputs are the last
    if kind == "report":
        assert "█" in text
        (found,) = data["violations"]
        assert found["defined_at"].partition(":")[0] == inspect.getsourcefile(torch.nn.Linear)
        assert found["called_at"] == ""  # by the inspection
    else:
        assert data["divergence"]["layer"] == "2"
        assert any(one["ratio"] is None for one in data["layers"][-1]["tensors"])  # infinite


SUBTESTS = """
import unittest
import nets
import pytest

def test_sub(inspector, subtests):
    for make in (nets.with_nan, nets.healthy, nets.with_dead_relu):
        with subtests.test(make=make.__name__):
            inspector(make()).run_inspection(nets.BATCH).assert_healthy()

def test_other_reason(inspector, subtests):
    with subtests.test("unhealthy"):
        inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()
    with subtests.test("by itself"):
        assert 1 == 2, "my own"

class TestUnit(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def bind(self, inspector):
        self.inspector = inspector

    def test_unit(self):
        for make in (nets.with_nan, nets.with_dead_relu):
            with self.subTest(make=make.__name__):
                self.inspector(make()).run_inspection(nets.BATCH).assert_healthy()
"""


@pytest.mark.skipif(pytest.version_tuple < (9, 0), reason="pytest has subtests from 9.0 on")
def test_each_failing_subtest_keeps_what_is_its_own(nets: pytest.Pytester) -> None:
    """A folder each, and a section below its own failure."""
    nets.makepyfile(SUBTESTS)
    result = nets.runpytest("--modelhealth-artifacts=out")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    figures = {
        re.sub(r"^.*py-|-[0-9a-f]{8}", "", folder.name): (folder / "culprit.png").read_bytes()
        for folder in nets.path.joinpath("out").iterdir()
    }
    assert sorted(figures) == [
        "TestUnit-test_unit",
        "TestUnit-test_unit-2",
        "test_other_reason",
        "test_sub",
        "test_sub-2",
    ]
    assert figures["test_sub"] == figures["TestUnit-test_unit"] != figures["test_sub-2"]
    assert f"modelhealth: figures of 3 tests in {nets.path / 'out'}" in result.outlines
    assert result.stdout.str().count("modelhealth: 2 beside 0") == 3  # "my own" has none


SAFE = set(string.ascii_letters + string.digits + "._-")


@given(st.text(max_size=300), st.text(max_size=300))
def test_folder_names_are_safe_and_distinct(one: str, other: str) -> None:
    """Any id makes a name of safe characters and bounded length; two ids make two names."""
    name = folder_name(one)
    assert set(name) <= SAFE
    assert len(name) <= 110
    assert name not in (".", "..")
    assert (name == folder_name(other)) == (one == other)
    assert (name.lower() == folder_name(other).lower()) == (one == other)
