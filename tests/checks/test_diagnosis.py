"""`diagnose`: one fault gives one story, and two faults two."""

import time

import pytest
import torch
from torch import nn

from corpus.models.branching import Detached, Silent, Twins, Wide
from pytest_modelhealth import Inspector
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.checks.judging.diagnosis import diagnose
from pytest_modelhealth.report import Finding, Reference
from pytest_modelhealth.settings.setting import Waiver


def violation(check, layer, role="activations", **fields):
    """A violation that says only where it stands."""
    return Finding(check, layer, role, 1.0, 0.0, "default", "message", "cause", **fields)


@pytest.fixture
def seen(mlp, batch):
    """An observation of fc1, act1, fc2, act2 and head, in this order."""
    return Inspector(mlp).run_inspection(batch).observation


def stories(observation, *violations):
    """The roots, each with its consequences, as pairs of check and layer."""
    told = diagnose(observation, violations)
    return [[(v.check, v.layer) for v in (root, *root.folded)] for root in told]


@pytest.mark.parametrize("role", ["parameters", "buffers"])
def test_what_a_layer_starts_with_comes_before_what_goes_into_it(role, seen):
    """Its state was there before the run, whichever check came first."""
    state, given = violation("y", "fc2", role), violation("x", "fc2", "inputs")
    assert stories(seen, given, state) == [[("y", "fc2"), ("x", "fc2")]]


def test_consequence_is_folded_whatever_the_order_of_the_checks(seen):
    """The earlier layer is the root, though the other check is graver and came first."""
    later, earlier = violation("finite", "act2"), violation("activation_scale", "fc1")
    expected = [[("activation_scale", "fc1"), ("finite", "act2")]]
    assert stories(seen, later, earlier) == expected
    assert stories(seen, earlier, later) == expected


@pytest.mark.parametrize(
    ("cause", "effect", "folds"),
    [
        (("dead_units", "act1"), ("collapse", "head"), True),
        (("dead_units", "act1"), ("finite", "act2"), False),
        (("dead_units", "act1"), ("finite", "fc1", "gradients"), False),
        (("dead_units", "act1"), ("grad_norm", "fc1", "parameter_gradients"), True),
        (("dead_units", "act1"), ("grad_norm", "head", "parameter_gradients"), True),
        (("dead_units", "act1"), ("initial_weights", "fc2", "parameters"), False),
        (("dead_units", "act1"), ("loss", "", "loss"), True),
        (("initial_weights", "fc1", "parameters"), ("dead_units", "act1"), True),
        (("initial_weights", "fc1", "parameters"), ("finite", "fc1"), True),
        (("initial_weights", "fc2", "parameters"), ("initial_weights", "fc1", "parameters"), False),
        (("finite", "fc1", "parameters"), ("initial_weights", "fc1", "parameters"), True),
        (("inputs", "", "inputs"), ("saturation", "act1"), True),
        (("inputs", "", "inputs"), ("initial_weights", "fc1", "parameters"), False),
        (("activation_scale", "fc1"), ("normalization", "fc2", "buffers"), True),
        (("loss", "", "loss"), ("grad_norm", "fc1", "parameter_gradients"), True),
        (("finite", "fc2", "gradients"), ("grad_norm", "fc1", "parameter_gradients"), True),
    ],
)
def test_what_follows_from_what(cause, effect, folds, seen):
    """State, inputs, activations, loss, gradients: each explains what comes after it."""
    told = stories(seen, violation(*cause), violation(*effect))
    assert told == ([[cause[:2], effect[:2]]] if folds else [[cause[:2]], [effect[:2]]])


def test_independent_violation_is_never_a_consequence(seen):
    """A graph that is cut has no numeric cause."""
    cut = violation("missing_gradients", "fc1", "parameter_gradients", independent=True)
    told = stories(seen, violation("dead_units", "act1"), cut)
    assert told == [[("dead_units", "act1")], [("missing_gradients", "fc1")]]


def test_faults_in_separate_towers_are_two_stories(batch):
    """Neither tower feeds the other; the head behind both belongs to the first."""
    seen = Inspector(Twins()).run_inspection(batch).observation
    told = stories(
        seen,
        violation("dead_units", "left.1"),
        violation("dead_units", "right.1"),
        violation("collapse", "head"),
        violation("grad_norm", "right.0", "parameter_gradients"),
    )
    assert told == [
        [("dead_units", "left.1"), ("collapse", "head")],
        [("dead_units", "right.1"), ("grad_norm", "right.0")],
    ]


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["the same numbers", "other numbers"])
def test_two_dead_towers_are_two_stories(factor, batch, inspect):
    """Whatever numbers they get, neither dies of the other; a tower that lives is no story."""
    report = inspect(Twins("left", "right", factor=factor), batch)
    assert [v.layer for v in report.violations] == ["left.1", "right.1"]
    assert all(name.startswith("right") for v in report.violations[1:] for name in v.layers)
    assert [v.layer for v in inspect(Twins("right", factor=factor), batch).violations] == [
        "right.1"
    ]
    assert inspect(Twins(factor=factor), batch).healthy


