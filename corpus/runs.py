"""Pairs of small models, before and after a change: look-alikes that changed nothing, and faults.

Each function gives the two sides; what is to be said of them stands in `LOOK_ALIKES` and `FAULTS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Side:
    """What is inspected on one side."""

    model: nn.Module
    inputs: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    threads: int = 1


Pair = tuple[Side, Side]


def images(count: int = 32, seed: int = 1, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, 3, 12, 12, generator=g), _labels(count, g)


def rows(count: int = 64, seed: int = 1, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, 20, generator=g), _labels(count, g)


def tokens(count: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (count, 12), generator=g), _labels(count, g)


def _labels(count: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 5, (count,), generator=g)


class CNN(nn.Module):
    def __init__(self, width: int = 16, stride: int = 1, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = act()
        self.conv2 = nn.Conv2d(width, 16, 3, stride=stride, padding=1)
        self.act2 = act()
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.conv2(x))
        return self.head(self.pool(x).flatten(1))


class Residual(nn.Module):
    def __init__(self, residual: bool = True, factor: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)
        self.residual, self.factor = residual, factor

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x)) * self.factor
        y = self.fc2(F.gelu(self.fc1(x)))
        return self.head(self.norm(x + y if self.residual else y))


class Renamed(nn.Module):
    """`Residual`, with its layers in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(20, 32)
        self.body = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
        self.ln = nn.LayerNorm(32)
        self.classifier = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.body["down"](F.gelu(self.body["up"](x)))
        return self.classifier(self.ln(x + y))


class Attention(nn.Module):
    def __init__(self, scale: float = 0.25, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)
        self.out = nn.Linear(32, 50, bias=False)
        if tied:
            self.out.weight = self.embedding.weight
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        scores = self.query(x) @ self.key(x).mT * self.scale
        x = x + self.drop(scores.softmax(-1) @ self.value(x))
        x = self.norm(x)
        return self.head(x.mean(1)) + self.out(x).mean(1)[:, :5]


class TwoStage(nn.Module):
    def __init__(self, detach: bool = False, skip: bool = False, times: int = 1) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32))
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)
        self.detach, self.skip, self.times = detach, skip, times

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        x = x.detach() if self.detach else x
        for _ in range(0 if self.skip else self.times):
            x = torch.tanh(self.middle(x))
        return self.head(x)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    )


# ---- look-alikes ----


def same() -> Pair:
    return Side(seeded(CNN), *images()), Side(seeded(CNN), *images())


def other_threads() -> Pair:
    return Side(seeded(CNN), *images()), Side(seeded(CNN), *images(), threads=2)


def channels_last() -> Pair:
    inputs, target = images()
    channels = inputs.contiguous(memory_format=torch.channels_last)
    model = seeded(CNN).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Side(seeded(CNN), inputs, target), Side(model, channels, target)


def rename() -> Pair:
    return Side(seeded(Residual), *rows()), Side(seeded(Renamed), *rows())


def identity_added() -> Pair:
    return (
        Side(seeded(_mlp), *rows()),
        Side(nn.Sequential(nn.Identity(), *seeded(_mlp)), *rows()),  # type: ignore[misc]
    )


def other_seed() -> Pair:
    return Side(seeded(CNN), *images()), Side(seeded(CNN, 7), *images(seed=8))


def other_seed_of_attention() -> Pair:
    make = lambda: Attention(dropout=0.1)  # noqa: E731
    return Side(seeded(make), *tokens()), Side(seeded(make, 5), *tokens())


def other_seed_of_mlp() -> Pair:
    return Side(seeded(_mlp), *rows()), Side(seeded(_mlp, 3), *rows())


def larger_batch() -> Pair:
    return Side(seeded(CNN), *images(32)), Side(seeded(CNN), *images(48))


def larger_batch_of_tokens() -> Pair:
    return Side(seeded(Attention), *tokens(16)), Side(seeded(Attention), *tokens(40))


