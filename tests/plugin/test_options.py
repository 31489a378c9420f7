"""Settings from the ini file and the command line, their origins, and what explains them."""

from __future__ import annotations

import re

import pytest

from pytest_modelhealth.checks import default_settings, every_check
from pytest_modelhealth.settings.setting import WAIVE

PRINT_LIMIT = """
def test_limit(inspector):
    limit = inspector.settings["max_dead_fraction"]
    print(f"<{limit.value} from {limit.origin}>")
"""


def limit_in_force(pytester: pytest.Pytester, *options: str) -> str:
    """What the test above prints in a run with these options."""
    result = pytester.runpytest("-s", *options)
    result.assert_outcomes(passed=1)
    return next(line for line in result.outlines if "<" in line).partition("<")[2].rstrip(">")


def test_a_later_layer_wins_and_its_origin_is_kept(pytester: pytest.Pytester) -> None:
    """Option over ini over default, and each value says in words where it was set.

    TOML knows numbers, and both spellings mean the same.
    """
    pytester.makepyfile(PRINT_LIMIT)
    assert limit_in_force(pytester) == "0.8 from default"
    ini = "[pytest]\nmodelhealth_max_dead_fraction = 0.25\n"
    pytester.makeini(ini)
    assert limit_in_force(pytester) == "0.25 from tox.ini: modelhealth_max_dead_fraction"
    override = "modelhealth_max_dead_fraction=0.5"
    origin = "--override-ini modelhealth_max_dead_fraction"
    assert limit_in_force(pytester, "-o", override) == f"0.5 from {origin}"
    pytester.makeini(f"{ini}addopts = --modelhealth-set max_dead_fraction=0.5\n")
    options = ("--modelhealth-set", "max-dead-fraction=0.125")
    assert limit_in_force(pytester) == "0.5 from --modelhealth-set max_dead_fraction"
    assert limit_in_force(pytester, *options) == "0.125 from --modelhealth-set max_dead_fraction"
    pytester.path.joinpath("tox.ini").unlink()
    tables = ["pytest.ini_options", *(["pytest"] if pytest.version_tuple >= (9, 2) else [])]
    for table in tables:
        for value in ("0.25", '"0.25"', "1"):
            pytester.makepyprojecttoml(f"[tool.{table}]\nmodelhealth_max_dead_fraction = {value}\n")
            expected = float(value.strip('"'))
            origin = "pyproject.toml: modelhealth_max_dead_fraction"
            assert limit_in_force(pytester) == f"{expected} from {origin}"


CHOICES = """
import nets

def test_dead(inspector):
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)

def test_healthy(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)

def test_layers(inspector):
    assert inspector.settings["layers"].value in (("*",), ("0", "2"))
    assert inspector.settings["max_grad_norm"].value is None
"""
PASSING = [
    ("waive =\n    1 dead_*: a probe: known", []),
    ("", ["waive=1 dead_units: a probe"]),
    ("layers =\n    0\n    2", []),
    ("layers = 0, 2", []),
    ("max_grad_norm = 3", ["layers=0", "layers=2", "max_grad_norm=none"]),
    ("layers = 1", ["layers=0,2"]),
    ("", ["checks=finite", "checks=grad_norm"]),
    ("", ["skip-checks=dead_*,finite"]),
    ("", ["severity=finite:fail", "severity=dead_*:warn"]),
    ("", ["thresholds=1:max_dead_fraction=1,max_held_fraction=1", "thresholds=0:min_samples=2"]),
    ("auto_check = off", []),
]


def test_what_holds_for_every_test(nets: pytest.Pytester) -> None:
    """A line or a comma each in the ini file, or the option as often as needed: each lets it pass.

    A test that did not need a waiver is silent about it, and ``none`` takes back a limit.
    """
    nets.makepyfile(CHOICES)
    nets.runpytest().assert_outcomes(failed=1, passed=2)
    for ini, options in PASSING:
        nets.makeini(f"[pytest]\nmodelhealth_{ini}\n" if ini else "[pytest]\n")
        result = nets.runpytest("-Wdefault", *(f"--modelhealth-set={one}" for one in options))
        result.assert_outcomes(passed=3, warnings=any("warn" in one for one in options))
    nets.path.joinpath("tox.ini").unlink()
    nets.makepyprojecttoml(
        "[tool.pytest.ini_options]\n"
        'modelhealth_skip_checks = ["dead_units"]\n'
        'modelhealth_waive = ["0 dead_units: a probe"]\n'
    )
    nets.runpytest().assert_outcomes(passed=3)


BAD = {
    "max_grad_norm=abc": "max_grad_norm must be a number of at least 0 or none, not 'abc'",
    "checks=finit": "checks: unknown check 'finit'; did you mean 'finite'?",
    "thresholds=a": "thresholds of layers are 'PATTERN: NAME=VALUE, ...'",
    "waive=a dead_units": "its reason is missing",
    "waive=a dead_unit: why": "unknown check 'dead_unit'; did you mean 'dead_units'?",
}


