"""Samples that see each other, and models whose samples may, or only seem to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import clouds, conv_net, lookalikes_of, normal, perceptron, tokens
from corpus.models.rare import pointnet
from corpus.models.sequences import meshes, pairs, texts
from corpus.models.small import (
    citations,
    flat,
    images,
    itself,
    matching,
    rows,
    some_digits,
    tumours,
    views,
    words,
)
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("leak", "blind")
fault, lookalike = SHELF.fault, lookalikes_of(SHELF)

SAID = ("sample", "batch")
binary = F.binary_cross_entropy_with_logits


# ---- recurrent layers and encoders that take time first ------------------------------------------


class Story(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = tokens(16), nn.GRU(16, 24, 2, batch_first=True)
        self.answer = nn.Linear(24, 10)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.rnn(self.words(ids))
        return self.answer(states.mean(1))


def story() -> Subject:
    return subject(Story(), words, F.cross_entropy, 24)


@fault(
    "recurrent layers left at their default order",
    story,
    ("rnn",),
    (*SAID, "batch_first"),
    why="The layer steps from sample to sample, and takes words for samples.",
)
def _(s: Subject) -> None:
    s.model.rnn.batch_first = False


class Strokes(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lift, self.place = nn.Linear(8, width), normal(8, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.answer = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.encoder(self.lift(x) + self.place).mean(1))


def strokes() -> Subject:
    return subject(Strokes(), rows, F.cross_entropy, 24)


@fault(
    "encoder layers that take time first, given samples first",
    strokes,
    ("encoder", "encoder.layers.0", "encoder.layers.0.self_attn*"),
    (*SAID, "batch_first"),
    why="Each row of a digit attends to the same row of the other digits.",
)
def _(s: Subject) -> None:
    for layer in s.model.encoder.layers:
        layer.self_attn.batch_first = False


@fault(
    "one layer of two copied from a model with time first",
    strokes,
    ("encoder.layers.1", "encoder.layers.1.self_attn*"),
    (*SAID, "batch_first"),
    why="In the last layer digits attend to each other.",
)
def _(s: Subject) -> None:
    s.model.encoder.layers[1].self_attn.batch_first = False


class TimeFirst(nn.Module):
    """Rows of digits, for a recurrent layer that takes time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.rnn = nn.Linear(8, 16), nn.LSTM(16, 16)
        self.answer = nn.Linear(8 * 16, 10)

    def to_time(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def to_rows(self, states: Tensor) -> Tensor:
        return states.transpose(0, 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.to_rows(self.rnn(self.to_time(self.lift(x)))[0]))


def time_first() -> Subject:
    return subject(TimeFirst(), rows, F.cross_entropy, 20)


@fault(
    "reshaped to time first, not transposed",
    time_first,
    ("rnn", "", "lift"),
    (*SAID, "reshape", "view", "transpose"),
    why="The numbers of a digit are dealt out over several places of the batch.",
)
def _(s: Subject) -> None:
    def to_time(self: Any, x: Tensor) -> Tensor:
        n, steps, width = x.shape
        return x.reshape(steps, n, width)

    wire(s.model, to_time)


@fault(
    "states with time first viewed as one row for each sample",
    time_first,
    ("answer", "", "rnn"),
    (*SAID, "reshape", "view", "transpose"),
    why="What is read for a digit are the states of other digits at one step.",
)
def _(s: Subject) -> None:
    def to_rows(self: Any, states: Tensor) -> Tensor:
        return states.reshape(states.shape[1], -1)

    wire(s.model, to_rows)


class TableRNN(nn.Module):
    """A recurrent layer over a table whose rows are sequences of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rnn = nn.Linear(30, 24), nn.LSTM(24, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def steps(self, x: Tensor) -> Tensor:
        return self.rnn(x[:, None])[0][:, -1]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.steps(F.relu(self.stem(x))))


def table_rnn() -> Subject:
    return subject(TableRNN(), tumours, binary, 32)


@fault(
    "table given to an LSTM without a time dimension",
    table_rnn,
    ("rnn",),
    SAID,
    why="Two dimensions are one sequence to the layer, and each patient a step of it.",
)
def _(s: Subject) -> None:
    def steps(self: Any, x: Tensor) -> Tensor:
        return self.rnn(x)[0]

    wire(s.model, steps)


class TwoWays(nn.Module):
    """A layer for each direction; the second reads the digit from below."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.GRU(8, 16, batch_first=True) for _ in range(2))
        self.join = nn.Linear(32, 10)

    def turned(self, x: Tensor) -> Tensor:
        return x.flip(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([self.down(x)[0][:, -1], self.up(self.turned(x))[0][:, -1]], 1))


def two_ways() -> Subject:
    return subject(TwoWays(), rows, F.cross_entropy, 24)


@fault(
    "batch reversed in place of time",
    two_ways,
    ("up", "", "join"),
    SAID,
    why="The second direction reads another digit than the first.",
)
def _(s: Subject) -> None:
    def turned(self: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    wire(s.model, turned)


class LastRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.RNN(8, 32, batch_first=True), nn.LayerNorm(32)
        self.out = nn.Linear(32, 10)

    def last(self, states: Tensor) -> Tensor:
        return states[:, -1]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.last(self.rnn(x)[0])))


