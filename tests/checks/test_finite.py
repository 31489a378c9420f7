"""The `finite` check: the layer that made the first value that is no number."""

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp


def line_of(code):
    """Where this code stands for the first time in this file."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(n for n, line in enumerate(lines, 1) if code in line)}"


class Takes(nn.Module):
    """Layers by name and a forward that takes them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.computed = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.computed(self, x)


def around(function):
    """A model with a faulty layer in the middle."""
    return nn.Sequential(nn.Linear(16, 8), Applies(function), nn.Linear(8, 8), nn.Linear(8, 4))


def with_nan(model, name, tensor):
    """The model with one value that is no number."""
    with torch.no_grad():
        getattr(model.get_submodule(name), tensor).view(-1)[2] = torch.nan
    return model


def normalised():
    """A running statistic, and a buffer that is infinite on purpose."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).eval()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf))
    return model


def masked(hidden):
    """Attention weights with a mask of -inf from this key on, kept in a layer of its own."""
    hides = torch.arange(16) >= hidden
    return Takes(
        lambda self, x: torch.softmax(self.mask(self.score(x)), dim=-1) @ x.new_ones(16, 3),
        score=nn.Linear(16, 16), mask=Applies(lambda s: s.masked_fill(hides, -torch.inf)),
    )  # fmt: skip


def divided():
    """A block that divides by zero between two layers."""
    block = Takes(
        lambda self, x: self.b(self.a(x) / 0.0),  # the division
        a=nn.Linear(8, 8), b=nn.Linear(8, 8),
    )  # fmt: skip
    return nn.Sequential(nn.Linear(16, 8), block, nn.Linear(8, 2))


def couplings():
    """Each hands a part of the stream on past its layer; the second overflows."""

    def couple(scale):
        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            return torch.cat([b * torch.exp(scale * self.net(a)), a], dim=1)

        return Takes(forward, net=nn.Linear(8, 8))

    return nn.Sequential(*(couple(scale) for scale in (1.0, 1e4, 1.0)))


def towers():
    """Two that fail on their own."""
    return Takes(
        lambda self, x: self.head(self.left(x)) + self.head(self.right(x)),
        left=Applies(torch.log), right=Applies(lambda x: x / 0), head=nn.Linear(16, 2),
    )  # fmt: skip


def aside():
    """A layer is given what is no number, and its output is not used."""

    def forward(self, x):
        h = self.fc(x)
        self.aside(torch.log(h))
        return self.head(h)

    return Takes(forward, **{name: nn.Linear(16, 16) for name in ("fc", "aside", "head")})


def attention():
    """A softmax by hand over nothing but mask."""

    def forward(self, x):
        scores = self.q(x) @ self.k(x).T
        return self.weigh(scores + x.new_full((64, 64), -torch.inf))

    weigh = Applies(lambda s: s.exp() / s.exp().sum(-1, keepdim=True))
    return Takes(forward, q=nn.Linear(16, 8), k=nn.Linear(16, 8), weigh=weigh)


def beside(function):
    """A layer that may make NaN itself, and arithmetic of the model's own on another way."""
    return Takes(
        lambda self, x: (self.first(self.left(x)), self.second(torch.log(self.right(x) * 0.0))),
        left=Applies(function), right=nn.Linear(16, 8),
        first=nn.Linear(16, 2), second=nn.Linear(8, 2),
    )  # fmt: skip


def branches(left, right):
    """Two branches of one layer, each with arithmetic of its own behind it, and a head."""

    def forward(self, x):
        h = self.stem(x)
        return self.head(left(self.left(h)) + right(self.right(h)))

    layers = {name: nn.Linear(8, 8) for name in ("left", "right", "head")}
    return Takes(forward, stem=nn.Linear(16, 8), **layers)


def rooted(h):
    """Finite, with a derivative that is not."""
    return h.mul(0.0).pow(0.5)  # the root


def logged(h):
    """A mask of the result does not help."""
    return torch.where(h > 0, torch.log(h * (h > 0)), 0.0)  # the log


def safe(h):
    """The right twin of both."""
    return torch.sqrt(F.relu(h) + 1e-6)


def scaled(start):
    """A parameter under a root."""
    return Takes(
        lambda self, x: self.head(self.fc(x) * torch.sqrt(self.scale)),
        fc=nn.Linear(16, 8), head=nn.Linear(8, 2), scale=nn.Parameter(torch.full((8,), start)),
    )  # fmt: skip


FORWARD = {"backward": False}
NOTHING = torch.zeros(64, dtype=torch.bool)

FIFTH = (torch.arange(64) == 5)[:, None] & (torch.arange(8) > 2)

