"""Designs that look like a fault: each is what its method does, from its paper or from practice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.models.small import CNN, MLP, Attention, flat, images, patients, plain, rows, words


def without_target(draw: Callable[[int], tuple[Any, Any]]) -> Callable[[int], tuple[Any, Any]]:
    return lambda n: (draw(n)[0], None)


# ---- nothing left to learn -----------------------------------------------------------------------


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


# ---- batches -------------------------------------------------------------------------------------


def one_class(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = flat(n)
    return pixels, torch.full_like(labels, 3)


def repeated_words(n: int) -> tuple[Tensor, Tensor]:
    """Each sequence repeats one token of its own."""
    _, labels = words(n)
    return (labels + 1)[:, None].expand(-1, 32), labels


# ---- small, large and deep -----------------------------------------------------------------------


def years(n: int) -> tuple[Tensor, Tensor]:
    """Targets far from zero, and near each other."""
    features, progression = patients(n)
    return features, 1990 + 10 * progression


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


# ---- adversaries, contrast, variational bounds ---------------------------------------------------


class Discriminator(nn.Module):
    """Real digits beside a generator's, which is not trained in this step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(16, 64, 64), nn.Tanh())
        self.net = plain(64, 64, 1, activation=nn.LeakyReLU)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(torch.randn(len(x), 16)).detach()
        return self.net(x), self.net(fake)


def hinge_gan(output: tuple[Tensor, Tensor]) -> Tensor:
    return F.relu(1 - output[0]).mean() + F.relu(1 + output[1]).mean()


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


# ---- evaluation mode before the first step: batch norms that normalise nothing -------------------


def conv_norms(depth: int, std: float, width: int = 16) -> nn.Module:
    """Return convolutions of this standard deviation, each with a batch norm, then an average."""
    layers: list[nn.Module] = []
    for index in range(depth):
        conv = nn.Conv2d(width if index else 1, width, 3, padding=1, bias=False)
        nn.init.normal_(conv.weight, std=std)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers, *head).eval()


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


# ---- densities, whose losses may be negative -----------------------------------------------------


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


# ---- sequences, policies, distillation -----------------------------------------------------------


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


# ---- parts that are frozen, tied or new ----------------------------------------------------------


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


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(10, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).clamp(-3, 3)


class ThreeChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = CNN()
        self.net.conv1 = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)
