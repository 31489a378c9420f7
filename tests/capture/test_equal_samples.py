"""Whether a layer tells the samples of a batch apart, held against comparing every element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing.sample_statistics import equal_samples
from pytest_modelhealth.report import LayerRecord
from pytest_modelhealth.statistics import Ledger, native
from tests.capture.oracle import report_of


def by_brute_force(tensor: Tensor) -> bool:
    """Whether every sample equals the first, element by element."""
    samples = [sample.flatten().tolist() for sample in tensor]
    return all(a == b for one in samples[1:] for a, b in zip(one, samples[0], strict=True))


def zeros_but(*place: int) -> Tensor:
    """Return a batch of zeros in which one element is not."""
    tensor = torch.zeros(4, 100)
    tensor[place] = 1.0
    return tensor


TENSORS: dict[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randn(4, 5),
    "constant": lambda: torch.full((4, 5), 3.0),
    "same row": lambda: torch.randn(1, 7).repeat(4, 1),
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
    "differs at the end of the second sample": lambda: zeros_but(1, 99),
    "differs in the last sample": lambda: zeros_but(3, 99),
    "one number each": lambda: torch.ones(4),
    "zeros of both signs": lambda: torch.tensor([[0.0, -0.0], [-0.0, 0.0]] * 2),
    "zeros and ones": lambda: torch.tensor([[0.0, 1.0], [-0.0, 1.0]] * 2),
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "channels last, same": lambda: (
        torch.randn(1, 3, 5, 5).repeat(4, 1, 1, 1).to(memory_format=torch.channels_last)
    ),
    "transposed": lambda: torch.randn(7, 4).t(),
    "slice": lambda: torch.randn(6, 7)[1:5],
    "bfloat16": lambda: torch.ones(4, 40, dtype=torch.bfloat16),
    "float16, zeros of both signs": lambda: torch.tensor([[0.0, 1.0], [-0.0, 1.0]] * 2).half(),
    "bfloat16, other last bit": lambda: torch.tensor([[1.0], [1.0078125]] * 2).bfloat16(),
    "float64, other last bit": lambda: torch.tensor([[1.0], [1.0 + 2**-52]] * 2).double(),
    "NaN": lambda: torch.full((4, 3), torch.nan),
    "NaN in float16": lambda: torch.full((4, 3), torch.nan).half(),
    "NaN in bfloat16": lambda: torch.full((4, 3), torch.nan).bfloat16(),
    "infinity in float16": lambda: torch.full((4, 3), torch.inf).half(),
    "ids": lambda: torch.tensor([[128, 0], [0, 128]] * 2),
    "complex": lambda: torch.ones(4, 2, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_equality_is_that_of_every_element(name: str) -> None:
    """Looking at a few bytes first never changes the answer, nor does the kernel's.

    It tells as it reads where samples lie one after the other.
    """
    tensor = TENSORS[name]()
    truth = by_brute_force(tensor)
    is_read = native.library() is not None and tensor.is_floating_point()
    is_dense = tensor.is_contiguous() or name.startswith("channels last")
    entry = Ledger().add(tensor, None, 4)
    assert entry.samples_equal is (truth if is_read and is_dense else None)
    assert equal_samples([tensor], 4, [entry]) is equal_samples([tensor], 4, [None]) is truth
    assert Ledger().add(tensor, None, 3).samples_equal is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 3),
        torch.ones(3, 4),
        torch.tensor(1.0),
        torch.ones(4, 3).to_sparse(),
        torch.ones(4, 0),
        torch.ones(4, 3, device="meta"),
    ],
    ids=["one sample", "other size", "scalar", "sparse", "empty", "meta"],
)
def test_nothing_is_said_where_nothing_can_be(tensor: Tensor) -> None:
    """One sample, no batch dimension or values out of reach give None."""
    assert equal_samples([tensor], 1 if tensor.shape[:1] == (1,) else 4, [None]) is None


def run(model: nn.Module, batch: Tensor) -> dict[str, LayerRecord]:
    """Return the layers of one inspection."""
    return dict(report_of(model, batch).layers)


def collapsing() -> nn.Sequential:
    """Return a model whose second layer gives the same for every sample."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.ReLU(inplace=True))
    nn.init.zeros_(model[1].weight)
    return model


def test_layer_that_collapses_is_told_from_those_after_it() -> None:
    """The layer where samples become equal has inputs that differ; the next one has not."""
    seen = run(collapsing(), torch.randn(4, 6))
    assert (seen["0"].equal_samples, seen["0"].equal_input_samples) == (False, None)
    assert (seen["1"].equal_samples, seen["1"].equal_input_samples) == (True, False)
    assert seen["2"].equal_samples is True  # in place: its input is gone
    assert (seen[""].equal_samples, seen[""].equal_input_samples) == (True, False)


def test_batch_of_one_sample_repeated_shows_at_the_root() -> None:
    """Samples that are equal in the batch are no layer's fault."""
    torch.manual_seed(1)  # a product of matrices may round one row otherwise
    seen = run(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), torch.randn(1, 6).repeat(4, 1))
    assert all(record.equal_samples and record.equal_input_samples for record in seen.values())


def test_batches_are_merged() -> None:
    """Over several batches a layer collapses only if it does in each."""
    model = nn.Sequential(nn.ReLU())
    inspector = Inspector(model)
    merged = inspector.run_batches([-torch.rand(4, 6), torch.rand(4, 6)])
    assert merged["0"].equal_samples is False
    assert inspector.run_batches([-torch.rand(4, 6), -torch.rand(4, 6)])["0"].equal_samples is True


def test_input_that_was_written_to_is_not_looked_at() -> None:
    """An in-place activation overwrites its input: of that, nothing can be said afterwards."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True))
    nn.init.constant_(model[0].bias, -100.0)
    seen = run(model, torch.randn(4, 6))
    assert (seen["1"].equal_samples, seen["1"].equal_input_samples) == (True, None)
