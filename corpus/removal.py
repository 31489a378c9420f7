"""Models with units that can go, planted, and look-alikes with none: what is to be found in each.

They were written before the code that finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune


@dataclass(frozen=True)
class Units:
    """What is to be found in one layer."""

    inactive: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Case:
    """A model, its batches, and the truth.

    Args:
        model: the model.
        batches: what it is run on.
        expected: the units of each layer that can go; layers that are not named have none.
        refused: layers with units that look as if they could go, and are to be named so.
        options: further arguments of `removable`.
    """

    model: nn.Module
    batches: list[Any]
    expected: dict[str, Units] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Put a case on the shelf."""
    CASES[make.__name__] = make
    return make


DEAD = -1e3
"""A bias that no input of these models makes up for."""


def vectors(size: int = 10, count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, size, generator=generator) for _ in range(count)]


def images(channels: int = 3, size: int = 8, count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, channels, size, size, generator=generator) for _ in range(count)]


def tokens(count: int = 6, length: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(20, (16, length), generator=generator) for _ in range(count)]


def mlp(activation: nn.Module, hidden: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, hidden), activation, nn.Linear(hidden, 4))


def set_(parameter: Tensor | None, where: Any, value: Any) -> None:
    assert parameter is not None
    with torch.no_grad():
        parameter[where] = value


# Inactive.


@case
def dead_by_bias() -> Case:
    model = mlp(nn.ReLU())
    set_(model[0].bias, [3, 7], DEAD)
    return Case(model, vectors(), {"0": Units(inactive=(3, 7))})


class FunctionalReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.out = nn.Linear(10, 16), nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x), inplace=True)
        return self.out(torch.relu(self.fc2(x)))


@case
def dead_before_functional_relu() -> Case:
    model = FunctionalReLU()
    set_(model.fc1.bias, 4, DEAD)
    set_(model.fc2.bias, [0, 11], DEAD)
    expected = {"fc1": Units(inactive=(4,)), "fc2": Units(inactive=(0, 11))}
    return Case(model, vectors(), expected)


class SmallCNN(nn.Module):
    """Convolution, batch norm, one ReLU for both, pooling, a flattened read."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(8 * 4 * 4, 5)
        for _ in range(20):
            self.bn1(self.conv1(torch.randn(16, 3, 8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.pool(self.conv2(x)))
        return self.fc(x.flatten(1))


@case
def dead_channels_behind_batch_norm() -> Case:
    model = SmallCNN()
    set_(model.bn1.bias, 5, DEAD)
    set_(model.bn1.weight, 2, 0.0)
    set_(model.bn1.bias, 2, -0.5)
    set_(model.conv2.bias, 1, DEAD)
    expected = {"conv1": Units(inactive=(2, 5)), "conv2": Units(inactive=(1,))}
    return Case(model, images(), expected)


@case
def dead_channel_of_grouped_convolution() -> Case:
    model = SmallCNN(groups=4)
    set_(model.conv2.bias, 3, DEAD)
    set_(model.bn1.bias, 6, DEAD)
    expected = {"conv1": Units(inactive=(6,)), "conv2": Units(inactive=(3,))}
    return Case(model, images(), expected)


@case
def dead_channel_of_depthwise_convolution() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(),
        nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    set_(model[2].bias, slice(None), 1.0)  # one was dead by chance
    set_(model[2].bias, 4, DEAD)
    # the depthwise channel is all that reads channel 4 of the first convolution
    return Case(model, images(), {"0": Units(inactive=(4,)), "2": Units(inactive=(4,))})


@case
def dead_channel_of_transposed_convolution() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 6, 2, stride=2), nn.ReLU(), nn.Conv2d(6, 3, 3, padding=1)
    )
    set_(model[0].bias, 2, DEAD)
    return Case(model, images(), {"0": Units(inactive=(2,))})


@case
def dead_neurons_of_transformer() -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    set_(model.layers[0].linear1.bias, [0, 5], DEAD)
    set_(model.layers[1].linear1.bias, 31, DEAD)
    batches = [x.reshape(4, 8, 16) for x in vectors(16)]
    expected = {
        "layers.0.linear1": Units(inactive=(0, 5)),
        "layers.1.linear1": Units(inactive=(31,)),
    }
    return Case(model, batches, expected)


@case
def far_below_gelu() -> Case:
    """GELU gives minus zero far enough below, and only a small number at -3."""
    model = mlp(nn.GELU())
    set_(model[0].bias, 6, -3.0)
    set_(model[0].weight, 6, 0.01)
    set_(model[0].bias, 9, DEAD)
    return Case(model, vectors(), {"0": Units(inactive=(9,))})


class Twice(nn.Module):
    """A layer called twice, with one unit dead in the first call alone, and one in both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.out = nn.Linear(10, 12), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.relu(self.shared(x)), F.relu(self.shared(-100 * x.abs()))
        return self.out(torch.cat([first, second], 1))


