"""Latents, pairs of views and adversaries whose loss says another thing than was meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from corpus.checks.parts import Mlp, Net, batch

CHECK = "loss"
CE = F.cross_entropy


def variational(
    spread=lambda v: (0.5 * v).exp(), square=torch.exp, log=lambda v: v, shape=lambda v: v
):
    """Return an autoencoder that draws its code, and a loss with the divergence of that."""

    def forward(m, x):
        mean, v = m.encoder(x).chunk(2, 1)
        v = shape(v)
        return m.decoder(mean + spread(v) * torch.randn_like(v)), mean, v

    def loss(output, target):
        made, mean, v = output
        divergence = 0.5 * (mean.pow(2) + square(v) - 1 - log(v)).sum(1).mean()
        return F.mse_loss(made, target) + 0.02 * divergence

    x = batch()
    return Net(forward, encoder=(16, 16), decoder=(8, 16)), x, x, loss


def views(*, scale, length=lambda z: z):
    """Return two towers, whose products of all pairs are scaled."""

    def forward(m, x, y):
        return length(m.one(x)) @ length(m.other(y)).t() * scale

    inputs = batch(), batch()
    return Net(forward, one=(16, 8), other=(16, 8)), inputs, torch.arange(64), CE


def adversary(*judged, makes=torch.zeros_like):
    """Return a discriminator with what it judges, whose loss asks for real and for `makes`."""

    def forward(m, x):
        parts = {"real": x, "made": m.maker(x), "other": m.second(x)}
        return tuple(m.judge(parts[name]) for name in judged)

    def loss(output, _):
        return bce(output[0], torch.ones_like(output[0])) + bce(output[1], makes(output[1]))

    model = Net(forward, judge=(16, 1), maker=(16, 16), second=(16, 16))
    return model, batch(), batch(), loss


def compared(frozen):
    """Return the difference of two nets, of which one is not to learn."""
    model = Net(lambda m, x: (m.one(x), m.other(x)), one=(16, 1), other=(16, 1))
    model.other.requires_grad_(not frozen)
    return model, batch(), batch(), lambda o, _: (o[0].square() - o[1].detach()).mean()


def shared(sign):
    """Return a loss with the share that chances and targets have in common."""

    def loss(o, t):
        chance = o.sigmoid()
        score = 2 * (chance * t).sum(1) / ((chance + t).sum(1) + 1)
        return bce(o, t) + (sign * score).mean()

    return Mlp(), batch(), torch.randint(0, 2, (64, 10)).float(), loss


FAULTS = {
    "noise by the variance": (
        lambda: variational(torch.exp), "fail", None, "scaled by exp(1 v)", "a deviation",
    ),
    "a divergence of a deviation": (
        lambda: variational(torch.exp, log=lambda v: 2 * v), "fail", None, "for its variance",
    ),
    "a logarithm that is never negative": (
        lambda: variational(shape=F.softplus), "warn", None, "exponential of `softplus`",
    ),
    "the exponential of a deviation": (
        lambda: variational(
            lambda s: s, lambda s: (2 * s).exp(), lambda s: 2 * s, lambda v: (0.5 * v).exp()
        ),
        "warn", None, "exponential of `exp`",
    ),
    "vectors of any length by a temperature": (
        lambda: views(scale=1 / 0.07), "warn", None, "of any length, times 14.3",
    ),
    "what is made is to be real": (
        lambda: adversary("real", "made", makes=torch.ones_like), "warn", None,
        "'judge' gives out is asked to be `ones_like`",
    ),
    "a summand that is detached": (
        lambda: compared(False), "warn", None, "a term of the loss, `detach`", ...,
    ),
    "an overlap that is minimised": (
        lambda: shared(1.0), "warn", None, "grows with an overlap", "2 * (chance * t)",
    ),
}  # fmt: skip
HEALTHY = {
    "noise by a deviation": variational,
    "noise by the exponential of a logarithm of it": lambda: variational(
        torch.exp, lambda v: (2 * v).exp(), lambda v: 2 * v
    ),
    "a prior of another variance": lambda: variational(square=lambda v: v.exp() / 2),
    "noise by the root of a variance": lambda: variational(lambda v: v.exp().sqrt()),
    "a logarithm within bounds": lambda: variational(shape=lambda v: v.clamp(-10, 10)),
    "cosines by a temperature": lambda: views(
        scale=1 / 0.07, length=lambda z: F.normalize(z, dim=1)
    ),
    "products as they are": lambda: views(scale=1.0),
    "a discriminator": lambda: adversary("real", "made"),
    "a generator, and who judges it not frozen": lambda: adversary(
        "made", "other", makes=torch.ones_like
    ),
    "less what a frozen net says": lambda: compared(True),
    "an overlap that is maximised": lambda: shared(-1.0),
}  # fmt: skip
