"""Gradients of exactly zero: closed gates that learn are a design, what stops them for good not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth.checks.judging.judge import judge
from pytest_modelhealth.checks.missing_gradients import MissingGradients
from pytest_modelhealth.checks.zero_gradients import zero_gradients
from pytest_modelhealth.report.flow.index import Index
from pytest_modelhealth.training import default_settings
from tests.checks.layers import Applies


def told(report):
    """The violations of the check, with those folded below others."""
    every = [w for v in report.violations for w in (v, *v.folded)]
    return [v for v in every if v.check == "missing_gradients"]


def code_at(violation):
    """The line of code that a cause names."""
    place = next(word for word in violation.cause.replace(",", " ").split() if ".py:" in word)
    path, _, line = place.rstrip(":;)`").rpartition(":")
    return Path(path).read_text().splitlines()[int(line) - 1]


class Branch(nn.Module):
    """A trunk with a residual branch, made of `make`, that goes through `through`."""

    def __init__(self, through, **own):
        super().__init__()
        self.stem, self.branch, self.head = (nn.Linear(16, 16) for _ in range(3))
        for name, value in own.items():
            if isinstance(value, nn.Parameter | nn.Module):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)
        self.through = through

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.through(self, self.branch(x)))


def zeros(*shape, learns=True):
    """A parameter that starts at zero."""
    return nn.Parameter(torch.zeros(*shape), requires_grad=learns)


def zero_linear(*sizes, **options):
    """A linear layer that starts at zero."""
    layer = nn.Linear(*sizes, **options)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Standard(nn.Conv1d):
    """A convolution by weights of mean 0 and variance 1 a channel times a gain of zero (NF-Net)."""

    def __init__(self):
        super().__init__(16, 16, 1)
        self.gain = zeros(16, 1, 1)

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, 16, -1), None, None, (0.5 * self.gain).view(-1), training=True
        )
        return F.conv1d(x[:, :, None], weight.reshape_as(self.weight), self.bias)[:, :, 0]


def no_gain(layer):
    """The layer, whose gain starts at zero."""
    nn.init.zeros_(layer.parametrizations.weight.original0)
    return layer


FAULTS = {
    "a number": (lambda m, h: h * 0.0, {}, "the number 0"),
    "a buffer": (lambda m, h: m.gate * h, {"gate": torch.zeros(16)}, "the buffer 'gate'"),
    "a buffer times a draw": (
        lambda m, h: h * (m.gate * torch.rand(len(h), 1)),
        {"gate": torch.zeros(16)},
        "the buffer 'gate'",
    ),
    "a frozen gate": (lambda m, h: m.gate * h, {"gate": zeros(16, learns=False)}, "frozen"),
    "a frozen layer": (
        lambda m, h: m.last(h),
        {"last": zero_linear(16, 16).requires_grad_(False)},
        "frozen",
    ),
    "two gates of zero": (
        lambda m, h: m.a * (m.b * h),
        {"a": zeros(16), "b": zeros(1)},
        "'b'",
    ),
    "a gate at zero behind a layer of zeros": (
        lambda m, h: m.gate * m.last(h),
        {"gate": zeros(16), "last": zero_linear(16, 16)},
        "'gate'",
    ),
    "rounded": (lambda m, h: h.round(), {}, "`round`"),
    "a sign": (lambda m, h: torch.sign(h), {}, "`sign`"),
    "floored": (lambda m, h: torch.floor(4 * h) / 4, {}, "`floor`"),
}


def test_gate_that_something_after_it_holds_at_zero_is_a_fault(batch, inspect):
    """It would learn but for what comes after it, and is no design."""
    report = inspect(Branch(lambda m, h: Zeros.apply(m.gate * h), gate=zeros(1)), batch)
    assert [v.layer for v in told(report)] == ["branch"]


@pytest.mark.parametrize("kind", FAULTS)
def test_what_stops_a_gradient_for_good_is_named(kind, batch, inspect):
    """With the operation, what it multiplies by, and the line."""
    through, own, word = FAULTS[kind]
    violations = told(inspect(Branch(through, **own), batch))
    assert len(violations) == 1
    (violation,) = violations
    is_gate = kind.startswith(("two", "a gate"))
    assert violation.layer in (("", "last") if is_gate else ("branch",))
    assert word in violation.cause
    assert kind == "a frozen layer" or "m" in code_at(violation)
    if kind in ("a number", "rounded"):
        assert "FAULTS" not in code_at(violation)
        assert "lambda m, h" in code_at(violation)


DESIGNS = {
    "a number that is small": (lambda m, h: h * 1e-6, {}),
    "a buffer of ones": (lambda m, h: m.gate * h, {"gate": torch.ones(16)}),
    "ReZero": (lambda m, h: m.gate * h, {"gate": zeros(1)}),
    "LayerScale": (lambda m, h: h * m.gate, {"gate": zeros(16)}),
    "SkipInit": (lambda m, h: m.gain * F.gelu(h), {"gain": zeros(())}),
    "tanh gate": (lambda m, h: torch.tanh(m.gate) * h, {"gate": zeros(1)}),
    "one minus a gate of one": (
        lambda m, h: (1 - m.gate) * h,
        {"gate": nn.Parameter(torch.ones(1))},
    ),
    "last layer of a branch": (lambda m, h: m.last(h), {"last": zero_linear(16, 16)}),
    "LoRA": (
        lambda m, h: h @ m.a @ m.b + m.last(h),
        {"a": nn.Parameter(torch.randn(16, 2)), "b": zeros(2, 16), "last": zero_linear(16, 16)},
    ),
    "ControlNet": (
        lambda m, h: m.out(F.gelu(m.inner(h + m.into(h)))),
        {"into": zero_linear(16, 16), "inner": nn.Linear(16, 16), "out": zero_linear(16, 16)},
    ),
    "squeeze and excitation of zeros": (
        lambda m, h: torch.sigmoid(m.squeeze(z := m.last(h))) * z,
        {"last": zero_linear(16, 16), "squeeze": nn.Linear(16, 16)},
    ),
    "Fixup": (
        lambda m, h: m.scale * m.last(h) + m.bias,
        {"last": zero_linear(16, 16, bias=False), "scale": nn.Parameter(torch.ones(1)),
         "bias": zeros(1)},
    ),
    "a gate inside a closed branch": (
        lambda m, h: m.outer * (h + m.inner * m.more(h)),
        {"outer": zeros(1), "inner": zeros(1), "more": nn.Linear(16, 16)},
    ),
    "normalised to a scale of zero": (
        lambda m, h: m.norm(h),
        {"norm": nn.BatchNorm1d(16)},
    ),
    "straight through": (lambda m, h: h + (h.round() - h).detach(), {}),
    "a gate that a layer makes": (
        lambda m, h: h * m.gate(h.detach()),
        {"gate": zero_linear(16, 16)},
    ),
    "a part of what a layer makes": (
        lambda m, h: h * m.gate(h.detach()).chunk(2, -1)[1],
        {"gate": zero_linear(16, 32)},
    ),
    "weights that are standardised times a gain": (lambda m, h: m.last(h), {"last": Standard()}),
    "weights that are normalised to a gain": (
        lambda m, h: m.last(h),
        {"last": no_gain(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DESIGNS)
def test_gate_that_opens_at_the_first_step_is_no_fault(kind, batch, inspect):
    """Whatever it is made of: a parameter, a layer, what is made of either."""
    through, own = DESIGNS[kind]
    model = Branch(through, **own)
    if kind.startswith("normalised"):
        nn.init.zeros_(model.norm.weight)
    if kind.startswith("a part"):
        nn.init.normal_(model.gate.weight[:16], std=0.1)
    report = inspect(model, batch)
    assert report.healthy, report


def unseen(report):
    """The violations of the check as they are where no flow was recorded."""
    observation = replace(report.observation, flow=None)
    return [
        v for v in judge(observation, default_settings()).violations
        if v.check == "missing_gradients"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", DESIGNS)
def test_gate_is_no_fault_where_no_product_is_seen(kind, batch, inspect):
    """Compiled code shows no products: a gate that learns explains what lies about it."""
    through, own = DESIGNS[kind]
    assert unseen(inspect(Branch(through, **own), batch)) == []


def test_layer_that_passes_nothing_on_is_found_where_no_operation_is_seen(batch, inspect):
    """No gate is there to explain it."""
    (violation,) = unseen(inspect(Branch(FAULTS["rounded"][0]), batch))
    assert violation.layer == "branch"


class Attending(nn.Module):
    """A block of DiT: shift, scale and gate of what a condition makes, which starts at zero."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.adaptive = nn.Sequential(nn.SiLU(), zero_linear(16, 48))

    def forward(self, x, condition):
        shift, scale, gate = self.adaptive(condition)[:, None].chunk(3, dim=-1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale) + shift).chunk(3, dim=-1)
        return x + gate * self.proj(F.scaled_dot_product_attention(q, k, v))


