"""Recurrent layers of which one step, one layer or one direction alone is read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from corpus.checks.parts import Net, batch

CHECK = "missing_gradients"


def reads(read, kind=nn.LSTM, steps=10, width=16, **options):
    """Return a recurrent layer, of whose output and state a function reads something."""

    def forward(m, x):
        output, state = m.rnn(x)
        return m.head(read(output, state[0] if isinstance(state, tuple) else state))

    rnn = kind(8, 16, batch_first=True, **options)
    return asked(Net(forward, rnn=rnn, head=(width, 3)), batch(64, steps, 8))


def asked(model, inputs):
    """Return a model of sequences, with a class for each."""
    return model, inputs, torch.randint(3, (64,)), F.cross_entropy


def chosen(length):
    """Return steps that the batch chooses: samples may be padded."""

    def forward(m, x, lengths):
        output, _ = m.rnn(x)
        places = (lengths - 1)[:, None, None].expand(-1, 1, 16)
        return m.head(output.gather(1, places)[:, 0])

    model = Net(forward, rnn=nn.GRU(8, 16, batch_first=True), head=(16, 3))
    return asked(model, (batch(64, 5, 8), torch.full((64,), length)))


def packed():
    """Return packed sequences, whose shape does not tell how many steps there are."""

    def forward(m, x):
        lengths = torch.ones(len(x), dtype=torch.long)
        _, state = m.rnn(pack_padded_sequence(x, lengths, batch_first=True))
        return m.head(state[0][-1])

    model = Net(forward, rnn=nn.LSTM(8, 16, batch_first=True), head=(16, 3))
    return asked(model, batch(64, 5, 8))


def echo():
    """Return an echo state network, which learns nothing of its state on purpose."""
    made = reads(lambda out, _: out[:, 0])
    made[0].rnn.weight_hh_l0.requires_grad_(False)
    return made


def cells(step, *, carries=True, steps=10):
    """Return a cell called once a step, whose state at one step is read."""

    def forward(m, x):
        states, state = [], torch.zeros(len(x), 16)
        for token in x.unbind(1):
            made = m.cell(token, state)
            states.append(made)
            state = made if carries else state
        return m.head(states[step])

    return asked(Net(forward, cell=nn.GRUCell(8, 16), head=(16, 3)), batch(64, steps, 8))


BOTH = {"width": 32, "bidirectional": True}
FAULTS = {
    # nothing is remembered there, and what remembers learns nothing
    "the first step": (
        lambda: reads(lambda out, _: out[:, 0]), "fail", "rnn", "weight_hh_l0",
        "exactly zero", "one step, layer or direction alone is read", "out[:, 0]",
    ),
    "the first state is that of the first layer": (
        lambda: reads(lambda _, state: state[0], num_layers=3), "fail", "rnn",
        "weight_ih_l1 and weight_hh_l1 and weight_ih_l2", "state[0]", "h_n[-1]",
    ),
    # the other half has seen the whole sequence
    "the last step of two directions": (
        lambda: reads(lambda out, _: out[:, -1], **BOTH), "warn", "rnn", "weight_hh_l0_reverse",
        "out[:, -1]",
    ),
    "one direction": (
        lambda: reads(lambda _, s: s[-1], num_layers=2, bidirectional=True), "warn", "rnn",
        "weight_ih_l1", "s[-1]",
    ),
    "samples of one step that may be padded": (lambda: chosen(1), "warn", "rnn"),
    # where it is given what it made of the step before
    "a cell": (lambda: cells(0), "fail", "cell", "weight_hh is exactly zero"),
}  # fmt: skip
HEALTHY = {
    "the last step": lambda: reads(lambda out, _: out[:, -1], num_layers=2),
    "the mean": lambda: reads(lambda out, _: out.mean(1), nn.GRU, num_layers=2),
    "the last state": lambda: reads(lambda _, state: state[-1], nn.RNN, num_layers=2),
    "a sequence of one step": lambda: reads(lambda out, _: out[:, 0], steps=1),
    "a frozen state": echo,
    "a step that the batch chooses": lambda: chosen(4),
    "packed sequences": packed,
    "the last of a cell": lambda: cells(-1),
    # one cell may make the first step of two sequences
    "two calls without a state": lambda: cells(-1, carries=False, steps=2),
}
