"""The `finite` check: the layer that made the first value that is no number."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies


def line_of(code):
    """Where this code stands for the first time in this file."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if code in line)}"


def around(function):
    """A model with a faulty layer in the middle."""
    return nn.Sequential(nn.Linear(16, 8), Applies(function), nn.Linear(8, 8), nn.Linear(8, 4))


def test_finite_model_is_healthy(mlp, batch, inspect):
    """A model whose values are all numbers has no violation."""
    assert inspect(mlp, batch).verdict == "healthy"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (torch.log, "log or root"),
        (lambda x: torch.sqrt(x - 10), "log or root"),
        (lambda x: x / (x * 0), "division by zero"),
        (lambda x: torch.exp(x * 1e5), "overflow"),
    ],
)
def test_culprit_is_the_layer_that_made_it(function, words, batch, inspect, only):
    """The layers after the culprit are counted, not listed."""
    violation = only(inspect(around(function), batch), "finite")
    assert (violation.layer, violation.role) == ("1", "activations")
    assert words in violation.cause
    assert violation.consequences >= 3  # 2, 3 and the model; the gradients of 0


def test_nan_in_the_batch_is_the_batchs_fault(mlp, batch, inspect, only):
    """A model fed with NaN is not blamed for it."""
    batch[3, 2] = torch.nan
    violation = only(inspect(mlp, batch), "finite")
    assert (violation.layer, violation.role, violation.value) == ("", "inputs", 1)
    assert "batch" in violation.cause


def test_nan_in_a_weight_names_the_parameter(mlp, batch, inspect, only):
    """A weight that is NaN is named, and not also the activations that it makes."""
    with torch.no_grad():
        mlp.fc2.weight[0, 0] = torch.nan
    violation = only(inspect(mlp, batch), "finite")
    assert (violation.layer, violation.role, violation.tensor) == ("fc2", "parameters", "weight")


def test_nan_in_a_buffer_names_the_buffer(inspect, batch, only):
    """A running statistic that is NaN is named; an infinite buffer may be a mask."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).eval()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf))
    assert inspect(model, batch).healthy
    model[1].running_var[2] = torch.nan
    violation = only(inspect(model, batch), "finite")
    assert (violation.layer, violation.role, violation.tensor) == ("1", "buffers", "running_var")


class MaskedSoftmax(nn.Module):
    """Attention weights with a mask of -inf, kept in a layer of its own."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, 16)
        self.mask = Applies(lambda s: s.masked_fill(self.hidden, -torch.inf))
        self.hidden = torch.zeros(16, dtype=torch.bool)

    def forward(self, x):
        return torch.softmax(self.mask(self.score(x)), dim=-1) @ x.new_ones(16, 3)


def test_negative_infinity_of_a_mask_is_no_fault(batch, inspect):
    """-inf that softmax turns into zeros is what masks are made of."""
    model = MaskedSoftmax()
    model.hidden[8:] = True
    report = inspect(model, batch)
    assert report["mask"].activations.negative_inf_count == 64 * 8
    assert report.healthy


def test_softmax_row_of_nothing_but_mask_is_a_fault(batch, inspect, only):
    """A row in which everything is masked becomes NaN, in the softmax."""
    model = MaskedSoftmax()
    model.hidden[:] = True
    violation = only(inspect(model, batch), "finite")
    assert violation.layer == "softmax"
    assert "masked" in violation.cause


def test_negative_infinity_that_reaches_the_loss_is_a_fault(batch, inspect, only):
    """log(0) makes -inf; a loss that is infinite in the end shows that it was no mask."""
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), Applies(torch.log))
    violation = only(inspect(model, batch, loss=lambda out: out.mean()), "finite")
    assert violation.layer == "2"


