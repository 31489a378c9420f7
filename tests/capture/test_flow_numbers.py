"""Values that leave for Python or NumPy and come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import Flow


class Two(nn.Module):
    """Two layers, for forwards of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)
        self.factor = 0.3


class Item(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.a(x).mean().item()


class Computed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * (2 * float(self.a(x).mean()) + 1)


class Listed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tensor(self.a(x).tolist()))


class ListedAnew(Two):
    def forward(self, x: Tensor) -> Tensor:
        rows = [[2 * number for number in row] for row in self.a(x).tolist()]
        return self.b(torch.tensor(rows))


class Arrays(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.from_numpy(self.a(x).detach().numpy()))


class ArraysAnew(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.from_numpy(self.a(x).detach().numpy() + 1))


class Function(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(np.sin(self.a(x).detach()).float())  # type: ignore[call-overload]


class AsParameter(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.Parameter(self.a(x).detach()))


class Copied(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tensor(self.a(x)))


class Chosen(Two):
    def forward(self, x: Tensor) -> Tensor:
        index = self.a(x).mean(0).argmax().item()
        return self.b(x) + self.table(torch.tensor([index]))


class Logged(Two):
    """Reads for a log and a branch alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.norm = hidden.norm().item()
        if hidden.mean() > 100:
            hidden = hidden * 0.5
        return self.b(hidden * 0.5) + torch.tensor([1.0, 0.5, 0.25, 0.0] * 2)


def flow_of(model: nn.Module) -> Flow:
    """Return the flow of a run."""
    flow = Inspector(model).run_inspection(torch.randn(16, 8)).flow
    assert flow is not None
    return flow


@pytest.mark.filterwarnings("ignore")  # torch and NumPy warn of most of these
@pytest.mark.parametrize(
    ("kind", "cut", "is_exact"),
    [
        (Item, "item", True),
        (Computed, "item", False),
        (Listed, "tolist", True),
        (ListedAnew, "tolist", False),
        (Arrays, "detach", True),
        (ArraysAnew, "detach", False),
        (Function, "detach", True),
        (AsParameter, "detach", True),
        (Copied, "tensor", True),
        (Chosen, "argmax", False),
    ],
)
def test_values_that_come_back_are_followed(kind: type[Two], cut: str, is_exact: bool) -> None:
    """The cut is what took them out; what is computed outside of torch is guessed, and noted."""
    flow = flow_of(kind())
    (found,) = flow.cut_between("a")
    assert found.operation == cut
    assert __file__ in found.line
    assert flow.is_exact == is_exact


def test_reading_alone_is_no_way() -> None:
    """A number for a log or a branch feeds nothing, and numbers in the code are not made of it."""
    flow = flow_of(Logged())
    assert flow.is_exact
    assert not flow.cut_between("a")
    read = [v.name for v in flow.graph.vertices if v.name in ("item", "bool")]
    assert read == ["item", "item"]
    assert flow.consumers("a") == ("b",)
