"""Trainings that a practitioner would call fine, though a curve of theirs looks suspicious."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler as schedules

from corpus.cards import Shelf
from corpus.models import trainings
from corpus.models.designs import VQVAE, Flow, likelihood, vq_loss
from corpus.models.parts import diffused, follow, frozen, time_features
from corpus.models.perception import quantised, spiking
from corpus.models.small import (
    CNN,
    LSTM,
    MLP,
    Multitask,
    bert,
    both_targets,
    cnn,
    contrastive,
    flat,
    gpt,
    images,
    itself,
    mlp,
    patients,
    plain,
    seq2seq,
    tumours,
    unet,
    vit,
    words,
)
from corpus.models.trainings import (
    Actor,
    Step,
    adam,
    adamw,
    by_adam,
    by_sgd,
    each_step,
    half,
    scaled,
    sgd,
    spoil,
    training,
    trains,
    warmed_cosine,
)
from corpus.models.usual import Gated, LayerScale, adapt
from corpus.subject import Draw, Subject, Training, subject

SHELF = Shelf("loop", "blind")

Build = Callable[[], Training]


def healthy(name: str) -> Callable[[Build], Build]:
    """Return a decorator that adds the training which a function builds."""

    def add(build: Build) -> Build:
        SHELF.control(name, build)
        return build

    return add


def classified(model: nn.Module, draw: Draw = flat) -> Subject:
    return subject(model, draw, F.cross_entropy)


def supervised(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


# ---- what faults are put into elsewhere ----------------------------------------------------------

SHELF.control("MLP by SGD with momentum", trainings.by_sgd)
SHELF.control("convolutions with batch norm and dropout by Adam", trainings.by_adam)
SHELF.control("GPT with warm-up, cosine to 0 and clipping", trainings.language)
SHELF.control("tanh net over rows, clipped", trainings.recurrent)
SHELF.control("autoencoder", trainings.compressed)
SHELF.control("regression that stops at the noise", trainings.progression)
SHELF.control("residual net with a cosine to 0", trainings.pictures)
SHELF.control("vision transformer, slow to begin", trainings.seen)
SHELF.control("eight layers of ReLU with biases of zero", trainings.deep_relu)
SHELF.control("BYOL with a slow teacher", trainings.byol)
SHELF.control("VAE whose divergence is phased in", trainings.annealed)
SHELF.control("GAN whose losses swing", trainings.gan)
SHELF.control("separable tumours: the loss goes to nearly 0", trainings.tumour)
SHELF.control("pictures each by their own deviation", trainings.standardised)
SHELF.control("triplets of which most cost nothing at the end", trainings.triplets)
SHELF.control("float16 with a scaler and a tiny loss", trainings.half)
SHELF.control("LSTM over words, clipped", trainings.reading)
SHELF.control("likelihood below 0 on few samples", trainings.certain)
SHELF.control("two tasks on one trunk", trainings.shared)
SHELF.control("recurrent net of ReLU, clipped", trainings.unrolled)
SHELF.control("values by their own estimates, rewards noisy", trainings.values)
SHELF.control("recommender of 90 rows", trainings.rated)
SHELF.control("agreement with a moving average", trainings.mean_teacher)
SHELF.control("sigmoids, flat for a while", trainings.sigmoids)
SHELF.control("policy gradient with noisy rewards", trainings.acting)
SHELF.control("experts with a balanced load", trainings.routed)
SHELF.control("two encoders with a learned scale", trainings.paired)
SHELF.control("critic with clipped weights, losses below 0", trainings.wasserstein)


# ---- optimizers and rates ------------------------------------------------------------------------


@healthy("plain SGD without momentum")
def plain_sgd() -> Training:
    return trains(mlp(), sgd(0.3, 0.0), 64, 200)


@healthy("RMSprop on a regression")
def rmsprop() -> Training:
    data = subject(MLP(10, 32, 1), patients, F.mse_loss)
    return trains(data, lambda p: torch.optim.RMSprop(p, 2e-3), 64, 150)


@healthy("Adagrad, whose steps become smaller and smaller")
def adagrad() -> Training:
    return trains(mlp(), lambda p: torch.optim.Adagrad(p, 0.03), 64, 150)


@healthy("signs of the gradient alone")
def rprop() -> Training:
    """Full batches, as Rprop asks for."""
    few = tumours(400)
    data = Subject(MLP(30, 32, 1), *few, F.binary_cross_entropy_with_logits, lambda _: few)
    return trains(data, lambda p: torch.optim.Rprop(p, 1e-3), 400, 80)


@healthy("one cycle of a high rate")
def one_cycle() -> Training:
    return trains(
        cnn(), sgd(0.02), 32, 120, None,
        lambda used: schedules.OneCycleLR(used, max_lr=0.4, total_steps=120),
    )  # fmt: skip


@healthy("rate that cycles in triangles")
def triangles() -> Training:
    return trains(
        mlp(), sgd(0.01), 64, 160, None,
        lambda used: schedules.CyclicLR(used, 0.005, 0.15, step_size_up=20),
    )  # fmt: skip


@healthy("warm restarts of the rate")
def restarts() -> Training:
    return trains(
        cnn(), adamw(2e-2), 32, 140, None,
        lambda used: schedules.CosineAnnealingWarmRestarts(used, 20, 2),
    )  # fmt: skip


@healthy("rate divided by ten at two milestones")
def milestones() -> Training:
    return trains(
        mlp(), sgd(0.1), 64, 150, None,
        lambda used: schedules.MultiStepLR(used, [75, 120], 0.1),
    )  # fmt: skip


@healthy("rate lowered where the loss stands still")
def on_plateau() -> Training:
    t = trains(subject(MLP(10, 32, 1), patients, F.mse_loss), adam(2e-2), 64, 150)
    plan = schedules.ReduceLROnPlateau(t.optimizer, factor=0.3, patience=10)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        loss = usual(model, optimizer, batch)
        plan.step(loss)
        return float(loss)

    usual, t.step, t.restore = t.step, step, (plan,)
    return t


@healthy("long warm-up from a rate of 0")
def warm_up() -> Training:
    return trains(vit(), adamw(3e-3, weight_decay=0.1), 16, 150, 1.0, warmed_cosine(60, 150))


@healthy("weight decay of 0.1 in a language model")
def decayed() -> Training:
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    return trains(gpt(), adamw(5e-3, **options), 8, 100, 1.0, warmed_cosine(10, 100))


@healthy("quasi-Newton steps of several calls")
def lbfgs() -> Training:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    model, few = MLP(10, 16, 1), patients(200)
    used = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    return training(model, used, step, lambda _: few, 200, 60)


@healthy("sharpness-aware steps of two passes")
def sharpness() -> Training:
    """Weights go up the slope and back before each update (Foret et al. 2021)."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        loss = supervised(model, batch)
        optimizer.zero_grad()
        loss.backward()
        slopes = [p.grad.clone() for p in model.parameters()]
        size = torch.stack([slope.norm() for slope in slopes]).norm() + 1e-12
        moves = [0.05 * slope / size for slope in slopes]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        supervised(model, batch).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        return loss.item()

    model = MLP()
    return training(model, sgd(0.05)(model.parameters()), step, flat, 64, 120)


