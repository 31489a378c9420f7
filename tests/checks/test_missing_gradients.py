"""The `missing_gradients` check: where the graph is cut, and what is no cut."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import ModelHealthWarning


class Chain(nn.Module):
    """Three layers; `between` acts on what the second hands to the third."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.between = between

    def forward(self, x):
        return self.c(self.between(self.b(self.a(x))))


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.detach(),
        lambda h: h.data,
        lambda h: torch.from_numpy(h.detach().numpy()),
        lambda h: torch.tensor(h.tolist()),
        lambda h: 2 * h.detach() + 1,
        lambda h: F.relu(h.detach()),
    ],
)
def test_last_layer_before_the_cut_is_the_culprit(between, batch, inspect, only):
    """However the graph is cut, the layer before the cut is named and those behind it counted."""
    violation = only(inspect(Chain(between), batch), "missing_gradients")
    assert (violation.layer, violation.consequences) == ("b", 1)
    assert "cut" in violation.cause


class Encoder(nn.Module):
    """Runs without gradients, wherever it is called."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    @torch.no_grad()
    def forward(self, x):
        return self.fc(x)


def net(*sizes):
    """Return a plain network of several layers."""
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Teacher(nn.Module):
    """A student is fitted to what a teacher of its own weights makes of another view."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = net(16, 16, 8), net(16, 16, 8)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x + 0.1)
        return (self.student(x) - target).square().mean()


class SlowTeacher(Teacher):
    """The same by a detach."""

    def forward(self, x):
        return (self.student(x) - self.teacher(x + 0.1).detach()).square().mean()


class Discriminating(nn.Module):
    """A discriminator's step on what a generator made."""

    def __init__(self, *, beside_real):
        super().__init__()
        self.g, self.d, self.beside_real = net(16, 16, 8), net(8, 16, 1), beside_real

    def forward(self, z):
        fake = self.d(self.g(z).detach())
        return torch.cat([fake, self.d(torch.randn(len(z), 8))]) if self.beside_real else fake


@pytest.mark.parametrize(
    ("build", "layer", "part"),
    [
        (Teacher, "teacher.2", "teacher"),
        (SlowTeacher, "teacher.2", "teacher"),
        (lambda: nn.Sequential(Encoder(), nn.Linear(16, 4)), "0.fc", "0"),
        (lambda: Discriminating(beside_real=False), "g.2", "g"),
        (lambda: Discriminating(beside_real=True), "g.2", "g"),
    ],
    ids=["teacher", "detached teacher", "feature extractor", "discriminator", "beside real"],
)
def test_part_that_may_be_meant_not_to_learn_warns(build, layer, part, batch, inspect):
    """Nobody froze it, and nothing seen tells whether that is a fault: what would is said."""
    report = inspect(build(), batch)
    assert report.healthy
    (violation,) = report.warnings
    assert (violation.check, violation.layer) == ("missing_gradients", layer)
    assert f"freeze {part!r} by requires_grad_(False)" in violation.message
    assert "if it should learn" in violation.cause
    with pytest.warns(ModelHealthWarning, match="freeze"):
        report.assert_healthy()
    for text in (str(report), report.render("html"), repr(report)):
        assert layer in text
    assert report.to_dict()["warned"][0]["severity"] == "warn"
    strict = {"severity": {"missing_gradients": "fail"}}
    assert [v.layer for v in inspect(build(), batch, settings=strict).violations] == [layer]
    meant = build()
    meant.get_submodule(part).requires_grad_(False)
    report = inspect(meant, batch)
    assert report.healthy
    assert report.warnings == ()


class OnlineOff(Teacher):
    """The online net runs without gradients, and its frozen slow copy makes the targets."""

    def __init__(self):
        super().__init__()
        self.slow, self.predictor = copy.deepcopy(self.student).requires_grad_(False), net(8, 8, 8)
        self.teacher = None

    def forward(self, x):
        with torch.no_grad():
            made = self.student(x)
        return (self.predictor(made) - self.slow(x + 0.1)).square().mean()


class KeysOff(nn.Module):
    """A layer in mid-net without gradients: what it takes learns."""

    def __init__(self):
        super().__init__()
        self.stem, self.keys, self.head = net(16, 8, 8), net(8, 8, 8), net(8, 8, 2)

    def forward(self, x):
        x = self.stem(x)
        with torch.no_grad():
            keys = self.keys(x)
        return self.head(x + keys)


class Trunk(nn.Module):
    """A trunk that is detached before its head, which is one layer."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = net(16, 16, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.trunk(x).detach())


class Blocks(nn.Module):
    """Blocks in a row, the first of which is cut off."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([net(16, 16, 16), net(16, 16, 16)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x).detach())