def other_batch() -> Pair:
    return Side(seeded(Residual), *rows()), Side(seeded(Residual), *rows(seed=9))


def other_mask() -> Pair:
    make = lambda: Attention(dropout=0.2)  # noqa: E731
    first = Side(seeded(make), *tokens())
    second = Side(seeded(make), *tokens())
    second.inputs = second.inputs.clone()
    return first, second  # what inspects them leaves the random numbers where they are


def bfloat16() -> Pair:
    inputs, target = rows()
    return (
        Side(seeded(Residual), inputs, target),
        Side(seeded(Residual).bfloat16(), inputs.bfloat16(), target),
    )


def float64() -> Pair:
    inputs, target = images()
    return Side(seeded(CNN), inputs, target), Side(seeded(CNN).double(), inputs.double(), target)


def shuffled() -> Pair:
    inputs, target = rows()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(4))
    return (
        Side(seeded(Residual), inputs, target),
        Side(seeded(Residual), inputs[order], target[order]),
    )


def functional_activation() -> Pair:
    class Functional(CNN):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.conv2(x))
            return self.head(self.pool(x).flatten(1))

    model = seeded(Functional)
    del model.act1, model.act2
    return Side(seeded(CNN), *images()), Side(model, *images())


# ---- faults ----


def dropped_residual() -> Pair:
    return (
        Side(seeded(Residual), *rows()),
        Side(seeded(lambda: Residual(residual=False)), *rows()),
    )


def attention_not_scaled() -> Pair:
    return Side(seeded(Attention), *tokens()), Side(seeded(lambda: Attention(scale=1.0)), *tokens())


def slightly_scaled() -> Pair:
    return Side(seeded(Residual), *rows()), Side(seeded(lambda: Residual(factor=1.01)), *rows())


def dead_layer() -> Pair:
    model = seeded(_mlp)
    nn.init.constant_(model[2].bias, -10.0)  # type: ignore[index,arg-type]
    return Side(seeded(_mlp), *rows()), Side(model, *rows())


def frozen_encoder() -> Pair:
    model = seeded(TwoStage)
    model.encoder.requires_grad_(False)
    return Side(seeded(TwoStage), *rows()), Side(model, *rows())


def detached_encoder() -> Pair:
    return Side(seeded(TwoStage), *rows()), Side(seeded(lambda: TwoStage(detach=True)), *rows())


def skipped_layer() -> Pair:
    return Side(seeded(TwoStage), *rows()), Side(seeded(lambda: TwoStage(skip=True)), *rows())


def called_twice() -> Pair:
    return Side(seeded(TwoStage), *rows()), Side(seeded(lambda: TwoStage(times=2)), *rows())


def wider_layer() -> Pair:
    return Side(seeded(CNN), *images()), Side(seeded(lambda: CNN(width=24)), *images())


def stride() -> Pair:
    return Side(seeded(CNN), *images()), Side(seeded(lambda: CNN(stride=2)), *images())


def other_gain() -> Pair:
    model = seeded(_mlp)
    with torch.no_grad():
        model[2].weight *= 2  # type: ignore[index,operator]
    return Side(seeded(_mlp), *rows()), Side(model, *rows())


def other_gain_everywhere() -> Pair:
    model = seeded(_mlp)
    for layer in (model[0], model[2], model[4]):  # type: ignore[index]
        nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
    return Side(seeded(_mlp), *rows()), Side(model, *rows())


def dropout_left_out() -> Pair:
    first = seeded(lambda: Attention(dropout=0.3))
    return Side(first, *tokens()), Side(seeded(lambda: Attention(dropout=0.0)), *tokens())


def norm_in_evaluation() -> Pair:
    model = seeded(CNN)
    model.bn1.eval()
    return Side(seeded(CNN), *images()), Side(model, *images())


