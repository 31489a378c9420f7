"""Claims on what is said of two runs, each kind of change made by hand."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.runs.difference.comparing import compare
from pytest_modelhealth.runs.difference.result import Change, Difference, Grade, Place
from tests.runs.difference import made
from tests.runs.difference.made import TOTALS, finding, inspection, layer, tensor


def between(before: Any, now: Any) -> Difference:
    """Return the difference of two inspections in one test."""
    return compare(made.run(made.test(before)), made.run(made.test(now)))


def told(difference: Difference) -> dict[str, Change]:
    """Return the changes of the only result, by what changed."""
    (test,) = difference.tests
    return {change.what: change for change in test.changes}


def with_layers(*layers: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Return an inspection of a model with these layers in it."""
    return inspection(layers=[layer("", "Net"), *layers], **other)


# ---- verdicts and findings ----


def test_new_findings_are_worse_and_lost_ones_better() -> None:
    """A verdict that turns names its finding, both ways."""
    healthy, unhealthy = inspection(), inspection(finding())
    there, back = between(healthy, unhealthy), between(unhealthy, healthy)
    assert [test.grade for test in there.tests] == [Grade.WORSE]
    assert told(there)["verdict"].places == (Place("Net", "healthy", "unhealthy"),)
    assert told(there)["new finding"].places == (Place("fc1", "", "dead_units: fc1 is dead"),)
    more = between(unhealthy, inspection(finding(), finding("grad_norm", "fc2")))
    assert [place.label for place in told(more)["new finding"].places] == ["fc2"]
    assert [test.grade for test in more.tests] == [Grade.WORSE]
    assert [test.grade for test in back.tests] == [Grade.BETTER]
    assert told(back)["no longer found"].places == (Place("fc1", "dead_units: fc1 is dead"),)


def test_a_finding_that_became_a_consequence_is_neither_new_nor_gone() -> None:
    """Only its cause is new."""
    consequence = {"check": "dead_units", "layer": "fc2", "label": "fc2", "message": "m"}
    before = inspection(finding(where="fc2"))
    now = inspection(finding(where="fc1", consequences=[consequence]))
    changes = told(between(before, now))
    assert [place.label for place in changes["new finding"].places] == ["fc1"]
    assert "no longer found" not in changes
    assert "new finding" not in told(between(now, before))


def test_what_is_waived_or_only_warned_of_is_no_better() -> None:
    """It is said to be, and is no change for the better by itself."""
    waived = [
        {"check": "dead_units", "layer": "fc1", "label": "fc1", "message": "m", "reason": "r"}
    ]
    for key, kept in (("waived", waived), ("warnings", [finding()])):
        changes = told(between(inspection(finding()), inspection(**{key: kept})))
        change = changes["now waived or warned of"]
        assert change.grade is Grade.CHANGED


# ---- layers, shapes, dtypes, parameters, costs ----


def test_a_rename_is_a_rename() -> None:
    """Neither a removal nor an addition, and the finding at the layer is the same one."""
    before = with_layers(layer("fc1"), layer("fc2"), violations=[finding()], verdict="unhealthy")
    renamed = copy.deepcopy(layer("fc1"))
    renamed.update(name="stem", label="stem")
    now = with_layers(
        renamed, layer("fc2"), violations=[finding(where="stem")], verdict="unhealthy"
    )
    changes = told(between(before, now))
    assert changes["renamed"].places == (Place("fc1", "", "stem"),)
    assert list(changes) == ["renamed"]


def test_added_and_removed_layers_are_named() -> None:
    """With their types and what parameters they bring."""
    now = with_layers(layer("fc1"), layer("fc2"), layer("fc3", "Bilinear"))
    now["totals"] = {**TOTALS, "parameters": 132, "trainable": 132}
    changes = told(between(inspection(), now))
    assert changes["added"].places == (Place("fc3", "", "Bilinear"),)
    assert changes["parameters"].places == (
        Place("Net", "100", "132", "+32, +32%"),
        Place("fc3", "0", "32", "+32"),
    )
    assert told(between(now, inspection()))["removed"].places[0].label == "fc3"


def test_shapes_dtypes_statuses_and_calls_are_told_in_execution_order() -> None:
    """The first layer first, the others along with it."""
    now = [layer("fc1"), layer("fc2")]
    for one in now:
        one.update(shape=[8, 5], dtype="float16")
    now[1].update(status="not_called", calls=0)
    changes = told(between(inspection(), with_layers(*now)))
    assert changes["output shape"].places == (
        Place("fc1", "8x4", "8x5"),
        Place("fc2", "8x4", "8x5"),
    )
    assert [place.label for place in changes["dtype"].places] == ["fc1", "fc2"]
    assert [place.label for place in changes["changed"].places] == ["fc2"]


