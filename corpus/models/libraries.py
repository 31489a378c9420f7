"""Parts of models as libraries ship them, which looked like faults there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.small import rows


class Compressor(nn.Module):
    """Sums windows of tokens up, weighted by a gate (DeepSeek-V4); a rest is left out."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.values, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.window = window

    def forward(self, h: Tensor) -> Tensor:
        values, gate = self.values(h), self.gate(h)
        windows = h.shape[1] // self.window
        if not windows:
            return values.new_zeros(len(h), 0, h.shape[-1])
        values, gate = (
            t[:, : windows * self.window].unflatten(1, (windows, self.window))
            for t in (values, gate)
        )
        return (values * gate.softmax(2)).sum(2)


class Compressed(nn.Module):
    """A classifier of rows that attends to their summaries too, where there are any."""

    def __init__(self, window: int, width: int = 32) -> None:
        super().__init__()
        self.embed, self.compressor = nn.Linear(8, width), Compressor(width, window)
        self.query, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        seen = torch.cat([h, self.compressor(h)], 1)
        return self.head(F.scaled_dot_product_attention(self.query(h), seen, seen).mean(1))


class Pooling(nn.Module):
    """Sums tokens up by an attention with a learnt probe."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(self.probe.expand(len(h), -1, -1), h, h)[0]


class Tower(nn.Module):
    """Returns its states and their summary (SigLIP)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.summary = nn.Linear(8, width), Pooling(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        return h, self.summary(h)


class StatesOnly(nn.Module):
    """Reads the states of a tower, and leaves its summary out."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x)[0].mean(1))


class ScaledConv(nn.Module):
    """A block named after its convolutions, with a scale for each channel (SwiftFormer)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.expand, self.narrow = nn.Conv2d(width, 64, 1), nn.Conv2d(64, width, 1)
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.layer_scale * self.narrow(F.gelu(self.expand(self.depthwise(h))))


def scaled_conv() -> nn.Module:
    stem, end = nn.Conv2d(1, 32, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(32 * 64, 10))
    return nn.Sequential(stem, ScaledConv(), ScaledConv(), end)


class SelfAttention(nn.Module):
    """Attention with its softmax written out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        scores = self.query(h) @ self.key(h).transpose(1, 2) / h.shape[-1] ** 0.5
        return h + torch.softmax(scores, -1) @ self.value(h)


class Rows(nn.Module):
    """Attends over rows; a batch of single rows has nothing to choose (MobileViT, small images)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(8, 32), SelfAttention(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.embed(x)).mean(1))


def single_rows(n: int) -> tuple[Tensor, Tensor]:
    x, labels = rows(n)
    return x[:, 3:4], labels


class Queries(nn.Module):
    """A decoder whose content queries start at zero (DETR); their positions are learnt."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.where = nn.Linear(8, width), nn.Parameter(torch.randn(1, 4, width))
        self.content = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.head = nn.Linear(width, 10)
        for layer in self.content:
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        content = self.content(torch.zeros(len(h), 4, h.shape[-1]))
        seen = F.scaled_dot_product_attention(content + self.where.expand(len(h), -1, -1), h, h)
        return self.head((seen + content).mean(1))


class Indexer(nn.Module):
    """Chooses the rows to attend to, under a loss of its own (DeepSeek-V3.2)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, h: Tensor) -> Tensor:
        return self.score(h.detach()).squeeze(2).topk(4, dim=1).indices


class Sparse(nn.Module):
    """Reads the rows that an indexer chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.indexer, self.head = nn.Linear(8, 32), Indexer(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        chosen = self.indexer(h).unsqueeze(2).expand(-1, -1, h.shape[2])
        return self.head(h.gather(1, chosen).mean(1))


class Adapter(nn.Module):
    """Adds what it makes of a context behind a gate, where there is one (Evolla)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.fc = nn.Parameter(torch.ones(1)), nn.Linear(width, width)

    def forward(self, h: Tensor, context: Tensor | None = None) -> Tensor:
        return h if context is None else h + self.gate.tanh() * self.fc(context)


class WithoutContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.adapter, self.head = nn.Linear(64, 32), Adapter(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.adapter(self.embed(x)))


class ClosedGate(nn.Module):
    """A gated layer whose gate starts at zero (xLSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act, self.head = nn.SiLU(), nn.Linear(64, 10)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(self.act(self.gate(x)) * self.up(x)))
