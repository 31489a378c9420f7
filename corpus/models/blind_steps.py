"""Healthy training steps, as their methods are written, for the faults written blind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from corpus.models.parts import conv_net, follow, frozen
from corpus.models.small import (
    CNN,
    GPT,
    GRU,
    LSTM,
    MLP,
    VAE,
    Autoencoder,
    Multitask,
    Recommender,
    ResNet,
    Siamese,
    ViT,
    bert,
    both_targets,
    evidence_bound,
    flat,
    images,
    ink_loss,
    itself,
    label_loss,
    language_loss,
    matching,
    next_words,
    patients,
    plain,
    ratings,
    rows,
    views,
    words,
)
from corpus.subject import Training

Step = Callable[[nn.Module, Any, Any], Any]
Loss = Callable[[Any, Any], Tensor]

ACCUMULATE = 4
"""How many micro-batches a step of `accumulated` has."""

WARM_UP = 10
"""How many steps the rate of `language_model` rises."""


# ---- one model, one optimizer --------------------------------------------------------------------


def supervised(loss_of: Loss, max_norm: float | None = None) -> Step:
    """Return the step of a textbook, with the gradient clipped where a norm is given."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model(inputs), target)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss

    return step


def classifier() -> Training:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, optimizer, supervised(F.cross_entropy), flat(64))


def descended() -> Training:
    """Plain descent, with momentum."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Training(model, optimizer, supervised(F.cross_entropy), flat(48))


def convolutional() -> Training:
    model = CNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, supervised(F.cross_entropy), images(32))


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices, which decay, and vectors, which do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def residual() -> Training:
    model = ResNet(8, 2)
    groups = decay_groups(model, 5e-4)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    return Training(model, optimizer, supervised(F.cross_entropy), images(32))


def recurrent() -> Training:
    model = LSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, supervised(F.cross_entropy, 1.0), words(32))


def attended() -> Training:
    model = ViT()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.05), lr=1e-3)
    return Training(model, optimizer, supervised(F.cross_entropy, 1.0), images(32))


def regressed() -> Training:
    model = MLP(10, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Training(model, optimizer, supervised(F.mse_loss), patients(48))


def compressed() -> Training:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, supervised(F.mse_loss), itself(64))


def variational() -> Training:
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Training(model, optimizer, supervised(evidence_bound), itself(64))


def both_losses(output: Any, target: Any) -> Tensor:
    return label_loss(output, target) + 0.5 * ink_loss(output, target)


def multitask() -> Training:
    model = Multitask()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return Training(model, optimizer, supervised(both_losses), both_targets(32))


def pretrained() -> Training:
    """BERT of transformers, which returns its loss."""
    made = bert()
    optimizer = torch.optim.AdamW(decay_groups(made.model, 0.01), lr=3e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(made.model, optimizer, step, made.draw(24)[0])


def contrasted() -> Training:
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = matching(model(*batch))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, views(32)[0])


def fitted() -> Training:
    """LBFGS, which evaluates the loss several times a step."""
    model = MLP(10, 16, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=5)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), target)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Training(model, optimizer, step, patients(64))


# ---- schedules, accumulation, scale --------------------------------------------------------------


def warm_up(done: int) -> float:
    return min(1.0, (done + 1) / WARM_UP)


def scheduled(schedule: Any) -> Step:
    """Return the step of a language model, with its schedule."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        ids, following = batch
        loss = language_loss(model(ids), following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def language_model() -> Training:
    model = GPT(depth=2)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=3e-3, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, warm_up)
    return Training(model, optimizer, scheduled(schedule), next_words(16), (schedule,))


def micro_batches(batch: Any, n: int = ACCUMULATE) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.chunk(n) for part in batch), strict=True))


def accumulated() -> Training:
    model = GRU()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for inputs, target in micro_batches(batch):
            loss = F.cross_entropy(model(inputs), target) / ACCUMULATE
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Training(model, optimizer, step, rows(32))


def sharded() -> Training:
    """Two replicas' gradients, averaged as devices would."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        parameters, losses, shares = list(model.parameters()), [], []
        for inputs, target in micro_batches(batch, 2):
            losses.append(F.cross_entropy(model(inputs), target))
            shares.append(torch.autograd.grad(losses[-1], parameters))
        for parameter, *gradients in zip(parameters, *shares, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()
        return torch.stack(losses).mean().detach()

    return Training(model, optimizer, step, flat(64))


def mixed() -> Training:
    """Autocast to bfloat16, which needs no scale."""
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, images(32))


def half(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss under autocast to float16."""
    inputs, target = batch
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(inputs)
    return F.cross_entropy(output.float(), target)


