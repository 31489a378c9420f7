"""Gates at zero, detached targets, stop-gradients and adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call

from corpus.models.designs import noised_images, without_target
from corpus.models.small import (
    GPT,
    Attention,
    Block,
    ViT,
    flat,
    gpt,
    images,
    itself,
    language_loss,
    next_words,
    plain,
    rows,
    same,
    some_digits,
    views,
)
from corpus.subject import Subject, subject


def zeroed(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def copied(net: nn.Module) -> nn.Module:
    """Return a copy that no gradient trains: a slow teacher or target."""
    return copy.deepcopy(net).requires_grad_(False)


def held(net: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a net whose weights are constants in this call, as if they were frozen."""
    return functional_call(net, {name: p.detach() for name, p in net.named_parameters()}, inputs)


# ---- gates at zero -------------------------------------------------------------------------------


class ModulatedBlock(nn.Module):
    """adaLN-zero: a condition shifts, scales and gates each branch (Peebles and Xie 2023)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))  # fmt: skip
        self.attention = Attention(width, 4)
        self.mlp = plain(width, 64, width, activation=nn.GELU)
        self.modulate = zeroed(nn.Linear(width, 6 * width))
        self.gate: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulate(F.silu(condition))[:, None].chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + self.gate(gate1) * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + self.gate(gate2) * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.patchify, self.time = nn.Conv2d(1, width, 2, 2), plain(16, width, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(ModulatedBlock(width) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), zeroed(nn.Linear(width, 4))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        phase = step[:, None] * 100 ** (-torch.arange(8) / 8)
        condition = self.time(torch.cat([phase.sin(), phase.cos()], 1))
        x = self.patchify(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x, condition)
        return F.pixel_shuffle(self.out(self.norm(x)).transpose(1, 2).unflatten(2, (4, 4)), 2)


def dit() -> Subject:
    return subject(DiT(), noised_images, F.mse_loss, batch=32)


def dit_with_open_end() -> Subject:
    """Its gates start at zero, its last layer does not."""
    made = dit()
    made.model.out = nn.Linear(32, 4)
    return made


class GatedCross(nn.Module):
    """Attention to another input behind tanh of a scalar of zero (Alayrac et al. 2022)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.mlp = plain(width, 64, width, activation=nn.GELU)
        self.alpha_attention, self.alpha_mlp = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.alpha_attention.tanh() * self.attention(self.norm(x), memory)
        return x + self.alpha_mlp.tanh() * self.mlp(x)


class Flamingo(nn.Module):
    """A frozen language model that learns to see."""

    def __init__(self) -> None:
        super().__init__()
        self.language, self.see = GPT(depth=2).requires_grad_(False), nn.Linear(8, 32)
        self.crosses = nn.ModuleList(GatedCross() for _ in range(2))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        seen, x = self.see(image), self.language.embedding(ids)
        for cross, block in zip(self.crosses, self.language.blocks, strict=True):
            x = block(cross(x, seen))
        return self.language.head(self.language.norm(x))


def captioned(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return images as rows with their middle pixels as ids, and the ids that follow each."""
    pixels, _ = some_digits(n)
    ids = pixels[:, 16:48].long() + 1
    return (((pixels - 4.9) / 6).view(-1, 8, 8), ids[:, :-1]), ids[:, 1:]


def flamingo() -> Subject:
    return subject(Flamingo(), captioned, language_loss, batch=16)


class SkipInit(nn.Module):
    """A residual branch without norms, times a gain of zero (De and Smith 2020)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.conv2(F.relu(self.conv1(F.relu(x))))


def skip_init() -> Subject:
    stem, end = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 10)
    blocks = nn.Sequential(*(SkipInit() for _ in range(4)))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return subject(nn.Sequential(stem, blocks, pool, end), images, F.cross_entropy, batch=32)


