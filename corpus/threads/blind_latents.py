"""Latents, codes, schedules and mixtures, as threads have them wrong; each with its fix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import perceptron, time_features, unlabelled_flat
from corpus.models.small import itself, patients
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"

SPREAD = ("variance", "std", "deviation", "half", "root", "scale", "exponent")
DIVERGENCE = ("divergence", "variance", "std", "deviation", "negative", "squar", "exponent")


# ---- latent variables ----------------------------------------------------------------------------

Made = tuple[Tensor, Tensor, Tensor]


class VAE(nn.Module):
    """Returns what it made, and mean and logarithm of the variance of what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 16), perceptron(8, 48, 64)
        self.spread = lambda log: (0.5 * log).exp()
        self.shape = lambda log: log

    def forward(self, x: Tensor) -> Made:
        mean, log = self.encoder(x).chunk(2, 1)
        log = self.shape(log)
        return self.decoder(mean + self.spread(log) * torch.randn_like(mean)), mean, log


def bound(divergence: Any) -> Any:
    """Return the loss of a VAE with this divergence of mean and logarithm."""

    def loss(output: Made, target: Tensor) -> Tensor:
        made, mean, log = output
        return F.mse_loss(made, target) + 0.02 * divergence(mean, log).sum(1).mean()

    return loss


def by_variance(mean: Tensor, log: Tensor) -> Tensor:
    return 0.5 * (mean.pow(2) + log.exp() - 1 - log)


def judged(model: nn.Module, loss: Any, draw: Any = itself) -> Subject:
    return subject(model, draw, loss, 48)


@SHELF.report(
    f"{GITHUB}/rachtsingh/ibp_vae/issues/3",
    "noise scaled by the variance",
    ("", "encoder*"),
    SPREAD,
)
def ibp_vae(fixed: bool) -> Subject:
    """exp(logvar) is no deviation: what is drawn is not what the divergence is of."""
    model = VAE()
    if not fixed:
        model.spread = torch.exp
    return judged(model, bound(by_variance))


@SHELF.report(
    f"{GITHUB}/masato-ka/airc-rl-agent/issues/43",
    "softplus on the logarithm of a variance",
    ("", "encoder*"),
    ("softplus", "positive", "range", "variance", "noise", "never below"),
)
def airc(fixed: bool) -> Subject:
    """A logarithm that cannot be negative: all latents have a variance above one."""
    model = VAE()
    if not fixed:
        model.shape = F.softplus
    return judged(model, bound(by_variance))


@SHELF.report(
    f"{GITHUB}/DaehanKim/vgae_pytorch/issues/2",
    "divergence with a deviation where its square belongs",
    ("", "loss"),
    DIVERGENCE,
)
def vgae(fixed: bool) -> Subject:
    """1 + 2 logstd - mean ** 2 - exp(logstd): it is least at a deviation of two, and below zero."""
    model = VAE()
    model.spread = torch.exp
    return judged(
        model,
        bound(lambda m, log: 0.5 * (m.pow(2) + ((2 if fixed else 1) * log).exp() - 1 - 2 * log)),
    )


@SHELF.report(
    f"{GITHUB}/sutaoyu/IBMEA/issues/2",
    "deviation given where its logarithm is taken",
    ("", "loss"),
    (*DIVERGENCE, "twice", "logarithm"),
)
def ibmea(fixed: bool) -> Subject:
    """The exponential is taken twice, and the divergence is of another distribution."""

    def divergence(mean: Tensor, log: Tensor) -> Tensor:
        given = 0.5 * log if fixed else (0.5 * log).exp()
        return 0.5 * (mean.pow(2) + (2 * given).exp() - 1) - given

    return judged(VAE(), bound(divergence))


# ---- codes ---------------------------------------------------------------------------------------


