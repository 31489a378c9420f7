"""Values that go twice through one thing, to the wrong end of an edge, or nowhere by chance."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.parts import Net

CHECK = "wiring"


def numbers() -> tuple[Tensor]:
    """Return 64 samples of 16 features."""
    return (torch.randn(64, 16),)


def graph() -> tuple[Tensor, Tensor]:
    """Return nodes, and edges from four to each."""
    ends = torch.arange(12).repeat_interleave(4)
    return torch.randn(12, 16), torch.stack([(ends * 5 + torch.arange(48) % 4 + 1) % 12, ends])


def activated(*functions: Any) -> Any:
    """Return a layer with activations behind it, one after another."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.fc(x)
        for function in functions:
            x = function(x)
        return m.head(x)

    return Net(forward, fc=(16, 16), head=(16, 4)), numbers()


def least(clamped: Any) -> Any:
    """Return the lesser of a product, and of what is clamped of it and its factor."""

    def forward(m: Any, x: Tensor) -> Tensor:
        ratio, gain = m.one(x).exp(), m.other(x)
        return torch.minimum(ratio * gain, clamped(ratio, gain))

    return Net(forward, one=(16, 4), other=(16, 4)), numbers()


def farthest(hidden: float, rows: int = 64) -> Any:
    """Return the least product of each sample with others, where its own is hidden in `rows`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.fc(x)
        own = torch.eye(len(x), dtype=torch.bool) & (torch.arange(len(x)) < rows)
        return m.head(x) * (x @ x.T).masked_fill(own, hidden).amin(1, keepdim=True)

    return Net(forward, fc=(16, 16), head=(16, 4)), numbers()


def messages(*, to: int, weigh: Any = lambda message, *_: message) -> Any:
    """Return a layer that sends along edges, and adds up at their source (0) or target (1)."""

    def forward(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        x = m.fc(x)
        sent = weigh(x[edges[0]] / 4, m.score(torch.cat([x[edges[0]], x[edges[1]]], 1)), edges)
        return m.head(x + torch.zeros_like(x).index_add(0, edges[to], sent))

    return Net(forward, fc=(16, 16), score=(32, 1), head=(16, 4)), graph()


def normalised(end: int) -> Any:
    """Return what weighs messages by scores, whose weights sum to one at an end of the edges."""

    def weigh(message: Tensor, score: Tensor, edges: Tensor) -> Tensor:
        weight = score.exp()
        total = torch.zeros(12, 1).index_add(0, edges[end], weight)
        return message * (weight / (total[edges[end]] + 1e-6))

    return weigh


class Turned(nn.Module):
    """Hopes that its backward is called."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def backward(self, grad: Tensor) -> Tensor:
        return -grad


class Reversed(nn.Module):
    """Turns gradients as torch has it."""

    class Function(torch.autograd.Function):
        """Turns a gradient."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -grad

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x)


def held(module: nn.Module) -> Any:
    """Return a model with a module in the middle."""
    return nn.Sequential(nn.Linear(16, 16), module, nn.Linear(16, 4)), numbers()


def skipped(draw: Any) -> Any:
    """Return blocks of which each is skipped where a number that is drawn is small."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(m.blocks):
            x = x + block(x) if draw() > 2 or number % 2 else x
        return m.head(x)

    blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    return Net(forward, blocks=blocks, head=(16, 4)), numbers()


FAULTS: dict[str, Any] = {
    "a relu of a padded relu": (
        lambda: activated(F.relu, lambda x: F.pad(x, (0, 0)), F.relu), "warn", "relu_1",
        "the result of a relu",
    ),
    "the lesser of a product and its clamp": (
        lambda: least(lambda ratio, gain: (ratio * gain).clamp(0.8, 1.2)), "warn", "",
        "of its own `clamp`", "torch.minimum(",
    ),
    "the least of each row is what hides": (
        lambda: farthest(-torch.inf), "fail", "", "row by row, is infinite", "amin(",
    ),
    "messages to who sent them": (lambda: messages(to=0), "fail", "", "copies of itself"),
    "weights that sum to one at the sender": (
        lambda: messages(to=1, weigh=normalised(0)), "warn", "", "by their sums at one end",
    ),
    "a backward of a module": (lambda: held(Turned()), "warn", "1", "nobody calls"),
    "blocks that are skipped by a condition": (
        lambda: skipped(lambda: 0), "warn", "blocks.0", "never called",
    ),
}  # fmt: skip
HEALTHY: dict[str, Any] = {
    "two activations": lambda: activated(F.relu, torch.tanh),
    "a layer between two": lambda: (
        nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        numbers(),
    ),
    "the lesser of a product and that of a clamp": lambda: least(
        lambda ratio, gain: ratio.clamp(0.8, 1.2) * gain
    ),
    "the least of the others": lambda: farthest(torch.inf),
    "a row that is hidden": lambda: farthest(-torch.inf, 1),
    "messages along edges": lambda: messages(to=1),
    "weights that sum to one at the receiver": lambda: messages(to=1, weigh=normalised(1)),
    "a backward of a function": lambda: held(Reversed()),
    "blocks that are skipped by chance": lambda: skipped(random.random),
    "blocks that are skipped by a draw of torch": lambda: skipped(lambda: torch.rand(())),
}  # fmt: skip
