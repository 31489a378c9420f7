"""Each fault fails the test that is named for it and no other; healthy models fail none."""

from __future__ import annotations

import pytest

SAMPLE = ("dropout", "cnn", "vae", "experts", "reader", "tied", "zero_start", "lazy", "one_sample")
"""The healthy models of a run without the corpus."""

FILE = """
from pytest_modelhealth import modelhealth_suite
from tests.plugin import suite_cases

CHOSEN = {chosen!r}

for name, case in suite_cases.{group}.items():
    if CHOSEN is None or name in CHOSEN:
        globals()[f"Test_{{name}}"] = modelhealth_suite(case.make, **case.attributes)
"""


def _failed(
    pytester: pytest.Pytester, group: str, chosen: tuple[str, ...] | None, which: str
) -> set[tuple[str, str]]:
    """Return the suites and tests that fail, of those whose name fits an expression."""
    pytester.makepyfile(FILE.format(group=group, chosen=chosen))
    result = pytester.inline_run("-p", "no:cacheprovider", "-W", "default", "-k", which)
    passed, _, failed = result.listoutcomes()
    assert passed
    ids = (report.nodeid.split("::") for report in failed)
    return {(suite.removeprefix("Test_"), test) for _, suite, test in ids}


def test_a_fault_fails_the_test_named_for_it(pytester: pytest.Pytester) -> None:
    """Every fault but the one of compiled code, each held against twelve tests."""
    from tests.plugin.suite_cases import FAULTS

    wanted = {(name, test) for name, case in FAULTS.items() for test in case.fails}
    wanted.remove(("miscompiled", "test_compiled_equals_eager"))
    assert _failed(pytester, "FAULTS", None, "not test_compiled") == wanted


def test_healthy_models_fail_nothing(pytester: pytest.Pytester) -> None:
    """Models that look like a fault, a sample."""
    assert _failed(pytester, "HEALTHY", SAMPLE, "not test_compiled") == set()


@pytest.mark.corpus
@pytest.mark.parametrize("group", ["HEALTHY", "TRANSFORMERS"])
def test_no_healthy_model_fails(pytester: pytest.Pytester, group: str) -> None:
    """All of them, and small architectures of the transformers library."""
    assert _failed(pytester, group, None, "not test_compiled") == set()


@pytest.mark.slow
def test_what_is_compiled_wrongly_fails(pytester: pytest.Pytester) -> None:
    """What breaks the graph or draws random numbers does not."""
    pytester.makepyfile(
        """
        from pytest_modelhealth import modelhealth_suite
        from tests.plugin import suite_cases

        for name in ("experts", "lstm", "vae", "mlp", "miscompiled"):
            make = getattr(suite_cases, name)
            globals()[f"Test_{name}"] = modelhealth_suite(make, backend="aot_eager")
        """
    )
    # In a process of its own: what dynamo registers is registered once.
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "test_compiled")
    result.assert_outcomes(passed=3, failed=1, skipped=1, deselected=60, warnings=0)
    result.stdout.fnmatch_lines(
        ["E   not equivalent: act2: no longer called*", "FAILED *::Test_miscompiled::*"]
    )
