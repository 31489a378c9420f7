"""Where the graph is cut, and what is no cut."""

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

CHECK = "missing_gradients"


class Chain(nn.Module):
    """Three layers; `between` acts on what the second hands to the third."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.between = between

    def forward(self, x):
        return self.c(self.between(self.b(self.a(x))))


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


class Proposing(nn.Module):
    """Proposals come detached where it answers, and are learnt from a loss of their own."""

    def __init__(self):
        super().__init__()
        self.trunk, self.propose, self.head = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(16, 2)

    def forward(self, x):
        x = self.trunk(x)
        return self.head(torch.cat([x, self.propose(x).detach()], 1))


class TwoHeads(nn.Module):
    """A trunk with two heads, of which a loss may use one."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 8)
        self.used, self.other, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = F.relu(self.trunk(x))
        return self.other(h), self.used(h)


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


class Offset(nn.Module):
    """Adds what `read` makes of a parameter of its own to what its layer gives."""

    def __init__(self, read):
        super().__init__()
        self.fc, self.table = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.read = read

    def forward(self, x):
        return self.fc(x) + self.read(self.table)


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


class Branches(nn.Module):
    """A branch that is cut beside one that learns."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(16, 8), nn.Linear(16, 8)
        self.join, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.main(x) + self.join(self.side(x).detach()))


class Tied(nn.Module):
    """Most rows of its table are not named by a batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(1000, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(F.gelu(self.fc(self.embed(ids))))


class Drops(nn.Module):
    """Runs a branch, and adds its input in its place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        self.b(F.relu(self.a(x)))
        return x + x


class Tower(nn.Module):
    """Returns an earlier state beside its last."""

    def __init__(self):
        super().__init__()
        self.fc, self.last = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.fc(x)
        return self.last(h), h


class Earlier(nn.Module):
    """Reads the earlier state."""

    def __init__(self):
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.tower(x)[1])


class Summary(nn.Module):
    """Returns some steps of what it computes, or an empty tensor."""

    def __init__(self, steps, gate):
        super().__init__()
        self.values, self.gate, self.steps = nn.Linear(16, 8), gate, steps

    def forward(self, x):
        values, _ = self.values(x), self.gate(x)
        return values[:, : self.steps] if self.steps else values.new_zeros(len(x), 0, 8)


class Summed(nn.Module):
    """Joins a summary to what it reads."""

    def __init__(self, steps, gate):
        super().__init__()
        self.embed, self.head = nn.Linear(16, 8), nn.Linear(8, 2)
        self.summary = Summary(steps, gate)

    def forward(self, x):
        return self.head(torch.cat([self.embed(x), self.summary(x)], 1).mean(1))


class Frozen(nn.Linear):
    """Detaches its own weight."""

    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class Masked(nn.Module):
    """Has a mask token that a batch has no use for."""

    def __init__(self):
        super().__init__()
        self.mask, self.cls = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        self.fc = nn.Linear(16, 2)

    def forward(self, x):
        return self.fc(x + self.cls)


def squares(model):
    return model, torch.randn(64, 16), None, lambda out: out.square().mean()


def other_copy():
    model = SlowCopy()
    nn.init.normal_(model.slow.weight)
    return model


def summed(steps, gate):
    return Summed(steps, gate), torch.randn(8, 5, 16)


def offset(read):
    return nn.Sequential(Offset(read), nn.Linear(16, 4))


ALONE = ("FAULTS", "HEALTHY")
FAULTS = {
    **{
        f"cut by {name}": (lambda cut=cut: Chain(cut), "fail", "b", "cut", {"a"})
        for name, cut in {
            "detach": lambda h: h.detach(),
            "data": lambda h: h.data,
            "NumPy": lambda h: torch.from_numpy(h.detach().numpy()),
            "a list": lambda h: torch.tensor(h.tolist()),
            "detach before arithmetic": lambda h: 2 * h.detach() + 1,
            "detach before a function": lambda h: F.relu(h.detach()),
        }.items()
    },
    "an online net without gradients": (lambda: squares(OnlineOff()), "warn", "student.2"),
    "a layer in mid-net without gradients": (lambda: squares(KeysOff()), "warn", "keys.2"),
    "a trunk that is detached": (lambda: squares(Trunk()), "fail", "trunk.2"),
    "blocks that are cut": (lambda: squares(Blocks()), "warn", "blocks.0.2", "freeze 'blocks.0'"),
    "a generator's step": (lambda: squares(GeneratorStep()), "fail", "g.2"),
    "a branch that is cut": (Branches, "fail", "side"),
    "an output that is dropped": (
        lambda: nn.Sequential(nn.Linear(16, 16), Drops(), nn.Linear(16, 2)),
        "fail", "1.b", "not used", {"1.a"},
    ),
    "a gate that is not used": (lambda: summed(2, nn.Linear(16, 8)), "fail", "summary.gate"),
    "a weight that is cut": (
        lambda: nn.Sequential(nn.Linear(16, 8), Frozen(8, 2)), "fail", "1", "(weight)"
    ),
    "a copy of other weights": (other_copy, "warn", "slow"),
    "a slow copy": (SlowCopy, "warn", "slow", "freeze 'slow'"),
    "a slow copy of norms": (TunedByTeacher, "warn", "slow.norm", "freeze 'slow'"),
    "a part of an output that nobody reads": (Earlier, "warn", "tower.last", "in vain"),
    **{
        f"a parameter read by {name}": (lambda read=read: offset(read), "fail", "0", "reads")
        for name, read in {
            "data": lambda table: table.data[:],
            "detach": lambda table: table.detach().exp(),
            "argmax": lambda table: table.argmax(),
        }.items()
    },
    "a parameter read by item": (
        lambda: offset(lambda table: table.exp().sum().item()), "fail", "0", ".item()"
    ),
    "a parameter for other occasions": (Masked, "note", "", "nothing reads its trainable mask"),
    **{
        f"a parameter {name}": (lambda read=read: offset(read), "note", "0", "trainable table")
        for name, read in {
            "unread": lambda table: 0.0,
            "whose sizes are read": lambda t: float(len(t) + t.numel() + t.shape[0]),
            "whose dtype is read": lambda t: torch.zeros(16, dtype=t.dtype, device=t.device),
        }.items()
    },
    "skips in the middle left out": (lambda: Skips(2), "fail", "skip.1"),
    "a block of a stack": (EqualBlocks, "warn", "blocks.3", "freeze"),
    "a term that the loss misses": (
        lambda: Logged(misses=True), "fail", "other", "the loss leaves it out", "a term is missing"
    ),
}  # fmt: skip
HEALTHY = {
    "rows that a batch never names": lambda: (Tied(), torch.randint(0, 5, (8, 16))),
    "a part that returns nothing": lambda: summed(0, nn.Linear(16, 8)),
    "a part that returns nothing, without a gate": lambda: summed(0, nn.Identity()),
    **{
        f"a parameter {name}": lambda read=read: offset(read)
        for name, read in {
            "used": lambda table: table[:],
            "read without gradients": lambda table: torch.no_grad()(table.abs)().max(),
        }.items()
    },
    "the end of a stack": lambda: Skips(0),
    "both terms of a loss": lambda: Logged(misses=False),
}  # fmt: skip
