"""Rows of zeros without gradient in matrices that learn otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def told(report):
    """What the check says of rows of zeros."""
    return [v for v in report.violations if "are zero, get a gradient" in v.message]


def undecided(report):
    """The layers of whose rows it says nothing certain."""
    return [i.layer for i in report.inconclusive if "are zero, get a gradient" in i.reason]


class Attention(nn.Module):
    """Attention beside a residual, by the module of torch."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Packed(nn.Module):
    """The same with one linear layer for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 3)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        x = self.stem(x)
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.head((x + self.out(F.scaled_dot_product_attention(query, key, value))).mean(1))


class Filters(nn.Module):
    """Two convolutions with a ReLU after each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


def zeroed(model, tensor, rows):
    """Set rows of a parameter to zero, and those of its bias to a little less."""
    layer, _, name = tensor.rpartition(".")
    own = model.get_submodule(layer)
    with torch.no_grad():
        getattr(own, name)[:rows] = 0.0
        if name == "weight":
            own.bias[:rows] = -0.01
    return model


def judged(inspect, model):
    """Return the report of a model of sequences or images."""
    shape = (64, 3, 8, 8) if isinstance(model, Filters) else (64, 6, 8)
    target = torch.randint(3, (64,))
    return inspect(model, torch.randn(shape), target, loss=F.cross_entropy)


def test_queries_and_keys_of_zero_wait_for_each_other(inspect):
    """Neither gets a gradient, while the values of the same matrix learn."""
    report = judged(inspect, zeroed(Attention(), "attention.in_proj_weight", 32))
    (found,) = told(report)
    assert (found.check, found.layer, found.tensor) == (
        "missing_gradients", "attention", "in_proj_weight",
    )  # fmt: skip
    assert found.message == (
        "32 of the 48 rows (0 to 31) of its in_proj_weight are zero, get a gradient of exactly "
        "zero, and still do after 3 steps of training"
    )
    assert "multiplied by zeros" in found.cause
    assert found.value == pytest.approx(32 / 48)


@pytest.mark.parametrize("rows", [16, 0], ids=["queries alone", "none"])
def test_one_factor_of_zero_is_a_start(rows, inspect):
    """Keys that are not zero give the queries a gradient (muP starts so)."""
    report = judged(inspect, zeroed(Attention(), "attention.in_proj_weight", rows))
    assert told(report) == []
    assert undecided(report) == []


def test_rows_of_a_linear_layer_are_found(inspect):
    """A projection need not be that of torch's attention."""
    model = zeroed(Packed(), "qkv.weight", 64)
    nn.init.zeros_(model.qkv.bias)
    (found,) = told(judged(inspect, model))
    assert found.layer == "qkv"
    assert "64 of the 96 rows (0 to 63) of its weight" in found.message


def test_dead_filters_are_told_by_the_activation_behind_them(inspect):
    """A filter of zeros below zero never passes a ReLU."""
    (found,) = told(judged(inspect, zeroed(Filters(), "first.weight", 6)))
    assert found.layer == "first"
    assert "dead from the start" in found.cause


@pytest.mark.parametrize("rows", [1, 3], ids=["one", "three"])
def test_few_rows_are_no_finding(rows, inspect):
    """Pruning leaves three of 64."""
    report = judged(inspect, zeroed(Filters(), "first.weight", rows))
    assert told(report) == []
    assert undecided(report) == []


def test_limit_is_a_setting(inspect):
    """A project that starts so says how much is meant."""
    model = zeroed(Filters(), "first.weight", 6)
    target = torch.randint(3, (64,))
    batch = torch.randn(64, 3, 8, 8)
    settings = {"settings": {"max_idle_rows": 0.2}}
    assert told(inspect(model, batch, target, loss=F.cross_entropy, **settings)) == []


def test_trained_model_is_inconclusive(inspect):
    """Structured pruning has such rows by design."""
    model = zeroed(Filters(), "first.weight", 6)
    with torch.no_grad():
        model.second.bias += 1.0
    report = judged(inspect, model)
    assert told(report) == []
    assert undecided(report) == ["first"]


def test_columns_are_found_as_rows_are(inspect):
    """Weights of zero from units that give zero cannot begin either."""

    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.middle = nn.Linear(8, 32), nn.Linear(32, 32)
            self.head = nn.Linear(32, 3)
            with torch.no_grad():
                self.middle.weight[:, :8] = 0.0

        def forward(self, x):
            units = torch.arange(32) >= 8
            return self.head(torch.tanh(self.middle(self.stem(x) * units)).mean(1))

    (found,) = [v for v in told(judged(inspect, Waiting())) if v.layer == "middle"]
    assert "8 of the 32 columns" in found.message


def test_columns_of_data_that_are_zero_in_this_batch_wait_for_nothing(inspect):
    """Words that are not in a batch give zeros, as rows of a table that nobody asks for."""

    class Spelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.head = nn.Linear(64, 16), nn.Linear(16, 3)
            with torch.no_grad():
                self.project.weight[:, 32:] = 0.0

        def forward(self, ids):
            return self.head(torch.tanh(self.project(F.one_hot(ids, 64).float()).mean(1)))

    ids = torch.randint(32, (64, 8))
    report = inspect(Spelled(), ids, torch.randint(3, (64,)), loss=F.cross_entropy)
    assert told(report) == []


def test_table_that_is_looked_up_is_left_out(inspect):
    """Rows that no id asks for have no gradient, whatever they hold."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 16))
            self.head = nn.Linear(16, 3)
            with torch.no_grad():
                self.table[32:] = 0.0

        def forward(self, ids):
            return self.head(self.table[ids].mean(1))

    ids, target = torch.randint(0, 32, (64, 10)), torch.randint(3, (64,))
    report = inspect(Table(), ids, target, loss=F.cross_entropy)
    assert report[""].zero_slices["table"].rows == frozenset(range(32, 64))
    assert told(report) == []
    assert undecided(report) == []
