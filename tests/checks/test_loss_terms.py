"""How a loss is put together: what the `loss` check warns of beside its faults."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies

CE = F.cross_entropy


@pytest.fixture
def labels():
    """A class for each sample of the batch."""
    return torch.randint(0, 10, (64,))


def each(output, target):
    """The loss of each sample."""
    return CE(output, target, reduction="none")


def warned(report):
    """What the check warns of; nothing fails."""
    assert report.violations == (), report.violations
    return [v.message for v in report.warnings if v.check == "loss"]


WEIGHTS = torch.rand(64)
SUMMED = {
    "an option": nn.CrossEntropyLoss(reduction="sum"),
    "an old option": lambda o, t: F.nll_loss(o.log_softmax(1), t, reduction="sum"),
    "two sums": lambda o, t: (
        CE(o, t, reduction="sum") + F.mse_loss(o, F.one_hot(t, 10) * 1.0, reduction="sum")
    ),
    "two tasks": {"a": nn.CrossEntropyLoss(reduction="sum"), "b": nn.CrossEntropyLoss()},
}
AVERAGED = {
    "a mean": CE,
    "over classes, then a mean": lambda o, t: ((o - F.one_hot(t, 10)) ** 2).sum(1).mean(),
    "a mean, then over classes": lambda o, t: ((o - F.one_hot(t, 10)) ** 2).mean(0).sum(),
    "divided": lambda o, t: each(o, t).sum() / len(t),
    "times the inverse": lambda o, t: each(o, t).sum() * (1 / len(t)),
    "times the inverse before": lambda o, t: (each(o, t) * (1 / len(t))).sum(),
    "divided before": lambda o, t: (each(o, t) / len(t)).sum(),
    "by the mask": lambda o, t: (each(o, t) * (t > 0)).sum() / (t > 0).sum(),
    "weights that sum to one": lambda o, t: (each(o, t) * (WEIGHTS / WEIGHTS.sum())).sum(),
    "an option, divided": lambda o, t: CE(o, t, reduction="sum") / len(t),
    "beside a mean": lambda o, t: CE(o, t) + o.abs().sum(),
    "of the output alone": lambda o, _: o.square().sum(),
}


@pytest.mark.parametrize("loss", SUMMED.values(), ids=SUMMED)
def test_sum_over_the_batch(loss, mlp, batch, labels, inspect):
    """A loss that grows with the batch is warned of."""
    (message,) = warned(inspect(mlp, batch, labels, loss=loss))
    assert "summed over the 64 samples" in message


@pytest.mark.parametrize("loss", AVERAGED.values(), ids=AVERAGED)
def test_no_sum_over_the_batch(loss, mlp, batch, labels, inspect):
    """Means are none, nor are sums that something may divide."""
    assert warned(inspect(mlp, batch, labels, loss=loss)) == []


def summed(output, target):
    """Squared errors, summed."""
    return F.mse_loss(output, F.one_hot(target, 10) * 1.0, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (lambda o, t: CE(o, t) + summed(o, t), True),
        (lambda o, t: CE(o, t) + summed(o, t) / len(t), False),
        (lambda o, t: CE(o, t) + summed(o, t) * (1 / 64), False),
        (lambda o, t: CE(o, t) + F.mse_loss(o.mean(0), torch.rand(10), reduction="sum"), False),
    ],
    ids=["a mean", "divided", "times the inverse", "of a mean over samples"],
)
def test_sum_beside_a_mean(loss, is_told, mlp, batch, labels, inspect):
    """One term that grows with the batch outweighs the others by its size."""
    messages = warned(inspect(mlp, batch, labels, loss=loss))
    assert ["beside a mean" in message for message in messages] == ([True] if is_told else [])


def test_sum_of_parameters(mlp, batch, labels, inspect):
    """A penalty on weights has nothing to do with the batch."""

    def loss(output, target):
        return CE(output, target) + sum(p.abs().sum() for p in mlp.parameters())

    assert warned(inspect(mlp, batch, labels, loss=loss)) == []


def test_sum_over_what_is_no_batch(labels, inspect):
    """An output for all samples together is summed over something else."""
    model = nn.Sequential(nn.Linear(16, 10), Applies(lambda x: x.mean(0)))
    report = inspect(model, torch.randn(64, 16), torch.rand(10), loss=nn.MSELoss(reduction="sum"))
    assert warned(report) == []


@pytest.mark.parametrize(
    ("targets", "is_told"),
    [
        (torch.full((64,), 3), True),
        (torch.full((64,), 3).index_fill(0, torch.arange(40), -100), True),
        (torch.full((64,), 3).index_fill(0, torch.arange(50), -100), False),
        (torch.arange(64) % 2, False),
    ],
    ids=["all", "all that count", "too few that count", "two"],
)
@pytest.mark.parametrize("is_nll", [False, True])
def test_targets_of_one_class(targets, is_told, is_nll, mlp, batch, inspect):
    """A batch of one class is warned of from 16 targets on."""
    model = nn.Sequential(mlp, nn.LogSoftmax(1)) if is_nll else mlp
    messages = warned(inspect(model, batch, targets, loss=F.nll_loss if is_nll else CE))
    assert len(messages) == is_told
    assert all("are class 3, of 10 classes" in message for message in messages)


def test_first_of_several_candidates(mlp, batch, inspect):
    """Where no layer has a row for each class, an index is a place among candidates."""

    def contrast(output, target):
        similar = (output * output.roll(1, 1)).sum(1, keepdim=True)
        return CE(torch.cat([similar, output @ torch.randn(10, 30)], 1), target)

    assert warned(inspect(mlp, batch, torch.zeros(64, dtype=torch.long), loss=contrast)) == []