@pytest.mark.parametrize("given", BAD)
def test_a_bad_value_is_one_line_and_exit_status_4(pytester: pytest.Pytester, given: str) -> None:
    """Said before any test runs, by an option and by the ini file; no traceback is shown."""
    name, _, value = given.partition("=")
    by_option = pytester.runpytest(f"--modelhealth-set={given}")
    pytester.makeini(f"[pytest]\nmodelhealth_{name} = {value}\n")
    by_ini = pytester.runpytest()
    for result, origin in (
        (by_option, f"--modelhealth-set {name}"),
        (by_ini, f"tox.ini: modelhealth_{name}"),
    ):
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        (line,) = [line for line in result.errlines if line]
        assert line.startswith(f"ERROR: {origin}")
        assert BAD[given] in line


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("max_grad_norm", "takes NAME=VALUE, such as max_grad_norm=10, not 'max_grad_norm'"),
        ("max_grad_nrm=1", ": unknown setting 'max_grad_nrm'; did you mean 'max_grad_norm'? Known"),
        ("wave=1", ": unknown setting 'wave'; did you mean 'waive'? Known settings: auto_check, c"),
    ],
)
def test_a_wrong_name_is_met_by_the_nearest(
    pytester: pytest.Pytester, given: str, told: str
) -> None:
    """With all there are, as anywhere."""
    result = pytester.runpytest(f"--modelhealth-set={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: --modelhealth-set {told}".replace(" :", ":") in result.stderr.str()


def test_help_is_short_and_strict_config_holds(pytester: pytest.Pytester) -> None:
    """`pytest --help` has at most 60 lines of ours, also where the ini file sets something."""
    pytester.makeini("[pytest]\nmodelhealth_max_grad_norm = 3\n")
    pytester.makepyfile("def test_it(): pass")
    without, text = (
        pytester.runpytest("-p", "no:cacheprovider", *options, "--help").outlines
        for options in (["-p", "no:modelhealth"], [])
    )
    assert 0 < len(text) - len(without) <= 60
    assert not [line for line in text if "max-grad-norm" in line or "max_grad_norm (" in line]
    pytester.runpytest("--strict-config").assert_outcomes(passed=1)
    wrong = pytester.runpytest("--strict-config", "-o", "modelhealth_max_grad_nrm=3")
    assert "Unknown config option: modelhealth_max_grad_nrm" in wrong.stderr.str()


def explained(pytester: pytest.Pytester, *options: str) -> tuple[list[str], str]:
    """What a run prints that explains and exits 0: its lines, and all as one text."""
    result = pytester.runpytest(*options)
    assert result.ret == pytest.ExitCode.OK
    assert max(map(len, result.outlines)) <= 80
    return result.outlines, " ".join(" ".join(result.outlines).split())


def test_every_check_is_explained(pytester: pytest.Pytester) -> None:
    """In the order of rank, or a sentence each by what a test does; no test is collected."""
    pytester.makepyfile("raise RuntimeError('collected')")
    lines, text = explained(pytester, "--modelhealth-explain=*")
    names = [line for line in lines if line and not line.startswith(" ")]
    assert names == [check.name for check in every_check()]
    overview, short = explained(pytester, "--modelhealth-explain")
    for check in every_check():
        assert f"{check.name} {check.summary}" in text
        assert f"reference docs/reference/checks.md#{check.name}" in text
        for setting in check.settings:
            assert f"{setting.name} = {setting.shown_default} (default) {setting.help}" in text
        assert f"{check.name} {check.summary}" in short
        assert check.occasion in overview
    assert "\x1b" not in text
    for setting in (*default_settings().declarations, WAIVE):
        assert re.search(rf"\b{setting.name}\b", short), setting.name
    assert "--modelhealth-explain=dead_units" in short


def test_what_is_in_force_is_explained_with_its_origin(pytester: pytest.Pytester) -> None:
    """Limits, limits by layer, severity and what is left out each say who set them."""
    pytester.makeini(
        "[pytest]\n"
        "modelhealth_max_dead_fraction = 0.25\n"
        "modelhealth_thresholds =\n"
        "    embed*: max_dead_fraction=1, min_samples=8\n"
        "modelhealth_skip_checks = dead_units\n"
    )
    options = ("--modelhealth-set", "severity=dead_*: warn", "--modelhealth-explain=dead_units")
    lines, text = explained(pytester, *options)
    assert [line for line in lines if line[:1].strip()] == ["dead_units"]
    assert "max_dead_fraction = 0.25 (tox.ini: modelhealth_max_dead_fraction)" in text
    assert "1 by layer (tox.ini: modelhealth_thresholds for 'embed*')" in text
    assert "8 by layer (tox.ini: modelhealth_thresholds for 'embed*')" in text
    assert "warn (--modelhealth-set severity)" in text
    assert "left out (tox.ini: modelhealth_skip_checks)" in text
    for asked, suggested in (
        ("dead_unit", "; did you mean 'dead_units'?"),
        ("grad", "; did you mean 'missing_gradients' or 'grad_norm' or 'averaged_gradients'?"),
        ("nope", "."),
    ):
        result = pytester.runpytest(f"--modelhealth-explain={asked}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"unknown check {asked!r}{suggested} Known checks: " in result.stderr.str()


@pytest.mark.parametrize("absent", ["html", "xdist", "terminalreporter", "syrupy"])
def test_to_explain_needs_no_other_plugin(pytester: pytest.Pytester, absent: str) -> None:
    """Nor does `-n 2` hinder it, where there is xdist."""
    workers = [] if absent == "xdist" else ["-n2"]  # of which none starts
    assert explained(pytester, *workers, "-p", f"no:{absent}", "--modelhealth-explain=finite")


def test_an_option_that_a_conftest_has_too_is_one_line(pytester: pytest.Pytester) -> None:
    """It names the option and the line of the conftest.py; one of its own is left alone."""
    for option in ("--modelhealth-json", "--health"):
        pytester.makeconftest(f"def pytest_addoption(parser):\n    parser.addoption('{option}')")
        result = pytester.runpytest()
        if option == "--health":
            assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
            continue
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        (line,) = filter(None, result.errlines)
        assert line.startswith(
            f"ERROR: {pytester.path / 'conftest.py'}:2: --modelhealth-json is an "
        )
