"""The `inspector` fixture at its edges; what it does in a usual run stands in test_failing_run."""

from __future__ import annotations

import re

import pytest

UNHEALTHY = """
import nets

def test_it(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)

def test_asserted(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()
"""


def test_every_traceback_style_shows_text_only(nets: pytest.Pytester) -> None:
    """No style shows a frame of the plugin or of pytest, and each but "no" the headline.

    `--full-trace` brings our frames back, for those who look for a defect of ours.
    """
    nets.makepyfile(test_style=UNHEALTHY)
    for style in ("auto", "long", "short", "line", "native", "no"):
        result = nets.runpytest(f"--tb={style}", "-rN")
        result.assert_outcomes(failed=2)
        output = result.stdout.str()
        assert ("unhealthy: 2 (finite)" in output) == (style != "no")
        for hidden in ("hookimpl", "pytest_modelhealth/", "entries are hidden"):
            assert hidden not in output
        if style in ("auto", "long"):
            assert "test_style.py:4: ModelHealthError" in result.outlines
        if style == "short":
            assert "test_style.py:4: in test_it" in result.outlines
        if style == "line":
            line, _ = [line for line in result.outlines if line.startswith("/")]
            assert line.startswith(f"{nets.path}/test_style.py:4: unhealthy: 2 (finite): ")
    assert "pytest_modelhealth/plugin/" in nets.runpytest("--full-trace").stdout.str()


EVIDENCE = """
import nets, pytest
from pytest_modelhealth import Inspector

def test_wrong_argument(inspector): inspector(nets.healthy(), max_gard=3)

def test_without_fixture():
    Inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()

def test_limit_of_a_call(inspector):
    report = inspector(nets.healthy()).run_inspection(nets.BATCH)
    assert report.healthy
    report.assert_healthy(max_grad_norm=1e-9)

@pytest.fixture(scope="module")
def inspected(inspector): pass

def test_wider_scope(inspected): pass
"""


def test_each_failure_shows_the_users_line_and_what_explains_it(nets: pytest.Pytester) -> None:
    """A misspelt setting, no fixture, a limit of a call; `outcomes` has a fixture's.

    None shows a frame of ours. A fixture of a module cannot take what belongs to one test.
    """
    nets.makepyfile(test_it=EVIDENCE)
    result = nets.runpytest()
    result.assert_outcomes(failed=3, errors=1)
    parts = re.split(
        r"^_+ (?:ERROR at setup of )?(\w+) _+$", result.stdout.str(), flags=re.MULTILINE
    )
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "SettingsError: argument of inspector: unknown" in shown["test_wrong_argument"]
    assert "did you mean " in shown["test_wrong_argument"]
    assert "test_it.py:4: SettingsError" in shown["test_wrong_argument"]
    assert "unhealthy: 2 (finite)" in shown["test_without_fixture"]
    assert "- modelhealth: 2 beside 0 -" in shown["test_without_fixture"]
    assert "\nparameter gradients of 0 (grad_norm)" in shown["test_limit_of_a_call"]
    assert "ScopeMismatch" in shown["test_wider_scope"]
    del shown["test_wider_scope"]
    assert "pytest_modelhealth/" not in "".join(shown.values())


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
    nets.makepyfile(UNHEALTHY.replace(".assert_healthy()", "\n    raise KeyboardInterrupt\n"))
    result = nets.runpytest("-k", "asserted", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "unhealthy" not in result.stdout.str() + result.stderr.str()
    assert "modelhealth:" not in result.stdout.str()


WARNED = """
import nets, pytest
from torch import nn

@pytest.mark.parametrize("n", range(5))
@pytest.mark.modelhealth(severity={"dead_units": "warn"})
def test_dead(inspector, n):
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)

def idle():
    model = nets.healthy()
    model.append(nn.Identity())
    model[-1].idle = nn.Linear(2, 2)
    return model

def test_idle(inspector):
    inspector(idle()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth(strict=False)
def test_idle_marked(inspector):
    inspector(idle()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth_waive("*idle", check="wiring", reason="for later")
def test_idle_waived(inspector):
    inspector(idle()).run_inspection(nets.BATCH)
"""


def test_warnings_are_said_once_a_cause(nets: pytest.Pytester) -> None:
    """In one section with their tests; they count as warnings. Workers say it likewise."""
    nets.makepyfile(test_it=WARNED)
    result = nets.runpytest("-W", "default", "-q")
    text = result.stdout.str()
    assert text.count("1 (dead_units): ") == 1
    assert text.count("3.idle (wiring): ") == 1
    assert "ModelHealthWarning" not in text
    result.stdout.fnmatch_lines(
        ["=* modelhealth warnings =*", "in tests: * and 2 more", "8 passed, 7 *"]
    )


@pytest.mark.parametrize("how", ["ini", "option"])
def test_strict_fails_a_warning(nets: pytest.Pytester, how: str) -> None:
    """By an ini value or the option; a marker, a waiver and a severity win over it."""
    nets.makepyfile(test_it=WARNED)
    if how == "ini":
        nets.makeini("[pytest]\nmodelhealth_strict = true\n")
    result = nets.runpytest("-W", "default", *["--modelhealth-strict"] * (how == "option"))
    result.assert_outcomes(failed=1, passed=7, warnings=6)
    said = "tox.ini: modelhealth_strict" if how == "ini" else "--modelhealth-set strict"
    result.stdout.fnmatch_lines([f"E *a warning, which fails as strict is set ({said})"])


def test_a_first_test_catches_a_missing_causal_mask(pytester: pytest.Pytester) -> None:
    """The test that README begins with, of a language model: nothing else is asked for."""
    pytester.makepyfile(
        """
        import pytest, torch
        import torch.nn.functional as F
        from torch import nn

        class Writer(nn.Module):
            def __init__(self, causal):
                super().__init__()
                self.causal = causal
                self.words, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
                self.places = nn.Parameter(torch.randn(12, 16))
                self.attention, self.head = nn.Linear(16, 48), nn.Linear(16, 32)
            def forward(self, ids):
                x = self.words(ids) + self.places
                q, k, v = self.attention(self.norm(x)).chunk(3, -1)
                seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
                return self.head(x + seen)

        def loss(output, target):
            return F.cross_entropy(output.flatten(0, 1), target.flatten())

        @pytest.mark.parametrize("causal", [True, False])
        def test_writer(inspector, causal):
            torch.manual_seed(0)
            ids = torch.randint(32, (64, 13))
            inspector(Writer(causal)).run_inspection(ids[:, :-1], target=ids[:, 1:], loss=loss)
        """
    )
    result = pytester.runpytest("--tb=line")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*: unhealthy: scaled_dot_product_attention (causality): it sees *"]
    )
