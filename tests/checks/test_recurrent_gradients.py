"""Recurrent layers of which one step, one layer or one direction alone is read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Reader(nn.Module):
    """A recurrent layer, of whose output and state a function reads something."""

    def __init__(self, read, kind=nn.LSTM, width=16, **options):
        super().__init__()
        self.rnn = kind(8, 16, batch_first=True, **options)
        self.head = nn.Linear(width, 3)
        self.read = read

    def forward(self, x):
        output, state = self.rnn(x)
        return self.head(self.read(output, state[0] if isinstance(state, tuple) else state))


@pytest.fixture
def judged(inspect):
    """Return the report of a model of sequences."""

    def run(model, steps=10):
        target = torch.randint(3, (64,))
        return inspect(model, torch.randn(64, steps, 8), target, loss=F.cross_entropy)

    return run


def told(findings):
    """Those that are about weights of recurrent layers."""
    return [one for one in findings if one.check == "missing_gradients"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_first_step_read_is_found(kind, judged):
    """Nothing is remembered there, and what remembers learns nothing."""
    (found,) = told(judged(Reader(lambda out, _: out[:, 0], kind)).violations)
    assert (found.layer, found.tensor, found.grade) == ("rnn", "weight_hh_l0", "fail")
    assert "exactly zero over 10 steps" in found.message
    assert "only the first step is read at" in found.cause
    assert "test_recurrent_gradients.py:" in found.cause


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "read",
    [lambda out, _: out[:, -1], lambda out, _: out.mean(1), lambda _, state: state[-1]],
    ids=["last step", "mean", "last state"],
)
def test_whole_sequence_read_is_healthy(kind, read, judged):
    """Every way to read it all."""
    report = judged(Reader(read, kind, num_layers=2))
    assert report.healthy
    assert report.warnings == ()


def test_sequence_of_one_step_is_healthy(judged):
    """Of one step there is nothing to remember."""
    assert judged(Reader(lambda out, _: out[:, 0]), steps=1).healthy


def test_frozen_state_is_meant(judged):
    """An echo state network learns nothing there on purpose."""
    model = Reader(lambda out, _: out[:, 0])
    model.rnn.weight_hh_l0.requires_grad_(False)
    assert judged(model).healthy


@pytest.mark.parametrize(
    ("step", "tensor", "cause"),
    [
        (-1, "weight_hh_l0_reverse", "has seen one step"),
        (0, "weight_hh_l0", "has seen one step"),
    ],
)
def test_half_of_two_directions_is_only_warned_of(step, tensor, cause, judged):
    """The other half has seen the whole sequence."""
    model = Reader(lambda out, _: out[:, step], width=32, bidirectional=True)
    report = judged(model)
    assert report.violations == ()
    (found,) = told(report.warnings)
    assert found.tensor == tensor
    assert cause in found.cause


def test_lower_layer_read_is_found(judged):
    """The first state is that of the first layer."""
    (found,) = told(judged(Reader(lambda _, state: state[0], num_layers=3)).violations)
    assert found.tensor == "weight_ih_l1"
    assert "weight_ih_l1 and weight_ih_l2 is exactly zero" in found.message
    assert "h_n[-1] the last" in found.cause


def test_one_direction_read_is_only_warned_of(judged):
    """The last state of two directions is the reverse one."""
    model = Reader(lambda _, state: state[-1], num_layers=2, bidirectional=True)
    report = judged(model)
    assert report.violations == ()
    (found,) = told(report.warnings)
    assert found.tensor == "weight_ih_l1"
    assert "one direction is read" in found.cause


def test_steps_that_the_batch_chooses_are_only_warned_of(inspect):
    """Samples of a single step may be padded to more."""

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

        def forward(self, x, lengths):
            output, _ = self.rnn(x)
            places = (lengths - 1)[:, None, None].expand(-1, 1, 16)
            return self.head(output.gather(1, places)[:, 0])

    batch, target = torch.randn(64, 5, 8), torch.randint(3, (64,))
    ones = torch.ones(64, dtype=torch.long)
    report = inspect(Chosen(), (batch, ones), target, loss=F.cross_entropy)
    assert report.violations == ()
    assert len(told(report.warnings)) == 1
    assert inspect(Chosen(), (batch, 4 * ones), target, loss=F.cross_entropy).healthy


def test_packed_sequences_are_not_judged_by_steps(inspect):
    """Their shape does not tell how many there are."""

    class Packed(Reader):
        def forward(self, x):
            lengths = torch.ones(len(x), dtype=torch.long)
            _, state = self.rnn(pack_padded_sequence(x, lengths, batch_first=True))
            return self.head(state[0][-1])

    target = torch.randint(3, (64,))
    report = inspect(Packed(None), torch.randn(64, 5, 8), target, loss=F.cross_entropy)
    assert told(report.violations) == []


class Cells(nn.Module):
    """A cell called once a step, whose state at one step is read."""

    def __init__(self, step, carries=True):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 3)
        self.step, self.carries = step, carries

    def forward(self, x):
        states, state = [], torch.zeros(len(x), 16)
        for token in x.unbind(1):
            made = self.cell(token, state)
            states.append(made)
            state = made if self.carries else state
        return self.head(states[self.step])


def test_cell_is_judged_as_a_layer_is(judged):
    """Where it is given what it made of the step before."""
    (found,) = told(judged(Cells(0)).violations)
    assert found.layer == "cell"
    assert "weight_hh is exactly zero over 10 steps" in found.message
    assert judged(Cells(-1)).healthy


def test_two_calls_without_a_state_are_no_sequence(judged):
    """One cell may make the first step of two sequences."""
    assert told(judged(Cells(-1, carries=False), steps=2).violations) == []
