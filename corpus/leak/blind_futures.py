"""Models that see what they are to predict, and models that may, or only seem to."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import (
    PlacedTokens,
    PreNorm,
    Rotary,
    attend,
    ffn,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
)
from corpus.models.sequences import ignoring, later_words, ragged, series, with_labels
from corpus.models.small import halves, itself, language_loss, next_words, rows, words
from corpus.models.written_out import wire
from corpus.subject import Subject, subject
from corpus.variants import from_transformers

SHELF = Shelf("leak", "blind")
fault, lookalike = SHELF.fault, lookalikes_of(SHELF)

SAID = ("later", "future", "causal")
BEHIND = "Each word is predicted with a look at the words behind it."


# ---- decoders with attention ---------------------------------------------------------------------


class CausalAttention(nn.Module):
    """Attention with its mask written out; `softmax` is a layer of its own."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax, self.heads = nn.Softmax(dim=-1), heads

    def masked(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return self.o((self.softmax(self.masked(scores)) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.attn = nn.LayerNorm(width), CausalAttention(width)
        self.after, self.mlp = nn.LayerNorm(width), ffn(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.before(x))
        return x + self.mlp(self.after(x))


class Writer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = PlacedTokens(width)
        nn.init.normal_(self.embed.token.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.unembed = nn.LayerNorm(width), nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x))


def writer() -> Subject:
    return subject(Writer(), next_words, language_loss, 12)


SHELF.control("decoder with its mask written out", writer)

FIRST = ("layers.0.attn", "layers.0.attn.softmax", "layers.0.attn.o", "layers.0")


def mask_with(s: Subject, masked: Any, *layers: int) -> None:
    for i in layers or range(len(s.model.layers)):
        wire(s.model.layers[i].attn, masked)


@fault("scores never masked", writer, FIRST, (*SAID, "mask"), why=BEHIND)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        return scores

    mask_with(s, masked)


@fault("what may be seen taken for what is hidden", writer, FIRST, (*SAID, "mask"), why=BEHIND)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        return scores.masked_fill(seen, -1e9)

    mask_with(s, masked)


@fault(
    "mask that begins one place late",
    writer,
    FIRST,
    (*SAID, "mask", "next"),
    why="Each place sees the next word, which is the one that it is to predict.",
)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(2), -math.inf)

    mask_with(s, masked)


@fault(
    "mask lost in the second block of three",
    writer,
    ("layers.1.attn", "layers.1.attn.softmax", "layers.1.attn.o", "layers.1"),
    (*SAID, "mask"),
    why="One block that sees ahead gives the words away to all behind it.",
)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        return scores

    mask_with(s, masked, 1)


@fault(
    "one subtracted from the scores of what is hidden",
    writer,
    FIRST,
    (*SAID, "mask"),
    why="After the softmax the hidden words still have a third of their weight.",
)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        return scores - torch.ones(scores.shape[-2:]).triu(1)

    mask_with(s, masked)


@fault(
    "scores multiplied by the mask",
    writer,
    FIRST,
    (*SAID, "mask"),
    why="A score of zero is a usual score, and the softmax gives it a usual weight.",
)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        return scores * torch.ones(scores.shape[-2:]).tril()

    mask_with(s, masked)


@fault(
    "mask of a model that is laid out by keys and queries",
    writer,
    FIRST,
    (*SAID, "mask", "transpose"),
    why="Transposed, the mask hides what went before and shows what follows.",
)
def _(s: Subject) -> None:
    def masked(self: Any, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1).T
        return scores.masked_fill(hidden, -math.inf)

    mask_with(s, masked)


@fault(
    "softmax over queries",
    writer,
    FIRST,
    (*SAID, "softmax", "dim"),
    why="A word's weight is a share of what all later words pay to the same key.",
)
def _(s: Subject) -> None:
    for layer in s.model.layers:
        layer.attn.softmax = nn.Softmax(dim=-2)


class Padded(nn.Module):
    """Fused attention that gets the mask of padding and hides the future besides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = PlacedTokens(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 18)

    def visible(self, mask: Tensor) -> Tensor:
        n = mask.shape[1]
        return torch.ones(n, n, dtype=torch.bool).tril() & mask.bool()[:, None, None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.lm_head(x + self.proj(attend(q, k, v, attn_mask=self.visible(attention_mask))))


def padded_writer() -> Subject:
    return subject(Padded(), later_words, ignoring, 16)


SHELF.control("fused attention with padding and future hidden", padded_writer)


@fault(
    "causal only where no mask is given, and one is",
    padded_writer,
    ("", "proj", "qkv", "scaled_dot_product_attention"),
    (*SAID, "mask"),
    why="The mask of padding takes the place of the causal one.",
)
def _(s: Subject) -> None:
    def visible(self: Any, mask: Tensor) -> Tensor:
        return mask.bool()[:, None, None]

    wire(s.model, visible)


class Shifting(nn.Module):
    """A decoder layer of torch that takes labels and shifts them itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = PlacedTokens(width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.score = nn.Linear(width, 18)

    def mask(self, n: int) -> Tensor | None:
        return nn.Transformer.generate_square_subsequent_mask(n)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.block(self.embed(input_ids), src_mask=self.mask(input_ids.shape[1]))
        logits = self.score(x)
        return {"loss": language_loss(logits[:, :-1], labels[:, 1:]), "logits": logits}


def shifting() -> Subject:
    return subject(Shifting(), with_labels, lambda out: out["loss"], 16)


SHELF.control("labels shifted within the model", shifting)


@fault(
    "labels shifted within, and the layer of torch given no mask",
    shifting,
    ("block", "block.self_attn*"),
    (*SAID, "mask"),
    why=BEHIND,
)
def _(s: Subject) -> None:
    def mask(self: Any, n: int) -> None:
        return None

    wire(s.model, mask)


class Linearised(nn.Module):
    """Attention without softmax: sums of keys and values up to here (Katharopoulos et al. 2020)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = PlacedTokens(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 18)

    def so_far(self, x: Tensor) -> Tensor:
        return x.cumsum(1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
        memory, weight = self.so_far(k[..., None] * self.v(x)[..., None, :]), self.so_far(k)
        read = (q[..., None] * memory).sum(2) / (q * weight).sum(-1, keepdim=True)
        return self.out(x + read)


def linearised() -> Subject:
    return subject(Linearised(), next_words, language_loss, 12)


SHELF.control("linear attention with running sums", linearised)


@fault(
    "linear attention with the sums of an encoder",
    linearised,
    ("", "out", "k", "v"),
    SAID,
    why="The sum over all places holds the words that are still to come.",
)
def _(s: Subject) -> None:
    def so_far(self: Any, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand_as(x)

    wire(s.model, so_far)


@fault("running sums from behind", linearised, ("", "out", "k", "v"), (*SAID, "flip"), why=BEHIND)
def _(s: Subject) -> None:
    def so_far(self: Any, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1).flip(1)

    wire(s.model, so_far)


# ---- recurrence, convolutions, shifts ------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.embed = tokens(16)
        self.rnn = nn.LSTM(16, 24 // (1 + both), batch_first=True, bidirectional=both)
        self.out = nn.Linear(24, 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


def recurrent() -> Subject:
    return subject(Recurrent(), next_words, language_loss, 12)


SHELF.control("recurrent language model", recurrent)


@fault(
    "half of the units run from behind",
    recurrent,
    ("rnn",),
    (*SAID, "bidirectional", "reverse"),
    why="The second direction has read the word that is to be predicted.",
)
def _(s: Subject) -> None:
    s.model.rnn = nn.LSTM(16, 12, batch_first=True, bidirectional=True)


class Dilated(nn.Module):
    """Causal convolutions over a series, padded in front alone."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**i) for i in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)
        self.ahead = [0] * depth

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x.transpose(1, 2))
        for conv, norm, ahead in zip(self.convs, self.norms, self.ahead, strict=True):
            all_of_it = 2 * conv.dilation[0]
            y = conv(F.pad(x, (all_of_it - ahead, ahead)))
            x = x + F.gelu(norm(y.transpose(1, 2)).transpose(1, 2))
        return self.out(x.transpose(1, 2))


def dilated() -> Subject:
    return subject(Dilated(), series, F.mse_loss, 16)


SHELF.control("dilated convolutions, padded in front", dilated)


@fault(
    "convolutions padded on both sides",
    dilated,
    ("convs.0", ""),
    (*SAID, "padding"),
    why="The kernel is centred, and reads the step that it is to forecast.",
)
def _(s: Subject) -> None:
    s.model.ahead = [1, 2, 4]


@fault(
    "last convolution of three padded on both sides",
    dilated,
    ("convs.2", ""),
    (*SAID, "padding"),
    why="Only the widest kernel reaches ahead, by four steps.",
)
def _(s: Subject) -> None:
    s.model.ahead = [0, 0, 4]


class OverTime(nn.Module):
    """Norm over channels and time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@fault(
    "layer norms exchanged for a group norm with one group",
    dilated,
    ("norms.0", "norms.0.norm"),
    (*SAID, "norm"),
    why="Mean and deviation are taken over time, and so over what is to be forecast.",
)
def _(s: Subject) -> None:
    s.model.norms = nn.ModuleList(OverTime(16) for _ in range(3))


class Forecast(nn.Module):
    """A recurrent forecast of a series that is taken relative to its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

    def level(self, x: Tensor) -> Tensor:
        return x[:, :1]

    def forward(self, x: Tensor) -> Tensor:
        level = self.level(x)
        return level + self.out(self.rnn(x - level)[0])


def forecast() -> Subject:
    return subject(Forecast(), series, F.mse_loss, 16)


SHELF.control("series relative to its first step", forecast)


@fault(
    "series relative to its mean",
    forecast,
    ("", "rnn"),
    (*SAID, "mean"),
    why="The mean over the window holds the steps that are to be forecast.",
)
def _(s: Subject) -> None:
    def level(self: Any, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    wire(s.model, level)


class Summarised(nn.Module):
    """A GRU whose states are joined with the largest so far of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = tokens(16), nn.GRU(16, 24, batch_first=True)
        self.join = nn.Linear(48, 18)

    def summary(self, states: Tensor) -> Tensor:
        return states.cummax(1).values

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(ids))
        return self.join(torch.cat([states, self.summary(states)], -1))


def summarised() -> Subject:
    return subject(Summarised(), next_words, language_loss, 12)


SHELF.control("states joined with their running maximum", summarised)


@fault(
    "states joined with their maximum over time",
    summarised,
    ("", "join", "rnn"),
    (*SAID, "max"),
    why="The summary of a whole text is given to its first word.",
)
def _(s: Subject) -> None:
    def summary(self: Any, states: Tensor) -> Tensor:
        return states.amax(1, keepdim=True).expand_as(states)

    wire(s.model, summary)


class TokenShift(nn.Module):
    """Each place is mixed with the one before it, as in RWKV."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.rate = tokens(width), nn.Parameter(torch.full((width,), 0.5))
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.key, self.value = nn.Linear(width, 48), nn.Linear(48, width)
        self.head = nn.Linear(width, 18)

    def shifted(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, :-1]

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.rnn(self.embed(ids))
        mixed = torch.lerp(self.shifted(x), x, self.rate)
        return self.head(x + self.value(F.relu(self.key(mixed)).square()))


def token_shift() -> Subject:
    return subject(TokenShift(), next_words, language_loss, 12)


SHELF.control("each place mixed with the one before", token_shift)


@fault(
    "each place mixed with the one behind",
    token_shift,
    ("", "key"),
    (*SAID, "shift", "next"),
    why="The state of the next place has read the word that is to be predicted.",
)
def _(s: Subject) -> None:
    def shifted(self: Any, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 1))[:, 1:]

    wire(s.model, shifted)


@fault(
    "places rolled round, so that the last comes first",
    token_shift,
    ("", "key"),
    (*SAID, "roll"),
    why="The first place is mixed with the last, whose state has read the whole text.",
)
def _(s: Subject) -> None:
    def shifted(self: Any, x: Tensor) -> Tensor:
        return x.roll(1, 1)

    wire(s.model, shifted)


class LongConv(nn.Module):
    """A learnt filter as long as the text, by Fourier transforms of twice its length (Hyena)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.filter = tokens(width), normal(width, 32, std=0.3)
        self.gate, self.out, self.room = nn.Linear(width, width), nn.Linear(width, 18), 2

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n = x.shape[1]
        size = self.room * n
        wave = torch.fft.rfft(x.transpose(1, 2), size) * torch.fft.rfft(self.filter[:, :n], size)
        y = torch.fft.irfft(wave, size)[..., :n].transpose(1, 2)
        return self.out(y * self.gate(x).sigmoid())


def long_conv() -> Subject:
    return subject(LongConv(), next_words, language_loss, 12)


SHELF.control("long filter by Fourier transforms with room behind", long_conv)


@fault(
    "long filter by Fourier transforms without room behind",
    long_conv,
    ("", "out"),
    (*SAID, "circular", "wrap"),
    why="The convolution is circular: what is at the end comes back at the start.",
)
def _(s: Subject) -> None:
    s.model.room = 1


class Hourglass(nn.Module):
    """Pairs of words are merged, read by a GRU, and dealt out again one pair late."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = PlacedTokens(width)
        self.short, self.out = nn.GRU(width, width, batch_first=True), nn.Linear(width, 18)

    def late(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, :-1]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        merged = self.late(x).unflatten(1, (-1, 2)).mean(2)
        return self.out(x + self.short(merged)[0].repeat_interleave(2, 1))


def even_words(n: int) -> tuple[Tensor, Tensor]:
    ids, _ = words(n)
    return ids[:, :20], ids[:, 1:21]


def hourglass() -> Subject:
    return subject(Hourglass(), even_words, language_loss, 12)


SHELF.control("hourglass that moves words back before it merges them", hourglass)


@fault(
    "hourglass that merges each word with the next",
    hourglass,
    ("", "short"),
    SAID,
    why="The first word of a pair gets the mean of both, and so the one that follows it.",
)
def _(s: Subject) -> None:
    def late(self: Any, x: Tensor) -> Tensor:
        return x

    wire(s.model, late)


class Translator(nn.Module):
    """Source and target in, the target moved back by a first word."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.shared = PlacedTokens(width)
        self.encoder, self.decoder = PreNorm(width), PreNorm(width, causal=True)
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)
        self.generate = nn.Linear(width, 18)

    def teacher(self, labels: Tensor) -> Tensor:
        return F.pad(labels, (1, 0))[:, :-1]

    def forward(self, source: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.encoder(self.shared(source)), self.shared(self.teacher(labels))
        x = self.decoder(x)
        x = x + self.cross(x, memory, memory)[0]
        return self.generate(x)


def translations(n: int) -> tuple[dict[str, Tensor], Tensor]:
    ids, _ = words(n)
    return {"source": ids[:, :16], "labels": ids[:, 16:]}, ids[:, 16:]


def translator() -> Subject:
    return subject(Translator(), translations, language_loss, 12)


SHELF.control("labels moved back for the decoder", translator)


@fault(
    "decoder given its labels as they are",
    translator,
    ("", "decoder*", "shared*"),
    (*SAID, "shift", "target", "label"),
    why="The decoder reads the very word that it is to say, and learns to copy it.",
)
def _(s: Subject) -> None:
    def teacher(self: Any, labels: Tensor) -> Tensor:
        return labels

    wire(s.model, teacher)


# ---- healthy: models that may look ahead, or only seem to ----------------------------------------


def hidden_words(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return ids of which some are hidden, and those as labels."""
    ids, _ = words(n)
    hidden = torch.rand(ids.shape) < 0.2
    return {"input_ids": ids.masked_fill(hidden, 0)}, ids.masked_fill(~hidden, -100)


@lookalike("masked words told from both sides", hidden_words, ignoring)
class Cloze(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.block = PlacedTokens(width), PreNorm(width)
        self.out = nn.Linear(width, 18)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(self.block(self.embed(input_ids)))


def spans(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return texts without a span, the span behind a first word, and the span."""
    ids, _ = words(n)
    span = ids[:, 10:16]
    return (torch.cat([ids[:, :10], ids[:, 16:]], 1), F.pad(span, (1, 0))[:, :-1]), span


@lookalike("span told from what stands on both sides of it", spans, language_loss)
class Span(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.encoder = PlacedTokens(width), PreNorm(width)
        layer = nn.TransformerDecoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.decoder, self.out = nn.TransformerDecoder(layer, 1), nn.Linear(width, 18)

    def forward(self, text: Tensor, span: Tensor) -> Tensor:
        n = span.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = self.decoder(self.embed(span), self.encoder(self.embed(text)), tgt_mask=mask)
        return self.out(x)


def questions(n: int) -> tuple[Tensor, Tensor]:
    """Return ids, and those that follow from the ninth on; the question has no labels."""
    ids, later = next_words(n)
    later = later.clone()
    later[:, :8] = -100
    return ids, later


@lookalike("prefix language model: the question is read both ways", questions, ignoring)
class Prefix(nn.Module):
    def __init__(self, width: int = 32, prefix: int = 8) -> None:
        super().__init__()
        self.embed, self.norm = PlacedTokens(width), nn.LayerNorm(width)
        self.qkv, self.out, self.prefix = nn.Linear(width, 3 * width), nn.Linear(width, 18), prefix

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        seen[:, : self.prefix] = True
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(x + attend(q, k, v, attn_mask=seen))


@lookalike("sequence autoencoder: the target is the input", lambda n: (
    series(n)[0], series(n)[0]), F.mse_loss)  # fmt: skip
class SequenceAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.GRU(1, 16, batch_first=True, bidirectional=True)
        self.dec, self.out = nn.GRU(32, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.enc(x)
        code = last.transpose(0, 1).flatten(1)
        return self.out(self.dec(code[:, None].expand(-1, x.shape[1], -1))[0])


@lookalike("autoencoder of rows", itself, F.mse_loss)
def autoencoder() -> nn.Module:
    return perceptron(64, 32, 8, 32, 64)


def same_series(n: int) -> tuple[Tensor, Tensor]:
    x, _ = series(n)
    return x + 0.3 * torch.randn_like(x), x


@lookalike("series cleaned of noise by centred kernels", same_series, F.mse_loss)
class Cleaner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 16, 5, padding=2), nn.Conv1d(16, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)


@lookalike("tags from both sides", lambda n: (words(n)[0], torch.randint(0, 5, (n, 32))),
           lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))  # fmt: skip
class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = tokens(16)
        self.rnn = nn.LSTM(16, 16, 1, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tag(self.rnn(self.embed(ids))[0])


def earlier_words(n: int) -> tuple[Tensor, Tensor]:
    ids, _ = words(n)
    return ids[:, 1:], ids[:, :-1]


@lookalike("language model from right to left: the target is the word before", earlier_words,
           language_loss)  # fmt: skip
class RightToLeft(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.out = PlacedTokens(width), nn.Linear(width, 18)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.embed(ids)
        seen = torch.ones(n, n, dtype=torch.bool).triu()
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(x + attend(q, k, v, attn_mask=seen))


@lookalike("decoder over eight texts of eight words", lambda n: (
    next_words(n)[0][:, :8], next_words(n)[1][:, :8]), language_loss, 8)  # fmt: skip
class Eight(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.block = PlacedTokens(width, 8), PreNorm(width, causal=True)
        self.out = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.block(self.embed(ids)))


def two_ahead(n: int) -> tuple[Tensor, Tensor]:
    ids, _ = words(n)
    return ids[:, :-2], torch.stack([ids[:, 1:-1], ids[:, 2:]], -1)


@lookalike("next word and the one after it, a head each", two_ahead, language_loss)
class TwoAhead(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.rope = tokens(width), Rotary(8)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.RMSNorm(width)
        self.heads = nn.ModuleList(nn.Linear(width, 18) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + attend(self.rope(q), self.rope(k), v, is_causal=True)
        return torch.stack([head(x) for head in self.heads], 2)


def horizon(n: int) -> tuple[Tensor, Tensor]:
    x, later = series(n)
    return x[:, :18], later[:, 17:, 0]


@lookalike("whole window read both ways, for the steps behind it", horizon, F.mse_loss)
class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mix = nn.Linear(1, 16), PreNorm(16)
        self.out = nn.Linear(18 * 16, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.lift(x - x.mean(1, keepdim=True))).flatten(1))


def known_ahead(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a series with the calendar, which is known also for what is to come."""
    x, later = series(n)
    calendar = torch.sin(torch.arange(24) / 3.5)[:, None].expand(n, -1, 1)
    return {"past": x, "calendar": calendar + 0.1 * torch.rand(n, 1, 1)}, later


@lookalike("calendar of days to come read both ways, the past only backwards", known_ahead,
           F.mse_loss)  # fmt: skip
class Calendar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.GRU(1, 16, batch_first=True)
        self.known = nn.GRU(1, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 1)

    def forward(self, past: Tensor, calendar: Tensor) -> Tensor:
        return self.out(torch.cat([self.seen(past)[0], self.known(calendar)[0]], -1))


def left_words(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return ids padded in front with their mask, and the ids that follow."""
    ids, lengths, _ = ragged(n)
    mask = torch.arange(16) >= 16 - lengths[:, None]
    ids = torch.where(mask, words(n)[0][:, :16], 0)
    return {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1].long()}, ids[
        :, 1:
    ].masked_fill(~mask[:, :-1], -100)


@lookalike("decoder padded in front, padding and future hidden", left_words, ignoring)
class LeftPadded(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = tokens(width), nn.Embedding(16, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 18)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        n = input_ids.shape[1]
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)
        x = self.wte(input_ids) + self.wpe(places)
        seen = torch.ones(n, n, dtype=torch.bool).tril() & attention_mask.bool()[:, None]
        seen = seen | torch.eye(n, dtype=torch.bool)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(x + attend(q, k, v, attn_mask=seen[:, None]))


@lookalike("two documents in one row, neither seen from the other", next_words, language_loss)
class Packed(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.out = PlacedTokens(width), nn.Linear(width, 18)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        n, x = ids.shape[1], self.embed(ids)
        document = (torch.arange(n) >= n // 2).long()
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1) | (document[:, None] != document)
        return self.out(x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0])


@lookalike("decoder behind an encoder that reads all of the upper half", halves, language_loss)
class HalfToHalf(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.encoder = tokens(width), nn.GRU(width, width, batch_first=True)
        self.decoder, self.out = nn.GRU(width, width, batch_first=True), nn.Linear(width, 18)

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        _, state = self.encoder(self.embed(source))
        return self.out(self.decoder(self.embed(ids), state)[0])


@lookalike("window of four words, with a penalty for distance", next_words, language_loss)
class Sliding(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.qkv = tokens(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        n, x = ids.shape[1], self.embed(ids)
        back = torch.arange(n)[:, None] - torch.arange(n)
        bias = torch.where((back >= 0) & (back < 4), -0.5 * back.float(), -math.inf)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(x + attend(q, k, v, attn_mask=bias))


@lookalike("finite but sufficient mask in half precision", next_words, language_loss)
class Finite(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.qkv = PlacedTokens(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.full((ids.shape[1],) * 2, torch.finfo(torch.float16).min).triu(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(x + attend(q, k, v, attn_mask=mask))


@lookalike("rows of a digit told one by one, patches of the row seen at once", lambda n: (
    rows(n)[0][:, :-1], rows(n)[0][:, 1:]), F.mse_loss)  # fmt: skip
class NextRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.rnn = nn.Linear(8, 24), nn.GRU(24, 24, batch_first=True)
        self.out = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.lift(F.normalize(x, dim=-1)))[0])


for name in ("gpt2", "mamba", "rwkv", "xlnet", "recurrent gemma", "bart"):
    SHELF.control(f"{name}, as it comes", from_transformers(name))


def labelled_llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 32}
    config = LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2)
    return subject(LlamaForCausalLM(config), with_labels, None, 8)


SHELF.control("llama with labels, which it shifts", labelled_llama)


@fault(
    "llama that attends to all, for embeddings, trained to tell the next word",
    labelled_llama,
    ("model.layers.0", "model.layers.0.self_attn*"),
    (*SAID, "mask"),
    why="A decoder made an encoder keeps its loss on the next word, which it now sees.",
)
def _(s: Subject) -> None:
    def forward(self: Any, input_ids: Tensor, attention_mask: Any = None, **options: Any) -> Any:
        n, steps = input_ids.shape
        seen = torch.zeros(n, 1, steps, steps)
        return type(self).forward(self, input_ids=input_ids, attention_mask=seen, **options)

    wire(s.model.model, forward)
