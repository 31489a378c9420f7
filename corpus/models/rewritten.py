"""Models written anew that compute the same: other axes, masks, merged and split layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Scored(nn.Module):
    """Scores with a causal mask, a softmax, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.lowest, self.scale, self.shift = -math.inf, 1.0, 0.0
        self.reentrant = False

    def attend(self, x: Tensor) -> Tensor:
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scale * self.q(x) @ self.k(x).mT + self.shift
        return torch.softmax(scores.masked_fill(future, self.lowest), -1) @ x

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant:
            return self.head(checkpoint(self.attend, x, use_reentrant=True))
        return self.head(self.attend(x))


class Normed(nn.Module):
    """A gain between a linear layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8, eps=0.0), nn.Linear(8, 3)
        self.gain, self.backward_gain = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        scaled = self.gain * x + (self.backward_gain - 1) * (x - x.detach())
        return self.head(self.norm(scaled))


class Beside(nn.Module):
    """A linear layer with a product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Conv1D(nn.Module):
    """A linear layer that keeps its weight transposed, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 12)), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Thirds(nn.Module):
    """The same as three linear layers."""

    def __init__(self, whole: Conv1D) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        parts = zip(whole.weight.chunk(3, 1), whole.bias.chunk(3), strict=True)
        for linear, (weight, bias) in zip(self.children(), parts, strict=True):
            linear.weight.data, linear.bias.data = weight.data.T.clone(), bias.data.clone()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


class TwoTables(nn.Module):
    """Two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(5, 4), nn.Embedding(7, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.user(ids[:, 0]), self.item(ids[:, 1])], -1))


class OneTable(nn.Module):
    """The same with one, whose rows come one below the other."""

    def __init__(self, model: TwoTables, offset: int) -> None:
        super().__init__()
        self.table, self.head, self.offset = nn.Embedding(12, 4), model.head, offset
        self.table.weight.data = torch.cat([model.user.weight.data, model.item.weight.data])

    def forward(self, ids: Tensor) -> Tensor:
        both = self.table(torch.stack([ids[:, 0], ids[:, 1] + self.offset]))
        return self.head(torch.cat([*both], -1))


class Twice(nn.Module):
    """Returns what its head reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.stopped = nn.Linear(6, 6), nn.Linear(6, 3), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.head(hidden.detach() if self.stopped else hidden), hidden


class Tagger(nn.Module):
    """A recurrent layer over samples first, and a head on its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.lstm = nn.Linear(6, 5), nn.LSTM(5, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.into(x))[0][:, -1])


class TimeFirst(Tagger):
    """The same with steps before samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.into(x).transpose(0, 1))[0][-1])


class StepByStep(nn.Module):
    """The same with a cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.head = nn.Linear(6, 5), nn.LSTMCell(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in self.into(x).unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


def time_first(tagger: Tagger) -> nn.Module:
    """Return the same model with steps before samples."""
    made = TimeFirst()
    made.load_state_dict(tagger.state_dict())
    made.lstm.batch_first = False
    return made


def step_by_step(tagger: Tagger) -> nn.Module:
    """Return the same model with a cell in a loop."""
    made = StepByStep()
    made.into, made.head = copy.deepcopy(tagger.into), copy.deepcopy(tagger.head)
    state = tagger.lstm.state_dict().items()
    made.cell.load_state_dict({key.removesuffix("_l0"): value for key, value in state})
    return made


class Attention(nn.Module):
    """A block with projections that have no bias, whose names an optimisation loses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.out(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.mlp(x)


class Text(nn.Module):
    """Blocks in a list, an encoder of torch's, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Attention() for _ in range(2)])
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.encoder(x))


class Several(nn.Module):
    """Layers with several inputs and outputs of one shape, some of which nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Linear(6, 6), Three(), Three()
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.scale = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.one(x, self.embed(x), x + 1)
        _, h = self.rnn(torch.stack([a, b, c], 1))
        d, e, _ = self.two(h[0], c, a)
        return F.linear(d + e, self.scale)


class Three(nn.Module):
    """Takes three tensors in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, z = self.first(b), self.second(c)
        return a * 2, y + a, z


def having(**attributes: object) -> Callable[[nn.Module], nn.Module]:
    """A copy with other attributes, such as an epsilon of a layer: ``norm__eps``."""

    def candidate(model: nn.Module) -> nn.Module:
        model = copy.deepcopy(model)
        for path, value in attributes.items():
            owner, _, name = path.rpartition("__")
            setattr(model.get_submodule(owner), name, value)
        return model

    return candidate


