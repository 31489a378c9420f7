"""Healthy controls whose design looks like a fault: gradients of zero, negative losses, cut graphs.

Each is what its method does, from its paper or from practice. Unhealthy is a false alarm.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.cases.controls import (
    adapt,
    after_training,
    as_bfloat16,
    changed,
    evaluated,
    of_batch,
    with_model,
)
from benchmarks.cases.models import (
    CNN,
    GCN,
    LSTM,
    MLP,
    Attention,
    ViT,
    autoencoder,
    citations,
    cnn,
    contrastive,
    flat,
    gpt,
    images,
    itself,
    mlp,
    patients,
    plain,
    resnet,
    rows,
    sequential,
    tumours,
    views,
    vit,
    words,
)
from benchmarks.cases.subject import Shelf, Subject

SHELF = Shelf()
control = SHELF.control


def without_target(draw: Callable[[int], tuple[Any, Any]]) -> Callable[[int], tuple[Any, Any]]:
    return lambda n: (draw(n)[0], None)


# ---- nothing left to learn ----------------------------------------------------------------------


def easy_hinge(output: Tensor, target: Tensor) -> Tensor:
    """Return a hinge that every sample satisfies: the scores lie far from its margin."""
    chosen = output.gather(1, target[:, None])
    return F.relu(output - chosen - 100.0).mean()


class Triplet(nn.Module):
    """Anchor, positive and negative through one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = plain(64, 64, 16)

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(a), self.encoder(p), self.encoder(n)


