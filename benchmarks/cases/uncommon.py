"""Faults in architectures less common: flows, point sets, scans, capsules, hypernetworks.

Each healthy subject is a control beside its faults.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases.designs import (
    VQVAE,
    Coupling,
    Flow,
    Mixture,
    Student,
    Unetlike,
    distillation,
    ink,
    likelihood,
    mixture_likelihood,
    noised_images,
    prices,
    without_target,
)
from benchmarks.cases.models import (
    MLP,
    flat,
    images,
    itself,
    matching,
    patients,
    plain,
    rows,
    same,
    some_digits,
    views,
    words,
)
from benchmarks.cases.subject import Shelf, Subject, subject, trained

SHELF = Shelf()
fault = SHELF.fault

MODEL = ("", "loss")
CUT = ("detach", "no_grad", "cut", "graph", "argmax", ".data", "not differentiable")
NONFINITE = ("nan", "inf", "overflow", "log", "divi", "sqrt")

# ---- normalising flow ---------------------------------------------------------------------------


def flow() -> Subject:
    return subject(Flow(), without_target(patients), likelihood)


class Unbounded(Coupling):
    """A coupling whose logarithmic scale is not bounded."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        return torch.cat([moved * (200 * scale).exp() + shift, kept], 1), scale.sum(1)


@fault("scales of a flow overflow", flow, ("couplings.1", "", "couplings.1.*"), NONFINITE)
def _(s: Subject) -> None:
    s.model.couplings[1] = Unbounded(10)
    nn.init.normal_(s.model.couplings[1].net[-1].weight)


@fault("a coupling detaches what it computes", flow, "couplings.2*", CUT)
def _(s: Subject) -> None:
    net = s.model.couplings[2].net
    nn.init.normal_(net[-1].weight, std=0.1)
    inner = net.forward
    net.forward = lambda x: inner(x).detach()


# ---- sets of points -----------------------------------------------------------------------------


def clouds(n: int) -> tuple[Tensor, Tensor]:
    """Return the inked pixels of digits as points (n, 24, 2), and labels."""
    pixels, labels = some_digits(n)
    brightest = (pixels + 0.1 * torch.rand_like(pixels)).topk(24).indices
    return torch.stack([brightest // 8, brightest % 8], -1) / 3.5 - 1.0, labels


class PointNet(nn.Module):
    """A transform of the points, features of each, their largest (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Linear(2, 4)
        nn.init.zeros_(self.transform.weight)
        self.transform.bias.data = torch.eye(2).flatten()
        self.features, self.head = plain(2, 64, 128), plain(128, 64, 10)
        self.pool: Callable[[Tensor], Tensor] = lambda x: x.amax(1)
        self.scale: Callable[[Tensor], Tensor] = same

    def forward(self, points: Tensor) -> Tensor:
        turn = self.scale(self.transform(points.mean(1))).view(-1, 2, 2)
        return self.head(self.pool(self.features(points @ turn)))


def pointnet() -> Subject:
    return subject(PointNet(), clouds, F.cross_entropy)


@fault("points pooled over the batch", pointnet, ("", "head", "head.0"), ("batch", "sample"))
def _(s: Subject) -> None:
    s.model.pool = lambda x: x.amax((0, 1)).expand(len(x), -1)


# ---- temporal convolutions ----------------------------------------------------------------------


class TCN(nn.Module):
    """Dilated causal convolutions (Bai et al. 2018), without skips."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [8, *[width] * 4]
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, 3, dilation=2**i) for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        self.head = nn.Linear(width, 10)
        self.activation = F.relu

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = self.activation(conv(F.pad(x, (2 * conv.dilation[0], 0))))
        return self.head(x[..., -1])


def tcn() -> Subject:
    return subject(TCN(), rows, F.cross_entropy)


@fault("a dilated convolution of zeros", tcn, ("convs.2", "relu_2"), ("zero", "init"))
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.convs[2].weight)
    nn.init.zeros_(s.model.convs[2].bias)


@fault("dilated convolutions drawn with std 1", tcn, "convs.*", ("large", "scale", "init"))
def _(s: Subject) -> None:
    for conv in s.model.convs:
        nn.init.normal_(conv.weight)


@fault("dead units behind clamp", tcn, ("convs.1", "relu_1"), ("bias", "dead", "flat"))
def _(s: Subject) -> None:
    s.model.activation = lambda x: x.clamp(min=0)
    s.model.convs[1].bias.data.fill_(-30.0)


# ---- attention by hand over an encoder ----------------------------------------------------------


