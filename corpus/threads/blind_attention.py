"""Positions, scales, masks and axes of attention, as threads have them wrong; each with its fix."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import Patches, PreNorm, attend, ffn, normal, tokens
from corpus.models.small import ViT, images, language_loss, next_words, rows, words
from corpus.subject import Subject, subject

SHELF = Shelf("threads", "blind")
GITHUB = "https://github.com"

SCALE = ("scale", "sqrt", "root", "large", "small", "flat", "even", "uniform", "saturat", "sharp")
PLACES = ("position", "order", "permut", "same for", "places", "rotat", "steps")
HIDDEN = ("mask", "padding", "hidden", "effect")
CUT = ("reshape", "view", "mixe", "cut", "axes", "transpose", "permute")
DROPPED = ("never read", "nothing reads", "thrown", "dropped", "no effect", "dead", "not used")


class Rotated(nn.Module):
    """Causal attention whose queries and keys are turned by their steps."""

    def __init__(self, fixed: bool, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fixed = heads, fixed

    def turn(self, x: Tensor, way: int = 1) -> Tensor:
        """Turn pairs of neighbours of (batch, steps, heads, size), slower from pair to pair."""
        size = x.shape[-1]
        angle = torch.arange(x.shape[1])[:, None] * 100 ** (-torch.arange(0, size, 2) / size)
        angle = way * angle.repeat_interleave(2, -1)[:, None]
        return x * angle.cos() + self.swap(x) * angle.sin()

    def swap(self, x: Tensor) -> Tensor:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

    def place(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.turn(q), self.turn(k), v

    def finish(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        split = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2) for t in self.place(*split))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(self.finish(mixed.transpose(1, 2)).flatten(2))


def writes(attention: type[Rotated], fixed: bool) -> Subject:
    """Return a language model with this attention, which alone knows of positions."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = tokens(32), nn.ModuleList(PreNorm() for _ in range(2))
            for block in self.blocks:
                block.attn = attention(fixed)
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 18)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return subject(Writer(), next_words, language_loss, 16)


# ---- scales --------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/lucidrains/vit-pytorch/issues/65",
    "scores divided by the root of the whole width",
    ("block*",),
    SCALE,
)
def vit(fixed: bool) -> Subject:
    """Dim ** -0.5 where the size of a head was meant: the weights are too even."""
    model = ViT()
    for block in model.blocks:
        block.attention.scale = (8 if fixed else 32) ** -0.5
    return subject(model, images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/esceptico/perceiver-io/issues/9",
    "scores divided by what was to be multiplied with",
    ("block*",),
    SCALE,
)
def perceiver(fixed: bool) -> Subject:
    """The scale is one over the root already, and dividing by it makes scores larger."""
    model = ViT(64)
    for block in model.blocks:
        block.attention.scale = 16 ** (-0.5 if fixed else 0.5)
    return subject(model, images, F.cross_entropy, 32)


# ---- positions -----------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/raiyanyahya/how-to-train-your-gpt/issues/6",
    "angles of neighbours, and halves turned by them",
    ("block*", ""),
    (*PLACES, "pair", "frequenc", "angle", "relative"),
)
def halves_and_pairs(fixed: bool) -> Subject:
    """The two that are turned together have two angles, so it is no rotation."""

    class Mismatched(Rotated):
        def swap(self, x: Tensor) -> Tensor:
            if self.fixed:
                return super().swap(x)
            first, second = x.chunk(2, -1)
            return torch.cat([-second, first], -1)

    return writes(Mismatched, fixed)


@SHELF.report(
    f"{GITHUB}/mlfoundations/open_lm/issues/4",
    "rotation along the heads",
    ("block*", ""),
    PLACES,
)
def open_lm(fixed: bool) -> Subject:
    """Heads are turned by their number, and all steps of a head alike."""

    class Along(Rotated):
        def turn(self, x: Tensor, way: int = 1) -> Tensor:
            if self.fixed:
                return super().turn(x, way)
            return super().turn(x.transpose(1, 2), way).transpose(1, 2)

    return writes(Along, fixed)


