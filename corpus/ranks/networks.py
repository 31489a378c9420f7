"""Small networks of several kinds, for the ranks of a test."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Rows of `width` numbers to 10 classes."""

    def __init__(self, width: int = 24, hidden: int = 48, drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(drop)
        self.second = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.first(x)))
        return self.head(F.relu(self.second(x)))


class Spare(Mlp):
    """Has a layer that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(48, 48)


class Cnn(nn.Module):
    """Images (n, 3, 12, 12) to 10 classes, normalised by batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(12)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        return self.head(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


class Trunk(nn.Module):
    """The convolutions alone, normalised by groups: images to 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.norm(self.conv1(x))))).mean((2, 3))


class Block(nn.Module):
    """One block of a transformer, normalised before each half."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 4, width // 4).unbind(2)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) * (width // 4) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :], float("-inf"))
        seen = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).reshape(n, t, width)
        x = x + self.drop(self.proj(seen))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Language(nn.Module):
    """Tokens (n, t) of 64 kinds, 0 for padding, to logits (n, 64, t); the head may be tied."""

    def __init__(self, drop: float = 0.0, tied: bool = True, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, padding_idx=0)
        self.place = nn.Embedding(32, 32)
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.place.weight, std=0.05)
        self.blocks = nn.ModuleList(Block(32, drop) for _ in range(blocks))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, tokens == 0)
        return self.head(self.norm(x)).transpose(1, 2)


class Fork(nn.Module):
    """Takes one of two ways, as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 48)
        self.left = nn.Linear(48, 48)
        self.right = nn.Linear(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        way = self.left if x.mean() > 0 else self.right
        return self.head(F.relu(way(F.relu(self.stem(x)))))


class Skipping(nn.Module):
    """Residual blocks, some of which chance leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 48)
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.head = nn.Linear(48, 10)
        self.keep = torch.ones(4, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, keep in zip(self.blocks, self.keep, strict=True):
            x = x + F.relu(block(x)) if keep else x
        return self.head(x)


class Repeating(nn.Module):
    """One block, as often as its input asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 48)
        self.block = nn.Linear(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        x = self.stem(x)
        for _ in range(2 if x.mean() > 0 else 1 + steps):
            x = x + 0.5 * F.relu(self.block(x))
        return self.head(x)


class Fourier(nn.Module):
    """Random features that are drawn once and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(24, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x @ self.projection), torch.cos(x @ self.projection)], -1)


class Features(nn.Module):
    """Fourier features and layers that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.features = Fourier()
        self.net = Mlp(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.features(x))


class Scale(nn.Module):
    """Takes the mean of the data set off and divides by its deviation."""

    def __init__(self, data: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", data.mean(0))
        self.register_buffer("std", data.std(0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Scaled(nn.Module):
    """Scales its input and classifies it."""

    def __init__(self, data: Tensor) -> None:
        super().__init__()
        self.scale = Scale(data)
        self.net = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.scale(x))


class Averaging(nn.Module):
    """Keeps a moving mean of the magnitude of what passes, in training, and divides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("magnitude", torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.magnitude.lerp_(x.abs().mean(0), 0.1)
        return x / self.magnitude


class Gate(nn.Module):
    """The logarithm of what passes, clamped or not."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.clamp(min=self.least))


class Bend(nn.Module):
    """Two linear layers that tensor parallelism cuts, between a norm and a dropout."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return self.head(x)