class DiT(nn.Module):
    """Blocks of it, and the last layer, which starts at zero too."""

    def __init__(self, last):
        super().__init__()
        self.patches, self.condition = nn.Linear(8, 16), nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Attending() for _ in range(3))
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.adaptive, self.last = nn.Sequential(nn.SiLU(), zero_linear(16, 32)), last

    def forward(self, x, condition):
        x, condition = self.patches(x), self.condition(condition)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.adaptive(condition)[:, None].chunk(2, dim=-1)
        return self.last(self.norm(x) * (1 + scale) + shift)


@pytest.mark.parametrize("last", [nn.Linear(16, 8), zero_linear(16, 8)], ids=["random", "zero"])
def test_fresh_diffusion_transformer_is_healthy(last, inspect):
    """All behind its closed gates has a gradient of zero until they open."""
    report = inspect(DiT(last), (torch.randn(16, 5, 8), torch.randn(16, 4)))
    assert report["blocks.1.qkv"].parameter_gradients["weight"].abs_max == 0.0
    assert report.healthy, report


def test_adaptive_gate_that_is_frozen_is_a_fault(inspect):
    """It never opens, and the block never learns."""
    model = DiT(nn.Linear(16, 8))
    model.blocks[1].adaptive[1].requires_grad_(False)
    (violation,) = told(inspect(model, (torch.randn(16, 5, 8), torch.randn(16, 4))))
    assert violation.layer == "blocks.1.proj"
    assert "'blocks.1.adaptive.1'" in violation.cause
    assert "gate * self.proj" in code_at(violation)