def test_frozen_layers_are_told_by_their_trainable_parameters() -> None:
    """The number of parameters is as it was."""
    now = with_layers(layer("fc1", trainable=0), layer("fc2"), totals={**TOTALS, "trainable": 68})
    changes = told(between(inspection(), now))
    assert list(changes) == ["trainable parameters"]
    assert [place.note for place in changes["trainable parameters"].places] == [
        "-32, -32%",
        "-32, -100%",
    ]


@pytest.mark.parametrize(
    ("key", "now", "note"),
    [
        ("multiply_adds", 10_000, "+5,000, +100%"),
        ("activation_bytes", 1_100, "+100, +10%"),
        ("saved_bytes", 400, "-400, -50%"),
        ("peak_bytes", 30_000, "+27,000, +900%"),
        ("peak_bytes", 3_060, None),  # within what measuring it moves
    ],
)
def test_costs_are_told_with_their_step(key: str, now: int, note: str | None) -> None:
    """What is counted exactly, what is measured by more than measuring it moves."""
    difference = between(inspection(), inspection(totals={**TOTALS, key: now}))
    notes = [c.places[0].note for t in difference.tests for c in t.changes]
    assert notes == ([] if note is None else [note])


def test_costs_name_the_layer_that_moved_most() -> None:
    """After the model itself."""
    now = with_layers(layer("fc1", multiply_adds=2600), layer("fc2", multiply_adds=7400))
    now["totals"] = {**TOTALS, "multiply_adds": 10_000}
    places = told(between(inspection(), now))["multiply-adds"].places
    assert [place.label for place in places] == ["Net", "fc2", "fc1"]


def test_a_larger_batch_changes_no_cost_and_no_shape() -> None:
    """What grows with the batch is compared where the batches are as large."""
    larger = [layer(name, "Net", shape=[24, 4]) for name in ("", "fc1", "fc2")]
    for one in larger:
        one["tensors"][0].update(shape=[24, 4], count=96)
    times = {key: 3 * TOTALS[key] for key in ("activation_bytes", "multiply_adds", "saved_bytes")}
    now = inspection(layers=larger, samples=24, totals={**TOTALS, **times, "peak_bytes": 9999})
    before = inspection(layers=[layer(name, "Net") for name in ("", "fc1", "fc2")])
    difference = between(before, now)
    assert [test.grade for test in difference.tests] == [Grade.SAME]


# ---- statistics ----


def test_the_first_layer_that_moved_is_first() -> None:
    """Also where the file has the container before what it holds."""
    moved = [tensor("inputs"), tensor(mean=0.9)]
    now = inspection()
    for one in now["layers"]:
        one["tensors"] = [*copy.deepcopy(moved), *one["tensors"][2:]]
    (statistic,) = [c for c in told(between(inspection(), now)).values() if c.kind == "statistic"]
    assert [place.label for place in statistic.places] == ["fc1", "fc2", "Net"]


@pytest.mark.parametrize(("factor", "is_told"), [(1 + 1e-5, False), (1 + 1e-2, True)])
def test_statistics_move_beyond_rounding_or_are_not_told(factor: float, is_told: bool) -> None:
    """A hundred-thousandth is rounding in float32, a hundredth is none."""
    now = inspection()
    now["layers"][1]["tensors"][1].update(mean=0.5 * factor, std=factor)
    assert bool(between(inspection(), now).tests) is is_told


def test_what_was_not_watched_is_not_taken_for_equal() -> None:
    """Without the batch, or without weights, nobody knows whether the same was computed."""
    for role in ("inputs", "parameters"):
        sides = [inspection(), inspection()]
        sides[1]["layers"][1]["tensors"][1].update(mean=3.0)
        for side in sides:
            for one in side["layers"]:
                one["tensors"] = [seen for seen in one["tensors"] if seen["role"] != role]
        ((test,),) = (between(*sides).tests,)
        assert test.grade is Grade.SAME
        assert "not watched" in test.remarks[0]


def test_the_statistics_of_a_training_are_not_compared() -> None:
    """Rounding grows from step to step."""
    sides = [inspection(of="training"), inspection(of="training")]
    sides[1]["layers"][1]["tensors"][1].update(mean=3.0)
    assert not between(*sides).tests


# ---- tests and runs ----


def test_tests_come_go_and_move() -> None:
    """A test that is gone is worse, a new one is not unless it fails, a moved one is itself."""
    one, gone, moved = (
        made.test(inspection(), id=name) for name in ("a.py::t", "a.py::gone", "a.py::moved")
    )
    base = made.run(one, gone, moved)
    head = made.run(
        one,
        {**moved, "id": "b.py::moved"},
        made.test(inspection(), id="a.py::new"),
        made.test(inspection(finding()), id="a.py::bad"),
    )
    difference = compare(base, head)
    assert [(test.id, test.grade) for test in difference.tests] == [
        ("a.py::bad", Grade.WORSE),
        ("a.py::gone", Grade.WORSE),
        ("b.py::moved", Grade.CHANGED),
        ("a.py::new", Grade.CHANGED),
    ]
    assert difference.unchanged == 1


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


