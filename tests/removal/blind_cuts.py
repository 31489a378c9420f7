"""Models with units that are known to go: which a smaller copy is without, and why others stay.

They were written before the code that cuts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from pytest_modelhealth.report.removable import RemovableLayer

DEAD = -1e3
"""A bias that no input of these models makes up for."""


@dataclass(frozen=True)
class Claim:
    """What is known of the units of a layer."""

    inactive: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, int], ...] = ()
    unread: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cut:
    """A model, and what becomes of it.

    Args:
        model: in evaluation mode.
        batch: its positional inputs.
        claims: what is known of units, by layer.
        cut: the units that the smaller copy is without, by layer.
        refused: a word of the reason why a layer keeps units that could go.
    """

    model: nn.Module
    batch: Any
    claims: dict[str, Claim]
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, RemovableLayer]:
        """The claims, as they are given to the code that cuts."""
        modules = dict(self.model.named_modules())
        return {
            name: RemovableLayer(
                name, _units(modules[name]), -1, claim.inactive, claim.duplicates, claim.unread
            )
            for name, claim in self.claims.items()
        }


def _units(module: nn.Module) -> int:
    found = getattr(module, "out_features", None) or getattr(module, "out_channels", None)
    return int(found or 0)


CUTS: dict[str, Callable[[], Cut]] = {}


def case(make: Callable[[], Cut]) -> Callable[[], Cut]:
    """Put a case on the shelf; it is made with a fixed seed."""

    def seeded() -> Cut:
        torch.manual_seed(0)
        made = make()
        made.model.eval()
        return made

    CUTS[make.__name__] = seeded
    return seeded


def kill(module: Any, *units: int) -> None:
    """Let a bias hold units on the flat side of a ReLU."""
    with torch.no_grad():
        module.bias[list(units)] = DEAD


def double(module: Any, unit: int, twin: int) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.ndim:
                tensor[unit] = tensor[twin]


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def warmed(model: nn.Module, batch: Tensor) -> nn.Module:
    """Give batch norms a history."""
    model.train()
    with torch.no_grad():
        for _ in range(30):
            model(batch)
    return model


# Plain.


@case
def mlp() -> Cut:
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    kill(model[0], 3, 7)
    return Cut(model, vectors(32, 10), {"0": Claim((3, 7))}, {"0": (3, 7)})


@case
def mlp_of_several_layers_with_a_chain() -> Cut:
    """What only dead units read is unread: the column left is zero once their rows are gone."""
    model = nn.Sequential(
        nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    kill(model[2], 1, 2)
    with torch.no_grad():
        model[2].weight[[i for i in range(12) if i not in (1, 2)], 5] = 0.0
    claims = {"0": Claim(unread=(5,)), "2": Claim((1, 2))}
    return Cut(model, vectors(32, 10), claims, {"0": (5,), "2": (1, 2)})


@case
def duplicates() -> Cut:
    model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 4))
    double(model[0], 5, 1)
    double(model[0], 12, 1)
    claims = {"0": Claim(duplicates=((5, 1), (12, 1)))}
    return Cut(model, vectors(32, 10), claims, {"0": (5, 12)})


class Digits(nn.Module):
    """Convolution, batch norm, ReLU, pooling, a flattened read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(6 * 4 * 4, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.dropout(F.relu(self.fc1(x.flatten(1))), 0.2, self.training))


@case
def digits_cnn() -> Cut:
    batch = vectors(16, 1, 8, 8)
    model: Any = warmed(Digits(), batch)
    with torch.no_grad():
        model.bn1.bias[[0, 6]] = -50.0
    kill(model.conv2, 2)
    kill(model.fc1, 4, 5, 19)
    claims = {"conv1": Claim((0, 6)), "conv2": Claim((2,)), "fc1": Claim((4, 5, 19))}
    return Cut(model, batch, claims, {"conv1": (0, 6), "conv2": (2,), "fc1": (4, 5, 19)})


@case
def duplicates_behind_batch_norm_and_flatten() -> Cut:
    batch = vectors(16, 1, 8, 8)
    model: Any = warmed(Digits(), batch)
    double(model.conv1, 6, 2)
    double(model.bn1, 6, 2)
    double(model.conv2, 5, 0)
    claims = {"conv1": Claim(duplicates=((6, 2),)), "conv2": Claim(duplicates=((5, 0),))}
    return Cut(model, batch, claims, {"conv1": (6,), "conv2": (5,)})


