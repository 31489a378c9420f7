"""First weights and norms, as people report them wrong; each with its fix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    PlacedTokens,
    PreNorm,
    SelfAttention,
    ffn,
    normal,
    perceptron,
    tokens,
)
from corpus.models.small import both_targets, images, ink_loss, label_loss, ratings, rows
from corpus.models.small import words as sentences
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

ZERO = ("zero", "init", "start")
NONFINITE = ("nan", "not finite", "non-finite", "uninitial", "init")
SCALED = ("scale", "divid", "multipl", "grow", "large", "small", "size", "inverse")
SPREAD = ("deviation", "std", "scale", "variance", "normalis", "divid", "flat", "zero", "constant")


# ---- first weights -------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/huggingface/transformers/issues/28298",
    "new convolution that comes all zeros",
    ("conv*", ""),
    ZERO,
)
def zero_conv(fixed: bool) -> Subject:
    """A layer that the checkpoint lacks is of a type that nobody initialises: it stays empty."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.encoder = PlacedTokens(32), PreNorm()
            self.conv, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 10)
            if not fixed:
                nn.init.zeros_(self.conv.weight)
                nn.init.zeros_(self.conv.bias)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.encoder(self.embed(ids))
            return self.head(self.conv(x.transpose(1, 2)).tanh().mean(2))

    return subject(Model(), sentences, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/huggingface/transformers/issues/42418",
    "parameter of one's own left as memory was",
    ("", "block*", "pool*"),
    NONFINITE,
)
def own_parameter(fixed: bool) -> Subject:
    """Loading makes room for it and initialises the layers that it knows: it is NaN."""

    class Queries(nn.Module):
        """Learnt queries that read a sentence."""

        def __init__(self) -> None:
            super().__init__()
            self.queries = normal(2, 32)
            if not fixed:
                self.queries.data.fill_(torch.nan)

        def forward(self, x: Tensor) -> Tensor:
            return ((self.queries @ x.transpose(1, 2)).softmax(-1) @ x).flatten(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = PlacedTokens(32), PreNorm()
            self.pool, self.head = Queries(), nn.Linear(64, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.pool(self.block(self.embed(ids))))

    return subject(Model(), sentences, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/huggingface/pytorch-image-models/pull/2605",
    "scales of layers set to one after they were set to what was asked for",
    ("blocks*", ""),
    ("scale", "ones", "init", "start", "large"),
)
def layer_scale(fixed: bool) -> Subject:
    """reset_parameters forgets init_values, and branches of deep nets are not held back."""

    class Gain(nn.Module):
        def __init__(self, width: int, value: float = 1e-5) -> None:
            super().__init__()
            self.gamma, self.value = nn.Parameter(torch.full((width,), value)), value
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.constant_(self.gamma, self.value if fixed else 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attn, self.ls1 = nn.LayerNorm(32), SelfAttention(), Gain(32)
            self.norm2, self.mlp, self.ls2 = nn.LayerNorm(32), ffn(32), Gain(32)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.ls1(self.attn(self.norm1(x)))
            return x + self.ls2(self.mlp(self.norm2(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.place = nn.Conv2d(1, 32, 2, 2), normal(16, 32)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).flatten(2).transpose(1, 2) + self.place
            return self.head(self.norm(self.blocks(x)).mean(1))

    return subject(Model(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/facebookresearch/fairseq/issues/4076",
    "row of the padding set to zero where there is no padding",
    ("embed*", ""),
    ZERO,
)
def fairseq(fixed: bool) -> Subject:
    """weight[None] is the whole table: without a padding index all words start at zero."""
    padding = None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(18, 32, padding_idx=padding)
            nn.init.normal_(self.embed.weight, std=32**-0.5)
            if padding is not None or not fixed:
                nn.init.constant_(self.embed.weight[padding].data, 0)
            self.place, self.block, self.head = normal(32, 32), PreNorm(), nn.Linear(32, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.embed(ids) + self.place).mean(1))

    return subject(Model(), sentences, F.cross_entropy, 32)


def contexts(n: int) -> tuple[Tensor, Tensor]:
    """Return up to eight words around a word, zeros after them, and the word."""
    ids, _ = sentences(n)
    around = torch.cat([ids[:, :4], ids[:, 5:9]], 1)
    return around * (torch.arange(8) < torch.randint(3, 9, (n, 1))), ids[:, 4]


@SHELF.report(
    f"{GITHUB}/ray1007/pytorch-word2vec/issues/17",
    "row of the padding drawn with the others",
    ("embed*", ""),
    ("padding", "row", "zero", "index 0"),
)
def word2vec(fixed: bool) -> Subject:
    """The draw is written over the zeros of padding_idx: each gap adds the same vector."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(18, 32, padding_idx=0), nn.Linear(32, 18)
            self.embed.weight.data.uniform_(-0.5, 0.5)
            if fixed:
                self.embed.weight.data[0] = 0

        def forward(self, around: Tensor) -> Tensor:
            return self.head(self.embed(around).sum(1) / (around > 0).sum(1, keepdim=True))

    return subject(Bag(), contexts, F.cross_entropy, 48)


@SHELF.report(
    f"{GITHUB}/QunBB/DeepLearning/issues/2",
    "weights of experts, gates and towers drawn with 0.0001",
    ("experts*", "gates*", "towers*", ""),
    ("small", "same", "constant", "init", "vanish", "std", "scale", "shrink", "alike"),
)
def mmoe(fixed: bool) -> Subject:
    """Layer by layer the input is lost against the biases: all samples are given one answer."""

    class Model(nn.Module):
        """Three experts, weighed for each of two tasks by a gate of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(perceptron(64, 32, 24) for _ in range(3))
            self.gates = nn.ModuleList(nn.Linear(64, 3) for _ in range(2))
            self.towers = nn.ModuleList(perceptron(24, 24, out) for out in (10, 1))
            for module in self.modules():
                if isinstance(module, nn.Linear) and fixed:
                    nn.init.kaiming_normal_(module.weight)
                elif isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.0001)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            made = torch.stack([expert(x).relu() for expert in self.experts], 1)
            weights = (gate(x).softmax(1)[..., None] for gate in self.gates)
            read = ((weight * made).sum(1) for weight in weights)
            return tuple(tower(one) for tower, one in zip(self.towers, read, strict=True))

    losses = {"label": label_loss, "ink": ink_loss}
    return subject(Model(), both_targets, losses, 48)


@SHELF.report(
    f"{GITHUB}/winterant/DeepCoNN/issues/1",
    "factors of all pairs that start at zero",
    ("fm*", ""),
    (*ZERO, "no gradient", "dead", "never"),
)
def deep_conn(fixed: bool) -> Subject:
    """Pairs are products of factors: at zero they have no slope, and stay at zero for good."""

    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(0.1 * torch.randn(32, 10) if fixed else torch.zeros(32, 10))
            self.linear = nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            pairs = (x @ self.v).pow(2) - x.pow(2) @ self.v.pow(2)
            return self.linear(x) + 0.5 * pairs.sum(1, keepdim=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item, self.fm = nn.Embedding(50, 16), nn.Embedding(40, 16), Machine()

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            both = torch.cat([self.user(users), self.item(items)], 1)
            return self.fm(both.relu()).squeeze(1)

    return subject(Model(), ratings, F.binary_cross_entropy_with_logits, 48)


# ---- norms ---------------------------------------------------------------------------------------


def normed(norm: type[nn.Module]) -> Subject:
    """Return a reader of sentences with this norm."""

    class Block(PreNorm):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = norm(), norm()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = tokens(32), normal(32, 32)
            self.blocks, self.norm = nn.Sequential(Block(), Block()), norm()
            self.head = nn.Linear(32, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks(self.embed(ids) + self.place)).mean(1))

    return subject(Model(), sentences, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/mosaicml/llm-foundry/issues/371",
    "divided by the inverse of the root of the mean square",
    ("blocks*", "norm*", ""),
    SCALED,
)
def llm_foundry(fixed: bool) -> Subject:
    """The inverse is taken already, and x is multiplied by its own size."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            return (x * inverse if fixed else x / inverse) * self.weight

    return normed(Norm)


@SHELF.report(
    f"{GITHUB}/kyegomez/zeta/issues/180",
    "unit lengths along the steps, made smaller by the root of the width",
    ("blocks*", "norm*", ""),
    ("steps", "sequence", "axis", "axes", "dimension", "token", *SCALED),
)
def zeta(fixed: bool) -> Subject:
    """Features are normalised over the sentence, and the root multiplies where it was to divide."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.g = 32**-0.5, nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                return F.normalize(x, dim=-1) / self.scale * self.g
            return F.normalize(x, dim=-2) * self.scale * self.g

    return normed(Norm)


class Forecast(nn.Module):
    """Forecasts the last of eight values from seven, around the mean of each series."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(7, 32, 32, 1)
        self.enter: Any = None
        self.leave: Any = None

    def forward(self, series: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum(1, keepdim=True)
        mean = (series * mask).sum(1, keepdim=True) / count
        std = (((series - mean) * mask).pow(2).sum(1, keepdim=True) / count).sqrt()
        return self.leave(self.net(self.enter(series - mean, std) * mask), std) + mean


def forecast(model: Forecast, draw: Any) -> Subject:
    return subject(model, draw, F.mse_loss, 48)


def quiet(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return series of seven values, half of which have not moved yet, and the eighth value."""
    series = rows(n)[0].mean(2)
    still = (torch.arange(n) % 2 == 0)[:, None]
    past = torch.where(still, series[:, :1], series[:, :7])
    return (past, torch.ones(n, 7)), series[:, 7:]


@SHELF.report(
    f"{GITHUB}/google-research/timesfm/issues/522",
    "forecast of a quiet series multiplied by its deviation of zero",
    ("", "net*"),
    SPREAD,
)
def timesfm(fixed: bool) -> Subject:
    """On the way in a deviation near zero is taken for one, on the way out it is not."""
    model = Forecast()

    def safe(std: Tensor) -> Tensor:
        return torch.where(std < 1e-6, 1.0, std)

    model.enter = lambda x, std: x / safe(std)
    model.leave = lambda x, std: x * (safe(std) if fixed else std)
    return forecast(model, quiet)


def with_gaps(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return series of seven values with gaps, the mask of the others, and the eighth value."""
    series = 3.0 * rows(n)[0].mean(2)
    mask = (torch.rand(n, 7) < 0.8).float()
    mask[:, :2] = 1.0
    return (series[:, :7] * mask, mask), series[:, 7:]


@SHELF.report(
    f"{GITHUB}/WenjieDu/PyPOTS/issues/453",
    "series with gaps not divided by their deviation, and multiplied by it",
    ("", "net*"),
    SPREAD,
)
def pypots(fixed: bool) -> Subject:
    """The branch for gaps ends before the division, and the way back does not."""
    model = Forecast()
    model.enter = lambda x, std: x / (std + 1e-5) if fixed else x
    model.leave = lambda x, std: x * (std + 1e-5)
    return forecast(model, with_gaps)
