"""Gradients that are stopped, replaced or scaled on purpose."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from corpus.cards import Shelf
from corpus.models.parts import (
    Patches,
    PlacedTokens,
    PreNorm,
    SmallLM,
    attend,
    conv_net,
    diffused,
    ffn,
    follow,
    frozen,
    lookalikes_of,
    loss_entry,
    normal,
    perceptron,
    pictures,
    time_features,
    tokens,
    unlabelled,
    unlabelled_flat,
)
from corpus.models.small import (
    flat,
    images,
    itself,
    language_loss,
    next_words,
    patients,
    views,
    words,
)

SHELF = Shelf("gradient", "blind")
lookalike = lookalikes_of(SHELF)


@dataclass
class Quantised:
    made: Tensor
    codebook: Tensor
    commitment: Tensor
    perplexity: float


@lookalike(
    "VQ-VAE: straight-through codes and a commitment loss",
    pictures,
    lambda out, x: F.mse_loss(out.made, x) + out.codebook + 0.25 * out.commitment,
)
class VQVAE(nn.Module):
    def __init__(self, width: int = 8, codes: int = 32) -> None:
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 3, padding=1)
        )
        self.dec = nn.Sequential(
            nn.Conv2d(width, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
        )
        self.codebook = nn.Embedding(codes, width)
        nn.init.normal_(self.codebook.weight, std=0.2)

    def forward(self, image: Tensor) -> Quantised:
        z = self.enc(image).permute(0, 2, 3, 1)
        index = torch.cdist(z.flatten(0, 2), self.codebook.weight).argmin(-1)
        q = self.codebook(index).view_as(z)
        use = torch.bincount(index, minlength=self.codebook.num_embeddings) / len(index)
        return Quantised(
            made=self.dec((z + (q - z).detach()).permute(0, 3, 1, 2)),
            codebook=F.mse_loss(q, z.detach()),
            commitment=F.mse_loss(z, q.detach()),
            perplexity=torch.exp(-(use * (use + 1e-9).log()).sum()).item(),
        )


@lookalike(
    "VQ-VAE whose codebook is a moving average in buffers",
    itself,
    lambda out, x: F.mse_loss(out[0], x) + 0.25 * out[1],
)
class MovingCodebook(nn.Module):
    def __init__(self, width: int = 4, codes: int = 16) -> None:
        super().__init__()
        self.analysis, self.synthesis = perceptron(64, 48, 8 * width), perceptron(8 * width, 48, 64)
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    @torch.no_grad()
    def update(self, z: Tensor, index: Tensor) -> None:
        chosen = F.one_hot(index, len(self.codes)).float()
        self.counts.lerp_(chosen.sum(0), 0.01)
        self.sums.lerp_(chosen.T @ z, 0.01)
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.analysis(x).view(-1, self.codes.shape[1])
        index = torch.cdist(z.detach(), self.codes).argmin(-1)
        q = self.codes[index]
        if self.training:
            self.update(z.detach(), index)
        straight = z + (q - z).detach()
        return self.synthesis(straight.view(len(x), -1)), F.mse_loss(z, q)


@lookalike("discrete latents by hard Gumbel-softmax", itself, F.mse_loss)
class GumbelAutoencoder(nn.Module):
    def __init__(self, groups: int = 8, classes: int = 6) -> None:
        super().__init__()
        self.to_logits = perceptron(64, 64, groups * classes)
        self.from_codes = perceptron(groups * classes, 64, 64)
        self.shape = (groups, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.to_logits(x).unflatten(-1, self.shape)
        return self.from_codes(F.gumbel_softmax(logits, tau=1.0, hard=True).flatten(1))


@lookalike("finite scalar quantisation: rounding passed straight through", itself, F.mse_loss)
class FSQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(64, 64, 12), perceptron(12, 64, 64)
        self.register_buffer("reach", torch.tensor([3.5, 2.0, 2.0] * 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).tanh() * self.reach
        return self.decoder((z + (z.round() - z).detach()) / self.reach)


class LSQLinear(nn.Linear):
    """Fake-quantised to 4 bits with learned step sizes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.step_w = nn.Parameter(2 * self.weight.detach().abs().mean() / 7**0.5)
        self.step_x = nn.Parameter(torch.tensor(0.3))

    @staticmethod
    def quantise(x: Tensor, step: Tensor) -> Tensor:
        scaled = (x / step).clamp(-8, 7)
        return (scaled + (scaled.round() - scaled).detach()) * step

    def forward(self, x: Tensor) -> Tensor:
        weight = self.quantise(self.weight, self.step_w)
        return F.linear(self.quantise(x, self.step_x), weight, self.bias)


