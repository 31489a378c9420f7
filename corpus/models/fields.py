"""Models of language, sequences, tables, graphs, recommenders and control, as papers have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from corpus.models.rare import clouds
from corpus.models.small import (
    MLP,
    Attention,
    Block,
    flat,
    halves,
    language_loss,
    next_words,
    patients,
    plain,
    rows,
    same,
    tumours,
    words,
)
from corpus.models.usual import padded
from corpus.subject import Subject, subject

# ---- a decoder: root mean square norms, rotary positions, gated units, grouped queries -----------


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features (.., length, d) by their position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10_000 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def causal(ids: Tensor) -> Tensor:
    """Return what each position may see, (n, 1, length, length)."""
    length = ids.shape[1]
    return torch.ones(len(ids), 1, length, length, dtype=torch.bool).tril()


class GroupedAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.size, self.repeats = width // heads, heads // groups
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, outputs, bias=False)
            for outputs in (width, groups * self.size, groups * self.size, width)
        )
        self.scale, self.fill = self.size**-0.5, -math.inf

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(self.repeats, 1) for t in (rotated(k), v))
        scores = (rotated(q) @ k.transpose(-2, -1) * self.scale).masked_fill(~allowed, self.fill)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GatedUnits(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), GroupedAttention(width)
        self.norm2, self.mlp = RMSNorm(width), GatedUnits(width)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), allowed)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 18, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.allowed, self.between, self.finish = causal, same, same

    def forward(self, ids: Tensor) -> Tensor:
        x, allowed = self.between(self.embedding(ids)), self.allowed(ids)
        for block in self.blocks:
            x = block(x, allowed)
        return self.finish(self.head(self.norm(x)))


def llama() -> Subject:
    return subject(Llama(), next_words, language_loss, batch=16)


def left_padded(n: int) -> tuple[Tensor, Tensor]:
    """Return ids that begin with padding of random length, and what follows; padding ignored."""
    ids, following = next_words(n)
    kept = torch.arange(ids.shape[1]) >= torch.randint(0, 20, (n, 1))
    return ids * kept, following.masked_fill(~kept, -100)


def seen(ids: Tensor) -> Tensor:
    """Return what each position may see: no padding, and nothing that follows."""
    return causal(ids) & (ids != 0)[:, None, None]


class Adapted(nn.Module):
    """A frozen layer with a low-rank change beside it (Hu et al. 2022)."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def lora() -> Subject:
    s = llama()
    s.model.requires_grad_(False)
    for block in s.model.blocks:
        block.attention.q, block.attention.v = (
            Adapted(block.attention.q), Adapted(block.attention.v))  # fmt: skip
    return s


# ---- an encoder and a decoder without biases, scores not scaled (Raffel et al. 2020) -------------


class T5Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=(width * (width // heads)) ** -0.5)
        for layer in (self.k, self.v, self.out):
            nn.init.normal_(layer.weight, std=width**-0.5)
        self.heads, self.distance = heads, nn.Embedding(63, heads)
        nn.init.normal_(self.distance.weight, std=width**-0.5)

    def forward(self, x: Tensor, memory: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q(x), self.k(memory), self.v(memory))
        )
        rows, columns = torch.arange(x.shape[1])[:, None], torch.arange(memory.shape[1])
        scores = q @ k.transpose(-2, -1) + self.distance(rows - columns + 31).permute(2, 0, 1)
        if is_causal:
            scores = scores.masked_fill(rows < columns, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, width: int = 32, crosses: bool = False) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width), T5Attention(width)
        self.norm2, self.cross = RMSNorm(width), T5Attention(width) if crosses else None
        self.norm3, self.wi = RMSNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.wo = nn.Linear(4 * width, width, bias=False)
        if not crosses:
            self.norm2 = None
        for layer in (self.wi, self.wo):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, memory is not None)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.wo(F.relu(self.wi(self.norm3(x))))


class T5(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, width)
        self.encoder = nn.ModuleList(T5Block(width) for _ in range(2))
        self.decoder = nn.ModuleList(T5Block(width, crosses=True) for _ in range(2))
        self.norm, self.out_norm = RMSNorm(width), RMSNorm(width)
        self.remember = same

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        memory, x = self.embedding(source), self.embedding(ids)
        for block in self.encoder:
            memory = block(memory)
        memory = self.remember(self.norm(memory))
        for block in self.decoder:
            x = block(x, memory)
        x = self.out_norm(x)
        return x @ self.embedding.weight.T * x.shape[-1] ** -0.5