class Towers(nn.Module):
    """Two towers over a trunk, each through what it is given."""

    def __init__(self, left, right):
        super().__init__()
        self.trunk, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.left, self.right = (
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)
        )
        self.through = left, right

    def forward(self, x):
        h = self.trunk(x)
        left = self.through[0](self.left(h))
        right = self.through[1](self.right(h))
        return self.head(h + left + right)


class Zeros(torch.autograd.Function):
    """Passes values and a gradient of zero."""

    @staticmethod
    def forward(ctx, x):
        return 1.5 * x

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


@pytest.mark.parametrize("stop", [torch.round, Zeros.apply, lambda h: 0 * h])
def test_two_dead_branches_are_two_stories(stop, batch, inspect):
    """Neither feeds the other; what feeds either is its own."""
    found = told(inspect(Towers(stop, stop), batch))
    assert [v.layer for v in found] == ["left.2", "right.2"]
    assert [v.affected for v in found] == [("left.0",), ("right.0",)]
    (found,) = told(inspect(Towers(torch.tanh, stop), batch))
    assert found.layer == "right.2"


def test_layers_behind_one_another_are_one_story(batch, inspect):
    """The last before the stop is named; a block twice along the stream is one fault, too."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + Zeros.apply(self.fc2(self.fc1(x).tanh()))

    model = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 4))
    (violation,) = told(inspect(model, batch))
    assert violation.layer == "2.fc2"
    assert set(violation.affected) == {"1.fc1", "1.fc2", "2.fc1"}
    assert "`zeros`" in violation.cause


class Heads(nn.Module):
    """Heads over a trunk whose outputs `take` picks from."""

    def __init__(self, take):
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)
        self.take = take

    def forward(self, x):
        h = self.trunk(x)
        return self.take(torch.stack([self.first(h), self.second(h)], 1))


@pytest.mark.parametrize(
    "take", [lambda y: y[:, 0], lambda y: y.select(1, 0), lambda y: y.unbind(1)[0]]
)
def test_head_that_another_was_taken_for_is_no_fault(take, batch, inspect):
    """It is one of a class, side by side: the graph tells, whatever their names are."""
    assert inspect(Heads(take), batch).healthy


class Modulated(nn.Module):
    """A condition of zeros shifts what goes into a branch, and gates what comes of it."""

    def __init__(self, between):
        super().__init__()
        self.modulate, self.between = zero_linear(16, 32), between
        self.branch, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        shift, gate = self.modulate(x).chunk(2, 1)
        return self.head(x + self.between(gate) * self.branch(x + shift))


@pytest.mark.parametrize("is_cut", [False, True])
def test_gate_of_zeros_that_is_detached(is_cut, batch, inspect):
    """It multiplies what is made of itself, and no other is of zeros: it is said so."""
    violations = told(
        inspect(Modulated(torch.Tensor.detach if is_cut else lambda gate: gate), batch)
    )
    assert [v.layer for v in violations] == (["modulate"] if is_cut else [])
    for violation in violations:
        assert "multiplied by what is made of it at" in violation.cause
        assert "self.between(gate) * self.branch" in code_at(violation)


class Levels(nn.Module):
    """Stacks what each layer of a row gives; `take` picks from it."""

    def __init__(self, take):
        super().__init__()
        self.row, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)
        self.take = take

    def forward(self, x):
        levels = []
        for layer in self.row:
            x = F.relu(layer(x))
            levels.append(x)
        return self.head(self.take(torch.stack(levels, 1)))


@pytest.mark.parametrize(
    ("take", "layers"),
    [
        (lambda y: y[:, 0], ["row.3"]),
        (lambda y: y[:, -1], []),
        (lambda y: y[:, -2], []),
        (lambda y: y[:, 0] + y.mean(1), []),
    ],
    ids=["first", "last", "last but one", "all"],
)
def test_only_the_first_of_several_levels_is_read(take, layers, batch, inspect):
    """Most layers go on from it in vain, which may be meant; the last may be left out."""
    report = inspect(Levels(take), batch)
    assert told(report) == []
    warnings = [w for w in report.warnings if w.check == "missing_gradients"]
    assert [w.layer for w in warnings] == layers
    for warning in warnings:
        assert set(warning.affected) == {"row.1", "row.2"}
        assert "`stack` at" in warning.cause


class Weighted(nn.Module):
    """Experts that all run and are weighted: by the two best scores, or by a mask that is made."""

    def __init__(self, is_routed):
        super().__init__()
        self.head, self.router = nn.Linear(16, 4), nn.Linear(16, 8) if is_routed else None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(8)
        )
        self.is_routed = is_routed

    def forward(self, x):
        weights = torch.zeros(len(x), 8)
        if self.is_routed:
            scores = self.router(x).softmax(-1) - torch.arange(8) // 4  # four get nothing
            best = scores.topk(2, -1)
            weights = weights.scatter(-1, best.indices, best.values)
        else:
            weights[:, :2] = 0.5
        outputs = [weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts)]
        return self.head(x + sum(outputs))


@pytest.mark.parametrize("is_routed", [True, False])
def test_expert_under_a_mask_of_zeros_is_no_fault(is_routed, batch, inspect):
    """Experts side by side take the same, and others learn."""
    report = inspect(Weighted(is_routed), batch)
    assert report["experts.7.2"].parameter_gradients["weight"].abs_max == 0.0
    assert told(report) == [] == unseen(report)


def test_head_beside_others_that_is_rounded_is_a_fault(batch, inspect):
    """That its sibling learns explains nothing where nothing is picked."""
    model = Towers(torch.tanh, Zeros.apply)
    assert [v.layer for v in told(inspect(model, batch))] == ["right.2"]


class Cell(nn.Module):
    """One step of a recurrence by hand, from a state of zeros."""

    def __init__(self, steps):
        super().__init__()
        self.forget, self.new, self.head = (nn.Linear(16, 16) for _ in range(3))
        self.steps = steps

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(self.steps):
            state = torch.sigmoid(self.forget(x)) * state + torch.tanh(self.new(x))
        return self.head(state)


@pytest.mark.parametrize("steps", [1, 2])
def test_first_step_of_a_recurrence_is_no_fault(steps, batch, inspect):
    """Nothing is there yet to forget."""
    report = inspect(Cell(steps), batch)
    assert report.violations == ()
    doubts = [f for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert len(doubts) == (steps == 1)
    assert all("`zeros_like`" in f.reason for f in doubts)


@pytest.mark.parametrize(("weight", "is_sure"), [(0.0, False), (1.0, True)])
def test_loss_weight_of_zero_is_no_sure_fault(weight, is_sure, batch, inspect):
    """It may be switched on later; the line is in the reason."""

    def loss(out):
        return out[0].square().mean() + weight * out[1].square().mean()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.main, self.aside = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            h = self.trunk(x)
            return self.main(h), self.aside(h)

    report = inspect(Two(), batch, loss=loss)
    assert report.violations == ()
    doubts = [f.layer for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert doubts == ([] if is_sure else ["aside"])


def test_layer_that_is_touched_only_to_be_touched_is_no_sure_fault(batch, inspect):
    """`0 * layer(x).sum()` keeps distributed training content."""
    report = inspect(Branch(lambda m, h: 0.0 * h.sum()), batch)
    assert report.violations == ()
    (doubt,) = report._judgement.inconclusive
    assert (doubt.layer, "sum" in doubt.reason) == ("branch", True)


class Conditioned(nn.Module):
    """Tokens weighted by a mask of the batch."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.extra = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x, mask):
        return self.head(self.token(x) + mask * self.extra(x))