@case
def vgg_like() -> Cut:
    features = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(3),
    )  # fmt: skip
    classifier = nn.Sequential(
        nn.Flatten(), nn.Linear(12 * 9, 24), nn.ReLU(True), nn.Dropout(), nn.Linear(24, 5)
    )
    batch = vectors(8, 3, 12, 12)
    model: Any = warmed(nn.Sequential(features, classifier), batch)
    with torch.no_grad():
        model[0][1].bias[1] = model[0][5].bias[11] = -50.0
    kill(model[1][1], 0, 23)
    claims = {"0.0": Claim((1,)), "0.4": Claim((11,)), "1.1": Claim((0, 23))}
    return Cut(model, batch, claims, {"0.0": (1,), "0.4": (11,), "1.1": (0, 23)})


def _mobile() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


@case
def depthwise_separable() -> Cut:
    """A channel of the depthwise convolution and the one that it reads go together."""
    batch = vectors(8, 3, 8, 8)
    model: Any = warmed(_mobile(), batch)
    with torch.no_grad():
        model[4].bias[5] = -50.0
    claims = {"0": Claim(unread=(5,)), "3": Claim((5,))}
    return Cut(model, batch, claims, {"0": (5,), "3": (5,)})


@case
def dead_before_depthwise_and_constant_behind() -> Cut:
    """It is zero before the depthwise convolution, and its batch norm makes a constant of that."""
    batch = vectors(8, 3, 8, 8)
    model: Any = warmed(_mobile(), batch)
    with torch.no_grad():
        model[1].bias[5] = -50.0
        model[4].bias[5] = 3.0
    return Cut(model, batch, {"0": Claim((5,))}, refused={"0": "constant"})


@case
def grouped_convolution() -> Cut:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 2, 1)
    )
    kill(model[0], 3)
    kill(model[2], 6)
    refused = {"0": "group", "2": "group"}
    return Cut(model, vectors(8, 3, 8, 8), {"0": Claim((3,)), "2": Claim((6,))}, refused=refused)


@case
def transposed_convolution() -> Cut:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(6, 5, 2, stride=2), nn.BatchNorm2d(5), nn.LeakyReLU(),
        nn.Conv2d(5, 3, 3),
    )  # fmt: skip
    kill(model[0], 2)
    with torch.no_grad():
        model[5].weight[:, 4] = 0.0
    claims = {"0": Claim((2,)), "2": Claim(unread=(4,))}
    return Cut(model, vectors(4, 3, 8, 8), claims, {"0": (2,), "2": (4,)})


@case
def convolutions_of_one_and_three_dimensions() -> Cut:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a1, self.a2 = nn.Conv1d(2, 6, 3), nn.Conv1d(6, 3, 3)
            self.norm, self.pool = nn.BatchNorm1d(6), nn.AvgPool1d(2)
            self.b1, self.b2 = nn.Conv3d(2, 5, 3), nn.Conv3d(5, 3, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.a2(self.pool(F.relu(self.norm(self.a1(x)))))
            y = self.b2(F.max_pool3d(F.silu(self.b1(y)), 2))
            return x.mean(2) + y.mean((2, 3, 4))

    model = Both()
    with torch.no_grad():
        model.norm.bias[4] = -50.0
    kill(model.b1, 1)
    batch = (vectors(4, 2, 12), vectors(4, 2, 6, 6, 6))
    return Cut(model, batch, {"a1": Claim((4,)), "b1": Claim((1,))}, {"a1": (4,), "b1": (1,)})


@case
def prelu_and_channelwise_dropout() -> Cut:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.PReLU(6), nn.Dropout2d(0.3), nn.Conv2d(6, 4, 3), nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    with torch.no_grad():
        model[3].weight[:, 1] = 0.0
    kill(model[3], 0)
    claims = {"0": Claim(unread=(1,)), "3": Claim((0,))}
    return Cut(model, vectors(4, 3, 8, 8), claims, {"0": (1,), "3": (0,)})


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 16)
        self.left, self.right = nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.body(x))
        return {"left": self.left(x), "right": self.right(x)}


@case
def two_heads() -> Cut:
    model = TwoHeads()
    kill(model.body, 2, 9)
    return Cut(model, vectors(16, 10), {"body": Claim((2, 9))}, {"body": (2, 9)})


@case
def read_by_one_of_two_heads() -> Cut:
    model = TwoHeads()
    with torch.no_grad():
        model.left.weight[:, 2] = 0.0
    return Cut(model, vectors(16, 10), {"body": Claim(unread=(2,))}, refused={"body": "right"})