def test_results_are_matched_by_kind_and_model() -> None:
    """A result put before another does not shift what is compared."""
    encoder, decoder = inspection(model="Encoder"), inspection(model="Decoder")
    difference = compare(
        made.run(made.test(encoder, decoder)),
        made.run(made.test(inspection(model="New"), encoder, decoder)),
    )
    ((change,),) = (test.changes for test in difference.tests)
    assert (change.places[0].label, change.what) == ("New", "new inspection")


def test_comparisons_and_drifts_are_compared_by_verdict() -> None:
    """With the headline of what turned."""
    shared = {"text": "", "place": "", "model": "Net"}
    before = {**shared, "kind": "drift", "headline": "", "verdict": "unchanged", "story": ""}
    now = {**before, "verdict": "drifted", "headline": "drift in fc1"}
    changes = told(between(before, now))
    assert changes["verdict"].grade is Grade.WORSE
    assert changes["drift"].places[0].now == "drift in fc1"


@pytest.mark.parametrize(
    ("before", "now", "grade"),
    [
        ("recorded", "unchanged", None),
        ("unchanged", "recorded", Grade.CHANGED),  # it drifted, and that was accepted
        ("recorded", "drifted", Grade.WORSE),
        ("missing", "recorded", Grade.BETTER),
    ],
)
def test_a_snapshot_found_as_it_was_recorded_is_no_change(
    before: str, now: str, grade: Grade | None
) -> None:
    """Recording it anew is one, and so is what drifted from it."""
    shared = {"kind": "drift", "headline": "", "text": "", "place": "", "model": "Net"}
    runs = ({**shared, "verdict": verdict, "story": ""} for verdict in (before, now))
    difference = between(*runs)
    assert [test.grade for test in difference.tests] == ([] if grade is None else [grade])
    assert difference.unchanged == (grade is None)


def test_runs_of_different_suites_are_refused() -> None:
    """No test in common is wrong input; a model without a layer in common is another one."""
    base = made.run(made.test(inspection()))
    other_test = made.run(made.test(inspection(), id="other.py::test_b"))
    with pytest.raises(InspectionError, match=r"no test in common: one has test_a.py::test_a"):
        compare(base, other_test)
    strange = [layer("conv", "Conv2d", shape=[8, 3, 7, 7]), layer("pool", "AvgPool2d")]
    for one in strange:
        one["tensors"] = [tensor(shape=[8, 3, 7, 7], count=1176)]
    other_model = made.test(with_layers(*strange, model="CNN"))
    same = made.test(inspection(), id="c.py::c")
    difference = compare(made.run(made.test(inspection()), same), made.run(other_model, same))
    assert told(difference)["another model"].places[0].before == "Net"


def test_runs_that_were_broken_off_say_so() -> None:
    """So do other versions."""
    base = made.run(made.test(inspection()))
    environment = {**made.HEAD["environment"], "torch": "3"}  # type: ignore[dict-item]
    head = made.run(made.test(inspection()), exit_status=2, environment=environment)
    assert compare(base, head).remarks == (
        "another environment: torch 2 is now 3",
        "the run of the head was broken off, so tests may be missing",
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
    lambda name, status, calls, shape, tensors: layer(
        name, status=status, calls=calls, shape=shape, tensors=tensors
    ),
    name=st.sampled_from(["", "a", "a.b", "a.b.c", "b", "c|`<b>"]),
    status=st.sampled_from(["observed", "not_called", "odd"]),
    calls=st.integers(0, 3),
    shape=st.none() | st.lists(st.integers(0, 9), max_size=3),
    tensors=st.lists(_TENSORS, max_size=4),
)
_INSPECTIONS: st.SearchStrategy[dict[str, Any]] = st.builds(
    lambda layers, loss: inspection(layers=layers, loss=loss),
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


def test_the_worst_test_is_first() -> None:
    """Then what changed, then what is better, in the order of the run."""
    worse = [made.test(inspection(), id="a::w"), made.test(inspection(finding()), id="a::w")]
    better = [made.test(inspection(finding()), id="a::b"), made.test(inspection(), id="a::b")]
    changed = [
        made.test(inspection(), id="a::c"),
        made.test(inspection(totals={**TOTALS, "multiply_adds": 1}), id="a::c"),
    ]
    sides = zip(better, changed, worse, strict=True)
    difference = compare(*(made.run(*side) for side in sides))
    assert [test.id for test in difference.tests] == ["a::w", "a::c", "a::b"]
