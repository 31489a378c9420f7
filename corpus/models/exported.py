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
