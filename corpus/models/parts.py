"""What several of the blind controls use, and how one is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.small import flat, images
from corpus.subject import Draw, subject

Make = Callable[[], nn.Module]


def lookalikes_of(shelf: Shelf) -> Callable[..., Callable[[Make], Make]]:
    """Return a decorator that adds the model which a class or function makes to the shelf."""

    def lookalike(
        name: str, draw: Draw, loss: Any = F.cross_entropy, batch: int = 32
    ) -> Callable[[Make], Make]:
        def add(make: Make) -> Make:
            shelf.control(name, lambda: subject(make(), draw, loss, batch))
            return make

        return add

    return lookalike


def zeroed(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: float = 0.99) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int = 4, **options: Any) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def perceptron(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def ffn(width: int) -> nn.Sequential:
    return perceptron(width, 4 * width, width, act=nn.GELU)


def normal(*shape: int, std: float = 0.02) -> nn.Parameter:
    return nn.Parameter(std * torch.randn(*shape))


def tokens(width: int) -> nn.Embedding:
    table = nn.Embedding(18, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


class PlacedTokens(nn.Module):
    """Embeddings of tokens and of their places."""

    def __init__(self, width: int, length: int = 32) -> None:
        super().__init__()
        self.token, self.place = tokens(width), normal(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place[: ids.shape[1]]


class SelfAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attend(q, k, v, self.heads, attn_mask=mask, is_causal=self.causal))


class PreNorm(nn.Module):
    def __init__(self, width: int = 32, causal: bool = False) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), SelfAttention(width, causal=causal)
        self.ln_2, self.mlp = nn.LayerNorm(width), ffn(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallLM(nn.Module):
    """A language model for the cases that build upon one."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = tokens(width), nn.Embedding(64, width)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.h = nn.ModuleList(PreNorm(width, causal=True) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 18, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.trunk(self.embed(ids)))


class Patches(nn.Module):
    """Digits as 16 patches with positions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.proj, self.pos = nn.Conv2d(1, width, 2, stride=2), normal(1, 16, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2) + self.pos


def conv_net(out: int = 32, width: int = 8) -> nn.Sequential:
    """Two strided convolutions and an average over what is left."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, out, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def diffused(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return noised digits, their times and labels, and the noise."""
    clean, labels = images(n)
    noise, t = torch.randn_like(clean), torch.rand(n)
    angle = (t * math.pi / 2)[:, None, None, None]
    return (angle.cos() * clean + angle.sin() * noise, t, labels), noise


def time_features(t: Tensor, width: int) -> Tensor:
    angles = 100 * t[:, None] * torch.exp(-math.log(1e3) * torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.cos(), angles.sin()], -1)


def pictures(n: int) -> tuple[Tensor, Tensor]:
    """Return standardised images twice."""
    x, _ = images(n)
    return x, x


def loss_entry(output: dict[str, Tensor]) -> Tensor:
    return output["loss"]


class Adapter(nn.Module):
    def __init__(self, width: int, bottleneck: int = 8) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), zeroed(nn.Linear(bottleneck, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


def captions(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return digits with the ids of their middle pixels, and the ids that follow."""
    pixels, _ = images(n)
    ids = (pixels.flatten(1)[:, 16:48] * 6 + 4.9).round().long() + 1
    return (pixels, ids[:, :-1]), ids[:, 1:]


def clouds(n: int) -> tuple[Tensor, Tensor]:
    """Return clouds of 24 points on ellipsoids, (n, 24, 3), and which axis is longest."""
    axes = torch.rand(n, 1, 3) + 0.5
    return F.normalize(torch.randn(n, 24, 3), dim=-1) * axes, axes[:, 0].argmax(1)


def unlabelled(n: int) -> tuple[Tensor, None]:
    return images(n)[0], None


def unlabelled_flat(n: int) -> tuple[Tensor, None]:
    return flat(n)[0], None


class Rotary(nn.Module):
    """Tables of sines and cosines in buffers, longer than any sequence here."""

    def __init__(self, size: int, length: int = 128) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos().repeat_interleave(2, -1), persistent=False)
        self.register_buffer("sin", angles.sin().repeat_interleave(2, -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.unflatten(-1, (-1, self.cos.shape[1]))
        turned = torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2)
        n = t.shape[1]
        return (t * self.cos[:n, None] + turned * self.sin[:n, None]).flatten(-2)