def spoiled(
    make: Callable[[nn.Module], nn.Module], path: str, by: float
) -> Callable[[nn.Module], nn.Module]:
    """A rewritten copy in which a row of a weight is off."""

    def candidate(model: nn.Module) -> nn.Module:
        made = make(model)
        made.get_parameter(path).data[1] *= by
        return made

    return candidate


class LastSample(TimeFirst):
    """Takes the last sample for the last step: the right shape and other numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.into(x).transpose(0, 1))[0][:, -1][:4])


def last_sample(model: nn.Module) -> nn.Module:
    """The model with the wrong step."""
    made = LastSample()
    made.load_state_dict(model.state_dict())
    made.lstm.batch_first = False
    return made


def merged(scale: float) -> Callable[[nn.Module], nn.Module]:
    """Its adapter merged into the weights beside it."""

    def candidate(model: nn.Module) -> nn.Module:
        made = copy.deepcopy(model)
        made[0].base.weight.data += scale * made[0].b.weight.data @ made[0].a.weight.data
        made[0] = made[0].base
        return made

    return candidate


STEPS, ROWS, SERIES = torch.randn(4, 5, 6), torch.randn(16, 6), torch.randn(4, 9, 6)


IDS = torch.stack([torch.arange(16) % 5, torch.arange(16) % 7], 1)


def adapted() -> nn.Module:
    """A net with an adapter."""
    return nn.Sequential(Beside(), nn.ReLU(), nn.Linear(8, 3))


def normed() -> nn.Module:
    """A net whose norm has nearly no epsilon."""
    made = nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    made[1].eps = 1e-12
    return made


ANY = "any layer"


MASKED = "softmax: its inputs are others, -1e+09 for -inf; what is computed from them agrees"


OTHER_AXES = "lstm: its inputs are "


CASES: dict[str, tuple[Any, Callable[[nn.Module], nn.Module], Tensor, str | None, str]] = {
    "a finite mask": (Scored, having(lowest=-1e9), STEPS, None, MASKED),
    # a softmax cancels the one and not the other
    "a shift of all scores": (Scored, having(shift=0.5), STEPS, None, "softmax: its inputs are"),
    "a scale of all scores": (Scored, having(scale=0.999), STEPS, "Scored", ""),
    "a gradient that a reentrant checkpoint hides": (
        Scored, having(reentrant=True), STEPS.clone().requires_grad_(), None,
        "softmax: its gradient was not seen in the candidate",
    ),
    # neither what the norm gives nor the gradient of a weight knows of it
    "a scale that a norm cancels": (
        Normed, having(gain=0.9), ROWS, None, "norm: its inputs are others"
    ),
    "and one of the gradient alone": (
        Normed, having(gain=0.9, backward_gain=0.6), ROWS, ANY, ""
    ),
    "a merged adapter": (adapted, merged(1.0), ROWS, None, ""),
    "one that is merged wrongly": (adapted, merged(0.5), ROWS, "0", ""),
    # both embeddings in one tensor fit neither; the layer after them tells
    "one table for two": (
        TwoTables, lambda m: OneTable(copy.deepcopy(m), 5), IDS, None, ""
    ),
    "read from the wrong row": (
        TwoTables, lambda m: OneTable(copy.deepcopy(m), 4), IDS, ANY, ""
    ),
    # beside a variance of ten thousand it is no more than rounding
    "an epsilon that shows in no number": (
        normed, having(**{"1__eps": 1e-11}), 100 * ROWS, None,
        "1: eps is 1e-11, was 1e-12; no number of this batch shows it",
    ),
    "one that does": (normed, having(**{"1__eps": 0.1}), ROWS, "1", ""),
    # in compiled code a copy, behind what the head reads; where the head gives none, all differs
    "an output that is read inside": (
        Twice, lambda m: torch.compile(copy.deepcopy(m), backend="eager"), torch.ones(4, 6), None,
        "Twice: its gradients are others",
    ),
    "and one whose gradient is stopped": (Twice, having(stopped=True), torch.ones(4, 6), ANY, ""),
    "time first": (Tagger, time_first, SERIES, None, OTHER_AXES),
    "a cell in a loop": (Tagger, step_by_step, SERIES, None, OTHER_AXES),
    "time first, with another weight": (
        Tagger, spoiled(time_first, "lstm.weight_ih_l0", 1.001), SERIES, ANY, ""
    ),
    "a cell with another weight": (
        Tagger, spoiled(step_by_step, "cell.weight_ih", 1.001), SERIES, ANY, ""
    ),
    # the layout of one layer is not blamed for the weights of a later one
    "another weight behind it": (
        Tagger, spoiled(time_first, "head.weight", 1.01), SERIES, "head", ""
    ),
    "the wrong step behind it": (Tagger, last_sample, SERIES, ANY, ""),
}  # fmt: skip