# the model, the options of the run, the place, and words of message or cause
CASES = {
    "log": (lambda: around(torch.log), {}, "1 activations", ["log or root"]),
    "root": (lambda: around(lambda x: torch.sqrt(x - 10)), {}, "1 activations", ["log or root"]),
    "division": (lambda: around(lambda x: x / (x * 0)), {}, "1 activations", ["division by zero"]),
    "overflow": (lambda: around(lambda x: torch.exp(x * 1e5)), {}, "1 activations", ["overflow"]),
    "the first value": (
        lambda: around(lambda x: torch.where(FIFTH, torch.inf, x)), {}, "1 activations",
        ["the first at [5, 3] (sample 5)"],
    ),
    "overflow of float16": (
        lambda: nn.Sequential(nn.Linear(16, 8), Applies(lambda x: x * 60000 * 10)).half(),
        FORWARD, "1 activations", ["65504"],
    ),
    "weight": (lambda: with_nan(Mlp(), "fc2", "weight"), {}, "fc2 parameters weight", []),
    "buffer": (
        lambda: with_nan(normalised(), "1", "running_var"), {}, "1 buffers running_var", []
    ),
    "a row of nothing but mask": (lambda: masked(0), {}, "softmax activations", ["masked"]),
    "a row of mask by hand": (attention, FORWARD, "weigh activations", []),
    "log(0) in the loss": (
        lambda: nn.Sequential(nn.Linear(16, 4), nn.ReLU(), Applies(torch.log)),
        {"loss": torch.mean}, "2 activations", [],
    ),
    "forward of a container": (
        divided, {}, "1 activations",
        [f"`div` at {line_of('# the division')}, between 1.a and 1.b"],
    ),
    "a stream past layers": (
        couplings, {}, "1 activations", ["`exp` at ", "between 1.net and 2.net"]
    ),
    "function": (
        lambda: Applies(lambda x: torch.log(F.relu(x) * 0 - 1)), {}, " activations", []
    ),
    "third call of a loop": (
        lambda: Takes(
            lambda self, x: functools.reduce(lambda y, _: self.cell(y), range(5), x),
            cell=Applies(lambda x: x * 1e15), head=nn.Linear(16, 2),
        ), FORWARD, "cell activations", ["of call 3 of 5"],
    ),
    "loss of nothing": (Mlp, {"loss": lambda out: out[NOTHING].mean()}, " loss", []),
    "loss": (Mlp, {"loss": lambda out: torch.log(-out.exp()).mean()}, " loss", ["`log` at "]),
    "gradient of the loss": (
        lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU()),
        {"loss": lambda out: torch.sqrt(out).mean()}, "1 gradients",
        ["`sqrt` at ", "between 1 and loss"],
    ),
    "gradient of a branch": (
        lambda: branches(rooted, safe), {}, "left gradients",
        [f"`pow` at {line_of('# the root')}, between left and head"],
    ),
    "gradient of the other": (lambda: branches(safe, rooted), {}, "right gradients", ["`pow` at "]),
    "gradient of two operands": (
        lambda: Takes(
            lambda self, x: self.head(logged(self.left(x) + self.right(x))),
            left=nn.Linear(16, 8), right=nn.Linear(16, 8), head=nn.Linear(8, 2),
        ), {}, "right gradients", [f"`log` at {line_of('# the log')}"],
    ),
    "gradient of a parameter": (
        lambda: scaled(0.0), {}, " parameter_gradients scale",
        ["`sqrt` at ", "between scale and head"],
    ),
}  # fmt: skip


def place(violation):
    """Where a violation stands."""
    return f"{violation.layer} {violation.role} {violation.tensor}".rstrip()


@pytest.mark.parametrize("case", CASES)
def test_culprit_is_the_layer_that_made_it(case, batch, inspect):
    """Only it is named, with the operation; what follows is counted."""
    build, options, where, words = CASES[case]
    model = build()
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    violation, *others = inspect(model, batch.to(dtype), **options).violations
    assert violation.check == "finite"
    assert place(violation) == where
    assert all(word in f"{violation.message}\n{violation.cause}" for word in words)
    assert not others or case == "gradient of a parameter"
    if where == "1 activations" and len(model) == 4:
        assert violation.consequences >= 3  # 2, 3 and the model; the gradients of 0
    if case == "a row of mask by hand":  # the product before the mask has overflowed nothing
        assert "mm`" not in violation.cause
    if case == "gradient of a branch":
        assert "right" not in violation.cause
        assert set(violation.affected) == {"stem"}
    if case == "gradient of two operands":
        assert "left" in violation.affected


@pytest.mark.parametrize(
    "build", [Mlp, normalised, lambda: branches(safe, safe), lambda: scaled(1.0)]
)
def test_finite_model_is_healthy(build, batch, inspect):
    """A model whose values are all numbers has no violation; an infinite buffer may be a mask."""
    assert inspect(build(), batch).verdict == "healthy"


def test_negative_infinity_of_a_mask_is_no_fault(batch, inspect):
    """-inf that softmax turns into zeros is what masks are made of."""
    report = inspect(masked(8), batch)
    assert report["mask"].activations.negative_inf_count == 64 * 8
    assert report.healthy


def test_nan_in_the_batch_is_the_batchs_fault(mlp, batch, inspect, only):
    """A model fed with NaN is not blamed for it."""
    batch[3, 2] = torch.nan
    violation = only(inspect(mlp, batch), "finite")
    assert (violation.layer, violation.role, violation.value) == ("", "inputs", 1)
    assert "batch" in violation.cause


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
        assert f"`log` at {line_of('# the log')}, between right and head" in right.cause
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


def test_bad_values_that_never_leave_the_model_are_found_too(batch, inspect):
    """The model's own output is finite: the layer that is given them is named, and the line."""
    violation = inspect(aside(), batch).violations[0]
    assert (violation.check, violation.layer) == ("finite", "aside")
    assert "made from finite inputs" not in violation.message
    assert "`log` at " in violation.cause
