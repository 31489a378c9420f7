"""Models that are exported as graphs, and edits of such graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def between(*layers: nn.Module) -> nn.Sequential:
    """Two layers around others."""
    return nn.Sequential(nn.Linear(16, 16), *layers, nn.Linear(16, 16)).eval()


def convolutions(**settings: Any) -> nn.Sequential:
    """A convolution after another."""
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, **settings)).eval()


class Functional(nn.Module):
    """Calls its activation, whose slope the module does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.leaky_relu(self.fc(x)))


class Recurrent(nn.Module):
    """A recurrent layer both ways."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.rnn = kind(16, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.fc(x))[0]


def edited(proto: Any, operator: str, **attributes: Any) -> Any:
    """A copy whose last node of an operator has other attributes."""
    from onnx import helper

    made = copy.deepcopy(proto)
    node = [one for one in made.graph.node if one.op_type == operator][-1]
    kept = [one for one in node.attribute if one.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(*one) for one in attributes.items())])
    return made


def reweighted(proto: Any, shape: tuple[int, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with the last initializer of a shape changed."""
    from onnx import numpy_helper

    made = copy.deepcopy(proto)
    one = [one for one in made.graph.initializer if tuple(one.dims) == shape][-1]
    values = change(numpy_helper.to_array(one)).copy()
    one.CopyFrom(numpy_helper.from_array(values, one.name))
    return made


class Own(nn.Module):
    """A module of the user's own, whose attribute has the name of a setting inside."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.fc, self.dim, self.factor = nn.Linear(16, 16), 7, factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.fc(x), x], dim=-1).cumsum(dim=-1) * self.factor


class Mapped(nn.Module):
    """Normalises within each sample: plainly, or by a map over the samples or over another axis."""

    def __init__(self, axis: int | None = None) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None:
            h = torch.stack([F.relu(self.fc(one) - one.mean(0)) for one in x])
        else:
            h = torch.vmap(lambda one: F.relu(self.fc(one) - one.mean(0)), self.axis, self.axis)(x)
        return self.head(F.gelu(self.norm(h)))


class Averaged(nn.Module):
    """Divides a sum by the length, which a trace keeps as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc(x)).sum(1) / float(x.shape[1]))


class Functions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(F.gelu(x), dim=-1)


class Classifier(nn.Module):
    """Tied weights, a buffer that is written to, dictionaries in and out, a block called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = Block()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        self.seen.add_(1.0)
        hidden = self.embedding(ids) * mask.unsqueeze(-1)
        hidden = self.block(hidden)
        hidden = self.block(hidden).mean(1)
        hidden = self.norm(hidden)
        return {"logits": self.head(self.drop(hidden)), "hidden": hidden}


class Block(nn.Module):
    """A module, a functional layer, and a layer that a method of the user's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.act = nn.SiLU()
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        up = self.act(self.up(x))
        gated = F.gelu(up)
        return x + self.last(gated)

    def last(self, x: Tensor) -> Tensor:
        return self.down(x)


def ids(samples: int = 4, length: int = 5) -> dict[str, Tensor]:
    """Return a batch for it."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, 11, (samples, length), generator=generator)
    return {"ids": chosen, "mask": torch.ones(samples, length)}


def classifier() -> nn.Module:
    """Return it in evaluation mode, the same each time."""
    torch.manual_seed(0)
    return Classifier().eval()


class CastingNorm(nn.Module):
    """A root mean square norm as libraries write it: the cast gives its input where it is float."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, values: Tensor) -> Tensor:
        cast = values.to(torch.float32)
        return self.weight * cast * torch.rsqrt(cast.pow(2).mean(-1, keepdim=True) + 1e-6)


class PreNorm(nn.Module):
    """A block with a norm before its layer, and a sum with what went into the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = CastingNorm(), nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.fc(self.norm(values))


class Summed(nn.Module):
    """A block that ends in an activation, which static quantisation does by its rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(x) + x)


X, SERIES, IMAGES = torch.randn(8, 16), torch.randn(4, 10, 16), torch.randn(4, 4, 8, 8)


DOUBLED, TURNED = (lambda w: w * 2), (lambda w: w.T)


GRAPHS: dict[str, tuple[nn.Module, Tensor, list[tuple[Any, Any, str]]]] = {
    "pointwise": (
        between(
            nn.LayerNorm(16), nn.LeakyReLU(0.2), nn.BatchNorm1d(16), nn.GELU(), nn.Hardsigmoid()
        ), X, [
            ("LayerNormalization", {"epsilon": 1e-3}, "1"),
            ("LeakyRelu", {"alpha": 0.01}, "2"),
            ("BatchNormalization", {"epsilon": 0.5}, "3"),
            ("Gelu", {"approximate": "tanh"}, "4"),
            ("HardSigmoid", {"alpha": 0.2}, "5"),
        ],
    ),
    "function": (
        Functional().eval(), X,
        [("LeakyRelu", {"alpha": 0.2}, "leaky_relu"), ((16, 16), TURNED, "head")],
    ),
    "images": (
        convolutions(padding=1).append(nn.AvgPool2d(3, 1, 1)).eval(), IMAGES, [
            ("Conv", {"pads": [0, 0, 2, 2]}, "1"),
            ("Conv", {"dilations": [2, 2]}, "1"),
            ("AveragePool", {"count_include_pad": 0}, "2"),
        ],
    ),
    "LSTM": (Recurrent(nn.LSTM).eval(), SERIES, [((2, 32, 8), DOUBLED, "rnn")]),
    "MatMul": (between(nn.Softmax(-1)), SERIES, [("Softmax", {"axis": 1}, "1")]),
}  # fmt: skip


class FoldedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x))) + x


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.Sequential(FoldedBlock(), FoldedBlock())
        self.fc = nn.Linear(4, 12)
        self.mix = nn.Linear(12, 12)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.fc(self.blocks(self.stem(x)).mean((2, 3))) * self.scale
        x = self.norm(self.mix(self.act(self.mix(x))))
        return {"logits": F.silu(x), "norm": x}