@case
def dead_in_both_calls() -> Case:
    model = Twice()
    set_(model.shared.weight, 2, 0.5)
    set_(model.shared.bias, 2, -3.0)
    set_(model.shared.weight, 4, -0.5)
    set_(model.shared.bias, 4, -6.0)
    set_(model.shared.bias, 3, -1e6)
    return Case(model, [x.abs() for x in vectors()], {"shared": Units(inactive=(3,))})


@case
def cut_rows_of_pruning() -> Case:
    model = mlp(nn.Tanh())
    prune.ln_structured(model[0], "weight", amount=3, n=2, dim=0)
    rows = (model[0].weight == 0).all(1)
    prune.custom_from_mask(model[0], "bias", (~rows).float())
    return Case(model, vectors(), {"0": Units(inactive=tuple(rows.nonzero().flatten().tolist()))})


@case
def bfloat16() -> Case:
    model = mlp(nn.ReLU()).bfloat16()
    set_(model[0].bias, 8, DEAD)
    return Case(model, [x.bfloat16() for x in vectors()], {"0": Units(inactive=(8,))})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


@case
def dead_in_residual_branch() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), Block(), Block(), nn.Linear(16, 3))
    set_(model[1].up.bias, [1, 30], DEAD)
    return Case(model, vectors(), {"1.up": Units(inactive=(1, 30))})


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.encoder(x)), self.encoder.weight.t())


@case
def dead_with_a_transposed_tie() -> Case:
    model = Tied()
    set_(model.encoder.bias, 1, DEAD)
    return Case(model, vectors(), {"encoder": Units(inactive=(1,))})


