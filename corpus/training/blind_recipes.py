"""Healthy training steps with rivals, teachers, two views of a sample, and what is generated."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from corpus.cards import Shelf
from corpus.models.healthy_steps import Count, backbone, controls_of, descend, entropy, trained
from corpus.models.parts import SmallLM, conv_net, follow, frozen, normal, perceptron, time_features
from corpus.models.small import (
    CNN,
    GPT,
    VAE,
    flat,
    images,
    itself,
    language_loss,
    next_words,
    some_digits,
    views,
    words,
)
from corpus.subject import Training

SHELF = Shelf("training", "blind")
control = controls_of(SHELF)
SGD, Adam, AdamW, RMSprop = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.2)


# ---- generators and critics ----------------------------------------------------------------------


class GAN(nn.Module):
    """A generator of digits, and a critic of them."""

    def __init__(self, norm: Any = None) -> None:
        super().__init__()
        self.generator = nn.Sequential(perceptron(16, 48, 64, act=leaky), nn.Tanh())
        self.critic = perceptron(64, 48, 24, 1, act=leaky)
        if norm is not None:
            for layer in self.critic:
                if isinstance(layer, nn.Linear):
                    norm(layer)


def rivals(model: GAN, rate: float = 2e-4, slower: float = 1.0) -> tuple[Adam, Adam]:
    return (
        Adam(model.critic.parameters(), lr=rate, betas=(0.5, 0.999)),
        Adam(model.generator.parameters(), lr=rate * slower, betas=(0.5, 0.999)),
    )


def digits(n: int) -> Tensor:
    return flat(n)[0].clamp(-1, 1)


@control("critic, then generator, which does not saturate")
def non_saturating() -> Training:
    criterion = nn.BCEWithLogitsLoss()

    def step(model: Any, optimizer: Any, batch: Tensor) -> dict[str, float]:
        for_critic, for_generator = optimizer
        ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        fake = model.generator(torch.randn(len(batch), 16))
        for_critic.zero_grad()
        critic_loss = criterion(model.critic(batch), ones)
        critic_loss = critic_loss + criterion(model.critic(fake.detach()), zeros)
        critic_loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        generator_loss = criterion(model.critic(fake), ones)
        generator_loss.backward()
        for_generator.step()
        return {"loss": generator_loss.item(), "critic": critic_loss.item()}

    model = GAN()
    return Training(model, rivals(model), step, digits(32))


@control("critic with two backwards of its own, real labels smoothed")
def dcgan() -> Training:
    """The order of PyTorch's tutorial: the generator's backward also fills the critic."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(
                nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh())  # fmt: skip
            self.critic = nn.Sequential(
                nn.Conv2d(1, 8, 4, 2, 1, bias=False), leaky(),
                nn.Conv2d(8, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), leaky(),
                nn.Conv2d(16, 1, 4, bias=False))  # fmt: skip

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        for_critic, for_generator = optimizer
        n, criterion = len(batch), F.binary_cross_entropy_with_logits
        model.critic.zero_grad()
        real = criterion(model.critic(batch).view(-1), torch.full((n,), 0.9))
        real.backward()
        fake = model.generator(torch.randn(n, 16, 1, 1))
        made = criterion(model.critic(fake.detach()).view(-1), torch.zeros(n))
        made.backward()
        for_critic.step()
        model.generator.zero_grad()
        fooled = criterion(model.critic(fake).view(-1), torch.ones(n))
        fooled.backward()
        for_generator.step()
        return real.detach() + made.detach()

    model = Convolved()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
    return Training(model, rivals(model), step, digits(32).view(-1, 1, 8, 8))


@control("generator first, then the critic, squares of errors")
def least_squares_gan() -> Training:
    def step(model: Any, optimizer: Any, batch: Tensor) -> dict[str, float]:
        for_critic, for_generator = optimizer
        for_generator.zero_grad()
        fake = model.generator(torch.randn(len(batch), 16))
        generator_loss = (model.critic(fake) - 1).square().mean()
        generator_loss.backward()
        for_generator.step()
        for_critic.zero_grad()
        critic_loss = (model.critic(batch) - 1).square().mean() / 2
        critic_loss = critic_loss + model.critic(fake.detach()).square().mean() / 2
        critic_loss.backward()
        for_critic.step()
        return {"loss": generator_loss.item() + critic_loss.item()}

    model = GAN()
    return Training(model, rivals(model, 1e-3), step, digits(32))


