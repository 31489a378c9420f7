"""What hooks see of the calls of layers and of gradients that several layers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.report import Status
from pytest_modelhealth.statistics import Ledger

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


def gradients(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], int]:
    """Return the largest gradient of each layer, and how many tensors were read for them."""
    read = 0
    add = Ledger.add

    def counted(ledger: Ledger, tensor: Tensor, *args: Any) -> Any:
        nonlocal read
        read += tensor.grad_fn is None and tensor.shape == (4, 6) and not args[1:]
        return add(ledger, tensor, *args)

    monkeypatch.setattr(Ledger, "add", counted)
    layers = Inspector(model).run_inspection(BATCH, loss=torch.sum).observation.layers
    return {n: r.gradients.max for n, r in layers.items() if r.gradients is not None}, read


def test_a_gradient_that_two_layers_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container returns what its last layer did, so that one gradient is both layers'."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)))
    found, read = gradients(model, monkeypatch)
    assert found == {"": 1.0, "0": 1.0, "0.0": 1.0}
    assert read == 1


def test_a_gradient_of_a_view_that_two_layers_share_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a linear layer makes of three dimensions is a view."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Flatten(0, 1))
    read: list[torch.Size] = []
    add = Recorder.add_gradient

    def counted(self: Recorder, layers: list[Any], gradient: Tensor, dim: int | None) -> None:
        read.append(gradient.shape)
        add(self, layers, gradient, dim)

    monkeypatch.setattr(Recorder, "add_gradient", counted)
    layers = Inspector(model).run_inspection(torch.ones(2, 3, 6), loss=torch.sum).observation.layers
    assert read == [(6, 6), (2, 3, 6)]
    found = {n: r.gradients.max for n, r in layers.items() if r.gradients is not None}
    assert found == {"": 1.0, "0": 1.0, "0.0": 1.0, "1": 1.0}


def test_a_gradient_of_a_view_whose_base_is_written_to_is_two() -> None:
    """The layer inside returned the view as it was before, the container as it is after."""

    class WritesToBase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fold, self.lin = nn.Unflatten(1, (2, 3)), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            view = self.fold(x)
            x.mul_(3)
            return view

    layers = Inspector(WritesToBase()).run_inspection(BATCH, loss=torch.sum).observation.layers
    found = {n: r.gradients.max for n, r in layers.items() if r.gradients is not None}
    assert found == {"": 1.0, "fold": 3.0, "lin": 3.0}


def test_a_gradient_changed_between_two_layers_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the user's, put on inside the container, changes what reaches the layer inside."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            x.register_hook(lambda gradient: 3 * gradient)
            return x

    found, read = gradients(Scales(), monkeypatch)
    assert read == 2
    assert found == {"lin": 1.0, "": 3.0}