class Coded(nn.Module):
    """Returns what it made of the nearest codes, and how far those are off."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 8), perceptron(8, 48, 64)
        self.codes = nn.Embedding(16, 8)
        nn.init.normal_(self.codes.weight, std=0.2)

    def through(self, z: Tensor, code: Tensor) -> Tensor:
        return z + (code - z).detach()

    def terms(self, z: Tensor, code: Tensor) -> Tensor:
        taught, bound = (code - z.detach()).pow(2).mean(), (z - code.detach()).pow(2).mean()
        return taught + 0.25 * bound

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        return self.decoder(self.through(z, code)), self.terms(z, code)


def with_codes(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1]


@SHELF.report(
    f"{GITHUB}/CompVis/taming-transformers/issues/57",
    "beta at the term of the codes",
    ("", "codes*", "encoder*"),
    ("beta", "commit", "weigh", "swap", "scale"),
)
def taming(fixed: bool) -> Subject:
    """The encoder is bound four times as firmly as the codes are taught, not a quarter."""

    class Swapped(Coded):
        def terms(self, z: Tensor, code: Tensor) -> Tensor:
            taught, bound = (code - z.detach()).pow(2).mean(), (z - code.detach()).pow(2).mean()
            return taught + 0.25 * bound if fixed else 0.25 * taught + bound

    return judged(Swapped(), with_codes)


@SHELF.report(
    f"{GITHUB}/andylolu2/jax-vqvae-gpt/issues/2",
    "codes taught after gradients go past them",
    ("codes*", ""),
    ("gradient", "detach", "stop", "straight", "never learn", "not trained"),
)
def late_terms(fixed: bool) -> Subject:
    """Of what is passed straight through, the codes' own term does not reach the codes."""

    class Late(Coded):
        def terms(self, z: Tensor, code: Tensor) -> Tensor:
            return super().terms(z, code if fixed else self.through(z, code))

    return judged(Late(), with_codes)


# ---- schedules -----------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Draws a step for each sample, and returns what is made of the noised sample there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64 + 16, 96, 64)
        betas = torch.linspace(1e-3, 0.2, 40)
        self.register_buffer("betas", betas)
        self.register_buffer("kept", (1 - betas).cumprod(0))

    def drawn(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t, noise = torch.randint(0, 40, (len(x),)), torch.randn_like(x)
        return t, noise, self.noised(x, noise, self.kept[t, None])

    def noised(self, x: Tensor, noise: Tensor, kept: Tensor) -> Tensor:
        return kept.sqrt() * x + (1 - kept).sqrt() * noise

    def guess(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, time_features(t / 40, 16)], 1))


@SHELF.report(
    f"{GITHUB}/Ryota-Kawamura/How-Diffusion-Models-Work/issues/1",
    "noise scaled by a variance",
    ("", "net*"),
    ("root", "sqrt", "variance", "scale"),
)
def how_they_work(fixed: bool) -> Subject:
    """(1 - ab) * noise has lost its root: samples in between are too faint."""

    class Noise(Denoiser):
        def noised(self, x: Tensor, noise: Tensor, kept: Tensor) -> Tensor:
            return kept.sqrt() * x + ((1 - kept).sqrt() if fixed else 1 - kept) * noise

        def forward(self, x: Tensor) -> Tensor:
            t, noise, noised = self.drawn(x)
            return (self.guess(noised, t) - noise).pow(2)

    return judged(Noise(), torch.mean, unlabelled_flat)


@SHELF.report(
    f"{GITHUB}/lucidrains/denoising-diffusion-pytorch/issues/18",
    "products of the step before padded at their end",
    ("", "net*"),
    ("index", "shift", "previous", "step before", "schedule", "off by one"),
)
def lucid(fixed: bool) -> Subject:
    """The step before is the step itself, and before the last one there is no noise."""

    class Posterior(Denoiser):
        def __init__(self) -> None:
            super().__init__()
            before = F.pad(self.kept[:-1], (1, 0) if fixed else (0, 1), value=1.0)
            self.register_buffer("start", self.betas * before.sqrt() / (1 - self.kept))
            here = (1 - before) * (1 - self.betas).sqrt() / (1 - self.kept)
            self.register_buffer("here", here)

        def forward(self, x: Tensor) -> Tensor:
            t, _, noised = self.drawn(x)
            start, here = self.start[t, None], self.here[t, None]
            guessed = start * self.guess(noised, t) + here * noised
            return (guessed - start * x - here * noised).pow(2)

    return judged(Posterior(), torch.mean, unlabelled_flat)


# ---- mixtures ------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/r9y9/wavenet_vocoder/issues/34",
    "components of a mixture multiplied",
    ("", "loss"),
    ("mixture", "component", "logsumexp", "broadcast", "product"),
)
def wavenet(fixed: bool) -> Subject:
    """Logarithms are summed over components before weights are added: all must fit all."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weight, mean, log = output.chunk(3, 1)
        each = -0.5 * ((target - mean) / log.exp()).pow(2) - log - 0.5 * math.log(2 * math.pi)
        each = each if fixed else each.sum(1, keepdim=True)
        return -(each + weight.log_softmax(1)).logsumexp(1).mean()

    return judged(perceptron(10, 32, 12), loss, patients)
