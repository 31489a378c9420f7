"""Models that engineers refactor today: rotary decoders, temporal nets, taggers, adapters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from corpus.models.small import flat, images, language_loss, next_words, rows, words
from corpus.subject import Subject, subject

# ---- a decoder as of 2024: rotary positions, grouped queries, gated MLP --------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def angles(length: int, size: int, theta: float) -> Tensor:
    """Return the angle of each position and pair of features, (length, size // 2)."""
    frequencies = theta ** -(torch.arange(0, size, 2) / size)
    return torch.arange(length)[:, None] * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features, of which one lies in each half."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GroupedAttention(nn.Module):
    """Causal attention where two heads of queries share one of keys and values."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.theta, self.dropout = 10000.0, 0.0
        self.rotate = rotate

    def shared(self, x: Tensor) -> Tensor:
        """Return each head of keys or values once for each head of queries."""
        return x.repeat_interleave(self.heads // self.groups, 1)

    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = angles(x.shape[1], self.size, self.theta)
        return angle.cos(), angle.sin()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ self.shared(k).transpose(-2, -1) / math.sqrt(self.size)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return weights @ self.shared(v)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        cos, sin = self.table(x)
        y = self.attend(self.rotate(q, cos, sin), self.rotate(k, cos, sin), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.input_norm, self.attention = RMSNorm(width), GroupedAttention(width)
        self.post_norm, self.mlp = RMSNorm(width), GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, width)
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, 18, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def decoder() -> Subject:
    return subject(Decoder(), next_words, language_loss, batch=16)


# ---- convolutions --------------------------------------------------------------------------------


class TemporalBlock(nn.Module):
    """A causal dilated convolution with a skip connection."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.conv.weight = self.conv.weight.detach()  # made anew in each forward; else no deepcopy
        self.norm, self.dilation = nn.GroupNorm(4, width), dilation
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (2 * self.dilation, 0))
        return x + self.out(torch.tanh(self.norm(self.conv(padded))))


class TemporalNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, width, 1)
        self.blocks = nn.ModuleList(TemporalBlock(width, 2**i) for i in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, :, -1])


def temporal() -> Subject:
    return subject(TemporalNet(), rows, F.cross_entropy, batch=32)


class Excitation(nn.Module):
    """Scale each channel by what the means of all of them say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


def shuffle(x: Tensor, groups: int = 2) -> Tensor:
    """Mix the channels of groups, so that each group sees of all."""
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class Inverted(nn.Module):
    """Wider in the middle, where the convolution is one a channel."""

    def __init__(self, width: int = 8, factor: int = 2) -> None:
        super().__init__()
        wide = width * factor
        self.widen, self.bn1 = nn.Conv2d(width, wide, 1, groups=2, bias=False), nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.bn2, self.excite = nn.BatchNorm2d(wide), Excitation(wide)
        self.narrow, self.bn3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)
        self.act, self.shuffle = nn.Hardswish(), shuffle

    def forward(self, x: Tensor) -> Tensor:
        y = self.shuffle(self.act(self.bn1(self.widen(x))))
        y = self.excite(self.act(self.bn2(self.depthwise(y))))
        return x + self.bn3(self.narrow(y))


class MobileNet(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.stages = nn.Sequential(*(Inverted(width) for _ in range(depth)))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.stem(x))) * self.gain[:, None, None]
        return self.head(self.dropout(self.stages(x).mean((2, 3))))


def mobile() -> Subject:
    return subject(MobileNet(), images, F.cross_entropy, batch=32)


class Upscaler(nn.Module):
    """Makes images twice as large from a reduced copy of them, in two ways at once."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, (3, 5), stride=(2, 2), padding=(1, 2))
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.InstanceNorm2d(width, affine=True)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.coarse, self.fine = nn.Conv2d(width, 4, 3, padding=1), nn.Conv2d(width, 1, 1)
        self.shuffle, self.act = nn.PixelShuffle(2), nn.PReLU()
        self.larger = nn.Upsample(scale_factor=2.0, mode="nearest")

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.enter(x)))
        x = x + self.act(self.norm2(self.body(x)))
        return self.shuffle(self.coarse(x)) + self.larger(self.fine(x))


