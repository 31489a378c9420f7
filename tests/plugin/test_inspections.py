"""The `inspector` fixture at its edges; what it does in a usual run stands in test_failing_run."""

from __future__ import annotations

import pytest

UNHEALTHY = """
import nets

def test_it(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)
"""


@pytest.mark.parametrize("style", ["auto", "long", "short", "line", "native", "no"])
def test_every_traceback_style_shows_text_only(nets: pytest.Pytester, style: str) -> None:
    """No style shows a frame of the plugin or of pytest, and each but "no" the headline."""
    nets.makepyfile(test_style=UNHEALTHY)
    result = nets.runpytest(f"--tb={style}", "-rN")
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    assert ("unhealthy: 2 (finite)" in output) == (style != "no")
    assert "hookimpl" not in output
    assert "pytest_modelhealth/" not in output
    assert "entries are hidden" not in output
    if style in ("auto", "long"):
        assert "test_style.py:4: ModelHealthError" in result.outlines
    if style == "short":
        assert "test_style.py:4: in test_it" in result.outlines
    if style == "line":
        (line,) = [line for line in result.outlines if line.startswith("/")]
        assert line.startswith(f"{nets.path}/test_style.py:4: unhealthy: 2 (finite): ")


def test_an_assertion_in_native_style_has_no_frame_of_ours(nets: pytest.Pytester) -> None:
    """Python's own traceback goes from the user's line to our text."""
    nets.makepyfile(
        UNHEALTHY.replace("inspector(", "report = inspector(", 2).replace("_it(report = ", "_it(")
        + "    report.assert_healthy()\n"
    )
    result = nets.runpytest("--tb=native")
    result.assert_outcomes(failed=1)
    output = result.stdout.str()
    assert "unhealthy: 2 (finite)" in output
    assert "pytest_modelhealth/" not in output


def test_full_trace_shows_everything(nets: pytest.Pytester) -> None:
    """`--full-trace` brings our frames back, for those who look for a defect of ours."""
    nets.makepyfile(UNHEALTHY)
    assert "pytest_modelhealth/plugin/" in nets.runpytest("--full-trace").stdout.str()


def test_what_the_model_raises_points_at_the_model(nets: pytest.Pytester) -> None:
    """An exception of forward() ends in the user's frame; ours are left out."""
    nets.makepyfile(
        """
        import nets
        import torch

        class Broken(torch.nn.Module):
            def forward(self, x):
                return x @ torch.ones(5, 5)

        def test_it(inspector):
            inspector(Broken()).run_inspection(nets.BATCH)
        """
    )
    result = nets.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * RuntimeError: *mat1 and mat2*", "*.py:6: RuntimeError"])
    assert "pytest_modelhealth/" not in result.stdout.str()


def test_a_wrong_argument_points_at_the_call(nets: pytest.Pytester) -> None:
    """A misspelt setting shows the user's line, the suggestion and no frame of ours."""
    nets.makepyfile("import nets\ndef test_it(inspector): inspector(nets.healthy(), max_gard=3)\n")
    result = nets.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * SettingsError: argument of inspector: unknown setting *did you mean *",
            "*.py:2: SettingsError",
        ]
    )
    assert "pytest_modelhealth/" not in result.stdout.str()


MISUSES = {
    "inspector.run_inspection(nets.BATCH)": (
        "inspector.run_inspection needs the model first: inspector(model).run_inspection(...)"
    ),
    "inspector.watch('0')": "inspector.watch needs the model first: inspector(model).watch(...)",
    "inspector.run_batches([])": "inspector.run_batches needs *(model).run_batches(...)",
    "inspector.get_statistics('0')": "inspector.get_statistics needs *(model).get_statistics(...)",
    "inspector.report": "inspector.report needs the model first: inspector(model).report",
    "inspector.reprots": "inspector has no 'reprots'; did you mean 'reports'?*",
    "inspector(nets.BATCH)": "cannot inspect * the next call: inspector(model).run_inspection(*",
    "inspector(nets.healthy(), nets.BATCH)": "* the next call: inspector(model).run_inspection(*",
}


