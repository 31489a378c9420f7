"""Values that go twice through one thing, to the wrong end of an edge, or nowhere by chance."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.checks.parts import Net, holding, normal

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


def passed(forward: Any, **layers: Any) -> Any:
    """Return a network of what a layer makes, and of what is done with it."""
    return Net(lambda m, x: m.head(forward(m, m.fc(x))), fc=(16, 16), head=(16, 4), **layers), (
        torch.randn(64, 16),
    )


def pooled(one: nn.Module, other: nn.Module) -> Any:
    """Return two pools of one value, side by side."""
    return passed(lambda m, x: torch.cat([m.one(x), m.other(x)], 1), one=one, other=other)


def padded(row: float, first: int, *, trains: bool = True, head: Any = (16, 4)) -> Any:
    """Return a table whose row of the padding holds a number, and ids from the first."""
    table = nn.Embedding(20, 16, padding_idx=0)
    table.weight.data[0] = row
    table.weight.requires_grad_(trains)
    ids = torch.arange(first, first + 64).view(8, 8) % (20 - first) + first
    return Net(lambda m, ids: m.head(m.table(ids).mean(1)), table=table, head=head), (ids,)


def tied() -> Any:
    """Return such a table, whose weights are the head's, too."""
    head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
    model, inputs = padded(0.5, 0, head=head)
    head[2].weight = model.table.weight
    return model, inputs


def decoded(states: Any) -> Any:
    """Return an LSTM that begins with states made of those of another, or of its own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.fc(x).view(8, 8, 16)
        _, (h, c) = m.encoder(x)
        return m.head(m.decoder(x, states(h, c))[0][:, -1])

    parts = {name: nn.LSTM(16, 16, batch_first=True) for name in ("encoder", "decoder")}
    return Net(forward, fc=(16, 16), head=(16, 4), **parts), numbers()


def stepped(states: Any) -> Any:
    """Return a cell that is given states of its own at each step, and the inputs or its own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h, c = x, torch.zeros(64, 16)
        for _ in range(3):
            h, c = m.cell(*states(x, h, c))
        return m.head(h)

    return Net(forward, cell=nn.LSTMCell(16, 16), head=(16, 4)), numbers()


FAULTS: dict[str, Any] = {
    "two averages side by side": (
        lambda: pooled(nn.AvgPool1d(2), nn.AvgPool1d(2)), "warn", "", "computed twice", "torch.cat("
    ),
    "two means added": (
        lambda: passed(lambda m, x: x.mean(1, keepdim=True) + x.mean(1, keepdim=True) + x),
        "warn", "", "computed twice",
    ),
    "a norm of its own result": (
        lambda: passed(lambda m, x: m.norm(m.norm(x)), norm=nn.LayerNorm(16)), "warn", "norm",
        "its own result",
    ),
    "a dropout that nothing takes": (
        lambda: passed(lambda m, x: (m.drop(x), x)[1], drop=nn.Dropout(0.5)), "warn", "drop",
        "what it returns is dropped",
    ),
    "a dropout by hand that nothing takes": (
        lambda: passed(lambda m, x: (F.dropout(x, 0.5, m.training), x)[1]), "warn", "",
        "nothing takes the result of `dropout`",
    ),
    "a row of the padding that was drawn": (
        lambda: padded(0.5, 0), "warn", "table", "is not zero", "0.5"
    ),
    "the hidden state of another as the cell": (
        lambda: decoded(lambda h, c: (h[:, torch.arange(8)], h[:, torch.arange(8)])),
        "warn", "decoder", "a hidden state as its cell",
    ),
    "a cell's own hidden state as its cell": (
        lambda: stepped(lambda x, h, c: (x, (h, h))), "fail", "cell", "a hidden state as its cell",
    ),
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
    "an average and a maximum": lambda: pooled(nn.AvgPool1d(2), nn.MaxPool1d(2)),
    "averages of two widths": lambda: pooled(
        nn.AvgPool1d((3,), stride=2, padding=1), nn.AvgPool1d((1,), stride=2)
    ),
    "means along two axes": lambda: passed(lambda m, x: x.mean(1, keepdim=True) + x.mean(0) + x),
    "two norms in a row": lambda: passed(
        lambda m, x: m.two(m.one(x)), one=nn.LayerNorm(16), two=nn.LayerNorm(16)
    ),
    "a norm before and behind a branch": lambda: passed(
        lambda m, x: m.norm(x + m.norm(x).tanh()), norm=nn.LayerNorm(16)
    ),
    "two dropouts of one value": lambda: passed(
        lambda m, x: m.drop(x) + m.drop(x) + F.dropout(x, 0.5, m.training), drop=nn.Dropout(0.5)
    ),
    "a row of the padding that no id asks for": lambda: padded(0.5, 1),
    "a row of the padding in a table that is frozen": lambda: padded(0.5, 0, trains=False),
    "a row of the padding in a table that the head shares": tied,
    "a row of the padding in a trained model": lambda: padded(
        0.5, 0, head=holding(nn.Linear(16, 4), weight=normal(0.2), bias=normal(0.2))
    ),
    "a row of zeros for the padding": lambda: padded(0.0, 0),
    "both states of another": lambda: decoded(lambda h, c: (h, c)),
    "states of zeros": lambda: decoded(lambda h, c: (torch.zeros_like(h), torch.zeros_like(h))),
    "one value for both states": lambda: decoded(lambda h, c: (h.tanh(), h.tanh())),
    "a cell that reads its own hidden state": lambda: stepped(lambda x, h, c: (h, (h, c))),
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