@control("critic whose weights are clipped, the generator in every fifth call")
def clipped_critic() -> Training:
    """Wasserstein (Arjovsky et al. 2017)."""
    count = Count()

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        for_critic, for_generator = optimizer
        noise = torch.randn(len(batch), 16)
        fake = model.generator(noise).detach()
        loss = model.critic(fake).mean() - model.critic(batch).mean()
        descend(for_critic, loss)
        for parameter in model.critic.parameters():
            parameter.data.clamp_(-0.01, 0.01)
        if count.up() % 5 == 4:
            descend(for_generator, -model.critic(model.generator(noise)).mean())
        return loss

    model = GAN()
    optimizers = (
        RMSprop(model.critic.parameters(), lr=5e-5),
        RMSprop(model.generator.parameters(), lr=5e-5),
    )
    return Training(model, optimizers, step, digits(32), (count,))


def slope_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    x = real.lerp(fake, torch.rand(len(real), 1)).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@control("critic with a penalty of its slope, three times for each generator step")
def penalised_critic() -> Training:
    """Gulrajani et al. 2017."""

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        for_critic, for_generator = optimizer
        for _ in range(3):
            with torch.no_grad():
                fake = model.generator(torch.randn(len(batch), 16))
            gap = model.critic(fake).mean() - model.critic(batch).mean()
            descend(for_critic, gap + 10 * slope_penalty(model.critic, batch, fake))
        model.critic.requires_grad_(False)
        loss = -model.critic(model.generator(torch.randn(len(batch), 16))).mean()
        descend(for_generator, loss)
        model.critic.requires_grad_(True)
        return loss.detach()

    model = GAN()
    return Training(model, rivals(model, 1e-3), step, digits(32))


@control("hinge losses, spectral norms, and a critic four times as fast")
def hinged() -> Training:
    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        for_critic, for_generator = optimizer
        fake = model.generator(torch.randn(len(batch), 16))
        real = F.relu(1 - model.critic(batch)).mean()
        made = F.relu(1 + model.critic(fake.detach())).mean()
        descend(for_critic, real + made)
        return descend(for_generator, -model.critic(fake).mean())

    model = GAN(parametrizations.spectral_norm)
    return Training(model, rivals(model, 4e-4, 0.25), step, digits(32))


@control("penalty of the critic's slope in every fourth call, and an average of the generator")
def lazy_penalty() -> Training:
    """Lazy R1 and a slow generator (Karras et al. 2020)."""
    count, model = Count(), GAN()
    slow = frozen(copy.deepcopy(model.generator))

    def step(model: Any, optimizer: Any, batch: Tensor) -> float:
        for_critic, for_generator = optimizer
        fake = model.generator(torch.randn(len(batch), 16))
        loss = F.softplus(-model.critic(batch)).mean()
        descend(for_critic, loss + F.softplus(model.critic(fake.detach())).mean())
        if count.up() % 4 == 0:
            x = batch.clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(model.critic(x).sum(), x, create_graph=True)
            descend(for_critic, 5 * 4 * slope.square().sum(1).mean())
        made = descend(for_generator, F.softplus(-model.critic(fake)).mean())
        follow(slow, model.generator, 0.99)
        return made.item()

    return Training(model, rivals(model, 1e-3), step, digits(32), (count, slow))


@control("one optimizer for both, each side with a backward of its own")
def one_optimizer() -> Training:
    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        fake = model.generator(torch.randn(len(batch), 16))
        fooled = -model.critic(fake).mean()
        optimizer.zero_grad()
        fooled.backward(inputs=list(model.generator.parameters()))
        gap = model.critic(fake.detach()).mean() - model.critic(batch).mean()
        gap = gap + 10 * slope_penalty(model.critic, batch, fake.detach())
        gap.backward()
        optimizer.step()
        return gap.detach()

    model = GAN()
    return Training(model, Adam(model.parameters(), lr=1e-3), step, digits(32))


