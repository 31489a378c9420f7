"""Published designs that look like what threads report: each is meant, and nothing is wrong."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    Patches,
    PlacedTokens,
    PreNorm,
    SelfAttention,
    clouds,
    ffn,
    frozen,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
)
from corpus.models.small import flat, images, language_loss, next_words, rows, words

SHELF = Shelf("threads", "blind")
design = lookalikes_of(SHELF)


# ---- attention -----------------------------------------------------------------------------------


class Scored(nn.Module):
    """Causal attention with scores of its own."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])

    def hidden(self, steps: int) -> Tensor:
        return torch.ones(steps, steps, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        scores = self.scores(q, k).masked_fill(self.hidden(x.shape[1]), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Writer(nn.Module):
    """A language model with one kind of attention."""

    attention: type[Scored] = Scored
    knows_places = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = PlacedTokens(32) if self.knows_places else tokens(32)
        self.blocks = nn.ModuleList(PreNorm() for _ in range(2))
        for block in self.blocks:
            block.attn = self.attention()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Unscaled(Scored):
    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.qkv.weight[:32].data, std=(32 * 8) ** -0.5)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(2, 3)

    def hidden(self, steps: int) -> Tensor:
        return torch.zeros(steps, steps, dtype=torch.bool)


@design("T5: scores without a scale, which their first weights make up for", words)
class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = PlacedTokens(32), PreNorm(), nn.Linear(32, 10)
        self.block.attn = Unscaled()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)).mean(1))


class Cosines(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((4, 1, 1), math.log(10.0)))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return q @ k.transpose(2, 3) * self.log_scale.clamp(max=math.log(100.0)).exp()


@design("Swin v2: cosines for scores, with a learnt temperature", next_words, language_loss, 16)
class SwinV2(Writer):
    attention = Cosines


@design("NoPE: a causal mask is all there is of positions", next_words, language_loss, 16)
class NoPE(Writer):
    knows_places = False


class Nearer(Scored):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        step = torch.arange(q.shape[2])
        slope = 2.0 ** -torch.arange(2, 10, 2)
        away = (step - step[:, None]).abs() * slope[:, None, None]
        return super().scores(q, k) - away


@design("ALiBi: distances taken off the scores", next_words, language_loss, 16)
class ALiBi(Writer):
    knows_places = False

    attention = Nearer


class Recent(Scored):
    def hidden(self, steps: int) -> Tensor:
        return super().hidden(steps) | torch.ones(steps, steps, dtype=torch.bool).tril(-8)


@design("a window of the last eight words", next_words, language_loss, 16)
class Window(Writer):
    attention = Recent


def after_eight(logits: Tensor, ids: Tensor) -> Tensor:
    return language_loss(logits[:, 8:], ids[:, 8:])


class Prefixed(Scored):
    def hidden(self, steps: int) -> Tensor:
        hidden = super().hidden(steps)
        hidden[:, :8] = False
        return hidden


@design("prefix language model: the first eight words see each other", next_words, after_eight, 16)
class Prefix(Writer):
    attention = Prefixed


class Rotated(Scored):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(self.turn(q), self.turn(k))

    def turn(self, x: Tensor) -> Tensor:
        turned, kept = x.chunk(2, -1)
        angle = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1])
        a, b = turned[..., ::2], turned[..., 1::2]
        a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return torch.cat([torch.stack([a, b], -1).flatten(-2), kept], -1)


@design(
    "GPT-J: half of a head rotated, attention and MLP side by side", next_words, language_loss, 16
)
class GPTJ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = tokens(32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention, self.mlp, self.head = Rotated(), ffn(32), nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        read = self.norm(x)
        return self.head(self.last(x + self.attention(read) + self.mlp(read)))


@design("registers: tokens whose outputs are thrown away", images)
class Registers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.registers = Patches(), normal(1, 4, 32)
        self.blocks = nn.Sequential(PreNorm(), PreNorm())
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.registers.expand(len(x), -1, -1), self.patches(x)], 1)
        return self.head(self.norm(self.blocks(x)[:, 4:]).mean(1))


@design("two sequences that read each other by turns", rows)
class ByTurns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, 32), normal(4, 32)
        self.cross, self.norm = nn.MultiheadAttention(32, 4, batch_first=True), nn.LayerNorm(32)
        self.head = nn.Linear(64, 10)

    def read(self, x: Tensor, of: Tensor) -> Tensor:
        return self.norm(x + self.cross(x, of, of, need_weights=False)[0])

    def forward(self, x: Tensor) -> Tensor:
        a, b = (self.embed(half) + self.position for half in x.split(4, 1))
        a = self.read(a, b)
        b = self.read(b, a)
        return self.head(torch.cat([a.mean(1), b.mean(1)], 1))


# ---- layers --------------------------------------------------------------------------------------


@design("gated unit: a branch times another", rows)
class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(8, 32), SelfAttention(), nn.Linear(32, 10)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(x)
        return self.head((x + self.down(F.silu(self.gate(x)) * self.up(x))).mean(1))


@design("one head for all levels of a pyramid", images)
class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            [nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)]
        )
        self.head = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 10, 1))

    def forward(self, x: Tensor) -> Tensor:
        said = []
        for level in self.levels:
            x = level(x).relu()
            said.append(self.head(x).mean((2, 3)))
        return torch.stack(said).mean(0)


@design("Tacotron 2: prenet whose dropout is on in evaluation", flat)
def prenet() -> nn.Module:
    class Prenet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = perceptron(64, 48, 48), nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.dropout(self.layers(x).relu(), 0.5, training=True))

    return Prenet().eval()


@design("batch norms frozen in a backbone that is tuned", images)
class FrozenNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 10)
        self.train()

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for layer in self.backbone:
            if isinstance(layer, nn.BatchNorm2d):
                frozen(layer.eval())
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean((2, 3)))


@design("echo state network: a reservoir that is not to learn", rows)
class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reservoir = frozen(nn.RNN(8, 64, batch_first=True))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reservoir(x)[0][:, -1])


@design("recurrent layer that reads both ways, pooled by maxima", rows)
class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].amax(1))


@design("(IA)3: vectors that scale what frozen layers return", flat)
class IA3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(perceptron(64, 48, 32))
        self.scale, self.head = nn.Parameter(torch.ones(48)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base[2](self.base[1](self.base[0](x)) * self.scale))


@design("prompt tuning: learnt tokens before a frozen model", words)
class Prompts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = frozen(PlacedTokens(32)), frozen(PreNorm())
        self.prompts, self.head = normal(1, 4, 32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.prompts.expand(len(ids), -1, -1), self.embed(ids)], 1)
        return self.head(self.block(x).mean(1))


@design("two experts a sample, whose weights sum to one", flat, batch=64)
class TopTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 10)
        self.experts = nn.ModuleList(perceptron(32, 48, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        share = torch.zeros(len(x), 4).scatter(1, chosen, weight)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(x + (share[..., None] * made).sum(1))


@design("PointNet: maxima over points", clouds)
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.after = perceptron(3, 32, 48), perceptron(48, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.each(x).amax(1))
