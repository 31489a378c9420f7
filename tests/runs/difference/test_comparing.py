"""Claims on what is said of two runs, each kind of change made by hand."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.runs.difference.comparing import Difference, compare
from pytest_modelhealth.runs.difference.inspections import Change, Grade, Place
from tests.runs.difference import made
from tests.runs.difference.made import TOTALS, finding, inspection, layer, tensor


def between(before: Any, now: Any) -> Difference:
    """Return the difference of two inspections in one test."""
    return compare(made.run(made.test(before)), made.run(made.test(now)))


def told(difference: Difference) -> dict[str, Change]:
    """Return the changes of the only result, by what changed."""
    (test,) = difference.tests
    return {change.what: change for change in test.changes}


def changed(name: str = "fc1", kind: str = "Linear", **other: Any) -> dict[str, Any]:
    """Return an inspection in which a layer is another; what is said of its totals, too."""
    totals = {**TOTALS, **other.pop("totals", {})}
    own = {"fc1": layer("fc1"), "fc2": layer("fc2")}
    own[name] = layer(name, kind, **other)
    return inspection(layers=[layer("", "Net"), *own.values()], totals=totals)


def moved(of: str = "batch", without: str = "", **other: Any) -> dict[str, Any]:
    """Return an inspection in which the output of a layer is another."""
    made_here = inspection(of=of)
    made_here["layers"][1]["tensors"][1].update(other)
    for one in made_here["layers"]:
        one["tensors"] = [seen for seen in one["tensors"] if seen["role"] != without]
    return made_here


def wide() -> dict[str, Any]:
    """Return an inspection of a batch three times as large."""
    larger = [layer(name, shape=[24, 4]) for name in ("", "fc1", "fc2")]
    larger[0]["type"] = "Net"
    for one in larger:
        one["tensors"][0].update(shape=[24, 4], count=96)
    names = ("activation_bytes", "multiply_adds", "saved_bytes")
    return inspection(
        layers=larger, samples=24, totals={**TOTALS, **{name: 3 * TOTALS[name] for name in names}}
    )


RENAMED = {**layer("fc1"), "name": "stem", "label": "stem"}
CONSEQUENCE = {"check": "dead_units", "layer": "fc2", "label": "fc2", "message": "m"}
WAIVED = {"check": "dead_units", "layer": "fc1", "label": "fc1", "message": "m", "reason": "r"}
PLAIN, UNHEALTHY = inspection(), inspection(finding())
FOUND = "dead_units: fc1 is dead"
VERDICT = Place("Net", "healthy", "unhealthy")
SNAPSHOT = {"kind": "drift", "headline": "", "text": "", "place": "", "model": "Net", "story": ""}
CASES: dict[str, tuple[Any, Any, Grade, dict[str, list[Place] | None]]] = {
    "a new finding": (
        PLAIN, UNHEALTHY, Grade.WORSE,
        {"verdict": [VERDICT], "new finding": [Place("fc1", "", FOUND)]},
    ),
    "one finding more": (
        UNHEALTHY, inspection(finding(), finding("grad_norm", "fc2")), Grade.WORSE,
        {"new finding": [Place("fc2", "", "grad_norm: fc2 is dead")]},
    ),
    "a finding less": (
        UNHEALTHY, PLAIN, Grade.BETTER,
        {"verdict": [Place("Net", "unhealthy", "healthy")],
         "no longer found": [Place("fc1", FOUND)]},
    ),
    # only its cause is new
    "a finding that became a consequence": (
        inspection(finding(where="fc2")), inspection(finding(consequences=[CONSEQUENCE])),
        Grade.WORSE, {"new finding": [Place("fc1", "", FOUND)]},
    ),
    "a consequence that became a finding": (
        inspection(finding(consequences=[CONSEQUENCE])), inspection(finding(where="fc2")),
        Grade.BETTER, {"no longer found": [Place("fc1", FOUND)]},
    ),
    # that is no change for the better by itself
    "what is waived now": (
        inspection(finding(), verdict="healthy"), inspection(waived=[WAIVED]), Grade.CHANGED,
        {"now waived or warned of": [Place("fc1", FOUND)]},
    ),
    "what is warned of now": (
        inspection(finding(), verdict="healthy"), inspection(warnings=[finding()]), Grade.CHANGED,
        {"now waived or warned of": [Place("fc1", FOUND)]},
    ),
    # neither a removal nor an addition, and the finding at the layer is the same one
    "a rename": (
        inspection(finding()),
        inspection(finding(where="stem"), layers=[layer("", "Net"), RENAMED, layer("fc2")]),
        Grade.CHANGED, {"renamed": [Place("fc1", "", "stem")]},
    ),
    "a layer added": (
        PLAIN, changed("fc3", "Bilinear", totals={"parameters": 132, "trainable": 132}),
        Grade.CHANGED,
        {"added": [Place("fc3", "", "Bilinear")],
         "parameters": [Place("Net", "100", "132", "+32, +32%"), Place("fc3", "0", "32", "+32")]},
    ),
    "a layer removed": (
        changed("fc3", "Bilinear", totals={"parameters": 132, "trainable": 132}), PLAIN,
        Grade.CHANGED, {"removed": None, "parameters": None},
    ),
    "a shape and a dtype": (
        PLAIN, changed(shape=[8, 5], dtype="float16"), Grade.CHANGED,
        {"output shape": [Place("fc1", "8x4", "8x5")],
         "dtype": [Place("fc1", "float32", "float16")]},
    ),
    "a layer no longer called": (
        PLAIN, changed("fc2", status="not_called", calls=0), Grade.CHANGED, {"changed": None}
    ),
    "a layer frozen": (
        PLAIN, changed(trainable=0, totals={"trainable": 68}), Grade.CHANGED,
        {"trainable parameters": [Place("Net", "100", "68", "-32, -32%"),
                                  Place("fc1", "32", "0", "-32, -100%")]},
    ),
    # the layer that moved most is named after the model itself
    "products": (
        PLAIN, changed("fc2", multiply_adds=7400, totals={"multiply_adds": 10_000}), Grade.CHANGED,
        {"multiply-adds": [Place("Net", "5,000", "10,000", "+5,000, +100%"),
                           Place("fc2", "2,500", "7,400", "+4,900, +196%")]},
    ),
    "activations": (
        PLAIN, changed(totals={"activation_bytes": 1_100}), Grade.CHANGED,
        {"bytes of activations": [Place("Net", "1,000", "1,100", "+100, +10%")]},
    ),
    "peak memory": (
        PLAIN, changed(totals={"peak_bytes": 30_000}), Grade.CHANGED,
        {"peak memory in bytes": [Place("Net", "3,000", "30,000", "+27,000, +900%")]},
    ),
    "within what measuring it moves": (
        PLAIN, changed(totals={"peak_bytes": 3_060}), Grade.SAME, {}
    ),
    # what grows with the batch is compared where the batches are as large
    "a larger batch": (PLAIN, wide(), Grade.SAME, {}),
    # a hundred-thousandth is rounding in float32, a hundredth is none
    "rounding": (PLAIN, moved(mean=0.5 + 5e-6, std=1 + 1e-5), Grade.SAME, {}),
    "more than that": (PLAIN, moved(mean=0.505, std=1.01), Grade.CHANGED, {"activations": None}),
    # rounding grows from step to step
    "a training": (moved("training"), moved("training", mean=3.0), Grade.SAME, {}),
    "a snapshot as it was recorded": (
        {**SNAPSHOT, "verdict": "recorded"}, {**SNAPSHOT, "verdict": "unchanged"}, Grade.SAME, {}
    ),
    "a drift that was accepted": (
        {**SNAPSHOT, "verdict": "unchanged"}, {**SNAPSHOT, "verdict": "recorded"}, Grade.CHANGED,
        {"verdict": None, "drift": None},
    ),
    "a drift": (
        {**SNAPSHOT, "verdict": "recorded"},
        {**SNAPSHOT, "verdict": "drifted", "headline": "drift in fc1"}, Grade.WORSE,
        {"verdict": [Place("Net", "recorded", "drifted")],
         "drift": [Place("Net", "", "drift in fc1")]},
    ),
    "a snapshot at last": (
        {**SNAPSHOT, "verdict": "missing"}, {**SNAPSHOT, "verdict": "recorded"}, Grade.BETTER,
        {"verdict": None, "drift": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_changed_is_told_where_it_is(case: str) -> None:
    """For the worse, for the better or neither; and nothing else is told."""
    before, now, grade, expected = CASES[case]
    difference = between(before, now)
    changes = told(difference) if difference.tests else {}
    assert (difference.tests[0].grade if difference.tests else Grade.SAME) is grade
    assert changes.keys() == expected.keys()
    for what, places in expected.items():
        assert places is None or list(changes[what].places) == places


@pytest.mark.parametrize(
    ("layer_at", "tensor_at", "words"),
    [(0, 0, "the batches differ"), (1, 2, "fc1.weight and 1 more: other values, as by another")],
)
def test_of_another_batch_or_seed_no_number_is_compared(
    layer_at: int, tensor_at: int, words: str
) -> None:
    """One line says so, in place of all that follows from it."""
    now = moved(mean=3.0)
    for one in now["layers"][layer_at:] if layer_at else now["layers"][:1]:
        one["tensors"][tensor_at].update(mean=7.0, max=9.0)
    (test,) = between(PLAIN, now).tests
    assert not test.changes
    (remark,) = test.remarks
    assert remark.startswith(words)


@pytest.mark.parametrize("role", ["inputs", "parameters"])
def test_what_was_not_watched_is_not_taken_for_equal(role: str) -> None:
    """Without the batch, or without weights, nobody knows whether the same was computed."""
    (test,) = between(moved(without=role), moved(without=role, mean=3.0)).tests
    assert test.grade is Grade.SAME
    assert "not watched" in test.remarks[0]


# ---- tests and runs ----


def test_tests_come_go_and_move() -> None:
    """A test that is gone is worse, a new one is not unless it fails, a moved one is itself.

    The worst is first, then what changed, then what is better, in the order of the run.
    """
    one, gone, moved = (
        made.test(inspection(), id=f"a.py::{name}") for name in ("t", "gone", "moved")
    )
    old = made.test(inspection(model="CNN"), id="a.py::old[1]")
    skipped = [made.test(inspection(), id=one) for one in ("a.py::gpu", "gpu.py::test")]
    mended = made.test(inspection(finding()), id="a.py::mended")
    base = made.run(mended, one, gone, moved, old, *skipped)
    head = made.run(
        made.test(inspection(), id="a.py::mended"),
        one,
        {**old, "id": "a.py::new[1]"},
        {**moved, "id": "b.py::moved"},
        made.test(inspection(), id="a.py::new"),
        made.test(inspection(finding()), id="a.py::bad"),
        skipped={"a.py::gpu": "no GPU", "gpu.py": "no GPU"},
    )
    difference = compare(base, head)
    assert [(test.id, test.grade) for test in difference.tests] == [
        ("a.py::bad", Grade.WORSE),
        ("a.py::gone", Grade.WORSE),
        ("a.py::new[1]", Grade.CHANGED),
        ("b.py::moved", Grade.CHANGED),
        ("a.py::new", Grade.CHANGED),
        ("a.py::gpu", Grade.CHANGED),
        ("gpu.py::test", Grade.CHANGED),
        ("a.py::mended", Grade.BETTER),
    ]
    assert difference.unchanged == 1
    changes = {test.id: test.changes[0] for test in difference.tests}
    renamed = Change("test", "renamed from", (Place("", "a.py::old[1]", "a.py::new[1]"),))
    assert changes["a.py::new[1]"] == renamed
    place = Place("", "passed", "skipped", "no GPU")
    assert (
        changes["gpu.py::test"] == changes["a.py::gpu"] == Change("test", "skipped now", (place,))
    )
    back = {test.id: test.changes[0].what for test in compare(head, base).tests}
    assert back["a.py::gpu"] == back["gpu.py::test"] == "no longer skipped"


def test_outcomes_that_no_result_explains_are_told() -> None:
    """A test that fails for a reason of its own is worse."""
    now = made.test(inspection(), outcome="failed", message="assert 1 == 2")
    difference = compare(made.run(made.test(inspection())), made.run(now))
    (test,) = difference.tests
    assert test.changes == (
        Change(
            "outcome", "outcome", (Place("", "passed", "failed", "assert 1 == 2"),), Grade.WORSE
        ),
    )


def test_a_crash_is_told_by_its_exception() -> None:
    """Not by the results that it did not come to; one that is mended is better."""
    crash = made.test(outcome="failed", message="RuntimeError: shape is wrong")
    healthy = made.run(made.test(inspection()))
    ((change,),) = (test.changes for test in compare(healthy, made.run(crash)).tests)
    place = Place("", "passed", "failed", "RuntimeError: shape is wrong")
    assert change == Change("outcome", "outcome", (place,), Grade.WORSE)
    assert [test.grade for test in compare(made.run(crash), healthy).tests] == [Grade.BETTER]
    (mended,) = compare(made.run(crash), made.run()).tests
    assert mended.changes[0].what == "fails no more, or is gone"
    module = made.run(made.test(id="test_a.py", outcome="error", message="ImportError: x"))
    grades = [(test.id, test.grade) for test in compare(healthy, module).tests]
    assert grades == [("test_a.py", Grade.WORSE), ("test_a.py::test_a", Grade.WORSE)]


def test_results_are_matched_by_kind_and_model() -> None:
    """A result put before another does not shift what is compared."""
    encoder, decoder = inspection(model="Encoder"), inspection(model="Decoder")
    difference = compare(
        made.run(made.test(encoder, decoder)),
        made.run(made.test(inspection(model="New"), encoder, decoder)),
    )
    ((change,),) = (test.changes for test in difference.tests)
    assert (change.places[0].label, change.what) == ("New", "new inspection")


def test_what_has_nothing_in_common_is_new_and_gone() -> None:
    """A head with other tests only, and a model without a layer in common, which is another."""
    base = made.run(made.test(inspection()))
    other_test = made.run(made.test(inspection(), id="other.py::test_b"))
    whats = {test.id: test.changes[0].what for test in compare(base, other_test).tests}
    assert whats == {
        "test_a.py::test_a": "inspects nothing any more", "other.py::test_b": "new test"
    }  # fmt: skip
    strange = [layer("conv", "Conv2d", shape=[8, 3, 7, 7]), layer("pool", "AvgPool2d")]
    for one in strange:
        one["tensors"] = [tensor(shape=[8, 3, 7, 7], count=1176)]
    other_model = made.test(inspection(layers=[layer("", "Net"), *strange], model="CNN"))
    same = made.test(inspection(), id="c.py::c")
    difference = compare(made.run(made.test(inspection()), same), made.run(other_model, same))
    assert told(difference)["another model"].places[0].before == "Net"


def test_runs_that_were_broken_off_say_so() -> None:
    """So do other versions."""
    base = made.run(made.test(inspection()))
    environment = {**made.HEAD["environment"], "torch": "3"}  # type: ignore[dict-item]
    early = "the run ended early, 1 of 3 tests ran: KeyboardInterrupt"
    head = made.run(made.test(inspection()), notes=[early], environment=environment)
    assert compare(base, head).remarks == (
        "another environment: torch 2 is now 3",
        f"of the head: {early}",
    )
    head = made.run(made.test(inspection()), environment={"torch": "2"})  # keys may be missing
    (remark,) = compare(base, head).remarks
    assert remark.startswith("another environment: pytest_modelhealth 1 is now unknown")


_NUMBERS = st.floats(-1e30, 1e30) | st.none()
_TENSORS = st.builds(
    tensor,
    role=st.sampled_from(["inputs", "activations", "gradients", "parameters", "buffers"]),
    name=st.sampled_from(["", "weight"]),
    shape=st.lists(st.integers(0, 9), max_size=3),
    mean=_NUMBERS,
    std=st.floats(0, 1e30) | st.none(),
    min=_NUMBERS,
    max=_NUMBERS,
    zeros=st.integers(0, 32),
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "?"]),
)
_LAYERS = st.builds(
    layer,
    name=st.sampled_from(["", "a", "a.b", "a.b.c", "b", "c|`<b>"]),
    status=st.sampled_from(["observed", "not_called", "odd"]),
    calls=st.integers(0, 3),
    shape=st.none() | st.lists(st.integers(0, 9), max_size=3),
    tensors=st.lists(_TENSORS, max_size=4),
)
_INSPECTIONS: st.SearchStrategy[dict[str, Any]] = st.builds(
    inspection,
    layers=st.lists(_LAYERS, max_size=5, unique_by=lambda one: one["name"]),
    loss=_NUMBERS,
)


@given(_INSPECTIONS)
@settings(max_examples=60, deadline=None)
def test_nothing_differs_from_itself(one: dict[str, Any]) -> None:
    """Whatever a run holds, it is as it is."""
    difference = between(one, copy.deepcopy(one))
    assert not difference.tests
    assert difference.unchanged == 1


@given(_INSPECTIONS, _INSPECTIONS)
@settings(max_examples=60, deadline=None)
def test_any_two_models_are_compared_or_refused(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Whatever the two hold, the answer is a difference or a sentence."""
    with contextlib.suppress(InspectionError):
        difference = between(one, other)
        assert len(difference.tests) + difference.unchanged >= 1
