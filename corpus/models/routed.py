"""Models in which values go ways of their own: experts, caches, recurrences, graph nets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from corpus.models.designs import without_target
from corpus.models.fields import graphs, scattered, similar
from corpus.models.gated import copied, zeroed
from corpus.models.rare import clouds
from corpus.models.small import (
    Attention,
    Block,
    both_targets,
    flat,
    halves,
    images,
    ink_loss,
    label_loss,
    language_loss,
    next_words,
    plain,
    rows,
    same,
    views,
    words,
)
from corpus.subject import Subject, subject

# ---- experts -------------------------------------------------------------------------------------


def experts_of(count: int = 4, width: int = 32) -> nn.ModuleList:
    return nn.ModuleList(plain(width, 48, width, activation=nn.GELU) for _ in range(count))


class SoftExperts(nn.Module):
    """Each expert reads mixtures of all tokens (Puigcerver et al. 2024)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.slots, self.experts = nn.Parameter(torch.randn(width, 4) / width**0.5), experts_of()

    def forward(self, x: Tensor) -> Tensor:
        scores = F.normalize(x, dim=-1) @ self.slots
        mixed = scores.softmax(1).transpose(1, 2) @ x
        made = [expert(mixed[:, index]) for index, expert in enumerate(self.experts)]
        return scores.softmax(2) @ torch.stack(made, 1)