def test_forward_of_a_container_is_named_when_its_children_are_innocent(batch, inspect, only):
    """Arithmetic between submodules belongs to the module whose forward does it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x) / 0.0)

    model = nn.Sequential(nn.Linear(16, 8), Block(), nn.Linear(8, 2))
    violation = only(inspect(model, batch), "finite")
    assert violation.layer == "1"
    assert f"`div` at {line_of('self.b(self.a(x) / 0.0)')}" in violation.cause
    assert "between 1.a and 1.b" in violation.cause


def test_float16_overflow_says_so(inspect, only):
    """An overflow of float16 names its range and the reach of the inputs."""
    model = nn.Sequential(nn.Linear(16, 8), Applies(lambda x: x * 60000 * 10)).half()
    violation = only(inspect(model, torch.randn(8, 16).half(), backward=False), "finite")
    assert violation.layer == "1"
    assert "65504" in violation.cause


def test_loss_that_is_nan_while_the_output_is_finite(mlp, batch, inspect, only):
    """A loss function that divides by nothing is blamed, not the model."""
    nothing = torch.zeros(64, dtype=torch.bool)
    report = inspect(mlp, batch, loss=lambda out: out[nothing].mean())
    violation = only(report, "finite")
    assert (violation.layer, violation.role) == ("", "loss")
    report = inspect(mlp, batch, loss=lambda out: torch.log(-out.exp()).mean())
    assert "`log` at " in only(report, "finite").cause


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


def test_two_independent_origins_are_two_violations(batch, inspect):
    """Two towers that fail on their own are both named."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Applies(torch.log), Applies(lambda x: x / 0)
            self.head = nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.left(x)) + self.head(self.right(x))

    assert [v.layer for v in inspect(Towers(), batch).violations] == ["left", "right"]


def test_functional_culprit(batch, inspect, only):
    """A function call is a layer; what its caller does with the output is the caller's."""

    class Model(nn.Module):
        def forward(self, x):
            return torch.log(F.relu(x) * 0 - 1)

    assert only(inspect(Model(), batch), "finite").layer == ""


def test_message_names_the_first_bad_value_and_its_sample(batch, inspect, only):
    """The index in the tensor, as torch itself finds it."""
    hidden = []

    def scale(x):
        bad = torch.where((torch.arange(64) == 5)[:, None] & (torch.arange(8) > 2), torch.inf, x)
        hidden.append(bad)
        return bad

    violation = only(inspect(around(scale), batch), "finite")
    assert (~hidden[0].isfinite()).nonzero()[0].tolist() == [5, 3]
    assert "the first at [5, 3] (sample 5)" in violation.message


def test_layer_in_a_loop_is_the_origin_of_what_it_feeds_itself(inspect, only):
    """A cell that overflows in its third call was given infinities only afterwards."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = Applies(lambda x: x * 1e15), nn.Linear(16, 2)

        def forward(self, x):
            for _ in range(5):
                x = self.cell(x)
            return self.head(x)

    violation = only(inspect(Loop(), torch.rand(8, 16) + 1.0, backward=False), "finite")
    assert violation.layer == "cell"
    assert "of call 3 of 5" in violation.message


class Branches(nn.Module):
    """Two branches of one layer, each with arithmetic of its own behind it, and a head."""

    def __init__(self, left, right):
        super().__init__()
        self.stem = nn.Linear(16, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.behind_left, self.behind_right = left, right
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = self.stem(x)
        a, b = self.left(h), self.right(h)
        return self.head(self.behind_left(a) + self.behind_right(b))


def rooted(h):
    """Finite, with a derivative that is not."""
    return h.mul(0.0).pow(0.5)  # the root


def logged(h):
    """A mask of the result does not help."""
    return torch.where(h > 0, torch.log(h * (h > 0)), 0.0)  # the log


def safe(h):
    """The right twin of both."""
    return torch.sqrt(F.relu(h) + 1e-6)


def test_gradients_are_blamed_on_the_branch_that_makes_them(batch, inspect, only):
    """Not on the layer that runs next, which is a parallel one."""
    violation = only(inspect(Branches(rooted, safe), batch), "finite")
    assert (violation.layer, violation.role) == ("left", "gradients")
    assert f"`pow` at {line_of('# the root')}, between left and head" in violation.cause
    assert "right" not in violation.cause
    assert set(violation.affected) == {"stem"}
    violation = only(inspect(Branches(safe, rooted), batch), "finite")
    assert violation.layer == "right"
    assert inspect(Branches(safe, safe), batch).healthy


def test_two_branches_that_each_make_bad_gradients_are_two_violations(batch, inspect):
    """Each with its own operation; the layer before both only shows them."""
    report = inspect(Branches(rooted, logged), batch)
    assert [(v.check, v.layer) for v in report.violations] == [
        ("finite", "left"),
        ("finite", "right"),
    ]
    left, right = report.violations
    assert "`pow`" in left.cause
    assert "`pow`" not in right.cause
    assert f"`log` at {line_of('# the log')}, between right and head" in right.cause


def test_operands_of_one_operation_are_one_violation(batch, inspect, only):
    """The root of a sum has two operands that get bad gradients, and is one fault."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            h = self.left(x) + self.right(x)
            return self.head(torch.sqrt(h * (h > 0)))

    violation = only(inspect(Sum(), batch), "finite")
    assert "`sqrt`" in violation.cause
    assert {violation.layer, *violation.affected} >= {"left", "right"}