def satisfied(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.triplet_margin_loss(*output, margin=1e-4)


def easy_triplets(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    pixels, _ = flat(n)
    return (pixels, pixels + 1e-6, pixels.roll(1, 0) * 3 + 5), None


def hard_triplets(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    pixels, _ = flat(n)
    return (pixels, pixels + 0.1 * torch.randn_like(pixels), pixels.roll(1, 0)), None


def perfect(n: int) -> tuple[Tensor, Tensor]:
    pixels, _ = flat(n)
    return pixels, torch.zeros(n, 10)


def _zero_output(s: Subject) -> None:
    nn.init.zeros_(s.model.head.weight)
    nn.init.zeros_(s.model.head.bias)


control("hinge that every sample satisfies", with_model(MLP, flat, easy_hinge))
control("triplets that are all easy", with_model(Triplet, easy_triplets, satisfied))
control("triplets", after_training(with_model(
    Triplet, hard_triplets, lambda output: F.triplet_margin_loss(*output))))  # fmt: skip
control("perfect fit: a loss of zero", changed(
    with_model(MLP, perfect, F.mse_loss), _zero_output))  # fmt: skip
control("multi-margin loss, satisfied", with_model(
    MLP, flat, lambda output, labels: F.multi_margin_loss(
        output + 50.0 * F.one_hot(labels, 10), labels)))  # fmt: skip

# ---- batches ------------------------------------------------------------------------------------


def one_class(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = flat(n)
    return pixels, torch.full_like(labels, 3)


def repeated_words(n: int) -> tuple[Tensor, Tensor]:
    """Each sequence repeats one token of its own."""
    _, labels = words(n)
    return (labels + 1)[:, None].expand(-1, 32), labels


control("batch of a single class", with_model(MLP, one_class, F.cross_entropy))
control("batch of a single class, trained", after_training(
    with_model(MLP, one_class, F.cross_entropy)))  # fmt: skip
for _n in (1, 3):
    control(f"cnn in evaluation, batch of {_n}", of_batch(evaluated(after_training(cnn)), _n))
    control(f"lstm, batch of {_n}", of_batch(with_model(LSTM, words, F.cross_entropy), _n))
control("contrastive, batch of 2", of_batch(contrastive, 2))
control("one token all along each sequence", with_model(LSTM, repeated_words, F.cross_entropy))

# ---- small, large and deep ----------------------------------------------------------------------


def prices(n: int) -> tuple[Tensor, Tensor]:
    """Targets of some hundred thousand, as they are."""
    features, progression = patients(n)
    return features, 3e5 + 1e5 * progression


def years(n: int) -> tuple[Tensor, Tensor]:
    """Targets far from zero, and near each other."""
    features, progression = patients(n)
    return features, 1990 + 10 * progression


def _towards_years(s: Subject) -> None:
    s.model.head.bias.data.fill_(1990.0)
    s.model.head.weight.data *= 0.1


class ResidualStack(nn.Module):
    """A hundred pre-norm residual blocks."""

    def __init__(self, width: int = 32, depth: int = 100) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.branches = nn.ModuleList(plain(width, width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return self.head(x)


control("one linear layer", with_model(lambda: nn.Linear(64, 10), flat, F.cross_entropy))
control("linear regression", with_model(lambda: nn.Linear(10, 1), patients, F.mse_loss))
control("logistic regression, trained", after_training(with_model(
    lambda: nn.Linear(30, 1), tumours, F.binary_cross_entropy_with_logits)))  # fmt: skip
control("years as targets, bias at their mean", changed(
    with_model(lambda: MLP(10, 32, 1), years, F.mse_loss), _towards_years))  # fmt: skip
control("100 residual blocks", with_model(ResidualStack, flat, F.cross_entropy))
control("dropout of 0.9", with_model(lambda: nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.9), nn.Linear(256, 10)),
    flat, F.cross_entropy))  # fmt: skip
control("vit, trained, in bfloat16", as_bfloat16(after_training(vit)))

# ---- adversaries, contrast, variational bounds --------------------------------------------------


class Discriminator(nn.Module):
    """Real digits beside a generator's, which is not trained in this step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(16, 64, 64), nn.Tanh())
        self.net = plain(64, 64, 1, activation=nn.LeakyReLU)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(torch.randn(len(x), 16)).detach()
        return self.net(x), self.net(fake)


def _only_discriminator(s: Subject) -> None:
    s.model.generator.requires_grad_(False)


def hinge_gan(output: tuple[Tensor, Tensor]) -> Tensor:
    return F.relu(1 - output[0]).mean() + F.relu(1 + output[1]).mean()


def gradient_penalty(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of WGAN-GP, which differentiates the critic once more."""

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        x = torch.randn(16, 64, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        fake, real = output[labels < 5].mean(), output[labels >= 5].mean()
        return fake - real + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return loss


def _penalised(s: Subject) -> None:
    s.loss = gradient_penalty(s.model)


control("discriminator, generator frozen", changed(
    with_model(Discriminator, without_target(flat), hinge_gan), _only_discriminator))  # fmt: skip
control("critic with a gradient penalty", changed(
    with_model(lambda: plain(64, 64, 1, activation=nn.LeakyReLU), flat, None),
    _penalised))  # fmt: skip


control("discriminator, generator not frozen", with_model(
    Discriminator, without_target(flat), hinge_gan))  # fmt: skip


class Distilled(nn.Module):
    """A student learns what a teacher says of the batch; nobody froze the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = plain(64, 128, 10), plain(64, 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(1)
        return F.cross_entropy(self.student(x), target)


class Probe(nn.Module):
    """A head on features that nobody froze, but that are made without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = plain(64, 64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.features(x)
        return self.head(F.relu(x))


control("teacher under no_grad, not frozen", with_model(Distilled, without_target(flat), None))
control("features under no_grad, not frozen", with_model(Probe, flat, F.cross_entropy))

# ---- evaluation mode before the first step: batch norms that normalise nothing -------------------


def _drawn(model: nn.Module, scale: float, shift: float) -> nn.Module:
    """Draw scales around one, as DCGAN does, or around `scale` with shifts, as RepVGG does."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, scale, 0.02 if shift == 0.0 else shift)
            nn.init.normal_(module.bias, 0.0, shift)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model.eval()


def conv_norms(depth: int, std: float, width: int = 16) -> nn.Module:
    """Return convolutions of this standard deviation, each with a batch norm, then an average."""
    layers: list[nn.Module] = []
    for index in range(depth):
        conv = nn.Conv2d(width if index else 1, width, 3, padding=1, bias=False)
        nn.init.normal_(conv.weight, std=std)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers, *head).eval()


for _std in (0.01, 0.05, 0.3):
    control(f"24 convolutions of deviation {_std}, initialised, eval", with_model(
        functools.partial(conv_norms, 24, _std), images, F.cross_entropy, 32))  # fmt: skip
for _scale, _shift in ((1.0, 0.0), (0.0, 0.0), (0.1, 0.1)):
    control(f"scales drawn around {_scale}, shifts by {_shift}, eval", with_model(
        lambda scale=_scale, shift=_shift: _drawn(conv_norms(6, 0.1), scale, shift),
        images, F.cross_entropy, 32))  # fmt: skip


class BYOL(nn.Module):
    """An online net predicts what its slow copy makes of another view (Grill et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = plain(64, 64, 16), plain(16, 32, 16)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.normalize(self.slow(b), dim=1)
        return -(F.normalize(self.predictor(self.online(a)), dim=1) * target).sum(1).mean()


class SimSiam(nn.Module):
    """Stops the gradient through one of two views (Chen and He 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = plain(64, 64, 16), plain(16, 32, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.encoder(a), self.encoder(b)
        one = F.cosine_similarity(self.predictor(a), b.detach(), dim=1).mean()
        other = F.cosine_similarity(self.predictor(b), a.detach(), dim=1).mean()
        return -(one + other) / 2


control("BYOL", with_model(BYOL, views, None))
control("SimSiam", with_model(SimSiam, views, None))


class VQVAE(nn.Module):
    """A straight-through estimator past the nearest code (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 8), plain(8, 32, 64)
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z.detach(), self.codes.weight).argmin(1))
        return self.decoder(z + (code - z).detach()), z, code


def vq_loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    made, z, code = output
    return F.mse_loss(made, target) + F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach())


class Bits(nn.Module):
    """Binary codes whose gradient goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 64, 32), plain(32, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        soft = torch.tanh(self.encoder(x))
        return self.decoder(soft + (soft.sign() - soft).detach())


control("VQ-VAE", with_model(VQVAE, itself, vq_loss))
control("binary codes, straight through", with_model(Bits, itself, F.mse_loss))
control("gumbel softmax, hard", with_model(lambda: Router(), itself, F.mse_loss))


class Router(nn.Module):
    """Hard choices with the gradient of soft ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 64, 32), plain(32, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        choices = F.gumbel_softmax(self.encoder(x).view(-1, 4, 8), hard=True)
        return self.decoder(choices.flatten(1))


def ink(n: int) -> tuple[Tensor, Tensor]:
    pixels, _ = flat(n)
    black = (pixels > 0).float()
    return black, black


control("autoencoder of binary pixels", with_model(
    lambda: plain(64, 16, 64), ink, F.binary_cross_entropy_with_logits))  # fmt: skip

# ---- densities, whose losses may be negative ----------------------------------------------------


class Coupling(nn.Module):
    """An affine coupling layer (Dinh et al. 2017), the identity at its start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = plain(width // 2, 64, width)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        return torch.cat([moved * scale.exp() + shift, kept], 1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self, width: int = 10, depth: int = 4) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width) for _ in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, log_determinant = coupling(x)
            total = total + log_determinant
        return x, total


def likelihood(output: tuple[Tensor, Tensor]) -> Tensor:
    z, log_determinant = output
    return (0.5 * (z**2).sum(1) - log_determinant).mean()


def narrow(n: int) -> tuple[Tensor, None]:
    """Points whose density is above 1."""
    return 0.2 * torch.randn(n, 10), None


class Mixture(nn.Module):
    """A mixture density network (Bishop 1994)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(10, 32, 15, activation=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, mean, log_std = self.net(x).chunk(3, 1)
        return weight.log_softmax(1), mean, log_std


def mixture_likelihood(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    weight, mean, log_std = output
    density = torch.distributions.Normal(mean, 0.01 * log_std.exp())
    return -torch.logsumexp(weight + density.log_prob(0.01 * target), 1).mean()


control("normalising flow", with_model(Flow, without_target(patients), likelihood))
control(
    "normalising flow of narrow points, trained",
    after_training(with_model(Flow, narrow, likelihood)),
)
control("mixture density network", with_model(Mixture, patients, mixture_likelihood))
control("mixture density network, trained", after_training(
    with_model(Mixture, patients, mixture_likelihood)))  # fmt: skip

# ---- sequences, policies, distillation ----------------------------------------------------------


class Recogniser(nn.Module):
    """Log-probabilities of symbols for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0]).log_softmax(-1)


def spoken(n: int) -> tuple[Tensor, Tensor]:
    sequences, labels = rows(n)
    return sequences, torch.stack([labels % 5 + 1, (labels + 2) % 5 + 1], 1)


def connectionist(output: Tensor, target: Tensor) -> Tensor:
    samples, frames = output.shape[:2]
    lengths = torch.full((samples,), frames), torch.full((samples,), target.shape[1])
    return F.ctc_loss(output.transpose(0, 1), target, *lengths)


class CRF(nn.Module):
    """Scores of tags, and of transitions that start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 4)
        self.transitions = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.gru(x)[0]), self.transitions


def crf_likelihood(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    scores, transitions = output
    tags = (labels[:, None] + torch.arange(8)) % 4
    gold = scores.gather(2, tags[..., None]).squeeze(2).sum(1)
    gold = gold + transitions[tags[:, :-1], tags[:, 1:]].sum(1)
    total = scores[:, 0]
    for step in range(1, 8):
        total = torch.logsumexp(total[:, :, None] + transitions, 1) + scores[:, step]
    return (torch.logsumexp(total, 1) - gold).mean()


def policy_gradient(output: Tensor, labels: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=output)
    return -(policy.log_prob(policy.sample()) * (labels - 6.0)).mean()


def clipped_policy(output: Tensor, labels: Tensor) -> Tensor:
    """Return PPO's loss, whose ratio is 1 at the first step."""
    policy = torch.distributions.Categorical(logits=output)
    chosen = policy.log_prob(labels)
    ratio, gain = (chosen - chosen.detach()).exp(), labels - 4.5
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def negative_entropy(output: Tensor, _: Tensor) -> Tensor:
    return (output.softmax(1) * output.log_softmax(1)).sum(1).mean()


class QLearning(nn.Module):
    """Temporal differences against a frozen copy."""

    def __init__(self) -> None:
        super().__init__()
        self.q = plain(64, 64, 4)
        self.slow = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x), self.slow(x.roll(1, 0)).amax(1)


def temporal(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    values, following = output
    return F.smooth_l1_loss(values.gather(1, labels[:, None] % 4)[:, 0], labels + 0.9 * following)


class Student(nn.Module):
    """Learns from a frozen teacher beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = plain(64, 32, 10), plain(64, 128, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distillation(output: tuple[Tensor, Tensor]) -> Tensor:
    student, teacher = (logits / 4 for logits in output)
    return F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


control("CTC", with_model(Recogniser, spoken, connectionist))
control("conditional random field", with_model(CRF, rows, crf_likelihood))
control("policy gradient of sampled actions: negative loss", with_model(MLP, flat, policy_gradient))
control("clipped policy gradient, first step", with_model(MLP, flat, clipped_policy))
control("Q-learning", with_model(QLearning, flat, temporal))
control("distillation", with_model(Student, without_target(flat), distillation))
control("entropy to be maximised: negative loss", with_model(MLP, flat, negative_entropy))

# ---- parts that are frozen, tied or new ---------------------------------------------------------


def _frozen_backbone(s: Subject) -> None:
    s.model.requires_grad_(False).eval()
    s.model.head.requires_grad_(True).train()


class Prompted(nn.Module):
    """A frozen transformer behind tokens that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(0.02 * torch.randn(4, 32))
        self.embedding = nn.Embedding(18, 32).requires_grad_(False)
        self.attention, self.head = Attention(32, 4).requires_grad_(False), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.embedding(ids)], 1)
        return self.head((x + self.attention(x)).mean(1))


class Unetlike(nn.Module):
    """Predicts noise; its last convolution starts at zero (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.time, self.conv2 = nn.Linear(16, 32), nn.Conv2d(32, 32, 3, padding=1)
        self.out = nn.Conv2d(32, 1, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        phase = step[:, None] * 100 ** (-torch.arange(8) / 8)
        time = self.time(torch.cat([phase.sin(), phase.cos()], 1))[..., None, None]
        return self.out(F.silu(self.conv2(F.silu(self.norm(self.conv1(x)) + time))))


def noised_images(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    clean, _ = images(n)
    noise, step = torch.randn_like(clean), torch.randint(0, 1000, (n,)).float()
    kept = (1 - step / 1000)[:, None, None, None]
    return (kept.sqrt() * clean + (1 - kept).sqrt() * noise, step), noise


class Checkpointed(nn.Module):
    """Computes its blocks again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(plain(32, 64, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(64, 16), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T, self.bias)


class Factors(nn.Module):
    """Users and items as embeddings, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(500, 8), nn.Embedding(800, 8)
        self.user_bias, self.item_bias = nn.Embedding(500, 1), nn.Embedding(800, 1)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = (self.user(users) * self.item(items)).sum(1)
        return product + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0]


def stars(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randint(0, 500, (n,)), torch.randint(0, 800, (n,))), torch.randint(
        1, 6, (n,)
    ) + 0.0


def _isolate(s: Subject) -> None:
    """Leave half of the nodes without neighbours."""
    nodes, edges = s.inputs
    edges = edges.clone()
    edges[::2], edges[:, ::2] = 0.0, 0.0
    s.inputs = nodes, edges


class Physics(nn.Module):
    """Solves u'' = -u; its loss differentiates it twice (Raissi et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(1, 32, 32, 1, activation=nn.Tanh)

    def forward(self, t: Tensor) -> Tensor:
        t = t.requires_grad_() if not t.requires_grad else t
        u = self.net(t)
        (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
        return second + u


def moments(n: int) -> tuple[Tensor, None]:
    return torch.rand(n, 1) * 6, None


class SparseMoE(nn.Module):
    """Each sample goes to 2 of 32 experts; most see none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(64, 32), nn.Linear(32, 32, bias=False)
        self.experts, self.head = (
            nn.ModuleList(plain(32, 64, 32) for _ in range(32)),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        made = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            sample, place = (chosen == index).nonzero(as_tuple=True)
            made = made.index_add(0, sample, weights[sample, place, None] * expert(x[sample]))
        return self.head(x + made)


def _parametrize(s: Subject) -> None:
    parametrizations.weight_norm(s.model[0])
    parametrizations.spectral_norm(s.model[2])


control("backbone frozen in evaluation, head trains", changed(
    after_training(resnet), _frozen_backbone))  # fmt: skip
control("learnt prompt before a frozen transformer", with_model(Prompted, words, F.cross_entropy))
control("gpt with trained LoRA adapters", after_training(changed(gpt, adapt)))
control("noise prediction, last convolution zero", with_model(
    Unetlike, noised_images, F.mse_loss))  # fmt: skip
control("gradient checkpointing", with_model(Checkpointed, flat, F.cross_entropy))
control("decoder tied to the encoder", with_model(Tied, itself, F.mse_loss))
control("factors of users and items", with_model(Factors, stars, F.mse_loss))
control("graph with isolated nodes", changed(
    with_model(GCN, citations, F.cross_entropy), _isolate))  # fmt: skip
control("physics-informed", with_model(
    Physics, moments, lambda residual: (residual**2).mean()))  # fmt: skip
control("2 of 32 experts", of_batch(with_model(SparseMoE, flat, F.cross_entropy), 16))
control("weight and spectral norm", changed(sequential, _parametrize))
control("compiled", changed(mlp, lambda s: setattr(
    s, "model", torch.compile(s.model, backend="eager"))))  # fmt: skip


class TorchEncoder(nn.Module):
    """Attention of torch's own, with its padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 32, padding_idx=0)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True),
            2, enable_nested_tensor=False)  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1))


def padded_words(n: int) -> tuple[Tensor, Tensor]:
    ids, labels = words(n)
    return ids * (torch.arange(32) < torch.randint(4, 33, (n, 1))), labels


control("torch's encoder with padding", with_model(TorchEncoder, padded_words, F.cross_entropy))
control("torch's encoder with padding, trained", after_training(
    with_model(TorchEncoder, padded_words, F.cross_entropy)))  # fmt: skip
control("focal loss of a table", with_model(
    lambda: MLP(30, 32, 1), tumours, lambda output, target: (
    (1 - torch.exp(-F.binary_cross_entropy_with_logits(output, target, reduction="none"))) ** 2
    * F.binary_cross_entropy_with_logits(output, target, reduction="none")).mean()))  # fmt: skip
control("dice loss of a mask", with_model(
    lambda: nn.Conv2d(1, 1, 3, padding=1), lambda n: (images(n)[0], (images(n)[0] > 0).float()),
    lambda output, mask: 1 - 2 * (output.sigmoid() * mask).sum()
    / (output.sigmoid().sum() + mask.sum())))  # fmt: skip
control("negative cosine similarity as a loss", with_model(
    lambda: MLP(64, 64, 64), itself,
    lambda output, target: -F.cosine_similarity(output, target, dim=1).mean()))  # fmt: skip
control("outputs bounded by clamp", with_model(
    lambda: Clamped(), patients, F.mse_loss))  # fmt: skip


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(10, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).clamp(-3, 3)


control("images repeated as three channels", with_model(
    lambda: ThreeChannels(), lambda n: (images(n)[0].repeat(1, 3, 1, 1), images(n)[1]),
    F.cross_entropy))  # fmt: skip


class ThreeChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = CNN()
        self.net.conv1 = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


control("tokens of a closed image border", with_model(
    lambda: ViT(), lambda n: (F.pad(images(n)[0][..., 2:6, 2:6], (2, 2, 2, 2)), images(n)[1]),
    F.cross_entropy, 32))  # fmt: skip
control("autoencoder, trained to saturation", after_training(autoencoder, 400))
control("cross_entropy of soft targets", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(
        output, F.one_hot(labels, 10) * 0.9 + 0.01)))  # fmt: skip
control("loss per token, weighted", with_model(
    MLP, flat, functools.partial(F.cross_entropy, weight=torch.arange(1.0, 11.0))))  # fmt: skip
control("sum of squares of logits kept small", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(output, labels)
    + 1e-4 * output.logsumexp(1).pow(2).mean()))  # fmt: skip
control("initial scale of a wide layer by fan-out", with_model(
    lambda: _by_fan_out(), flat, F.cross_entropy))  # fmt: skip


def _by_fan_out() -> nn.Module:
    model = plain(64, 512, 10)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.out_features))
    return model