@case
def dead_neurons_of_gpt2() -> Case:
    """Its linear layers have weights of shape (inputs, outputs)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, activation_function="relu",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    set_(model.transformer.h[0].mlp.c_fc.bias, [3, 60], DEAD)
    batches = [{"input_ids": ids} for ids in tokens()]
    return Case(model, batches, {"transformer.h.0.mlp.c_fc": Units(inactive=(3, 60))})


# Duplicates.


@case
def duplicate_rows() -> Case:
    model = mlp(nn.ReLU())
    for unit, twin in ((5, 1), (12, 1), (9, 4)):
        set_(model[0].weight, unit, model[0].weight[twin].detach())
        set_(model[0].bias, unit, model[0].bias[twin].detach())
    return Case(model, vectors(), {"0": Units(duplicates=((5, 1), (9, 4), (12, 1)))})


@case
def duplicate_channels_behind_batch_norm() -> Case:
    model = SmallCNN()
    with torch.no_grad():
        for tensor in (model.conv1.weight, *model.bn1.parameters(), model.bn1.running_mean,
                       model.bn1.running_var, model.conv2.weight, model.conv2.bias):  # fmt: skip
            tensor[6] = tensor[2]
    units = Units(duplicates=((6, 2),))
    return Case(model, images(), {"conv1": units, "conv2": units})


@case
def opposite_rows() -> Case:
    """Up to sign they are the same, which is not the same."""
    model = mlp(nn.Tanh())
    set_(model[0].weight, 5, -model[0].weight[1].detach())
    set_(model[0].bias, 5, -model[0].bias[1].detach())
    return Case(model, vectors())


@case
def doubled_rows() -> Case:
    model = mlp(nn.ReLU())
    set_(model[0].weight, 5, 2 * model[0].weight[1].detach())
    set_(model[0].bias, 5, 2 * model[0].bias[1].detach())
    return Case(model, vectors())


@case
def nearly_duplicate_rows() -> Case:
    model = mlp(nn.ReLU())
    set_(model[0].weight, 5, model[0].weight[1].detach() + 1e-3 * torch.randn(10))
    set_(model[0].bias, 5, model[0].bias[1].detach())
    return Case(model, vectors())


# Unread.


@case
def zero_columns() -> Case:
    model = mlp(nn.Tanh())
    set_(model[2].weight, (slice(None), [2, 9]), 0.0)
    return Case(model, vectors(), {"0": Units(inactive=(2, 9))})


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.out = nn.Linear(10, 16), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sigmoid(self.fc1(x))[:, :12])


@case
def sliced_away() -> Case:
    return Case(Sliced(), vectors(), {"fc1": Units(inactive=(12, 13, 14, 15))})


@case
def frozen_backbone() -> Case:
    model = mlp(nn.Tanh()).requires_grad_(False)
    set_(model[2].weight, (slice(None), 7), 0.0)
    return Case(model, vectors(), {"0": Units(inactive=(7,))})


class BackboneWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.head = nn.Linear(10, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.fc1(x))
        return self.head(x)


@case
def backbone_without_gradients() -> Case:
    """No gradient tells which of its units are read."""
    model = BackboneWithoutGradients()
    set_(model.head.weight, (slice(None), 7), 0.0)
    return Case(model, vectors())


class InVain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.spare, self.out = nn.Linear(10, 6), nn.Linear(10, 5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch.tanh(self.spare(x))
        return self.out(torch.tanh(self.fc(x)))


@case
def computed_in_vain() -> Case:
    return Case(InVain(), vectors(), {"spare": Units(inactive=(0, 1, 2, 3, 4))})


# Look-alikes, with none that can go.


@case
def alive_on_later_batches() -> Case:
    model = mlp(nn.ReLU())
    set_(model[0].weight, 4, torch.eye(10)[0])
    set_(model[0].bias, 4, -6.0)
    batches = vectors()
    batches[-1][3, 0] = 8.0
    return Case(model, batches, refused=frozenset({"0"}))


@case
def healthy_dropout() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.9), nn.Linear(16, 8), nn.Dropout(0.9),
        nn.Linear(8, 2),
    )  # fmt: skip
    return Case(model, [x[:4] for x in vectors()])


@case
def healthy_cnn() -> Case:
    return Case(SmallCNN(), images())


@case
def leaky() -> Case:
    model = mlp(nn.LeakyReLU())
    set_(model[0].bias, [3, 7], DEAD)
    return Case(model, vectors())


@case
def constant_units() -> Case:
    """They never change, and what reads them needs them."""
    model = mlp(nn.ReLU())
    set_(model[0].weight, 3, 0.0)
    set_(model[0].bias, 3, 1.0)
    return Case(model, vectors())


class BothSigns(nn.Module):
    """What is dead behind one ReLU is alive behind the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.out = nn.Linear(10, 8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.out(torch.cat([F.relu(x), F.relu(-x)], 1))


@case
def concatenated_relu() -> Case:
    model = BothSigns()
    set_(model.fc1.bias, 3, -20.0)
    return Case(model, vectors())


@case
def normalised_across_units() -> Case:
    """Behind the layer norm a unit is dead, and its input moves the mean of all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    set_(model[1].weight, 2, 0.0)
    set_(model[1].bias, 2, -1.0)
    return Case(model, vectors())


@case
def outputs_that_are_zero() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 6), nn.ReLU())
    set_(model[2].bias, 1, DEAD)
    return Case(model, vectors())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.a, self.b = nn.Linear(10, 16), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.fc1(x))
        return self.a(x[:, :8]), self.b(x[:, 8:])


@case
def head_without_loss() -> Case:
    """The loss looks at one head alone; the other is an output all the same."""
    batches = [(x, torch.zeros(len(x), dtype=torch.long)) for x in vectors()]
    options = {"loss": lambda output, target: F.cross_entropy(output[0], target)}
    return Case(TwoHeads(), batches, refused=frozenset({"fc1"}), options=options)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.out = nn.Linear(10, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        return self.out(torch.cat([x[:, :8], x[:, 8:].detach()], 1))


@case
def read_without_gradients() -> Case:
    return Case(Detached(), vectors(), refused=frozenset({"fc1"}))


class SharedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(10, 12), nn.Linear(10, 12), nn.Linear(24, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([F.relu(self.a(x)), F.relu(self.b(x))], 1))


@case
def tied_to_a_living_layer() -> Case:
    model = SharedWeight()
    set_(model.a.bias, 2, DEAD)
    return Case(model, vectors(), refused=frozenset({"a"}))


class Language(nn.Module):
    """Embedding, attention written by hand, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        x = x + torch.softmax(scores.masked_fill(mask, -torch.inf), -1) @ self.v(x)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


@case
def healthy_language_model() -> Case:
    return Case(Language(), [x for n in (7, 5) for x in tokens(3, n)])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 12, batch_first=True)
        self.out = nn.Linear(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0][:, -1])