class GeneratorStep(Discriminating):
    """A generator's step, whose discriminator is frozen, as is right: the detach is not."""

    def __init__(self):
        super().__init__(beside_real=False)
        self.d.requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "layer"),
    [
        (OnlineOff, "student.2"),
        (KeysOff, "keys.2"),
        (Trunk, "trunk.2"),
        (Blocks, "blocks.0.2"),
        (GeneratorStep, "g.2"),
    ],
)
def test_part_that_is_meant_to_learn_fails(build, layer, batch, inspect, only):
    """Its slow copy is frozen, what it takes learns, it is a part of one network, or all is."""
    report = inspect(build(), batch, loss=lambda out: out.square().mean())
    violation = only(report, "missing_gradients")
    assert (violation.layer, violation.severity) == (layer, "fail")


class Proposing(nn.Module):
    """Proposals come detached where it answers, and are learnt from a loss of their own."""

    def __init__(self):
        super().__init__()
        self.trunk, self.propose, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(16, 2)

    def forward(self, x):
        x = self.trunk(x)
        return self.head(torch.cat([x, self.propose(x).detach()], 1))


def test_model_that_answers_in_evaluation_mode(batch, inspect, only):
    """Without a loss nothing tells whether it learns the same way; a loss or training does."""
    report = inspect(Proposing().eval(), batch)
    (line,) = report._judgement.inconclusive
    assert (report.violations, line.layer) == ((), "propose")
    assert "training mode" in line.reason
    assert only(inspect(Proposing(), batch), "missing_gradients").layer == "propose"
    graded = inspect(Proposing().eval(), batch, loss=lambda out: out.square().mean())
    assert only(graded, "missing_gradients").layer == "propose"


def test_detached_branch_beside_a_healthy_one(batch, inspect, only):
    """A branch that is cut is found although the rest of the model learns."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.side = nn.Linear(16, 8), nn.Linear(16, 8)
            self.join, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.main(x) + self.join(self.side(x).detach()))

    assert only(inspect(Branches(), batch), "missing_gradients").layer == "side"


class TwoHeads(nn.Module):
    """A trunk with two heads, of which a loss may use one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 8)
        self.used, self.other, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = F.relu(self.trunk(x))
        return self.other(h), self.used(h)


def test_what_the_loss_leaves_out_by_design_is_no_fault(batch, inspect):
    """A head that the loss does not use, and one that is never called, are healthy."""
    report = inspect(TwoHeads(), batch, loss=lambda out: out[1].square().mean())
    assert report["other"].status == "unused_in_loss"
    assert report["never"].status == "not_called"
    assert report.healthy


def test_frozen_layers_are_no_fault(mlp, batch, inspect):
    """A layer that is not to be trained needs no gradient."""
    mlp.fc1.requires_grad_(False)
    assert inspect(mlp, batch).healthy
    assert inspect(mlp.requires_grad_(False), batch, backward=False).healthy


def test_unused_embedding_rows_and_tied_weights_are_no_fault(inspect):
    """Rows that the batch never names have zero gradients by design."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Embedding(1000, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 1000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(F.gelu(self.fc(self.embed(ids))))

    report = inspect(Tied(), torch.randint(0, 5, (8, 16)))
    assert report.healthy
    assert "weight" not in report["head"].parameters


def test_layer_whose_output_is_dropped_is_named(batch, inspect, only):
    """A branch that runs and is never added is no design: the output does not depend on it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            self.b(F.relu(self.a(x)))
            return x + x

    model = nn.Sequential(nn.Linear(16, 16), Block(), nn.Linear(16, 2))
    violation = only(inspect(model, batch), "missing_gradients")
    assert (violation.layer, violation.affected) == ("1.b", ("1.a",))
    assert "not used" in violation.cause


def test_part_of_an_output_that_nobody_reads_is_no_fault(batch, inspect):
    """A tower that returns several states may be read at an earlier one."""

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.last = nn.Linear(16, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.fc(x)
            return self.last(h), h

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower, self.head = Tower(), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.tower(x)[1])

    assert inspect(Reader(), batch).healthy


