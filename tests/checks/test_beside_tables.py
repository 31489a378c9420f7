"""What checks say beside their tables: `finite`, cuts, `wiring`, `unregistered_parameters`."""

import linecache
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.cuts import Auxiliary, Part, Reading, translated
from corpus.checks.finite import around, branches, logged, masked, rooted
from corpus.checks.parts import Applies, Net
from corpus.checks.unregistered import in_a_list, keeping, linear
from corpus.checks.wiring import HEALTHY, TakesKeys
from pytest_modelhealth import HealthReport
from pytest_modelhealth.checks.judging import judge


def towers():
    """Two that fail on their own."""
    return Net(
        lambda m, x: m.head(m.left(x)) + m.head(m.right(x)),
        left=Applies(torch.log), right=Applies(lambda x: x / 0), head=(16, 2),
    )  # fmt: skip


def beside(function):
    """A layer that may make NaN itself, and arithmetic of the model's own on another way."""
    return Net(
        lambda m, x: (m.first(m.left(x)), m.second(torch.log(m.right(x) * 0.0))),
        left=Applies(function), right=(16, 8), first=(16, 2), second=(8, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (towers, ["left", "right"]),
        (lambda: branches(rooted, logged), ["left", "right"]),
        (lambda: beside(torch.log), ["left", ""]),
        (lambda: beside(torch.tanh), [""]),
    ],
    ids=["towers", "branches", "a layer and a forward", "a forward"],
)
def test_independent_origins_are_violations_of_their_own(build, names, batch, inspect, request):
    """Each with its own operation; what stands before both only shows them."""
    violations = inspect(build(), batch).violations
    assert [(v.check, v.layer) for v in violations] == [("finite", name) for name in names]
    if "branches" in request.node.name:
        left, right = violations
        assert "`pow`" in left.cause
        assert "`pow`" not in right.cause
        (place,) = re.findall(r"`log` at (\S+):(\d+), between right and head", right.cause)
        assert "# the log" in linecache.getline(place[0], int(place[1]))
    if "forward" in request.node.name:
        assert "`log` at " in violations[-1].cause
        assert "between right and second" in violations[-1].cause


def test_gradient_of_sqrt_at_zero_is_found_in_backward(batch, inspect, only):
    """Finite forward, infinite backward: the last layer with bad gradients is where they begin.

    The first unit that ReLU set to zero has no derivative under the root.
    """
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), Applies(torch.sqrt), nn.Linear(8, 2))
    silent = (F.relu(model[0](batch)) == 0).nonzero()[0].tolist()
    violation = only(inspect(model, batch), "finite")
    assert (violation.layer, violation.role) == ("1", "gradients")
    assert f"the first at {silent} (sample {silent[0]})" in violation.message
    assert "'2'" in violation.cause
    assert "sqrt" in violation.cause


def test_what_follows_is_counted(batch, inspect, only):
    """The layers behind it, the model, and the gradients before it."""
    assert only(inspect(around(torch.log), batch), "finite").consequences >= 3


def test_a_mask_of_infinities_is_counted_and_is_no_fault(batch, inspect):
    """-inf that softmax turns into zeros is what masks are made of."""
    report = inspect(masked(8), batch)
    assert report["mask"].activations.negative_inf_count == 64 * 8
    assert report.healthy


# ---- cuts ----------------------------------------------------------------------------------------


Inspect = Callable[..., HealthReport]


def test_a_cut_is_told_once_in_the_text(inspect: Inspect) -> None:
    """Though the line is a part of the message and of the cause."""
    model, inputs, _, loss = translated(cuts=True)
    assert inspect(model, inputs, loss=loss).render("failure").count("`detach` at") == 1


def test_a_flow_that_was_inferred_accuses_no_head(batch: Tensor, inspect: Inspect) -> None:
    """Autograd still says what no output depends on."""
    for cuts, layers in ((False, []), (True, ["trunk.2"])):
        report = inspect(Auxiliary(cuts=cuts), batch, loss=lambda out: out[0].square().mean())
        assert [violation.layer for violation in report.violations] == layers
        observation = replace(report.observation, flow=None)
        warned = [warning.layer for warning in judge(observation, report._settings).warned]
        assert warned == (["trunk.0", *layers] if cuts else [])  # which feeds which is not seen
    inferred = replace(inspect(Reading(Part(), 0), batch).observation, flow=None)
    assert judge(inferred, report._settings).violations == ()


# ---- wiring --------------------------------------------------------------------------------------


def findings(report):
    """Return what the check found, what only warns among it."""
    return [v for v in (*report.violations, *report.warnings) if v.check == "wiring"]


def test_weights_that_a_function_uses_are_used_without_gradients_too(inspect):
    """The flow has them by name where no gradient tells."""
    model, batch = HEALTHY["weights used by a function"]()
    assert findings(inspect(model, batch, backward=False)) == []


def test_what_lies_inside_an_object_may_be_for_others(inspect):
    """A loss or a metric may read the keys that a model leaves alone."""
    report = inspect(TakesKeys(), ({"x": torch.randn(8, 16), "y": torch.randn(8, 16)},))
    assert findings(report) == []


# ---- unregistered parameters ---------------------------------------------------------------------


def test_parameters_made_by_the_forward_are_told_once_with_their_lines(batch, inspect, only):
    """Some are used at a line of the user's code, some in a layer that is made anew."""

    def use(model, x):
        scale, layer = nn.Parameter(torch.ones(16)), linear()
        for _ in range(2):
            x = x @ nn.Parameter(torch.randn(16, 16))
        return layer(model.heads["a"](x)) * scale

    report = inspect(keeping(use, heads={"a": linear()}), batch)
    assert [one.path for one in report.observation.unregistered if one.path] == [
        "heads['a'].bias", "heads['a'].weight",
    ]  # fmt: skip
    shown = only(report, "unregistered_parameters").message.partition(": ")[2]
    assert shown.startswith("5 that only the graph holds (used at ")
    assert shown.endswith("), heads['a'].bias, heads['a'].weight")
    places = re.findall(r"([\w./-]+\.py):(\d+)", shown)
    assert sorted(linecache.getline(path, int(line)).strip() for path, line in places) == [
        'return layer(model.heads["a"](x)) * scale',
        "x = x @ nn.Parameter(torch.randn(16, 16))",
    ]


def test_gradients_of_what_is_hidden_are_put_back(batch, inspect):
    """What a hidden parameter had as gradient is there again afterwards, the same object."""
    model = in_a_list()
    before = model.blocks[0].weight.grad = torch.ones(16, 16)
    inspect(model, batch)
    assert model.blocks[0].weight.grad is before
    assert bool((before == 1).all())