@lookalike("quantisation-aware training with learned steps", flat)
def lsq() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), LSQLinear(48, 32), nn.ReLU(), LSQLinear(32, 10)
    )


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        alpha = self.weight.abs().mean(1, keepdim=True).detach()
        return F.linear(Sign.apply(x), alpha * Sign.apply(self.weight), self.bias)


@lookalike("binary weights and activations", flat)
def binary_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        BinaryLinear(64, 64),
        nn.BatchNorm1d(64),
        BinaryLinear(64, 64),
        nn.BatchNorm1d(64),
        nn.Linear(64, 10),
    )


def hinge(out: dict[str, Tensor]) -> Tensor:
    return F.relu(1 - out["real"]).mean() + F.relu(1 + out["fake"]).mean()


@lookalike("GAN, the step of the discriminator: the fake is detached", unlabelled, hinge)
class DiscriminatorStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(perceptron(16, 64, 64), nn.Unflatten(1, (1, 8, 8)))
        self.D = nn.Sequential(conv_net(32), nn.Linear(32, 1))

    def forward(self, real: Tensor) -> dict[str, Tensor]:
        fake = self.G(torch.randn(len(real), 16)).detach()
        return {"real": self.D(real), "fake": self.D(fake)}


@lookalike(
    "GAN, the step of the generator: the discriminator is frozen",
    lambda n: (torch.randn(n, 16), None),
    lambda score: -score.mean(),
)
class GeneratorStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, 128),
            nn.Unflatten(1, (8, 4, 4)),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = frozen(nn.Sequential(conv_net(32), nn.Linear(32, 1)))

    def forward(self, z: Tensor) -> Tensor:
        return self.discriminator(self.generator(z))