class Attentive(nn.Module):
    """Additive attention over a recurrent encoder (Bahdanau et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(8, 32, batch_first=True)
        self.score, self.head = plain(32, 32, 1, activation=nn.Tanh), nn.Linear(32, 10)
        self.scores = self.context = same
        self.dim = 1

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.encoder(x)
        weights = self.scores(self.score(states)).softmax(self.dim)
        return self.head(self.context((weights * states).sum(1)))


def attentive() -> Subject:
    return subject(Attentive(), rows, F.cross_entropy)


@fault(
    "attention scores 3000 times too large", attentive, ("softmax", "score*"), ("score", "large")
)
def _(s: Subject) -> None:
    s.model.scores = lambda scores: scores * 3000


@fault("attention over the batch", attentive, ("softmax", ""), ("batch", "dim"))
def _(s: Subject) -> None:
    s.model.dim = 0


@fault("context of attention detached", attentive, ("encoder", "score*", "softmax"), CUT)
def _(s: Subject) -> None:
    s.model.context = lambda context: context.detach()


@fault("scores of attention masked everywhere", attentive, ("softmax", ""), (*NONFINITE, "mask"))
def _(s: Subject) -> None:
    s.model.scores = lambda scores: scores.masked_fill(
        torch.arange(len(scores))[:, None, None] == 3, -math.inf
    )


# ---- pairs --------------------------------------------------------------------------------------


class Pair(nn.Module):
    """The distance of two samples through one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = plain(64, 64, 16)
        self.distance: Callable[[Tensor, Tensor], Tensor] = lambda a, b: (a - b).norm(dim=1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.distance(self.encoder(a), self.encoder(b))


def pulled(distance: Tensor) -> Tensor:
    return (distance**2).mean() + F.relu(1 - distance.roll(1)).mean()


def pair() -> Subject:
    return subject(Pair(), views, pulled)


@fault("root of a distance of zero", pair, ("encoder*", ""), NONFINITE)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0].clone())
    s.model.distance = lambda a, b: ((a - b) ** 2).sum(1).sqrt()


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.temperature = plain(64, 64, 16), plain(64, 64, 16), 0.2

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, other = F.normalize(self.one(a), dim=1), F.normalize(self.other(b), dim=1)
        return one @ other.T / self.temperature


def towers() -> Subject:
    return subject(Towers(), views, matching)


@fault(
    "temperature of 1e-4", towers, (*MODEL, "one*", "other*"), ("temperature", "large", "logits")
)
def _(s: Subject) -> None:
    s.model.temperature = 1e-4


@fault("one tower without activations of its own", towers, "other*", ("zero", "dead", "init"))
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.other[0].weight)
    nn.init.constant_(s.model.other[0].bias, -0.1)


# ---- capsules -----------------------------------------------------------------------------------


class Capsules(nn.Module):
    """Routing by agreement between small vectors (Sabour et al. 2017)."""

    def __init__(self, inputs: int = 8, outputs: int = 10, width: int = 8) -> None:
        super().__init__()
        self.primary, self.width = nn.Linear(64, inputs * width), width
        self.votes = nn.Parameter(0.1 * torch.randn(inputs, outputs, width, width))
        self.sharpness, self.eps, self.mask = 1.0, 1e-6, same

    def squash(self, x: Tensor) -> Tensor:
        squares = (x**2).sum(-1, keepdim=True)
        return squares / (1 + squares) * x / (squares + self.eps).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        capsules = self.squash(self.mask(self.primary(x)).view(len(x), -1, self.width))
        votes = torch.einsum("nid,iode->nioe", capsules, self.votes)
        agreement = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            out = self.squash((agreement.softmax(2)[..., None] * votes).sum(1))
            agreement = agreement + self.sharpness * (votes * out[:, None]).sum(-1)
        return 10 * (out**2).sum(-1)


def capsules() -> Subject:
    return subject(Capsules(), flat, F.cross_entropy)


@fault("a capsule of length zero, and no epsilon", capsules, ("", "primary"), NONFINITE)
def _(s: Subject) -> None:
    s.model.eps = 0.0
    s.model.mask = lambda x: x * (torch.arange(64) >= 8)


@fault("votes of capsules all equal", capsules, ("", "softmax*"), ("same", "equal", "symmetr"))
def _(s: Subject) -> None:
    nn.init.constant_(s.model.votes, 0.1)


# ---- diffusion ----------------------------------------------------------------------------------


def diffusion() -> Subject:
    return subject(Unetlike(), noised_images, F.mse_loss)


@fault("epsilon of a group norm is 100", diffusion, ("norm",), ("eps",))
def _(s: Subject) -> None:
    s.model.norm.eps = 100.0


@fault(
    "noise predicted by a net that drops its input",
    diffusion,
    ("conv1",),
    ("constant", "same", "equal", "zero", "drop"),
)
def _(s: Subject) -> None:
    nn.init.normal_(s.model.out.weight, std=0.1)
    conv = s.model.conv1.forward
    s.model.conv1.forward = lambda x: conv(x * 0)


# ---- mixers and scans ---------------------------------------------------------------------------


