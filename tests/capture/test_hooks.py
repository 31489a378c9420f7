"""What hooks see of the calls of layers and of gradients that several layers share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import LayerRecord

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def layers_of(model: nn.Module, batch: Tensor = BATCH) -> Mapping[str, LayerRecord]:
    """Return the layers of a run whose loss is the sum."""
    return Inspector(model).run_inspection(batch, loss=torch.sum).observation.layers


def largest_gradients(layers: Mapping[str, LayerRecord]) -> dict[str, float]:
    """Return the largest gradient of each layer that has one."""
    return {n: r.gradients.max for n, r in layers.items() if r.gradients is not None}


def test_a_gradient_that_two_layers_share_is_read_once() -> None:
    """A container returns what its last layer did: one gradient, one object in the report.

    What a linear layer makes of three dimensions is a view.
    """
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