def test_what_is_called_without_the_model_says_how_it_goes(nets: pytest.Pytester) -> None:
    """The user's line, the right call, and no line of ours; `hasattr` and `copy` work as ever."""
    tests = (f"def test_{i}(inspector):\n    {call}\n" for i, call in enumerate(MISUSES))
    sound = """
import copy
def test_sound(inspector):
    assert not hasattr(inspector, "run_inspection")
    assert copy.copy(inspector).reports == []
"""
    nets.makepyfile("import nets\n" + "".join(tests) + sound)
    result = nets.runpytest()
    result.assert_outcomes(failed=len(MISUSES), passed=1)
    result.stdout.fnmatch_lines([f"E * {said}".replace("[", "[[]") for said in MISUSES.values()])
    assert "pytest_modelhealth/" not in result.stdout.str()


def test_ctrl_c_in_the_body_ends_the_run_as_ever(nets: pytest.Pytester) -> None:
    """The exit status is 2, and the unhealthy report made before adds nothing."""
    nets.makepyfile(UNHEALTHY + "    raise KeyboardInterrupt\n")
    result = nets.runpytest(no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "unhealthy" not in result.stdout.str() + result.stderr.str()
    assert "modelhealth:" not in result.stdout.str()


def test_a_wider_scope_is_refused_by_pytest(pytester: pytest.Pytester) -> None:
    """A module's fixture cannot take what belongs to one test."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture(scope="module")
        def inspected(inspector): pass

        def test_it(inspected): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*ScopeMismatch*")


def test_a_failing_fixture_shows_the_evidence(nets: pytest.Pytester) -> None:
    """A fixture that asserts health errs in setup, with the same section below it."""
    nets.makepyfile(
        """
        import nets
        import pytest

        @pytest.fixture
        def trained(inspector):
            model = nets.with_nan()
            inspector(model).run_inspection(nets.BATCH).assert_healthy()
            return model

        def test_it(trained): pass
        """
    )
    result = nets.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["E * unhealthy: 2 (finite)*", "*- modelhealth: 2 beside 0 -*", "ERROR *- unhealthy: 2*"]
    )


def test_an_inspector_without_the_fixture_gets_the_evidence_too(nets: pytest.Pytester) -> None:
    """Where `Inspector` is used by itself, the error carries the report."""
    nets.makepyfile(
        """
        import nets
        from pytest_modelhealth import Inspector

        def test_it():
            Inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()
        """
    )
    result = nets.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*- modelhealth: 2 beside 0 -*")


def test_the_evidence_is_of_the_thresholds_that_failed(nets: pytest.Pytester) -> None:
    """A limit given to assert_healthy is the one that the section explains."""
    nets.makepyfile(
        """
        import nets

        def test_it(inspector):
            report = inspector(nets.healthy()).run_inspection(nets.BATCH)
            assert report.healthy
            report.assert_healthy(max_grad_norm=1e-9)
        """
    )
    result = nets.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("parameter gradients of 0 (grad_norm)*")


def test_a_failure_outlives_broken_evidence(nets: pytest.Pytester) -> None:
    """Where a destination raises, the test fails as it would, and one line says what happened."""
    nets.makeconftest(
        "def pytest_modelhealth_attach(evidence): raise OSError('the disk is on fire')\n"
    )
    nets.makepyfile(UNHEALTHY)
    result = nets.runpytest("-W", "error")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E   unhealthy: 2 (finite)*",
            "the evidence could not be shown: OSError: the disk is on fire",
        ]
    )


def test_a_conftest_can_add_a_destination(nets: pytest.Pytester) -> None:
    """The hook gives it the report, the text and the figures."""
    nets.makeconftest(
        """
        def pytest_modelhealth_attach(item, report, evidence):
            text = f"{item.name} {evidence.report.verdict} {sorted(evidence.figures)}"
            report.sections.append(("mine", text))
        """
    )
    nets.makepyfile(UNHEALTHY)
    result = nets.runpytest()
    result.stdout.fnmatch_lines("test_it unhealthy [[]'culprit', *")