@healthy("two optimizers, one for the body and one for the head")
def two_optimizers() -> Training:
    def step(model: CNN, optimizers: Any, batch: Any) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        loss = supervised(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    model = CNN()
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizers = adam(5e-3)(body), sgd(0.1)(model.head.parameters())
    return training(model, optimizers, step, images, 32, 120)


@healthy("layers nearer the input at lower rates")
def layerwise() -> Training:
    model = plain(64, 64, 64, 64, 10)
    groups = [{"params": layer.parameters(), "lr": 1e-2 * 0.3 ** (3 - depth)}
              for depth, layer in enumerate(model[::2])]  # fmt: skip
    return training(model, torch.optim.Adam(groups), Step(supervised), flat, 64, 120)


@healthy("gradients of four calls added up")
def accumulated() -> Training:
    calls = [0]

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        loss = supervised(model, batch) / 4
        loss.backward()
        calls[0] += 1
        if calls[0] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return 4 * loss.item()

    model = MLP()
    return training(model, adam(5e-3)(model.parameters()), step, flat, 16, 240)


@healthy("gradients of four calls added up by SGD")
def accumulated_sgd() -> Training:
    t = by_sgd()
    usual = t.step
    usual.clear = lambda used: used.zero_grad() if usual.number % 4 == 0 else None
    inner = usual.update
    usual.update = lambda model, used: inner(model, used) if usual.number % 4 == 3 else None
    t.steps = 240
    return t


@healthy("scaler that skips its first steps")
def skips() -> Training:
    """The scale starts too high and is halved until nothing overflows."""
    t = half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**52)
    t.step.scaler, t.restore = scaler, (scaler,)
    return t