@control("autoencoder whose rival is weighted by the slopes at its last layer")
def weighted_rival() -> Training:
    """VQGAN (Esser et al. 2021), whose rival has no weight in the first calls."""
    count = Count()

    class Rival(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coder, self.critic = perceptron(64, 32, 12, 32, 64), perceptron(64, 32, 1)

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        made = model.coder(batch)
        apart, fooled = F.l1_loss(made, batch), -model.critic(made).mean()
        last = model.coder[-1].weight
        one, two = (torch.autograd.grad(v, last, retain_graph=True)[0] for v in (apart, fooled))
        weight = (one.norm() / (two.norm() + 1e-4)).clamp(0, 1e4).detach()
        begun = count.up() >= 10
        descend(optimizer[0], apart + 0.5 * begun * weight * fooled)
        gap = (
            F.relu(1 - model.critic(batch)).mean() + F.relu(1 + model.critic(made.detach())).mean()
        )
        descend(optimizer[1], begun * gap)
        return apart.detach()

    model = Rival()
    optimizers = Adam(model.coder.parameters(), lr=3e-3), Adam(model.critic.parameters(), lr=1e-3)
    return Training(model, optimizers, step, digits(32), (count,))


@control("images translated both ways and back, critics apart")
def cycles() -> Training:
    class Cycle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.there, self.back = perceptron(64, 48, 64), perceptron(64, 48, 64)
            self.critic_a, self.critic_b = perceptron(64, 32, 1), perceptron(64, 32, 1)

    def fooled(score: Tensor, aim: float) -> Tensor:
        return (score - aim).square().mean()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        a, b = batch
        for_generators, for_critics = optimizer
        for critic in (model.critic_a, model.critic_b):
            critic.requires_grad_(False)
        like_b, like_a = model.there(a), model.back(b)
        loss = fooled(model.critic_b(like_b), 1) + fooled(model.critic_a(like_a), 1)
        loss = loss + 10 * (F.l1_loss(model.back(like_b), a) + F.l1_loss(model.there(like_a), b))
        descend(for_generators, loss)
        for critic in (model.critic_a, model.critic_b):
            critic.requires_grad_(True)
        for_critics.zero_grad()
        for critic, real, fake in ((model.critic_a, a, like_a), (model.critic_b, b, like_b)):
            (fooled(critic(real), 1) + fooled(critic(fake.detach()), 0)).mul(0.5).backward()
        for_critics.step()
        return loss.detach()

    model = Cycle()
    generators = [*model.there.parameters(), *model.back.parameters()]
    critics = [*model.critic_a.parameters(), *model.critic_b.parameters()]
    optimizers = Adam(generators, lr=1e-3), Adam(critics, lr=1e-3)
    return Training(model, optimizers, step, (digits(24), -digits(24)))


# ---- teachers ------------------------------------------------------------------------------------


class Distilled(nn.Module):
    """A student with its frozen teacher within."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = backbone(trained(perceptron(64, 96, 10), flat, 40))
        self.student = perceptron(64, 24, 10)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


@control("frozen teacher within the model")
def distilled() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        learnt, taught = model(x)
        soft = F.kl_div((learnt / 4).log_softmax(1), (taught / 4).softmax(1), reduction="batchmean")
        return descend(optimizer, 0.9 * 16 * soft + 0.1 * F.cross_entropy(learnt, y))

    model = Distilled()
    return Training(model, Adam(model.student.parameters(), lr=3e-3), step, flat(32))


@control("mean teacher, whose weight in the loss rises from zero")
def mean_teacher() -> Training:
    count, model = Count(), perceptron(64, 48, 10)
    teacher = frozen(copy.deepcopy(model))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        done = count.up()
        output = model(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            aim = teacher(x + 0.1 * torch.randn_like(x)).softmax(1)
        rise = math.exp(-5 * (1 - min(1, done / 40)) ** 2) if done else 0.0
        agree = F.mse_loss(output.softmax(1), aim)
        loss = F.cross_entropy(output[: len(x) // 4], y[: len(x) // 4]) + 10 * rise * agree
        descend(optimizer, loss)
        follow(teacher, model, min(1 - 1 / (done + 1), 0.99))
        return loss

    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(model, optimizer, step, flat(48), (teacher, count))


@control("two students that teach each other")
def mutual() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        one, two = model["one"](x), model["two"](x)
        total = 0.0
        for optimiser, mine, other in ((optimizer[0], one, two), (optimizer[1], two, one)):
            aim = other.detach().softmax(1)
            apart = F.kl_div(mine.log_softmax(1), aim, reduction="batchmean")
            total += descend(optimiser, F.cross_entropy(mine, y) + apart).item()
        return total

    model = nn.ModuleDict({"one": perceptron(64, 48, 10), "two": perceptron(64, 24, 24, 10)})
    optimizers = tuple(Adam(part.parameters(), lr=3e-3) for part in model.values())
    return Training(model, optimizers, step, flat(32))


@control("two students that choose each other's samples")
def co_teaching() -> Training:
    """Against wrong labels (Han et al. 2018)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        losses = [F.cross_entropy(part(x), y, reduction="none") for part in model]
        kept = [loss.detach().argsort()[: int(0.7 * len(x))] for loss in losses]
        for optimiser, loss, chosen in zip(optimizer, losses, reversed(kept), strict=True):
            descend(optimiser, loss[chosen].mean())
        return torch.stack(losses).mean().detach()

    model = nn.ModuleList([perceptron(64, 48, 10), perceptron(64, 48, 10)])
    optimizers = tuple(Adam(part.parameters(), lr=3e-3) for part in model)
    return Training(model, optimizers, step, flat(48))


class Online(nn.Module):
    """An encoder with projector and predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(perceptron(64, 64, 32), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.projector.append(nn.Linear(32, 16))
        self.predictor = perceptron(16, 32, 16)

    def project(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(self.project(x))


def two_views(n: int) -> tuple[Tensor, Tensor]:
    return views(n)[0]


@control("target network that follows, within the model")
def byol() -> Training:
    """Grill et al. 2020."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = Online()
            self.target = frozen(copy.deepcopy(self.online))

    def apart(p: Tensor, z: Tensor) -> Tensor:
        return 2 - 2 * F.cosine_similarity(p, z).mean()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        a, b = batch
        with torch.no_grad():
            aim_a, aim_b = model.target.project(a), model.target.project(b)
        loss = apart(model.online(a), aim_b) + apart(model.online(b), aim_a)
        descend(optimizer, loss)
        follow(model.target, model.online, 0.99)
        return loss

    model = Both()
    return Training(model, Adam(model.online.parameters(), lr=3e-3), step, two_views(48))


@control("twins of which one side stops the gradient")
def simsiam() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        a, b = batch
        one, two = model.project(a), model.project(b)
        p, q = model.predictor(one), model.predictor(two)
        loss = -F.cosine_similarity(p, two.detach()).mean() / 2
        loss = loss - F.cosine_similarity(q, one.detach()).mean() / 2
        return descend(optimizer, loss)

    model = Online()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, two_views(48))