def t5() -> Subject:
    return subject(T5(), halves, language_loss, batch=16)


# ---- masked words (Devlin et al. 2019), with torch's own layers ----------------------------------


class MaskedWords(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width, padding_idx=0)
        self.position, self.norm = nn.Embedding(32, width), nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 20)
        self.enter = same

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.encoder(self.norm(self.enter(x)), src_key_padding_mask=mask == 0))


def masked_words(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded ids, a sixth of them masked (19), with their mask, and what they were."""
    ids, _ = padded(n)
    hidden = (torch.rand(ids.shape) < 0.15) & (ids != 0)
    return (ids.masked_fill(hidden, 19), (ids != 0).long()), ids.masked_fill(~hidden, -100)


def masked() -> Subject:
    return subject(MaskedWords(), masked_words, language_loss, batch=32)


class Classified(nn.Module):
    """The mean of an encoder's states, padding left out."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 32, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)
        self.counted: Callable[[Tensor], Tensor] = lambda ids: ids != 0
        self.enter = same

    def forward(self, ids: Tensor) -> Tensor:
        x = self.enter(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        counted = self.counted(ids)[..., None].float()
        return self.head((self.norm(x) * counted).sum(1) / counted.sum(1).clamp(min=1))


def classified() -> Subject:
    return subject(Classified(), padded, F.cross_entropy)


# ---- selective state space (Gu and Dao 2023) -----------------------------------------------------


class Mamba(nn.Module):
    def __init__(self, width: int = 32, inner: int = 64, state: int = 8) -> None:
        super().__init__()
        self.inward = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select = nn.Linear(inner, 4 + 2 * state, bias=False)
        self.step, self.state = nn.Linear(4, inner), state
        steps = torch.exp(torch.rand(inner) * math.log(100) + math.log(1e-3))
        self.step.bias.data = steps + torch.log(-torch.expm1(-steps))
        self.log_a = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip, self.outward = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width)
        self.sign = -1.0

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.inward(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.select(x).split([4, self.state, self.state], -1)
        step, a = F.softplus(self.step(step)), self.sign * self.log_a.exp()
        state, made = x.new_zeros(*x[:, 0].shape, self.state), []
        for t in range(x.shape[1]):
            kept = (step[:, t, :, None] * a).exp()
            state = kept * state + (step * x)[:, t, :, None] * b[:, t, None]
            made.append((state * c[:, t, None]).sum(-1))
        return self.outward((torch.stack(made, 1) + self.skip * x) * F.silu(z))


class MambaWords(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(18, width), nn.LayerNorm(width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.mixers = nn.ModuleList(Mamba(width) for _ in range(depth))
        self.head = nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(self.norm(x))


def mamba() -> Subject:
    return subject(MambaWords(), next_words, language_loss, batch=16)


# ---- tags of words: recurrent encoders, conditional random fields --------------------------------


def tagged(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded ids with their lengths, and a tag of 0 to 4 for each; padding ignored."""
    ids, _ = words(n)
    lengths = torch.randint(1, 33, (n,))
    kept = torch.arange(32) < lengths[:, None]
    return (ids * kept, lengths), (ids % 5).masked_fill(~kept, -100)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.head = nn.Linear(48, 5)
        self.between = same

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.between(self.embedding(ids))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1]
        )
        return self.head(states)


def tagger() -> Subject:
    return subject(Tagger(), tagged, language_loss)


class CRF(nn.Module):
    """Tags with scores of what follows what (Lample et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(18, 16), nn.GRU(16, 32, batch_first=True)
        self.head, self.transitions = nn.Linear(32, 5), nn.Parameter(0.1 * torch.randn(5, 5))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        scores = self.head(self.gru(self.embedding(ids))[0])
        alpha = scores[:, 0]
        for t in range(1, scores.shape[1]):
            alpha = (alpha[:, :, None] + self.transitions).logsumexp(1) + scores[:, t]
        path = scores.gather(2, tags[..., None]).squeeze(2).sum(1)
        path = path + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return (alpha.logsumexp(1) - path).mean()


def with_tags(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    ids, _ = words(n)
    return (ids, ids % 5), None


def crf() -> Subject:
    return subject(CRF(), with_tags, None)


# ---- pointers, convolutions over words, mixtures of softmaxes ------------------------------------


def darkest(n: int) -> tuple[Tensor, Tensor]:
    """Return images as rows, and which row has the most ink."""
    sequences, _ = rows(n)
    return sequences, sequences.sum(2).argmax(1)


class Pointer(nn.Module):
    """The logarithm of how likely each step is pointed at (Vinyals et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(8, 32, batch_first=True)
        self.key, self.query, self.score = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.finish: Callable[[Tensor], Tensor] = lambda x: F.log_softmax(x, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.encoder(x)
        scores = self.score(torch.tanh(self.key(states) + self.query(last[0])[:, None]))
        return self.finish(scores.squeeze(2))


def pointer() -> Subject:
    return subject(Pointer(), darkest, F.nll_loss)


class TextCNN(nn.Module):
    """Convolutions of three lengths over words, their largest (Kim 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 16)
        self.convs = nn.ModuleList(nn.Conv1d(16, 24, size) for size in (2, 3, 4))
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(72, 10)
        self.activation = F.relu

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2)
        x = torch.cat([self.activation(conv(x)).amax(2) for conv in self.convs], 1)
        return self.head(self.dropout(x))


def text_cnn() -> Subject:
    return subject(TextCNN(), words, F.cross_entropy)


class MixtureOfSoftmaxes(nn.Module):
    """Yang et al. 2018."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(18, 32), nn.GRU(32, 32, batch_first=True)
        self.prior, self.latent = nn.Linear(32, parts), nn.Linear(32, 32 * parts)
        self.decoder, self.parts = nn.Linear(32, 18), parts
        self.mixed: Callable[[Tensor], Tensor] = same

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(ids))
        prior = self.mixed(self.prior(states).softmax(-1))
        latent = torch.tanh(self.latent(states)).unflatten(-1, (self.parts, -1))
        return ((self.decoder(latent).softmax(-1) * prior[..., None]).sum(-2) + 1e-8).log()


def token_likelihood(output: Tensor, ids: Tensor) -> Tensor:
    return F.nll_loss(output.flatten(0, 1), ids.flatten())


def mixture_of_softmaxes() -> Subject:
    return subject(MixtureOfSoftmaxes(), next_words, token_likelihood, batch=16)


# ---- experts, prompts, adapters ------------------------------------------------------------------


class Experts(nn.Module):
    """The two experts that the router prefers, weighted (Shazeer et al. 2017)."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            plain(width, 64, width, activation=nn.GELU) for _ in range(experts)
        )
        self.weigh: Callable[[Tensor], Tensor] = lambda best: best.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).topk(2, -1)
        weights, made = self.weigh(best), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine, slot = torch.where(chosen == index)
            made.index_add_(0, mine, weights[mine, slot, None] * expert(x[mine]))
        return made


class SparseWords(nn.Module):
    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(18, width), Attention(width, 4, True)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.moe, self.head = Experts(width, experts), nn.Linear(width, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(self.norm1(x))
        x = x + self.moe(self.norm2(x).flatten(0, 1)).view_as(x)
        return self.head(self.norm3(x))


def sparse_words() -> Subject:
    return subject(SparseWords(), next_words, language_loss, batch=16)


class Prompted(nn.Module):
    """Learnt prompts before frozen blocks (Lester et al. 2021)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(18, width), nn.Sequential(Block(), Block())
        self.embedding.requires_grad_(False)
        self.blocks.requires_grad_(False)
        self.prompt = nn.Parameter(self.embedding.weight[torch.randint(0, 18, (4,))].clone())
        self.head, self.take = nn.Linear(width, 10), same

    def forward(self, ids: Tensor) -> Tensor:
        prompt = self.take(self.prompt).expand(len(ids), -1, -1)
        return self.head(self.blocks(torch.cat([prompt, self.embedding(ids)], 1))[:, :4].mean(1))


def prompted() -> Subject:
    return subject(Prompted(), words, F.cross_entropy)


class Adapter(nn.Module):
    """A bottleneck beside a block, zero at its start (Houlsby et al. 2019)."""

    def __init__(self, block: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.block = block.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 8), nn.Linear(8, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x + self.up(F.gelu(self.down(x)))


def adapters() -> Subject:
    s = classified()
    for index, block in enumerate(s.model.blocks):
        s.model.blocks[index] = Adapter(block)
    s.model.embedding.requires_grad_(False)
    return s


# ---- recommenders --------------------------------------------------------------------------------


def clicks(n: int) -> tuple[Tensor, Tensor]:
    """Return an id of 20 in each of 6 fields, counted through, and whether it was clicked."""
    ids = torch.randint(0, 20, (n, 6))
    return ids + 20 * torch.arange(6), ((ids[:, 0] + ids[:, 1] * ids[:, 2]) % 3 == 0).float()


class DeepFM(nn.Module):
    """Pairs of factors beside a deep net on the same (Guo et al. 2017)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(120, 1), nn.Embedding(120, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.factors.weight, std=0.05)
        self.bias, self.deep = nn.Parameter(torch.zeros(1)), plain(6 * width, 32, 32, 1)
        self.look: Callable[[nn.Embedding, Tensor], Tensor] = lambda table, ids: table(ids)

    def forward(self, ids: Tensor) -> Tensor:
        factors = self.look(self.factors, ids)
        pairs = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1)
        first = self.linear(ids).sum((1, 2))
        return self.bias + first + pairs + self.deep(factors.flatten(1)).squeeze(1)


def deepfm() -> Subject:
    return subject(DeepFM(), clicks, F.binary_cross_entropy_with_logits, batch=128)


class DLRM(nn.Module):
    """Dot products between the fields and a net on the numbers (Naumov et al. 2019)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, width, mode="sum") for _ in range(6))
        self.bottom = nn.Sequential(plain(4, 16, width), nn.ReLU())
        self.top = plain(width + 21, 32, 1)
        for table in self.tables:
            nn.init.uniform_(table.weight, -(20**-0.5), 20**-0.5)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        parts = [table(ids[:, i, None]) for i, table in enumerate(self.tables)]
        every = torch.stack([dense, *parts], 1)
        row, column = torch.tril_indices(7, 7, -1)
        pairs = (every @ every.transpose(1, 2))[:, row, column]
        return self.top(torch.cat([dense, pairs], 1)).squeeze(1)


def adverts(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    ids, clicked = clicks(n)
    return (torch.randn(n, 4), ids - 20 * torch.arange(6)), clicked


def dlrm() -> Subject:
    return subject(DLRM(), adverts, F.binary_cross_entropy_with_logits, batch=128)


class TwoTowers(nn.Module):
    """Users and items meet in a dot product; the other items of the batch are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(50, 16), plain(16, 32, 16))
        self.item = nn.Sequential(nn.Embedding(40, 16), plain(16, 32, 16))
        self.normalize: Callable[[Tensor], Tensor] = lambda x: F.normalize(x, dim=1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.normalize(self.user(users)) @ self.normalize(self.item(items)).T / 0.1


def bought(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    users = torch.randint(0, 50, (n,))
    return (users, (3 * users + torch.randint(0, 4, (n,))) % 40), torch.arange(n)


def two_towers() -> Subject:
    return subject(TwoTowers(), bought, F.cross_entropy)


# ---- graphs with scattered sums ------------------------------------------------------------------


def graphs(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return digits as graphs of 16 points with edges both ways, (nodes, edges, graph), labels."""
    points, labels = clouds(n)
    points = points[:, :16]
    nodes = torch.cat([points, points.norm(dim=2, keepdim=True)], 2).flatten(0, 1)
    near = torch.cdist(points, points).topk(5, largest=False).indices[..., 1:]
    start = (16 * torch.arange(n))[:, None, None]
    source, sink = (near + start).flatten(), torch.arange(16 * n).repeat_interleave(4)
    return (nodes, torch.stack([source, sink]), torch.arange(n).repeat_interleave(16)), labels


def scattered(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size, *values.shape[1:]).index_add(0, index, values)


class GIN(nn.Module):
    """Sums over neighbours (Xu et al. 2019), a mean over each graph."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width if i else 3, width), nn.BatchNorm1d(width), nn.ReLU(),
                nn.Linear(width, width), nn.ReLU()) for i in range(depth))  # fmt: skip
        self.head = nn.Linear(width, 10)
        self.spread: Callable[[Tensor, Tensor], Tensor] = lambda x, edges: scattered(
            x[edges[0]], edges[1], len(x)
        )

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + self.spread(x, edges))
        count = int(graph.max()) + 1
        size = torch.bincount(graph, minlength=count).clamp(min=1)
        return self.head(scattered(x, graph, count) / size[:, None])


def gin() -> Subject:
    return subject(GIN(), graphs, F.cross_entropy)


class GAT(nn.Module):
    """Attention over the edges of a graph (Velickovic et al. 2018)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, width, bias=False) for size in (64, width))
        self.sources = nn.ParameterList(0.1 * torch.randn(width) for _ in range(2))
        self.sinks = nn.ParameterList(0.1 * torch.randn(width) for _ in range(2))
        self.head, self.weigh = nn.Linear(width, 10), self.weights

    def weights(self, scores: Tensor, sink: Tensor, n: int) -> Tensor:
        top = scores.new_full((n,), -math.inf).scatter_reduce(0, sink, scores, "amax")
        scores = (scores - top[sink]).exp()
        return scores / (scattered(scores, sink, n)[sink] + 1e-16)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, sink = edges
        for layer, out, into in zip(self.layers, self.sources, self.sinks, strict=True):
            x = layer(x)
            scores = F.leaky_relu((x @ out)[source] + (x @ into)[sink], 0.2)
            weights = self.weigh(scores, sink, len(x))
            x = F.elu(scattered(weights[:, None] * x[source], sink, len(x)))
        return self.head(x)


def similar(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return digits, the edges from the 6 nearest of each, and labels."""
    nodes, labels = flat(n)
    near = torch.cdist(nodes, nodes).topk(min(6, n), largest=False).indices
    sink = torch.arange(n).repeat_interleave(near.shape[1])
    return (nodes, torch.stack([near.flatten(), sink])), labels


def gat() -> Subject:
    return subject(GAT(), similar, F.cross_entropy)


class SGC(nn.Module):
    """Many steps of averaging over neighbours, then one layer (Wu et al. 2019)."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.stem, self.head, self.steps = nn.Linear(64, 32), nn.Linear(32, 10), steps

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        count = torch.bincount(edges[1], minlength=len(x))[:, None]
        for _ in range(self.steps):
            x = scattered(x[edges[0]], edges[1], len(x)) / count
        return self.head(x)


def sgc() -> Subject:
    return subject(SGC(), similar, F.cross_entropy)


class SetTransformer(nn.Module):
    """Attention within a set, then from learnt seeds (Lee et al. 2019)."""

    def __init__(self, width: int = 32, seeds: int = 4) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(2, width), Block(width)
        self.seeds = nn.Parameter(torch.randn(1, seeds, width))
        self.pool, self.norm = Attention(width, 4), nn.LayerNorm(width)
        self.head = nn.Linear(seeds * width, 10)

    def forward(self, points: Tensor) -> Tensor:
        x = self.block(self.stem(points))
        seeds = self.seeds.expand(len(x), -1, -1)
        return self.head(self.norm(seeds + self.pool(seeds, x)).flatten(1))


def set_transformer() -> Subject:
    return subject(SetTransformer(), clouds, F.cross_entropy)


# ---- tables --------------------------------------------------------------------------------------


def sparsemax(x: Tensor) -> Tensor:
    """Project onto the simplex (Martins and Astudillo 2016)."""
    ordered = x.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    rank = torch.arange(1, x.shape[-1] + 1)
    kept = (rank * ordered > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, kept - 1) / kept).clamp(min=0)


class TabNet(nn.Module):
    """Steps of choosing features and gated units on them (Arik and Pfister 2021)."""

    def __init__(self, inputs: int = 30, width: int = 16, steps: int = 3) -> None:
        super().__init__()
        self.bn, self.width = nn.BatchNorm1d(inputs), width
        self.choosers = nn.ModuleList(nn.Linear(width, inputs) for _ in range(steps))
        self.norms = nn.ModuleList(nn.BatchNorm1d(inputs) for _ in range(steps))
        self.units = nn.ModuleList(nn.Linear(inputs, 4 * width) for _ in range(steps + 1))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x)
        prior, total = torch.ones_like(x), 0.0
        _, shared = F.glu(self.units[0](x), -1).chunk(2, -1)
        for chooser, norm, unit in zip(self.choosers, self.norms, self.units[1:], strict=True):
            chosen = sparsemax(norm(chooser(shared)) * prior)
            prior = prior * (1.3 - chosen)
            decided, shared = F.glu(unit(x * chosen), -1).chunk(2, -1)
            total = total + F.relu(decided)
        return self.head(total)


def tabnet() -> Subject:
    return subject(TabNet(), tumours, F.binary_cross_entropy_with_logits)


class Features(nn.Module):
    """A token for each column, attention between them (Gorishniy et al. 2021)."""

    def __init__(self, inputs: int = 10, width: int = 32) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(inputs, width).uniform_(-(width**-0.5), width**-0.5))
            for _ in range(2))  # fmt: skip
        self.token = nn.Parameter(torch.empty(1, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.blocks, self.norm = nn.Sequential(Block(width), Block(width)), nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None] * self.weight + self.bias
        x = self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        return self.head(F.relu(self.norm(x[:, 0])))


def features() -> Subject:
    return subject(Features(), patients, F.mse_loss)


def marked(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised pixels, and which of ten marks apply: around three each."""
    pixels, labels = flat(n)
    return pixels, torch.stack([(labels + k) % 10 < 3 for k in range(10)], 1).float()


def multilabel() -> Subject:
    return subject(MLP(), marked, F.binary_cross_entropy_with_logits)


def counts(n: int) -> tuple[Tensor, Tensor]:
    features, target = patients(n)
    return features, torch.poisson(target.exp())


class Rate(nn.Module):
    """The logarithm of a rate."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.finish = plain(10, 32, 1), same

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.net(x))


def poisson() -> Subject:
    return subject(Rate(), counts, F.poisson_nll_loss)


def survived(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return features, with times and whether the end was seen."""
    features, target = patients(n)
    return features, ((-target.squeeze(1)).exp() * torch.rand(n), (torch.rand(n) < 0.6).float())


def partial_likelihood(risk: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Cox 1972: each end against all who were still there."""
    order = target[0].argsort(descending=True)
    risk, event = risk.squeeze(1)[order], target[1][order]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()


def cox() -> Subject:
    return subject(MLP(10, 32, 1), survived, partial_likelihood)


class Ordinal(nn.Module):
    """A score against ordered cuts (Cheng et al. 2008)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.cuts = plain(64, 64, 1), nn.Parameter(torch.linspace(-2, 2, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self.cuts


def ordinal_loss(output: Tensor, labels: Tensor) -> Tensor:
    above = (labels[:, None] > torch.arange(9)).float()
    return F.binary_cross_entropy_with_logits(output, above)


def ordinal() -> Subject:
    return subject(Ordinal(), flat, ordinal_loss)


class Spread(nn.Module):
    """A mean and a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.variance = plain(10, 32, 32), nn.Linear(32, 1), nn.Linear(32, 1)
        self.positive = F.softplus

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.trunk(x))
        return self.mean(x), self.positive(self.variance(x))


def normal_likelihood(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    mean, variance = output
    return 0.5 * (variance.log() + (target - mean) ** 2 / variance).mean()


def spread() -> Subject:
    return subject(Spread(), patients, normal_likelihood)


# ---- time series ---------------------------------------------------------------------------------


def waves(n: int) -> tuple[Tensor, Tensor]:
    """Return 24 steps of noisy sines and the 6 that follow."""
    phase, rate = 6.3 * torch.rand(n, 1), 0.2 + 0.4 * torch.rand(n, 1)
    series = torch.sin(phase + rate * torch.arange(30)) + 0.1 * torch.randn(n, 30)
    return series[:, :24], series[:, 24:]


class NBeats(nn.Module):
    """Each block explains part of the past and of the future (Oreshkin et al. 2020)."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(plain(24, 64, 64), nn.ReLU(), nn.Linear(64, 30)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        forecast: Any = 0.0
        for block in self.blocks:
            back, ahead = block(x).split([24, 6], 1)
            x, forecast = x - back, forecast + ahead
        return forecast


def nbeats() -> Subject:
    return subject(NBeats(), waves, F.l1_loss)


class Quantiles(nn.Module):
    """Three quantiles of each step ahead, from a recurrent state."""

    def __init__(self, inputs: int = 2) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, 32, batch_first=True), nn.Linear(32, 18)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1]).view(-1, 6, 3)


def timed_waves(n: int) -> tuple[Tensor, Tensor]:
    """Return the waves with the time of each step beside, from 0 to 1."""
    past, ahead = waves(n)
    return torch.stack([past, (torch.arange(24) / 24).expand(n, -1)], 2), ahead


def pinball(output: Tensor, target: Tensor) -> Tensor:
    error, level = target[..., None] - output, torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(level * error, (level - 1) * error).mean()


def quantiles() -> Subject:
    return subject(Quantiles(), timed_waves, pinball)


# ---- control -------------------------------------------------------------------------------------


def played(n: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return states, with actions, returns and advantages, each (n,)."""
    state = torch.randn(n, 16)
    returns = state[:, 0] + 0.5 * torch.randn(n)
    return state, (torch.randint(0, 4, (n,)), returns, (returns - returns.mean()) / returns.std())


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 4), nn.Linear(64, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)
        self.to_actor = same

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(state)
        return self.actor(self.to_actor(x)), self.critic(x)


def actor_critic_loss(output: tuple[Tensor, Tensor], target: Any) -> Tensor:
    (logits, value), (action, returns, advantage) = output, target
    policy = Categorical(logits=logits)
    gain = (policy.log_prob(action) * advantage).mean()
    return 0.5 * F.mse_loss(value.squeeze(1), returns) - gain - 0.01 * policy.entropy().mean()


def actor_critic() -> Subject:
    return subject(ActorCritic(), played, actor_critic_loss)


class Dueling(nn.Module):
    """Value and advantages apart (Wang et al. 2016)."""

    def __init__(self, actions: int = 4) -> None:
        super().__init__()
        self.trunk, self.value = plain(16, 64, 64), nn.Linear(64, 1)
        self.advantage, self.dim = nn.Linear(64, actions), 1

    def forward(self, state: Tensor) -> Tensor:
        x = F.relu(self.trunk(state))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


def temporal_difference(q: Tensor, target: Any) -> Tensor:
    action, returns, _ = target
    return F.smooth_l1_loss(q.gather(1, action[:, None]).squeeze(1), returns)


def dueling() -> Subject:
    return subject(Dueling(), played, temporal_difference)


class Squashed(nn.Module):
    """A Gaussian action squashed by tanh, and its log-probability (Haarnoja et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.log_std = plain(16, 64, 64), nn.Linear(64, 4), nn.Linear(64, 4)
        self.critic = plain(20, 64, 1).requires_grad_(False)
        self.correction: Callable[[Tensor, Tensor], Tensor] = lambda raw, action: (
            2 * (math.log(2) - raw - F.softplus(-2 * raw))
        )

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.trunk(state))
        policy = Normal(self.mean(x), self.log_std(x).clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw)
        likelihood = (policy.log_prob(raw) - self.correction(raw, action)).sum(1)
        return self.critic(torch.cat([state, action], 1)), likelihood


def states(n: int) -> tuple[Tensor, None]:
    return torch.randn(n, 16), None


def squashed() -> Subject:
    return subject(Squashed(), states, lambda output: (0.2 * output[1] - output[0][:, 0]).mean())


class WorldModel(nn.Module):
    """A recurrent state, what it expects and what was seen (Hafner et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = plain(8, 32, 32), nn.GRUCell(8, 32)
        self.prior, self.posterior = nn.Linear(32, 16), nn.Linear(64, 16)
        self.decoder = plain(40, 32, 8)

    @staticmethod
    def _normal(parameters: Tensor) -> Normal:
        mean, spread = parameters.chunk(2, -1)
        return Normal(mean, F.softplus(spread) + 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, latent = x.new_zeros(len(x), 32), x.new_zeros(len(x), 8)
        made, surprise = [], x.new_zeros(len(x))
        for seen in x.unbind(1):
            state = self.cell(latent, state)
            prior = self._normal(self.prior(state))
            posterior = self._normal(self.posterior(torch.cat([state, self.encoder(seen)], 1)))
            latent = posterior.rsample()
            surprise = surprise + torch.distributions.kl_divergence(posterior, prior).sum(1)
            made.append(self.decoder(torch.cat([state, latent], 1)))
        return torch.stack(made, 1), surprise


def world_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + 0.01 * output[1].mean()


def world_model() -> Subject:
    return subject(WorldModel(), lambda n: (rows(n)[0],) * 2, world_loss)


# ---- dynamics, energies, pairs -------------------------------------------------------------------


class NeuralODE(nn.Module):
    """Runge-Kutta steps through a learnt field (Chen et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.field, self.carry = plain(32, 32, 32, activation=nn.Tanh), same

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.stem(x), 0.25
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + h / 2 * a)
            c = self.field(x + h / 2 * b)
            d = self.field(x + h * c)
            x = self.carry(x + h / 6 * (a + 2 * b + 2 * c + d))
        return self.head(x)


def neural_ode() -> Subject:
    return subject(NeuralODE(), flat, F.cross_entropy)


class Energy(nn.Module):
    """The energy of what was seen and of noise (contrastive divergence)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(64, 64, 1, activation=nn.SiLU)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.net(torch.randn_like(x))


def energy_loss(output: tuple[Tensor, Tensor]) -> Tensor:
    seen, made = output
    return (seen - made).mean() + 0.1 * (seen**2 + made**2).mean()


def energy() -> Subject:
    return subject(Energy(), lambda n: (flat(n)[0], None), energy_loss)


class Sentences(nn.Module):
    """The cosine of two sentences through one recurrent encoder, padding of zeros in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 32, padding_idx=0)
        self.norm, self.gru = RMSNorm(32), nn.GRU(32, 32, batch_first=True)
        self.direction: Callable[[Tensor], Tensor] = lambda x: F.normalize(x, dim=-1)

    def encoded(self, ids: Tensor) -> Tensor:
        return self.direction(self.gru(self.norm(self.embedding(ids)))[1][0])

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.encoded(a) * self.encoded(b)).sum(1)


def paired(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return padded ids twice, half of the second ones shuffled, and whether they match."""
    ids, _ = padded(n)
    match = torch.rand(n) < 0.5
    return (ids, torch.where(match[:, None], ids, ids.roll(1, 0))), match.float()


def cosines(output: Tensor, match: Tensor) -> Tensor:
    return torch.where(match > 0, 1 - output, F.relu(output - 0.2)).mean()


def sentences() -> Subject:
    return subject(Sentences(), paired, cosines)


FIELDS = [llama, lora, t5, masked, classified, mamba, tagger, crf, pointer, text_cnn]
FIELDS += [mixture_of_softmaxes, sparse_words, prompted, adapters, deepfm, dlrm, two_towers]
FIELDS += [gin, gat, sgc, set_transformer, tabnet, features, multilabel, poisson, cox, ordinal]
FIELDS += [spread, nbeats, quantiles, actor_critic, dueling, squashed, world_model, neural_ode]
FIELDS += [energy, sentences]


class Reversible(nn.Module):
    """Standardises each series, and undoes it at the end (Kim et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(24, 64, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        return self.net((x - mean) / spread) * spread + mean


def stocks(n: int) -> tuple[Tensor, Tensor]:
    """Return prices from 20 to 60,000, each series around its own level."""
    past, ahead = waves(n)
    level = torch.exp(3 + 8 * torch.rand(n, 1))
    return level * (1 + 0.1 * past), level * (1 + 0.1 * ahead)


def relative(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) / target).abs().mean()


def rare_counts(n: int) -> tuple[Tensor, Tensor]:
    features, target = patients(n)
    return features, torch.poisson((target - 4).exp())


def rare_marks(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = flat(n)
    return pixels, torch.zeros(n, 10).scatter_(1, labels[:, None], (torch.rand(n, 1) < 0.1).float())


class Alibi(nn.Module):
    """Scores less a multiple of the distance (Press et al. 2022), with steep slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(18, 32), Block(causal=True)
        self.head = nn.Linear(32, 18)
        slopes = 2.0 ** -torch.arange(0, 8, 2)
        distance = (torch.arange(31)[:, None] - torch.arange(31)).clamp(min=0)
        self.register_buffer("bias", -slopes[:, None, None] * distance, persistent=False)
        self.block.attention.mask = lambda scores: scores + self.bias

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))


class PPO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = plain(16, 64, 4, activation=nn.Tanh), plain(16, 64, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state)


def clipped(output: tuple[Tensor, Tensor], target: Any) -> Tensor:
    """The first of several epochs: every ratio is one."""
    (logits, value), (action, returns, advantage) = output, target
    likelihood = Categorical(logits=logits).log_prob(action)
    ratio = (likelihood - likelihood.detach()).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return 0.5 * F.mse_loss(value.squeeze(1), returns) - gain


class Ensemble(nn.Module):
    """Five critics at once, by stacked weights (Januszewski et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(5, 16, 64) / 4)
        self.weight2 = nn.Parameter(torch.randn(5, 64, 1) / 8)
        self.bias1, self.bias2 = (
            nn.Parameter(torch.zeros(5, 1, 64)), nn.Parameter(torch.zeros(5, 1, 1)))  # fmt: skip

    def forward(self, state: Tensor) -> Tensor:
        hidden = F.relu(torch.baddbmm(self.bias1, state.expand(5, -1, -1), self.weight1))
        return torch.baddbmm(self.bias2, hidden, self.weight2).squeeze(2)


class Scheduled(nn.Module):
    """A decoder that reads its own choice, which lets no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(18, 32), nn.GRUCell(32, 32)
        self.encoder, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 18)

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        state, made = self.encoder(self.embedding(source))[1][0], []
        word = ids[:, 0]
        for _ in range(ids.shape[1]):
            state = self.cell(self.embedding(word), state)
            made.append(self.head(state))
            word = made[-1].argmax(1)
        return torch.stack(made, 1)


class FactorizedVocabulary(nn.Module):
    """Adaptive softmax over a long tail of words (Grave et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(200, 32), nn.GRU(32, 32, batch_first=True)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(32, 200, [20, 100])

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(ids[:, :-1]))
        return self.out(states.flatten(0, 1), ids[:, 1:].flatten()).loss


def rare_words(n: int) -> tuple[Tensor, None]:
    return (200 * torch.rand(n, 20) ** 4).long().clamp(max=199), None


class Doubled(nn.Module):
    """log_softmax twice, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain(64, 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).log_softmax(1)
