"""A refactor of an attention layer, compared with what it replaces: no number may change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from examples.models.gpt import GPT, CausalSelfAttention, next_token_loss


class WrittenOut(nn.Module):
    """`CausalSelfAttention` with three projections and the softmax written out."""

    def __init__(self, fused: CausalSelfAttention) -> None:
        super().__init__()
        self.heads = fused.heads
        width = fused.projection.in_features
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        weights, biases = fused.qkv.weight.chunk(3), fused.qkv.bias.chunk(3)
        for linear, weight, bias in zip(
            (self.query, self.key, self.value), weights, biases, strict=True
        ):
            linear.weight, linear.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.projection = fused.projection

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        scores = query @ key.mT / key.shape[-1] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.projection((weights @ value).transpose(1, 2).flatten(2))


@pytest.fixture
def old():
    """The model before the refactor."""
    torch.manual_seed(0)
    return GPT(vocabulary=50, length=16)


@pytest.fixture
def new(old):
    """The model after it, on the same weights."""
    model = copy.deepcopy(old)
    for block in model.blocks:
        block.attention = WrittenOut(block.attention)
    return model


@pytest.fixture
def batch():
    """Inputs and targets."""
    tokens = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_writing_attention_out_changes_no_number(old, new, batch, inspector):
    """Forward, gradients and gradients of parameters are the same up to rounding."""
    inputs, targets = batch
    comparison = inspector.compare(old, new, inputs, targets, loss=next_token_loss)
    comparison.assert_equivalent()


def test_bfloat16_is_no_worse_than_bfloat16_must_be(old, batch, inspector):
    """A cast is judged by the rounding of its own precision."""
    inspector.compare(old, copy.deepcopy(old).bfloat16(), batch[0]).assert_equivalent()


def test_a_saved_state_comes_back_whole(old, batch, inspector, tmp_path):
    """A state_dict is loaded into a copy of the reference and compared bit for bit."""
    torch.save(old.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    comparison = inspector.compare(old, loaded, batch[0])
    assert comparison.equivalent
    assert comparison.basis == "bitwise equality"