@SHELF.report(
    f"{GITHUB}/labmlai/annotated_deep_learning_paper_implementations/issues/251",
    "values rotated twice, and turned back once",
    ("block*", ""),
    (*PLACES, "twice", "angle"),
)
def value_rotation(fixed: bool) -> Subject:
    """What is read keeps a rotation by where it stood."""

    class Values(Rotated):
        def place(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            v = self.turn(v)
            return self.turn(q), self.turn(k), v if self.fixed else self.turn(v)

        def finish(self, x: Tensor) -> Tensor:
            return self.turn(x, -1)

    return writes(Values, fixed)


@SHELF.report(
    f"{GITHUB}/zju3dv/LoFTR/issues/41",
    "frequencies by a floor division",
    ("", "stem*", "block*"),
    (*PLACES, "frequenc", "constant", "alike", "floor"),
)
def loftr(fixed: bool) -> Subject:
    """-log(1e4) / d // 2 is -1 for each d: all waves but two hardly move."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Linear(8, 32), PreNorm()
            rate = -math.log(1e4) / (32 // 2) if fixed else -math.log(1e4) / 32 // 2
            angle = torch.arange(8)[:, None] * torch.exp(torch.arange(0, 32, 2) * rate)
            self.register_buffer("waves", torch.cat([angle.sin(), angle.cos()], 1))
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.stem(x) + self.waves).mean(1))

    return subject(Model(), rows, F.cross_entropy, 32)


def indented(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return token ids that begin with zeros, the mask of the others, and labels."""
    ids, labels = words(n)
    mask = torch.arange(32) >= torch.randint(0, 20, (n, 1))
    return (ids * mask, mask), labels


class Indented(nn.Module):
    """Classifies sentences that padding on their left makes equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(18, 32, padding_idx=0), normal(32, 32)
        self.block, self.head = PreNorm(), nn.Linear(32, 10)
        self.places = lambda mask: (mask.cumsum(1) - 1).clamp(min=0)
        self.seen = lambda mask: mask[:, None, None]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[self.places(mask)]
        x = x + self.block.attn(self.block.ln_1(x), self.seen(mask))
        x = x + self.block.mlp(self.block.ln_2(x))
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@SHELF.report(
    f"{GITHUB}/unslothai/unsloth/pull/3803",
    "padding on the left counts as positions",
    ("", "embed*", "block*"),
    ("position", "padding", "mask", "order"),
)
def unsloth(fixed: bool) -> Subject:
    """The first word of a short sentence is not at place zero, but after its padding."""
    model = Indented()
    if not fixed:
        model.places = lambda mask: torch.arange(32).expand(len(mask), -1)
    return subject(model, indented, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/hyunwoongko/transformer/pull/40",
    "padding hidden as a query, and seen as a key",
    ("block*", ""),
    HIDDEN,
)
def query_rows(fixed: bool) -> Subject:
    """The mask (batch, 1, steps, 1) blanks rows of the scores in place of columns."""

    model = Indented()
    model.seen = lambda m: (~(m[:, None, None] if fixed else m[:, None, :, None])) * -1e4
    return subject(model, indented, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/fla-org/flash-linear-attention/issues/126",
    "cache that counts heads for steps",
    ("", "embed*", "qkv*", "position*"),
    ("position", "offset", "cache", "twice", "overlap", "order"),
)
def cached(fixed: bool) -> Subject:
    """After the first part the next begins at place 4, the number of heads."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = tokens(32), normal(32, 32)
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
            self.mlp, self.norm, self.head = ffn(32), nn.LayerNorm(32), nn.Linear(32, 18)

        def forward(self, ids: Tensor) -> Tensor:
            offset, cache, read = 0, [], []
            for part in ids.split(16, 1):
                x = self.embed(part) + self.position[offset : offset + part.shape[1]]
                q, k, v = (t.unflatten(-1, (4, -1)) for t in self.qkv(x).chunk(3, -1))
                cache.append((k, v))
                keys, values = (
                    torch.cat(kept, 1).transpose(1, 2) for kept in zip(*cache, strict=True)
                )
                seen = torch.ones(q.shape[1], keys.shape[2], dtype=torch.bool)
                seen = seen.tril(keys.shape[2] - q.shape[1])
                mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, seen)
                x = x + self.out(mixed.transpose(1, 2).flatten(2))
                read.append(self.head(self.norm(x + self.mlp(x))))
                offset += q.shape[1] if fixed else q.shape[2]
            return torch.cat(read, 1)

    return subject(Reader(), next_words, language_loss, 16)