@case
def all_dead() -> Cut:
    """No layer is left without units: one is kept."""
    model = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 3))
    kill(model[0], 0, 1, 2, 3)
    return Cut(
        model, vectors(8, 10), {"0": Claim((0, 1, 2, 3))}, {"0": (1, 2, 3)}, {"0": "nothing"}
    )


@case
def mixer_over_time() -> Cut:
    """Transposed and back: units stay units."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(6, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.fc1(x)).transpose(1, 2)
            return self.fc2(F.avg_pool1d(x, 3).transpose(1, 2))

    model = Mixed()
    kill(model.fc1, 0, 11)
    return Cut(model, vectors(4, 9, 6), {"fc1": Claim((0, 11))}, {"fc1": (0, 11)})


@case
def flattened_with_channels_last() -> Cut:
    """The columns of a channel lie apart, not in a block."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 6, 3), nn.Linear(6 * 4 * 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.conv(x)).permute(0, 2, 3, 1)
            return self.fc(x.reshape(len(x), -1))

    model = Last()
    kill(model.conv, 4)
    return Cut(model, vectors(4, 2, 6, 6), {"conv": Claim((4,))}, {"conv": (4,)})


# Transformers.


@case
def transformer_encoder() -> Cut:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    model: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    kill(model.layers[0].linear1, 0, 5)
    kill(model.layers[1].linear1, 31)
    claims = {
        "layers.0.linear1": Claim((0, 5)),
        "layers.1.linear1": Claim((31,)),
        "layers.1.linear2": Claim(unread=(3,)),
    }
    cut = {"layers.0.linear1": (0, 5), "layers.1.linear1": (31,)}
    return Cut(model, vectors(4, 7, 16), claims, cut, {"layers.1.linear2": "added"})


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))


@case
def gpt_block() -> Cut:
    model = nn.Sequential(nn.Embedding(20, 16), Block(), Block(), nn.Linear(16, 20))
    kill(model[1].up, 1, 60)
    claims = {
        "1.attention.q": Claim(unread=(2,)),
        "1.attention.v": Claim((3,)),
        "1.attention.out": Claim((3,)),
        "1.up": Claim((1, 60)),
        "1.down": Claim((3,)),
    }
    refused = {
        "1.attention.q": "dimensions",
        "1.attention.v": "dimensions",
        "1.attention.out": "added",
        "1.down": "added",
    }
    ids = torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(5))
    return Cut(model, ids, claims, {"1.up": (1, 60)}, refused)


