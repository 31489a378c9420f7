"""The `finite` check beside its table: origins of their own, what follows, and indices."""

import linecache
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.finite import around, branches, logged, masked, rooted
from corpus.checks.parts import Applies, Net


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
