"""Latents, flows and what judges pictures, as people report them wrong; each with its fix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from corpus.cards import Shelf
from corpus.models.parts import (
    PreNorm,
    frozen,
    normal,
    perceptron,
    pictures,
    unlabelled,
    unlabelled_flat,
)
from corpus.models.small import itself, rows
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

SUMMED = ("sample", "batch", "one number", "scalar", "all of", "broadcast", "sum")
WEIGHS = ("domin", "weighs", "larger", "scale", "diverg", "reduc", "times", "outweigh")
AXES = ("axis", "axes", "pixel", "dimension", "per sample", "channel")

Made = tuple[Tensor, Tensor, Tensor]


def divergence(mean: Tensor, log: Tensor) -> Tensor:
    """Return what each latent is away from a standard normal one."""
    return 0.5 * (mean.pow(2) + log.exp() - 1 - log)


class VAE(nn.Module):
    """Returns what it made, and mean and logarithm of the variance of what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 48, 16), perceptron(8, 48, 64)
        self.drawn = lambda mean, spread: mean + spread * torch.randn_like(mean)

    def forward(self, x: Tensor) -> Made:
        mean, log = self.encoder(x).chunk(2, 1)
        return self.decoder(self.drawn(mean, (0.5 * log).exp())), mean, log


# ---- latents -------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/catniplab/latent_dynamics_workshop/issues/1",
    "mean added to the noise before the two are scaled",
    ("", "encoder*"),
    ("scaled", "multipl", "noise", "variance", "deviation", "mean", "std"),
)
def workshop(fixed: bool) -> Subject:
    """(noise + mean) x deviation has another mean than the divergence is of."""

    def loss(output: Made, target: Tensor) -> Tensor:
        made, mean, log = output
        return F.mse_loss(made, target) + 0.02 * divergence(mean, log).sum(1).mean()

    model = VAE()
    if not fixed:
        model.drawn = lambda mean, spread: (torch.randn_like(mean) + mean) * spread
    return subject(model, itself, loss, 48)


@SHELF.report(
    f"{GITHUB}/zdebruine/MMVAE/pull/19",
    "divergence summed over the batch, error averaged",
    ("", "loss", "encoder*"),
    WEIGHS,
)
def mmvae(fixed: bool) -> Subject:
    """A sum over samples and latents outweighs a mean over samples and pixels from the start."""

    def loss(output: Made, target: Tensor) -> Tensor:
        made, mean, log = output
        if fixed:
            error = F.mse_loss(made, target, reduction="sum") / len(target)
            return error + divergence(mean, log).sum(1).mean()
        return F.mse_loss(made, target) + divergence(mean, log).sum()

    return subject(VAE(), itself, loss, 48)


