"""Values that leave for Python or NumPy and come back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import Flow

Forward = Callable[["Two", Tensor], Tensor]


class Two(nn.Module):
    """Two layers and a table, for forwards of all kinds."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.run = nn.Embedding(8, 8), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def flow_of(forward: Forward) -> Flow:
    """Return the flow of a run."""
    flow = Inspector(Two(forward)).run_inspection(torch.randn(16, 8)).flow
    assert flow is not None
    return flow


def listed_anew(m: Two, x: Tensor) -> Tensor:
    """Compute in lists."""
    rows = [[2 * number for number in row] for row in m.a(x).tolist()]
    return m.b(torch.tensor(rows))


FORWARDS: dict[str, tuple[Forward, str, bool]] = {
    # what takes the values out, and whether nothing is guessed of how they come back
    "item": (lambda m, x: m.b(x) * m.a(x).mean().item(), "item", True),
    "computed": (lambda m, x: m.b(x) * (2 * float(m.a(x).mean()) + 1), "item", False),
    "listed": (lambda m, x: m.b(torch.tensor(m.a(x).tolist())), "tolist", True),
    "listed anew": (listed_anew, "tolist", False),
    "arrays": (lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy())), "detach", True),
    "arrays anew": (
        lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy() + 1)),
        *("detach", False),
    ),
    "function": (lambda m, x: m.b(np.sin(m.a(x).detach()).float()), "detach", True),
    "as parameter": (lambda m, x: m.b(nn.Parameter(m.a(x).detach())), "detach", True),
    "copied": (lambda m, x: m.b(torch.tensor(m.a(x))), "tensor", True),
    "chosen": (
        lambda m, x: m.b(x) + m.table(torch.tensor([m.a(x).mean(0).argmax().item()])),
        *("argmax", False),
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch and NumPy warn of most of these
@pytest.mark.parametrize("name", FORWARDS)
def test_values_that_come_back_are_followed(name: str) -> None:
    """The cut is what took them out; what is computed outside of torch is guessed, and noted."""
    forward, operation, is_exact = FORWARDS[name]
    flow = flow_of(forward)
    (cut,) = flow.cut_between("a")
    assert (cut.operation, flow.is_exact) == (operation, is_exact)
    assert __file__ in cut.line


def logged(m: Two, x: Tensor) -> Tensor:
    """Read for a log and a branch alone."""
    hidden = m.a(x)
    m.norm = hidden.norm().item()
    if hidden.mean() > 100:
        hidden = hidden * 0.5
    return m.b(hidden * 0.5) + torch.tensor([1.0, 0.5, 0.25, 0.0] * 2)


def test_reading_alone_is_no_way() -> None:
    """A number for a log or a branch feeds nothing, and numbers in the code are not made of it."""
    flow = flow_of(logged)
    assert flow.is_exact
    assert not flow.cut_between("a")
    read = [v.name for v in flow.graph.vertices if v.name in ("item", "bool")]
    assert read == ["item", "item"]
    assert flow.consumers("a") == ("b",)