def other_activation() -> Pair:
    return Side(seeded(CNN), *images()), Side(seeded(lambda: CNN(act=nn.SiLU)), *images())


def nan_weight() -> Pair:
    model = seeded(Residual)
    with torch.no_grad():
        model.fc2.weight[0, 0] = float("nan")
    return Side(seeded(Residual), *rows()), Side(model, *rows())


def untied() -> Pair:
    return (
        Side(seeded(lambda: Attention(tied=True)), *tokens()),
        Side(seeded(lambda: Attention(tied=False)), *tokens()),
    )


def summed_loss() -> Pair:
    one, other = Side(seeded(Residual), *rows()), Side(seeded(Residual), *rows())
    other.loss = lambda output, target: F.cross_entropy(output, target, reduction="sum")
    return one, other


def other_eps() -> Pair:
    model = seeded(Residual)
    model.norm.eps = 0.1
    return Side(seeded(Residual), *rows()), Side(model, *rows())


def added_layer() -> Pair:
    model = seeded(_mlp)
    longer = nn.Sequential(*list(model)[:4], nn.Linear(64, 64), nn.ReLU(), model[4])  # type: ignore[arg-type,index]
    return Side(copy.deepcopy(model), *rows()), Side(longer, *rows())


def added_layer_shifts_the_seed() -> Pair:
    def longer() -> nn.Module:
        first = nn.Linear(20, 64)
        extra = nn.Linear(64, 64)
        return nn.Sequential(
            first, nn.ReLU(), extra, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
        )

    return Side(seeded(_mlp), *rows()), Side(seeded(longer), *rows())


@dataclass
class Expected:
    """What has to be said of a pair.

    Args:
        kinds: kinds of changes of which at least one is there and names one of `layers`.
        layers: labels of layers; empty where none need be named.
        worse: whether the head is worse than the base; ``None`` where either is right.
    """

    kinds: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    worse: bool | None = None


LOOK_ALIKES: list[Callable[[], Pair]] = [
    same,
    other_threads,
    channels_last,
    rename,
    identity_added,
    other_seed,
    other_seed_of_attention,
    other_seed_of_mlp,
    larger_batch,
    larger_batch_of_tokens,
    other_batch,
    other_mask,
    bfloat16,
    float64,
    shuffled,
    functional_activation,
]
"""Of none is anything worse, and of none a statistic is said to have moved."""

FAULTS: dict[Callable[[], Pair], Expected] = {
    dropped_residual: Expected({"statistic"}, {"norm"}),
    attention_not_scaled: Expected({"statistic"}, {"drop", "softmax", "Attention.softmax"}),
    slightly_scaled: Expected({"statistic"}, {"fc1", "relu"}),
    dead_layer: Expected({"finding"}, {"3"}, worse=True),
    frozen_encoder: Expected({"parameters", "layer"}, {"encoder.0"}),
    detached_encoder: Expected({"layer", "finding"}, {"encoder.0"}),
    skipped_layer: Expected({"layer"}, {"middle"}),
    called_twice: Expected({"layer", "calls"}, {"middle"}),
    wider_layer: Expected({"shape"}, {"conv1"}),
    stride: Expected({"shape"}, {"conv2"}),
    other_gain: Expected({"weights"}, {"2.weight"}),
    other_gain_everywhere: Expected({"weights"}, {"0.weight"}),
    dropout_left_out: Expected({"statistic"}, {"drop"}),
    norm_in_evaluation: Expected({"statistic"}, {"bn1.running_mean"}),
    other_activation: Expected({"layer"}, {"act1"}),
    nan_weight: Expected({"finding"}, {"fc2"}, worse=True),
    untied: Expected({"parameters"}, {"out"}),
    summed_loss: Expected({"statistic"}, {"loss"}),
    other_eps: Expected({"statistic"}, {"norm"}),
    added_layer: Expected({"layer"}, {"4"}),
    added_layer_shifts_the_seed: Expected({"layer"}),
}
