"""Small models of five kinds, written so that a refactor or a fault is one argument away."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model with weights that depend on `seed` only."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


class Mlp(nn.Module):
    """A perceptron with layers by name."""

    def __init__(self, width: int = 32, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(16, width), activation()
        self.fc2, self.act2 = nn.Linear(width, width), activation()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.fc1(x))
        x = self.act2(self.fc2(x))
        return self.head(self.norm(x))


class Cnn(nn.Module):
    """Two convolutions with batch norm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        return self.head(self.pool(x).flatten(1))


class Residual(nn.Module):
    """A residual block of a ResNet."""

    def __init__(self, channels: int, *, skip: float = 1.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.skip * x)


class ResNet(nn.Module):
    """A stem and residual blocks."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(8) for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Branches(nn.Module):
    """Two branches that share what has no parameters, run in either order."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.act = nn.LayerNorm(16, elementwise_affine=False), nn.GELU()
        self.order = order or ("left", "right")

    def forward(self, x: Tensor) -> Tensor:
        made = {name: self.act(self.norm(getattr(self, name)(x))) for name in self.order}
        return self.head(made["left"] - made["right"])


class Signs(nn.Module):
    """Calls that no layer with parameters tells apart."""

    def __init__(self, *order: int, keep: bool = True) -> None:
        super().__init__()
        self.first, self.act, self.order, self.keep = nn.Linear(16, 8), nn.ReLU(), order, keep

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        made = {sign: self.act(sign * x) for sign in self.order}
        return made[1] + (made[-1] if self.keep else made[-1].detach())


class Repeated(nn.Module):
    """One layer three times, or three layers."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(3):
            x = self.act(self.layers[number % len(self.layers)](x))
        return self.head(x)


class Attention(nn.Module):
    """Self-attention of several heads, with one projection or three."""

    def __init__(
        self, width: int, heads: int = 2, *, causal: bool = True, fused: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.scale = heads, causal, 1 / math.sqrt(width // heads)
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, a head each."""
        parts = (
            self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        )
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = q @ k.transpose(-2, -1) * self.scale
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FusedAttention(Attention):
    """The same by `scaled_dot_product_attention`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block, normalised before."""

    def __init__(
        self, width: int, attention: Callable[..., nn.Module] = Attention, **options: Any
    ) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), attention(width, **options)
        self.ln2, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(self.act(self.up(self.ln2(x))))


class Gpt(nn.Module):
    """A tiny decoder with tied embeddings."""

    def __init__(
        self,
        depth: int = 3,
        width: int = 24,
        block: Callable[..., nn.Module] = Block,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(block(width, **options) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def bert() -> nn.Module:
    """Return a small BERT of the transformers library, without dropout."""
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=48, max_position_embeddings=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def batch(model: nn.Module) -> Any:
    """Return a batch for one of these models."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Mlp | Branches | Signs | Repeated):
        return torch.randn(8, 16, generator=generator)
    if isinstance(model, Cnn | ResNet):
        return torch.randn(4, 3, 12, 12, generator=generator)
    ids = torch.randint(40, (2, 10), generator=generator)
    return ids if isinstance(model, Gpt) else {"input_ids": ids}