def scaled() -> Training:
    """Autocast to float16, with a scale."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = half(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, flat(64), (scaler,))


STATIC_SCALE = 1024.0


def unscaled_by_hand(factor: float) -> Step:
    """Return a step whose loss is scaled, and whose gradients are divided by the factor."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = half(model, batch)
        (loss * STATIC_SCALE).backward()
        for parameter in model.parameters():
            parameter.grad.div_(factor)
        optimizer.step()
        return loss.detach()

    return step


def statically_scaled() -> Training:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Training(model, optimizer, unscaled_by_hand(STATIC_SCALE), flat(64))


def mastered() -> Training:
    """Weights in bfloat16, and the float32 ones that the optimizer holds."""
    model = MLP().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).float(), target)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        return loss.detach()

    pixels, labels = flat(64)
    return Training(model, optimizer, step, (pixels.bfloat16(), labels))


RADIUS = 0.1
"""How far `sharpness_aware` climbs with each parameter."""


def sharpness_aware() -> Training:
    """Climb a little, take the gradient there, come back, and step (Foret et al. 2021)."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        parameters = list(model.parameters())
        loss = F.cross_entropy(model(inputs), target)
        gradients = torch.autograd.grad(loss, parameters)
        climbs = [RADIUS * g / (g.norm() + 1e-12) for g in gradients]
        shift(parameters, climbs, 1)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        shift(parameters, climbs, -1)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, flat(48))


@torch.no_grad()
def shift(parameters: Iterable[Tensor], by: Iterable[Tensor], sign: int) -> None:
    for parameter, move in zip(parameters, by, strict=True):
        parameter.add_(move, alpha=sign)


def annealed() -> Training:
    """Noise added to the gradient (Neelakantan et al. 2015)."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad += 1e-3 * torch.randn_like(parameter)
        optimizer.step()
        return loss

    return Training(model, optimizer, step, flat(48))


# ---- part of a model -----------------------------------------------------------------------------


class Tuned(nn.Module):
    """A convolutional backbone with batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def head_only(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    inputs, target = batch
    model.train()
    model.backbone.eval()
    loss = F.cross_entropy(model(inputs), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def fine_tuned() -> Training:
    """The head of a frozen backbone, whose statistics are frozen too."""
    model = Tuned()
    frozen(model.backbone)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=3e-3)
    return Training(model, optimizer, head_only, images(32))


def staged() -> Training:
    """The second stage of a fine-tuning: all trains, the backbone at a lower rate."""
    model = Tuned()
    groups = [
        {"params": model.backbone.parameters(), "lr": 5e-4},
        {"params": model.head.parameters(), "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups)
    return Training(model, optimizer, supervised(F.cross_entropy), images(32))


class LoRA(nn.Module):
    """A linear layer with a low-rank addition (Hu et al. 2022)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * x @ self.lora_a.T @ self.lora_b.T


