"""What the results of a test object to, by the keys of the file of a run."""

from __future__ import annotations

from typing import Any

from pytest_modelhealth.runs.faults import Fault, faults

FINDING = {
    "layer": "fc", "label": "fc", "role": "activations",
    "check": "finite", "message": "1 NaN", "cause": "a step",
    "called_at": "net.py:9", "defined_at": "",
}  # fmt: skip
INSPECTION = {
    "kind": "inspection", "verdict": "unhealthy", "headline": "unhealthy: fc", "text": "why",
    "place": "test_it.py:5", "violations": [FINDING, FINDING | {"label": "head"}],
    "warnings": [FINDING | {"check": "wiring"}], "inconclusive": [],
}  # fmt: skip
HEALTHY = INSPECTION | {"verdict": "healthy", "violations": []}
UNSURE = HEALTHY | {
    "verdict": "inconclusive",
    "inconclusive": [
        {"check": "dead_units", "layer": "fc", "label": "fc", "cause": "", "message": "too few"}
    ],
    "warnings": [],
}
PARTED = {
    "kind": "comparison", "verdict": "different", "headline": "not equivalent: fc", "text": "far",
    "place": "test_it.py:6",
    "violations": [
        {"label": "fc", "check": "comparison", "cause": "",
         "message": "other output: other weights"}
    ],
}  # fmt: skip
DRIFTED = {
    "kind": "drift", "verdict": "drifted", "headline": "drifted: fc", "text": "now",
    "place": "test_it.py:7",
    "violations": [{"label": "fc", "check": "drift", "message": "fc began it", "cause": ""}],
}  # fmt: skip


def of(*results: dict[str, Any], outcome: str = "failed", message: str = "") -> list[Fault]:
    """The faults of a test with these results."""
    test = {"id": "test_it.py::test", "file": "test_it.py", "line": 3}
    return list(faults(test | {"outcome": outcome, "message": message, "results": results}))


def test_a_result_that_is_no_inspection_is_one_fault() -> None:
    """It is called by its kind, and found at the line that made it."""
    for result, check in ((PARTED, "comparison"), (DRIFTED, "drift")):
        (found,) = of(result)
        said = (result["verdict"], "fc", check, result["violations"][0]["message"], "")
        assert (found.verdict, found.label, found.check, found.message, found.cause) == said
        assert found.places == (result["place"], "test_it.py:3")
        assert (found.fails, found.text) == (True, result["text"])


def test_each_violation_is_a_fault_and_warnings_come_last() -> None:
    """The places lead from the call of the culprit to the test; what is not known is left out."""
    first, second, parted, warned = of(INSPECTION, PARTED)
    assert (first.label, second.label, parted.check, warned.check) == (
        "fc", "head", "comparison", "wiring",
    )  # fmt: skip
    assert [one.fails for one in (first, second, parted, warned)] == [True, True, True, False]
    assert first.places == ("net.py:9", "test_it.py:5", "test_it.py:3")
    batch = FINDING | {"layer": "", "role": "inputs"}  # which the model did not make
    (found,) = of(INSPECTION | {"violations": [batch], "warnings": []})
    assert found.places == ("test_it.py:5", "test_it.py:3")


def test_a_test_that_does_not_fail_has_no_fault_but_warnings() -> None:
    """What it looked at, or expected to fail, is as it wants it."""
    assert [one.check for one in of(INSPECTION, PARTED, outcome="passed")] == ["wiring"]
    for outcome in ("xfailed", "xpassed", "skipped"):
        assert of(INSPECTION, PARTED, outcome=outcome) == []


def test_what_was_not_judged_is_a_fault_only_where_it_fails_the_test() -> None:
    """A test that fails by itself does not do so for want of evidence."""
    (found,) = of(UNSURE, message="inconclusive: fc (dead_units): too few")
    assert (found.verdict, found.label, found.check) == ("inconclusive", "fc", "dead_units")
    for results in (UNSURE,), (HEALTHY | {"warnings": []},), ():
        (found,) = of(*results, message="assert 1 == 2")
        assert (found.verdict, found.check, found.message) == (
            "failed",
            "exception",
            "assert 1 == 2",
        )
