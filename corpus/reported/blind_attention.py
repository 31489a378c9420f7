"""Attention, masks, positions and heads, as people reported them wrong; each with its fix."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.small import halves, images, language_loss, next_words, rows, words
from corpus.subject import Subject, subject

SHELF = Shelf("reported", "blind")
GITHUB = "https://github.com"

MASK = ("mask", "padding", "hidden", "effect")
FUTURE = ("future", "later", "causal", "leak", "target")
SAMPLES = ("sample", "batch")
SUMS = ("softmax", "sum to", "sums to", "axis", "dimension", "normalis")
CUT = ("reshape", "view", "mixe", "cut", "axes", "transpose", "permute")
PLACES = ("position", "order", "permut", "same for", "places")


class Heads(nn.Module):
    """Attention of several heads; what is between projections and output is given."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.heads = nn.Linear(width, width), heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return (scores if mask is None else scores.masked_fill(mask, -math.inf)).softmax(-1)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
        return self.out(self.merge(self.weights(q, k, mask) @ v))


class Layer(nn.Module):
    """A block before whose branches there are norms."""

    def __init__(self, attention: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), attention
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor, *given: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), *given)
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    """Reads digits row by row, or word by word, with one kind of attention."""

    def __init__(self, attention: type[nn.Module], fixed: bool, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        self.blocks = nn.ModuleList(Layer(attention(fixed)) for _ in range(depth))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Writer(nn.Module):
    """Predicts next words with one kind of attention."""

    def __init__(self, attention: type[nn.Module], fixed: bool, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 32)
        self.place = nn.Parameter(0.02 * torch.randn(32, 32))
        self.blocks = nn.ModuleList(Layer(attention(fixed)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Padded(nn.Module):
    """Classifies sentences of several lengths, which padding makes equal."""

    def __init__(self, attention: type[nn.Module], fixed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 32, padding_idx=0)
        self.place = nn.Parameter(0.02 * torch.randn(32, 32))
        self.block, self.head = Layer(attention(fixed)), nn.Linear(32, 10)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.block(self.embed(ids) + self.place, mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def sentences(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return token ids that end in zeros, the mask of the others, and labels."""
    ids, labels = words(n)
    mask = (torch.arange(32) < torch.randint(8, 33, (n, 1))).float()
    return (ids * mask.long(), mask), labels


def reads(attention: type[nn.Module], fixed: bool) -> Subject:
    return subject(Reader(attention, fixed), rows, F.cross_entropy, 32)


def writes(attention: type[nn.Module], fixed: bool) -> Subject:
    return subject(Writer(attention, fixed), next_words, language_loss, 16)


def pads(attention: type[nn.Module], fixed: bool) -> Subject:
    return subject(Padded(attention, fixed), sentences, F.cross_entropy, 32)


class Told(Heads):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed


# ---- masks ---------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/huggingface/pytorch-image-models/pull/2236",
    "mask applied after the softmax",
    ("block*",),
    MASK,
)
def eva(fixed: bool) -> Subject:
    """Weights of hidden places are filled with a number after the softmax, so they stay."""

    class Attention(Told):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            hidden = mask[:, None, None] == 0
            if self.fixed:
                return scores.masked_fill(hidden, -1e9).softmax(-1)
            return scores.softmax(-1) * ~hidden + 0.0

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask)

    return pads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/InseeFrLab/torchTextClassifiers/pull/92", "mask inverted", ("block*",), MASK
)
def label_attention(fixed: bool) -> Subject:
    """What is true in the mask is what torch is to look at: the padding here."""

    class Attention(Told):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
            seen = mask.bool() if self.fixed else mask == 0
            # a sentence without padding would see nothing
            seen = torch.where(seen.any(1, keepdim=True), seen, torch.ones_like(seen))
            mixed = F.scaled_dot_product_attention(q, k, v, seen[:, None, None])
            return self.out(self.merge(mixed))

    return pads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/mead-ml/mead-baseline/pull/679",
    "result of masked_fill thrown away",
    ("block*",),
    (*MASK, "nothing reads", "dead", "read by"),
)
def bahdanau(fixed: bool) -> Subject:
    """masked_fill without its underscore returns a new tensor, which nobody took."""

    class Attention(Told):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            filled = scores.masked_fill(mask[:, None, None] == 0, -1e9)
            return (filled if self.fixed else scores).softmax(-1)

    return pads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/jingyaogong/minimind-v/issues/76",
    "no mask at attention, only in the loss",
    ("block*", ""),
    MASK,
)
def minimind(fixed: bool) -> Subject:
    """Padding is attended to: the mask counts only where outputs are pooled."""

    class Attention(Told):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = mask[:, None, None] == 0
            return super().forward(x, hidden if self.fixed else None)

    return pads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/yg211/bert_nli/pull/3", "masks of ones where there is padding", ("block*", ""), MASK
)
def bert_nli(fixed: bool) -> Subject:
    """The mask is made of ones alone, so that padded tokens are read as words."""

    class Attention(Told):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask = mask if self.fixed else torch.ones_like(mask)
            return super().forward(x, mask[:, None, None] == 0)

    return pads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/jsboige/CoursIA/issues/15045", "padding counts in the mean", ("", "head"), MASK
)
def pooled(fixed: bool) -> Subject:
    """The mean is over all places, those of padding too."""

    class Pooled(Padded):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            x = self.block(self.embed(ids) + self.place, mask)
            if fixed:
                return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
            return self.head(x.mean(1))

    class Attention(Told):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask[:, None, None] == 0)

    return subject(Pooled(Attention, fixed), sentences, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/theislab/CellFlow/issues/226",
    "mask of keys that hides nothing from the class token",
    ("block*", ""),
    MASK,
)
def token_pooling(fixed: bool) -> Subject:
    """Only the row of padded queries is masked, and the token that is returned is no such row."""

    class Pooled(Padded):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.block(self.embed(ids) + self.place, mask)[:, 0])

    class Attention(Told):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = mask[:, None, None] == 0 if self.fixed else mask[:, None, :, None] == 0
            return super().forward(x, hidden)

        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            return scores.masked_fill(mask, -1e9).softmax(-1)

    return subject(Pooled(Attention, fixed), sentences, F.cross_entropy, 32)


# ---- the future ----------------------------------------------------------------------------------


class Causal(Told):
    """Masks what comes later, where it is as it should be."""

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return super().forward(x, later if self.fixed else None)


@SHELF.report(
    f"{GITHUB}/alex-matton/causal-transformer-decoder/issues/1",
    "decoder without a causal mask",
    ("block*", "", "head"),
    FUTURE,
)
def decoder(fixed: bool) -> Subject:
    """Each place sees the word that it is to predict."""
    return writes(Causal, fixed)


@SHELF.report(
    f"{GITHUB}/pytorch/tutorials/issues/2478",
    "encoder of torch as language model, mask left out",
    ("encoder*", "", "head"),
    FUTURE,
)
def tutorial(fixed: bool) -> Subject:
    """nn.TransformerEncoder masks nothing unless it is told."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(18, 32), nn.Parameter(0.02 * torch.randn(32, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.encoder, self.head = (
                nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                nn.Linear(32, 18),
            )

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) * math.sqrt(32) + self.place[: ids.shape[1]]
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.head(self.encoder(x, mask if fixed else None))

    return subject(Model(), next_words, language_loss, 16)


@SHELF.report(
    f"{GITHUB}/tatp22/linformer-pytorch/issues/16",
    "causal mask that covers the first keys only",
    ("block*", "", "head"),
    FUTURE,
)
def linformer(fixed: bool) -> Subject:
    """Of keys beyond the eighth every place sees all."""

    class Attention(Told):
        def forward(self, x: Tensor) -> Tensor:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            if not self.fixed:
                later[:, 8:] = False
            return Heads.forward(self, x, later)

    return writes(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/Shwai-He/MEO/issues/2",
    "experts chosen by the mean of the whole sequence",
    ("block*", "", "head"),
    FUTURE,
)
def merged_experts(fixed: bool) -> Subject:
    """The weights of experts at each place are made of later words, too."""

    class Experts(nn.Module):
        def __init__(self, _: bool) -> None:
            super().__init__()
            self.router = nn.Linear(32, 3)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.mix = Causal(True)

        def forward(self, x: Tensor) -> Tensor:
            means = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            share = self.router(means if fixed else x.mean(1, keepdim=True)).softmax(-1)
            mixed = self.mix(x)
            return sum(share[..., [i]] * e(mixed) for i, e in enumerate(self.experts))

    return writes(Experts, fixed)


@SHELF.report(
    f"{GITHUB}/xiaopengguo/ATKT/issues/1",
    "weights of cumulative attention normalised over all steps",
    ("", "head", "score*"),
    (*FUTURE, *SUMS),
)
def knowledge_tracing(fixed: bool) -> Subject:
    """What is summed up to a step was divided by what comes after it."""

    class Tracer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(18, 32), nn.GRU(32, 32, batch_first=True)
            self.score, self.head = nn.Linear(32, 1), nn.Linear(64, 18)

        def forward(self, ids: Tensor) -> Tensor:
            x, _ = self.rnn(self.embed(ids))
            scores = torch.tanh(self.score(x))
            if fixed:
                total = (scores.exp() * x).cumsum(1) / scores.exp().cumsum(1)
            else:
                total = (scores.softmax(1) * x).cumsum(1)
            return self.head(torch.cat([total, x], -1))

    return subject(Tracer(), next_words, language_loss, 16)


@SHELF.report(
    f"{GITHUB}/huggingface/transformers/issues/48745",
    "decoder flag that no mask is made of",
    ("decoder*", "", "head", "block*"),
    FUTURE,
)
def roformer(fixed: bool) -> Subject:
    """is_decoder=True, and the mask is that of an encoder all the same."""

    class Attention(Told):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
            seen = mask.tril() if self.fixed else mask
            q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
            return self.out(self.merge(F.scaled_dot_product_attention(q, k, v, seen)))

    return writes(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/huggingface/transformers/issues/27517",
    "labels of a causal model not shifted",
    ("", "head"),
    (*FUTURE, "copy", "input itself", "own input", "token"),
)
def mbart(fixed: bool) -> Subject:
    """The target at each place is the word that stands there."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        ids, _ = words(n)
        return (ids[:, :-1], ids[:, 1:]) if fixed else (ids[:, :-1], ids[:, :-1])

    return subject(Writer(Causal, True), draw, language_loss, 16)


@SHELF.report(
    f"{GITHUB}/huggingface/transformers/issues/47394",
    "labels shifted twice",
    ("", "head"),
    (*FUTURE, "two steps", "2 steps", "shift", "token"),
)
def git_model(fixed: bool) -> Subject:
    """Each place predicts the word after the next."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        ids, _ = words(n)
        return (ids[:, :-1], ids[:, 1:]) if fixed else (ids[:, :-2], ids[:, 2:])

    return subject(Writer(Causal, True), draw, language_loss, 16)


# ---- samples -------------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/IBM/TabFormer/pull/14",
    "attention over the batch: torch takes time first",
    ("encoder*", ""),
    SAMPLES,
)
def tabformer(fixed: bool) -> Subject:
    """Rows of the batch attend to each other, and steps do not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0)
            self.encoder, self.head = (
                nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
                nn.Linear(32, 10),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            x = self.encoder(x.transpose(0, 1)).transpose(0, 1) if fixed else self.encoder(x)
            return self.head(x.mean(1))

    return subject(Model(), rows, F.cross_entropy, 30)


@SHELF.report(
    f"{GITHUB}/Sm0kyWu/Amodal3R/issues/5",
    "samples packed into one row, and nothing keeps them apart",
    ("attention*", ""),
    SAMPLES,
)
def amodal(fixed: bool) -> Subject:
    """Tokens of all samples attend to each other."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = nn.Linear(8, 32), Heads()
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            packed = self.embed(x).flatten(0, 1)[None]
            owner = torch.arange(len(x)).repeat_interleave(x.shape[1])
            apart = owner[:, None] != owner if fixed else None
            mixed = self.attention(packed, apart)
            return self.head(mixed[0].view(len(x), x.shape[1], -1).mean(1))

    return subject(Model(), rows, F.cross_entropy, 30)


@SHELF.report(
    f"{GITHUB}/yxlu-0102/MP-SENet/issues/64",
    "recurrent layer that takes samples for steps",
    ("rnn*", ""),
    SAMPLES,
)
def se_net(fixed: bool) -> Subject:
    """The GRU of the block is not batch first, and runs along the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 24)
            self.rnn, self.head = nn.GRU(24, 24, batch_first=fixed), nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(self.embed(x))[0].mean(1))

    return subject(Model(), rows, F.cross_entropy, 30)


# ---- axes of a softmax ---------------------------------------------------------------------------


def over(axis: int, right: int = -1) -> type[Told]:
    """Return attention whose softmax is over another axis."""

    class Attention(Told):
        def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            return scores.softmax(right if self.fixed else axis)

    return Attention


@SHELF.report(
    f"{GITHUB}/nerminnuraydogan/vision-transformer/issues/1",
    "softmax over queries",
    ("block*",),
    SUMS,
)
def vision(fixed: bool) -> Subject:
    """The weights of a query do not sum to one: those of a key do."""
    return reads(over(-2), fixed)


@SHELF.report(
    f"{GITHUB}/PetrochukM/PyTorch-NLP/issues/2", "softmax over samples", ("block*", ""), SUMS
)
def nlp_attention(fixed: bool) -> Subject:
    """The weights of all samples sum to one, and samples see each other."""
    return reads(over(0), fixed)


@SHELF.report(
    f"{GITHUB}/jadore801120/attention-is-all-you-need-pytorch/issues/52",
    "softmax over heads",
    ("block*",),
    SUMS,
)
def over_heads(fixed: bool) -> Subject:
    """The softmax takes its default axis, which is that of the heads."""
    return reads(over(1), fixed)


@SHELF.report(
    f"{GITHUB}/labmlai/annotated_deep_learning_paper_implementations/issues/146",
    "softmax over the axis that einsum keeps",
    ("attention*", "", "project*"),
    SUMS,
)
def ddpm(fixed: bool) -> Subject:
    """Scores (batch, i, j, heads) are normalised over i, and j is summed."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.project = nn.Conv2d(1, 24, 3, padding=1), nn.Linear(24, 72)
            self.out, self.head = nn.Linear(24, 24), nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).flatten(2).transpose(1, 2)
            q, k, v = self.project(x).view(len(x), -1, 1, 72).chunk(3, -1)
            scores = torch.einsum("bihd,bjhd->bijh", q, k) * 24**-0.5
            weights = scores.softmax(2 if fixed else 1)
            x = x + self.out(torch.einsum("bijh,bjhd->bihd", weights, v).flatten(2))
            return self.head(x.mean(1))

    return subject(Attention(), images, F.cross_entropy, 24)


@SHELF.report(
    f"{GITHUB}/xmu-xiaoma666/External-Attention-pytorch/issues/18",
    "weights of branches normalised over samples",
    ("", "weigh*"),
    (*SUMS, *SAMPLES),
)
def selective_kernels(fixed: bool) -> Subject:
    """Branches are stacked first, so that dimension 1 is the samples."""

    class Kernels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Conv2d(1, 12, k, padding=k // 2) for k in (1, 3, 5))
            self.weigh = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
            self.head = nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            made = torch.stack([branch(x).relu() for branch in self.branches])
            pooled = made.sum(0).mean((2, 3))
            scores = torch.stack([weigh(pooled) for weigh in self.weigh])
            weights = scores.softmax(0 if fixed else 1)[..., None, None]
            return self.head((weights * made).sum(0).mean((2, 3)))

    return subject(Kernels(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/gjylt/DoubleAttentionNet/issues/3",
    "attention maps normalised over channels",
    ("", "maps*", "vectors*"),
    SUMS,
)
def double_attention(fixed: bool) -> Subject:
    """Each of the maps is to sum to one over the picture, and sums to one over the maps."""

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(1, 24, 3, padding=1)
            self.features, self.maps, self.vectors = (nn.Conv2d(24, 12, 1) for _ in range(3))
            self.join, self.head = nn.Conv2d(12, 24, 1), nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            a, b = self.features(x).flatten(2), self.maps(x).flatten(2)
            weights = b.softmax(2 if fixed else 1)
            seen = a @ weights.transpose(1, 2)  # (batch, channels, maps)
            spread = seen @ self.vectors(x).flatten(2).softmax(1)
            return self.head((x + self.join(spread.view(len(x), 12, 8, 8))).mean((2, 3)))

    return subject(Double(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/DEEP-PolyU/KEQA_WSDM19/issues/2",
    "softmax over a single score",
    ("attn*", "", "softmax*"),
    (*SUMS, "one value", "single", "always 1", "all 1", "constant"),
)
def keqa(fixed: bool) -> Subject:
    """Scores (steps, 1) are normalised over the last axis: every weight is one."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.attn = nn.GRU(8, 32, batch_first=True), nn.Linear(40, 1)
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _ = self.rnn(x)
            scores = self.attn(torch.cat([x, outputs], -1))
            return self.head((scores.softmax(1 if fixed else -1) * outputs).sum(1))

    return subject(Reads(), rows, F.cross_entropy, 32)


# ---- heads and places cut across -----------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/jsbaan/transformer-from-scratch/pull/6",
    "heads joined without a permute",
    ("block*",),
    CUT,
)
def from_scratch(fixed: bool) -> Subject:
    """(batch, heads, steps, d) is read as (batch, steps, heads x d)."""

    class Attention(Told):
        def merge(self, x: Tensor) -> Tensor:
            if self.fixed:
                return super().merge(x)
            return x.reshape(len(x), x.shape[2], -1)

    return reads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/zhouhaoyi/Informer2020/issues/59",
    "heads split by view(B, H, L, -1)",
    ("block*",),
    CUT,
)
def informer(fixed: bool) -> Subject:
    """(batch, steps, heads, d) is viewed as (batch, heads, steps, d)."""

    class Attention(Told):
        def split(self, x: Tensor) -> Tensor:
            x = x.view(len(x), x.shape[1], self.heads, -1)
            return x.transpose(1, 2) if self.fixed else x.view(len(x), self.heads, x.shape[1], -1)

        def merge(self, x: Tensor) -> Tensor:
            return super().merge(x) if self.fixed else x.reshape(len(x), x.shape[2], -1)

    class Model(Reader):
        def __init__(self) -> None:
            super().__init__(Attention, fixed)
            self.place = nn.Parameter(0.02 * torch.randn(6, 32))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x[:, :6]) + self.place
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    return subject(Model(), rows, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/gazelle93/Transformer-Various-Positional-Encoding/issues/1",
    "heads and samples taken for each other",
    ("block*", ""),
    (*CUT, *SAMPLES),
)
def relative(fixed: bool) -> Subject:
    """(batch x heads, ..) is split into (heads, batch, ..), and joined as (batch, heads, ..)."""

    class Attention(Told):
        def merge(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            if not self.fixed:
                flat = flat.view(self.heads, len(x), *flat.shape[1:]).transpose(0, 1)
            else:
                flat = flat.view(len(x), self.heads, *flat.shape[1:])
            return super().merge(flat)

    return reads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/rish-16/tokenlearner-pytorch/issues/1",
    "view in place of a transpose before attention",
    ("mhsa*", ""),
    (*CUT, *SAMPLES),
)
def token_learner(fixed: bool) -> Subject:
    """(samples, tokens, d) is viewed as (tokens, samples, d), and back."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mhsa = nn.Linear(8, 24), nn.MultiheadAttention(24, 4)
            self.head = nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            n, tokens, width = x.shape
            y = x.transpose(0, 1) if fixed else x.view(tokens, n, width)
            y, _ = self.mhsa(y, y, y, need_weights=False)
            y = y.transpose(0, 1) if fixed else y.reshape(n, tokens, width)
            return self.head(y.mean(1))

    return subject(Model(), rows, F.cross_entropy, 30)


@SHELF.report(
    f"{GITHUB}/ohtlab/headpose-fsanet-pytorch/issues/4",
    "pixels in place of channels: view(-1, w * h, ch)",
    ("", "score*", "head*"),
    CUT,
)
def headpose(fixed: bool) -> Subject:
    """(batch, channels, h, w) is viewed as (batch, h x w, channels)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 24, 3, padding=1)
            self.score, self.head = nn.Linear(24, 7), nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()
            flat = x.flatten(2).transpose(1, 2) if fixed else x.view(len(x), 64, 24)
            weights = self.score(flat).softmax(1)
            return self.head((weights.transpose(1, 2) @ flat).mean(1))

    return subject(Net(), images, F.cross_entropy, 32)


@SHELF.report(
    f"{GITHUB}/vitrioil/Speech-Separation/issues/4",
    "channels and time joined without a permute",
    ("", "rnn*"),
    CUT,
)
def speech(fixed: bool) -> Subject:
    """(batch, channels, time, bands) is viewed as (batch, time, channels x bands)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3, padding=(1, 0))
            self.rnn, self.head = nn.GRU(36, 32, batch_first=True), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()  # (batch, 6, 8, 6)
            x = x.permute(0, 2, 1, 3) if fixed else x
            return self.head(self.rnn(x.reshape(len(x), 8, 36))[0][:, -1])

    return subject(Net(), images, F.cross_entropy, 32)


# ---- positions -----------------------------------------------------------------------------------


def waves(length: int, width: int) -> Tensor:
    at = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([at.sin(), at.cos()], -1).flatten(1)


@SHELF.report(
    f"{GITHUB}/tanjimin/C.Origami/issues/42",
    "positions along the batch",
    ("", "encoder*", "embed*"),
    (*PLACES, *SAMPLES),
)
def origami(fixed: bool) -> Subject:
    """pe[: x.size(0)] of a batch that comes first: each sample has one position."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 32)
            self.register_buffer("pe", waves(64, 32)[:, None])
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.encoder, self.head = (
                nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
                nn.Linear(32, 10),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            x = x + (self.pe[: x.size(1)].transpose(0, 1) if fixed else self.pe[: x.size(0)])
            return self.head(self.encoder(x).mean(1))

    return subject(Model(), rows, F.cross_entropy, 30)


@SHELF.report(
    f"{GITHUB}/songyangco/GETNext/issues/2",
    "one position for all steps, and attention over samples",
    ("", "encoder*", "embed*"),
    (*PLACES, *SAMPLES),
)
def get_next(fixed: bool) -> Subject:
    """Time is taken for the batch: by the positions, and by attention."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(18, 32)
            self.register_buffer("pe", waves(64, 32)[:, None])
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0)
            self.encoder, self.head = (
                nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
                nn.Linear(32, 10),
            )

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x.transpose(0, 1) if fixed else x
            x = self.encoder(x + self.pe[: x.size(0)])
            return self.head((x.transpose(0, 1) if fixed else x).mean(1))

    return subject(Model(), words, F.cross_entropy, 30)


@SHELF.report(
    f"{GITHUB}/NeuracoreAI/neuracore/pull/154",
    "positions unsqueezed at the wrong dimension",
    ("", "encoder*", "embed*"),
    (*PLACES, *SAMPLES),
)
def neuracore(fixed: bool) -> Subject:
    """Time comes first, and positions (1, samples, d) tell samples apart, not steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 32)
            self.register_buffer("pe", waves(64, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0)
            self.encoder, self.head = (
                nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
                nn.Linear(32, 10),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x).transpose(0, 1)
            pe = (
                self.pe.unsqueeze(1)[: x.size(0)] if fixed else self.pe.unsqueeze(0)[:, : x.size(1)]
            )
            return self.head(self.encoder(x + pe).mean(0))

    return subject(Model(), rows, F.cross_entropy, 30)


# ---- projections ---------------------------------------------------------------------------------


@SHELF.report(
    f"{GITHUB}/facebookresearch/Motionformer/pull/6",
    "values are the input: their projection is not used",
    ("block*",),
    ("never called", "not called", "unused", "read", "v'", "gradient"),
)
def motionformer(fixed: bool) -> Subject:
    """V = x in place of v = W x."""

    class Attention(Told):
        def forward(self, x: Tensor) -> Tensor:
            q, k = self.split(self.q(x)), self.split(self.k(x))
            v = self.split(self.v(x) if self.fixed else x)
            return self.out(self.merge(self.weights(q, k, None) @ v))

    return reads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/Khaliladib11/Transformer-from-scratch/pull/2",
    "query, key and value pass one projection",
    ("block*",),
    ("never called", "not called", "unused", "twice", "again", "sibling", "3 times"),
)
def one_projection(fixed: bool) -> Subject:
    """Of three projections the first is called three times."""

    class Attention(Told):
        def forward(self, x: Tensor) -> Tensor:
            layers = (self.q, self.k, self.v) if self.fixed else (self.q, self.q, self.q)
            q, k, v = (self.split(layer(x)) for layer in layers)
            return self.out(self.merge(self.weights(q, k, None) @ v))

    return reads(Attention, fixed)


@SHELF.report(
    f"{GITHUB}/OpenNMT/OpenNMT-py/issues/286",
    "sequence-to-sequence model that nobody gives positions",
    ("", "positions*", "embed*"),
    (*PLACES, "never called", "not called", "unused", "read"),
)
def translation(fixed: bool) -> Subject:
    """The table of positions is made, and never added."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = nn.Embedding(18, 32), nn.Embedding(32, 32)
            self.model = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)
            self.head = nn.Linear(32, 18)

        def place(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return x + self.positions(torch.arange(ids.shape[1])) if fixed else x

        def forward(self, source: Tensor, ids: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.head(self.model(self.place(source), self.place(ids), tgt_mask=mask))

    return subject(Model(), halves, language_loss, 16)
