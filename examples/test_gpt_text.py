"""A small GPT on the text of Python's help: attention, residuals and LayerNorm."""

from __future__ import annotations

import pytest
import torch

from examples.data import VOCABULARY, encode, read_text, text_batches
from examples.models.gpt import GPT, next_token_loss
from examples.training import train

LENGTH = 64

# The help's text differs between versions of Python, so a recorded number must not depend on it.
PROVERBS = """\
All that glitters is not gold. A stitch in time saves nine. Still waters run deep.
Look before you leap. He who hesitates is lost. Many hands make light work.
Too many cooks spoil the broth. The early bird catches the worm. Haste makes waste.
Actions speak louder than words. Better late than never. Practice makes perfect.
"""


@pytest.fixture(scope="session")
def text():
    """The text as tokens: nine tenths to train on, one tenth held out."""
    tokens = read_text()
    return tokens.tensor_split([len(tokens) * 9 // 10])


@pytest.fixture(scope="session")
def gpt(text):
    """A `GPT` after 60 steps."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, LENGTH)
    train(model, text_batches(text[0], LENGTH, steps=60), next_token_loss, lr=5e-3)
    return model


@pytest.fixture(scope="session")
def held_out(text):
    """A batch that training has not seen: inputs and targets."""
    return next(text_batches(text[1], LENGTH, steps=1))


def test_learned_more_than_letter_frequencies(gpt, text, held_out):
    """The held-out loss lies half a nat below the entropy of the letters on their own."""
    frequencies = torch.bincount(text[1]) / len(text[1])
    entropy = torch.special.entr(frequencies).sum()
    inputs, targets = held_out
    assert next_token_loss(gpt(inputs), targets) < entropy - 0.5


def test_trained_model_is_healthy(gpt, held_out, inspector):
    """A loss of our own is a function of output and target, as everywhere in PyTorch."""
    inputs, targets = held_out
    report = inspector(gpt).run_inspection(inputs, target=targets, loss=next_token_loss)
    report.assert_healthy()


@pytest.mark.modelhealth(layers="blocks.*", max_grad_norm=10.0, min_grad_norm=1e-5)
def test_gradients_reach_every_block(held_out, inspector):
    """A fresh model sends neither a vanishing nor an exploding gradient into its blocks."""
    torch.manual_seed(0)
    inputs, targets = held_out
    inspector(GPT(VOCABULARY, LENGTH)).run_inspection(inputs, target=targets, loss=next_token_loss)


def test_initialised_model_has_not_drifted(inspector, health_snapshot):
    """A fresh model has the statistics on record, on a text that never changes."""
    torch.manual_seed(0)
    windows = encode(PROVERBS)[: 4 * (LENGTH + 1)].view(4, LENGTH + 1)
    inspection = inspector(GPT(VOCABULARY, LENGTH).eval())
    # A gradient through the first position's attention, which sees one token only, is zero or
    # rounding, as the machine has it: what it does to the parameters is enough to record.
    inspection.watch(what=("activations", "parameter_gradients"))
    report = inspection.run_inspection(windows[:, :-1], target=windows[:, 1:], loss=next_token_loss)
    assert report == health_snapshot