def test_bad_gradient_of_a_parameter_names_the_operation(batch, inspect):
    """A parameter that starts at zero under a root."""

    class Scaled(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.fc, self.head = nn.Linear(16, 8), nn.Linear(8, 2)
            self.scale = nn.Parameter(torch.full((8,), start))

        def forward(self, x):
            return self.head(self.fc(x) * torch.sqrt(self.scale))

    (violation, *_) = inspect(Scaled(0.0), batch).violations
    assert (violation.role, violation.tensor) == ("parameter_gradients", "scale")
    assert "`sqrt` at " in violation.cause
    assert "between scale and head" in violation.cause
    assert inspect(Scaled(1.0), batch).healthy


def test_loss_whose_gradient_is_bad_names_its_operation(batch, inspect, only):
    """What the loss function does with the output is on the way back, too."""
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    report = inspect(model, batch, loss=lambda out: torch.sqrt(out).mean())
    assert "`sqrt` at " in only(report, "finite").cause
    assert "between 1 and loss" in only(report, "finite").cause


class Beside(nn.Module):
    """A layer that makes NaN itself, and arithmetic of the model's own on another way."""

    def __init__(self, function):
        super().__init__()
        self.left, self.right = Applies(function), nn.Linear(16, 8)
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(8, 2)])

    def forward(self, x):
        return self.heads[0](self.left(x)), self.heads[1](torch.log(self.right(x) * 0.0))


def test_arithmetic_beside_a_layer_is_an_origin_of_its_own(batch, inspect):
    """One way is the layer's fault, the other the model's: two violations."""
    report = inspect(Beside(torch.log), batch)
    assert [(v.check, v.layer) for v in report.violations] == [("finite", "left"), ("finite", "")]
    assert "`log` at " in report.violations[1].cause
    assert "between right and heads.1" in report.violations[1].cause
    assert [v.layer for v in inspect(Beside(torch.tanh), batch).violations] == [""]


def test_bad_values_that_never_leave_the_model_are_found_too(batch, inspect):
    """The model's own output is finite: the layer that is given them is named, and the line."""

    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.aside, self.head = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            h = self.fc(x)
            self.aside(torch.log(h))
            return self.head(h)

    violation = inspect(Aside(), batch).violations[0]
    assert (violation.check, violation.layer) == ("finite", "aside")
    assert "made from finite inputs" not in violation.message
    assert "`log` at " in violation.cause


def test_own_softmax_over_nothing_but_mask_is_blamed_not_the_scores(batch, inspect, only):
    """A mask makes -inf on purpose: the product before it has overflowed nothing."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, 8), nn.Linear(16, 8)
            self.weigh = Applies(lambda s: s.exp() / s.exp().sum(-1, keepdim=True))

        def forward(self, x):
            scores = self.q(x) @ self.k(x).T
            return self.weigh(scores + x.new_full((64, 64), -torch.inf))

    violation = only(inspect(Attention(), batch, backward=False), "finite")
    assert violation.layer == "weigh"
    assert "mm`" not in violation.cause


def test_the_container_whose_output_is_bad_is_blamed_not_an_earlier_one(batch, inspect, only):
    """Couplings hand a stream on past their layers: the one that overflows is named."""

    class Coupling(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.net, self.scale = nn.Linear(8, 8), scale

        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            return torch.cat([b * torch.exp(self.scale * self.net(a)), a], dim=1)

    model = nn.Sequential(*(Coupling(scale) for scale in (1.0, 1e4, 1.0)))
    violation = only(inspect(model, batch), "finite")
    assert violation.layer == "1"
    assert "`exp` at " in violation.cause
    assert "between 1.net and 2.net" in violation.cause