@control("teacher with a centre, the last layer frozen at first")
def dino() -> Training:
    """Caron et al. 2021: the student's last layer has no gradient in the first calls."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = perceptron(64, 48, 16), nn.Linear(16, 24, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.normalize(self.body(x), dim=1))

    class Centre(nn.Module):
        def __init__(self, teacher: nn.Module) -> None:
            super().__init__()
            self.teacher = teacher
            self.register_buffer("centre", torch.zeros(24))

    count, model = Count(), Head()
    slow = Centre(frozen(copy.deepcopy(model)))

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        with torch.no_grad():
            taught = [slow.teacher(view) for view in batch]
        aims = [((t - slow.centre) / 0.04).softmax(1) for t in taught]
        learnt = [(model(view) / 0.1).log_softmax(1) for view in reversed(batch)]
        loss = -sum((aim * own).sum(1).mean() for aim, own in zip(aims, learnt, strict=True)) / 2
        optimizer.zero_grad()
        loss.backward()
        if count.up() < 10:
            model.last.weight.grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        follow(slow.teacher, model, 0.996)
        slow.centre.lerp_(torch.cat(taught).mean(0), 0.1)
        return loss.item()

    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.04)
    return Training(model, optimizer, step, two_views(32), (slow, count))


@control("queue of keys of earlier calls")
def moco() -> Training:
    """He et al. 2020."""

    class Queued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = perceptron(64, 48, 16)
            self.key = frozen(copy.deepcopy(self.query))
            self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))
            self.register_buffer("place", torch.tensor(0))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        a, b = batch
        follow(model.key, model.query, 0.99)
        q = F.normalize(model.query(a), dim=1)
        with torch.no_grad():
            k = F.normalize(model.key(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ model.queue.clone().T], 1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))
        descend(optimizer, loss)
        rows = (int(model.place) + torch.arange(len(k))) % len(model.queue)
        model.queue[rows] = k
        model.place.copy_((rows[-1] + 1) % len(model.queue))
        return loss

    model = Queued()
    return Training(model, SGD(model.query.parameters(), lr=0.1, momentum=0.9), step, two_views(32))


# ---- representations of two views ----------------------------------------------------------------


@control("each sample against all others of the batch")
def simclr() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        z = F.normalize(model(torch.cat(batch)), dim=1)
        n = len(z) // 2
        scores = (z @ z.T / 0.2).fill_diagonal_(-torch.inf)
        return descend(optimizer, F.cross_entropy(scores, torch.arange(2 * n).roll(n)))

    model = perceptron(64, 64, 16)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, two_views(32))


@control("images and captions, with a learnt temperature that is held below 100")
def clip() -> Training:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = conv_net(16)
            self.text = nn.Sequential(nn.EmbeddingBag(18, 24), nn.Linear(24, 16))
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, images: Tensor, ids: Tensor) -> Tensor:
            a, b = F.normalize(self.image(images), dim=1), F.normalize(self.text(ids), dim=1)
            return self.logit_scale.exp() * a @ b.T

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        scores, own = model(**batch), torch.arange(len(batch["ids"]))
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        descend(optimizer, loss)
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        return loss

    model = Pair()
    pixels, _ = some_digits(32)
    batch = {"images": (pixels.view(-1, 1, 8, 8) - 4.9) / 6, "ids": pixels[:, 16:48].long() + 1}
    return Training(model, AdamW(model.parameters(), lr=3e-3), step, batch)


@control("hardest pairs of each label, with a margin")
def triplets() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        apart = torch.cdist(*[F.normalize(model(x), dim=1)] * 2)
        same = y[:, None] == y
        far = (apart * same).max(1).values
        near = apart.masked_fill(same, torch.inf).min(1).values
        return descend(optimizer, F.relu(far - near + 0.3).mean())

    model = perceptron(64, 48, 16)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, flat(48))


@control("correlations between the features of two views")
def barlow_twins() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        a, b = (F.batch_norm(model(view), None, None, training=True) for view in batch)
        c = a.T @ b / len(a)
        on = (c.diagonal() - 1).square().sum()
        off = c.square().sum() - c.diagonal().square().sum()
        return descend(optimizer, on + 5e-3 * off)

    model = perceptron(64, 64, 24)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, two_views(64))


@control("variance, invariance and covariance")
def vicreg() -> Training:
    def spread(z: Tensor) -> Tensor:
        centred = z - z.mean(0)
        c = centred.T @ centred / (len(z) - 1)
        hinge = F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        return 25 * hinge + (c.square().sum() - c.diagonal().square().sum()) / z.shape[1]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        a, b = (model(view) for view in batch)
        return descend(optimizer, 25 * F.mse_loss(a, b) + spread(a) + spread(b))

    model = perceptron(64, 64, 24)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, two_views(64))


@control("prototypes normalised before each call, and frozen at first")
def swav() -> Training:
    """Caron et al. 2020, with codes by Sinkhorn."""
    count = Count()

    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.prototypes = perceptron(64, 48, 16), nn.Linear(16, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.prototypes(F.normalize(self.body(x), dim=1))

    @torch.no_grad()
    def codes(scores: Tensor) -> Tensor:
        q = (scores / 0.05).exp()
        for _ in range(3):
            q /= q.sum(0, keepdim=True)
            q /= q.sum(1, keepdim=True)
        return q

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            model.prototypes.weight.copy_(F.normalize(model.prototypes.weight, dim=1))
        a, b = (model(view) for view in batch)
        loss = F.cross_entropy(a / 0.1, codes(b)) + F.cross_entropy(b / 0.1, codes(a))
        optimizer.zero_grad()
        loss.backward()
        if count.up() < 5:
            model.prototypes.weight.grad = None
        optimizer.step()
        return loss

    model = Prototypes()
    return Training(model, SGD(model.parameters(), lr=0.1), step, two_views(48), (count,))


@control("centres of classes with an optimizer and a rate of their own")
def centres() -> Training:
    """Center loss (Wen et al. 2016), whose gradient is rescaled for the centres."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = perceptron(64, 48, 16), nn.Linear(16, 10)
            self.centres = normal(10, 16, std=1.0)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        h = model.body(x)
        near = (h - model.centres[y]).square().sum(1).mean()
        loss = F.cross_entropy(model.head(h), y) + 0.01 * near
        for one in optimizer:
            one.zero_grad()
        loss.backward()
        model.centres.grad *= 1 / 0.01
        for one in optimizer:
            one.step()
        return loss

    model = Centred()
    rest = [*model.body.parameters(), *model.head.parameters()]
    optimizers = SGD(rest, lr=0.05, momentum=0.9), SGD([model.centres], lr=0.05)
    return Training(model, optimizers, step, flat(32))


