"""The markers: their layers, their origins, and what becomes of a wrong one."""

from __future__ import annotations

import pytest


def test_the_closest_marker_wins_and_says_where_it_stands(pytester: pytest.Pytester) -> None:
    """Function over class over module over the ini file; each value names its marker.

    Waivers add up, and a marker may name two layers. Both markers are listed.
    """
    pytester.makeini("[pytest]\nmodelhealth_min_samples = 4\nmodelhealth_max_grad_norm = 4\n")
    pytester.makepyfile(
        test_layers="""
        import pytest

        pytestmark = [
            pytest.mark.modelhealth(max_grad_norm=3.0, max_dead_fraction=0.3),
            pytest.mark.modelhealth_waive("head", reason="a probe"),
        ]

        def limits(inspector, *names):
            return [(inspector.settings[n].value, inspector.settings[n].origin) for n in names]

        @pytest.mark.modelhealth(max_grad_norm=2.0)
        class TestEncoder:
            @pytest.mark.parametrize("size", [1])
            @pytest.mark.modelhealth(max_grad_norm=1.0)
            def test_function(self, inspector, size):
                assert limits(inspector, "max_grad_norm") == [
                    (1.0, "@modelhealth on test_function")
                ]

            def test_class(self, inspector):
                assert limits(
                    inspector, "max_grad_norm", "max_dead_fraction", "min_samples", "layers"
                ) == [
                    (2.0, "@modelhealth on class TestEncoder"),
                    (0.3, "@modelhealth on test_layers.py"),
                    (4, "tox.ini: modelhealth_min_samples"),
                    (("*",), "default"),
                ]

        @pytest.mark.parametrize(
            "size", [pytest.param(1, marks=pytest.mark.modelhealth(max_grad_norm=0.5))]
        )
        def test_parameter(inspector, size):
            assert limits(inspector, "max_grad_norm") == [(0.5, "@modelhealth on test_parameter")]

        @pytest.mark.modelhealth_waive("a", "b.*", check="dead_units", reason="sparse")
        def test_waivers(inspector):
            assert [tuple(vars(w).values())[:4] for w in inspector.settings.waivers] == [
                ("a", "dead_units", "sparse", "@modelhealth_waive on test_waivers"),
                ("b.*", "dead_units", "sparse", "@modelhealth_waive on test_waivers"),
                ("head", None, "a probe", "@modelhealth_waive on test_layers.py"),
            ]
        """
    )
    pytester.runpytest("--strict-markers").assert_outcomes(passed=4)
    pytester.runpytest("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.modelhealth(?*settings): *", "@pytest.mark.modelhealth_waive(?layers, *): *"]
    )


WRONG = {
    "modelhealth(max_gard_norm=1.0)": (
        "unknown setting 'max_gard_norm'; did you mean 'max_grad_norm'?"
    ),
    "modelhealth(max_grad_norm='1')": (
        "max_grad_norm must be a number of at least 0 or none, not '1'"
    ),
    "modelhealth(10.0)": "takes keywords only, such as max_grad_norm=10.0, not 10.0",
    "modelhealth_waive('a')": "reason='...' is missing",
    "modelhealth_waive('a', reason=' ')": "reason='...' is missing",
    "modelhealth_waive('a', reason=3)": "reason='...' is missing",
    "modelhealth_waive(reason='why')": "name the layers as strings first",
    "modelhealth_waive(3, reason='why')": "name the layers as strings first",
    "modelhealth_waive('a', check='dead_unit', reason='why')": (
        "unknown check 'dead_unit'; did you mean 'dead_units'?"
    ),
    "modelhealth_waive('a', check=3, reason='why')": "check must be the name of one check, not 3",
    "modelhealth_waive('a', reson='why')": "unknown keyword 'reson'; did you mean 'reason'?",
}


def test_a_wrong_marker_is_an_error_of_the_tests_that_carry_it(pytester: pytest.Pytester) -> None:
    """It says the test or class, the mistake and the remedy; the others of the file run.

    So does one that is added while the test runs.
    """
    marked = "".join(
        f"@pytest.mark.{marker}\ndef test_number_{number}(): pass\n"
        for number, marker in enumerate(WRONG)
    )
    pytester.makepyfile(
        f"import pytest\n{marked}"
        """
@pytest.mark.modelhealth(max_grad=1)
class TestIt:
    def test_a(self): pass
    def test_b(self): pass

@pytest.mark.skip
@pytest.mark.modelhealth(max_grad=1)
def test_skipped(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.modelhealth(max_grad=1))])
def test_parameter(n): pass

@pytest.mark.modelhealth(max_grad_norm=1)
def test_right(): pass

def test_unmarked(): pass

@pytest.fixture
def loosen(request):
    request.applymarker(pytest.mark.modelhealth(max_grad=1))

def test_late(loosen, inspector): pass
"""
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(errors=len(WRONG) + 4, passed=3, skipped=1)
    output = result.stdout.str()
    for unwanted in ("INTERNALERROR", "Traceback", "pytest_modelhealth/"):
        assert unwanted not in output
    for number, (marker, message) in enumerate(WRONG.items()):
        name = marker.partition("(")[0]
        assert f"@{name} on test_number_{number}: {message}" in output
    found = [line for line in result.outlines if line.startswith("@modelhealth on class TestIt: ")]
    assert len(found) == 2
    assert "@modelhealth on test_late: unknown setting 'max_grad'" in output


WAIVED = """
import pytest, nets

@pytest.mark.modelhealth_waive("*", check="finite", reason="needed")
@pytest.mark.modelhealth_waive("9.*", reason="stale")
def test_waived(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth_waive("*", check="grad_norm", reason="needed by the call")
def test_waived_under_the_threshold_of_a_call(inspector):
    report = inspector(nets.healthy()).run_inspection(nets.BATCH)
    report.assert_healthy(max_grad_norm=1e-9)

@pytest.mark.modelhealth_waive("9.*", reason="nothing was judged")
def test_unjudged(inspector):
    model = inspector(nets.healthy(), auto_check=False)
    assert model.run_inspection(nets.BATCH).layers
"""
STALE = [
    "*::test_waived",
    "*Warning: @modelhealth_waive on test_waived: nothing is left to waive *: stale)",
]


def test_a_waiver_that_waived_nothing_is_a_warning(nets: pytest.Pytester) -> None:
    """It names the test and the waiver and fails nothing; a waiver that was needed is not named.

    Under -W error the user asked for it: one failing test, no crash of the run.
    """
    nets.makepyfile(WAIVED)
    result = nets.runpytest("-rA", "-W", "default")
    result.assert_outcomes(passed=3, warnings=1)
    result.stdout.fnmatch_lines(STALE)
    result = nets.runpytest("-W", "error")
    result.assert_outcomes(failed=1, passed=2)
    assert "nothing is left to waive" in result.stdout.str()
    assert "exception occurred" not in result.stdout.str()