@healthy("bfloat16 without a scaler")
def brain_floats() -> Training:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return supervised(model, batch)

    model = MLP()
    return training(model, adam(3e-3)(model.parameters()), Step(loss), flat, 64, 120)


@healthy("fine-tuning at a rate of 1e-5 of what is trained already")
def fine_tuned() -> Training:
    t = by_sgd()
    for number in range(150):
        t.step(t.model, t.optimizer, t.batches(number))
    t.optimizer = adam(1e-5)(t.model.parameters())
    return t


# ---- losses that look odd ------------------------------------------------------------------------


@healthy("loss of 20 at first, which falls fast")
def large_start() -> Training:
    model = plain(64, 64, 64, 10)
    for layer in model[::2]:
        layer.weight.data *= 5
    return trains(classified(model), adam(1e-2), 64, 150)


@healthy("four samples a batch")
def four() -> Training:
    return trains(mlp(), adam(1e-3), 4, 300)


@healthy("batch norm over batches of four")
def small_norms() -> Training:
    return trains(cnn(), adam(3e-3), 4, 200)


@healthy("targets of 10 000")
def large_targets() -> Training:
    """A price in its own currency: losses and gradients are in the millions."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        features, target = patients(n)
        return features, 1e4 + 3e3 * target

    model = MLP(10, 64, 1)
    nn.init.constant_(model.head.bias, 1e4)
    return trains(subject(model, draw, F.mse_loss), adam(2e-2), 64, 200)


@healthy("sixteen samples learnt by heart")
def by_heart() -> Training:
    """The loss and all gradients vanish at the end."""
    few = flat(16)
    return trains(Subject(MLP(), *few, F.cross_entropy, lambda _: few), adam(5e-3), 16, 200)


@healthy("hinge that is exactly 0 at the end")
def hinge() -> Training:
    few = tumours(40)

    def loss(made: Tensor, target: Tensor) -> Tensor:
        return (1 - made * (2 * target - 1)).relu().mean()

    return trains(Subject(MLP(30, 32, 1), *few, loss, lambda _: few), adam(5e-3), 40, 150)


@healthy("labels of which a third are wrong")
def wrong_labels() -> Training:
    def draw(n: int) -> tuple[Tensor, Tensor]:
        pixels, labels = flat(n)
        return pixels, torch.where(torch.rand(n) < 0.3, torch.randint(0, 10, (n,)), labels)

    return trains(classified(MLP(), draw), adam(3e-3), 64, 150)


@healthy("plateaus, each with a fall: deep linear net of small weights")
def saddle() -> Training:
    """Near the saddle at 0 nothing seems to happen (Saxe et al. 2014)."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.012)
    return trains(subject(model, itself, F.mse_loss), sgd(0.06), 64, 300, 1.0)


@healthy("one bad batch, from which it recovers")
def recovers() -> Training:
    t = trains(mlp(), adam(3e-3), 32, 140, clip=1.0)
    spoil(t, lambda number: number == 60, scaled(30.0))
    return t


@healthy("samples that become harder in the middle")
def curriculum() -> Training:
    """From step 70 on pixels are noisy and half of them are missing: the loss goes up."""

    def harder(batch: Any) -> Any:
        pixels, labels = batch
        return (pixels + 0.5 * torch.randn_like(pixels)) * (torch.rand_like(pixels) > 0.5), labels

    t = trains(mlp(), adam(3e-3), 64, 180)
    spoil(t, lambda number: number >= 70, harder)
    return t