@control("angles with a margin, scaled by 30")
def margins_of_angles() -> Training:
    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weight = perceptron(64, 48, 16), normal(10, 16, std=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.normalize(self.body(x), dim=1), F.normalize(self.weight, dim=1))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        angle = model(x).clamp(-0.999, 0.999).acos()
        return descend(optimizer, F.cross_entropy(30 * (angle + 0.3 * F.one_hot(y, 10)).cos(), y))

    model = Angles()
    return Training(model, SGD(model.parameters(), lr=0.02, momentum=0.9), step, flat(32))


@control("patches masked at random, the loss on these alone")
def masked_patches() -> Training:
    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        patches = batch.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).flatten(1, 3)
        hidden = torch.rand(patches.shape[:2]) < 0.75
        made = model(patches.masked_fill(hidden[..., None], 0.0).flatten(1)).view_as(patches)
        return descend(
            optimizer, ((made - patches).square().mean(-1) * hidden).sum() / hidden.sum()
        )

    model = perceptron(64, 96, 96, 64, act=nn.GELU)
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, images(48)[0])


# ---- what is generated ---------------------------------------------------------------------------


@control("divergence that is warmed up from zero")
def warmed_divergence() -> Training:
    count = Count()

    def step(model: Any, optimizer: Any, batch: Any) -> dict[str, Tensor]:
        made, mean, log_variance = model(batch)
        apart = F.mse_loss(made, batch, reduction="none").sum(1).mean()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean()
        loss = apart + min(1.0, count.up() / 200) * divergence
        descend(optimizer, loss)
        return {"loss": loss.detach(), "divergence": divergence.detach()}

    model = VAE()
    return Training(model, Adam(model.parameters(), lr=2e-3), step, itself(32)[0], (count,))


