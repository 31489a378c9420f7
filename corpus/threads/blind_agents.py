"""Agents, critics and adversaries, as threads have them wrong; each with its fix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from corpus.cards import Shelf
from corpus.models.parts import frozen, perceptron, unlabelled_flat
from corpus.models.small import flat
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"

BROADCAST = ("broadcast", "shape", "larger", "pairs", "square")
CUT = ("gradient", "detach", "no_grad", "stop", "graph")
CLIP = ("clamp", "clip", "ratio", "range", "zero", "gradient")
REVERSED = ("revers", "sign", "negative", "adversar", "minus", "direction")


def played(n: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return states, and the actions taken, how likely they were, and what they brought, (n, 1)."""
    states, labels = flat(n)
    actions = torch.randint(0, 4, (n,))
    before = math.log(0.25) + 0.2 * torch.randn(n)
    return states, (actions, before, ((actions == labels % 4).float()[:, None] - 0.25) / 0.43)


def judged(model: nn.Module, loss: Any, draw: Any = played) -> Subject:
    return subject(model, draw, loss, 48)


def gain(logits: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the clipped surrogate of each step, with one advantage a step."""
    actions, before, advantage = target
    ratio = (Categorical(logits=logits).log_prob(actions) - before).exp()
    advantage = advantage[:, 0]
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = perceptron(64, 48, 4), perceptron(64, 48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)[:, 0]


# ---- what agents are taught by -------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/RITCHIEHuang/DeepRL_Algorithms/issues/13",
    "ratios (n,) times advantages (n, 1)",
    ("", "loss"),
    BROADCAST,
)
def ritchie(fixed: bool) -> Subject:
    """Each step's ratio is weighed by the advantages of all steps."""

    def loss(logits: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        actions, before, advantage = target
        advantage = advantage.reshape(-1) if fixed else advantage
        ratio = (Categorical(logits=logits).log_prob(actions) - before).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return judged(perceptron(64, 48, 4), loss)


@SHELF.report(
    f"{GITHUB}/RLinf/RLinf/issues/1568",
    "returns (n, 1) less values (n,)",
    ("", "critic*", "loss"),
    BROADCAST,
)
def rlinf(fixed: bool) -> Subject:
    """Each value is held against all returns, and drawn to their mean."""

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        logits, values = output
        missed = target[2] - (values[:, None] if fixed else values)
        return 0.5 * missed.pow(2).mean() - gain(logits, target).mean()

    return judged(ActorCritic(), loss)


@SHELF.report(
    f"{GITHUB}/alexis-jacq/Pytorch-DPPO/issues/3",
    "product clamped in place of its ratio",
    ("", "loss"),
    CLIP,
)
def dppo(fixed: bool) -> Subject:
    """Clamp(ratio * advantage, 0.8, 1.2): steps are cut off by what they brought."""

    def loss(logits: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if fixed:
            return -gain(logits, target).mean()
        actions, before, advantage = target
        ratio = (Categorical(logits=logits).log_prob(actions) - before).exp()
        surrogate = ratio * advantage[:, 0]
        return -torch.minimum(surrogate, surrogate.clamp(0.8, 1.2)).mean()

    return judged(perceptron(64, 48, 4), loss)


@SHELF.report(
    f"{GITHUB}/nebuly-ai/optimate/pull/250",
    "entropy added to what is minimised",
    ("", "loss"),
    ("sign", "entropy", "minim", "maxim", "collapse"),
)
def optimate(fixed: bool) -> Subject:
    """The bonus is a penalty: the policy is pressed to be sure of itself."""

    def loss(logits: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        entropy = Categorical(logits=logits).entropy().mean()
        return -gain(logits, target).mean() + (-0.05 if fixed else 0.05) * entropy

    return judged(perceptron(64, 48, 4), loss)


# ---- who learns from which term ------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/astariul/encode-attend-navigate-pytorch/pull/3",
    "critic that learns from the loss of the policy, too",
    ("critic*", ""),
    (*CUT, "both", "two terms"),
)
def navigate(fixed: bool) -> Subject:
    """The baseline is not detached where it weighs the actions."""

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (logits, value), (actions, _, reward) = output, target
        over = reward[:, 0] - (value.detach() if fixed else value)
        policy = -Categorical(logits=logits).log_prob(actions) * over
        return (policy + (value - reward[:, 0]).pow(2)).mean()

    return judged(ActorCritic(), loss)


@SHELF.report(
    f"{GITHUB}/ccmoony/UCB-CS285/issues/2",
    "weights of an advantage-weighted actor not detached",
    ("critic*", ""),
    (*CUT, "both", "two terms"),
)
def awac(fixed: bool) -> Subject:
    """Through exp(advantage) the actor's loss teaches the critic."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = perceptron(64, 48, 4), perceptron(64, 48, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.actor(x), self.critic(x)

    def loss(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        (logits, values), (actions, _, reward) = output, target
        taken = values.gather(1, actions[:, None])[:, 0]
        weight = (taken - (logits.softmax(1).detach() * values).sum(1)).exp()
        weight = weight.detach() if fixed else weight
        actor = -Categorical(logits=logits).log_prob(actions) * weight
        return (actor + (taken - reward[:, 0]).pow(2)).mean()

    return judged(Net(), loss)


class Soft(nn.Module):
    """Draws an action, and returns what a frozen critic says of it, and how likely it was."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.q = perceptron(64, 48, 8), frozen(perceptron(68, 48, 1))
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.actor(x).chunk(2, 1)
        drawn = Normal(mean, spread.clamp(-5, 2).exp())
        action = drawn.rsample()
        worth = self.q(torch.cat([x, action], 1))[:, 0]
        return worth, drawn.log_prob(action).sum(1), self.log_alpha.exp()


@SHELF.report(
    f"{GITHUB}/mani-skill/ManiSkill/issues/899",
    "loss of the temperature that teaches the policy, too",
    ("actor*", ""),
    (*CUT, "entropy", "temperature", "both", "two terms", "cancel"),
)
def mani_skill(fixed: bool) -> Subject:
    """Log-probabilities are not detached in the loss of alpha, and the two terms cancel."""

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        worth, chance, alpha = output
        policy = alpha.detach() * chance - worth
        return (policy - alpha * ((chance.detach() if fixed else chance) - 4.0)).mean()

    return judged(Soft(), loss, unlabelled_flat)


@SHELF.report(
    f"{GITHUB}/TianhongDai/reinforcement-learning-algorithms/issues/8",
    "value of an action detached in the actor's loss",
    ("actor*", "q*", ""),
    CUT,
)
def tianhong(fixed: bool) -> Subject:
    """It silences an error, and leaves the actor its entropy as all there is to learn."""

    def loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        worth, chance, alpha = output
        policy = alpha.detach() * chance - (worth if fixed else worth.detach())
        return (policy - alpha * (chance.detach() - 4.0)).mean()

    return judged(Soft(), loss, unlabelled_flat)


# ---- gradients that are to be reversed -----------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.factor, None


class Domains(nn.Module):
    """Tells digits, and from features turned round which of two places they are from."""

    def __init__(self, reverse: Any) -> None:
        super().__init__()
        self.body, self.label = perceptron(64, 48, 32), nn.Linear(32, 10)
        self.reverse, self.domain = reverse, perceptron(32, 24, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).relu()
        return self.label(x), self.domain(self.reverse(x))


def from_two(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return digits of which some are brighter, their labels, and which they are."""
    pixels, labels = flat(n)
    place = torch.randint(0, 2, (n,))
    return pixels + 0.5 * place[:, None], (labels, place)


def both(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return sum(F.cross_entropy(o, t) for o, t in zip(output, target, strict=True))


@SHELF.report(
    f"{GITHUB}/hash2430/pitchtron/issues/3",
    "reversal by a backward method that nobody calls",
    ("reverse*", "domain*", "body*", ""),
    (*REVERSED, "backward", "never called", "identity", "autograd"),
)
def pitchtron(fixed: bool) -> Subject:
    """nn.Module has no backward of its own: gradients pass unturned."""

    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Reverse.apply(x, 1.0) if fixed else x

        def backward(self, grad: Tensor) -> Tensor:
            return -grad

    return judged(Domains(Turned()), both, from_two)


@SHELF.report(
    f"{GITHUB}/CuthbertCai/pytorch_DANN/issues/10",
    "reversal with a factor that is negative already",
    ("domain*", "body*", ""),
    (*REVERSED, "twice"),
)
def dann(fixed: bool) -> Subject:
    """Minus by minus: features learn to tell the places apart."""
    factor = 2 / (1 + math.exp(-10 * 0.3 if fixed else 10 * 0.3)) - 1
    return judged(Domains(lambda x: Reverse.apply(x, factor)), both, from_two)


# ---- adversaries ---------------------------------------------------------------------------------


class Maker(nn.Module):
    """Makes pictures from noise, which a discriminator judges."""

    def __init__(self, learns: str) -> None:
        super().__init__()
        self.generator, self.discriminator = perceptron(64, 48, 64), perceptron(64, 48, 1)
        for part in {"generator", "discriminator"} - {learns}:
            frozen(getattr(self, part))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(x + torch.randn_like(x))
        return self.discriminator(x), self.discriminator(made)


@SHELF.report(
    f"{GITHUB}/SerezD/vqvae-vqgan-pytorch-lightning/issues/3",
    "made pictures taught to be real",
    ("discriminator*", ""),
    ("same", "constant", "one class", "ones", "all 1"),
)
def non_saturating(fixed: bool) -> Subject:
    """Real and made pictures have the target one, so there is nothing to tell apart."""

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        real, made = output
        wanted = torch.zeros_like(made) if fixed else torch.ones_like(made)
        binary = F.binary_cross_entropy_with_logits
        return binary(real, torch.ones_like(real)) + binary(made, wanted)

    return judged(Maker("discriminator"), loss, unlabelled_flat)


@SHELF.report(
    f"{GITHUB}/marian42/shapegan/issues/2",
    "logarithm of a critic's score",
    ("", "discriminator*", "loss"),
    ("nan", "log", "inf", "negative"),
)
def shapegan(fixed: bool) -> Subject:
    """Scores of a Wasserstein critic are any numbers, and half of them have no logarithm."""

    class Net(Maker):
        def forward(self, x: Tensor) -> Tensor:
            return self.discriminator(self.generator(x + torch.randn_like(x)))

    def loss(scores: Tensor) -> Tensor:
        return -scores.mean() if fixed else -scores.log().mean()

    return judged(Net("generator"), loss, unlabelled_flat)


@SHELF.report(
    f"{GITHUB}/rishikksh20/TFGAN/issues/7",
    "features matched with those of the detached picture",
    ("generator*", "discriminator*", ""),
    CUT,
)
def tfgan(fixed: bool) -> Subject:
    """The discriminator's pass is taken for the generator's, and the term teaches nobody."""

    class Net(Maker):
        def __init__(self) -> None:
            super().__init__("generator")
            self.discriminator = self.discriminator[:2]  # whose features are all that is read

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            made = self.generator(x + torch.randn_like(x))
            drawn = self.discriminator(made if fixed else made.detach())
            return made, self.discriminator(x), drawn

    def loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
        made, real, drawn = output
        return 0.1 * F.l1_loss(made, target) + F.l1_loss(drawn, real)

    return judged(Net(), loss, lambda n: (flat(n)[0],) * 2)


@SHELF.report(
    f"{GITHUB}/openclimatefix/skillful_nowcasting/issues/12",
    "generator's loss of its pictures, and not of their scores",
    ("discriminator*", ""),
    ("never called", "not called", "unused", "never ran", "not run"),
)
def nowcasting(fixed: bool) -> Subject:
    """The mean of the pictures is as much a number as that of scores is: it just gets brighter."""

    class Net(Maker):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made = self.generator(x + torch.randn_like(x))
            return made, self.discriminator(made) if fixed else made

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.l1_loss(output[0], target) - 0.1 * output[1].mean()

    return judged(Net("generator"), loss, lambda n: (flat(n)[0],) * 2)