@pytest.mark.parametrize("is_there", [0.0, 1.0])
def test_what_the_batch_masks_is_no_sure_fault(is_there, batch, inspect):
    """Another batch may have something for it."""
    report = inspect(Conditioned(), (batch, torch.full((64, 1), is_there)))
    assert report.violations == ()
    doubts = [f for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert len(doubts) == (not is_there)
    assert all("of the batch" in f.reason for f in doubts)


class OwnWeight(nn.Module):
    """A layer that makes something of its weight before it uses it."""

    def __init__(self, make):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), zeros(16)
        self.make = make

    def forward(self, x):
        return F.linear(x, self.make(self.weight), self.bias)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (torch.round, "`round`"),
        (lambda w: w * 0, "the number 0"),
        (Zeros.apply, "`zeros`"),
        (lambda w: w.clamp(5, 6), "`clamp`"),
        (lambda w: w + 0 * w, None),
        (lambda w: w / w.norm(), None),
    ],
)
def test_weight_that_gets_nothing_by_its_own_way(make, word, batch, inspect):
    """Its bias learns, the weight never does: the operation on its way is named."""
    found = told(inspect(nn.Sequential(OwnWeight(make), nn.ReLU(), nn.Linear(16, 4)), batch))
    assert [(v.layer, v.tensor) for v in found] == ([("0", "weight")] if word else [])
    assert all(word in v.cause for v in found)


