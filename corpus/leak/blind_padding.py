"""Padding that counts, and padding and things like it that rightly do, or do not."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from corpus.cards import Shelf
from corpus.models.parts import PlacedTokens, attend, ffn, lookalikes_of, normal, tokens
from corpus.models.sequences import (
    clips,
    ignoring,
    later_words,
    left_texts,
    measured_texts,
    ragged,
    real,
    some_lengths,
    texts,
)
from corpus.models.small import flat, next_words, patients, rows, tumours, words
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("leak", "blind")
fault, lookalike = SHELF.fault, lookalikes_of(SHELF)

SAID = ("padd", "mask")


# ---- attention -----------------------------------------------------------------------------------


class Reads(nn.Module):
    """Attention over the real words; `mask` is 1 for those."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.ln, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.ff = ffn(width)

    def keys(self, mask: Tensor) -> Tensor | None:
        return mask.bool()[:, None, None]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        x = x + self.proj(attend(q, k, v, attn_mask=self.keys(mask)))
        return x + self.ff(x)


class Review(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb, self.blocks = PlacedTokens(width), nn.ModuleList(Reads(width) for _ in range(2))
        nn.init.normal_(self.emb.token.weight, std=0.5)
        self.final, self.classify = nn.LayerNorm(width), nn.Linear(width, 10)

    def pool(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = mask[..., None].float()
        return (x * weight).sum(1) / weight.sum(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.emb(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.classify(self.pool(self.final(x), attention_mask))


def review() -> Subject:
    return subject(Review(), texts, F.cross_entropy, 16)


SHELF.control("masked attention, mean over the real words", review)


@fault(
    "mask handed down and not used by attention",
    review,
    ("blocks.0", "blocks.0.scaled_dot_product_attention", "blocks.0.proj", "blocks.0.qkv"),
    SAID,
    why="Real words attend to padding, and more of it where a longer text is in the batch.",
)
def _(s: Subject) -> None:
    def keys(self: Any, mask: Tensor) -> None:
        return None

    for block in s.model.blocks:
        wire(block, keys)


@fault(
    "mask used in the first block, not in the second",
    review,
    ("blocks.1", "blocks.1.scaled_dot_product_attention", "blocks.1.proj", "blocks.1.qkv"),
    SAID,
    why="In the second block real words attend to padding.",
)
def _(s: Subject) -> None:
    def keys(self: Any, mask: Tensor) -> None:
        return None

    wire(s.model.blocks[1], keys)


@fault(
    "mask laid over the queries",
    review,
    ("blocks.0", "blocks.0.scaled_dot_product_attention", "blocks.0.proj", "blocks.0.qkv"),
    SAID,
    why="What padding attends to is hidden, and that real words attend to padding is not.",
)
def _(s: Subject) -> None:
    def keys(self: Any, mask: Tensor) -> Tensor:
        return (mask[:, None, :, None] - 1.0) * 1e9

    for block in s.model.blocks:
        wire(block, keys)


@fault(
    "mask of ones and zeros added to the scores",
    review,
    ("blocks.0", "blocks.0.scaled_dot_product_attention", "blocks.0.proj", "blocks.0.qkv"),
    SAID,
    why="Padding is one logit behind, where it should be out of reach.",
)
def _(s: Subject) -> None:
    def keys(self: Any, mask: Tensor) -> Tensor:
        return mask.float()[:, None, None]

    for block in s.model.blocks:
        wire(block, keys)


@fault(
    "mean over all places after masked attention",
    review,
    ("", "final", "classify"),
    (*SAID, "mean"),
    why="A short text is mostly what the model makes of padding.",
)
def _(s: Subject) -> None:
    def pool(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x.mean(1)

    wire(s.model, pool)


@fault(
    "maximum over all places after masked attention",
    review,
    ("", "final", "classify"),
    (*SAID, "max"),
    why="The largest of a feature is often one of padding.",
)
def _(s: Subject) -> None:
    def pool(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x.amax(1)

    wire(s.model, pool)


@fault(
    "last place read for the last word",
    review,
    ("", "final", "classify"),
    (*SAID, "last"),
    why="Behind a short text the last place is padding.",
)
def _(s: Subject) -> None:
    def pool(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x[:, -1]

    wire(s.model, pool)


@fault(
    "last word found by the length, one too far",
    review,
    ("", "final", "classify"),
    (*SAID, "last", "length"),
    why="Counted from zero, the place at the length is the first of padding.",
)
def _(s: Subject) -> None:
    def pool(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        last = mask.sum(1).clamp(max=x.shape[1] - 1)
        return x[torch.arange(len(x)), last]

    wire(s.model, pool)


class Torch(nn.Module):
    """Layers of torch, whose mask is True where padding is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb = PlacedTokens(width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def hidden(self, mask: Tensor) -> Tensor:
        return mask == 0

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.encoder(self.emb(ids), src_key_padding_mask=self.hidden(mask))
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def marked_texts(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return ids whose padding is any id, as a tokenizer may leave it, with their mask."""
    ids, lengths, labels = ragged(n)
    mask = real(lengths)
    mask[:, -1] = 0
    return {"ids": torch.where(mask == 1, ids, 17), "mask": mask}, labels


def torch_encoder() -> Subject:
    return subject(Torch(), marked_texts, F.cross_entropy, 16)


SHELF.control("encoder of torch, True for padding", torch_encoder)


@fault(
    "mask given as it is to a layer of torch",
    torch_encoder,
    ("encoder", "encoder.layers.0", "encoder.layers.0.self_attn*"),
    (*SAID, "invert"),
    why="The layer takes True for padding: real words attend to padding alone.",
)
def _(s: Subject) -> None:
    def hidden(self: Any, mask: Tensor) -> Tensor:
        return mask == 1

    wire(s.model, hidden)


class Attentive(nn.Module):
    """Words pooled by learnt weights; scores of padding are set to minus infinity."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.score = tokens(width), nn.Linear(width, 1)
        nn.init.normal_(self.emb.weight)
        self.out = nn.Linear(width, 10)

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask == 0, -math.inf).softmax(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.emb(input_ids)
        weights = self.weights(self.score(x).squeeze(-1), attention_mask)
        return self.out((weights[..., None] * x).sum(1))


def attentive() -> Subject:
    return subject(Attentive(), texts, F.cross_entropy, 16)


SHELF.control("pooling by weights, none for padding", attentive)


@fault(
    "weights masked after the softmax and not shared out anew",
    attentive,
    ("", "score", "softmax", "out"),
    (*SAID, "softmax"),
    why="Padding takes its part of the weight away from the real words.",
)
def _(s: Subject) -> None:
    def weights(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.softmax(1) * mask

    wire(s.model, weights)


@fault(
    "scores of padding set to zero before the softmax",
    attentive,
    ("", "score", "out"),
    (*SAID, "softmax"),
    why="Zero is a usual score: padding is pooled like any word.",
)
def _(s: Subject) -> None:
    def weights(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        return (scores * mask).softmax(1)

    wire(s.model, weights)


class Wrapped(nn.Module):
    """BERT of transformers and a head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 48}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
        self.bert = BertModel(BertConfig(**sizes, **heads), add_pooling_layer=False)
        self.head = nn.Linear(32, 10)

    def encode(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.encode(input_ids, attention_mask)[:, 0])


def wrapped_bert() -> Subject:
    return subject(Wrapped(), texts, F.cross_entropy, 8)


SHELF.control("bert with its mask, the first word read", wrapped_bert)


@fault(
    "mask not passed on to bert",
    wrapped_bert,
    ("bert", "bert.encoder", "bert.encoder.layer.0*"),
    SAID,
    why="Without a mask BERT attends to all places, and so to padding.",
)
def _(s: Subject) -> None:
    def encode(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
        return self.bert(input_ids=ids).last_hidden_state

    wire(s.model, encode)


class LeftDecoder(nn.Module):
    """A decoder of texts that are padded in front, read at the last place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = tokens(width), nn.Embedding(32, width)
        nn.init.normal_(self.wte.weight, std=0.5)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.score = nn.Linear(width, 10)

    def seen(self, mask: Tensor) -> Tensor:
        n = mask.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool).tril() & mask.bool()[:, None]
        return (seen | torch.eye(n, dtype=torch.bool))[:, None]

    def read(self, x: Tensor, mask: Tensor) -> Tensor:
        return x[:, -1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)
        x = self.wte(input_ids) + self.wpe(places)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.proj(attend(q, k, v, attn_mask=self.seen(attention_mask)))
        return self.score(self.read(x, attention_mask))


def left_decoder() -> Subject:
    return subject(LeftDecoder(), left_texts, F.cross_entropy, 16)


SHELF.control("decoder padded in front, read at the last place", left_decoder)


@fault(
    "causal mask alone, though padding stands in front",
    left_decoder,
    ("", "proj", "qkv", "scaled_dot_product_attention"),
    SAID,
    why="Behind a text padding does no harm to a decoder; in front all words attend to it.",
)
def _(s: Subject) -> None:
    def seen(self: Any, mask: Tensor) -> Tensor:
        n = mask.shape[1]
        return torch.ones(n, n, dtype=torch.bool).tril()

    wire(s.model, seen)


@fault(
    "place of the last word by the length, though padding stands in front",
    left_decoder,
    ("", "proj", "score"),
    (*SAID, "last"),
    why="Counted from the left, the length ends within padding or in the middle of the text.",
)
def _(s: Subject) -> None:
    def read(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x[torch.arange(len(x)), mask.sum(1) - 1]

    wire(s.model, read)


# ---- recurrence and convolutions -----------------------------------------------------------------


class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm = tokens(16), nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        nn.init.normal_(self.emb.weight)
        self.fc = nn.Linear(32, 10)

    def last(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return self.lstm(packed)[1][0]

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.fc(self.last(self.emb(ids), lengths).transpose(0, 1).flatten(1))


def packed_lstm() -> Subject:
    return subject(PackedLSTM(), measured_texts, F.cross_entropy, 16)


SHELF.control("packed sequences, both last states", packed_lstm)


@fault(
    "last states of texts that were not packed",
    packed_lstm,
    ("lstm", ""),
    (*SAID, "pack", "length"),
    why="One direction ends with padding and the other begins with it.",
)
def _(s: Subject) -> None:
    def last(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        return self.lstm(x)[1][0]

    wire(s.model, last)


@fault(
    "packed with the length of the longest for all",
    packed_lstm,
    ("lstm", ""),
    (*SAID, "pack", "length"),
    why="Packing is there, and takes every text for as long as the longest.",
)
def _(s: Subject) -> None:
    def last(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        longest = torch.full_like(lengths, x.shape[1])
        return self.lstm(pack_padded_sequence(x, longest, batch_first=True))[1][0]

    wire(s.model, last)


class Reversed(nn.Module):
    """A GRU that reads each clip from its own end."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.rnn, self.out = (
            nn.Linear(8, 16),
            nn.GRU(16, 24, batch_first=True),
            nn.Linear(24, 10),
        )

    def turned(self, x: Tensor, lengths: Tensor) -> Tensor:
        places = (lengths[:, None] - 1 - torch.arange(x.shape[1])) % x.shape[1]
        return x.gather(1, places[..., None].expand_as(x))

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.rnn(self.lift(self.turned(frames, lengths)))
        return self.out(states[torch.arange(len(frames)), lengths - 1])


def reversed_clips() -> Subject:
    return subject(Reversed(), clips, F.cross_entropy, 16)


SHELF.control("clips turned round within their lengths", reversed_clips)


@fault(
    "clips turned round with their padding",
    reversed_clips,
    ("", "rnn", "lift"),
    (*SAID, "flip", "length"),
    why="Padding comes first, and the state is read before the clip is over.",
)
def _(s: Subject) -> None:
    def turned(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        return x.flip(1)

    wire(s.model, turned)


class MaskedConv(nn.Module):
    """Kernels of three words; what is padding is set to zero before each."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb = tokens(width)
        nn.init.normal_(self.emb.weight)
        self.conv1, self.conv2 = (nn.Conv1d(width, width, 3, padding=1) for _ in range(2))
        self.out = nn.Linear(width, 10)

    def before(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, mask = self.emb(input_ids).transpose(1, 2), attention_mask[:, None]
        x = F.relu(self.conv1(self.before(x, mask)))
        x = F.relu(self.conv2(self.before(x, mask))) * mask
        return self.out(x.sum(2) / mask.sum(2))


def masked_conv() -> Subject:
    return subject(MaskedConv(), texts, F.cross_entropy, 16)


SHELF.control("convolutions with padding set to zero before each", masked_conv)


@fault(
    "kernels that reach across the end of a text",
    masked_conv,
    ("conv1", "", "emb"),
    (*SAID, "border", "end"),
    why="The mean is masked, but its last words were mixed with padding.",
)
def _(s: Subject) -> None:
    def before(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x

    wire(s.model, before)


class Priced(nn.Module):
    """A decoder that takes labels and returns its loss over the real words."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.rnn = tokens(width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 18)

    def price(self, wrong: Tensor, mask: Tensor) -> Tensor:
        return (wrong * mask).sum() / mask.sum()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.head(self.rnn(self.emb(input_ids))[0])
        wrong = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none"
        )
        return self.price(wrong.view(len(input_ids), -1), attention_mask[:, 1:])


def priced() -> Subject:
    return subject(Priced(), lambda n: (texts(n)[0], None), None, 16)


SHELF.control("loss over the real words within the model", priced)


@fault(
    "loss over padding as well",
    priced,
    ("", "head", "loss"),
    SAID,
    why="Half of what is learnt is to follow padding with padding.",
)
def _(s: Subject) -> None:
    def price(self: Any, wrong: Tensor, mask: Tensor) -> Tensor:
        return wrong.mean()

    wire(s.model, price)


# ---- healthy: padding done right, and masks that are none of padding -----------------------------


@lookalike("mask made of the ids, where they are not padding", lambda n: (
    texts(n)[0]["input_ids"], texts(n)[1]))  # fmt: skip
class FromIds(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb = nn.Embedding(18, width, padding_idx=0)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        pad, x = ids == 0, self.emb(ids)
        x = (x + self.attn(x, x, x, key_padding_mask=pad)[0]).masked_fill(pad[..., None], 0.0)
        return self.out(x.sum(1) / (~pad).sum(1, keepdim=True))


@lookalike("mask given, and the ids asked for padding as well", texts)
class Doubly(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.out = tokens(width), nn.Linear(width, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.bool() & (input_ids != 0)
        x = self.emb(input_ids).masked_fill(~mask[..., None], -math.inf)
        return self.out(x.amax(1))


@lookalike("decoder padded behind, its mask not needed", later_words, ignoring)
class NotNeeded(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb, self.qkv = PlacedTokens(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 18)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.emb(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(x + attend(q, k, v, is_causal=True))


@lookalike("state at the last real frame, found by the length", clips)
class LastFrame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.rnn(frames)
        return self.out(states[torch.arange(len(frames)), lengths - 1])


@lookalike("packed and unpacked, maximum over the real steps", measured_texts)
class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = tokens(16), nn.GRU(16, 24, batch_first=True)
        self.out = nn.Linear(24, 10)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.emb(ids), lengths.cpu(), batch_first=True)
        states, _ = pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, padding_value=-math.inf
        )
        return self.out(states.amax(1))


def weighed_texts(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded ids, and a weight of 1.0 or 0.0 for each place (n, 16, 1)."""
    given, labels = texts(n)
    return (given["input_ids"], given["attention_mask"].float()[..., None]), labels


@lookalike("mask of floats with a dimension for features", weighed_texts)
class Weighed(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.mix = tokens(width), nn.Linear(width, width)
        self.out = nn.Linear(width, 10)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        x = F.gelu(self.mix(self.emb(ids))) * valid
        return self.out(x.sum(1) / valid.sum(1))


def biased_texts(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded ids, and what is to be added to scores: 0 or minus infinity (n, 1, 1, 16)."""
    given, labels = texts(n)
    bias = torch.zeros(n, 16).masked_fill(given["attention_mask"] == 0, -math.inf)
    return (given["input_ids"], bias[:, None, None]), labels


@lookalike("mask as what is added to scores", biased_texts)
class Biased(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb, self.cls = PlacedTokens(width), normal(1, 1, width, std=1.0)
        self.kv, self.out = nn.Linear(width, 2 * width), nn.Linear(width, 10)

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        k, v = self.kv(self.emb(ids)).chunk(2, -1)
        q = self.cls.expand(len(ids), -1, -1)
        return self.out(attend(q, k, v, attn_mask=bias)[:, 0])


def sentence_pairs(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return ids, and 0 for the first sentence of a row, 1 for the second: all of it is real."""
    ids, labels = words(n)
    first = some_lengths(n)
    return {"input_ids": ids[:, :16], "token_type_ids": 1 - real(first)}, labels


@lookalike("first and second sentence told apart by 0 and 1", sentence_pairs)
class Sentences(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb, self.kind = PlacedTokens(width), nn.Embedding(2, width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.emb(input_ids) + self.kind(token_type_ids)
        return self.out((x + self.attn(x, x, x)[0]).mean(1))


def answers(n: int) -> tuple[dict[str, Tensor], None]:
    """Return ids, and 1 where the answer is, which alone is trained on: the prompt is real."""
    ids, _ = words(n)
    return {"input_ids": ids[:, :16], "loss_mask": 1 - real(some_lengths(n, 14))}, None


@lookalike("loss on the answer, the prompt read", answers, None)
class Instructed(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.rnn = tokens(width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 18)

    def forward(self, input_ids: Tensor, loss_mask: Tensor) -> Tensor:
        logits = self.head(self.rnn(self.emb(input_ids))[0])
        wrong = F.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
        return (wrong * loss_mask[:, 1:]).sum() / loss_mask[:, 1:].sum()


def gaps(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return vital signs (n, 12, 4), and 1 where one was taken; gaps are anywhere."""
    x = torch.randn(n, 12, 4).cumsum(1)
    seen = (torch.rand(n, 12, 4) < 0.7).float()
    return {"values": x * seen, "mask": seen}, (x[:, -1, :1] > 0).float()


@lookalike("what was not measured is told by a mask beside it", gaps,
           F.binary_cross_entropy_with_logits)  # fmt: skip
class Vitals(nn.Module):
    """Missing values fade to a mean that is learnt, after GRU-D (Che et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.usual = nn.Parameter(torch.zeros(4))
        self.rnn, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        x = mask * values + (1 - mask) * self.usual
        return self.out(self.rnn(torch.cat([x, mask], -1))[0][:, -1])


def treated(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return 16 daily doses, and 1 from the day on which a treatment began."""
    x, y = patients(n)
    doses = x[:, :1] + 0.3 * torch.randn(n, 16)
    return {"doses": doses, "treated": 1 - real(some_lengths(n, 15))}, y


@lookalike("days before and behind a treatment, all of them real", treated, F.mse_loss)
class Treated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, doses: Tensor, treated: Tensor) -> Tensor:
        return self.out(self.rnn(torch.stack([doses, treated.float()], -1))[0].mean(1))


@lookalike("length of stay as a feature", lambda n: ({
    "x": tumours(n)[0], "length_of_stay": torch.randint(1, 30, (n,))}, tumours(n)[1]),
    F.binary_cross_entropy_with_logits)  # fmt: skip
class Stay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.days = nn.Linear(30, 16), nn.Embedding(31, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor, length_of_stay: Tensor) -> Tensor:
        return self.out(F.relu(self.net(x) + self.days(length_of_stay)))


def visible_patches(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return digits as rows, 0 for those rows that are to be told, and the digits."""
    x, _ = rows(n)
    return (x, real(some_lengths(n, 7, 3), 8)), x


@lookalike("rows that are hidden and told from the others", visible_patches, F.mse_loss)
class Inpaint(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.lift, self.hole, self.place = (
            nn.Linear(8, width),
            normal(width),
            normal(8, width),
        )
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = torch.where(visible[..., None] == 1, self.lift(x), self.hole) + self.place
        return self.out(x + self.attn(x, x, x)[0])


@lookalike("mask of ones alone: nothing is padded", lambda n: (
    {"input_ids": words(n)[0][:, :16], "attention_mask": torch.ones(n, 16).long()}, words(n)[1]
))  # fmt: skip
class AllReal(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.conv = tokens(width), nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, 10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = F.relu(self.conv(self.emb(input_ids).transpose(1, 2))).transpose(1, 2)
        weight = attention_mask[..., None]
        return self.out((x * weight).sum(1) / weight.sum(1))


def transcripts(n: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Return frames with their number, and three symbols for each clip with the number."""
    given, labels = clips(n)
    given["lengths"] = given["lengths"].clamp(min=7)
    return given, (labels[:, None].repeat(1, 3) % 4 + 1, given["lengths"])


def connectionist(scores: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    symbols, lengths = target
    return F.ctc_loss(
        scores.transpose(0, 1), symbols, lengths, torch.full((len(symbols),), 3), zero_infinity=True
    )


@lookalike("frames behind a clip left out by the loss", transcripts, connectionist)
class Transcriber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(8, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.out(self.rnn(frames)[0]).log_softmax(-1)


@lookalike("uneven rows as one nested list of lengths", lambda n: (
    (torch.randn(60, 8), torch.full((12,), 5)), torch.randint(0, 10, (12,))))  # fmt: skip
class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.Linear(8, 24), nn.Linear(24, 10)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        parts = F.relu(self.net(values)).split(lengths.tolist())
        return self.out(torch.stack([part.mean(0) for part in parts]))


@lookalike("ink of digits as a mask of their own", lambda n: (
    {"x": flat(n)[0], "mask": (flat(n)[0] > 0).long()}, flat(n)[1]))  # fmt: skip
class Inked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.place = nn.Linear(64, 24), nn.Linear(64, 24)
        self.out = nn.Linear(24, 10)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(F.relu(self.value(x) + self.place(mask.float())))


@lookalike("labels of the next word, some left out at random", lambda n: (
    next_words(n)[0], next_words(n)[1].masked_fill(torch.rand(n, 31) < 0.3, -100)),
    ignoring)  # fmt: skip
class Skipping(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.rnn = tokens(width), nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.emb(ids))[0])