def zero_projections() -> Subject:
    """A language model whose branches end in projections of zeros (Zhang et al. 2019)."""
    made = gpt()
    for block in made.model.blocks:
        zeroed(block.attention.out)
        zeroed(block.mlp[2])
    return made


class NonLocal(nn.Module):
    """Attention between pixels, its last convolution zero (Wang et al. 2018)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, 10)
        self.theta, self.phi, self.g = (nn.Conv2d(width, 8, 1) for _ in range(3))
        self.z, self.norm = zeroed(nn.Conv2d(8, width, 1)), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        theta, phi, g = (layer(x).flatten(2) for layer in (self.theta, self.phi, self.g))
        seen = g @ (theta.transpose(1, 2) @ phi / 8**0.5).softmax(-1).transpose(1, 2)
        return self.head((x + self.z(seen.view(len(x), 8, *x.shape[2:]))).mean((2, 3)))


def non_local() -> Subject:
    return subject(NonLocal(), images, F.cross_entropy, batch=32)


class SpatialGate(nn.Module):
    """Half of the units gate the others across tokens, the gate one (Liu et al. 2021)."""

    def __init__(self, width: int = 32, tokens: int = 8) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.spatial, self.leave = nn.Conv1d(tokens, tokens, 1), nn.Linear(width, width)
        nn.init.zeros_(self.spatial.weight)
        nn.init.ones_(self.spatial.bias)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = F.gelu(self.enter(self.norm(x))).chunk(2, -1)
        return x + self.leave(kept * self.spatial(gate))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.blocks = nn.Sequential(*(SpatialGate() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)).mean(1))


def gated_mlp() -> Subject:
    return subject(GatedMLP(), rows, F.cross_entropy)


class Shortcuts(nn.Module):
    """Each block reads the stream and, by a weight of zero, the embedding and an earlier block."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(18, 32), nn.ModuleList(
            Block(causal=True) for _ in range(depth))  # fmt: skip
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(depth, 1))
        self.skips, self.head = nn.Parameter(torch.zeros(depth // 2)), nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embedding(ids)
        earlier: list[Tensor] = []
        for index, (block, mix) in enumerate(zip(self.blocks, self.mix, strict=True)):
            if index >= len(self.skips):
                x = x + self.skips[index - len(self.skips)] * earlier.pop()
            x = block(mix[0] * x + mix[1] * first)
            earlier.append(x)
        return self.head(x)


def shortcuts_of_zero() -> Subject:
    return subject(Shortcuts(), next_words, language_loss, batch=16)


# ---- codes: the nearest one is taken, past which the gradient goes straight ----------------------


def nearest(x: Tensor, codes: Tensor) -> Tensor:
    return torch.cdist(x.detach(), codes).argmin(1)


class ResidualCodes(nn.Module):
    """Each table quantises what the one before it left over (Zeghidour et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 8), plain(8, 32, 64)
        self.tables = nn.ModuleList(nn.Embedding(16, 8) for _ in range(3))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.2)
        self.learnt: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = rest = self.encoder(x)
        total, error = torch.zeros_like(z), z.new_zeros(())
        for table in self.tables:
            code = self.learnt(table(nearest(rest, table.weight)))
            error = error + F.mse_loss(code, rest.detach()) + F.mse_loss(rest, code.detach())
            total, rest = total + code, rest - code.detach()
        return self.decoder(z + (total - z).detach()), error


def coded(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1]


def residual_codes() -> Subject:
    return subject(ResidualCodes(), itself, coded)


class AveragedCodes(nn.Module):
    """A table that is no parameter: each code follows the mean of what it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 8), plain(8, 32, 64)
        self.register_buffer("codes", 0.2 * torch.randn(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        chosen = nearest(z, self.codes)
        code = self.codes[chosen]
        if self.training:
            self._follow(z.detach(), F.one_hot(chosen, 16).float())
        return self.decoder(z + (code - z).detach()), F.mse_loss(z, code)

    @torch.no_grad()
    def _follow(self, z: Tensor, chosen: Tensor) -> None:
        means = chosen.T @ z / chosen.sum(0).clamp(min=1)[:, None]
        met = chosen.sum(0)[:, None] > 0
        self.codes = torch.where(met, 0.9 * self.codes + 0.1 * means, self.codes)


def averaged_codes() -> Subject:
    return subject(AveragedCodes(), itself, coded)


class FiniteLevels(nn.Module):
    """Rounds each bounded number to one of five levels (Mentzer et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = plain(64, 32, 6), plain(6, 32, 64)
        self.rounded: Callable[[Tensor], Tensor] = lambda z: z + (z.round() - z).detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.rounded(2 * torch.tanh(3 * self.encoder(x))))


def finite_levels() -> Subject:
    return subject(FiniteLevels(), itself, F.mse_loss)


# ---- adversaries ---------------------------------------------------------------------------------


def hinge(on_real: Tensor, on_made: Tensor) -> Tensor:
    return F.relu(1 - on_real).mean() + F.relu(1 + on_made).mean()


class Players(nn.Module):
    """Both steps at once: the critic sees a detached image, the generator a held critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(16, 64, 64), nn.Tanh())
        self.critic = plain(64, 64, 1, activation=nn.LeakyReLU)
        self.judged: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        made = self.generator(torch.randn(len(x), 16))
        critic_loss = hinge(self.critic(x), self.critic(made.detach()))
        return critic_loss - held(self.critic, self.judged(made)).mean()


def both_players() -> Subject:
    return subject(Players(), without_target(flat), None)


class ClassCritic(nn.Module):
    """A critic that knows the class by a product with its embedding (Miyato and Koyama 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(26, 64, 64), nn.Tanh()).requires_grad_(False)
        self.trunk, self.score = plain(64, 64, 32, activation=nn.LeakyReLU), nn.Linear(32, 1)
        self.classes = nn.Embedding(10, 32)
        self.join: Callable[[Tensor, Tensor], Tensor] = torch.add

    def judge(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.leaky_relu(self.trunk(x), 0.2)
        agreement = (self.classes(labels) * x).sum(1, keepdim=True)
        return self.join(self.score(x), agreement)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        wanted = F.one_hot(labels, 10).float()
        made = self.generator(torch.cat([torch.randn(len(x), 16), wanted], 1))
        return hinge(self.judge(x, labels), self.judge(made, labels))


def class_critic() -> Subject:
    return subject(ClassCritic(), without_target(lambda n: (flat(n), None)), None)


class Cycle(nn.Module):
    """Two translators, there and back, before critics of another step (Zhu et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = plain(64, 64, 64), plain(64, 64, 64)
        self.critic_here, self.critic_there = (
            plain(64, 32, 1, activation=nn.LeakyReLU).requires_grad_(False) for _ in range(2)
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        made_b, made_a = self.there(a), self.back(b)
        cycle = F.l1_loss(self.back(made_b), a) + F.l1_loss(self.there(made_a), b)
        fooled = (self.critic_there(made_b) - 1) ** 2 + (self.critic_here(made_a) - 1) ** 2
        return 10 * cycle + fooled.mean()


def inverted(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    return (flat(n)[0], -flat(n)[0]), None


def translators() -> Subject:
    return subject(Cycle(), inverted, None)


class Matched(nn.Module):
    """A generator whose features of a frozen critic shall match those of what is real."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(plain(16, 64, 64), nn.Tanh())
        self.critic = plain(64, 64, 32, activation=nn.LeakyReLU).requires_grad_(False)
        self.matched: Callable[[Tensor], Tensor] = same

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.critic(x).detach()
        made = self.matched(self.critic(self.generator(torch.randn(len(x), 16))))
        return F.mse_loss(made.mean(0), wanted.mean(0))


def matched_features() -> Subject:
    return subject(Matched(), without_target(flat), None)


# ---- actors and critics --------------------------------------------------------------------------


def rollouts(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return states (n, 8, 16), with the actions and the rewards (n, 8)."""
    state = torch.randn(n, 8, 16)
    return state, (torch.randint(0, 4, (n, 8)), state[..., 0] + 0.3 * torch.randn(n, 8))


class Rollout(nn.Module):
    """A policy and a value of each state, from nets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = plain(16, 64, 4, activation=nn.Tanh), plain(16, 64, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


def advantages(value: Tensor, reward: Tensor) -> Tensor:
    """Return generalised advantages (Schulman et al. 2016), in which values are constants."""
    value, total, made = value.detach(), torch.zeros(len(value)), []
    following = torch.cat([value[:, 1:], torch.zeros(len(value), 1)], 1)
    error = reward + 0.9 * following - value
    for step in reversed(range(value.shape[1])):
        total = error[:, step] + 0.9 * 0.95 * total
        made.append(total)
    return torch.stack(made[::-1], 1)


def generalised(
    output: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    learnt: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    (logits, value), (action, reward) = output, target
    gain, policy = advantages(value, reward), Categorical(logits=logits)
    error = F.mse_loss(learnt(value), gain + value.detach())
    return 0.5 * error - (policy.log_prob(action) * gain).mean() - 0.01 * policy.entropy().mean()


def generalised_advantages() -> Subject:
    return subject(Rollout(), rollouts, generalised, batch=32)


def transitions(n: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], None]:
    """Return states, actions from -1 to 1, rewards (n, 1) and the states that follow."""
    state, action = torch.randn(n, 16), torch.rand(n, 4) * 2 - 1
    return (state, action, (state[:, :4] * action).sum(1, keepdim=True), torch.randn(n, 16)), None


class SoftActorCritic(nn.Module):
    """Two critics, their slow copies, an actor and a temperature (Haarnoja et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = plain(16, 64, 8)
        self.critics = nn.ModuleList(plain(20, 64, 1) for _ in range(2))
        self.slow, self.log_alpha = copied(self.critics), nn.Parameter(torch.zeros(1))
        self.temperature: Callable[[Tensor], Tensor] = torch.exp

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, 1)
        policy = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw)
        likelihood = policy.log_prob(raw) - (1 - action**2 + 1e-6).log()
        return action, likelihood.sum(1, keepdim=True)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            ahead, likelihood = self.act(following)
            values = torch.minimum(*(q(torch.cat([following, ahead], 1)) for q in self.slow))
            target = reward + 0.9 * (values - alpha * likelihood)
        seen = torch.cat([state, action], 1)
        error = sum(F.mse_loss(critic(seen), target) for critic in self.critics)
        chosen, likelihood = self.act(state)
        pair = torch.cat([state, chosen], 1)
        value = torch.minimum(*(held(critic, pair) for critic in self.critics))
        warmth = self.temperature(self.log_alpha) * (likelihood.detach() - 4)
        return error + (alpha * likelihood - value).mean() - warmth.mean()


def soft_actor_critic() -> Subject:
    return subject(SoftActorCritic(), transitions, None)


class DeterministicPolicy(nn.Module):
    """An actor that a held critic leads, and targets of slow copies (Lillicrap et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(plain(16, 64, 4), nn.Tanh())
        self.critic = plain(20, 64, 1)
        self.slow_actor, self.slow_critic = copied(self.actor), copied(self.critic)
        self.shown: Callable[[Tensor], Tensor] = same

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        ahead = torch.cat([following, self.slow_actor(following)], 1)
        target = reward + 0.9 * self.slow_critic(ahead)
        error = F.mse_loss(self.critic(torch.cat([state, action], 1)), target)
        chosen = torch.cat([state, self.shown(self.actor(state))], 1)
        return error - held(self.critic, chosen).mean()


def deterministic_policy() -> Subject:
    return subject(DeterministicPolicy(), transitions, None)


class Distributional(nn.Module):
    """The distribution of returns, against one projected onto its atoms (Bellemare et al. 2017)."""

    def __init__(self, atoms: int = 21) -> None:
        super().__init__()
        self.net, self.atoms = plain(16, 64, 4 * atoms), atoms
        self.slow = copied(self.net)
        self.register_buffer("support", torch.linspace(-5, 5, atoms))

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        logits = self.net(state).view(-1, 4, self.atoms)
        chosen = action.argmax(1)[:, None, None].expand(-1, 1, self.atoms)
        target = self._projected(reward, following)
        return -(target * logits.gather(1, chosen)[:, 0].log_softmax(1)).sum(1).mean()

    @torch.no_grad()
    def _projected(self, reward: Tensor, following: Tensor) -> Tensor:
        ahead = self.slow(following).view(-1, 4, self.atoms).softmax(2)
        best = (ahead * self.support).sum(2).argmax(1)
        place = (reward + 0.9 * self.support).clamp(-5, 5)[:, None, :]
        near = (1 - (place - self.support[:, None]).abs() / 0.5).clamp(min=0)
        return (near * ahead[torch.arange(len(best)), best][:, None]).sum(2)


def distributional() -> Subject:
    return subject(Distributional(), transitions, None)


# ---- teachers that follow slowly -----------------------------------------------------------------


class Dino(nn.Module):
    """A student follows a sharpened, centred copy of itself (Caron et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(plain(64, 64, 32), nn.GELU(), nn.Linear(32, 24))
        self.teacher = copied(self.student)
        self.register_buffer("centre", torch.zeros(24))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            targets = [self.teacher(view) for view in (a, b)]
            centre = self.centre.clone()
            if self.training:
                self.centre.lerp_(torch.cat(targets).mean(0), 0.1)
        made = [(self.student(view) / 0.1).log_softmax(1) for view in (b, a)]
        wanted = [((target - centre) / 0.04).softmax(1) for target in targets]
        return -sum((w * m).sum(1).mean() for w, m in zip(wanted, made, strict=True)) / 2


def dino() -> Subject:
    return subject(Dino(), views, None)


class MeanTeacher(nn.Module):
    """Labels for the student, and agreement with its mean over time (Tarvainen et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
        )
        self.teacher = copied(self.student)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self._follow()
        return self.student(x), self.teacher(x + 0.1 * torch.randn_like(x))

    @torch.no_grad()
    def _follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.01)


def agreeing(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    made, wanted = output
    return F.cross_entropy(made, labels) + F.mse_loss(made.softmax(1), wanted.softmax(1))


def mean_teacher() -> Subject:
    return subject(MeanTeacher(), flat, agreeing)


class Contextual(nn.Module):
    """Predicts the mean of a slow copy's states where its own input is masked (data2vec)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.mask = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.slow_embed, self.slow = copied(self.embed), copied(self.blocks)
        self.predictor = plain(width, width, width, activation=nn.GELU)
        self.read: Callable[[Tensor, Tensor], Tensor] = lambda state, target: state

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.rand(x.shape[:2]) < 0.5
        hidden[:, 0] = True
        with torch.no_grad():
            state, seen = self.slow_embed(x), []
            for block in self.slow:
                state = block(state)
                seen.append(F.layer_norm(state, state.shape[-1:]))
            target = torch.stack(seen).mean(0)
        state = torch.where(hidden[..., None], self.mask, self.embed(x))
        for block in self.blocks:
            state = block(state)
        made = self.predictor(self.read(state, target))
        return F.smooth_l1_loss(made[hidden], target[hidden])


def contextual_targets() -> Subject:
    return subject(Contextual(), without_target(rows), None)


class JointEmbedding(nn.Module):
    """Predicts what a slow copy makes of hidden rows from the rows around (Assran et al. 2023)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        self.context = nn.Sequential(nn.Linear(8, width), Block(width))
        self.target, self.predictor = copied(self.context), Block(width)
        self.query = nn.Parameter(0.02 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.target(x)[:, 5:]
        seen = self.context(x[:, :5]) + self.position[:5]
        asked = (self.query + self.position[5:]).expand(len(x), -1, -1)
        return F.mse_loss(self.predictor(torch.cat([seen, asked], 1))[:, 5:], wanted)


def joint_embedding() -> Subject:
    return subject(JointEmbedding(), without_target(rows), None)


# ---- gradients stopped on purpose ----------------------------------------------------------------


class PseudoLabels(nn.Module):
    """Its own sure answers are the labels of a noisier view (Sohn et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(64, 64, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weak = self.net(x).detach().softmax(1)
        strong = self.net(F.dropout(x, 0.3, self.training))
        sure, label = weak.max(1)
        each = F.cross_entropy(strong, label, reduction="none") * (sure > 0.15)
        return F.cross_entropy(self.net(x[:16]), labels[:16]) + each.mean()


def pseudo_labels() -> Subject:
    return subject(PseudoLabels(), without_target(lambda n: (flat(n), None)), None)


class Greedy(nn.Module):
    """Each block has a loss of its own, and none from those behind it (Belilovsky et al. 2019)."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(plain(64, 64, 64) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(depth))
        self.shown: list[Callable[[Tensor], Tensor]] = [same] * depth

    def forward(self, x: Tensor) -> list[Tensor]:
        made = []
        for block, head, shown in zip(self.blocks, self.heads, self.shown, strict=True):
            x = F.relu(block(x.detach()))
            made.append(head(shown(x)))
        return made


def every_head(output: list[Tensor], labels: Tensor) -> Tensor:
    return sum(F.cross_entropy(logits, labels) for logits in output)


def local_losses() -> Subject:
    return subject(Greedy(), flat, every_head)


class Probed(nn.Module):
    """A linear probe reads a trunk that another head trains."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.rebuild = plain(64, 64, 32), plain(32, 64, 64)
        self.probe, self.between = nn.Linear(32, 10), same

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.between(self.trunk(x))
        asked = F.cross_entropy(self.probe(hidden.detach()), labels)
        return F.mse_loss(self.rebuild(F.relu(hidden)), x) + asked


def probed_trunk() -> Subject:
    return subject(Probed(), without_target(lambda n: (flat(n), None)), None)


class HardAttention(nn.Module):
    """Attends to one row only, with the gradient of soft weights."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.head = nn.Linear(8, 16), nn.Linear(8, 32), nn.Linear(32, 10)
        self.query = nn.Parameter(torch.randn(4, 16))
        self.straight: Callable[[Tensor, Tensor], Tensor] = lambda hard, soft: (
            hard + soft - soft.detach()
        )

    def forward(self, x: Tensor) -> Tensor:
        soft = (self.query @ self.key(x).transpose(1, 2) / 4).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), x.shape[1]).float()
        return self.head(F.relu(self.straight(hard, soft) @ self.value(x)).mean(1))


def hard_attention() -> Subject:
    return subject(HardAttention(), rows, F.cross_entropy)


def scaled_gradient() -> Subject:
    """The embeddings of a language model learn ten times slower (Ding et al. 2021)."""
    made = subject(GPT(tied=False), next_words, language_loss, batch=16)
    made.model.between = lambda x: 0.1 * x + 0.9 * x.detach()
    return made


class SignLinear(nn.Linear):
    """Signs of the weights forwards, the weights themselves backwards (Courbariaux et al. 2015)."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean(1, keepdim=True).detach()
        signs = scale * self.weight.sign()
        return F.linear(x, self.weight + (signs - self.weight).detach(), self.bias)


def sign_weights() -> Subject:
    hidden = [SignLinear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), SignLinear(64, 64), nn.ReLU()]
    return subject(nn.Sequential(*hidden, nn.Linear(64, 10)), flat, F.cross_entropy)


# ---- adapters of frozen transformers -------------------------------------------------------------


def frozen_vit(adapt: Callable[[nn.Module], object]) -> Subject:
    """Return a frozen vision transformer with a fresh head, its blocks adapted."""
    made = subject(ViT(), images, F.cross_entropy, batch=32)
    made.model.requires_grad_(False)
    for block in made.model.blocks:
        adapt(block)
    made.model.head = nn.Linear(32, 10)
    return made


class Rescaled(nn.Module):
    """IA3: a factor for each feature of a frozen layer (Liu et al. 2022)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(layer.out_features))
        self.join: Callable[[Tensor, Tensor], Tensor] = torch.mul

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.layer(x), self.scale)


def _rescale(block: nn.Module) -> None:
    attention = block.attention
    attention.k, attention.v = Rescaled(attention.k), Rescaled(attention.v)
    block.mlp[0] = Rescaled(block.mlp[0])


def ia3() -> Subject:
    return frozen_vit(_rescale)


class Dora(nn.Module):
    """Magnitude and direction apart, the direction of low rank (Liu et al. 2024)."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.magnitude = nn.Parameter(layer.weight.norm(dim=1, keepdim=True).detach())
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.direction: Callable[[Tensor], Tensor] = lambda w: (
            w / w.norm(dim=1, keepdim=True).detach()
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.direction(self.layer.weight + self.b @ self.a)
        return F.linear(x, self.magnitude * weight, self.layer.bias)


def _decompose(block: nn.Module) -> None:
    block.attention.q, block.attention.v = Dora(block.attention.q), Dora(block.attention.v)


def dora() -> Subject:
    return frozen_vit(_decompose)


class Prefixed(nn.Module):
    """Tokens before the keys and values, made by a net of their own (Li and Liang 2021)."""

    def __init__(self, attention: nn.Module, tokens: int = 4, width: int = 32) -> None:
        super().__init__()
        self.attention, self.prefix = attention, nn.Embedding(tokens, width)
        self.make = plain(width, 32, width, activation=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(self.prefix.weight).expand(len(x), -1, -1)
        return self.attention(x, torch.cat([made, x], 1))


def prefixes() -> Subject:
    return frozen_vit(lambda block: setattr(block, "attention", Prefixed(block.attention)))


class Prompting(nn.Module):
    """Attention to prompts behind a gate of zero beside a frozen one (Zhang et al. 2023)."""

    def __init__(self, attention: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.attention, self.prompt = attention, nn.Parameter(torch.randn(4, width))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt.expand(len(x), -1, -1)
        return self.attention(x) + self.gate.tanh() * self.attention(x, prompt)


def gated_prompts() -> Subject:
    return frozen_vit(lambda block: setattr(block, "attention", Prompting(block.attention)))


class Ladder(nn.Module):
    """A small net beside a frozen one, which is run without gradients (Sung et al. 2022)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.trunk = ViT(width, 3).requires_grad_(False)
        self.downs = nn.ModuleList(nn.Linear(width, 8) for _ in range(3))
        self.sides = nn.ModuleList(Block(8, 2) for _ in range(3))
        self.mix, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(width, 10)
        self.up, self.join = nn.Linear(8, width), torch.add

    def forward(self, x: Tensor) -> Tensor:
        states = []
        with torch.no_grad():
            x = self.trunk.patches(x).flatten(2).transpose(1, 2) + self.trunk.position[:, 1:]
            for block in self.trunk.blocks:
                x = block(x)
                states.append(x)
        side: Any = 0.0
        for state, down, block, mix in zip(
            states, self.downs, self.sides, self.mix.sigmoid(), strict=True
        ):
            side = block(mix * down(state) + (1 - mix) * side)
        return self.head(self.join(x, self.up(side)).mean(1))


def ladder() -> Subject:
    return subject(Ladder(), images, F.cross_entropy, batch=32)


def only_biases() -> Subject:
    """All but the biases and the head are frozen (Ben Zaken et al. 2022)."""

    def free(block: nn.Module) -> None:
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))

    return frozen_vit(free)