class Router(nn.Module):
    """Sends each token to one of four experts; a margin leaves the best, or those close to it."""

    def __init__(self, margin):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4, bias=False), nn.Linear(16, 4)
        self.margin = margin

    def forward(self, x):
        scores = self.router(x)
        masked = scores.masked_fill(scores < scores.amax(1, keepdim=True) - self.margin, -torch.inf)
        return masked.softmax(1) * self.experts(x)


@pytest.mark.parametrize(("margin", "lines"), [(0.0, 1), (1.0, 0)])
def test_softmax_that_a_mask_leaves_one_choice(margin, lines, batch, inspect):
    """Its weight is 1 whatever the score; where two are close a router learns."""
    report = inspect(nn.Sequential(Router(margin), nn.Linear(4, 2)), batch)
    assert report.violations == ()
    found = [f.reason for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert len(found) == lines
    assert all("a single choice" in reason for reason in found)


def test_idle_expert_is_no_fault(batch, inspect):
    """An expert that got no sample has a zero gradient; the others learn."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

        def forward(self, x):
            out = torch.zeros(len(x), 8)
            for index, expert in enumerate(self.experts):
                rows = torch.arange(len(x)) % 2 == index
                out = out.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
            return out

    assert inspect(Experts(), batch).healthy


def test_zero_initialised_gate_is_no_fault(batch, inspect):
    """A branch behind a gate of zero has no gradient at first (ReZero, LoRA)."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.head = nn.Linear(16, 4), nn.Linear(4, 16), nn.Linear(16, 2)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def forward(self, x):
            return self.head(x + self.up(self.down(x)))

    report = inspect(Gated(), batch)
    assert report["down"].parameter_gradients["weight"].abs_max == 0.0
    assert report.healthy


def test_flat_loss_is_found(mlp, batch, inspect, only):
    """Gradients that a clamp in the loss makes exactly zero follow from the loss."""
    report = inspect(mlp, batch, loss=lambda out: out.square().mean().clamp(min=1e3))
    violation = only(report, "loss")
    assert "clamp" in violation.cause
    assert [(v.check, v.layer) for v in violation.folded] == [("missing_gradients", "head")]


def test_layer_that_passes_nothing_on_is_named(batch, inspect):
    """Where the gradient becomes exactly zero, the layer that took the output is in the cause."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Hardtanh(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(1e3)
    (root,) = inspect(model, batch).violations
    assert (root.check, root.layer) == ("saturation", "1")
    violation = next(v for v in root.folded if v.check == "missing_gradients")
    assert (violation.check, violation.layer) == ("missing_gradients", "0")
    assert "'1'" in violation.cause


def test_backward_that_returns_zeros_is_found_behind_zero_biases(batch, inspect):
    """A bias of zero after it closes nothing; the last layer that gets nothing is named."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 1.5 * x

        @staticmethod
        def backward(ctx, gradient):
            return torch.zeros_like(gradient)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)
            self.head = nn.Linear(8, 2)
            nn.init.zeros_(self.b.bias)

        def forward(self, x):
            return self.head(self.b(Scale.apply(self.act(self.a(x)))))

    (violation,) = inspect(Model(), batch).violations
    assert (violation.check, violation.layer) == ("missing_gradients", "act")
    assert "'b'" in violation.cause