class ChoosingExperts(nn.Module):
    """Each expert takes the two tokens that score best for it (Zhou et al. 2022)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4, bias=False), experts_of()

    def forward(self, x: Tensor) -> Tensor:
        flat_, made = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        scores = self.router(flat_).softmax(-1)
        for expert, score in zip(self.experts, scores.unbind(-1), strict=True):
            weight, chosen = score.topk(len(flat_) // 2)
            made = made.index_add(0, chosen, weight[:, None] * expert(flat_[chosen]))
        return made.view_as(x)


class SwitchExperts(nn.Module):
    """One expert a token, none where it is full (Fedus et al. 2022)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.router, self.experts, self.decide = nn.Linear(width, 4), experts_of(), same

    def forward(self, x: Tensor) -> Tensor:
        flat_, made = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        weight, chosen = self.decide(self.router(flat_)).softmax(-1).max(-1)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero()[:, 0][: len(flat_) // 3]
            made = made.index_add(0, mine, weight[mine, None] * expert(flat_[mine]))
        return made.view_as(x)


class SharedExpert(nn.Module):
    """One expert for all beside two of four, balanced by a bias that no gradient trains."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 4, bias=False), experts_of()
        self.shared, self.join = plain(width, 48, width, activation=nn.GELU), torch.add
        self.register_buffer("balance", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.balance).topk(2, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True)
        routed = sum(w[..., None] * expert(x) for w, expert in zip(
            weights.unbind(-1), self.experts, strict=True))  # fmt: skip
        return self.join(self.shared(x), routed)


class Deep(nn.Module):
    """Half of the tokens go through the block, the others past it (Raposo et al. 2024)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.router, self.block = nn.Linear(width, 1), Block(width)
        self.weigh: Callable[[Tensor], Tensor] = torch.sigmoid

    def forward(self, x: Tensor) -> Tensor:
        score, chosen = self.router(x).squeeze(-1).topk(x.shape[1] // 2, dim=1)
        index = chosen[..., None].expand(-1, -1, x.shape[2])
        taken = x.gather(1, index)
        made = (self.block(taken) - taken) * self.weigh(score)[..., None]
        return torch.zeros_like(x).scatter_add(1, index, made)


class Routed(nn.Module):
    """A classifier of rows with one layer of experts between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.block, self.norm = nn.Linear(8, 32), Block(), nn.LayerNorm(32)
        self.experts, self.head = layer, nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.embed(x))
        return self.head((x + self.experts(self.norm(x))).mean(1))


def soft_experts() -> Subject:
    return subject(Routed(SoftExperts()), rows, F.cross_entropy)


def experts_that_choose() -> Subject:
    return subject(Routed(ChoosingExperts()), rows, F.cross_entropy)


def full_experts() -> Subject:
    return subject(Routed(SwitchExperts()), rows, F.cross_entropy)


def shared_expert() -> Subject:
    return subject(Routed(SharedExpert()), rows, F.cross_entropy)


def mixture_of_depths() -> Subject:
    return subject(Routed(Deep()), rows, F.cross_entropy)


class MultiGate(nn.Module):
    """Each task mixes the same experts by a gate of its own (Ma et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(plain(64, 32, 32) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(64, 3) for _ in range(2))
        self.label, self.ink = plain(32, 32, 10), plain(32, 32, 1)
        self.of_task: Callable[[int], int] = same

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.stack([expert(x) for expert in self.experts], 1)
        label, ink = (
            (self.gates[self.of_task(task)](x).softmax(1)[..., None] * made).sum(1)
            for task in range(2)
        )
        return self.label(label), self.ink(ink)


def gate_per_task() -> Subject:
    return subject(MultiGate(), both_targets, {"label": label_loss, "ink": ink_loss})


# ---- caches and memories -------------------------------------------------------------------------


class Segments(nn.Module):
    """Attends to what the segment before was like, detached (Dai et al. 2019)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(18, width), nn.Embedding(16, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, 4), plain(width, 64, width)
        self.head = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        made: list[Tensor] = []
        memory = None
        for part in ids.split(16, 1):
            x = self.embedding(part) + self.place.weight[: part.shape[1]]
            seen = x if memory is None else torch.cat([memory, x], 1)
            early = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool)
            hidden = early.triu(1 + seen.shape[1] - x.shape[1])
            self.attention.mask = lambda scores, hidden=hidden: scores.masked_fill(hidden, -1e9)
            memory = x.detach()
            x = x + self.attention(self.norm1(x), self.norm1(seen))
            made.append(self.head(x + self.mlp(self.norm2(x))))
        return torch.cat(made, 1)


def segments() -> Subject:
    return subject(Segments(), next_words, language_loss, batch=16)


class Stepwise(nn.Module):
    """Reads token after token, and keeps the keys and values of those before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(18, width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 18)
        self.keep = same
        self.extend: Callable[[list[Tensor], Tensor], list[Tensor]] = lambda cache, new: [
            *cache,
            new,
        ]

    def forward(self, ids: Tensor) -> Tensor:
        keys: list[Tensor] = []
        values: list[Tensor] = []
        made = []
        for x in self.embedding(ids).unbind(1):
            normed = self.norm(x)
            keys = self.extend(keys, self.keep(self.key(normed)))
            values = self.extend(values, self.keep(self.value(normed)))
            scores = torch.einsum("nd,nld->nl", self.query(normed), torch.stack(keys, 1))
            read = torch.einsum("nl,nld->nd", (scores / 32**0.5).softmax(1), torch.stack(values, 1))
            made.append(self.head(x + self.out(read)))
        return torch.stack(made, 1)


def few_words(n: int) -> tuple[Tensor, Tensor]:
    ids, following = next_words(n)
    return ids[:, :12], following[:, :12]


def cached_keys() -> Subject:
    return subject(Stepwise(), few_words, language_loss, batch=16)


class Queue(nn.Module):
    """Keys of earlier batches are the negatives (He et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = plain(64, 64, 16)
        self.key = copied(self.query)
        self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        query = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            key = F.normalize(self.key(b), dim=1)
        negatives = query @ self.queue.clone().T
        logits = torch.cat([(query * key).sum(1, keepdim=True), negatives], 1) / 0.2
        if self.training:
            self.queue.copy_(torch.cat([key, self.queue])[: len(self.queue)])
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def queue_of_keys() -> Subject:
    return subject(Queue(), views, None)


class Streaming(nn.Module):
    """A causal convolution in chunks, each with the last frames of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 32, 3), nn.Conv1d(32, 32, 3)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        left, middle = x.new_zeros(len(x), 8, 2), x.new_zeros(len(x), 32, 2)
        for chunk in x.transpose(1, 2).split(4, 2):
            read = torch.cat([left, chunk], 2)
            hidden = torch.cat([middle, F.relu(self.conv1(read))], 2)
            left, middle = read[..., -2:], hidden[..., -2:]
            made = F.relu(self.conv2(hidden))
        return self.head(made[..., -1])


def streaming() -> Subject:
    return subject(Streaming(), rows, F.cross_entropy)


class Bank(nn.Module):
    """Tells each image from the kept features of all others (Wu et al. 2018)."""

    def __init__(self, size: int = 100) -> None:
        super().__init__()
        self.encoder = plain(64, 64, 16)
        self.register_buffer("bank", F.normalize(torch.randn(size, 16), dim=1))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        made = F.normalize(self.encoder(x), dim=1)
        scores = made @ self.bank.clone().T / 0.1
        if self.training:
            kept = 0.5 * self.bank[index] + 0.5 * made.detach()
            self.bank[index] = F.normalize(kept, dim=1)
        return F.cross_entropy(scores, index)


@functools.cache
def hundred() -> Tensor:
    return flat(100)[0]


def indexed(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    index = torch.randperm(100)[:n]
    return (hundred()[index], index), None


def memory_bank() -> Subject:
    return subject(Bank(), indexed, None)


class TurnedByTable(nn.Module):
    """Angles, sines and mask come from buffers that were filled once."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(18, width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 18)
        angle = torch.arange(64)[:, None] * 10_000 ** (-torch.arange(width // 2) / (width // 2))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("future", torch.ones(64, 64, dtype=torch.bool).triu(1))

    def turn(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.turn(q) @ self.turn(k).transpose(1, 2) / 32**0.5
        length = ids.shape[1]
        scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
        return self.head(x + self.out(scores.softmax(-1) @ v))


def cached_angles() -> Subject:
    return subject(TurnedByTable(), next_words, language_loss, batch=16)


# ---- nets that make weights ----------------------------------------------------------------------


class Chunked(nn.Module):
    """One net makes all layers of another, chunk by chunk (von Oswald et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks, self.make = nn.Embedding(6, 8), plain(8, 32, 16 * 32)
        self.embed, self.head, self.made = nn.Linear(64, 32), nn.Linear(32, 10), same
        nn.init.normal_(self.make[2].weight, std=0.04)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for weight in self.made(self.make(self.chunks.weight)).view(3, 32, 32):
            x = x + F.relu(F.linear(x, weight))
        return self.head(x)


def chunked_weights() -> Subject:
    return subject(Chunked(), flat, F.cross_entropy)


class ConditionalConv(nn.Module):
    """Mixes kernels for each image (Yang et al. 2019)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.route = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, 4)
        self.kernels = nn.Parameter(torch.randn(4, width, width, 3, 3) / (9 * width) ** 0.5)
        self.head, self.weigh = nn.Linear(width, 10), torch.sigmoid

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weights = self.weigh(self.route(x.mean((2, 3))))
        kernels = torch.einsum("nk,koihw->noihw", weights, self.kernels).flatten(0, 1)
        made = F.conv2d(x.flatten(0, 1)[None], kernels, padding=1, groups=len(x))
        return self.head(F.relu(made.view_as(x)).mean((2, 3)))


def kernels_by_image() -> Subject:
    return subject(ConditionalConv(), images, F.cross_entropy, batch=32)


class Adapting(nn.Module):
    """A step of learning inside the forward, which is differentiated (Finn et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.moved = plain(64, 32, 10, activation=nn.Tanh), same

    def forward(self, x: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        with torch.enable_grad():
            loss = F.cross_entropy(self.net(x), labels)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {
            name: self.moved(weight - 0.1 * slope)
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        return functional_call(self.net, moved, asked)


def episodes(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    (x, labels), (asked, wanted) = flat(n), flat(n)
    return (x, labels, asked), wanted


def inner_step() -> Subject:
    return subject(Adapting(), episodes, F.cross_entropy, batch=32)


class MadeAdapters(nn.Module):
    """Adapters of a frozen net, made for each task, the last layer zero (Mahabadi et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = plain(64, 64, 32).requires_grad_(False), nn.Linear(32, 10)
        self.tasks, self.down = nn.Embedding(5, 8), nn.Linear(8, 4 * 32)
        self.up = zeroed(nn.Linear(8, 32 * 4))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        x, code = F.relu(self.trunk(x)), self.tasks(task)
        down, up = self.down(code).view(-1, 4, 32), self.up(code).view(-1, 32, 4)
        return self.head(x + (up @ F.gelu(down @ x[..., None])).squeeze(2))


def of_tasks(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    pixels, labels = flat(n)
    return (pixels, labels % 5), labels


def made_adapters() -> Subject:
    return subject(MadeAdapters(), of_tasks, F.cross_entropy)


# ---- states carried from step to step ------------------------------------------------------------


class Truncated(nn.Module):
    """The state is detached between two segments, within which gradients flow."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.inward, self.cell = nn.Linear(8, 32), nn.LSTMCell(32, 32)
        self.head, self.size = nn.Linear(32, 10), size

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 32), x.new_zeros(len(x), 32))
        for step, seen in enumerate(x.unbind(1)):
            if step % self.size == 0:
                state = (state[0].detach(), state[1].detach())
            state = self.cell(self.inward(seen), state)
        return self.head(state[0])


def truncated_gradients() -> Subject:
    return subject(Truncated(), rows, F.cross_entropy)


class FastWeights(nn.Module):
    """A matrix that each step corrects by what it misses (Schlag et al. 2021)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward, self.rate = nn.Linear(8, 3 * width), nn.Linear(8, 1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.new_zeros(len(x), 32, 32)
        for seen in x.unbind(1):
            query, key, value = self.inward(seen).chunk(3, 1)
            key = F.normalize(key, dim=1)[..., None]
            missed = value[..., None] - memory @ key
            memory = memory + self.rate(seen).sigmoid()[..., None] * missed @ key.transpose(1, 2)
        return self.head(self.norm((memory @ query[..., None]).squeeze(2)))


def fast_weights() -> Subject:
    return subject(FastWeights(), rows, F.cross_entropy)


class Equilibrium(nn.Module):
    """Solves for a fixed point without gradients, then one step with them (Bai et al. 2019)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward, self.field = nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        self.last: Callable[[Tensor, Tensor], Tensor] = self.step
        nn.init.normal_(self.field.weight, std=0.3 / width**0.5)

    def step(self, state: Tensor, seen: Tensor) -> Tensor:
        return torch.tanh(self.field(state) + seen)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.inward(x)
        with torch.no_grad():
            state = torch.zeros_like(seen)
            for _ in range(12):
                state = self.step(state, seen)
        return self.head(self.last(state, seen))


def equilibrium() -> Subject:
    return subject(Equilibrium(), flat, F.cross_entropy)


class Looped(nn.Module):
    """The same block again and again, told which round it is (Dehghani et al. 2019)."""

    def __init__(self, rounds: int = 4) -> None:
        super().__init__()
        self.embedding, self.block, self.norm = nn.Embedding(18, 32), Block(), nn.LayerNorm(32)
        self.rounds, self.head = nn.Embedding(rounds, 32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index in range(self.rounds.num_embeddings):
            x = self.block(x + self.rounds.weight[index])
        return self.head(self.norm(x).mean(1))


def looped_block() -> Subject:
    return subject(Looped(), words, F.cross_entropy, batch=16)


class Pondering(nn.Module):
    """Halts at each step by a probability, over which its answers are mixed (Graves 2016)."""

    def __init__(self, steps: int = 5) -> None:
        super().__init__()
        self.cell, self.halt, self.head = nn.GRUCell(64, 32), nn.Linear(32, 1), nn.Linear(32, 10)
        self.steps, self.weigh = steps, same
        nn.init.constant_(self.halt.bias, -1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, left = x.new_zeros(len(x), 32), x.new_ones(len(x), 1)
        answer: Any = 0.0
        spent: Any = 0.0
        for step in range(self.steps):
            state = self.cell(x, state)
            share = self.weigh(self.halt(state).sigmoid())
            weight = left if step == self.steps - 1 else left * share
            answer, spent = answer + weight * self.head(state), spent + (step + 1) * weight
            left = left - weight
        return answer, spent


def pondered(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(output[0], labels) + 0.01 * output[1].mean()


def pondering() -> Subject:
    return subject(Pondering(), flat, pondered)


class Translator(nn.Module):
    """A decoder that looks back at each step (Bahdanau et al. 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.key, self.query = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.score, self.bridge = nn.Linear(width, 1), nn.Linear(width, width)
        self.cell, self.head = nn.GRUCell(3 * width, width), nn.Linear(width, 18)
        self.context: Callable[[Tensor, Tensor], Tensor] = lambda context, memory: context

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        memory, last = self.encoder(self.embedding(source))
        keys, state, made = self.key(memory), self.bridge(last[1]).tanh(), []
        for word in self.embedding(ids).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state)[:, None]))
            context = self.context((scores.softmax(1) * memory).sum(1), memory)
            state = self.cell(torch.cat([word, context], 1), state)
            made.append(self.head(state))
        return torch.stack(made, 1)


def short_halves(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    (source, ids), following = halves(n)
    return (source, ids[:, :6]), following[:, :6]


def translator() -> Subject:
    return subject(Translator(), short_halves, language_loss, batch=16)


class ConvolutionalGRU(nn.Module):
    """A recurrent map over frames (Ballas et al. 2016)."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.gates = nn.Conv2d(1 + width, 2 * width, 3, padding=1)
        self.candidate = nn.Conv2d(1 + width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        state = frames.new_zeros(len(frames), 12, 8, 8)
        for frame in frames.unbind(1):
            update, reset = self.gates(torch.cat([frame, state], 1)).sigmoid().chunk(2, 1)
            new = torch.tanh(self.candidate(torch.cat([frame, reset * state], 1)))
            state = (1 - update) * state + update * new
        return self.out(state)


def moving(n: int) -> tuple[Tensor, Tensor]:
    """Return four frames of a digit that moves to the right, and the fifth."""
    still, _ = images(n)
    frames = torch.stack([still.roll(step, 3) for step in range(5)], 1)
    return frames[:, :4], frames[:, 4]


def moving_digits() -> Subject:
    return subject(ConvolutionalGRU(), moving, F.mse_loss, batch=16)


class Slots(nn.Module):
    """Slots compete for the pixels in some rounds (Locatello et al. 2020)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, width), nn.LayerNorm(width)
        self.mean, self.log_std = nn.Parameter(torch.randn(width)), nn.Parameter(torch.zeros(width))
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm_slots, self.cell = nn.LayerNorm(width), nn.GRUCell(width, width)
        self.decoder = plain(width, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        k, v = self.k(x), self.v(x)
        slots = self.mean + self.log_std.exp() * torch.randn(len(x), 3, 32)
        for _ in range(3):
            shares = (k @ self.q(self.norm_slots(slots)).transpose(1, 2) / 32**0.5).softmax(-1)
            weights = shares / (shares.sum(1, keepdim=True) + 1e-8)
            seen = weights.transpose(1, 2) @ v
            slots = self.cell(seen.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return self.decoder(slots).mean(1)


def row_images(n: int) -> tuple[Tensor, Tensor]:
    sequences, _ = rows(n)
    return sequences, sequences.flatten(1)


def slots() -> Subject:
    return subject(Slots(), row_images, F.mse_loss)


class Refining(nn.Module):
    """Corrects its estimate, which is detached before each round (Teed and Deng 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = plain(64, 64, 32), nn.GRUCell(42, 32)
        self.correct = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> list[Tensor]:
        seen, made = self.encoder(x), []
        state, guess = torch.tanh(seen), x.new_zeros(len(x), 10)
        for _ in range(4):
            guess = guess.detach()
            state = self.cell(torch.cat([seen, guess], 1), state)
            guess = guess + self.correct(state)
            made.append(guess)
        return made


def refined(output: list[Tensor], labels: Tensor) -> Tensor:
    return sum(0.8 ** (3 - i) * F.cross_entropy(o, labels) for i, o in enumerate(output))


def refining() -> Subject:
    return subject(Refining(), flat, refined)


class Reservoir(nn.Module):
    """A fixed random recurrence of which only the readout learns (Jaeger 2001)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        inner = torch.randn(width, width)
        inner = 0.9 * inner / torch.linalg.eigvals(inner).abs().max()
        self.register_buffer("inner", inner)
        self.register_buffer("inward", torch.empty(width, 8).uniform_(-0.3, 0.3))
        self.readout = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), len(self.inner))
        for seen in x.unbind(1):
            state = torch.tanh(seen @ self.inward.T + state @ self.inner.T)
        return self.readout(state)


def reservoir() -> Subject:
    return subject(Reservoir(), rows, F.cross_entropy)


# ---- graph nets ----------------------------------------------------------------------------------


class Messages(nn.Module):
    """Messages through nets of the edge, and a recurrent update (Gilmer et al. 2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.message = nn.Linear(3, width), plain(2 * width + 1, 32, width)
        self.update, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)
        self.gather: Callable[[Tensor, Tensor, int], Tensor] = scattered

    def forward(self, points: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        (source, sink), x = edges, F.relu(self.embed(points))
        apart = (points[source] - points[sink]).norm(dim=1, keepdim=True)
        for _ in range(2):
            sent = self.message(torch.cat([x[source], x[sink], apart], 1))
            x = self.update(self.gather(sent, sink, len(x)) / 4, x)
        return self.head(scattered(x, graph, int(graph.max()) + 1) / 16)


def messages() -> Subject:
    return subject(Messages(), graphs, F.cross_entropy, batch=32)


class Sage(nn.Module):
    """Its own state beside the mean of its neighbours' (Hamilton et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 32)])
        self.others = nn.ModuleList(nn.Linear(size, 32, bias=False) for size in (64, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, sink = edges
        size = torch.bincount(sink, minlength=len(x)).clamp(min=1)[:, None]
        for own, others in zip(self.own, self.others, strict=True):
            around = scattered(x[source], sink, len(x)) / size
            x = F.normalize(F.relu(own(x) + others(around)), dim=1)
        return self.head(x)


def sage() -> Subject:
    return subject(Sage(), similar, F.cross_entropy)


class Equivariant(nn.Module):
    """Moves points along their differences (Satorras et al. 2021), the last weights small."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, width), nn.Linear(width, 10)
        self.edge = nn.ModuleList(
            plain(2 * width + 1, width, width, activation=nn.SiLU) for _ in range(2)
        )
        self.move = nn.ModuleList(
            plain(width, width, 1, activation=nn.SiLU) for _ in range(2))  # fmt: skip
        self.node = nn.ModuleList(
            plain(2 * width, width, width, activation=nn.SiLU) for _ in range(2)
        )
        for move in self.move:
            nn.init.xavier_uniform_(move[2].weight, gain=0.001)

    def forward(self, points: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        (source, sink), place = edges, points[:, :2]
        x = self.embed(points[:, 2:])
        for edge, move, node in zip(self.edge, self.move, self.node, strict=True):
            apart = place[sink] - place[source]
            distance = apart.square().sum(1, keepdim=True)
            sent = F.silu(edge(torch.cat([x[source], x[sink], distance], 1)))
            place = place + scattered(apart * move(sent), sink, len(x)) / 4
            x = x + node(torch.cat([x, scattered(sent, sink, len(x))], 1))
        return self.head(scattered(x, graph, int(graph.max()) + 1) / 16)


def equivariant() -> Subject:
    """Its last move is read by nothing: the answer depends on the states, not on the places."""
    made = subject(Equivariant(), graphs, F.cross_entropy, batch=32)
    made.model.move[1].requires_grad_(False)
    return made


class Relations(nn.Module):
    """A matrix for each kind of edge (Schlichtkrull et al. 2018)."""

    def __init__(self, kinds: int = 3) -> None:
        super().__init__()
        self.own, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.relations = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(kinds))
        self.of_kind: Callable[[int], int] = same

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        made = self.own(x)
        for index in range(len(self.relations)):
            source, sink = edges[:, kind == index]
            sent = self.relations[self.of_kind(index)](x)[source]
            made = made + scattered(sent, sink, len(x)) / 2
        return self.head(F.relu(made))


def with_kinds(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    (nodes, edges), labels = similar(n)
    return (nodes, edges, torch.arange(edges.shape[1]) % 3), labels


def relations() -> Subject:
    return subject(Relations(), with_kinds, F.cross_entropy)


class DynamicEdges(nn.Module):
    """Joins each point to those nearest in the features of the layer (Wang et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.edge1, self.edge2 = plain(4, 32, 32), plain(64, 32, 32)
        self.head = plain(64, 32, 10)

    @staticmethod
    def joined(x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(5, largest=False).indices
        others = x[torch.arange(len(x))[:, None, None], near]
        own = x[:, :, None].expand_as(others)
        return torch.cat([own, others - own], -1)

    def forward(self, points: Tensor) -> Tensor:
        first = self.edge1(self.joined(points)).amax(2)
        second = self.edge2(self.joined(F.relu(first))).amax(2)
        return self.head(torch.cat([first, second], -1).amax(1))


def dynamic_edges() -> Subject:
    return subject(DynamicEdges(), clouds, F.cross_entropy, batch=32)


class Links(nn.Module):
    """Scores the edges that are there against as many drawn at random (Kipf and Welling 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Sage()
        self.encoder.head = nn.Identity()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        z, drawn = self.encoder(x, edges), torch.randint(0, len(x), edges.shape)
        pairs = torch.cat([edges, drawn], 1)
        scores = self.scale * (z[pairs[0]] * z[pairs[1]]).sum(1)
        there = (torch.arange(pairs.shape[1]) < edges.shape[1]).float()
        return F.binary_cross_entropy_with_logits(scores, there)


def links() -> Subject:
    return subject(Links(), without_target(similar), None)