@pytest.mark.parametrize(
    ("steps", "gate", "culprits"),
    [(0, nn.Linear(16, 8), []), (2, nn.Linear(16, 8), ["summary.gate"]), (0, None, [])],
    ids=["nothing", "something", "no gate"],
)
def test_part_that_returns_nothing_is_not_used(steps, gate, culprits, inspect):
    """Where a part returns an empty tensor, no layer in it is missed, or a gradient of zero odd."""

    class Summary(nn.Module):
        def __init__(self):
            super().__init__()
            self.values, self.gate = nn.Linear(16, 8), gate or nn.Identity()

        def forward(self, x):
            values, _ = self.values(x), self.gate(x)
            return values[:, :steps] if steps else values.new_zeros(len(x), 0, 8)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.summary, self.head = nn.Linear(16, 8), Summary(), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(torch.cat([self.embed(x), self.summary(x)], 1).mean(1))

    report = inspect(Reader(), torch.randn(8, 5, 16))
    assert [violation.layer for violation in report.violations] == culprits


def test_two_cuts_are_two_violations(batch, inspect):
    """Branches that are cut each by itself are both named, and each with its own cause."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.left, self.right = (nn.Linear(16, 8) for _ in range(3))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.main(x) + self.left(x).detach() + self.right(x).detach())

    found = inspect(Branches(), batch).violations
    assert [(v.check, v.layer) for v in found] == [
        ("missing_gradients", "left"),
        ("missing_gradients", "right"),
    ]


def test_one_parameter_of_a_layer_that_is_cut(batch, inspect, only):
    """A weight that its own forward detaches, while the bias learns."""

    class Frozen(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.detach(), self.bias)

    violation = only(
        inspect(nn.Sequential(nn.Linear(16, 8), Frozen(8, 2)), batch), "missing_gradients"
    )
    assert (violation.layer, violation.value) == ("1", 1.0)
    assert "(weight)" in violation.message


def test_parameter_of_a_container_for_other_occasions_is_no_fault(batch, inspect):
    """A mask token that this batch has no use for is no cut."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.cls = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
            self.fc = nn.Linear(16, 2)

        def forward(self, x):
            return self.fc(x + self.cls)

    assert inspect(Masked(), batch).healthy


class Slope(nn.Module):
    """Returns how its output changes with its input, as an equation to be solved needs it."""

    def __init__(self, reads_bias):
        super().__init__()
        self.first, self.last = nn.Linear(1, 16), nn.Linear(16, 1)
        self.reads_bias = reads_bias

    def forward(self, x):
        x = x.detach().requires_grad_()
        y = self.last(self.first(x).tanh())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope + y if self.reads_bias else slope


@pytest.mark.parametrize("reads_bias", [False, True])
def test_bias_of_an_output_of_which_only_the_slope_is_fitted(reads_bias, inspect):
    """A constant that is added has no slope, so no loss of slopes depends on it."""
    report = inspect(Slope(reads_bias), torch.linspace(-1, 1, 32)[:, None])
    assert report.violations == ()
    assert ("bias" in report["last"].parameter_gradients) is reads_bias


def test_no_backward_no_violation(mlp, batch, inspect):
    """Without a backward pass nothing can be missing."""
    mlp.fc1.register_forward_hook(lambda module, args, output: output.detach())
    assert inspect(mlp, batch, backward=False).healthy
    with torch.no_grad():
        assert not inspect(mlp, batch).violations


def test_unwatched_gradients_are_not_missing(mlp, batch):
    """What was not to be observed is not judged."""
    from pytest_modelhealth import Inspector

    report = Inspector(mlp).watch("fc1", "activations").run_inspection(batch)
    assert report.healthy