@pytest.mark.parametrize("trunk", [False, True])
def test_head_that_is_sliced_away_is_no_fault(trunk, batch, inspect):
    """Of heads that are stacked, those that the model leaves out get a gradient of zero."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(16, 16) if trunk else nn.Identity()
            self.heads = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)
            )

        def forward(self, x):
            h = self.trunk(x)
            outputs = [head(h * (1 + i * trunk)) for i, head in enumerate(self.heads)]
            return torch.stack(outputs, 1)[:, 1:]

    report = inspect(Heads(), batch)
    assert report["heads.0.2"].parameter_gradients["weight"].abs_max == 0.0
    assert report.healthy


def test_block_of_a_stack_that_passes_nothing_on_is_a_fault(batch, inspect):
    """Blocks one after the other are no choice, though others like it learn."""

    class Block(nn.Module):
        def __init__(self, cut):
            super().__init__()
            self.fc, self.cut = nn.Linear(16, 16), cut

        def forward(self, x):
            h = self.fc(x)
            return x + (torch.round(h) if self.cut else h)

    model = nn.Sequential(Block(False), Block(True), Block(False), nn.Linear(16, 2))
    found = {v.layer for v in inspect(model, batch).violations if v.check == "missing_gradients"}
    assert found == {"1.fc"}


def test_loss_that_every_sample_satisfies_is_inconclusive(mlp, batch, inspect):
    """A hinge of exactly zero leaves every gradient at zero, with nothing wrong."""
    report = inspect(mlp, batch, loss=lambda out: (out - 100.0).relu().mean())
    assert report.loss == 0.0
    assert report.violations == ()
    (finding,) = [f for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert "exactly 0" in finding.reason


class Detector(nn.Module):
    """Classes and boxes of what a trunk sees."""

    def __init__(self):
        super().__init__()
        self.trunk, self.classes, self.boxes = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x):
        h = self.trunk(x)
        return self.classes(h), self.boxes(h)


@pytest.mark.parametrize(("mask", "doubts"), [(0.0, ["boxes"]), (1.0, [])])
def test_head_that_the_loss_asks_for_nothing_in_this_batch(mask, doubts, batch, inspect):
    """The boxes of a batch without objects learn nothing, by a loss that masks them."""
    report = inspect(
        Detector(), batch, loss=lambda out: (out[0] + mask * out[1][:, :3]).pow(2).mean()
    )
    assert report.violations == ()
    found = [f.layer for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert found == doubts


class Dropped(nn.Module):
    """A residual branch that is left out for every sample of this batch."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + 0.0 * self.branch(x))


@pytest.mark.parametrize(("samples", "is_sure"), [(1, False), (3, False), (4, True), (16, True)])
def test_few_samples_may_all_have_been_left_out(samples, is_sure, inspect):
    """Stochastic depth drops a block for two samples often, for many never."""
    report = inspect(Dropped(), torch.randn(samples, 16))
    sure = [v.layer for v in report.violations if v.check == "missing_gradients"]
    doubted = [f for f in report._judgement.inconclusive if f.check == "missing_gradients"]
    assert (sure, [f.layer for f in doubted]) == (["branch"], []) if is_sure else ([], ["branch"])
    assert all("give 4 or more" in f.reason for f in doubted)


class DropPath(nn.Module):
    """Stochastic depth, which is drawn in one of several ways and keeps next to nothing."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw(x, (len(x), *[1] * (x.ndim - 1)))


class MaybeLeftOut(nn.Module):
    """Two residual branches with activations, one of which is dropped, by a module or in place."""

    def __init__(self, draw, is_module=True):
        super().__init__()
        self.kept, self.branch = (
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.drop, self.head = DropPath(draw) if is_module else draw, nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.kept(x)
        made = self.branch(x)
        is_module = isinstance(self.drop, nn.Module)
        made = self.drop(made) if is_module else made * self.drop(made, (len(x), 1))
        return self.head(x + made)


DRAWS = {
    "timm": lambda x, shape: x.new_empty(shape).bernoulli_(1e-9).div_(1e-9),
    "transformers": lambda x, shape: (1e-9 + torch.rand(shape)).floor_(),
    "compared": lambda x, shape: (torch.rand(shape) < 1e-9).to(x.dtype),
}


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("kind", DRAWS)
def test_branch_that_stochastic_depth_dropped_is_warned_of(kind, is_module, inspect):
    """No unit is dead and no gradient cut: the draw kept none of the samples of this batch."""
    report = inspect(MaybeLeftOut(DRAWS[kind], is_module), torch.randn(8, 16))
    assert report.healthy, report
    assert [(v.check, v.layer) for v in report.warnings] == [("missing_gradients", "branch.3")]
    assert "drawn at random" in report.warnings[0].cause
    (many,) = inspect(MaybeLeftOut(DRAWS[kind], is_module), torch.randn(64, 16)).violations
    assert (many.check, many.layer) == (
        ("normalization", "drop") if is_module else ("missing_gradients", "branch.3")
    )


def test_model_that_draws_noise_and_starts_at_zero_drops_nothing(inspect):
    """Diffusion draws its times and its noise itself, by a model whose last layer is zero."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), zero_linear(32, 16))

        def forward(self, x):
            return self.net(x * torch.rand(len(x), 1))

    report = inspect(Denoiser(), torch.randn(64, 16), torch.randn(64, 16), loss=F.mse_loss)
    assert report.healthy, report


