"""Values that leave for Python or NumPy and come back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

Forward = Callable[["Two", Tensor], Tensor]


class Two(nn.Module):
    """Two layers and a table, for forwards of all kinds."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.run = nn.Embedding(8, 8), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def listed_anew(m: Two, x: Tensor) -> Tensor:
    """Compute in lists."""
    rows = [[2 * number for number in row] for row in m.a(x).tolist()]
    return m.b(torch.tensor(rows))


FORWARDS: dict[str, tuple[Forward, str, bool]] = {
    # what takes the values out, and whether nothing is guessed of how they come back
    "listed": (lambda m, x: m.b(torch.tensor(m.a(x).tolist())), "tolist", False),
    "listed anew": (listed_anew, "tolist", False),
    "arrays": (lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy())), "detach", False),
    "arrays anew": (
        lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy() + 1)),
        *("detach", False),
    ),
    "function": (lambda m, x: m.b(np.sin(m.a(x).detach()).float()), "detach", True),
    "copied": (lambda m, x: m.b(torch.tensor(m.a(x))), "tensor", True),
    "chosen": (
        lambda m, x: m.b(x) + m.table(torch.tensor([m.a(x).mean(0).argmax().item()])),
        *("argmax", False),
    ),
}


def logged(m: Two, x: Tensor) -> Tensor:
    """Read for a log and a branch alone."""
    hidden = m.a(x)
    m.norm = hidden.norm().item()
    if hidden.mean() > 100:
        hidden = hidden * 0.5
    return m.b(hidden * 0.5) * 2.0
