"""Models whose layers branch and meet: towers, gates, loops, shortcuts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Towers(nn.Module):
    """Two towers on one input, a residual block behind the first, and a head on their sum."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)
        self.block = Residual()
        self.deep, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        a = self.block(self.left(x))
        return self.head(a + self.deep(self.right(x)))


class Residual(nn.Module):
    """A branch beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


class Loop(nn.Module):
    """A cell that is called three times, with a norm after it."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        for _ in range(3):
            x = self.norm(x + self.cell(x))
        return x


class Hidden(nn.Module):
    """What numbers show where autograd's graph does not; a layer aside from the output."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.aside = nn.Linear(16, 8), nn.Linear(4, 2), nn.Linear(16, 8)

    def forward(self, x):
        h = self.a(x)
        self.aside(x)
        return self.b(h.detach().reshape(-1, 4))


class Modulated(nn.Module):
    """A block whose scale, shift and gate all start at zero, so that it returns what it gets."""

    def __init__(self):
        super().__init__()
        self.norm, self.ada = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 48)
        self.act, self.fc = nn.SiLU(), nn.Linear(16, 16)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c):
        scale, shift, gate = self.ada(self.act(c)).chunk(3, dim=-1)
        return x + gate * self.fc(self.norm(x) * (1 + scale) + shift)


class Conditioned(nn.Module):
    """Modulated blocks on one condition, and a head."""

    def __init__(self):
        super().__init__()
        self.condition, self.stem = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        c, h = self.condition(x), self.stem(x)
        for block in self.blocks:
            h = block(h, c)
        return self.head(h)


class Scaled(nn.Module):
    """Branches that a parameter of zero scales away."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.zeros(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.fc(x)
        return self.head(h + self.scale * self.other(h))


class Shuffled(nn.Module):
    """Slices, a concatenation, a product, a cross-over between two streams."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c, self.d = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x):
        a, b = self.a(x[:, :8]), self.b(x[:, 8:])
        return self.d(self.c(torch.cat([b, a * b], dim=1)) + a)


class ThroughPython(nn.Module):
    """Hands values on through NumPy or a list; a table of constants is beside them."""

    def __init__(self, way):
        super().__init__()
        self.a, self.b, self.position = nn.Linear(16, 8), nn.Linear(8, 4), nn.Embedding(8, 8)
        self.way = way

    def forward(self, x):
        places = self.position(torch.tensor([3] * len(x)))
        return self.b(self.way(self.a(x)).reshape(len(x), -1)), places


class Twins(nn.Module):
    """Two towers that are given the batch, one of them another multiple of it, and a head."""

    def __init__(self, *dead, factor=1.0):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8), nn.Tanh())
            for _ in range(2)
        )
        self.head, self.factor = nn.Linear(8, 2), factor
        for tower in dead:
            nn.init.constant_(self.get_submodule(tower)[0].bias, -50.0)

    def forward(self, x):
        return self.head(self.left(x) + self.right(self.factor * x))


class Detached(nn.Module):
    """A critic beside a policy, on features that it is given detached."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
        self.policy, self.critic = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.aside = nn.Linear(8, 8)

    def forward(self, x):
        h = self.encoder(x)
        self.aside(h)
        return self.policy(h), self.critic(h.detach())


class Silent(nn.Module):
    """A layer that dies, and a logarithm of its own between it and layers that meet no number."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(16, 32), nn.ReLU()
        self.conv, self.norm = nn.Linear(32, 16), nn.BatchNorm1d(16)
        nn.init.constant_(self.fc.bias, -50.0)

    def forward(self, x):
        return self.norm(self.conv(torch.log(self.act(self.fc(x)))))


class Wide(nn.Module):
    """Many towers beside each other."""

    def __init__(self, count):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


class Block(nn.Module):
    """A residual block with a functional activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        """Compute."""
        return x + self.fc2(F.relu(self.norm(self.fc1(x))))


class Net(nn.Module):
    """Two blocks and a head, with a mask as keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=1.0, *, mask=None):
        """Compute."""
        h = self.blocks(x) * scale
        return self.head(h if mask is None else h * mask)