class GatedMLP(nn.Module):
    """As in Llama: a gate times a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.gate(x)) * self.up(x))


@case
def gated_mlp() -> Cut:
    """A unit that is dead in the gate takes its partner with it."""
    model = GatedMLP()
    kill(model.gate, 3, 20)
    claims = {"gate": Claim((3, 20)), "up": Claim(unread=(3, 20))}
    return Cut(model, vectors(4, 7, 16), claims, {"gate": (3, 20), "up": (3, 20)})


@case
def gated_mlp_with_one_side_known() -> Cut:
    """The partner goes though nothing is said of it: the product is what is read."""
    model = GatedMLP()
    kill(model.gate, 3, 20)
    claims = {"gate": Claim((3, 20))}
    return Cut(model, vectors(4, 7, 16), claims, {"gate": (3, 20), "up": (3, 20)})


@case
def gates_from_a_chunk() -> Cut:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.both(x).chunk(2, -1)
            return self.down(F.relu(gate) * up)

    model = Chunked()
    kill(model.both, 3)
    claims = {"both": Claim((), (), (3, 27))}
    return Cut(model, vectors(4, 7, 16), claims, refused={"both": "part"})


# Residual streams, concatenation, what is shared.


class ResidualBlock(nn.Module):
    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


@case
def residual_block() -> Cut:
    model: Any = nn.Sequential(nn.Conv2d(3, 6, 3), ResidualBlock(), ResidualBlock())
    batch = vectors(8, 3, 8, 8)
    model = warmed(model, batch)
    with torch.no_grad():
        model[1].bn1.bias[[1, 4]] = -50.0
    claims = {"0": Claim((2,)), "1.conv1": Claim((1, 4)), "1.conv2": Claim((2,))}
    refused = {"0": "added", "1.conv2": "added"}
    return Cut(model, batch, claims, {"1.conv1": (1, 4)}, refused)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down1(x))
        x = F.relu(self.down2(F.max_pool2d(skip, 2)))
        x = F.relu(self.up(F.relu(self.bottom(x))))
        return self.out(torch.cat([skip, x], 1))


@case
def unet() -> Cut:
    model = UNet()
    kill(model.down1, 1)
    kill(model.down2, 3)
    kill(model.bottom, 7)
    kill(model.up, 0)
    claims = {name: Claim(units) for name, units in
              {"down1": (1,), "down2": (3,), "bottom": (7,), "up": (0,)}.items()}  # fmt: skip
    refused = {"down1": "concatenat", "up": "concatenat"}
    return Cut(model, vectors(4, 1, 8, 8), claims, {"down2": (3,), "bottom": (7,)}, refused)


@case
def shared_layer() -> Cut:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.out = (
                nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x))
            return self.out(F.relu(self.shared(F.relu(self.shared(x)))))

    model = Twice()
    kill(model.first, 1)
    kill(model.shared, 3)
    claims = {"first": Claim((1,)), "shared": Claim((3,))}
    return Cut(model, vectors(8, 8), claims, refused={"first": "2 times", "shared": "2 times"})


@case
def tied_weights() -> Cut:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 2)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.a(x)) * torch.sigmoid(self.b(x)))

    model = Tied()
    kill(model.a, 2)
    return Cut(model, vectors(8, 8), {"a": Claim((2,))}, refused={"a": "shared"})


@case
def tied_embeddings() -> Cut:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.relu(self.mix(self.embed(ids))))

    model = Language()
    kill(model.mix, 5)
    ids = torch.randint(20, (4, 7), generator=torch.Generator().manual_seed(5))
    return Cut(model, ids, {"mix": Claim((5,))}, refused={"mix": "shared"})


@case
def weight_used_in_a_function() -> Cut:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(10, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(self.encoder(x)), self.encoder.weight.t())

    model = Transposed()
    kill(model.encoder, 1)
    return Cut(model, vectors(8, 10), {"encoder": Claim((1,))}, refused={"encoder": "another way"})


@case
def weights_of_the_own_class() -> Cut:
    """What else the class does with the size of its weight is not known."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 6)
            self.weight = nn.Parameter(torch.randn(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(self.fc(x)), self.weight)

    model = Own()
    kill(model.fc, 1)
    return Cut(model, vectors(8, 10), {"fc": Claim((1,))}, refused={"fc": "Own"})


# Operations that are not unit by unit, and zeros that do not stay zero.


class After(nn.Module):
    """Two linear layers with something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 8), nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(F.relu(self.fc1(x))))


def refused_after(between: Callable[[Tensor], Tensor], word: str, width: int = 8) -> Cut:
    model = After(between, width)
    kill(model.fc1, 2)
    return Cut(model, vectors(16, 10), {"fc1": Claim((2,))}, refused={"fc1": word})


@case
def layer_norm() -> Cut:
    return refused_after(nn.LayerNorm(8), "norm")


@case
def group_norm() -> Cut:
    return refused_after(nn.GroupNorm(2, 8), "norm")


@case
def rms_norm() -> Cut:
    return refused_after(nn.RMSNorm(8), "units")


@case
def softmax() -> Cut:
    return refused_after(lambda x: x.softmax(-1), "softmax")


@case
def sum_over_units() -> Cut:
    return refused_after(lambda x: x / (1 + x.sum(1, keepdim=True)), "units")


@case
def zero_that_becomes_one() -> Cut:
    return refused_after(torch.exp, "constant")


@case
def einsum() -> Cut:
    other = vectors(8, 8)
    return refused_after(lambda x: torch.einsum("bi,ij->bj", x, other), "product")


@case
def sliced() -> Cut:
    return refused_after(lambda x: x[:, :6], "part", 6)


@case
def halves() -> Cut:
    return refused_after(lambda x: x.view(len(x), 2, 4).flatten(1), "dimensions")


@case
def number_through_python() -> Cut:
    return refused_after(lambda x: x * float(x.mean().item()), "units")


@case
def through_numpy() -> Cut:
    return refused_after(lambda x: torch.from_numpy(x.detach().numpy()) + 0, "NumPy")


@case
def scaled_by_the_number_of_units() -> Cut:
    return refused_after(lambda x: x / x.shape[1], "differ")


@case
def number_of_units_written_out() -> Cut:
    return refused_after(lambda x: x.reshape(-1, 8) * 2, "8")


@case
def own_scale_by_unit() -> Cut:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    return refused_after(Scale(), "gamma")


@case
def written_into_a_buffer() -> Cut:
    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 12)
            out[:, 2:10] = x
            return out

    return refused_after(Written(), "written", 12)


@case
def output_of_the_model() -> Cut:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(10, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.relu(self.fc1(x))
            return self.fc2(hidden), hidden

    model = Returned()
    kill(model.fc1, 2)
    return Cut(model, vectors(16, 10), {"fc1": Claim((2,))}, refused={"fc1": "output"})


@case
def recurrent() -> Cut:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.lstm, self.out = nn.Linear(6, 8), nn.LSTM(8, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(F.relu(self.fc(x)))[0])

    model = Recurrent()
    kill(model.fc, 2)
    return Cut(model, vectors(5, 4, 6), {"fc": Claim((2,))}, refused={"fc": "lstm"})


# Weights that are not what they seem.


@case
def parametrized() -> Cut:
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    kill(model[0], 2)
    parametrizations.weight_norm(model[0])
    return Cut(model, vectors(8, 10), {"0": Claim((2,))}, refused={"0": "parametriz"})


@case
def pruned() -> Cut:
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    kill(model[0], 2)
    prune.l1_unstructured(model[2], "weight", 0.3)
    return Cut(model, vectors(8, 10), {"0": Claim((2,))}, refused={"0": "prune"})


@case
def scripted() -> Cut:
    inner: Any = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    kill(inner[0], 2)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), torch.jit.script(inner))
    kill(model[0], 4)
    claims = {"0": Claim((4,))}
    return Cut(model, vectors(8, 10), claims, refused={"0": "script"})


@case
def quantised() -> Cut:
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
    kill(model[0], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised_: Any = torch.ao.quantization.quantize_dynamic(model, {"2"}, dtype=torch.qint8)
    return Cut(quantised_, vectors(8, 10), {"0": Claim((2,))}, refused={"0": "Quantized"})


@case
def training_alone_has_another_reader() -> Cut:
    """As the auxiliary head of GoogLeNet, which runs in training only."""

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.head = nn.Linear(10, 8), nn.Linear(8, 3)
            self.aux = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.fc1(x))
            return (self.head(x), self.aux(x)) if self.training else self.head(x)

    model = Auxiliary()
    kill(model.fc1, 2)
    return Cut(model, vectors(8, 10), {"fc1": Claim((2,))}, {"fc1": (2,)})


# Of the transformers library.


def _transformers(make: Callable[[Any], tuple[Any, dict[str, Claim], Any, Any]]) -> Cut:
    import transformers

    model, claims, cut, refused = make(transformers)
    ids = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(5))
    return Cut(model, ids, claims, cut, refused)


@case
def bert() -> Cut:
    def make(library: Any) -> Any:
        config = library.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, hidden_act="relu", max_position_embeddings=16,
        )  # fmt: skip
        model = library.BertForSequenceClassification(config)
        layer = "bert.encoder.layer.0"
        kill(model.get_submodule(f"{layer}.intermediate.dense"), 1, 23)
        claims = {
            f"{layer}.intermediate.dense": Claim((1, 23)),
            f"{layer}.attention.self.query": Claim(unread=(1,)),
            f"{layer}.output.dense": Claim(unread=(1,)),
        }
        refused = {
            f"{layer}.attention.self.query": "dimensions",
            f"{layer}.output.dense": "added",
        }
        return model, claims, {f"{layer}.intermediate.dense": (1, 23)}, refused

    return _transformers(make)


@case
def llama() -> Cut:
    def make(library: Any) -> Any:
        config = library.LlamaConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=24, hidden_act="relu", max_position_embeddings=16, mlp_bias=True,
        )  # fmt: skip
        model = library.LlamaForCausalLM(config)
        mlp = "model.layers.1.mlp"
        kill(model.get_submodule(f"{mlp}.gate_proj"), 1, 23)
        claims = {f"{mlp}.gate_proj": Claim((1, 23)), f"{mlp}.up_proj": Claim(unread=(1, 23))}
        return model, claims, {f"{mlp}.gate_proj": (1, 23), f"{mlp}.up_proj": (1, 23)}, {}

    return _transformers(make)


@case
def linear_into_the_convolution_of_gpt2() -> Cut:
    """GPT-2's `Conv1D` keeps its weight the other way around, and its size in `nf`."""

    class Before(nn.Module):
        def __init__(self, conv1d: Any) -> None:
            super().__init__()
            self.fc, self.conv = nn.Linear(10, 8), conv1d(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.relu(self.fc(x)))

    from transformers.pytorch_utils import Conv1D

    model = Before(Conv1D)
    kill(model.fc, 2)
    return Cut(model, vectors(4, 10), {"fc": Claim((2,))}, refused={"fc": "Conv1D"})
