"""Rows of zeros without gradient in matrices that learn otherwise, and factors that wait."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Net, batch, holding

CHECK = "missing_gradients"


def asked(model, inputs):
    """Return a model with a class for each sample."""
    return model, inputs, torch.randint(3, (64,)), F.cross_entropy


def zeros(rows, *, columns=False):
    """Return what sets rows of a matrix to zero."""
    return lambda weight: (weight[:, rows] if columns else weight[rows]).zero_()


def attention(rows):
    """Return attention beside a residual, of whose packed projections these rows are zero."""

    def forward(m, x):
        x = m.stem(x)
        return m.head((x + m.attention(x, x, x, need_weights=False)[0]).mean(1))

    inner = nn.MultiheadAttention(16, 4, batch_first=True)
    holding(inner, in_proj_weight=zeros(slice(rows)))
    return asked(Net(forward, stem=(8, 16), head=(16, 3), attention=inner), batch(64, 6, 8))


def packed(rows):
    """Return the same with one linear layer for queries, keys and values."""

    def forward(m, x):
        x = m.stem(x)
        query, key, value = m.qkv(x).chunk(3, -1)
        return m.head((x + m.out(F.scaled_dot_product_attention(query, key, value))).mean(1))

    qkv = holding(nn.Linear(32, 96), weight=zeros(slice(rows)), bias=0.0)
    return asked(Net(forward, stem=(8, 32), head=(32, 3), qkv=qkv, out=(32, 32)), batch(64, 6, 8))


def filters(rows, *, moved=False):
    """Return convolutions, of whose first some filters are zero and below zero, trained or not."""

    def forward(m, x):
        return m.head(F.relu(m.second(F.relu(m.first(x)))).mean((2, 3)))

    first = nn.Conv2d(3, 32, 3)
    holding(first, weight=zeros(slice(rows)), bias=lambda b: b[:rows].fill_(-0.01))
    second = holding(nn.Conv2d(32, 32, 3), bias=lambda b: b.add_(float(moved)))
    return asked(Net(forward, first=first, second=second, head=(32, 3)), batch(64, 3, 8, 8))


def columns():
    """Return weights of zero from units that give zero."""

    def forward(m, x):
        units = torch.arange(32) >= 8
        return m.head(torch.tanh(m.middle(m.stem(x) * units)).mean(1))

    middle = holding(nn.Linear(32, 32), weight=zeros(slice(8), columns=True))
    return asked(Net(forward, stem=(8, 32), middle=middle, head=(32, 3)), batch(64, 6, 8))


def spelled():
    """Return words that are not in a batch, which give zeros as rows that nobody asks for."""
    project = holding(nn.Linear(64, 16), weight=zeros(slice(32, None), columns=True))
    model = Net(
        lambda m, ids: m.head(torch.tanh(m.project(F.one_hot(ids, 64).float()).mean(1))),
        project=project, head=(16, 3),
    )  # fmt: skip
    return asked(model, torch.randint(32, (64, 8)))


def looked_up():
    """Return a table of rows that no id asks for."""
    table = nn.Parameter(torch.randn(64, 16))
    with torch.no_grad():
        table[32:] = 0.0
    model = Net(lambda m, ids: m.head(m.table[ids].mean(1)), table=table, head=(16, 3))
    return asked(model, torch.randint(0, 32, (64, 10)))


def low_rank(rows):
    """Return two low-rank changes from one packed layer, whose second factors start at zero."""

    def forward(m, x):
        for_a, for_b = m.down(x).chunk(2, -1)
        change = torch.cat([m.a(for_a), m.b(for_b)], -1)
        return m.head(torch.tanh(m.base(x) + change))

    down = holding(nn.Linear(16, 8, bias=False), weight=zeros(slice(rows, None)))
    a, b = (holding(nn.Linear(4, 16, bias=False), weight=0.0) for _ in range(2))
    return asked(Net(forward, base=(16, 32), down=down, a=a, b=b, head=(32, 3)), batch())


FAULTS = {
    # neither gets a gradient, while the values of the same matrix learn
    "queries and keys of zero": (
        lambda: attention(32), "fail", "attention", "in_proj_weight", "multiplied by zeros",
        "32 of the 48 rows (0 to 31) of its in_proj_weight are zero, get a gradient of exactly",
        "and still do after 3 steps of training",
    ),
    "queries and keys of a linear layer": (
        lambda: packed(64), "fail", "qkv", "64 of the 96 rows (0 to 63) of its weight",
    ),
    # a filter of zeros below zero never passes a ReLU; pruning leaves three of 64
    "dead filters": (lambda: filters(6), "fail", "first", "dead from the start"),
    # structured pruning has such rows by design
    "dead filters of a trained model": (lambda: filters(6, moved=True), "unsure", "first"),
    # weights of zero from units that give zero cannot begin either
    "columns": (columns, "fail", "middle", "8 of the 32 columns"),
    # neither gets a gradient but through the other
    "rows and the layer that takes them": (
        lambda: low_rank(4), "fail", "b", "still is after 3 steps of training",
    ),
}  # fmt: skip
HEALTHY = {
    # keys that are not zero give the queries a gradient (muP starts so)
    "queries of zero": lambda: attention(16),
    "three dead filters": lambda: filters(3),
    "columns of data that are zero in this batch": spelled,
    "a table that is looked up": looked_up,
    "one factor of zero": lambda: low_rank(8),
}
