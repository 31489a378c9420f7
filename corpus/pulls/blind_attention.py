"""Positions, masks and sums of attention, as people report them wrong; each with its fix."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import PlacedTokens, PreNorm, ffn
from corpus.models.small import images, language_loss, next_words, words
from corpus.subject import Subject, subject

SHELF = Shelf("pulls", "blind")
GITHUB = "https://github.com"

PLACES = ("position", "order", "frequenc", "wave", "angle", "constant", "alike")
HIDDEN = ("mask", "padding", "hidden", "effect", "padded")
SUMS = ("normalis", "sum to", "sums to", "cumulative", "cumsum", "denominator", "divid")


class Reader(nn.Module):
    """Classifies sentences by two blocks."""

    def __init__(self, block: type[nn.Module] = PreNorm) -> None:
        super().__init__()
        self.embed, self.blocks = PlacedTokens(32), nn.Sequential(block(), block())
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))).mean(1))


# ---- positions -----------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/intro-llm/intro-llm.github.io/issues/34",
    "exponent of the waves counted in steps of two, and doubled",
    ("", "embed*", "block*"),
    PLACES,
)
def intro_llm(fixed: bool) -> Subject:
    """The loop counts i in twos and doubles it: half of the waves hardly move."""

    class Model(nn.Module):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.embed, self.block, self.head = (
                nn.Embedding(18, width),
                PreNorm(),
                nn.Linear(32, 10),
            )
            place, even = torch.arange(32)[:, None], torch.arange(0, width, 2)
            sine, cosine = (even, even) if fixed else (2 * even, 2 * (even + 1))
            waves = torch.zeros(32, width)
            waves[:, 0::2] = (place / 1e4 ** (sine / width)).sin()
            waves[:, 1::2] = (place / 1e4 ** (cosine / width)).cos()
            self.register_buffer("waves", waves)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.embed(ids) * math.sqrt(32) + self.waves).mean(1))

    return subject(Model(), words, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/282857341/nnFormer/pull/88",
    "relative places in a volume that share their entries",
    ("block*", "bias*", ""),
    ("position", "relative", "collid", "same", "row", "never", "index", "entries"),
)
def nnformer(fixed: bool) -> Subject:
    """The first axis is multiplied by 3 w - 1 in place of the product of both other ranges."""

    class Volume(nn.Module):
        """Attention among the cells of a window of 2 x 4 x 2, with learnt relative places."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
            self.bias = nn.Embedding(3 * 7 * 3, 4)
            nn.init.normal_(self.bias.weight, std=0.02)
            cells = torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(2))
            apart = cells[:, None] - cells + torch.tensor([1, 3, 1])
            step = 7 * 3 if fixed else 3 * 4 - 1
            self.register_buffer("index", (apart * torch.tensor([step, 3, 1])).sum(-1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            scores = q @ k.transpose(2, 3) / math.sqrt(8) + self.bias(self.index).permute(2, 0, 1)
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Conv2d(1, 32, 2, 2), PreNorm(), nn.Linear(32, 10)
            self.block.attn = Volume()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.stem(x).flatten(2).transpose(1, 2)).mean(1))

    return subject(Model(), images, F.cross_entropy, 32)


# ---- masks ---------------------------------------------------------------------------------------


