"""What hooks see of the calls of layers and of gradients that several layers share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import LayerRecord, Status

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    """Calls torch's own layers in each of the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.named, self.hooked = (nn.Linear(6, 6) for _ in range(3))
        self.hooked.register_forward_hook(lambda module, args, output: F.relu(output))
        self.twice = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
        self.lstm, self.drop, self.raises = nn.LSTM(6, 6), nn.Dropout(0.5), nn.Linear(5, 5)
        self.same, self.ids = nn.Identity(), nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.plain(x)) + self.named(input=x) + self.hooked(x)
        x = self.twice(self.twice(x)) + self.ids(torch.arange(4))
        try:
            self.raises(x)
        except RuntimeError:
            x = self.same(x)
        return self.drop(self.lstm(x)[0])


def test_calls_in_every_way_are_seen() -> None:
    """By position and by name, hooked, in place, twice, and one that raises."""
    torch.manual_seed(0)
    observation = Inspector(Calls()).run_inspection(BATCH).observation
    assert observation.errors == ()
    records = observation.layers
    assert "raised RuntimeError" in records["raises"].reason
    others = [name for name in records if name not in ("raises", "same")]
    assert {records[name].status for name in others} == {Status.OBSERVED}
    assert records["same"].status is Status.ALIAS_OF_INPUT
    assert (records["hooked.relu"].calls, records["twice.1"].calls) == (1, 2)
    assert records["gelu"].entered > records["plain"].entered


def layers_of(model: nn.Module, batch: Tensor = BATCH) -> Mapping[str, LayerRecord]:
    """Return the layers of a run whose loss is the sum."""
    return Inspector(model).run_inspection(batch, loss=torch.sum).observation.layers


def largest_gradients(layers: Mapping[str, LayerRecord]) -> dict[str, float]:
    """Return the largest gradient of each layer that has one."""
    return {n: r.gradients.max for n, r in layers.items() if r.gradients is not None}


def test_a_gradient_that_two_layers_share_is_read_once() -> None:
    """A container returns what its last layer did: one gradient, one object in the report."""
    layers = layers_of(nn.Sequential(nn.Sequential(nn.Linear(6, 6))))
    assert largest_gradients(layers) == {"": 1.0, "0": 1.0, "0.0": 1.0}
    assert layers[""].gradients is layers["0"].gradients is layers["0.0"].gradients


def test_a_gradient_of_a_view_that_two_layers_share_is_read_once() -> None:
    """What a linear layer makes of three dimensions is a view."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Flatten(0, 1))
    layers = layers_of(model, torch.ones(2, 3, 6))
    assert largest_gradients(layers) == {"": 1.0, "0": 1.0, "0.0": 1.0, "1": 1.0}
    assert layers["0"].gradients is layers["0.0"].gradients
    assert layers[""].gradients is layers["1"].gradients


@pytest.mark.parametrize(("write", "factor"), [("mul_", 3.0), ("add_", 1.0)])
def test_a_gradient_of_a_view_whose_base_is_written_to_is_two(write: str, factor: float) -> None:
    """The layer inside returned the view as it was before, the container as it is after.

    What arrives at an addition has no memory of its own, as the gradient of a sum.
    """

    class WritesToBase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fold, self.lin = nn.Unflatten(1, (2, 3)), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            view = self.fold(x)
            getattr(x, write)(3)
            return view

    gradients = largest_gradients(layers_of(WritesToBase()))
    assert gradients == {"": 1.0, "fold": factor, "lin": factor}


def test_a_gradient_changed_between_two_layers_is_two() -> None:
    """A hook of the user's, put on inside the container, changes what reaches the layer inside."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            x.register_hook(lambda gradient: 3 * gradient)
            return x

    assert largest_gradients(layers_of(Scales())) == {"lin": 1.0, "": 3.0}