def with_adapters(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.attention.q, block.attention.v = LoRA(block.attention.q), LoRA(block.attention.v)
        block.mlp[2] = LoRA(block.mlp[2])
    return model


def adapted() -> Training:
    """Adapters in a frozen transformer, and a new head."""
    model = with_adapters(frozen(ViT()))
    model.head.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    return Training(model, optimizer, supervised(F.cross_entropy), images(32))


class Prototypes(nn.Module):
    """Cosines with prototypes, which stay of unit length (Caron et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prototypes = plain(64, 64, 32), nn.Linear(32, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prototypes(F.normalize(self.encoder(x), dim=-1)) / 0.2


def clustered() -> Training:
    model = Prototypes()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        with torch.no_grad():
            weight = model.prototypes.weight
            weight.copy_(F.normalize(weight, dim=-1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step, flat(48))


class Carried(nn.Module):
    """A language model whose state goes on from one stretch of text to the next."""

    def __init__(self, samples: int, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(18, 16), nn.Linear(width, 18)
        self.lstm = nn.LSTM(16, width, batch_first=True)
        self.register_buffer("hidden", torch.zeros(1, samples, width))
        self.register_buffer("cell", torch.zeros(1, samples, width))
        self.keep = torch.detach

    def forward(self, ids: Tensor) -> Tensor:
        states, (hidden, cell) = self.lstm(self.embedding(ids), (self.hidden, self.cell))
        self.hidden, self.cell = self.keep(hidden), self.keep(cell)
        return self.head(states)


def stateful() -> Training:
    """Truncated back-propagation through time."""
    model = Carried(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Training(model, optimizer, supervised(language_loss, 1.0), next_words(16))


# ---- averages, teachers, targets -----------------------------------------------------------------


def averaging(average: AveragedModel, source: nn.Module | None = None) -> Step:
    """Return a step that ends with the average moving to the model, or to the source."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        average.update_parameters(model if source is None else source)
        return loss.detach()

    return step


def averaged() -> Training:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    return Training(model, optimizer, averaging(average), flat(48), (average,))


class Bootstrap(nn.Module):
    """An online and a target encoder, and a predictor (Grill et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.online.append(nn.Linear(64, 32))
        self.target = frozen(copy.deepcopy(self.online))
        self.predictor = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.predictor.append(nn.Linear(32, 32))


def apart(prediction: Tensor, target: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(prediction, target, dim=-1).mean()


def bootstrapping(move: Callable[[nn.Module], None]) -> Step:
    """Return the step, at whose end `move` does what is done with the target."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        a, b = batch
        with torch.no_grad():
            target_a, target_b = model.target(a), model.target(b)
        loss = apart(model.predictor(model.online(a)), target_b)
        loss = loss + apart(model.predictor(model.online(b)), target_a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        move(model)
        return loss.detach()

    return step


def bootstrapped() -> Training:
    model = Bootstrap()
    trainable = [*model.online.parameters(), *model.predictor.parameters()]
    optimizer = torch.optim.Adam(trainable, lr=2e-3)
    step = bootstrapping(lambda model: follow(model.target, model.online))
    return Training(model, optimizer, step, views(32)[0])


class SelfTaught(nn.Module):
    """A student and a teacher, whose outputs are centred (Caron et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = plain(64, 64, 32, activation=nn.GELU)
        self.teacher = frozen(copy.deepcopy(self.student))
        self.register_buffer("center", torch.zeros(32))

    @torch.no_grad()
    def targets(self, x: Tensor) -> Tensor:
        output = self.teacher(x)
        wanted = ((output - self.center) / 0.05).softmax(-1)
        self.center.lerp_(output.mean(0), 0.1)
        return wanted


def teaching(model: nn.Module, batch: Any) -> Tensor:
    a, b = batch
    return F.cross_entropy(model.student(a) / 0.1, model.targets(b))


def self_taught() -> Training:
    model, batch = SelfTaught(), views(32)[0]
    model.center.copy_(model.teacher(batch[0]).mean(0))
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=3e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = teaching(model, batch)
        loss.backward()
        optimizer.step()
        follow(model.teacher, model.student, 0.996)
        return loss.detach()

    return Training(model, optimizer, step, batch)


class MeanTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = CNN()
        self.teacher = frozen(copy.deepcopy(self.student)).eval()


@torch.no_grad()
def follow_with_buffers(teacher: nn.Module, student: nn.Module) -> None:
    follow(teacher, student, 0.95)
    for slow, fast in zip(teacher.buffers(), student.buffers(), strict=True):
        slow.copy_(fast)


def consistent(move: Callable[[nn.Module, nn.Module], None]) -> Step:
    """Return a step with labels and a teacher's opinion (Tarvainen and Valpola 2017)."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        model.student.train()
        output = model.student(inputs)
        with torch.no_grad():
            opinion = model.teacher(inputs).softmax(-1)
        loss = F.cross_entropy(output, target) + F.mse_loss(output.softmax(-1), opinion)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        move(model.teacher, model.student)
        return loss.detach()

    return step


def mean_teacher() -> Training:
    model = MeanTeacher()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=3e-3)
    return Training(model, optimizer, consistent(follow_with_buffers), images(32))


class Values(nn.Module):
    """The values of 4 actions, by an online and a target net (Mnih et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = plain(8, 64, 64, 4)
        self.target = frozen(copy.deepcopy(self.online))


def transitions(n: int) -> tuple[Tensor, ...]:
    """Return states, actions, rewards, next states and whether that was the end."""
    states, actions = torch.randn(n, 8), torch.randint(4, (n,))
    rewards = (states[:, :4] * F.one_hot(actions, 4)).sum(1)
    return states, actions, rewards, torch.randn(n, 8), (torch.rand(n) < 0.1).float()


def surprise(model: nn.Module, batch: Any) -> Tensor:
    states, actions, rewards, following, done = batch
    with torch.no_grad():
        best = model.target(following).amax(1)
    wanted = rewards + 0.9 * (1 - done) * best
    values = model.online(states).gather(1, actions[:, None]).squeeze(1)
    return F.smooth_l1_loss(values, wanted)


def q_learner() -> Training:
    model = Values()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=2e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        loss = surprise(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(model.target, model.online, 0.995)
        return loss.item()

    return Training(model, optimizer, step, transitions(64))


# ---- several optimizers --------------------------------------------------------------------------


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = plain(16, 64, 64)
        self.discriminator = plain(64, 64, 1, activation=functools.partial(nn.LeakyReLU, 0.2))


def realism(scores: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def adversarial_step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    """Train the discriminator, then the generator."""
    of_generator, of_discriminator = optimizer
    fake = model.generator(torch.randn(len(batch), 16))
    of_discriminator.zero_grad()
    loss = realism(model.discriminator(batch), 1.0)
    loss = loss + realism(model.discriminator(fake.detach()), 0.0)
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    realism(model.discriminator(fake), 1.0).backward()
    of_generator.step()
    return loss.detach()


def adversarial() -> Training:
    model = Adversaries()
    optimizers = (
        torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        torch.optim.Adam(model.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    )
    return Training(model, optimizers, adversarial_step, flat(32)[0])


def earth_moving(clamped: str) -> Step:
    """Return the step of a Wasserstein GAN that clamps the weights of the part so named."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        of_generator, of_critic = optimizer
        with torch.no_grad():
            fake = model.generator(torch.randn(len(batch), 16))
        of_critic.zero_grad()
        loss = model.discriminator(fake).mean() - model.discriminator(batch).mean()
        loss.backward()
        of_critic.step()
        with torch.no_grad():
            for parameter in model.get_submodule(clamped).parameters():
                parameter.clamp_(-0.05, 0.05)
        fake = model.generator(torch.randn(len(batch), 16))
        of_generator.zero_grad()
        (-model.discriminator(fake).mean()).backward()
        of_generator.step()
        return loss.detach()

    return step


def wasserstein() -> Training:
    model = Adversaries()
    optimizers = (
        torch.optim.RMSprop(model.generator.parameters(), lr=2e-4),
        torch.optim.RMSprop(model.discriminator.parameters(), lr=1e-3),
    )
    return Training(model, optimizers, earth_moving("discriminator"), flat(32)[0])


class ActorCritic(nn.Module):
    """An action for each state, and the value of both (Lillicrap et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(plain(8, 32, 2), nn.Tanh())
        self.critic = plain(10, 64, 1)

    def value(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.critic(torch.cat([states, actions], -1)).squeeze(-1)


def tried(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, actions and rewards, each of which ends its episode."""
    states, actions = torch.randn(n, 8), 2 * torch.rand(n, 2) - 1
    return states, actions, 1 - ((actions - states[:, :2].tanh()) ** 2).sum(1)


def acting(of_actions: Callable[[Tensor], Tensor] = lambda actions: actions) -> Step:
    """Return a step of critic and actor; the critic sees the actor's actions as given."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        of_actor, of_critic = optimizer
        states, actions, rewards = batch
        loss = F.mse_loss(model.value(states, actions), rewards)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        worth = model.value(states, of_actions(model.actor(states)))
        of_actor.zero_grad()
        (-worth.mean()).backward()
        of_actor.step()
        return loss.detach()

    return step


def actor_critic() -> Training:
    model = ActorCritic()
    optimizers = (
        torch.optim.Adam(model.actor.parameters(), lr=1e-3),
        torch.optim.Adam(model.critic.parameters(), lr=3e-3),
    )
    return Training(model, optimizers, acting(), tried(64))


class Sparse(Recommender):
    """Embeddings with sparse gradients, which have an optimizer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.user.sparse = self.item.sparse = True


def recommended() -> Training:
    model = Sparse()
    embeddings = [model.user.weight, model.item.weight]
    optimizers = (
        torch.optim.SparseAdam(embeddings, lr=5e-3),
        torch.optim.SGD(model.mlp.parameters(), lr=0.3, momentum=0.9),
    )

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        (users, items), liked = batch
        loss = F.binary_cross_entropy_with_logits(model(users, items), liked)
        for each in optimizer:
            each.zero_grad()
        loss.backward()
        for each in optimizer:
            each.step()
        return loss.detach()

    return Training(model, optimizers, step, ratings(64))


class Extractor(nn.Module):
    """Features and a head, called one after the other by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = conv_net(32, 16), nn.Linear(32, 10)


def extracted() -> Training:
    model = Extractor()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        inputs, target = batch
        features = model.features(inputs)
        loss = F.cross_entropy(model.head(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step, images(32))


HEALTHY: tuple[Callable[[], Training], ...] = (
    *(classifier, descended, convolutional, residual, recurrent, attended, regressed, compressed),
    *(variational, multitask, pretrained, contrasted, fitted, language_model, accumulated, sharded),
    *(
        mixed,
        scaled,
        statically_scaled,
        mastered,
        sharpness_aware,
        annealed,
        fine_tuned,
        staged,
        adapted,
    ),
    *(clustered, stateful, averaged, bootstrapped, self_taught, mean_teacher, q_learner),
    *(adversarial, wasserstein, actor_critic, recommended, extracted),
)