@control("divergence below a floor left out of the loss")
def free_bits() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        made, mean, log_variance = model(batch)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean(0)
        loss = F.mse_loss(made, batch) * 64 + divergence.clamp(min=0.5).sum()
        return descend(optimizer, loss)

    model = VAE()
    return Training(model, Adam(model.parameters(), lr=2e-3), step, itself(32)[0])


class Codebook(nn.Module):
    """Codes learnt by gradient or by a moving average (van den Oord et al. 2017)."""

    def __init__(self, moving: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.moving = (
            perceptron(64, 32, 8),
            perceptron(8, 32, 64),
            moving,
        )
        codes = torch.randn(24, 8)
        if moving:
            self.register_buffer("codes", codes)
            self.register_buffer("size", torch.ones(24))
            self.register_buffer("sums", codes.clone())
        else:
            self.codes = nn.Parameter(codes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes.detach()).argmin(1)
        q = self.codes[nearest]
        loss = 0.25 * F.mse_loss(z, q.detach())
        if self.moving and self.training:
            self.update(z.detach(), F.one_hot(nearest, 24).float())
        elif not self.moving:
            loss = loss + F.mse_loss(q, z.detach())
        return self.decoder(z + (q - z).detach()), loss

    @torch.no_grad()
    def update(self, z: Tensor, chosen: Tensor) -> None:
        self.size.lerp_(chosen.sum(0), 0.05)
        self.sums.lerp_(chosen.T @ z, 0.05)
        self.codes = self.sums / self.size.clamp(min=1e-3)[:, None]


def quantise(model: Any, optimizer: Any, batch: Any) -> Tensor:
    made, loss = model(batch)
    return descend(optimizer, F.mse_loss(made, batch) + loss)


@control("codes learnt by gradient, most of them unused")
def learnt_codes() -> Training:
    model = Codebook(moving=False)
    return Training(model, Adam(model.parameters(), lr=3e-3), quantise, itself(32)[0])


@control("codes that move by averages in the forward")
def moving_codes() -> Training:
    model = Codebook(moving=True)
    return Training(model, Adam(model.parameters(), lr=3e-3), quantise, itself(32)[0])


class Denoiser(nn.Module):
    def __init__(self, out: int = 64) -> None:
        super().__init__()
        self.net = perceptron(64 + 16, 96, 96, out, act=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, time_features(t, 16)], 1))


@control("noise predicted at random times, and an average of the weights")
def diffusion() -> Training:
    model = Denoiser()
    slow = frozen(copy.deepcopy(model))
    kept = (torch.linspace(1e-4, 0.02, 1000).neg() + 1).cumprod(0)

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        t, noise = torch.randint(0, 1000, (len(batch),)), torch.randn_like(batch)
        share = kept[t, None]
        noised = share.sqrt() * batch + (1 - share).sqrt() * noise
        loss = F.mse_loss(model(noised, t / 1000), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        follow(slow, model, 0.999)
        return loss

    return Training(model, AdamW(model.parameters(), lr=2e-3), step, flat(48)[0], (slow,))


@control("velocities between noise and data")
def flow_matching() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        noise, t = torch.randn_like(batch), torch.rand(len(batch))
        return descend(
            optimizer, F.mse_loss(model(noise.lerp(batch, t[:, None]), t), batch - noise)
        )

    model = Denoiser()
    return Training(model, Adam(model.parameters(), lr=2e-3), step, flat(48)[0])


@control("scores by slices, with a second way back")
def sliced_scores() -> Training:
    """Sliced score matching (Song et al. 2019), whose loss is below zero."""

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        x = (batch + 0.3 * torch.randn_like(batch)).requires_grad_(True)
        score, along = model(x), torch.randn_like(x)
        (curved,) = torch.autograd.grad((score * along).sum(), x, create_graph=True)
        loss = ((curved * along).sum(1) + 0.5 * (score * along).sum(1).square()).mean()
        return descend(optimizer, loss)

    model = perceptron(64, 64, 64, act=nn.Softplus)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, flat(48)[0])