class ClassToken(nn.Module):
    """A last attention with relative positions of patches, of which the class token is read."""

    def __init__(self, read, affine):
        super().__init__()
        self.qkv, self.relative = nn.Linear(16, 48), nn.Parameter(torch.randn(9, 16) / 4)
        self.norm, self.head = nn.LayerNorm(16, elementwise_affine=affine), nn.Linear(16, 4)
        self.read = read

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        near = torch.einsum("nqc,kc->nqk", q[:, 1:], self.relative[torch.arange(x.shape[1] - 1)])
        scores[:, 1:, 1:] = (scores[:, 1:, 1:].reshape(near.shape) + near).view(near.shape)
        return self.head(self.read(self.norm(x + scores.softmax(-1) @ v)))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("read", "count"), [(lambda x: x[:, 0], 1), (lambda x: x.mean(1), 0)])
def test_positions_of_what_is_not_read_are_warned_of(read, count, affine, inspect):
    """MViT: they have no effect on the class token of the last block."""
    report = inspect(ClassToken(read, affine), torch.randn(16, 10, 16))
    assert report.violations == ()
    assert [(v.check, v.tensor) for v in report.warnings] == [
        ("missing_gradients", "relative")
    ] * count
    assert all("class token" in v.cause for v in report.warnings)


def test_queries_and_keys_that_are_both_zero(batch, inspect, only):
    """Each would have to be there for the other to get a gradient."""
    model = Scored()
    assert inspect(model, batch).healthy
    nn.init.zeros_(model.q.weight)
    assert inspect(model, batch).healthy  # one alone opens at the first step
    nn.init.zeros_(model.k.weight)
    violation = only(inspect(model, batch), "missing_gradients")
    assert violation.layer == "k"
    assert "so are those of 'q'" in violation.cause