# ---- what attends to what, and over which axis ---------------------------------------------------


@SHELF.report(
    f"{GITHUB}/rexrex9/nlp_torchtext/pull/2",
    "decoder whose queries are the encoder's, and whose keys are its own",
    ("cross*", "memory*", ""),
    ("future", "later", "causal", "leak", "quer", "swap"),
)
def crossed(fixed: bool) -> Subject:
    """The decoder looks up its own later words, as cross-attention has no causal mask."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = tokens(32), normal(15, 32)
            self.memory, self.block = PreNorm(), PreNorm(causal=True)
            self.cross = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.head = nn.Linear(32, 18)

        def forward(self, source: Tensor, ids: Tensor) -> Tensor:
            memory = self.memory(self.embed(source) + self.position)
            x = self.block(self.embed(ids) + self.position)
            asked, kept = (x, memory) if fixed else (memory, x)
            q, k, v, out = self.cross
            return self.head(x + out(attend(q(asked), k(kept), v(kept))))

    def draw(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        ids, _ = words(n)
        return (ids[:, 1:16], ids[:, 16:31]), ids[:, 17:]

    return subject(Model(), draw, language_loss, 16)


@SHELF.report(
    f"{GITHUB}/jadore801120/attention-is-all-you-need-pytorch/pull/17",
    "layer norm by hand over the steps",
    ("block*", "norm*"),
    ("steps", "sequence", "axis", "axes", "dimension", "places", "tokens"),
)
def over_steps(fixed: bool) -> Subject:
    """Mean and deviation are those of a feature over the sentence."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.shift = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))

        def forward(self, x: Tensor) -> Tensor:
            axis = -1 if fixed else 1
            centred = x - x.mean(axis, keepdim=True)
            return centred / (x.std(axis, keepdim=True) + 1e-3) * self.gain + self.shift

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position, self.block = nn.Linear(8, 32), normal(8, 32), PreNorm()
            self.block.ln_1, self.block.ln_2, self.head = Norm(), Norm(), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.block(self.embed(x) + self.position).mean(1))

    return subject(Model(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/tianrun-chen/SAM-Adapter-PyTorch/issues/134",
    "result of a permute not taken, and pixels cut into tokens",
    ("", "stem*", "tokens*"),
    (*CUT, *DROPPED),
)
def sam_adapter(fixed: bool) -> Subject:
    """Only the sizes of the permuted tensor are read: tokens are not pixels."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.tokens = nn.Conv2d(1, 24, 2, 2), nn.Linear(24, 32)
            self.position, self.block = normal(16, 32), PreNorm()
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).permute(0, 2, 3, 1).contiguous()
            turned = x.permute(0, 3, 1, 2)
            n, channels, h, w = turned.shape
            x = (turned if fixed else x).reshape(n, channels, h * w).permute(0, 2, 1)
            return self.head(self.block(self.tokens(x) + self.position).mean(1))

    return subject(Model(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/Selen-Suyue/DensePolicy2D/issues/3",
    "pictures with channels last reshaped to channels first",
    ("", "net", "net.*", "stem*"),
    CUT,
)
def dense_policy(fixed: bool) -> Subject:
    """A third of the rows is taken for red, a third for green and a third for blue."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
            self.net = nn.Sequential(Patches(), PreNorm())
            self.net[0].proj, self.head = nn.Conv2d(16, 32, 2, stride=2), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = x.permute(0, 3, 1, 2) if fixed else x.reshape(len(x), 3, 8, 8)
            return self.head(self.net(self.stem(x)).mean(1))

    def draw(n: int) -> tuple[Tensor, Tensor]:
        pictures, labels = images(n)
        return torch.cat([pictures, 0.5 - pictures, pictures.tanh()], 1).movedim(1, 3), labels

    return subject(Model(), draw, F.cross_entropy, 32)