@control("energies that fall for data and rise for samples of a chain")
def energies_of_samples() -> Training:
    """Contrastive divergence with a buffer of samples (Du and Mordatch 2019)."""
    buffer = [torch.randn(128, 64)]

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        rows = torch.randint(0, 128, (len(batch),))
        x = buffer[0][rows].clone()
        model.requires_grad_(False)
        for _ in range(5):
            x.requires_grad_(True)
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = (x - 0.5 * slope + 0.02 * torch.randn_like(x)).detach()
        model.requires_grad_(True)
        buffer[0][rows] = x
        real, made = model(batch), model(x)
        loss = real.mean() - made.mean() + 0.1 * (real.square() + made.square()).mean()
        return descend(optimizer, loss).detach()

    model = perceptron(64, 64, 1, act=nn.SiLU)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, flat(32)[0])


@control("machine of Boltzmann, learnt by the gap of two free energies")
def boltzmann() -> Training:
    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen, self.hidden = normal(24, 64), normal(64), normal(24)

        def free_energy(self, v: Tensor) -> Tensor:
            return -(v @ self.seen) - F.softplus(F.linear(v, self.weight, self.hidden)).sum(1)

        @torch.no_grad()
        def gibbs(self, v: Tensor) -> Tensor:
            h = F.linear(v, self.weight, self.hidden).sigmoid().bernoulli()
            return (h @ self.weight + self.seen).sigmoid().bernoulli()

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        made = model.gibbs(batch)
        loss = model.free_energy(batch).mean() - model.free_energy(made).mean()
        return descend(optimizer, loss)

    model = Machine()
    pixels = (some_digits(48)[0] > 8).float()
    return Training(model, SGD(model.parameters(), lr=0.05), step, pixels)