class LowRank(nn.Module):
    """A layer with a low-rank change beside it, as two parameters of its own."""

    def __init__(self, width, std):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.a = nn.Parameter(std * torch.randn(4, width))
        self.b = nn.Parameter(torch.zeros(width, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def test_two_factors_of_zero_are_named(batch, inspect, only):
    """One of them may start at zero, as LoRA's does; both never leave it."""
    width = batch.shape[1]
    report = inspect(nn.Sequential(LowRank(width, 0.0), nn.Linear(width, 4)), batch)
    violation = only(report, "missing_gradients")
    assert (violation.layer, violation.message) == (
        "0",
        "the gradients of 'a' and 'b' are exactly zero",
    )
    healthy = inspect(nn.Sequential(LowRank(width, 1.0), nn.Linear(width, 4)), batch)
    assert healthy.violations == ()


class Scored(nn.Module):
    """Every sample looks at four parts of itself."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = x.view(-1, 4, 4)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return self.head((scores.softmax(-1) @ self.v(x)).flatten(1))


def test_deep_model_is_judged_in_linear_time(monkeypatch, inspect):
    """Where gradients underflow in many layers, the flow from each of them is not followed."""
    sweeps = []
    for name in ("forward", "backward"):
        swept = getattr(Index, name)
        monkeypatch.setattr(Index, name, lambda *a, f=swept, **k: sweeps.append(0) or f(*a, **k))
    model = nn.Sequential(*[m for _ in range(100) for m in (nn.Linear(16, 16), nn.ReLU())])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    report = inspect(model, torch.randn(16, 16))
    zero = [r.name for r in report if r.gradients is not None and r.gradients.abs_max == 0.0]
    assert len(zero) > 50
    assert len(told(report)) == 1
    before = len(sweeps)
    list(zero_gradients(MissingGradients(), report.observation))
    assert len(sweeps) - before <= 8


class Rounded(nn.Linear):
    """A linear layer whose weight `bits` makes coarse."""

    def __init__(self, bits):
        super().__init__(16, 16)
        self.bits = bits

    def forward(self, x):
        return F.linear(x, self.bits(self.weight), self.bias)


class CalledByHand(nn.Module):
    """Uses the weights of a layer that it never calls."""

    def __init__(self, bits):
        super().__init__()
        self.inner, self.bits = nn.Linear(16, 16), bits

    def forward(self, x):
        return F.linear(x, self.bits(self.inner.weight), self.inner.bias)


@pytest.mark.parametrize("kind", [Rounded, CalledByHand])
@pytest.mark.parametrize(
    ("bits", "is_fault"),
    [
        (lambda w: torch.round(7 * w) / 7, True),
        (torch.sign, True),
        (lambda w: w + (w.sign() - w).detach(), False),
        (lambda w: w * (w.abs() > 0.1), False),
    ],
    ids=["round", "sign", "straight through", "pruned"],
)
def test_weight_that_is_rounded(kind, bits, is_fault, batch, inspect, only):
    """The layer's bias learns and its weight never does."""
    report = inspect(nn.Sequential(kind(bits), nn.ReLU(), nn.Linear(16, 4)), batch)
    if not is_fault:
        assert report.healthy
        return
    violation = only(report, "missing_gradients")
    assert violation.layer == ("0" if kind is Rounded else "0.inner")
    assert (violation.tensor, "rounded" in violation.cause) == ("weight", True)


def test_blocks_that_hardly_move_the_stream_are_one_after_another(batch, inspect):
    """A scale of 1e-6 leaves the numbers as they are; a block closed for good is still named."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 1e-7))
            nn.init.normal_(self.fc.weight, std=0.01)
            nn.init.zeros_(self.fc.bias)

        def forward(self, x):
            return x + self.scale * self.fc(x)

    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 4))
    for parameter in model[1].parameters():
        nn.init.zeros_(parameter)
    found = [v.layer for v in inspect(model, batch).violations if v.check == "missing_gradients"]
    assert found == ["1.fc"]


class Summary(nn.Module):
    """Means of windows of four tokens: none of a shorter sequence."""

    def __init__(self):
        super().__init__()
        self.keys, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        windows = x.shape[1] // 4
        made = self.norm(self.keys(x))[:, : 4 * windows]
        return made.reshape(len(x), windows, 4, 16).mean(2)


class Summarised(nn.Module):
    """Tokens with the summary of windows of them behind."""

    def __init__(self):
        super().__init__()
        self.stem, self.summary, self.head = nn.Linear(16, 16), Summary(), nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.cat([x, self.summary(x)], 1).mean(1))


class Scaled(nn.Module):
    """Directions times a temperature with an upper bound, and a bias that learns."""

    def __init__(self, temperature):
        super().__init__()
        self.linear, self.bias = nn.Linear(16, 16), nn.Parameter(torch.rand(16))
        self.temperature = nn.Parameter(temperature)

    def forward(self, x):
        way = F.normalize(self.linear(x), dim=-1)
        return way * self.temperature.clamp(max=4.0).exp() + self.bias


class Decay(nn.Module):
    """A state that decays by a rate a channel, which one step alone tells nothing of."""

    def __init__(self):
        super().__init__()
        self.rate, self.bias = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = state * torch.exp(-torch.exp(self.rate)) + step * self.bias
        return state


class FirstOfSeveral(nn.Module):
    """Stacks what several layers make of the batch, and takes the first."""

    def __init__(self):
        super().__init__()
        self.parts, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.stack([part(x) for part in self.parts], 1)[:, 0])


NOTHING_TO_TELL = {
    "a part that returns an empty tensor": lambda: (Summarised(), (64, 3, 16)),
    "a temperature at its bound": lambda: (
        nn.Sequential(Scaled(torch.tensor(5.0)), nn.Linear(16, 4)), (64, 16)
    ),
    "temperatures of two heads at their bound": lambda: (
        nn.Sequential(Scaled(torch.full((16,), 5.0)), nn.Linear(16, 4)), (64, 16)
    ),
    "a recurrence of one step": lambda: (
        nn.Sequential(nn.Linear(16, 16), Decay(), nn.Linear(16, 4)), (64, 1, 16)
    ),
    "parts that nothing was made of": lambda: (FirstOfSeveral(), (64, 16)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING_TO_TELL)
def test_zeros_that_are_no_fault(name, inspect):
    """Neither a violation nor a warning."""
    model, shape = NOTHING_TO_TELL[name]()
    report = inspect(model, torch.randn(shape), torch.randint(4, (64,)), loss=F.cross_entropy)
    assert told(report) == []
    assert report.warnings == ()


def test_mean_over_one_is_seen_through_later_differences(inspect, only):
    """The advantage of one action alone is nothing, whatever constant is taken from it later."""

    class Dueling(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.advantage = nn.Linear(16, 16), nn.Linear(16, 1)
            self.value = nn.Linear(16, 1)

        def forward(self, x):
            x = F.relu(self.stem(x))
            advantage = self.advantage(x)
            return self.value(x) + (advantage - advantage.mean(1, keepdim=True)) - 1.0

    report = inspect(Dueling(), torch.randn(64, 16), torch.randn(64, 1), loss=F.mse_loss)
    violation = only(report, "missing_gradients")
    assert violation.layer == "advantage"
    assert "a mean over a dimension of size one" in violation.cause


def test_zero_scale_that_learns_nothing_is_named(batch, inspect):
    """A norm is given one value for all samples: no clamp, rounding or saturation is behind it."""
    blocks = [
        nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), Applies(lambda x: x + 0))
        for _ in range(2)
    ]
    for block in blocks:
        nn.init.zeros_(block[1].weight)
    (violation,) = told(inspect(nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 4)), batch))
    assert violation.layer == "2.0"
    assert "'2.1' behind it are all zero and get no gradient either" in violation.cause
