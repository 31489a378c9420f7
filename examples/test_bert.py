"""BERT from Hugging Face's `transformers`, made from its configuration: nothing is downloaded."""

from __future__ import annotations

import pytest
import torch

from examples.data import VOCABULARY, encode

transformers = pytest.importorskip("transformers")

PADDING, MASK = 0, 1  # control characters, which no text holds
IGNORED = -100  # the label that transformers leaves out of the loss

SENTENCES = (
    "The bank raised its interest rates again.",
    "They had a picnic on the bank of the river.",
    "Can you recommend a good book about birds?",
    "The train to the coast was two hours late, so we walked along the old canal instead.",
    "Nobody had told the gardener about the new gate.",
    "Her answer was short.",
    "After the storm the harbour was full of broken boats.",
    "He reads slowly, but he remembers everything.",
)


@pytest.fixture
def bert():
    """A BERT with two layers, as `transformers` initialises it."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        pad_token_id=PADDING,
    )
    return transformers.BertForMaskedLM(config)


@pytest.fixture
def batch():
    """`SENTENCES`, padded, with 15 % of the characters masked: what a data collator returns."""
    original = torch.nn.utils.rnn.pad_sequence(
        [encode(sentence) for sentence in SENTENCES], batch_first=True, padding_value=PADDING
    )
    draw = torch.rand(original.shape, generator=torch.Generator().manual_seed(0))
    masked = (draw < 0.15) & (original != PADDING)
    return {
        "input_ids": original.masked_fill(masked, MASK),
        "attention_mask": (original != PADDING).long(),
        "labels": original.masked_fill(~masked, IGNORED),
    }


def test_model_is_healthy(bert, batch, inspector):
    """A mapping goes in as keywords, and the model's own ``output.loss`` is the loss."""
    inspector(bert.train()).run_inspection(batch).assert_healthy()


@pytest.mark.modelhealth(layers="bert.encoder.layer.*.attention.*", min_grad_norm=1e-6)
def test_gradients_reach_the_attention(bert, batch, inspector):
    """Wildcards follow the names that `named_modules` gives."""
    inspector(bert).run_inspection(batch)


def test_initialised_model_has_not_drifted(bert, batch, inspector, health_snapshot):
    """A fresh BERT has the statistics on record; a new release of transformers can change them."""
    inspection = inspector(bert.eval()).watch(what=("activations", "parameter_gradients"))
    assert inspection.run_inspection(batch) == health_snapshot