@control("likelihood of a density, below zero as a loss")
def density() -> Training:
    class Couplings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(perceptron(32, 48, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(len(x))
            for net in self.nets:
                a, b = x.chunk(2, 1)
                shift, scale = net(a).chunk(2, 1)
                scale = scale.tanh()
                x = torch.cat([b * scale.exp() + shift, a], 1)
                total = total + scale.sum(1)
            return total - 0.5 * x.square().sum(1)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = -model(0.1 * batch + 0.01 * torch.randn_like(batch)).mean()
        return descend(optimizer, loss)

    model = Couplings()
    return Training(model, Adam(model.parameters(), lr=2e-3), step, flat(48)[0])


@control("generator of words whose choices a critic checks one by one")
def electra() -> Training:
    """Clark et al. 2020: no gradient passes the sampled words."""

    class Electra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = SmallLM(16, 1), SmallLM(32, 1)
            self.critic.lm_head = nn.Linear(32, 1)

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        hidden = torch.rand(batch.shape) < 0.2
        logits = model.generator(batch.masked_fill(hidden, 0))
        guessed = F.cross_entropy(logits[hidden], batch[hidden])
        with torch.no_grad():
            drawn = torch.distributions.Categorical(logits=logits).sample()
        mixed = torch.where(hidden, drawn, batch)
        found = model.critic(mixed).squeeze(-1)
        checked = F.binary_cross_entropy_with_logits(found, (mixed != batch).float())
        return descend(optimizer, guessed + 50 * checked)

    model = Electra()
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, words(12)[0])


@control("preferences against a frozen reference")
def preferences() -> Training:
    """Direct preference optimisation (Rafailov et al. 2023): begins at log 2 exactly."""
    model = SmallLM()
    reference = backbone(copy.deepcopy(model))

    def likelihood(model: nn.Module, ids: Tensor) -> Tensor:
        logs = model(ids[:, :-1]).log_softmax(-1)
        return logs.gather(-1, ids[:, 1:, None])[..., 0][:, 8:].sum(1)

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
        chosen, rejected = batch["chosen"], batch["rejected"]
        with torch.no_grad():
            before = likelihood(reference, chosen) - likelihood(reference, rejected)
        gap = likelihood(model, chosen) - likelihood(model, rejected) - before
        loss = -F.logsigmoid(0.1 * gap).mean()
        descend(optimizer, loss)
        return {"loss": loss.detach(), "margin": gap.detach().mean()}

    ids, _ = words(8)
    rejected = ids.clone()
    rejected[:, 8:] = ids.roll(1, 0)[:, 8:]
    batch = {"chosen": ids, "rejected": rejected}
    return Training(model, AdamW(model.parameters(), lr=1e-3), step, batch)


@control("language model that is fed its own words in part")
def scheduled_sampling() -> Training:
    count = Count()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        with torch.no_grad():
            guessed = model(ids).argmax(-1).roll(1, 1)
        guessed[:, 0] = ids[:, 0]
        own = torch.rand(ids.shape) < min(0.5, count.up() / 50)
        return descend(optimizer, language_loss(model(torch.where(own, guessed, ids)), after))

    model = GPT(depth=1)
    return Training(model, Adam(model.parameters(), lr=2e-3), step, next_words(12), (count,))


@control("classifier that two views of a batch teach by labels and each other")
def two_headed() -> Training:
    """Supervised contrastive beside cross entropy, on convolutions with batch norm and dropout."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        both = torch.cat([x, x + 0.2 * torch.randn_like(x)])
        output, labels = model(both), torch.cat([y, y])
        z = F.normalize(output, dim=1)
        scores = (z @ z.T / 0.5).fill_diagonal_(-1e9).log_softmax(1)
        same = (labels[:, None] == labels).float().fill_diagonal_(0)
        alike = -(scores * same).sum(1) / same.sum(1)
        return descend(optimizer, F.cross_entropy(output, labels) + 0.1 * alike.mean())

    model = CNN()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, images(24))


@control("labels of earlier calls averaged for each sample")
def temporal_ensemble() -> Training:
    """Laine and Aila 2017: the step is told which rows of the data the batch has."""
    kept = torch.zeros(200, 10)

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        output, rows = model(batch["x"]), batch["row"]
        kept[rows] = 0.6 * kept[rows] + 0.4 * output.detach().softmax(1)
        loss = F.cross_entropy(output, batch["y"], ignore_index=-1)
        return descend(optimizer, loss + F.mse_loss(output.softmax(1), kept[rows]))

    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
    x, y = flat(32)
    y[16:] = -1
    batch = {"x": x, "y": y, "row": torch.randperm(200)[:32]}
    return Training(model, Adam(model.parameters(), lr=3e-3), step, batch)


@control("classifier on features of an autoencoder that is not to follow it")
def detached_probe() -> Training:
    """A probe looks on: its loss stops before the encoder."""

    class Probed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = perceptron(64, 32, 12), perceptron(12, 32, 64)
            self.probe = nn.Linear(12, 10)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        z = model.encoder(x)
        loss = F.mse_loss(model.decoder(z), x)
        return descend(optimizer, loss + F.cross_entropy(model.probe(z.detach()), y))

    model = Probed()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("slope of the classifier's loss on clean data weighs noisy samples")
def learnt_weights() -> Training:
    """Learning to reweight examples (Ren et al. 2018)."""

    def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
        x, y = batch["noisy"]
        weights = dict(model.named_parameters())
        share = torch.zeros(len(x), requires_grad=True)

        def output(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,))

        losses = F.cross_entropy(output(weights, x), y, reduction="none")
        slopes = torch.autograd.grad(
            (share * losses).sum(), list(weights.values()), create_graph=True
        )
        moved = {
            name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)
        }
        clean, labels = batch["clean"]
        (told,) = torch.autograd.grad(F.cross_entropy(output(moved, clean), labels), share)
        kept = F.relu(-told)
        kept = kept / kept.sum().clamp(min=1e-8)
        return descend(optimizer, (kept * F.cross_entropy(model(x), y, reduction="none")).sum())

    model = perceptron(64, 32, 10)
    x, y = flat(32)
    y = torch.where(torch.rand(32) < 0.3, torch.randint(0, 10, (32,)), y)
    batch = {"noisy": (x, y), "clean": flat(16)}
    return Training(model, SGD(model.parameters(), lr=0.1), step, batch)


@control("entropy of outputs on new data, through norms alone")
def test_time_adaptation() -> Training:
    """Tent (Wang et al. 2021): no labels, and norms in training mode."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        p = model(batch).softmax(1)
        return descend(optimizer, -(p * p.clamp(min=1e-8).log()).sum(1).mean())

    model = frozen(trained(CNN(), images, 40))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(True)
        if isinstance(module, nn.Dropout):
            module.eval()
    shifted = images(48)[0] * 0.7 + 0.2
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Training(model, Adam(parameters, lr=5e-3), step, shifted)


@control("labelled and unlabelled losses, entropy of the unlabelled made small")
def small_entropy() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        labelled, free = batch
        p = model(free).softmax(1)
        unsure = -(p * p.clamp(min=1e-8).log()).sum(1).mean()
        return descend(optimizer, entropy(model, labelled) + 0.1 * unsure)

    model = perceptron(64, 48, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, (flat(16), flat(32)[0]))
