"""What is recorded of samples: whether they are equal, how they deviate, which slices are zero."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from corpus.models.small import Masked
from corpus.tensors import ALIKE
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.observing import recorder
from pytest_modelhealth.capture.observing.sample_statistics import equal_samples, zero_slices
from pytest_modelhealth.report import LayerRecord, ZeroSlices
from pytest_modelhealth.statistics import Ledger, native
from tests.capture.oracle import report_of


def by_brute_force(tensor: Tensor) -> bool:
    """Whether every sample equals the first, element by element."""
    samples = [sample.flatten().tolist() for sample in tensor]
    return all(a == b for one in samples[1:] for a, b in zip(one, samples[0], strict=True))


@pytest.mark.parametrize("name", ALIKE)
def test_equality_is_that_of_every_element(name: str) -> None:
    """Looking at a few bytes first never changes the answer, nor does the kernel's.

    It tells as it reads where samples lie one after the other.
    """
    tensor = ALIKE[name]()
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


# ---- how far the samples of an output deviate ----------------------------------------------------


class Returns(nn.Module):
    """Gives out what a function makes of its input."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> object:
        return self.function(self.fc(x))  # type: ignore[operator]


def deviation(function: object, batch: Tensor) -> float | None:
    """What is recorded of a model that returns such."""
    return report_of(Returns(function), batch).observation.sample_deviation


def expected(output: Tensor) -> float:
    """The same by its definition."""
    wide = output.detach().double()
    return math.sqrt(wide.var(0, correction=0).mean()) / float(wide.std(correction=0))


@pytest.mark.parametrize("per_sample", [4, 40_000, 140_000])
def test_of_large_outputs_a_part_stands_for_all(per_sample: int) -> None:
    """It is the root of the mean variance along dimension 0, over the deviation of all numbers.

    Above 65,536 values a sample some are taken, and a pattern in them does not bias that.
    """
    outputs: list[Tensor] = []

    def widened(x: Tensor) -> Tensor:
        scales = torch.tensor([1.0, 3.0]).repeat(per_sample // 2)  # every second value is larger
        noise = torch.randn(len(x), per_sample, generator=torch.Generator().manual_seed(0))
        outputs.append(x.sum() * 0.0 + noise * scales + 5.0 * torch.arange(per_sample).remainder(7))
        return outputs[-1]

    exact = per_sample <= 65_536
    found = deviation(widened, torch.randn(8, 4))
    assert found == pytest.approx(expected(outputs[-1]), rel=1e-4 if exact else 2e-2)


@pytest.mark.parametrize(
    ("function", "samples"),
    [
        (lambda x: x[:, :1], 16),
        (lambda x: x.sum(), 16),
        (lambda x: x[:8], 16),
        (lambda x: x, 1),
        (lambda x: x * math.nan, 16),
        (lambda x: x * 0.0 + 3.0, 16),
    ],
    ids=["one value a sample", "a number", "no batch", "one sample", "not finite", "constant"],
)
def test_nothing_is_recorded_where_nothing_can_be_said(function: object, samples: int) -> None:
    """A single column around a large mean is no collapse."""
    assert deviation(function, torch.randn(samples, 4)) is None


def test_largest_of_several_outputs_counts() -> None:
    """One output that tells samples apart is enough; batches are merged the same way."""
    batch = torch.randn(16, 4)
    offset = torch.tensor([0.0, 1e3, 2e3, 3e3])
    torch.manual_seed(0)
    one = deviation(lambda x: x, batch)
    torch.manual_seed(0)
    assert deviation(lambda x: (x + offset, x), batch) == one
    model = Returns(lambda x: x + offset)
    inspector = Inspector(model)
    each = [inspector.run_inspection(b).observation.sample_deviation for b in (batch, 9 * batch)]
    merged = inspector.run_batches([batch, 9 * batch]).observation.sample_deviation
    assert merged == max(x for x in each if x is not None) != min(x for x in each if x is not None)


# ---- rows and columns that are zero and get no gradient ------------------------------------------


def seen(model: nn.Module, batch: Tensor) -> dict[str, ZeroSlices]:
    """What is recorded of the layer."""
    return dict(report_of(model, batch, loss=None)["fc"].zero_slices)


def test_rows_and_columns_are_recorded() -> None:
    """Both have weights and gradients of zero."""
    found = seen(Masked(6, 5), torch.randn(8, 16))["weight"]
    assert found == ZeroSlices(frozenset(range(6)), frozenset(range(5)))
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (2, 0)], ids=["none", "too few"])
def test_ordinary_layer_is_not_looked_at(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the statistics count is enough to leave it."""
    found = []
    real = recorder.zero_slices
    monkeypatch.setattr(recorder, "zero_slices", lambda *a: found.append(real(*a)))
    assert seen(Masked(rows, columns), torch.randn(8, 16)) == {}
    assert found == [None] * bool(rows)  # zeros in both, and not of four rows


class Table(nn.Module):
    """Most ids are in no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Embedding(32, 8)
        with torch.no_grad():
            self.fc.weight[8:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.sign().long() + 1)


def closed() -> nn.Module:
    """A closed gate is another matter."""
    model = Masked(6, 0)
    nn.init.zeros_(model.fc.weight)
    return model


def learning() -> nn.Module:
    """Zeros with a gradient move."""
    model = Masked(0, 0)
    with torch.no_grad():
        model.fc.weight[:6] = 0.0
    return model


@pytest.mark.parametrize("make", [Table, closed, learning])
def test_other_zeros_are_not_recorded(make: Callable[[], nn.Module]) -> None:
    """Rows of a table, a matrix that is all zero, and what learns."""
    assert seen(make(), torch.randn(8, 16)) == {}


def test_batches_keep_what_is_zero_in_all() -> None:
    """A row that learns in one batch learns."""

    class Switched(Masked):
        def forward(self, x: Tensor) -> Tensor:
            self.rows = int(x.sum().sign()) + 5  # 6 or 4
            return super().forward(x)

    merged = Inspector(Switched(6, 0)).run_batches([torch.ones(8, 16), -torch.ones(8, 16)])
    assert merged["fc"].zero_slices["weight"].rows == frozenset(range(4))


def test_nothing_waits_for_another_device() -> None:
    """What stays on a device is not asked for its zeros."""
    model = Masked(6, 0)
    model(torch.randn(8, 16)).sum().backward()
    weight = model.fc.weight
    for queue_all in (False, True):
        ledger = Ledger(queue_all=queue_all)
        entries = [ledger.add(tensor) for tensor in (weight, weight.grad)]
        assert (zero_slices(weight, *entries) is None) == queue_all
        assert entries[0].zero_count == (None if queue_all else 6 * 16)
        assert entries[0].of_dtype(torch.float16).zero_count == entries[0].zero_count
