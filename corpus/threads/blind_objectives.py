"""Published objectives that look like what threads report: each is meant, and nothing is wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from corpus.cards import Shelf
from corpus.models.parts import (
    follow,
    frozen,
    lookalikes_of,
    perceptron,
    time_features,
    unlabelled_flat,
)
from corpus.models.small import citations, flat, itself, patients, views
from corpus.subject import subject

SHELF = Shelf("threads", "blind")
design = lookalikes_of(SHELF)


def returned(output: Tensor) -> Tensor:
    return output.mean()


# ---- agents --------------------------------------------------------------------------------------


def played(n: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return states, and the actions taken, how likely they were, and what they brought."""
    states, labels = flat(n)
    actions = torch.randint(0, 4, (n,))
    before = math.log(0.25) + 0.2 * torch.randn(n)
    return states, (actions, before, (actions == labels % 4).float() * 2 - 0.5)


def clipped(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    (logits, value), (actions, before, reward) = output, target
    policy = Categorical(logits=logits)
    advantage = (reward - value).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    ratio = (policy.log_prob(actions) - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    missed = (reward - value).pow(2)
    return (0.5 * missed - gain).mean() - 0.01 * policy.entropy().mean()


@design("PPO: one trunk for policy and value", played, clipped, 48)
class Proximal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = (
            perceptron(64, 48, 32),
            nn.Linear(32, 4),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.policy(x), self.value(x)[:, 0]


@design("deterministic policy taught through a frozen critic", unlabelled_flat, lambda q: -q.mean())
class Deterministic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = perceptron(64, 48, 4), frozen(perceptron(68, 48, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(torch.cat([x, self.actor(x).tanh()], 1))


def quantile_loss(output: Tensor, target: Tensor) -> Tensor:
    at = (torch.arange(8) + 0.5) / 8
    missed = target[:, None, :] - output[:, :, None]  # each quantile with each draw, as is meant
    return (
        (at[:, None] - (missed.detach() < 0).float()).abs()
        * F.smooth_l1_loss(missed, torch.zeros_like(missed), reduction="none")
    ).mean()


@design(
    "quantiles of a return: each against each draw of the target",
    lambda n: (flat(n)[0], torch.randn(n, 8)),
    quantile_loss,
)
def quantiles() -> nn.Module:
    return perceptron(64, 48, 8)


# ---- all pairs of samples ------------------------------------------------------------------------


def discrepancy(output: Tensor) -> Tensor:
    wanted = torch.randn(64, output.shape[1])

    def near(a: Tensor, b: Tensor) -> Tensor:
        return (-(a[:, None] - b).pow(2).sum(-1) / 16).exp().mean()

    return near(output, output) - 2 * near(output, wanted) + near(wanted, wanted)


@design("maximum mean discrepancy: all pairs of samples", unlabelled_flat, discrepancy)
def encoder() -> nn.Module:
    return perceptron(64, 48, 8)


def two(sizes: tuple[int, ...] = (64, 48, 16)) -> type[nn.Module]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = perceptron(*sizes)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return self.encoder(a), self.encoder(b)

    return Two


def barlow(output: tuple[Tensor, Tensor]) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in output)
    across = a.T @ b / len(a)
    weight = torch.full_like(across, 0.05).fill_diagonal_(1.0)
    return (weight * (across - torch.eye(len(across))).pow(2)).sum()


def vicreg(output: tuple[Tensor, Tensor]) -> Tensor:
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in output)
    centred = [z - z.mean(0) for z in output]
    mixed = [z.T @ z / (len(z) - 1) for z in centred]
    across = sum(((c - c.diag().diag()).pow(2).sum() / len(c)) for c in mixed)
    return 25 * F.mse_loss(*output) + 25 * spread + across


SHELF.control(
    "Barlow twins: features normalised over the batch", lambda: subject(two()(), views, barlow, 48)
)
SHELF.control(
    "VICReg: variance and covariance of a batch", lambda: subject(two()(), views, vicreg, 48)
)


def pairwise(scores: Tensor) -> Tensor:
    return -F.logsigmoid((2 * torch.eye(len(scores)) - 1) * scores).sum(1).mean()


@design("SigLIP: a sigmoid for each pair, with a bias far below zero", views, pairwise)
class SigLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = perceptron(64, 48, 16), perceptron(64, 48, 16)
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1)
        return self.log_scale.exp() * a @ b.T + self.bias


def decoupled(scores: Tensor) -> Tensor:
    others = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -math.inf)
    return (others.logsumexp(1) - scores.diagonal()).mean()


@design("decoupled contrast: no positive in the denominator", views, decoupled)
class Decoupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = perceptron(64, 48, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(self.encoder(x), dim=1) for x in (a, b))
        return a @ b.T / 0.2


@design("DINO: a teacher that follows, centred and sharpened", views, returned)
class DINO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(64, 48, 16), frozen(perceptron(64, 48, 16))
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            follow(self.teacher, self.student)
            said = torch.cat([self.teacher(b), self.teacher(a)])
            wanted = ((said - self.centre) / 0.05).softmax(1)
            self.centre = 0.9 * self.centre + 0.1 * said.mean(0)
        student = torch.cat([self.student(a), self.student(b)]) / 0.1
        return -(wanted * student.log_softmax(1)).sum(1)


# ---- makers and their judges ---------------------------------------------------------------------


class Judged(nn.Module):
    """Scores of real pictures and of those of a frozen maker."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.maker = perceptron(64, 48, 1), frozen(perceptron(8, 48, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            made = self.maker(torch.randn(len(x), 8))
        between = torch.lerp(x, made, torch.rand(len(x), 1)).requires_grad_()
        return self.critic(x), self.critic(made), self.slope(between)

    def slope(self, between: Tensor) -> Tensor:
        with torch.enable_grad():
            score = self.critic(between).sum()
            return torch.autograd.grad(score, between, create_graph=True)[0].norm(dim=1)


def wasserstein(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    real, made, slope = output
    return made.mean() - real.mean() + 10 * (slope - 1).pow(2).mean()


SHELF.control(
    "Wasserstein critic with a penalty on its slope",
    lambda: subject(Judged(), unlabelled_flat, wasserstein, 48),
)


def hinge(output: tuple[Tensor, Tensor]) -> Tensor:
    return F.relu(1 - output[0]).mean() + F.relu(1 + output[1]).mean()


@design("hinge discriminator of detached pictures", unlabelled_flat, hinge)
class Hinge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = frozen(perceptron(8, 48, 64)), perceptron(64, 48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.maker(torch.randn(len(x), 8)).detach()
        return self.critic(x), self.critic(made)


# ---- latents and schedules -----------------------------------------------------------------------


def free_bits(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    made, mean, log = output
    divergence = 0.5 * (mean.pow(2) + log.exp() - 1 - log).mean(0)
    return F.mse_loss(made, target) + 0.02 * divergence.clamp(min=0.05).sum()


@design("free bits: no latent is pressed below a floor", itself, free_bits)
class FreeBits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 16), perceptron(8, 48, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + (0.5 * log).exp() * torch.randn_like(mean)), mean, log


@design("codes that are moving averages, and get no gradient", unlabelled_flat, returned)
class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 8), perceptron(8, 48, 64)
        self.register_buffer("codes", 0.2 * torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        code = self.codes[nearest]
        if self.training:
            share = F.one_hot(nearest, 16).float()
            mean = share.T @ z.detach() / share.sum(0).clamp(min=1)[:, None]
            seen = share.any(0)[:, None]
            self.codes = torch.where(seen, 0.9 * self.codes + 0.1 * mean, self.codes)
        again = self.decoder(z + (code - z).detach())
        return (again - x).pow(2).mean(1) + 0.25 * (z - code).pow(2).mean(1)


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64 + 16, 96, 64)

    def guess(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, time_features(t, 16)], 1))


@design("velocity predicted in place of noise", unlabelled_flat, returned)
class Velocity(Timed):
    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        a, s = (t * math.pi / 2).cos()[:, None], (t * math.pi / 2).sin()[:, None]
        return (self.guess(a * x + s * noise, t) - (a * noise - s * x)).pow(2)


@design("flow along straight paths from noise", unlabelled_flat, returned)
class Flow(Timed):
    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x)), torch.randn_like(x)
        return (self.guess(torch.lerp(noise, x, t[:, None]), t) - (x - noise)).pow(2)


# ---- graphs and numbers --------------------------------------------------------------------------


@design("GIN: sums over neighbours, and itself by a learnt factor", citations)
class GIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = perceptron(64, 48, 32), nn.Linear(32, 10)
        self.eps = nn.Parameter(torch.zeros(()))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        linked = (edges > 0).float() - torch.eye(len(nodes))
        return self.head(self.first((1 + self.eps) * nodes + linked @ nodes).relu())


def robust(output: tuple[Any, ...], target: Tensor) -> Tensor:
    mean, log = output
    return (0.5 * ((target - mean) / log.exp()).pow(2) + log).mean()


@design("mean and deviation of a number, whose loss goes below zero", patients, robust)
class Heteroscedastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.log = nn.Linear(10, 32), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.mean(x), self.log(x).clamp(-4, 4)
