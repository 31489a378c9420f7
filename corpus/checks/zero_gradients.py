"""Gradients of exactly zero: what stops them for good, and closed gates that soon open."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Net

CHECK = "missing_gradients"


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


class Modulated(nn.Module):
    """A condition of zeros shifts what goes into a branch, and gates what comes of it."""

    def __init__(self, between):
        super().__init__()
        self.modulate, self.between = zero_linear(16, 32), between
        self.branch, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        shift, gate = self.modulate(x).chunk(2, 1)
        return self.head(x + self.between(gate) * self.branch(x + shift))


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


class Conditioned(nn.Module):
    """Tokens weighted by a mask of the batch."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.extra = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x, mask):
        return self.head(self.token(x) + mask * self.extra(x))


class OwnWeight(nn.Module):
    """A layer that makes something of its weight before it uses it."""

    def __init__(self, make):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), zeros(16)
        self.make = make

    def forward(self, x):
        return F.linear(x, self.make(self.weight), self.bias)


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


class Detector(nn.Module):
    """Classes and boxes of what a trunk sees."""

    def __init__(self):
        super().__init__()
        self.trunk, self.classes, self.boxes = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x):
        h = self.trunk(x)
        return self.classes(h), self.boxes(h)


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


class LowRank(nn.Module):
    """A layer with a low-rank change beside it, as two parameters of its own."""

    def __init__(self, width, std):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.a = nn.Parameter(std * torch.randn(4, width))
        self.b = nn.Parameter(torch.zeros(width, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


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


class Block(nn.Module):
    """Two layers beside a stream, which a backward of zeros cuts off."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + Zeros.apply(self.fc2(self.fc1(x).tanh()))


class Two(nn.Module):
    """Two outputs of a trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.main, self.aside = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        h = self.trunk(x)
        return self.main(h), self.aside(h)


class Experts(nn.Module):
    """Four experts, of which two get samples."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self, x):
        out = torch.zeros(len(x), 8)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(len(x)) % 2 == index
            out = out.index_add(0, rows.nonzero()[:, 0], expert(x[rows]))
        return out


class ZeroBias(nn.Module):
    """A backward of zeros before a layer whose bias is zero."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        return self.head(self.b(Zeros.apply(self.act(self.a(x)))))


class Sliced(nn.Module):
    """Heads of which the first is sliced away."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.differs = nn.Linear(16, 16) if trunk else nn.Identity(), trunk
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)
        )

    def forward(self, x):
        h = self.trunk(x)
        outputs = [head(h * (1 + i * self.differs)) for i, head in enumerate(self.heads)]
        return torch.stack(outputs, 1)[:, 1:]


class Rounds(nn.Module):
    """A layer beside a stream, rounded or not."""

    def __init__(self, rounds):
        super().__init__()
        self.fc, self.rounds = nn.Linear(16, 16), rounds

    def forward(self, x):
        h = self.fc(x)
        return x + (torch.round(h) if self.rounds else h)


class Denoiser(nn.Module):
    """Draws its times itself, and ends in a layer of zeros."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), zero_linear(32, 16))

    def forward(self, x):
        return self.net(x * torch.rand(len(x), 1))


class Tiny(nn.Module):
    """A layer times 1e-7 beside a stream."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(16, 16), nn.Parameter(torch.full((16,), 1e-7))
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return x + self.scale * self.fc(x)


class Dueling(nn.Module):
    """The advantage of one action alone."""

    def __init__(self):
        super().__init__()
        self.stem, self.advantage = nn.Linear(16, 16), nn.Linear(16, 1)
        self.value = nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        advantage = self.advantage(x)
        return self.value(x) + (advantage - advantage.mean(1, keepdim=True)) - 1.0


def zeroed(model, *names):
    """Return the model with all parameters of these parts at zero."""
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
    return model


def frozen(model, name):
    """Return the model with a part that does not learn."""
    model.get_submodule(name).requires_grad_(False)
    return model


def closed_norms():
    """Return blocks of a layer and a norm, whose scale is zero."""
    blocks = [
        nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Identity())
        for _ in range(2)
    ]
    for block in blocks:
        nn.init.zeros_(block[1].weight)
    return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Linear(16, 4))


def half_closed():
    """Return a gate that a layer makes, of which the other part is open."""
    gate = zero_linear(16, 32)
    nn.init.normal_(gate.weight[:16], std=0.1)
    return Branch(lambda m, h: h * m.gate(h.detach()).chunk(2, -1)[1], gate=gate)


def graded(model, loss, shape=(64, 16), target=None):
    """Return the model with a batch and a loss."""
    return model, torch.randn(shape), target, loss


def classified(model, *shape):
    return graded(model, F.cross_entropy, shape, torch.randint(4, (64,)))


def left_out(m, h):
    """Leave a branch out for all samples, by a mask."""
    return torch.where(torch.ones(len(h), 1) > 2.0, h, 0.0)


def diffused(model):
    return model, (torch.randn(16, 5, 8), torch.randn(16, 4))


def with_head(model):
    return nn.Sequential(model, nn.ReLU(), nn.Linear(16, 4))


GATES = {
    "a number that is small": lambda: Branch(lambda m, h: h * 1e-6),
    "a buffer of ones": lambda: Branch(lambda m, h: m.gate * h, gate=torch.ones(16)),
    "ReZero": lambda: Branch(lambda m, h: m.gate * h, gate=zeros(1)),
    "LayerScale": lambda: Branch(lambda m, h: h * m.gate, gate=zeros(16)),
    "SkipInit": lambda: Branch(lambda m, h: m.gain * F.gelu(h), gain=zeros(())),
    "tanh gate": lambda: Branch(lambda m, h: torch.tanh(m.gate) * h, gate=zeros(1)),
    "one minus a gate of one": lambda: Branch(
        lambda m, h: (1 - m.gate) * h, gate=nn.Parameter(torch.ones(1))
    ),
    "last layer of a branch": lambda: Branch(lambda m, h: m.last(h), last=zero_linear(16, 16)),
    "LoRA": lambda: Branch(
        lambda m, h: h @ m.a @ m.b + m.last(h),
        a=nn.Parameter(torch.randn(16, 2)), b=zeros(2, 16), last=zero_linear(16, 16),
    ),
    "ControlNet": lambda: Branch(
        lambda m, h: m.out(F.gelu(m.inner(h + m.into(h)))),
        into=zero_linear(16, 16), inner=nn.Linear(16, 16), out=zero_linear(16, 16),
    ),
    "squeeze and excitation of zeros": lambda: Branch(
        lambda m, h: torch.sigmoid(m.squeeze(z := m.last(h))) * z,
        last=zero_linear(16, 16), squeeze=nn.Linear(16, 16),
    ),
    "Fixup": lambda: Branch(
        lambda m, h: m.scale * m.last(h) + m.bias,
        last=zero_linear(16, 16, bias=False), scale=nn.Parameter(torch.ones(1)), bias=zeros(1),
    ),
    "a gate inside a closed branch": lambda: Branch(
        lambda m, h: m.outer * (h + m.inner * m.more(h)),
        outer=zeros(1), inner=zeros(1), more=nn.Linear(16, 16),
    ),
    "normalised to a scale of zero": lambda: Branch(
        lambda m, h: m.norm(h), norm=zeroed(nn.BatchNorm1d(16), "")
    ),
    "straight through": lambda: Branch(lambda m, h: h + (h.round() - h).detach()),
    "a gate that a layer makes": lambda: Branch(
        lambda m, h: h * m.gate(h.detach()), gate=zero_linear(16, 16)
    ),
    "a part of what a layer makes": half_closed,
    "weights that are standardised times a gain": lambda: Branch(
        lambda m, h: m.last(h), last=Standard()
    ),
    "weights that are normalised to a gain": lambda: Branch(
        lambda m, h: m.last(h),
        last=no_gain(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
    ),
}  # fmt: skip
"""What opens at the first step, whatever it is made of: a parameter, a layer, what either makes."""


def of_one_key():
    """Return an attention over sets of one, as behind a pooling that leaves a single vector."""

    def forward(m, x):
        x = m.stem(x)[:, None]
        return m.head((x + (m.q(x) @ m.k(x).mT / 4).softmax(-1) @ m.v(x))[:, 0])

    return Net(forward, stem=(16, 16), q=(16, 16), k=(16, 16), v=(16, 16), head=(16, 4))


WRITTEN = "lambda m, h"
"""Stands in the line that is named."""

ALONE = ("FAULTS", "HEALTHY")
FAULTS = {
    "a number of zero": (
        lambda: Branch(lambda m, h: h * 0.0), "fail", "branch", "by '0'", WRITTEN
    ),
    "a buffer of zeros": (
        lambda: Branch(lambda m, h: m.gate * h, gate=torch.zeros(16)),
        "fail", "branch", "by 'gate'", WRITTEN,
    ),
    "a buffer of zeros times a draw": (
        lambda: Branch(
            lambda m, h: h * (m.gate * torch.rand(len(h), 1)), gate=torch.zeros(16)
        ),
        "fail", "branch", "`mul`", WRITTEN,
    ),
    "a frozen gate": (
        lambda: Branch(lambda m, h: m.gate * h, gate=zeros(16, learns=False)),
        "fail", "branch", "by 'gate'", WRITTEN,
    ),
    "a frozen layer": (
        lambda: Branch(lambda m, h: m.last(h), last=zero_linear(16, 16).requires_grad_(False)),
        "fail", "branch", "'last'",
    ),
    "two gates of zero": (
        lambda: Branch(lambda m, h: m.a * (m.b * h), a=zeros(16), b=zeros(1)),
        "fail", "branch", "by 'b'", WRITTEN,
    ),
    "a gate at zero behind a layer of zeros": (
        lambda: Branch(lambda m, h: m.gate * m.last(h), gate=zeros(16), last=zero_linear(16, 16)),
        "fail", "last", "by 'last'", WRITTEN,
    ),
    "a branch that is rounded": (
        lambda: Branch(lambda m, h: h.round()), "fail", "branch", "`round`", WRITTEN
    ),
    "a sign": (lambda: Branch(lambda m, h: torch.sign(h)), "fail", "branch", "`sign`", WRITTEN),
    "floored": (
        lambda: Branch(lambda m, h: torch.floor(4 * h) / 4), "fail", "branch", "`floor`", WRITTEN
    ),
    "a gate that what comes after it holds at zero": (
        lambda: Branch(lambda m, h: Zeros.apply(m.gate * h), gate=zeros(1)), "fail", "branch"
    ),
    "an adaptive gate that is frozen": (
        lambda: diffused(frozen(DiT(nn.Linear(16, 8)), "blocks.1.adaptive.1")),
        "warn", "blocks.1.proj", "by 'blocks.1.adaptive.1'", "gate * self.proj",
    ),
    "one of two towers that is rounded": (
        lambda: Towers(torch.tanh, torch.round), "fail", "right.2", {"right.0"}
    ),
    "one of two towers times zero": (
        lambda: Towers(torch.tanh, lambda h: 0 * h), "fail", "right.2", {"right.0"}
    ),
    "one of two towers without a backward": (
        lambda: Towers(torch.tanh, Zeros.apply), "fail", "right.2", {"right.0"}
    ),
    "layers behind one another": (
        lambda: nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 4)),
        "fail", "2.fc2", "`zeros`", {"1.fc1", "1.fc2", "2.fc1"},
    ),
    "a gate of zeros that is detached": (
        lambda: Modulated(torch.Tensor.detach),
        "fail", "branch", "by 'modulate'",
        "self.between(gate) * self.branch",
    ),
    "the first of several levels": (
        lambda: Levels(lambda y: y[:, 0]), "warn", "row.3", "`stack` at", {"row.1", "row.2"}
    ),
    "one step of a recurrence": (lambda: Cell(1), "warn", "forget", "by 'zeros_like'"),
    "a loss weight of zero": (
        lambda: graded(Two(), lambda out: out[0].square().mean() + 0.0 * out[1].square().mean()),
        "warn", "aside", "by '0'",
    ),
    "a layer that is touched only to be touched": (
        lambda: Branch(lambda m, h: 0.0 * h.sum()), "fail", "branch", "sum"
    ),
    "what the batch masks": (
        lambda: (Conditioned(), (torch.randn(64, 16), torch.zeros(64, 1))),
        "warn", None, "this batch alone",
    ),
    **{
        f"a weight that is {name}": (
            lambda make=make: with_head(OwnWeight(make)), "fail", "0", word, "weight", ...
        )
        for name, make, word in (
            ("rounded", torch.round, "rounding"),
            ("sent through a backward of zeros", Zeros.apply, "a backward"),
            ("clamped", lambda w: w.clamp(5, 6), "a clamp"),
        )
    },
    "a softmax over one choice": (
        lambda: nn.Sequential(Router(0.0), nn.Linear(4, 2)), "warn", None, "`masked_fill`"
    ),
    "a backward of zeros before a bias of zero": (ZeroBias, "fail", "a", "'b'"),
    "one block of a stack that is rounded": (
        lambda: nn.Sequential(Rounds(False), Rounds(True), Rounds(False), nn.Linear(16, 2)),
        "fail", "1.fc",
    ),
    "a loss that every sample satisfies": (
        lambda: graded(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)),
                       lambda out: (out - 100.0).relu().mean()),
        "unsure", None, "exactly 0",
    ),
    "boxes of a batch without objects": (
        lambda: graded(Detector(), lambda out: (out[0] + 0.0 * out[1][:, :3]).pow(2).mean()),
        "warn", "boxes",
    ),
    **{
        f"a branch that is left out for all {samples} samples": (
            lambda samples=samples: (Branch(left_out), torch.randn(samples, 16)),
            severity, "branch", *words,
        )
        for samples, severity, *words in (
            (3, "warn", "this batch alone"), (16, "warn", "`where`"),
        )
    },
    **{
        f"positions of what is not read{', a norm with a scale' * affine}": (
            lambda affine=affine: (ClassToken(lambda x: x[:, 0], affine), torch.randn(16, 10, 16)),
            "warn", None, "nothing reads that part", "relative",
        )
        for affine in (True, False)
    },
    "queries and keys that are both zero": (
        lambda: zeroed(Scored(), "q", "k"), "fail", "k", "`bmm`", {"q"}
    ),
    "keys of which each query has one": (
        of_one_key, "warn", "k", "over a single value", {"q"}
    ),
    "two factors of zero": (
        lambda: nn.Sequential(LowRank(16, 0.0), nn.Linear(16, 4)),
        "fail", "0", "exactly zero, and still is after 3 steps",
    ),
    **{
        f"a weight that its {place} rounds by {name}": (
            lambda kind=kind, bits=bits: with_head(kind(bits)),
            "fail", layer, "rounding", "weight", ...,
        )
        for kind, place, layer in ((Rounded, "layer", "0"), (CalledByHand, "caller", "0.inner"))
        for name, bits in (("steps", lambda w: torch.round(7 * w) / 7), ("its sign", torch.sign))
    },
    "a block that is closed for good in a stream that hardly moves": (
        lambda: zeroed(nn.Sequential(Tiny(), Tiny(), Tiny(), nn.Linear(16, 4)), "1"),
        "fail", "1.fc",
    ),
    "a mean over one": (
        lambda: graded(Dueling(), F.mse_loss, target=torch.randn(64, 1)),
        "warn", "advantage", "`mean` at",
    ),
    "a zero scale that learns nothing": (
        closed_norms, "fail", "1.0", "'1.1'", ...
    ),
}  # fmt: skip
FAULTS |= {
    name: (build, "warn", layer, "nothing reads that part")
    for name, layer, build in (
        ("the first of two heads", "second", lambda: Heads(lambda y: y[:, 0])),
        ("the first of two heads, unbound", "second", lambda: Heads(lambda y: y.unbind(1)[0])),
        ("the last level but one", "row.3", lambda: Levels(lambda y: y[:, -2])),
        ("experts by a mask", None, lambda: Weighted(False)),
        ("the head of three that is sliced away", "heads.0.2", lambda: Sliced(False)),
    )
}
"""What is exact, and what a design may mean: what is put together and not read, or masked."""
HEALTHY = {
    **GATES,
    "a diffusion transformer": lambda: diffused(DiT(nn.Linear(16, 8))),
    "a diffusion transformer that ends in zeros": lambda: diffused(DiT(zero_linear(16, 8))),
    "a gate of zeros": lambda: Modulated(lambda gate: gate),
    "the last of several levels": lambda: Levels(lambda y: y[:, -1]),
    "all levels": lambda: Levels(lambda y: y[:, 0] + y.mean(1)),
    "experts by their scores": lambda: Weighted(True),
    "two steps of a recurrence": lambda: Cell(2),
    "a loss weight of one": lambda: graded(
        Two(), lambda out: out[0].square().mean() + out[1].square().mean()
    ),
    "a batch without a mask": lambda: (Conditioned(), (torch.randn(64, 16), torch.ones(64, 1))),
    "a weight and zero times it": lambda: with_head(OwnWeight(lambda w: w + 0 * w)),
    "a weight by its norm": lambda: with_head(OwnWeight(lambda w: w / w.norm())),
    "a softmax over some choices": lambda: nn.Sequential(Router(1.0), nn.Linear(4, 2)),
    "an idle expert": Experts,
    "boxes of a batch with objects": lambda: graded(
        Detector(), lambda out: (out[0] + out[1][:, :3]).pow(2).mean()
    ),
    "noise and a last layer of zeros": lambda: graded(
        Denoiser(), F.mse_loss, target=torch.randn(64, 16)
    ),
    "positions of tokens that are all read": lambda: (
        ClassToken(lambda x: x.mean(1), True), torch.randn(16, 10, 16)
    ),
    "queries and keys": Scored,
    "queries of zero alone": lambda: zeroed(Scored(), "q"),
    "one factor of zero": lambda: nn.Sequential(LowRank(16, 1.0), nn.Linear(16, 4)),
    **{
        f"a weight {name}, by {kind.__name__}": lambda kind=kind, bits=bits: with_head(kind(bits))
        for kind in (Rounded, CalledByHand)
        for name, bits in (
            ("rounded straight through", lambda w: w + (w.sign() - w).detach()),
            ("that is pruned", lambda w: w * (w.abs() > 0.1)),
        )
    },
    "a part that returns an empty tensor": lambda: classified(Summarised(), 64, 3, 16),
    "a temperature at its bound": lambda: classified(
        nn.Sequential(Scaled(torch.tensor(5.0)), nn.Linear(16, 4)), 64, 16
    ),
    "temperatures of two heads at their bound": lambda: classified(
        nn.Sequential(Scaled(torch.full((16,), 5.0)), nn.Linear(16, 4)), 64, 16
    ),
    "a recurrence of one step": lambda: classified(
        nn.Sequential(nn.Linear(16, 16), Decay(), nn.Linear(16, 4)), 64, 1, 16
    ),
}  # fmt: skip