@lookalike(
    "WGAN-GP: the critic's penalty needs the gradient of a gradient", unlabelled_flat, loss_entry
)
class PenalisedCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = perceptron(16, 64, 64)
        self.critic = perceptron(64, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2))

    def forward(self, real: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), 16))
        between = torch.lerp(fake, real, torch.rand(len(real), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        gap = self.critic(fake).mean() - self.critic(real).mean()
        return {"loss": gap + 10 * penalty, "wasserstein": -gap.detach()}


@lookalike(
    "VQGAN before its discriminator starts: the adversarial weight is 0", unlabelled, loss_entry
)
class DelayedAdversary(nn.Module):
    def __init__(self, start: int = 1000) -> None:
        super().__init__()
        self.autoencoder = nn.Sequential(
            nn.Conv2d(1, 12, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(12, 1, 4, 2, 1)
        )
        self.perceptual = frozen(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
        self.adversary = frozen(nn.Sequential(conv_net(16), nn.Linear(16, 1)))
        self.start = start
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = self.autoencoder(x)
        perceptual = F.mse_loss(self.perceptual(made), self.perceptual(x))
        weight = float(self.step >= self.start)
        self.step += 1
        fooled = -self.adversary(made).mean()
        return {"loss": F.l1_loss(made, x) + perceptual + weight * fooled, "made": made}


def episodes(n: int) -> tuple[tuple[Tensor, ...], None]:
    """Return observations, actions, rewards, next observations and ends."""
    state = torch.randn(n, 6)
    ends = (torch.rand(n) < 0.1).float()
    action = torch.randint(0, 4, (n,))
    return (state, action, state[:, 0] + 0.1 * action, state + 0.1 * torch.randn(n, 6), ends), None


@lookalike("actor-critic: the advantage is detached", episodes, loss_entry, 64)
class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor, end: Tensor) -> dict[str, Any]:
        h = self.body(s)
        value = self.v(h).squeeze(-1)
        with torch.no_grad():
            goal = r + 0.99 * (1 - end) * self.v(self.body(s2)).squeeze(-1)
        advantage = (goal - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.distributions.Categorical(logits=self.pi(h))
        actor = -(policy.log_prob(a) * advantage).mean()
        loss = actor + 0.5 * F.mse_loss(value, goal) - 0.01 * policy.entropy().mean()
        return {"loss": loss, "value": value.mean().item()}


@lookalike(
    "double DQN with duelling heads and a target net under no_grad", episodes, loss_entry, 64
)
class DuellingDQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.ModuleDict(
            {"torso": nn.Linear(6, 48), "value": nn.Linear(48, 1), "advantage": nn.Linear(48, 4)}
        )
        self.target = frozen(copy.deepcopy(self.online))

    @staticmethod
    def q(net: nn.ModuleDict, s: Tensor) -> Tensor:
        h = net["torso"](s).relu()
        advantage = net["advantage"](h)
        return net["value"](h) + advantage - advantage.mean(-1, keepdim=True)

    def forward(
        self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor, end: Tensor
    ) -> dict[str, Tensor]:
        taken = self.q(self.online, s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.q(self.online, s2).argmax(1, keepdim=True)
            goal = r + 0.99 * (1 - end) * self.q(self.target, s2).gather(1, best).squeeze(1)
        return {"loss": F.smooth_l1_loss(taken, goal), "td": (goal - taken).detach().abs()}


@lookalike("PPO: ratios clipped against detached policies and values", episodes, loss_entry, 64)
class ClippedPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (perceptron(6, 32, k, act=nn.Tanh) for k in (4, 1))

    def forward(
        self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor, end: Tensor
    ) -> dict[str, Tensor]:
        policy = torch.distributions.Categorical(logits=self.actor(s))
        log_p, value = policy.log_prob(a), self.critic(s).squeeze(-1)
        old_log_p, old_value = log_p.detach(), value.detach()  # the first of the epochs
        goal = r + 0.99 * (1 - end) * self.critic(s2).squeeze(-1).detach()
        advantage = goal - old_value
        ratio = (log_p - old_log_p).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
        value_loss = torch.max((value - goal) ** 2, (clipped - goal) ** 2).mean()
        return {"loss": 0.5 * value_loss - gain, "ratio": ratio.detach()}


@lookalike(
    "QMIX: mixing weights made by hypernetworks, a target agent under no_grad",
    lambda n: ((torch.randn(n, 3, 5), torch.randint(0, 4, (n, 3)), torch.randn(n)), None),
    lambda td: td.square().mean(),
)
class QMix(nn.Module):
    def __init__(self, agents: int = 3, hidden: int = 16) -> None:
        super().__init__()
        self.agent, self.target_agent = perceptron(5, 32, 4), frozen(perceptron(5, 32, 4))
        self.hyper_w1, self.hyper_b1 = nn.Linear(5 * agents, agents * hidden), nn.Linear(15, hidden)
        self.hyper_w2, self.hyper_b2 = nn.Linear(5 * agents, hidden), perceptron(15, hidden, 1)
        self.shape = (agents, hidden)

    def mix(self, q: Tensor, state: Tensor) -> Tensor:
        w1 = self.hyper_w1(state).abs().unflatten(-1, self.shape)
        h = F.elu((q[:, None] @ w1).squeeze(1) + self.hyper_b1(state))
        return (h * self.hyper_w2(state).abs()).sum(-1) + self.hyper_b2(state).squeeze(-1)

    def forward(self, seen: Tensor, actions: Tensor, reward: Tensor) -> Tensor:
        state = seen.flatten(1)
        chosen = self.agent(seen).gather(-1, actions[..., None]).squeeze(-1)
        with torch.no_grad():
            goal = reward + 0.9 * self.mix(self.target_agent(seen).amax(-1), state)
        return self.mix(chosen, state) - goal


@lookalike(
    "random network distillation: the target stays random", unlabelled_flat, lambda out: out.mean()
)
class Novelty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.predictor, self.target = perceptron(64, 64, 32, 16), frozen(perceptron(64, 64, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.predictor(x) - self.target(x)).square().mean(-1)


def cosine(p: Tensor, z: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


@lookalike("BYOL: an EMA teacher under no_grad", views, None)
class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)
        )
        self.momentum = frozen(copy.deepcopy(self.online))
        self.predictor = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            follow(self.momentum, self.online)
            ta, tb = self.momentum(a), self.momentum(b)
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        return cosine(pa, tb) + cosine(pb, ta)


@lookalike(
    "SimSiam with an online probe on detached features",
    flat,
    lambda out, y: out["similarity"] + F.cross_entropy(out["probe"], y),
    48,
)
class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.h = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 32))
        self.online_probe = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z1, z2 = (self.f(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        similarity = (cosine(self.h(z1), z2) + cosine(self.h(z2), z1)) / 2
        return {"similarity": similarity, "probe": self.online_probe(z1.detach())}


class UnitLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


@lookalike(
    "DINO: a centred, sharpened teacher, and local crops for the student alone", unlabelled, None
)
class DINO(nn.Module):
    def __init__(self, prototypes: int = 24) -> None:
        super().__init__()

        def tower() -> nn.Sequential:
            last = parametrizations.weight_norm(nn.Linear(32, prototypes, bias=False))
            last.parametrizations.weight.original0.requires_grad_(False)
            return nn.Sequential(conv_net(32), nn.Linear(32, 32), UnitLength(), last)

        self.student, self.teacher = tower(), frozen(tower())
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("center", torch.zeros(1, prototypes))

    def forward(self, x: Tensor) -> Tensor:
        wide = [x + 0.1 * torch.randn_like(x), x.roll(1, -1)]
        seen = [self.student(v) for v in [*wide, x[..., 2:, 2:], x[..., :-2, :-2]]]
        with torch.no_grad():
            taught = [self.teacher(v) for v in wide]
            goals = [((t - self.center) / 0.04).softmax(-1) for t in taught]
            self.center.lerp_(torch.cat(taught).mean(0, keepdim=True), 0.1)
            follow(self.teacher, self.student)
        pairs = [(g, s) for i, g in enumerate(goals) for j, s in enumerate(seen) if i != j]
        return sum(-(g * (s / 0.1).log_softmax(-1)).sum(-1).mean() for g, s in pairs) / len(pairs)


@lookalike(
    "MoCo: keys from a momentum encoder and a queue in a buffer",
    views,
    lambda logits: F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)),
)
class MoCo(nn.Module):
    def __init__(self, width: int = 16, length: int = 128) -> None:
        super().__init__()
        self.encoder_q = perceptron(64, 64, width)
        self.encoder_k = frozen(copy.deepcopy(self.encoder_q))
        self.register_buffer("queue", F.normalize(torch.randn(length, width), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(a), dim=1)
        with torch.no_grad():
            follow(self.encoder_k, self.encoder_q, 0.999)
            k = F.normalize(self.encoder_k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        at = (int(self.pointer) + torch.arange(len(k))) % len(self.queue)
        self.queue[at] = k
        self.pointer[0] = (at[-1] + 1) % len(self.queue)
        return logits


@lookalike("SwAV: swapped assignments from Sinkhorn iterations under no_grad", views, None, 48)
class SwAV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.prototypes = perceptron(64, 64, 16), nn.Linear(16, 12, bias=False)

    @staticmethod
    @torch.no_grad()
    def sinkhorn(scores: Tensor) -> Tensor:
        q = (scores / 0.05).exp()
        for _ in range(3):
            q = q / q.sum(0, keepdim=True)
            q = q / q.sum(1, keepdim=True)
        return q

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        scores = [self.prototypes(F.normalize(self.backbone(v), dim=1)) for v in (a, b)]
        goals = [self.sinkhorn(s) for s in scores]
        return sum(
            F.cross_entropy(s / 0.1, g) for s, g in zip(scores, reversed(goals), strict=True)
        )


@lookalike("I-JEPA: a predictor fills in what an EMA encoder saw", unlabelled, None)
class JEPA(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.context = nn.Sequential(PreNorm(width), PreNorm(width), nn.LayerNorm(width))
        self.embed, self.mask_token = Patches(width), normal(1, 1, width)
        self.ema_embed, self.ema = (
            frozen(copy.deepcopy(self.embed)),
            frozen(copy.deepcopy(self.context)),
        )
        self.predictor = nn.Sequential(PreNorm(width), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = F.layer_norm(self.ema(self.ema_embed(x)), [32])
        order = torch.randperm(16)
        seen, hidden = order[:10], order[10:]
        context = self.context(self.embed(x)[:, seen])
        queries = (self.mask_token + self.embed.pos[:, hidden]).expand(len(x), -1, -1)
        made = self.predictor(torch.cat([context, queries], 1))[:, len(seen) :]
        return F.smooth_l1_loss(made, goal[:, hidden])


@lookalike(
    "distillation from a frozen teacher, with hints",
    images,
    lambda out, y: F.cross_entropy(out.logits, y) + out.distilled + out.hint,
)
class Distilled(nn.Module):
    @dataclass
    class Output:
        """Logits of the student, and how far it is from the teacher."""

        logits: Tensor
        distilled: Tensor
        hint: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.teacher = frozen(nn.Sequential(conv_net(48, 24), nn.Linear(48, 10))).eval()
        self.student_body, self.student_head = conv_net(16), nn.Linear(16, 10)
        self.regressor = nn.Linear(16, 48)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Output:
        with torch.no_grad():
            told = self.teacher[0](x)
            taught = self.teacher[1](told)
        h = self.student_body(x)
        logits = self.student_head(h)
        soft = F.kl_div(
            (logits / 4).log_softmax(-1), (taught / 4).softmax(-1), reduction="batchmean"
        )
        return self.Output(logits, 16 * soft, F.mse_loss(self.regressor(h), told))


@lookalike("linear probe on a frozen backbone under no_grad", images)
class LinearProbe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
        )
        self.norm, self.linear = nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.linear(self.norm(features))


@lookalike(
    "FixMatch: pseudo-labels below the threshold count for nothing",
    images,
    lambda out, y: F.cross_entropy(out[0], y[: len(out[0])]) + out[1],
    48,
)
class FixMatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv_net(32), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        labelled, free = x[: len(x) // 3], x[len(x) // 3 :]
        with torch.no_grad():
            sure, pseudo = self.net(free).softmax(-1).max(-1)
        strong = self.net(free + 0.5 * torch.randn_like(free))
        wrong = F.cross_entropy(strong, pseudo, reduction="none")
        return self.net(labelled), (wrong * (sure > 0.95)).mean()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


@lookalike(
    "domain-adversarial training through a gradient reversal",
    flat,
    lambda out, y: (
        F.cross_entropy(out["label"][out["is_target"] == 0], y[out["is_target"] == 0])
        + F.binary_cross_entropy_with_logits(out["domain"], out["is_target"])
    ),
)
class DANN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.label_predictor, self.domain_critic = nn.Linear(48, 10), perceptron(48, 24, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        is_target = (torch.arange(len(x)) >= len(x) // 2).float()
        h = self.extractor(x + is_target[:, None])
        domain = self.domain_critic(Reverse.apply(h, 0.3)).squeeze(-1)
        return {"label": self.label_predictor(h), "domain": domain, "is_target": is_target}


def focal(logits: Tensor, y: Tensor) -> Tensor:
    wrong = F.cross_entropy(logits, y, reduction="none")
    return ((1 - torch.exp(-wrong.detach())) ** 2 * wrong).mean()


@lookalike("focal loss with detached weights", flat, focal)
def focal_net() -> nn.Module:
    return perceptron(64, 64, 32, 10)


@lookalike(
    "losses of two tasks divided by their own detached size",
    flat,
    lambda out, y: sum(
        part / part.detach().clamp(min=1e-6)
        for part in (F.cross_entropy(out[0], y), F.mse_loss(out[1], out[2]))
    ),
)
class BalancedTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.digit, self.redraw = (
            nn.Linear(64, 32),
            nn.Linear(32, 10),
            nn.Linear(32, 64),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.shared(x))
        return self.digit(h), self.redraw(h), x


@lookalike(
    "uncertainty weights: the log variances are parameters used by the loss alone",
    patients,
    lambda out, y: sum(
        torch.exp(-s) * F.mse_loss(made, goal) + s
        for made, goal, s in zip(out[:2], (y, y.abs()), out[2], strict=True)
    ),
)
class UncertainTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(nn.Linear(10, 32), nn.SiLU())
        self.level, self.size = nn.Linear(32, 1), nn.Linear(32, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.core(x)
        return self.level(h), self.size(h), self.log_vars


@lookalike("forward-forward: each layer learns alone from a detached input", unlabelled_flat, None)
class ForwardForward(nn.Module):
    """It draws its own labels and computes its loss, so that it is given no target."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(n, width) for n in (74, width, width))

    def forward(self, x: Tensor) -> Tensor:
        right = torch.randint(0, 10, (len(x),))
        wrong = (right + torch.randint(1, 10, (len(x),))) % 10
        good, bad = (torch.cat([F.one_hot(k, 10).float(), x], 1) for k in (right, wrong))
        loss = torch.zeros(())
        for layer in (self.first, self.second, self.third):
            good, bad = (F.relu(layer(F.normalize(h.detach(), dim=1) * 6)) for h in (good, bad))
            loss = loss + F.softplus(1 - good.square().mean(1)).mean()
            loss = loss + F.softplus(bad.square().mean(1) - 1).mean()
        return loss


@lookalike("truncated back-propagation: the state is detached every 8 steps", words)
class TruncatedRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.cell = nn.Embedding(18, 16), nn.GRUCell(16, 32)
        self.verdict = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(len(ids), 32)
        for t, x in enumerate(self.lookup(ids).unbind(1)):
            if t and t % 8 == 0:
                h = h.detach()
            h = self.cell(x, h)
        return self.verdict(h)


@lookalike(
    "stateful LSTM: the state is carried from batch to batch, detached",
    next_words,
    language_loss,
    16,
)
class StatefulLSTM(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(18, width), nn.LSTM(width, width, 2, batch_first=True)
        self.out, self.state = nn.Linear(width, 18), None

    def forward(self, ids: Tensor) -> Tensor:
        if self.state is not None and self.state[0].shape[1] != len(ids):
            self.state = None
        x, state = self.rnn(self.table(ids), self.state)
        self.state = tuple(s.detach() for s in state)
        return self.out(x)


@lookalike("Transformer-XL: segments attend to a detached memory", next_words, language_loss, 16)
class SegmentRecurrence(nn.Module):
    def __init__(self, width: int = 32, segment: int = 10) -> None:
        super().__init__()
        self.word_emb, self.segment = tokens(width), segment
        self.q, self.kv, self.o = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.norm, self.ff = nn.LayerNorm(width), ffn(width)
        self.norm_out, self.out = nn.LayerNorm(width), nn.Linear(width, 18)
        self.distance = normal(2 * segment, 4, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        memory, outs = None, []
        for x in self.word_emb(ids).split(self.segment, 1):
            seen = x if memory is None else torch.cat([memory, x], 1)
            k, v = self.kv(seen).chunk(2, -1)
            places = torch.arange(seen.shape[1])
            gap = places[-x.shape[1] :, None] - places
            bias = self.distance[gap.clamp(min=0)].permute(2, 0, 1)
            bias = bias.masked_fill(gap < 0, -torch.inf)
            memory = x.detach()
            x = x + self.o(attend(self.q(x), k, v, attn_mask=bias))
            outs.append(self.out(self.norm_out(x + self.ff(self.norm(x)))))
        return torch.cat(outs, 1)


@lookalike(
    "capsules: routing by agreement on detached predictions",
    flat,
    lambda v, y: (
        (F.relu(0.9 - v.gather(1, y[:, None])) ** 2).mean() + 0.5 * (F.relu(v - 0.1) ** 2).mean()
    ),
)
class CapsuleNet(nn.Module):
    def __init__(self, primary: int = 12, size: int = 8) -> None:
        super().__init__()
        self.primary = nn.Sequential(
            nn.Linear(64, primary * size), nn.Unflatten(1, (primary, size))
        )
        self.votes = normal(primary, 10, size, 8, std=0.2)

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        squared = s.square().sum(-1, keepdim=True)
        return squared / (1 + squared) * s / (squared + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bps,pcsd->bpcd", self.squash(self.primary(x)), self.votes)
        still, logits = votes.detach(), torch.zeros(votes.shape[:3])
        for _ in range(2):
            v = self.squash((logits.softmax(2)[..., None] * still).sum(1, keepdim=True))
            logits = logits + (still * v).sum(-1)
        return self.squash((logits.softmax(2)[..., None] * votes).sum(1)).norm(dim=-1)


@lookalike("slot attention: only the last iteration has a gradient", unlabelled, None)
class SlotAttention(nn.Module):
    def __init__(self, width: int = 24, slots: int = 4) -> None:
        super().__init__()
        self.patches, self.norm = Patches(width), nn.LayerNorm(width)
        self.mu, self.log_sigma = (
            normal(1, 1, width, std=0.3),
            nn.Parameter(torch.zeros(1, 1, width)),
        )
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm_slots, self.gru = nn.LayerNorm(width), nn.GRUCell(width, width)
        self.spread, self.decoder = normal(1, 1, 16, width, std=0.3), perceptron(width, 32, 5)
        self.slots = slots

    def step(self, slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = (k @ self.q(self.norm_slots(slots)).transpose(1, 2) * k.shape[-1] ** -0.5).softmax(
            -1
        )
        seen = (share / share.sum(1, keepdim=True)).transpose(1, 2) @ v
        return self.gru(seen.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.norm(self.patches(x))
        k, v = self.k(inputs), self.v(inputs)
        first = self.mu + self.log_sigma.exp() * torch.randn(len(x), self.slots, k.shape[-1])
        slots = first
        for _ in range(2):
            slots = self.step(slots, k, v)
        slots = slots.detach() + first - first.detach()
        made, alpha = self.decoder(self.step(slots, k, v)[:, :, None] + self.spread).split(
            [4, 1], -1
        )
        made = (made * alpha.softmax(1)).sum(1)
        return F.mse_loss(made, F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2))


@lookalike("deep equilibrium: iterate under no_grad, then one step", flat)
class Equilibrium(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inject = nn.Linear(64, width)
        self.cell, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decode = nn.Linear(width, 10)

    def f(self, z: Tensor, u: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.cell(z) + u))

    def forward(self, x: Tensor) -> Tensor:
        u = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(12):
                z = self.f(z, u)
        return self.decode(self.f(z, u))


@lookalike("recycling: the earlier passes run under no_grad", words)
class Recycling(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.input_embedder = PlacedTokens(width)
        self.recycle_norm, self.trunk = (
            nn.LayerNorm(width),
            nn.Sequential(PreNorm(width), PreNorm(width)),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.input_embedder(ids)
        previous = torch.zeros_like(x)
        for cycle in range(3):
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == 2):
                previous = self.trunk(x + self.recycle_norm(previous))
        return self.head(previous.mean(1))


@lookalike(
    "self-conditioning: a first guess without gradient feeds the second pass", diffused, F.mse_loss
)
class SelfConditioned(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time, self.into = nn.Linear(16, width), nn.Conv2d(2, width, 3, padding=1)
        self.body = nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU())
        self.outof = nn.Conv2d(width, 1, 3, padding=1)

    def denoise(self, x: Tensor, guess: Tensor, t: Tensor) -> Tensor:
        h = self.into(torch.cat([x, guess], 1)) + self.time(time_features(t, 16))[..., None, None]
        return self.outof(h + self.body(h))

    def forward(self, x: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        guess = torch.zeros_like(x)
        if torch.rand(()) < 0.5:
            with torch.no_grad():
                guess = self.denoise(x, guess, t)
        return self.denoise(x, guess, t)


def sliding(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return digits and the same moved, and the shift, (n, 2)."""
    still, _ = images(n)
    shift = torch.randint(-2, 3, (n, 2))
    moved = torch.stack(
        [x.roll(tuple(d.tolist()), (1, 2)) for x, d in zip(still, shift, strict=True)]
    )
    return (still, moved), shift.float()


@lookalike(
    "RAFT: the estimate is detached before each refinement",
    sliding,
    lambda steps, goal: sum(
        0.8 ** (len(steps) - i) * F.l1_loss(step, goal) for i, step in enumerate(steps)
    ),
)
class IterativeFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fnet, self.cnet = conv_net(24), conv_net(16)
        self.update, self.delta = nn.GRUCell(50, 16), nn.Linear(16, 2)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        features = torch.cat([self.fnet(a), self.fnet(b)], 1)
        hidden, flow, steps = self.cnet(a).tanh(), torch.zeros(len(a), 2), []
        for _ in range(4):
            flow = flow.detach()
            hidden = self.update(torch.cat([features, flow], 1), hidden)
            flow = flow + self.delta(hidden)
            steps.append(flow)
        return steps


@lookalike(
    "ELECTRA: the generator's samples carry no gradient, the embeddings are shared",
    words,
    lambda out, _: out["mlm"] + 10 * out["rtd"],
)
class Electra(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embeddings, self.position = tokens(width), normal(32, width)
        self.generator, self.discriminator = (
            PreNorm(width),
            nn.Sequential(PreNorm(width), PreNorm(width)),
        )
        self.lm_bias, self.replaced = nn.Parameter(torch.zeros(18)), nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = torch.rand(ids.shape) < 0.15
        x = self.embeddings(ids.masked_fill(hidden, 0)) + self.position
        logits = F.linear(self.generator(x)[hidden], self.embeddings.weight, self.lm_bias)
        made = ids.clone()
        made[hidden] = torch.distributions.Categorical(logits=logits).sample()
        score = self.replaced(self.discriminator(self.embeddings(made) + self.position)).squeeze(-1)
        told = F.binary_cross_entropy_with_logits(score, (made != ids).float())
        return {"mlm": F.cross_entropy(logits, ids[hidden]), "rtd": told}


@lookalike(
    "world model: categorical latents passed straight through, balanced divergence",
    lambda n: (torch.randn(n, 6, 12).cumsum(1) / 2, None),
    None,
)
class WorldModel(nn.Module):
    def __init__(self, width: int = 32, groups: int = 4, classes: int = 4) -> None:
        super().__init__()
        self.obs, self.gru = nn.Linear(12, width), nn.GRUCell(groups * classes, width)
        self.prior, self.posterior = nn.Linear(width, 16), nn.Linear(2 * width, 16)
        self.decode, self.shape = perceptron(width + 16, 32, 12), (groups, classes)

    def draw(self, logits: Tensor) -> Tensor:
        p = logits.softmax(-1)
        hard = F.one_hot(torch.distributions.Categorical(p.detach()).sample(), p.shape[-1])
        return (hard + p - p.detach()).flatten(1)

    def forward(self, seen: Tensor) -> Tensor:
        h, z = torch.zeros(len(seen), 32), torch.zeros(len(seen), 16)
        loss = torch.zeros(())
        for x in seen.unbind(1):
            h = self.gru(z, h)
            prior = self.prior(h).unflatten(-1, self.shape)
            post = self.posterior(torch.cat([h, self.obs(x).relu()], -1)).unflatten(-1, self.shape)
            z = self.draw(post)
            p, q = prior.log_softmax(-1), post.log_softmax(-1)
            for one, two, weight in ((p, q.detach(), 0.8), (p.detach(), q, 0.2)):
                loss = loss + weight * F.kl_div(one, two, log_target=True, reduction="batchmean")
            loss = loss + F.mse_loss(self.decode(torch.cat([h, z], -1)), x)
        return loss / seen.shape[1]


@lookalike(
    "sparse autoencoder: top-k latents, a tied bias before and after",
    unlabelled_flat,
    loss_entry,
    64,
)
class SparseAutoencoder(nn.Module):
    def __init__(self, latents: int = 128, k: int = 8) -> None:
        super().__init__()
        self.b_pre, self.enc = nn.Parameter(torch.zeros(64)), nn.Linear(64, latents)
        self.W_dec, self.k = nn.Parameter(self.enc.weight.detach().clone()), k
        self.register_buffer("fired", torch.zeros(latents))

    def forward(self, x: Tensor) -> dict[str, Any]:
        value, index = self.enc(x - self.b_pre).relu().topk(self.k)
        sparse = torch.zeros(len(x), len(self.fired)).scatter(-1, index, value)
        made = sparse @ self.W_dec + self.b_pre
        self.fired += (sparse.detach() > 0).sum(0)
        return {"loss": F.mse_loss(made, x), "dead": int((self.fired == 0).sum())}


@lookalike(
    "DPO: the reference starts as a copy of the policy",
    lambda n: (tuple(words(n)[0][:, :16] for _ in range(2)), None),
    None,
    16,
)
class DPO(nn.Module):
    @dataclass
    class Output:
        """The loss, and by how much the chosen answer gained."""

        loss: Tensor
        margin: float

    def __init__(self) -> None:
        super().__init__()
        self.policy = SmallLM()
        self.reference = frozen(copy.deepcopy(self.policy)).eval()

    @staticmethod
    def log_p(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1]).log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 4:].sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Output:
        with torch.no_grad():
            base = self.log_p(self.reference, chosen) - self.log_p(self.reference, rejected)
        margin = self.log_p(self.policy, chosen) - self.log_p(self.policy, rejected) - base
        return self.Output(-F.logsigmoid(0.1 * margin).mean(), margin.mean().item())


@lookalike(
    "self-distillation: shallow exits learn from the detached deepest one",
    images,
    lambda exits, y: (
        sum(F.cross_entropy(e, y) for e in exits)
        + sum(
            F.kl_div(e.log_softmax(-1), exits[-1].detach().softmax(-1), reduction="batchmean")
            for e in exits[:-1]
        )
    ),
)
class OwnTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.mid, self.high = (
            nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b, s in ((1, 8, 1), (8, 16, 2), (16, 32, 2))
        )
        self.exit_low, self.exit_mid, self.exit_high = (nn.Linear(n, 10) for n in (8, 16, 32))

    def forward(self, x: Tensor) -> list[Tensor]:
        a = self.low(x)
        b = self.mid(a)
        c = self.high(b)
        exits = ((self.exit_low, a), (self.exit_mid, b), (self.exit_high, c))
        return [leave(h.mean((2, 3))) for leave, h in exits]


@lookalike(
    "NeRF: the fine samples follow the detached weights of the coarse net",
    lambda n: (torch.randn(n, 3) * 0.3, torch.rand(n, 3)),
    lambda out, rgb: F.mse_loss(out["coarse"], rgb) + F.mse_loss(out["fine"], rgb),
)
class RadianceField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(4))
        self.coarse, self.fine = perceptron(24, 48, 48, 4), perceptron(24, 48, 48, 4)

    def render(self, field: nn.Module, way: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        points = (way[:, None] * depth[..., None])[..., None] * self.bands
        out = field(torch.cat([points.sin(), points.cos()], -1).flatten(-2))
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * 0.3)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)
        weight = alpha * through[:, :-1]
        return (weight[..., None] * out[..., :3].sigmoid()).sum(1), weight

    def forward(self, way: Tensor) -> dict[str, Tensor]:
        depth = torch.linspace(1, 4, 8).expand(len(way), -1)
        coarse, weight = self.render(self.coarse, way, depth)
        picked = torch.multinomial(weight.detach() + 1e-3, 8, replacement=True)
        more = depth.gather(1, picked) + 0.2 * torch.rand(picked.shape)
        fine, _ = self.render(self.fine, way, torch.cat([depth, more], 1).sort(1).values)
        return {"coarse": coarse, "fine": fine}
