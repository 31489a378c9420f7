"""Healthy controls for what the sweep over other libraries' models (`benchmarks.sweep`) taught.

Each is the design that was objected to, by itself and small. Unhealthy is a false alarm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases.controls import after_training, with_model
from benchmarks.cases.models import rows
from benchmarks.cases.subject import Shelf

SHELF = Shelf()
control = SHELF.control


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
            return values[:, :0]
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


for _window, _what in ((4, "two windows"), (16, "shorter than a window")):
    _healthy = with_model(lambda window=_window: Compressed(window), rows, F.cross_entropy)
    control(f"compressed attention, {_what}", _healthy)
    control(f"compressed attention, {_what}, trained", after_training(_healthy))
