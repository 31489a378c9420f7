"""Tables that are asked for one row by ids that the model made equal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 10


class Looks(nn.Module):
    """Words, and a second table asked for what a function makes of them."""

    def __init__(self, ids, rows=64, words=lambda x: x):
        super().__init__()
        self.words, self.second = nn.Embedding(50, 16), nn.Embedding(rows, 16)
        self.fc, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.ids, self.of_words = ids, words

    def forward(self, x):
        hidden = self.words(self.of_words(x)) + self.second(self.ids(x))
        return self.head(torch.tanh(self.fc(hidden)).mean(1))


def judged(inspect, model, ids=None):
    """Return the report on a batch of words."""
    ids = torch.randint(1, 50, (64, LENGTH)) if ids is None else ids
    target = torch.randint(3, (64,))
    return inspect(model, ids, target, loss=F.cross_entropy)


def told(findings):
    """The layers of which the check says so."""
    return [one.layer for one in findings if "they are computed from" in one.message]


def real(x):
    """Where there is a word."""
    return x.ne(0).long()


@pytest.mark.parametrize(
    "positions",
    [
        lambda x: real(x) + 1,
        lambda x: (x == 77).long().cumsum(1),
        lambda x: (real(x).cumsum(1) * real(x)).clamp(max=1),
        lambda x: (real(x).cumsum(1) / 64).long(),
    ],
    ids=["not summed", "of a wrong mask", "clamped", "divided"],
)
def test_positions_destroyed_on_the_way_are_found(positions, inspect):
    """They are made of a mask, and do not count."""
    report = judged(inspect, Looks(positions))
    assert told(report.violations) == ["second"]
    (found,) = report.violations
    assert found.check == "wiring"
    assert "'input 0', which they are computed from, differs" in found.message
    assert "destroyed on the way from 'input 0' (`ne`" in found.cause or "`eq`" in found.cause


def test_ids_destroyed_on_the_way_are_the_models_fault(inspect):
    """`inputs` does not put it down to the tokeniser."""
    report = judged(inspect, Looks(lambda x: torch.arange(LENGTH), words=lambda x: x // 100))
    assert told(report.violations) == ["words"]
    assert [v.check for v in report.violations] == ["wiring"]
    assert "(`floordiv`)" in report.violations[0].cause


def test_ids_that_the_caller_gave_equal_are_the_batchs(inspect):
    """As before."""
    report = judged(inspect, Looks(lambda x: torch.arange(LENGTH)), torch.full((64, LENGTH), 3))
    assert [v.check for v in report.violations] == ["inputs"]


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (lambda x: real(x).cumsum(1) * real(x), 64),
        (lambda x: (x == 77).long().cumsum(1), 4),
        (lambda x: x[:, :1].expand_as(x), 64),
        (lambda x: (x[:, :1] * 0).expand(-1, 1), 64),
    ],
    ids=["counted", "few kinds", "laid out", "one a sample"],
)
def test_designs_are_left_alone(ids, rows, inspect):
    """Positions that count, kinds of which there are few, and what was given."""
    batch = torch.randint(1, 50, (64, LENGTH))
    batch[:, 0] = 2
    report = judged(inspect, Looks(ids, rows), batch)
    assert told(report.violations) == told(report.warnings) == []


@pytest.mark.parametrize(
    ("ids", "rows"),
    [(lambda x: (x == 77).long().cumsum(1), 8), (lambda x: x // 256, 64)],
    ids=["segments", "pages of characters"],
)
def test_kinds_of_tokens_only_warn(ids, rows, inspect):
    """A batch may hold one segment, and characters of one page."""
    report = judged(inspect, Looks(ids, rows))
    assert told(report.violations) == []
    assert told(report.warnings) == ["second"]
    assert "may be meant" in report.warnings[0].cause


def test_codes_that_a_layer_chooses_are_not_judged(inspect):
    """A fresh network may choose the same everywhere."""

    class Codes(Looks):
        def __init__(self):
            super().__init__(None)
            self.choice = nn.Linear(16, 64)
            nn.init.zeros_(self.choice.weight)

        def forward(self, x):
            hidden = self.words(x)
            codes = self.second(self.choice(hidden).argmax(-1) * real(x))
            return self.head(torch.tanh(self.fc(hidden + codes)).mean(1))

    report = judged(inspect, Codes())
    assert told(report.violations) == told(report.warnings) == []


def test_positions_without_a_batch_dimension(inspect):
    """A table as long as the sequence is one of positions."""

    def first_row(x):
        return (x[0] * 0).long()

    assert told(judged(inspect, Looks(first_row, LENGTH)).violations) == ["second"]
    assert told(judged(inspect, Looks(first_row, 64)).violations) == []