class Mixer(nn.Module):
    """Mixes tokens, then channels (Tolstikhin et al. 2021)."""

    def __init__(self, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(plain(8, 32, 8, activation=nn.GELU) for _ in range(depth))
        self.channels = nn.ModuleList(
            plain(width, 64, width, activation=nn.GELU) for _ in range(depth)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(self.dropout(x.mean(1)))


def mixer() -> Subject:
    return subject(Mixer(), rows, F.cross_entropy)


@fault("dropout of everything", mixer, ("dropout", "head", ""), ("drop", "zero"))
def _(s: Subject) -> None:
    s.model.dropout.p = 1.0


@fault("token mixing of NaN from a checkpoint", mixer, "tokens.1*", NONFINITE)
def _(s: Subject) -> None:
    s.model.tokens[1][2].weight.data[0, 3] = math.nan


@fault("embedding of the patches 1000 times too large", mixer, "stem", ("large", "scale", "init"))
def _(s: Subject) -> None:
    s.model.stem.weight.data *= 1000


class Scan(nn.Module):
    """A diagonal linear state space, run as a loop (Gu et al. 2022)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, width), nn.Linear(width, 10)
        self.log_decay = nn.Parameter(torch.linspace(-3, 0, width))
        self.sign = -1.0

    def forward(self, x: Tensor) -> Tensor:
        decay, state = (self.sign * self.log_decay.exp()).exp(), x.new_zeros(len(x), 32)
        for step in self.inward(x).unbind(1):
            state = decay * state + step
        return self.outward(state)


def long(n: int) -> tuple[Tensor, Tensor]:
    sequences, labels = rows(n)
    return sequences.repeat(1, 8, 1), labels


def scan() -> Subject:
    return subject(Scan(), long, F.cross_entropy)


@fault(
    "a state that grows instead of decaying",
    scan,
    ("", "outward"),
    ("grow", "large", "overflow", "magnif"),
)
def _(s: Subject) -> None:
    s.model.sign = 1.0


# ---- nets that make weights ---------------------------------------------------------------------


class Hyper(nn.Module):
    """A net that makes the weights of another from a code (Ha et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(1, 8)), plain(8, 32, 64 * 32)
        self.head, self.weights = nn.Linear(32, 10), lambda w: 0.5 * w

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(self.make(self.code)).view(32, 64)
        return self.head(torch.tanh(F.linear(x, weights)))


def hyper() -> Subject:
    return subject(Hyper(), flat, F.cross_entropy)


@fault(
    "made weights 300 times too large", hyper, ("tanh", "", "make*"), ("large", "flat", "magnif")
)
def _(s: Subject) -> None:
    s.model.weights = lambda w: 300 * w


@fault("made weights copied through .data", hyper, "make*", CUT)
def _(s: Subject) -> None:
    s.model.weights = lambda w: w.data


# ---- gates, fields, dynamics --------------------------------------------------------------------


class Highway(nn.Module):
    """Transforms behind gates (Srivastava et al. 2015)."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.transforms = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for transform, gate in zip(self.transforms, self.gates, strict=True):
            open_ = torch.sigmoid(gate(x))
            x = open_ * torch.relu(transform(x)) + (1 - open_) * x
        return self.head(x)


def highway() -> Subject:
    return subject(Highway(), flat, F.cross_entropy)


@fault("highway gates closed at -40", highway, ("gates.1", "sigmoid_1"), ("bias", "flat"))
def _(s: Subject) -> None:
    nn.init.constant_(s.model.gates[1].bias, -40.0)


class Modulated(nn.Module):
    """Features scaled and shifted by a condition (Perez et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.condition = nn.Linear(64, 32), nn.Linear(64, 64)
        self.head, self.factor = plain(32, 32, 10), lambda gamma: 1 + gamma

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta = self.condition(x).chunk(2, 1)
        return self.head(self.factor(gamma) * self.stem(x) + beta)


def modulated() -> Subject:
    return subject(Modulated(), flat, F.cross_entropy)


@fault(
    "features scaled by a condition of zero",
    modulated,
    ("condition", "", "head", "head.0"),
    ("zero", "same", "constant"),
)
def _(s: Subject) -> None:
    s.model.factor = same
    nn.init.zeros_(s.model.condition.weight)
    nn.init.zeros_(s.model.condition.bias)


class Dynamics(nn.Module):
    """Euler steps of a learnt vector field."""

    def __init__(self, step: float = 0.1) -> None:
        super().__init__()
        self.stem, self.head, self.step = nn.Linear(64, 32), nn.Linear(32, 10), step
        self.field = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(10):
            x = x + self.step * self.field(x)
        return self.head(x)


def dynamics() -> Subject:
    return subject(Dynamics(), flat, F.cross_entropy)


@fault("Euler steps of 20", dynamics, ("field", "", "head"), ("grow", "magnif", "large", "explod"))
def _(s: Subject) -> None:
    s.model.step = 20.0


class Radial(nn.Module):
    """Gaussian features around centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.head = nn.Parameter(torch.randn(32, 64)), nn.Linear(32, 10)
        self.width = 8.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(-((torch.cdist(x, self.centres) / self.width) ** 2)))


def radial() -> Subject:
    return subject(Radial(), flat, F.cross_entropy)


@fault(
    "radial features too narrow to see a sample", radial, ("", "head"), ("zero", "same", "equal")
)
def _(s: Subject) -> None:
    s.model.width = 0.1


# ---- losses -------------------------------------------------------------------------------------


def mixture() -> Subject:
    return subject(Mixture(), patients, mixture_likelihood)


@fault("logarithm of a spread that may be negative", mixture, MODEL, NONFINITE)
def _(s: Subject) -> None:
    def loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
        weight, mean, spread = output
        density = -0.5 * ((target - mean) / spread) ** 2 - spread.log()
        return -torch.logsumexp(weight + density, 1).mean()

    s.loss = loss


def student() -> Subject:
    return subject(Student(), without_target(flat), distillation)


@fault(
    "probabilities into kl_div", student, (*MODEL, "student*", "softmax*"), ("log", "probabilit")
)
def _(s: Subject) -> None:
    s.loss = lambda output: F.kl_div(
        output[0].softmax(1), output[1].softmax(1), reduction="batchmean"
    )


@fault(
    "loss of distillation on the teacher twice",
    student,
    (*MODEL, "student*"),
    ("output", "loss", "graph"),
)
def _(s: Subject) -> None:
    s.loss = lambda output: F.mse_loss(output[1], output[1] + 1.0)


def vq() -> Subject:
    return subject(VQVAE(), itself, lambda output, target: F.mse_loss(output[0], target)
        + F.mse_loss(output[2], output[1].detach()))  # fmt: skip


@fault("codes without a straight-through gradient", vq, "encoder*", CUT)
def _(s: Subject) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model = s.model
        z = model.encoder(x)
        code = model.codes(torch.cdist(z, model.codes.weight).argmin(1))
        return model.decoder(code), z, code

    s.model.forward = forward


def pixels() -> Subject:
    return subject(plain(64, 16, 64), ink, F.binary_cross_entropy_with_logits)


@fault("binary targets of 0 and 255", pixels, (*MODEL, "2"), ("target", "range", "255", "[0, 1]"))
def _(s: Subject) -> None:
    s.target = s.target * 255


def house() -> Subject:
    return subject(MLP(10, 32, 1), patients, F.mse_loss)


@fault("targets of some hundred thousand", house, (*MODEL, "head"), ("target", "standardi"))
def _(s: Subject) -> None:
    s.inputs, s.target = prices(64)


@fault("loss weight of zero", house, MODEL, ("zero", "constant"))
def _(s: Subject) -> None:
    s.loss = lambda output, target: 0.0 * F.mse_loss(output, target)


@fault("mask that selects no sample", house, MODEL, ("zero", "mask", "constant"))
def _(s: Subject) -> None:
    s.loss = lambda output, target: ((output - target) ** 2 * torch.zeros_like(target)).sum()


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(18, 32), nn.Linear(32, 10)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


def torch_attention() -> Subject:
    return subject(TorchAttention(), words, F.cross_entropy)


@fault(
    "projections of torch's attention 100 times too large",
    torch_attention,
    "attention*",
    ("large", "scale", "score"),
)
def _(s: Subject) -> None:
    s.model.attention.in_proj_weight.data *= 100


@fault("projections of torch's attention zero", torch_attention, "attention*", ("zero", "init"))
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.attention.in_proj_weight)


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 16, 4, 2, 1), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.elu(self.norm(self.up(F.elu(self.down(x))))))


def upsampler() -> Subject:
    return subject(Upsampler(), lambda n: (images(n)[0],) * 2, F.mse_loss)


@fault("transposed convolution of zeros before a norm", upsampler, ("up", "norm"), ("zero", "init"))
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.up.weight)
    nn.init.zeros_(s.model.up.bias)


@fault(
    "exponential units held at their floor", upsampler, ("down", "elu"), ("bias", "dead", "flat")
)
def _(s: Subject) -> None:
    s.model.down.bias.data.fill_(-40.0)


HEALTHY = [flow, pointnet, tcn, attentive, pair, towers, capsules, diffusion, mixer, scan, hyper]
HEALTHY += [highway, modulated, dynamics, radial, mixture, student, vq, pixels, house]
HEALTHY += [torch_attention, upsampler]
for _healthy in HEALTHY:
    SHELF.control(f"{_healthy.__name__}, initialised", _healthy)
    SHELF.control(f"{_healthy.__name__}, trained", lambda made=_healthy: trained(made))