@pytest.mark.parametrize(
    ("cause", "effect", "folds"),
    [
        (("dead_units", "critic.1"), ("grad_norm", "critic.0", "parameter_gradients"), True),
        (("dead_units", "critic.1"), ("grad_norm", "encoder.0", "parameter_gradients"), False),
        (("collapse", "policy"), ("grad_norm", "encoder.0", "parameter_gradients"), True),
        (("dead_units", "encoder.1"), ("collapse", "critic"), True),
        (("dead_units", "encoder.1"), ("activation_scale", "critic", "inputs"), True),
        (("dead_units", "critic.1"), ("activation_scale", "policy", "inputs"), False),
        (("finite", "aside"), ("loss", "", "loss"), False),
        (("finite", "aside"), ("finite", "encoder.0", "gradients"), False),
        (("finite", "policy"), ("finite", "critic.0", "gradients"), True),
        (("finite", "policy", "gradients"), ("grad_norm", "critic.0", "gradients"), False),
        (("finite", "policy", "gradients"), ("grad_norm", "encoder.0", "gradients"), True),
    ],
)
def test_what_follows_along_the_flow(cause, effect, folds, batch):
    """Values go forward, gradients back, and neither beside the way that there is."""
    seen = Inspector(Detached()).run_inspection(batch).observation
    told = stories(seen, violation(*cause), violation(*effect))
    assert told == ([[cause[:2], effect[:2]]] if folds else [[cause[:2]], [effect[:2]]])


def test_what_a_forward_makes_comes_before_what_follows_from_it(batch, inspect):
    """The model makes -inf between two layers; a statistic behind them is a consequence."""
    report = inspect(Silent(), batch)
    assert [(v.check, v.layer) for v in report.violations] == [
        ("finite", ""),
        ("dead_units", "act"),
    ]
    assert ("finite", "norm") in [(v.check, v.layer) for v in report.violations[0].folded]


def test_thousands_of_violations_cost_seconds():
    """Whether they are one story or each its own."""
    deep, wide = (
        Inspector(model).run_inspection(torch.randn(8, 4), backward=False).observation
        for model in (nn.Sequential(*(nn.Linear(4, 4) for _ in range(1000))), Wide(400))
    )
    for seen, role, count in (
        (deep, "activations", 1),
        (deep, "parameters", 1000),
        (deep, "parameter_gradients", 1000),
        (wide, "activations", 400),
    ):
        found = [violation("x", name, role) for name in seen.layers if name[-1:].isdigit()]
        begun = time.process_time()
        assert len(diagnose(seen, found)) == count
        assert time.process_time() - begun < 2.5


def test_nan_in_one_tower_reaches_the_gradients_of_the_other(batch):
    """A loss that is NaN has no finite gradient anywhere."""
    seen = Inspector(Twins()).run_inspection(batch).observation
    nan = violation("finite", "left.0")
    gradient = violation("finite", "right.0", "gradients")
    assert stories(seen, nan, gradient) == [[("finite", "left.0"), ("finite", "right.0")]]


def test_evidence_names_what_was_read_and_what_came_before(seen):
    """A forward fault refers to the layer that fed it, a gradient to the layer that sent it."""
    forward, backward = diagnose(
        seen, [violation("finite", "act1"), violation("grad_norm", "fc2", "gradients")]
    )[0:1] + diagnose(seen, [violation("grad_norm", "fc2", "gradients")])
    assert forward.evidence == (Reference("act1", "activations"), Reference("fc1", "activations"))
    assert backward.evidence == (Reference("fc2", "gradients"), Reference("act2", "gradients"))
    own = (Reference("fc1", "buffers", "mask"),)
    assert diagnose(seen, [violation("x", "fc1", evidence=own)])[0].evidence == own


def test_nothing_else_is_touched(seen):
    """What could not be judged stays where it is; with no violation, nothing is looked at."""
    doubt = Finding("dead_units", "act1", message="few samples", grade="unsure")
    fault = violation("finite", "fc1")
    assert [f.grade for f in diagnose(seen, [doubt, fault, doubt])] == ["unsure", "fail", "unsure"]
    assert diagnose(None, [doubt]) == [doubt]


@pytest.fixture
def dying(mlp):
    """A first layer that dies; without biases, so does every layer after it."""
    nn.init.zeros_(mlp.fc2.bias)
    nn.init.constant_(mlp.fc1.bias, -50.0)
    return mlp


def test_one_dead_layer_is_one_story(dying, batch, inspect):
    """The second activation dies of the first; it is said in one line and counted."""
    report = inspect(dying, batch)
    (root,) = report.violations
    assert root.layer == "act1"
    assert ("dead_units", "act2") in [(v.check, v.layer) for v in root.folded]
    assert "act2 (dead_units)" in report.render("failure")


def test_every_format_tells_one_story(dying, batch, inspect):
    """Consequences are named beside their root, and no row of their own calls them a violation."""
    report = inspect(dying, batch)
    following = [v.layer for v in report.violations[0].folded]
    assert f"1 violation with {len(following)} consequence" in repr(report)
    marks = {line[3:].split(" ")[0]: line[0] for line in str(report).splitlines() if line[3:]}
    assert (marks["act1"], marks["act2"]) == ("!", "~")
    assert "act2 (dead_units)" in report.render("html")
    (told,) = report.to_dict()["violations"]
    assert [v["layer"] for v in told["folded"]] == following
    assert told["evidence"][1] == {"layer": "fc1", "role": "activations", "tensor": ""}


def test_waived_root_takes_its_consequences_along(dying, batch):
    """What a project accepts, it accepts with what follows from it."""
    settings = default_settings().waive(Waiver("act1", "dead_units", "a reason", "here"))
    judgement = Inspector(dying, settings=settings).run_inspection(batch)._judgement
    assert judgement.violations == ()
    assert [v.layer for v in judgement.waived] == ["act1"]


def test_story_is_told_where_only_a_consequence_is_judged(dying, batch):
    """A layer that is judged is not healthy because its fault began elsewhere."""
    (violation,) = Inspector(dying, layers="act2").run_inspection(batch).violations
    assert violation.layer == "act1"
