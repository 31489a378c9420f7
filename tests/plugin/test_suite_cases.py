"""Each fault fails the test that is named for it and no other; healthy models fail none."""

from __future__ import annotations

import pytest

from corpus.suites import FAULTS

SAMPLE = ("dropout", "experts", "tied", "lazy", "one_sample")
"""The healthy models of a run without the corpus."""
COMPILED = ("experts", "lstm", "vae", "mlp", "miscompiled")
FILE = """
from corpus import suites
from pytest_modelhealth import modelhealth_suite

for name, case in suites.{group}.items():
    if {chosen!r} is None or name in {chosen!r}:
        globals()[f"Test_{{name}}"] = modelhealth_suite(case.make, **case.attributes)
"""
FAULTY = {(name, test) for name, case in FAULTS.items() for test in case.fails}


@pytest.mark.parametrize(
    ("group", "chosen", "fails"),
    [
        ("FAULTS", None, FAULTY - {("miscompiled", "test_compiled_equals_eager")}),
        ("HEALTHY", SAMPLE, set()),
        pytest.param("HEALTHY", None, set(), marks=pytest.mark.corpus),
        pytest.param("TRANSFORMERS", None, set(), marks=pytest.mark.corpus),
    ],
    ids=["faults", "sample of healthy models", "healthy models", "transformers"],
)
def test_a_fault_fails_the_test_named_for_it(
    pytester: pytest.Pytester,
    group: str,
    chosen: tuple[str, ...] | None,
    fails: set[tuple[str, str]],
) -> None:
    """Each model is held against every test but that of compiled code."""
    pytester.makepyfile(FILE.format(group=group, chosen=chosen))
    options = ("-p", "no:cacheprovider", "-W", "default", "-k", "not test_compiled")
    passed, _, failed = pytester.inline_run(*options).listoutcomes()
    assert passed
    ids = (report.nodeid.split("::") for report in failed)
    assert {(suite.removeprefix("Test_"), test) for _, suite, test in ids} == fails


@pytest.mark.slow
def test_what_is_compiled_wrongly_fails(pytester: pytest.Pytester) -> None:
    """What breaks the graph or draws random numbers does not."""
    pytester.makepyfile(
        f"""
        from corpus import suites
        from pytest_modelhealth import modelhealth_suite

        for name in {COMPILED!r}:
            make = getattr(suites, name)
            globals()[f"Test_{{name}}"] = modelhealth_suite(make, backend="aot_eager")
        """
    )
    # In a process of its own: what dynamo registers is registered once.
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "test_compiled")
    result.assert_outcomes(passed=3, failed=1, skipped=1, deselected=60, warnings=0)
    result.stdout.fnmatch_lines(
        ["E   not equivalent: act2: no longer called*", "FAILED *::Test_miscompiled::*"]
    )
