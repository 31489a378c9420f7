"""Settings from the ini file and the command line, their layers and their origins."""

from __future__ import annotations

import pytest

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
    """Option over ini over default, and each value says in words where it was set."""
    pytester.makepyfile(PRINT_LIMIT)
    assert limit_in_force(pytester) == "0.8 from default"
    pytester.makeini("[pytest]\nmodelhealth_max_dead_fraction = 0.25\n")
    assert limit_in_force(pytester) == "0.25 from tox.ini: modelhealth_max_dead_fraction"
    ini = "[pytest]\nmodelhealth_max_dead_fraction = 0.25\n"
    pytester.makeini(f"{ini}addopts = --modelhealth-set max_dead_fraction=0.5\n")
    options = ("--modelhealth-set", "max-dead-fraction=0.125")
    assert limit_in_force(pytester) == "0.5 from --modelhealth-set max_dead_fraction"
    assert limit_in_force(pytester, *options) == "0.125 from --modelhealth-set max_dead_fraction"
    pytester.makeini(ini)
    override = "modelhealth_max_dead_fraction=0.5"
    assert limit_in_force(pytester, "-o", override) == (
        "0.5 from --override-ini modelhealth_max_dead_fraction"
    )


_NATIVE = pytest.mark.skipif(pytest.version_tuple < (9, 2), reason="[tool.pytest] takes text only")


@pytest.mark.parametrize("value", ["0.25", '"0.25"', "1"])
@pytest.mark.parametrize(
    "table", ["pytest.ini_options", pytest.param("pytest", marks=_NATIVE)], ids=str
)
def test_pyproject_may_hold_a_number_or_text(
    pytester: pytest.Pytester, table: str, value: str
) -> None:
    """TOML knows numbers; both spellings mean the same and name the file."""
    pytester.makepyfile(PRINT_LIMIT)
    pytester.makepyprojecttoml(f"[tool.{table}]\nmodelhealth_max_dead_fraction = {value}\n")
    number = float(value.strip('"'))
    origin = "pyproject.toml: modelhealth_max_dead_fraction"
    assert limit_in_force(pytester) == f"{number} from {origin}"


@pytest.mark.parametrize(
    ("ini", "options"),
    [
        ("layers =\n    0\n    2", []),
        ("layers = 0, 2", []),
        ("max_grad_norm = 3", ["--modelhealth-set=layers=0", "--modelhealth-set=layers=2"]),
        ("layers = 1", ["--modelhealth-set=layers=0,2"]),
    ],
)
def test_layers_are_a_list_wherever_they_stand(
    nets: pytest.Pytester, ini: str, options: list[str]
) -> None:
    """A line or a comma each in the ini file, and the option as often as needed; 1 is dead."""
    nets.makeini(f"[pytest]\nmodelhealth_{ini}\n")
    nets.makepyfile(
        """
        import nets

        def test_it(inspector):
            assert inspector.settings["layers"].value == ("0", "2")
            inspector(nets.with_dead_relu()).run_inspection(nets.BATCH).assert_healthy()
        """
    )
    nets.runpytest(*options).assert_outcomes(passed=1)


BAD_VALUES = {
    "max_grad_norm=abc": (
        "--modelhealth-set max_grad_norm: max_grad_norm must be a number of at least 0 or none, "
        "not 'abc'"
    ),
    "min_samples=0": (
        "--modelhealth-set min_samples: min_samples must be a whole number of at least 1, not 0"
    ),
    "max_idle_rows=nan": (
        "--modelhealth-set max_idle_rows: max_idle_rows must be a number from 0 to 1, not nan"
    ),
    "max_grad_norm": (
        "--modelhealth-set takes NAME=VALUE, such as max_grad_norm=10, not 'max_grad_norm'"
    ),
}


@pytest.mark.parametrize("given", [*BAD_VALUES, "ini"])
def test_a_bad_value_is_one_line_and_exit_status_4(pytester: pytest.Pytester, given: str) -> None:
    """A usage error names the place, the expectation and the value, and shows no traceback."""
    if given in BAD_VALUES:
        message, options = BAD_VALUES[given], [f"--modelhealth-set={given}"]
    else:
        pytester.makeini("[pytest]\nmodelhealth_max_grad_norm = abc\n")
        message, options = BAD_VALUES["max_grad_norm=abc"], []
        message = message.replace("--modelhealth-set ", "tox.ini: modelhealth_")
    result = pytester.runpytest(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [f"ERROR: {message}"]
    assert "Traceback" not in result.stdout.str()


def test_none_spells_no_limit(pytester: pytest.Pytester) -> None:
    """An option can take back the limit that the ini file sets."""
    pytester.makepyfile(
        "def test_it(inspector): assert inspector.settings['max_grad_norm'].value is None"
    )
    pytester.makeini("[pytest]\nmodelhealth_max_grad_norm = 3\n")
    pytester.runpytest("--modelhealth-set=max_grad_norm=none").assert_outcomes(passed=1)


@pytest.mark.parametrize(("wrong", "right"), [("max_grad_nrm", "max_grad_norm"), ("wave", "waive")])
def test_a_wrong_name_is_met_by_the_nearest(
    pytester: pytest.Pytester, wrong: str, right: str
) -> None:
    """With all there are, as anywhere."""
    result = pytester.runpytest(f"--modelhealth-set={wrong}=1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = f"unknown setting {wrong!r}; did you mean {right!r}? Known settings: auto_check, checks,"
    assert f"ERROR: --modelhealth-set: {text}" in result.stderr.str()


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
    override = ("--strict-config", "-o", "modelhealth_max_grad_nrm=3")
    assert (
        "Unknown config option: modelhealth_max_grad_nrm"
        in pytester.runpytest(*override).stderr.str()
    )
