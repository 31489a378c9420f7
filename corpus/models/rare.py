"""Architectures less common: flows, point sets, scans, capsules, hypernetworks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.designs import (
    VQVAE,
    Flow,
    Mixture,
    Student,
    Unetlike,
    distillation,
    ink,
    likelihood,
    mixture_likelihood,
    noised_images,
    without_target,
)
from corpus.models.small import (
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
from corpus.subject import Subject, subject

# ---- normalising flow ----------------------------------------------------------------------------


def flow() -> Subject:
    return subject(Flow(), without_target(patients), likelihood)


# ---- sets of points ------------------------------------------------------------------------------


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


# ---- temporal convolutions -----------------------------------------------------------------------


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


# ---- attention by hand over an encoder -----------------------------------------------------------


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


# ---- pairs ---------------------------------------------------------------------------------------


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


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.temperature = plain(64, 64, 16), plain(64, 64, 16), 0.2

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, other = F.normalize(self.one(a), dim=1), F.normalize(self.other(b), dim=1)
        return one @ other.T / self.temperature


def towers() -> Subject:
    return subject(Towers(), views, matching)


# ---- capsules ------------------------------------------------------------------------------------


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


# ---- diffusion -----------------------------------------------------------------------------------


def diffusion() -> Subject:
    return subject(Unetlike(), noised_images, F.mse_loss)


# ---- mixers and scans ----------------------------------------------------------------------------


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


# ---- nets that make weights ----------------------------------------------------------------------


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


# ---- gates, fields, dynamics ---------------------------------------------------------------------


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


# ---- losses --------------------------------------------------------------------------------------


def mixture() -> Subject:
    return subject(Mixture(), patients, mixture_likelihood)


def student() -> Subject:
    return subject(Student(), without_target(flat), distillation)


def vq() -> Subject:
    return subject(VQVAE(), itself, lambda output, target: F.mse_loss(output[0], target)
        + F.mse_loss(output[2], output[1].detach()))  # fmt: skip


def pixels() -> Subject:
    return subject(plain(64, 16, 64), ink, F.binary_cross_entropy_with_logits)


def house() -> Subject:
    return subject(MLP(10, 32, 1), patients, F.mse_loss)


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


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 16, 4, 2, 1), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.elu(self.norm(self.up(F.elu(self.down(x))))))


def upsampler() -> Subject:
    return subject(Upsampler(), lambda n: (images(n)[0],) * 2, F.mse_loss)


RARE = [flow, pointnet, tcn, attentive, pair, towers, capsules, diffusion, mixer, scan, hyper]
RARE += [highway, modulated, dynamics, radial, mixture, student, vq, pixels, house]
RARE += [torch_attention, upsampler]