@healthy("other data in the middle")
def transferred() -> Training:
    """From step 80 on labels are those of another task, with the same heads."""
    t = trains(mlp(), adam(3e-3), 64, 180)
    spoil(t, lambda number: number >= 80, lambda batch: (batch[0], 9 - batch[1]))
    return t


@healthy("weight of the divergence that jumps up")
def jumped() -> Training:
    """The loss is higher after step 100, by what it is made of."""
    t = trainings.annealed()
    usual = t.step
    usual.weight = lambda: 0.0 if usual.number < 100 else 0.1
    return t


class Reversed(torch.autograd.Function):
    """What it is given, with a fifth of the gradient, its sign turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.2 * grad


class Domains(nn.Module):
    """Features that name the digit and hide where it comes from (Ganin et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.label, self.domain = nn.Linear(64, 10), plain(64, 32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.label(x), self.domain(Reversed.apply(x))


@healthy("reversed gradients: one loss of two goes up again")
def adversarial() -> Training:
    def draw(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pixels, labels = flat(n)
        domain = torch.randint(0, 2, (n,))
        return pixels + domain[:, None] * torch.randn(n, 64), (labels, domain)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        pixels, (labels, domain) = batch
        named, guess = model(pixels)
        return F.cross_entropy(named, labels) + F.cross_entropy(guess, domain)

    model = Domains()
    return training(model, adam(2e-3)(model.parameters()), Step(loss), draw, 64, 200)


@healthy("density whose loss goes from above 0 to below")
def density() -> Training:
    def draw(n: int) -> tuple[Tensor, None]:
        return 0.2 * torch.randn(n, 10), None

    return trains(subject(Flow(), draw, likelihood), adam(3e-3), 64, 120, clip=5.0)


# ---- several that play together ------------------------------------------------------------------


@healthy("clipped policy ratio, several passes over one batch")
def proximal() -> Training:
    """PPO (Schulman et al. 2017) on a bandit: the loss is around 0 and below."""

    def step(model: Actor, optimizer: Any, batch: Any) -> float:
        pixels, labels = batch
        with torch.no_grad():
            logits, value = model(pixels)
            action = torch.distributions.Categorical(logits=logits).sample()
            old = logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1)
            reward = (action == labels).float()
            gain = reward - value
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(3):
            logits, value = model(pixels)
            chosen = torch.distributions.Categorical(logits=logits)
            ratio = (chosen.log_prob(action) - old).exp()
            surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = 0.5 * F.mse_loss(value, reward) - surrogate - 0.01 * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss.item()

    model = Actor()
    return training(model, adam(3e-3)(model.parameters()), step, flat, 64, 150)


class Critics(nn.Module):
    """Values and their older copy, which gives the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.online = plain(2, 64, 64, 4)
        self.target = frozen(copy.deepcopy(self.online))

    def forward(self, state: Tensor) -> Tensor:
        return self.online(state)


@healthy("values with a target that is copied every 25 steps")
def target_network() -> Training:
    """The loss jumps with each copy (Mnih et al. 2015)."""
    calls = [0]

    def step(model: Critics, optimizer: Any, batch: Any) -> float:
        state, action, reward, following = batch
        with torch.no_grad():
            goal = reward + 0.9 * model.target(following).amax(1)
        loss = F.smooth_l1_loss(model(state).gather(1, action[:, None]).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        calls[0] += 1
        if calls[0] % 25 == 0:
            model.target.load_state_dict(model.online.state_dict())
        return loss.item()

    model = Critics()
    optimizer = adam(3e-3)(model.online.parameters())
    return training(model, optimizer, step, trainings.moves, 64, 250)


class Distilled(nn.Module):
    """Student and teacher with a centre (Caron et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = plain(64, 64, 32, activation=nn.GELU)
        self.teacher = frozen(copy.deepcopy(self.student))
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.teacher(b)
            goal = ((made - self.centre) / 0.1).softmax(-1)
            self.centre.lerp_(made.mean(0), 0.1)
        return -(goal * (self.student(a) / 0.2).log_softmax(-1)).sum(-1).mean()


@healthy("self-distillation with a centre and a slow teacher")
def dino() -> Training:
    """The entropy of the goals falls: the loss is no measure of what is learnt."""

    def step(model: Distilled, optimizer: Any, batch: Any) -> float:
        a, b = batch[0]
        loss = (model(a, b) + model(b, a)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(model.teacher, model.student, 0.97)
        return loss.item()

    model = Distilled()
    return training(model, adam(2e-3)(model.student.parameters()), step, trainings.views, 64, 150)


@healthy("views told apart from those of others")
def compared() -> Training:
    return trains(contrastive(), adam(3e-3), 64, 150)


@healthy("gradient penalty on a critic")
def penalised() -> Training:
    """The slope of the critic is held to 1 (Gulrajani et al. 2017)."""

    def critic_loss(model: trainings.Gan, real: Tensor) -> Tensor:
        made = model(torch.randn(len(real), 8)).detach()
        between = torch.lerp(real, made, torch.rand(len(real), 1)).requires_grad_()
        score = model.critic(between).sum()
        (slope,) = torch.autograd.grad(score, between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).pow(2).mean()
        return model.critic(made).mean() - model.critic(real).mean() + penalty

    def step(model: trainings.Gan, optimizers: Any, batch: Any) -> Tensor:
        real, _ = batch
        for _ in range(2):
            optimizers[1].zero_grad()
            loss = critic_loss(model, real)
            loss.backward()
            optimizers[1].step()
        optimizers[0].zero_grad()
        (-model.critic(model(torch.randn(len(real), 8))).mean()).backward()
        optimizers[0].step()
        return loss.detach()

    model = trainings.Gan()
    optimizers = tuple(
        torch.optim.Adam(part.parameters(), 2e-3, betas=(0.0, 0.9))
        for part in (model.generator, model.critic)
    )
    return training(model, optimizers, step, itself, 64, 150)


# ---- parts that stand still, or begin at zero ----------------------------------------------------


@healthy("gates of zero before the branches")
def rezero() -> Training:
    return trains(classified(Gated()), adam(5e-3), 64, 150)


@healthy("branches scaled by 1e-6 at first")
def layer_scale() -> Training:
    s = vit()
    for block in s.model.blocks:
        block.attention = LayerScale(block.attention, 32, 1e-6)
        block.mlp = LayerScale(block.mlp, 32, 1e-6)
    return trains(s, adamw(5e-3), 16, 120, 1.0, warmed_cosine(10, 120))


@healthy("low-rank adapters, one of each pair zero at first")
def lora() -> Training:
    s = gpt()
    adapt(s)
    s.model.norm.requires_grad_(True)
    return trains(s, adam(2e-2), 8, 80)


@healthy("frozen backbone under a new head")
def frozen_backbone() -> Training:
    model = CNN()
    for layer in (model.conv1, model.bn1, model.conv2, model.bn2):
        frozen(layer)
    return trains(classified(model, images), adam(3e-2), 32, 120)


@healthy("batch norms held in evaluation on purpose")
def frozen_norms() -> Training:
    """As in fine-tuning on small batches: running statistics stay as they were."""
    s = cnn()
    warm = trains(s, adam(1e-2), 64, 40)
    for number in range(40):
        warm.step(warm.model, warm.optimizer, warm.batches(number))
    for norm in (s.model.bn1, s.model.bn2):
        frozen(norm).eval()
    return trains(s, adam(2e-3), 4, 150)


@healthy("layers unfrozen one after the other")
def unfrozen() -> Training:
    """The head alone at first, and from steps 40 and 80 on the layers below."""
    model = MLP()
    frozen(model.fc1)
    frozen(model.fc2)
    t = training(model, adam(5e-3)(model.parameters()), Step(supervised), flat, 64, 150)

    def thaw(number: int, model: MLP, _: Any) -> None:
        for start, layer in ((40, model.fc2), (80, model.fc1)):
            if number == start:
                layer.requires_grad_(True)

    each_step(t, thaw)
    return t


@healthy("heads that take turns")
def turns() -> Training:
    """Even steps train one head, odd ones the other."""
    calls = [0]

    def step(model: Multitask, optimizer: Any, batch: Any) -> float:
        pixels, (labels, ink) = batch
        named, guess = model(pixels)
        even = calls[0] % 2 == 0
        loss = F.cross_entropy(named, labels) if even else F.mse_loss(guess, ink)
        calls[0] += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    model = Multitask()
    return training(model, adam(3e-3)(model.parameters()), step, both_targets, 64, 160)


@healthy("weights pruned in the middle, by their size")
def pruned() -> Training:
    """From step 70 on four of five weights of the first layers are 0 and stay so."""
    t = by_sgd()
    model = t.model
    for layer in (model.fc1, model.fc2):
        prune.identity(layer, "weight")
    t.optimizer = sgd(0.05)(model.parameters())

    def cut(number: int, model: nn.Module, _: Any) -> None:
        if number == 70:
            for layer in (model.fc1, model.fc2):
                prune.l1_unstructured(layer, "weight", amount=0.8)

    each_step(t, cut)
    t.steps = 160
    return t


@healthy("sixteen experts, of which some are never chosen")
def unused_experts() -> Training:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return supervised(model, batch) + 0.5 * model.shares.mean(0).pow(2).sum()

    model = trainings.Routed(16)
    return training(model, adam(3e-3)(model.parameters()), Step(loss), flat, 32, 150)


@healthy("rows of an embedding that hardly ever occur")
def rare_words() -> Training:
    """A hashed vocabulary of 2000, updated by row."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.EmbeddingBag(2000, 16, sparse=True, mode="sum")
            self.head = nn.Linear(16, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids) / 6)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        ids, labels = words(n)
        return (ids + 18 * torch.arange(32)) % 2000, labels

    def step(model: Bag, optimizers: Any, batch: Any) -> float:
        loss = supervised(model, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    model = Bag()
    optimizers = (
        torch.optim.SparseAdam(model.embedding.parameters(), 1e-2),
        adam(1e-2)(model.head.parameters()),
    )
    return training(model, optimizers, step, draw, 64, 150)


@healthy("a fifth of the ReLUs off for every sample")
def some_dead() -> Training:
    model = MLP(64, 128, 10)
    model.fc1.bias.data[:28] = -10.0
    model.fc2.bias.data[:20] = -5.0
    return trains(classified(model), adam(3e-3), 64, 120)


@healthy("blocks left out by chance")
def stochastic_depth() -> Training:
    """A whole block is skipped in some steps, for all samples (Huang et al. 2016)."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
            self.blocks = nn.ModuleList(plain(32, 64, 32) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                if not self.training or torch.rand(()) > 0.3:
                    x = x + block(F.layer_norm(x, (32,)))
            return self.head(x)

    return trains(classified(Skips()), adam(3e-3), 32, 150)


@healthy("half of all units dropped")
def dropped() -> Training:
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    return trains(classified(model), adam(3e-3), 64, 150)


@healthy("moving average of the weights beside them, swapped in to validate")
def averaged() -> Training:
    t = trains(cnn(), adam(1e-2), 32, 120)
    slow, held = frozen(copy.deepcopy(t.model)).eval(), images(64)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        loss = usual(model, optimizer, batch)
        follow(slow, model, 0.95)
        if usual.number % 20 == 0:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(slow.state_dict())
            validate(model, held)
            model.load_state_dict(kept)
        return float(loss)

    usual, t.step = t.step, step
    return t


def validate(model: nn.Module, held: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = supervised(model, held)
    model.train()
    return float(loss)


@healthy("evaluation mode throughout, with nothing that knows the difference")
def always_evaluation() -> Training:
    t = by_sgd()
    t.model.eval()
    return t


@healthy("validation in evaluation mode every 20 steps")
def validated() -> Training:
    t = by_adam()
    held = images(200)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        if usual.number % 20 == 0:
            validate(model, held)
        return loss

    usual, t.step = t.step, step
    return t


# ---- other kinds of model ------------------------------------------------------------------------


@healthy("BERT from its config")
def small_bert() -> Training:
    s = bert()
    s.model.bert.encoder.layer = s.model.bert.encoder.layer[:1]
    return trains(s, adamw(5e-3), 32, 120, 1.0)


@healthy("GPT-2 from its config")
def small_gpt2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 18, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        ids, _ = batch
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return training(model, adamw(3e-3)(model.parameters()), step, words, 8, 80)


@healthy("encoder and decoder")
def translated() -> Training:
    return trains(seq2seq(), adam(3e-3), 8, 80, 1.0)


@healthy("U-net on noisy pictures")
def segmented() -> Training:
    return trains(unet(), adam(5e-3), 8, 80)


@healthy("noise told from pictures at all times")
def diffusion() -> Training:
    """A loss that is noisy by its times, and stays well above 0."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.into = nn.Linear(16, 64), nn.Linear(64, 64)
            self.middle, self.out = plain(64, 64, 64, activation=nn.SiLU), nn.Linear(64, 64)
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            hidden = F.silu(self.into(x.flatten(1)) + self.time(time_features(t, 16)))
            return self.out(F.silu(hidden + self.middle(hidden))).view_as(x)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        (noised, t, _), noise = batch
        return F.mse_loss(model(noised, t), noise)

    model = Denoiser()
    return training(model, adam(3e-3)(model.parameters()), Step(loss), diffused, 64, 200)


@healthy("differential equation as the loss")
def physics() -> Training:
    """U'' = -pi² sin(pi x) with u = 0 at both ends (Raissi et al. 2019)."""

    def draw(n: int) -> tuple[Tensor, None]:
        return torch.rand(n, 1), None

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        ends = model(torch.tensor([[0.0], [1.0]]))
        return (ddu + math.pi**2 * (math.pi * x).sin()).pow(2).mean() + 10 * ends.pow(2).mean()

    model = plain(1, 32, 32, 1, activation=nn.Tanh)
    return training(model, adam(5e-3)(model.parameters()), Step(loss), draw, 64, 250)


@healthy("neurons that spike, by a surrogate slope")
def spikes() -> Training:
    return trains(spiking(), adam(2e-3), 32, 80)


@healthy("weights rounded to 4 bits in use")
def four_bits() -> Training:
    return trains(quantised(), adam(5e-3), 32, 80)


@healthy("quantised codes, of which some are never used")
def codes() -> Training:
    """The codes begin at what the encoder makes of sixteen samples."""
    model = VQVAE()
    model.codes.weight.data = model.encoder(flat(16)[0]).detach()
    return trains(subject(model, itself, vq_loss), adam(3e-3), 64, 200)


@healthy("spectral and weight norms")
def parametrised() -> Training:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(64, 64)), nn.LeakyReLU(),
        parametrizations.weight_norm(nn.Linear(64, 64)), nn.LeakyReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    return trains(classified(model), adam(5e-3), 64, 120)


@healthy("temperature of a choice that falls to its bound")
def tempered() -> Training:
    """Gumbel softmax from 2 down to 0.5 (Jang et al. 2017)."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.tau = plain(64, 64, 64), plain(64, 64, 64), 2.0

        def forward(self, x: Tensor) -> Tensor:
            choices = F.gumbel_softmax(self.encoder(x).view(-1, 8, 8), self.tau)
            return self.decoder(choices.flatten(1))

    t = trains(subject(Chosen(), itself, F.mse_loss), adam(3e-3), 64, 200)
    each_step(t, lambda number, model, _: setattr(model, "tau", max(0.5, 2 * 0.985**number)))
    return t


@healthy("state of an LSTM carried on, detached")
def carried() -> Training:
    """One long text in pieces: back through time within each alone."""
    model, state = LSTM(), [None]
    model.head = nn.Linear(32, 18)

    def step(model: LSTM, optimizer: Any, batch: Any) -> float:
        ids, _ = batch
        states, (h, c) = model.lstm(model.embedding(ids[:, :-1]), state[0])
        state[0] = (h.detach(), c.detach())
        loss = F.cross_entropy(model.head(states).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return training(model, adam(1e-2)(model.parameters()), step, words, 16, 120)