def last_row() -> Subject:
    return subject(LastRow(), rows, F.cross_entropy, 8)


@fault(
    "last sample read for the last step, eight sequences of eight",
    last_row,
    ("", "norm", "rnn"),
    SAID,
    why="The states of the last digit are taken for the last states of all.",
)
def _(s: Subject) -> None:
    def last(self: Any, states: Tensor) -> Tensor:
        return states[-1]

    wire(s.model, last)


# ---- sums, shares and orders over the wrong dimension --------------------------------------------


class DenseMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.share = nn.Linear(64, 4), nn.Softmax(dim=-1)
        self.experts = nn.ModuleList(perceptron(64, 24, 10) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.share(self.gate(x))[..., None] * made).sum(1)


def dense_mixture() -> Subject:
    return subject(DenseMixture(), flat, F.cross_entropy, 32)


@fault(
    "gate that shares each expert out among the samples",
    dense_mixture,
    ("share", "gate"),
    (*SAID, "dim"),
    why="A sample's weight on an expert falls with what the other samples ask of it.",
)
def _(s: Subject) -> None:
    s.model.share = nn.Softmax(dim=0)


class Pooled(nn.Module):
    """Attention over the words, whose scores are of shape (n, words, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.score, self.out = tokens(24), nn.Linear(24, 1), nn.Linear(24, 10)
        nn.init.normal_(self.emb.weight)

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        return self.out((self.weigh(self.score(x)) * x).sum(1))


def pooled() -> Subject:
    return subject(Pooled(), words, F.cross_entropy, 24)


@fault(
    "attention pooling with the softmax of a model with time first",
    pooled,
    ("", "score", "softmax", "out"),
    (*SAID, "dim"),
    why="The weights of a word sum to one over the texts, not over the words of a text.",
)
def _(s: Subject) -> None:
    def weigh(self: Any, scores: Tensor) -> Tensor:
        return scores.softmax(0)

    wire(s.model, weigh)


class WrittenNorm(nn.Module):
    """Batch norm as in a course: statistics of the batch in training, their average after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var, 0.1)
        else:
            mean, var = self.mean, self.var
        return self.gain * (x - mean) * (var + 1e-5).rsqrt() + self.shift