class SlowCopy(nn.Module):
    """A copy that follows slowly makes the targets, without a gradient."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(16, 8)
        self.slow = copy.deepcopy(self.online)

    def forward(self, x):
        with torch.no_grad():
            target = self.slow(x + 0.1)
        return ((self.online(x) - target) ** 2).mean()


def test_slow_copy_that_is_not_frozen(batch, inspect):
    """It runs without a graph by design; one of other weights may, and is warned of."""
    model = SlowCopy()
    assert inspect(model, batch).healthy
    assert inspect(model, batch).warnings == ()
    nn.init.normal_(model.slow.weight)
    report = inspect(model, batch)
    assert report.healthy
    assert [v.layer for v in report.warnings] == ["slow"]


class Offset(nn.Module):
    """Adds what `read` makes of a parameter of its own to what its layer gives."""

    def __init__(self, read):
        super().__init__()
        self.fc, self.table = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.read = read

    def forward(self, x):
        return self.fc(x) + self.read(self.table)


@pytest.mark.parametrize(
    ("read", "is_fault"),
    [
        (lambda table: table.data[:], True),
        (lambda table: table.detach().exp(), True),
        (lambda table: table.exp().sum().item(), True),
        (lambda table: table.argmax(), True),
        (lambda table: table[:], False),
        (lambda table: 0.0, False),
        (lambda table: float(len(table) + table.numel() + table.shape[0]), False),
        (lambda table: torch.zeros(16, dtype=table.dtype, device=table.device), False),
        (lambda table: torch.no_grad()(table.abs)().max(), False),
    ],
    ids=["data", "detach", "item", "argmax", "used", "unread", "sizes", "dtype", "no_grad"],
)
def test_parameter_that_is_read_in_vain(read, is_fault, batch, inspect, only):
    """A mask token of another occasion is not read at all; what is read has to reach the output."""
    report = inspect(nn.Sequential(Offset(read), nn.Linear(16, 4)), batch)
    if not is_fault:
        assert report.healthy
        return
    violation = only(report, "missing_gradients")
    assert (violation.layer, "reads" in violation.cause) == ("0", True)


@pytest.mark.parametrize("grades", [False, True])
def test_output_without_a_graph_under_a_loss(grades, batch, inspect, only):
    """With a loss of the user's nothing can be learnt; without one nothing tells."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    forward = model.forward
    model.forward = lambda x: forward(x).argmax(1).float()
    if not grades:
        assert inspect(model, batch).verdict == "inconclusive"
        return
    report = inspect(model, batch, torch.randn(64), loss=F.mse_loss)
    violation = only(report, "missing_gradients")
    assert (violation.layer, "`argmax` at" in violation.message) == ("1", True)


class Skips(nn.Module):
    """Blocks whose skips are added up; what the last residual gives leads nowhere."""

    def __init__(self, first=0):
        super().__init__()
        self.residual = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.skip = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head, self.first = nn.Linear(16, 4), first

    def forward(self, x):
        skips = []
        for residual, skip in zip(self.residual, self.skip, strict=True):
            y = torch.tanh(x)
            x = x + residual(y)
            skips.append(skip(y))
        return self.head(sum(skips[self.first :]))


@pytest.mark.parametrize(("first", "layers"), [(0, []), (2, ["skip.1"])])
def test_end_of_a_stack_leads_nowhere(first, layers, batch, inspect):
    """The last residual is left out by design, skips in the middle are not."""
    assert [v.layer for v in inspect(Skips(first), batch).violations] == layers


class Tuned(nn.Module):
    """A frozen layer behind a norm that is tuned."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x):
        return self.linear(self.norm(x))


class TunedByTeacher(nn.Module):
    """A slow copy of which only the norms could learn."""

    def __init__(self):
        super().__init__()
        self.stem, self.online = nn.Linear(16, 16), Tuned()
        self.slow = copy.deepcopy(self.online)

    def forward(self, x):
        x = self.stem(x)
        with torch.no_grad():
            target = self.slow(x)
        return ((self.online(x + 0.1) - target) ** 2).mean()


def test_slow_copy_of_norms_alone(batch, inspect):
    """Norms that just start are the same as those that learn."""
    report = inspect(TunedByTeacher(), batch)
    assert report.healthy
    assert report.warnings == ()


class EqualBlocks(nn.Module):
    """Blocks that start equal, as `nn.TransformerEncoder` copies them, the last without a graph."""

    def __init__(self):
        super().__init__()
        block = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(4))
        self.early, self.head = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        *first, last = self.blocks
        for block in first:
            x = x + block(x).relu()
        with torch.no_grad():
            late = last(x)
        return (self.early(x) + self.head(late)).mean()


def test_block_of_a_stack_is_no_slow_copy(batch, inspect, only):
    """What it is given by its equals tells it from one that makes targets."""
    assert only(inspect(EqualBlocks(), batch), "missing_gradients").layer == "blocks.3"


class Logged(nn.Module):
    """Two heads with a loss each, which are returned for a log; the total may miss one."""

    def __init__(self, misses):
        super().__init__()
        self.stem, self.one, self.other = nn.Linear(16, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        self.misses = misses

    def forward(self, x):
        h = self.stem(x).tanh()
        losses = [head(h).square().mean() for head in (self.one, self.other)]
        total = losses[0] if self.misses else sum(losses)
        return {"loss": total, "logged": [loss.detach() for loss in losses]}


def test_a_term_that_the_loss_misses(batch, inspect, only):
    """What is cut for a log is not what should be repaired."""
    assert inspect(Logged(misses=False), batch).healthy
    violation = only(inspect(Logged(misses=True), batch), "missing_gradients")
    assert violation.layer == "other"
    assert "the loss leaves it out" in violation.message
    assert "a term is missing" in violation.cause