@case
def healthy_lstm() -> Case:
    return Case(Recurrent(), tokens())


class Gated(nn.Module):
    """Squeeze and excitation, and a residual sum behind which is a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = self.conv(x)
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return self.out(F.relu(x + y * gate).mean((2, 3)))


@case
def healthy_gates() -> Case:
    return Case(Gated(), images())


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.out = nn.Linear(10, 10), nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x[0, 0] > 0) + int(x[0, 1] > 0)):
            x = F.relu(self.a(x))
        return self.out(x)


@case
def another_way_with_each_batch() -> Case:
    """A unit is inactive if it is in each call that there was."""
    model, batches = Loop(), vectors(count=10)
    set_(model.a.bias, slice(None), 0.5)
    set_(model.a.bias, [2, 5], DEAD)
    assert len({(int(x[0, 0] > 0), int(x[0, 1] > 0)) for x in batches}) > 2
    return Case(model, batches, {"a": Units(inactive=(2, 5))})


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.out = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        set_(self.a.weight, 5, self.a.weight[1].detach())
        set_(self.a.bias, 5, self.a.bias[1].detach())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.out(x + self.b(x))


@case
def duplicates_that_a_sum_reads() -> Case:
    """One of them is a duplicate, whatever reads both."""
    return Case(Residual(), vectors(), {"a": Units(duplicates=((5, 1),))})


@case
def constant_behind_a_norm() -> Case:
    """No gradient comes to it, and what reads it needs it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    set_(model[1].weight, 2, 0.0)
    set_(model[1].bias, slice(None), 0.5)
    batches = [torch.randn(8, 3, 4, 4) for _ in range(3)]
    return Case(model, batches, refused=frozenset({"0"}))


class Restless(nn.Module):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = dead_by_bias().model

    def forward(self, x: Tensor) -> Tensor:
        Restless.count += 1
        return self.inner(x) + Restless.count


@case
def restless() -> Case:
    """Outputs that differ from run to run prove nothing."""
    return Case(Restless(), vectors(), refused=frozenset({"inner.0"}))


# Trained, so that units died by themselves.


class Digits(nn.Module):
    """Convolutions, one with a norm, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(F.relu(self.fc1(x.flatten(1))))


def digits() -> tuple[Tensor, Tensor]:
    """Return images of shape (1797, 1, 8, 8) and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)


def trained() -> Digits:
    """Return the network after four passes with a high learning rate."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, classes = digits()
        model = Digits()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-3)
        for _ in range(4):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), classes[batch]).backward()
                optimizer.step()
        return model