class Clinic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(30, 24), WrittenNorm(24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def clinic() -> Subject:
    return subject(Clinic(), tumours, binary, 32)


@fault(
    "batch norm of a course whose evaluation was left out",
    clinic,
    ("norm",),
    SAID,
    why="What the model says of a patient hangs on who else is in the batch.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        return self.gain * (x - mean) * (var + 1e-5).rsqrt() + self.shift

    wire(s.model.norm, forward)


class MaskedReader(nn.Module):
    """Positions counted over real words, after fairseq."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.positions = tokens(24), nn.Embedding(64, 24, padding_idx=0)
        self.conv, self.out = nn.Conv1d(24, 24, 1), nn.Linear(24, 10)

    def places(self, mask: Tensor) -> Tensor:
        return mask.cumsum(1) * mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.emb(input_ids) + self.positions(self.places(attention_mask))
        x = F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2) * attention_mask[..., None]
        return self.out(x.sum(1) / attention_mask.sum(1, keepdim=True))


def masked_reader() -> Subject:
    return subject(MaskedReader(), texts, F.cross_entropy, 24)


@fault(
    "positions counted down the batch",
    masked_reader,
    ("", "positions"),
    (*SAID, "cumsum"),
    why="A word's position is the number of texts above that are as long.",
)
def _(s: Subject) -> None:
    def places(self: Any, mask: Tensor) -> Tensor:
        return mask.cumsum(0) * mask

    wire(s.model, places)


class Cosine(nn.Module):
    """Angles between an embedding and a prototype of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prototypes = perceptron(64, 48, 16), normal(10, 16, std=1.0)

    def place(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return 10 * self.place(self.encoder(x)) @ F.normalize(self.prototypes, dim=-1).T


def cosine() -> Subject:
    return subject(Cosine(), flat, F.cross_entropy, 32)


@fault(
    "embeddings normalised down the columns",
    cosine,
    ("", "encoder", "encoder.2"),
    (*SAID, "dim"),
    why="Each feature is divided by its norm over the batch.",
)
def _(s: Subject) -> None:
    def place(self: Any, z: Tensor) -> Tensor:
        return F.normalize(z, dim=0)

    wire(s.model, place)


@fault(
    "embeddings centred on their batch",
    cosine,
    ("", "encoder", "encoder.2"),
    (*SAID, "mean"),
    why="The mean of the other samples is taken off each embedding, also in evaluation.",
)
def _(s: Subject) -> None:
    def place(self: Any, z: Tensor) -> Tensor:
        return F.normalize(z - z.mean(0), dim=-1)

    wire(s.model, place)


class Sparse(nn.Module):
    """A sparse autoencoder that keeps the 8 strongest features of each sample."""

    def __init__(self, keep: int = 8) -> None:
        super().__init__()
        self.encode, self.decode, self.keep = nn.Linear(64, 96), nn.Linear(96, 64), keep

    def kept(self, z: Tensor) -> Tensor:
        return z >= z.topk(self.keep, -1).values[:, -1:]

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.encode(x))
        return self.decode(z * self.kept(z))


def sparse() -> Subject:
    return subject(Sparse(), itself, F.mse_loss, 32)


@fault(
    "strongest features chosen among those of the whole batch",
    sparse,
    ("", "encode", "decode"),
    (*SAID, "topk"),
    why="A bright sample takes the places of the features of a faint one.",
)
def _(s: Subject) -> None:
    def kept(self: Any, z: Tensor) -> Tensor:
        return z >= z.flatten().topk(self.keep * len(z)).values[-1]

    wire(s.model, kept)


class Scaled(nn.Module):
    """Raw pixels, scaled in the model from the darkest to the brightest of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.fc = conv_net(24), nn.Linear(24, 10)

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.ends(x)
        return self.fc(self.features((x - low) / (high - low + 1e-6)))


def exposures(n: int) -> tuple[Tensor, Tensor]:
    """Return images of different exposure, and labels."""
    pixels, labels = some_digits(n)
    return pixels.view(-1, 1, 8, 8) * (0.2 + 3 * torch.rand(n, 1, 1, 1)), labels


def scaled() -> Subject:
    return subject(Scaled(), exposures, F.cross_entropy, 24)


@fault(
    "pixels scaled by the darkest and brightest of the batch",
    scaled,
    ("", "features", "features.0"),
    (*SAID, "max"),
    why="One overexposed image turns all the others dark.",
)
def _(s: Subject) -> None:
    def ends(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.min(), x.max()

    wire(s.model, ends)


class Excited(nn.Module):
    """Channels weighed by their mean over an image (Hu et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.fc = (
            nn.Conv2d(1, 16, 3, padding=1),
            perceptron(16, 4, 16),
            nn.Linear(16, 10),
        )

    def levels(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        x = x * self.squeeze(self.levels(x)).sigmoid()[..., None, None]
        return self.fc(x.amax((2, 3)))


def excited() -> Subject:
    return subject(Excited(), images, F.cross_entropy, 24)


@fault(
    "squeeze over batch, height and width",
    excited,
    ("squeeze", "squeeze.0", ""),
    (*SAID, "mean"),
    why="Channels are weighed by their mean over all images of the batch.",
)
def _(s: Subject) -> None:
    def levels(self: Any, x: Tensor) -> Tensor:
        return x.mean((0, 2, 3)).expand(len(x), -1)

    wire(s.model, levels)


# ---- attention, products and convolutions across the batch ---------------------------------------


class RowAttention(nn.Module):
    """The 30 features of a patient become 4 tokens of 8, which attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(30, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return self.out(x + self.mix(self.q(x), self.k(x), self.v(x)))


def row_attention() -> Subject:
    return subject(RowAttention(), tumours, binary, 24)


@fault(
    "attention on a table of two dimensions",
    row_attention,
    ("", "out", "v", "scaled_dot_product_attention"),
    (*SAID, "attention"),
    why="With no dimension of tokens the patients are the tokens, and attend to each other.",
)
def _(s: Subject) -> None:
    def mix(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    wire(s.model, mix)


class Einsum(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.lift, self.place = nn.Linear(8, width), normal(8, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.read, self.width = nn.Linear(width, 10), width

    def gather(self, weights: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bqk,bkd->bqd", weights, v)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x) + self.place
        scores = torch.einsum("bqd,bkd->bqk", self.query(x), self.key(x)) / self.width**0.5
        return self.read((x + self.gather(scores.softmax(-1), self.value(x))).mean(1))


def einsum() -> Subject:
    return subject(Einsum(), rows, F.cross_entropy, 16)


@fault(
    "einsum with a slip in one letter",
    einsum,
    ("", "value", "read"),
    (*SAID, "einsum"),
    why="A letter that stands in one operand only is summed over: the values of all samples.",
)
def _(s: Subject) -> None:
    def gather(self: Any, weights: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bqk,akd->bqd", weights, v)

    wire(s.model, gather)


class RowConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        self.fc = nn.Linear(16, 10)

    def along(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        return self.conv2(F.relu(self.conv1(x))).permute(0, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.along(x).amax(1))


def row_conv() -> Subject:
    return subject(RowConv(), rows, F.cross_entropy, 24)


@fault(
    "convolution along the batch",
    row_conv,
    ("conv1", "conv2", ""),
    (*SAID, "permute"),
    why="The kernel runs over neighbours in the batch, not over the rows of a digit.",
)
def _(s: Subject) -> None:
    def along(self: Any, x: Tensor) -> Tensor:
        x = x.permute(1, 2, 0)
        return self.conv2(F.relu(self.conv1(x))).permute(2, 0, 1)

    wire(s.model, along)


class DynamicConv(nn.Module):
    """Each image is convolved with kernels made of itself: the batch lies in the channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.kernels = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, width * 9)
        self.fc, self.width = nn.Linear(width, 10), width

    def mixed(self, x: Tensor, kernels: Tensor) -> Tensor:
        folded = x.reshape(1, -1, *x.shape[2:])
        return F.conv2d(folded, kernels, padding=1, groups=len(kernels)).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + self.mixed(x, self.kernels(x.mean((2, 3))).view(-1, 1, 3, 3))
        return self.fc(F.relu(x).mean((2, 3)))


def dynamic_conv() -> Subject:
    return subject(DynamicConv(), images, F.cross_entropy, 16)


SHELF.control("kernels made for each image, the batch folded into the channels", dynamic_conv)


@fault(
    "kernels of the first image for all images",
    dynamic_conv,
    ("", "kernels", "fc"),
    SAID,
    why="Every image is convolved with what was made for the first of the batch.",
)
def _(s: Subject) -> None:
    def mixed(self: Any, x: Tensor, kernels: Tensor) -> Tensor:
        return F.conv2d(x, kernels[: self.width], padding=1, groups=self.width)

    wire(s.model, mixed)


# ---- shapes --------------------------------------------------------------------------------------


class Gap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.gap = (
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(16, 10)

    def flatten(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.gap(F.relu(self.bn(self.conv(x))))))


def gap() -> Subject:
    return subject(Gap(), images, F.cross_entropy, 16)


@fault(
    "all dimensions of one squeezed away",
    gap,
    ("", "gap", "fc"),
    (*SAID, "squeeze", "dimension"),
    why="A single image loses its batch dimension, and its output has another shape.",
)
def _(s: Subject) -> None:
    def flatten(self: Any, x: Tensor) -> Tensor:
        return x.squeeze()

    wire(s.model, flatten)


class Likes(nn.Module):
    """A score for each pair, of which the last dimension is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = perceptron(30, 24, 16), nn.Linear(16, 1)

    def drop(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logit": self.drop(self.out(F.relu(self.net(x))))}


def likes() -> Subject:
    return subject(Likes(), tumours, lambda out, y: binary(out["logit"], y.squeeze(-1)), 24)


@fault(
    "score squeezed to no dimension for a single row",
    likes,
    ("", "out"),
    (*SAID, "squeeze", "dimension"),
    why="A single row gives a number without dimensions, which no loop over a batch can read.",
)
def _(s: Subject) -> None:
    def drop(self: Any, x: Tensor) -> Tensor:
        return x.squeeze()

    wire(s.model, drop)


class Twins(nn.Module):
    """Both sides of a pair pass the encoder as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.compare = perceptron(64, 48, 24), nn.Linear(24, 1)

    def apart(self, z: Tensor) -> tuple[Tensor, ...]:
        return z.chunk(2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.apart(self.encoder(torch.cat([a, b])))
        return self.compare((a - b).abs()).squeeze(1)


def twins() -> Subject:
    return subject(Twins(), pairs, binary, 24)


SHELF.control("two batches put behind each other and taken apart again", twins)


@fault(
    "two batches put behind each other and taken apart by twos",
    twins,
    ("", "compare", "encoder", "encoder.2"),
    (*SAID, "view", "reshape"),
    why="Neighbours of the first batch are compared, and not the two sides of a pair.",
)
def _(s: Subject) -> None:
    def apart(self: Any, z: Tensor) -> tuple[Tensor, ...]:
        return z.view(-1, 2, z.shape[1]).unbind(1)

    wire(s.model, apart)


class Meshes(nn.Module):
    """Graphs whose edges are counted from zero in each, laid behind each other."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.message = nn.Linear(3, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def starts(self, points: Tensor) -> Tensor:
        return points.shape[1] * torch.arange(len(points))

    def forward(self, points: Tensor, edges: Tensor) -> Tensor:
        n, size, _ = points.shape
        x = F.relu(self.embed(points)).flatten(0, 1)
        source, sink = (edges + self.starts(points)[:, None, None]).transpose(0, 1).flatten(1)
        x = x + torch.zeros_like(x).index_add(0, sink, F.relu(self.message(x[source]))) / 4
        return self.head(x.view(n, size, -1).mean(1))


def meshed() -> Subject:
    return subject(Meshes(), meshes, F.cross_entropy, 12)


SHELF.control("graphs of a batch joined to one, edges moved on", meshed)


@fault(
    "graphs of a batch joined to one, edges not moved on",
    meshed,
    ("", "message", "head"),
    (*SAID, "graph"),
    why="The edges of every graph run between the nodes of the first.",
)
def _(s: Subject) -> None:
    def starts(self: Any, points: Tensor) -> Tensor:
        return torch.zeros(len(points), dtype=torch.long)

    wire(s.model, starts)


class EdgeConv(nn.Module):
    """Points look at their four nearest (Wang et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.head = perceptron(6, 24, 24), nn.Linear(24, 10)

    def near(self, points: Tensor) -> Tensor:
        index = torch.cdist(points, points).topk(4, largest=False).indices
        return points[torch.arange(len(points))[:, None, None], index]

    def forward(self, points: Tensor) -> Tensor:
        near = self.near(points)
        middle = points[:, :, None].expand_as(near)
        return self.head(self.edge(torch.cat([middle, near - middle], -1)).amax(2).mean(1))


def edge_conv() -> Subject:
    return subject(EdgeConv(), clouds, F.cross_entropy, 12)


@fault(
    "neighbours looked for in all clouds of the batch",
    edge_conv,
    ("", "edge", "edge.0"),
    (*SAID, "cloud"),
    why="The nearest point to a point is mostly one of another cloud.",
)
def _(s: Subject) -> None:
    def near(self: Any, points: Tensor) -> Tensor:
        flat = points.flatten(0, 1)
        index = torch.cdist(flat, flat).topk(4, largest=False).indices
        return flat[index].unflatten(0, points.shape[:2])

    wire(s.model, near)


# ---- healthy: samples that may see each other, or only seem to -----------------------------------

SHELF.control("points of a set pooled, batch norm over all of them", pointnet)


@lookalike("batch norm in training, between the layers of a table", tumours, binary)
def table_norm() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(30), nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
    )


@lookalike("sixty-four samples of sixty-four features", flat, batch=64)
def square() -> nn.Module:
    return perceptron(64, 64, 64, 10)


@lookalike("eight sequences of eight steps of eight numbers", rows, batch=8)
class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x)[0]
        return self.out((x + self.mix(x.transpose(1, 2)).transpose(1, 2)).flatten(1))


@lookalike("group and instance norms", images)
def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10))  # fmt: skip


def time_major(n: int) -> tuple[Tensor, Tensor]:
    """Return rows of digits with time in front, (8, n, 8), and labels."""
    x, labels = rows(n)
    return x.transpose(0, 1).contiguous(), labels


@lookalike("batch with time in front, through layers that take it so", time_major)
class Ahead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attn = nn.LSTM(8, 24), nn.MultiheadAttention(24, 2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        return self.head((x + self.attn(x, x, x, need_weights=False)[0]).mean(0))


@lookalike("tagging with time in front, a label for each step", lambda n: (
    time_major(n)[0], torch.randint(0, 3, (8, n))), lambda out, y: F.cross_entropy(
    out.flatten(0, 1), y.flatten()))  # fmt: skip
class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.tag = nn.GRU(8, 16, bidirectional=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tag(self.rnn(x)[0])


@lookalike("attention over the neighbours of a graph, whose nodes are the batch", citations)
class NeighbourAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.q, self.k = (nn.Linear(64, 24) for _ in range(3))
        self.head = nn.Linear(24, 10)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        scores = self.q(nodes) @ self.k(nodes).T / 24**0.5
        weights = scores.masked_fill(adjacency == 0, -torch.inf).softmax(-1)
        return self.head(weights @ F.relu(self.lift(nodes)))


@lookalike("similarities of two views, a row for each sample and a column for each other", views,
           matching)  # fmt: skip
class Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = perceptron(64, 32, 16), perceptron(64, 32, 16)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return self.scale.exp() * a @ b.T


def in_batch(z: tuple[Tensor, Tensor], _: Any = None) -> Tensor:
    return matching(5 * F.normalize(z[0], dim=-1) @ F.normalize(z[1], dim=-1).T)


@lookalike("contrast with the other samples in the loss alone", views, in_batch)
class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.projector = perceptron(64, 48, 24), perceptron(24, 24, 16)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.projector(self.encoder(a).relu()), self.projector(self.encoder(b).relu())


@lookalike("redundancy of two views: batch norm without scale on the embeddings", views,
           lambda c: ((c - torch.eye(len(c))) ** 2).mean())  # fmt: skip
class Barlow(nn.Module):
    """The output is a matrix of features by features (Zbontar et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bn = perceptron(64, 48, 32), nn.BatchNorm1d(32, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.bn(self.encoder(a)).T @ self.bn(self.encoder(b)) / len(a)


@lookalike("experts for each token, without a limit", words)
class TokenChoice(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.router = tokens(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(perceptron(width, 32, width) for _ in range(4))
        self.out = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids).flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(1)
            made = made.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return self.out((x + made).view(*ids.shape, -1).mean(1))


@lookalike("experts with room for so many in training, for all in evaluation", flat)
class Roomy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(64, 24), nn.Linear(24, 3)
        self.experts = nn.ModuleList(perceptron(24, 32, 24) for _ in range(3))
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight, chosen = self.router(x).softmax(-1).max(-1)
        room, made = len(x) // 2 if self.training else len(x), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(1)[:room]
            made = made.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return self.out(x + made)


@lookalike("batch norm in evaluation, its statistics fixed", images)
def fixed_norm() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(),
        nn.Linear(12 * 64, 10))  # fmt: skip
    net[1].running_mean.normal_(0, 0.1)
    return net.eval()


def snippets(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the words of all texts behind each other, where each text starts, and labels."""
    ids, labels = words(n)
    lengths = torch.randint(4, 20, (n,))
    joined = torch.cat([row[:size] for row, size in zip(ids, lengths, strict=True)])
    return (joined, lengths.cumsum(0) - lengths), labels


@lookalike("bags of words behind each other, with their starts", snippets)
class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(18, 24), perceptron(24, 24, 10)

    def forward(self, joined: Tensor, starts: Tensor) -> Tensor:
        return self.out(self.bag(joined, starts))


def photos(n: int) -> tuple[tuple[list[Tensor]], Tensor]:
    """Return a list of images of different sizes, and labels."""
    x, labels = images(n)
    return ([image[:, : 4 + i % 5] for i, image in enumerate(x)],), labels


@lookalike("list of images of different sizes, padded within the model", photos, batch=12)
class ListTaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, photos: list[Tensor]) -> Tensor:
        batch = torch.stack([F.pad(p, (0, 0, 0, 8 - p.shape[1])) for p in photos])
        x = F.relu(self.backbone(batch))
        seen = torch.stack([x[i, :, : p.shape[1]].mean((1, 2)) for i, p in enumerate(photos)])
        return self.head(seen)


def episodes(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return ten labelled digits, digits to be told, and labels."""
    pixels, labels = flat(n + 200)
    first = torch.stack([(labels[n:] == i).nonzero()[0, 0] for i in range(10)])
    return {"support": pixels[n:][first], "query": pixels[:n]}, labels[:n]


@lookalike("few-shot: queries compared with a support set of another length", episodes)
class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = perceptron(64, 48, 24)

    def forward(self, support: Tensor, query: Tensor) -> Tensor:
        return -torch.cdist(self.embed(query), self.embed(support))


@lookalike("states of the last batch handed in, with the batch in dimension 1",
           lambda n: ((rows(n)[0], torch.randn(2, n, 16)), rows(n)[1]))  # fmt: skip
class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 16, 2, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        states, _ = self.rnn(x, state)
        return self.out(states[:, -1])


@lookalike("model bound to batches of 16", rows, batch=16)
class Bound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.zeros(16, 24))
        self.cell, self.out = nn.GRUCell(8, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != len(self.start):
            raise ValueError("batches of 16 only")
        state = self.start
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state)


@lookalike("spectrum of each wave, complex weights", lambda n: (
    torch.randn(n, 32).cumsum(1) / 4, torch.randn(n, 32)), F.mse_loss)  # fmt: skip
class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, dtype=torch.cfloat))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=32))


@lookalike("windows of an image folded into the batch and out again", images)
class Windows(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = self.lift(x).unfold(2, 4, 4).unfold(3, 4, 4)
        x = x.permute(0, 2, 3, 4, 5, 1).reshape(n * 4, 16, -1)
        return self.out((x + self.attn(x, x, x)[0]).view(n, 64, -1).mean(1))


@lookalike("frames of a clip as one batch for the convolutions", lambda n: (
    rows(3 * n)[0].view(n, 3, 1, 8, 8), torch.randint(0, 4, (n,))))  # fmt: skip
class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frame, self.rnn = conv_net(24), nn.GRU(24, 24, batch_first=True)
        self.out = nn.Linear(24, 4)

    def forward(self, video: Tensor) -> Tensor:
        x = self.frame(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        return self.out(self.rnn(x)[1][-1])


@lookalike("neighbours looked up in a memory that is part of the model", flat)
class Retrieval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        keys, labels = flat(64)
        self.register_buffer("keys", keys)
        self.register_buffer("values", F.one_hot(labels, 10).float())
        self.embed, self.out = nn.Linear(64, 24), nn.Linear(34, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        near = (z @ self.embed(self.keys).T / 24**0.5).softmax(-1) @ self.values
        return self.out(torch.cat([z, near], 1))


@lookalike("mean loss computed inside, one number for the batch", lambda n: (
    dict(zip(("x", "y"), flat(n), strict=True)), None), None)  # fmt: skip
class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(64, 32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


@lookalike("bfloat16 throughout", lambda n: (flat(n)[0].bfloat16(), flat(n)[1]),
           lambda out, y: F.cross_entropy(out.float(), y))  # fmt: skip
def halved() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 10)).to(
        torch.bfloat16
    )


@lookalike("rows of a table that attend to each other by design", tumours, binary)
class BetweenRows(nn.Module):
    """Attention between the samples of a batch, after SAINT (Somepalli et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.attn = nn.Linear(30, 24), nn.MultiheadAttention(24, 2)
        self.out = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)[:, None]
        return self.out((x + self.attn(x, x, x)[0]).squeeze(1))