def some_rows(n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return rows of digits of which some are missing, with the mask of the others, twice."""
    series, _ = rows(n)
    mask = (torch.arange(8) < torch.randint(3, 9, (n, 1))).float()
    series = series * mask[..., None]
    return (series, mask), (series, mask)


@SHELF.report(
    f"{GITHUB}/EDAPINENUT/GNTPP/issues/4",
    "divergence summed to one number, and masked afterwards",
    ("", "loss"),
    (*SUMMED, *WEIGHS),
)
def gntpp(fixed: bool) -> Subject:
    """torch.sum without a dimension: each step is charged with the divergence of all steps."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.encoder = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 16)
            self.decoder = perceptron(8, 32, 8)

        def forward(self, series: Tensor, mask: Tensor) -> Made:
            states, _ = self.rnn(series * mask[..., None])
            mean, log = self.encoder(states).chunk(2, -1)
            return self.decoder(mean + (0.5 * log).exp() * torch.randn_like(mean)), mean, log

    def loss(output: Made, target: tuple[Tensor, Tensor]) -> Tensor:
        (made, mean, log), (series, mask) = output, target
        away = divergence(mean, log)
        away = (away.sum(-1) if fixed else away.sum()) * mask
        missed = (made - series).pow(2).sum(-1) * mask
        return (missed + 0.1 * away).sum() / mask.sum()

    return subject(Steps(), some_rows, loss, 32)


@SHELF.report(
    f"{GITHUB}/wohlert/semi-supervised-pytorch/issues/21",
    "logarithms of determinants summed over the batch",
    ("", "flows*", "loss"),
    SUMMED,
)
def planar(fixed: bool) -> Subject:
    """They are per sample already: each sample is credited with the volumes of all."""

    class Planar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.w, self.b = normal(8, std=0.1), normal(8, std=0.1), normal(1)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            across = self.w @ self.u
            u = self.u + (F.softplus(across) - 1 - across) * self.w / self.w.pow(2).sum()
            bent = (z @ self.w + self.b).tanh()
            slope = (1 - bent.pow(2))[:, None] * self.w
            return z + bent[:, None] * u, (1 + slope @ u).abs().log()

    class Flowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = perceptron(64, 48, 16), perceptron(8, 48, 64)
            self.flows = nn.ModuleList(Planar() for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, log = self.encoder(x).chunk(2, 1)
            noise = torch.randn_like(mean)
            z = mean + (0.5 * log).exp() * noise
            entered = -0.5 * (log + noise.pow(2)).sum(1)
            volumes = torch.zeros(len(x))
            for flow in self.flows:
                z, volume = flow(z)
                volumes = volumes + volume
            left = entered - (volumes if fixed else sum(volumes))
            return self.decoder(z), left + 0.5 * z.pow(2).sum(1)

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        made, away = output
        return ((made - target).pow(2).sum(1) + away).mean()

    return subject(Flowing(), itself, loss, 48)


# ---- critics -------------------------------------------------------------------------------------


class Slopes(nn.Module):
    """A critic of pictures, with the slope between real and made ones."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(128, 1),
        )
        self.maker = frozen(perceptron(8, 48, 64))
        self.length = lambda slope: slope.flatten(1).norm(dim=1)
        self.share = lambda x: torch.rand(len(x), 1, 1, 1)

    def forward(self, x: Tensor) -> Made:
        with torch.no_grad():
            made = self.maker(torch.randn(len(x), 8)).view_as(x)
        share = self.share(x)
        between = (share * x + (1 - share) * made).requires_grad_()
        with torch.enable_grad():
            score = self.critic(between).sum()
            slope = torch.autograd.grad(score, between, create_graph=True)[0]
        return self.critic(x), self.critic(made), self.length(slope)


def wasserstein(output: Made) -> Tensor:
    real, made, slope = output
    return made.mean() - real.mean() + 10 * (slope - 1).pow(2).mean()


@SHELF.report(
    f"{GITHUB}/Zeleni9/pytorch-wgan/issues/40",
    "length of the slope over the channels alone",
    ("", "critic*", "loss"),
    AXES,
)
def per_pixel(fixed: bool) -> Subject:
    """norm(2, dim=1) of (n, 1, h, w): each pixel's slope is pressed towards one."""
    model = Slopes()
    if not fixed:
        model.length = lambda slope: slope.norm(2, dim=1)
    return subject(model, unlabelled, wasserstein, 32)


@SHELF.report(
    f"{GITHUB}/eriklindernoren/PyTorch-GAN/issues/5",
    "share of real and made drawn for each pixel",
    ("", "critic*", "loss"),
    ("per pixel", "each pixel", "interpol", "random", "shape", "share", "alpha", "between"),
)
def each_pixel(fixed: bool) -> Subject:
    """Pictures between the two are to lie on a line: one share for each picture."""
    model = Slopes()
    if not fixed:
        model.share = torch.rand_like
    return subject(model, unlabelled, wasserstein, 32)


@SHELF.report(
    f"{GITHUB}/https-deeplearning-ai/GANs-Public/issues/1",
    "generator that is to be told as made",
    ("", "loss", "generator*"),
    ("sign", "label", "real", "fake", "wrong way", "adversar", "against", "oppos"),
)
def srgan(fixed: bool) -> Subject:
    """The critic says one of what is made, and the generator is taught to be given a one."""

    def judged(score: Tensor, wanted: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, wanted))

    class Sharpen(nn.Module):
        """Returns what is made, and what the critic says of the real, of it, and of it detached."""

        def __init__(self) -> None:
            super().__init__()
            convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, 1, 1)]
            self.generator = nn.Sequential(*convolutions, nn.PixelShuffle(2))
            self.critic = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1)
            )

        def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, ...]:
            made = self.generator(x)
            held = {name: p.detach() for name, p in self.critic.named_parameters()}
            fooled = functional_call(self.critic, held, made)
            return made, self.critic(real), fooled, self.critic(made.detach())

    def loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        made, real, fooled, fake = output
        of_real, of_made = (1.0, 0.0) if fixed else (0.0, 1.0)
        critic = judged(real, of_real) + judged(fake, of_made)
        return F.mse_loss(made, target) + 0.1 * judged(fooled, 1.0) + 0.5 * critic

    def draw(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        sharp, _ = pictures(n)
        return (F.avg_pool2d(sharp, 2), sharp), sharp

    return subject(Sharpen(), draw, loss, 32)


# ---- masked pictures -----------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/IcarusWizard/MAE/issues/17",
    "class token counted among the patches that are kept",
    ("", "loss", "decoder*"),
    ("mask", "patch", "off by one", "left out", "one too few", "class token", "never"),
)
def mae(fixed: bool) -> Subject:
    """The mask begins a place too late, and the loss passes over one hidden patch of each."""

    class Sparse(nn.Module):
        """Sees 4 of 16 patches of 4 pixels, and returns all of them with the mask of the others."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place, self.token = nn.Linear(4, 32), normal(16, 32), normal(1, 1, 32)
            self.encoder, self.decoder = PreNorm(), PreNorm()
            self.again, self.hidden, self.head = normal(17, 32), normal(1, 1, 32), nn.Linear(32, 4)

        def forward(self, patches: Tensor) -> tuple[Tensor, Tensor]:
            n, order = len(patches), torch.rand(len(patches), 16).argsort(1)
            back = order.argsort(1)
            kept = order[:, :4, None].expand(-1, -1, 32)
            x = (self.embed(patches) + self.place).gather(1, kept)
            x = self.encoder(torch.cat([self.token.expand(n, -1, -1), x], 1))
            seen = x.shape[1]
            mask = torch.zeros(n, 16)
            mask[:, seen - 1 if fixed else seen :] = 1
            rest = self.hidden.expand(n, 16 - (seen - 1), -1)
            x, first = torch.cat([x[:, 1:], rest], 1), x[:, :1]
            x = x.gather(1, back[..., None].expand(-1, -1, 32))
            x = self.decoder(torch.cat([first, x], 1) + self.again)
            return self.head(x[:, 1:]), mask.gather(1, back)

    def patches(n: int) -> tuple[Tensor, Tensor]:
        cut = unlabelled_flat(n)[0].unflatten(1, (4, 2, 4, 2)).transpose(2, 3).reshape(n, 16, 4)
        return cut, cut

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        said, mask = output
        return ((said - target).pow(2).mean(-1) * mask).mean() / 0.75

    return subject(Sparse(), patches, loss, 32)