def short(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return token ids that end in zeros, the mask of the others, and labels."""
    ids, labels = words(n)
    mask = torch.arange(32) < torch.randint(8, 28, (n, 1))
    return (ids * mask, mask), labels


@SHELF.report(
    f"{GITHUB}/Shujun-He/RibonanzaNet/issues/5",
    "scores of padding set to -1e-9",
    ("", "qkv", "out", "embed*"),
    HIDDEN,
)
def ribonanza(fixed: bool) -> Subject:
    """The exponent has its sign wrong, and a score of about zero is an ordinary score."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.out = PlacedTokens(32), nn.Linear(32, 96), nn.Linear(32, 32)
            self.mlp, self.norm, self.head = ffn(32), nn.LayerNorm(32), nn.Linear(32, 10)

        def attend(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            scores = q @ k.transpose(2, 3) / math.sqrt(8)
            scores = scores.masked_fill(mask[:, None, None] == 0, -1e9 if fixed else -1e-9)
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + self.attend(x, mask)
            x = self.norm(x + self.mlp(x))
            return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))

    return subject(Model(), short, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/zsyOAOA/ResShift/issues/81",
    "mask of shifted windows that has rows alone",
    ("block*", ""),
    ("mask", "window", "wrap", "border", "edge", "column"),
)
def res_shift(fixed: bool) -> Subject:
    """Columns are never numbered: pixels of the left edge read those of the right one."""

    class Shifted(nn.Module):
        """Attention in windows of 4 x 4 on a map of 8 x 8 that is rolled by two."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
            parts = slice(0, -4), slice(-4, -2), slice(-2, None)
            areas = torch.zeros(1, 1, 8, 8)
            for number, (h, w) in enumerate(itertools.product(parts, parts)):
                (areas[:, :, h, w] if fixed else areas[:, h, w]).fill_(number)
            area = self.windows(areas)[..., 0]
            self.register_buffer("mask", area[:, None] == area[..., None])

        def windows(self, x: Tensor) -> Tensor:
            """Cut (n, channels, 8, 8) into (n * 4, 16, channels)."""
            x = x.unflatten(2, (2, 4)).unflatten(4, (2, 4)).permute(0, 2, 4, 3, 5, 1)
            return x.flatten(3, 4).flatten(0, 2)

        def joined(self, x: Tensor) -> Tensor:
            x = x.unflatten(1, (4, 4)).unflatten(0, (-1, 2, 2))
            return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.windows(x.roll((-2, -2), (2, 3)))).chunk(3, -1)
            scores = (q @ k.transpose(1, 2) / 4).unflatten(0, (-1, 4))
            weights = scores.masked_fill(~self.mask, -100.0).softmax(-1).flatten(0, 1)
            return self.joined(self.out(weights @ v)).roll((2, 2), (2, 3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Conv2d(1, 16, 3, padding=1), Shifted()
            self.last, self.head = nn.Conv2d(16, 32, 3, 2, 1), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return self.head(self.last(x + self.block(x)).relu().mean((2, 3)))

    return subject(Model(), images, F.cross_entropy, 32)


# ---- attention without a softmax -----------------------------------------------------------------


class Linear(nn.Module):
    """Causal attention by positive features of queries and keys, divided by their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def total(self, q: Tensor, k: Tensor) -> Tensor:
        """Return what (batch, steps, heads, size) is divided by."""
        return (q * k.cumsum(1)).sum(-1, keepdim=True)

    def divided(self, x: Tensor, total: Tensor) -> Tensor:
        return x / (total + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)) for t in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scores = torch.einsum("bihd,bjhd->bhij", q, k).tril()
        read = torch.einsum("bhij,bjhd->bihd", scores, v)
        return self.out(self.divided(read, self.total(q, k)).flatten(2))


def writes(attention: type[Linear]) -> Subject:
    """Return a language model with this attention."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = PlacedTokens(32), nn.Sequential(PreNorm(), PreNorm())
            for block in self.blocks:
                block.attn = attention()
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 18)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks(self.embed(ids))))

    return subject(Writer(), next_words, language_loss, 16)


@SHELF.report(
    f"{GITHUB}/fla-org/flash-linear-attention/pull/594",
    "sums of keys that run along the heads",
    ("block*", ""),
    (*SUMS, "heads", "axis", "dimension"),
)
def fla(fixed: bool) -> Subject:
    """Of (batch, steps, heads, size) dim -2 is that of heads: no step has its own sum."""

    class Along(Linear):
        def total(self, q: Tensor, k: Tensor) -> Tensor:
            return (q * k.cumsum(1 if fixed else -2)).sum(-1, keepdim=True)

    return writes(Along)


@SHELF.report(
    f"{GITHUB}/lucidrains/performer-pytorch/issues/40",
    "multiplied by the sum of weights that was to divide",
    ("block*", ""),
    (*SUMS, "reciprocal", "scale", "large", "grow", "multipl"),
)
def performer(fixed: bool) -> Subject:
    """The inverse of the sum is named so, and is not taken."""

    class Kernel(Linear):
        def divided(self, x: Tensor, total: Tensor) -> Tensor:
            return super().divided(x, total) if fixed else x * total

    return writes(Kernel)


# ---- around it -----------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/lbcb-sci/RiNALMo/issues/9",
    "residual of attention taken behind its norm",
    ("block*", ""),
    ("residual", "skip", "stream", "shortcut", "normed", "normalised", "behind"),
)
def rinalmo(fixed: bool) -> Subject:
    """What goes past the attention has been through its norm, and the stream is lost there."""

    class Block(PreNorm):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.ln_1(x)
            x = (x if fixed else normed) + self.attn(normed)
            return x + self.mlp(self.ln_2(x))

    return subject(Reader(Block), words, F.cross_entropy, 32)