def upscaler() -> Subject:
    def draw(n: int) -> tuple[Tensor, Tensor]:
        pictures, _ = images(n)
        return pictures, pictures

    return subject(Upscaler(), draw, F.mse_loss, batch=32)


# ---- sequences with padding ----------------------------------------------------------------------


def padded_words(n: int) -> tuple[tuple[Tensor, Tensor], None]:
    """Return ids, zero from a random place of each row on, and tags with -100 there."""
    ids, _ = words(n)
    ids = ids[:, :16]
    length = torch.randint(6, 17, (n, 1))
    real = torch.arange(16) < length
    return (ids * real, (ids % 3).masked_fill(~real, -100)), None


class Tagger(nn.Module):
    """Tags each token, and returns its own loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, width, padding_idx=0)
        self.recurrent = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.query, self.norm = nn.Linear(2 * width, 1), nn.LayerNorm(2 * width)
        self.classify = nn.Linear(2 * width, 3)

    def summary(self, states: Tensor, real: Tensor) -> Tensor:
        scores = self.query(states).squeeze(-1).masked_fill(~real, -math.inf)
        return (scores.softmax(1)[:, :, None] * states).sum(1, keepdim=True)

    def loss(self, logits: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=-100)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        real = ids != 0
        states, _ = self.recurrent(self.embedding(ids))
        states = self.norm(states + self.summary(states, real))
        return self.loss(self.classify(states), tags)


def tagger() -> Subject:
    return subject(Tagger(), padded_words, None, batch=32)


class Stacked(nn.Module):
    """Two recurrent layers in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 24, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.gru(x)[0].mean(1)))


def stacked() -> Subject:
    return subject(Stacked(), rows, F.cross_entropy, batch=32)


# ---- adapters ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.b(self.a(x))

    def merged(self, scale: float | None = None) -> nn.Linear:
        """Return one layer that computes the same."""
        made = nn.Linear(self.base.in_features, self.base.out_features, self.base.bias is not None)
        made.load_state_dict(self.base.state_dict())
        with torch.no_grad():
            made.weight += (self.scale if scale is None else scale) * self.b.weight @ self.a.weight
        return made


def adapted() -> Subject:
    """Return the decoder with adapters beside all queries and values."""
    made = decoder()
    for layer in made.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.attention, name, Adapted(getattr(layer.attention, name)))
    return made


# ---- transformers --------------------------------------------------------------------------------


def _causal(model: nn.Module) -> Subject:
    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        ids, _ = words(n)
        return {"input_ids": ids, "labels": ids}, None

    return subject(model, draw, None, batch=16)


def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 18, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return _causal(LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)))


def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 18, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return _causal(GPT2LMHeadModel(GPT2Config(**sizes, n_positions=64, use_cache=False)).eval())


def t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 18, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    config = T5Config(
        **sizes, num_heads=4, decoder_start_token_id=0, use_cache=False, dropout_rate=0.0
    )

    def draw(n: int) -> tuple[dict[str, Tensor], None]:
        ids, _ = words(n)
        return {"input_ids": ids[:, :16], "labels": ids[:, 16:].contiguous()}, None

    return subject(T5ForConditionalGeneration(config), draw, None, batch=16)


class Mixture(nn.Module):
    """The two experts that the router prefers, of all, by their shares."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(64, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)) for _ in range(experts)
        )
        self.head = nn.Linear(64, 10)

    def mix(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts], 1)

    def share(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        return torch.zeros(len(x), self.router.out_features).scatter(1, chosen, weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.einsum("ne,ned->nd", self.share(x), self.mix(x)))


def mixture() -> Subject:
    return subject(Mixture(), flat, F.cross_entropy)
