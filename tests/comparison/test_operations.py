"""Comparisons name the operation that is new or gone between two layers, with its line."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_modelhealth.comparing import compare


class Block(nn.Module):
    """A residual block with a masked, scaled branch; `wrong` selects a slip in its forward."""

    def __init__(self, wrong=""):
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mask", torch.arange(8) % 3 == 0)
        self.wrong = wrong

    def forward(self, x):
        h = self.norm(x)
        left, right = self.left(h), self.right(h)
        if self.wrong != "unmasked":
            left = left.masked_fill(self.mask, 0.0)
        if self.wrong == "rooted":
            left = left.abs().sqrt()
        if self.wrong == "detached":
            return x + torch.tanh(left.detach()) * right
        if self.wrong == "lost":
            return torch.tanh(left) * right
        if self.wrong == "rewritten":
            return torch.tanh((x.exp() - left.square() / 2).clamp(-1, 1).log1p().cos()) - right
        return x + torch.tanh(left) * right


class Scale(nn.Module):
    """A layer of the user's own, with no layer inside."""

    def __init__(self, rooted=False):
        super().__init__()
        self.weight, self.rooted = nn.Parameter(torch.ones(8)), rooted

    def forward(self, x):
        x = x.square()
        return self.weight * (x.sqrt() if self.rooted else x)


def twins(wrong):
    """Two stacks of equal weights, the middle block of the second with a slip."""
    right = nn.Sequential(Block(), Block(), Block())
    other = nn.Sequential(Block(), Block(wrong), Block())
    other.load_state_dict(right.state_dict())
    return right, other


OF_A_SUM = "1: every layer before is right, its output is not: the sum of `1`'s input and a product"
WORDS = {
    "lost": f"{OF_A_SUM} is gone",
    "unmasked": "is not: `masked_fill` of `1.left` and `1.mask` is gone",
    "rooted": "`abs` of `masked_fill` is new (test_operations.py:",
    "detached": "`detach` of `masked_fill` is new (test_operations.py:",
    "rewritten": "its own code after",
}


@pytest.mark.parametrize("wrong", WORDS)
def test_the_operation_that_is_new_or_gone_is_named(wrong):
    """A lost residual or mask, a new function, a detach; no long lists. A line is that of it."""
    torch.manual_seed(0)
    text = repr(compare(*twins(wrong), torch.randn(16, 8)))
    assert WORDS[wrong] in text, text
    if wrong == "rooted":
        numbers = {int(n) for n in re.findall(r"test_operations\.py:(\d+)", text)}
        lines = Path(__file__).read_text().splitlines()
        assert numbers
        assert all("left.abs().sqrt()" in lines[number - 1] for number in numbers)


def test_the_code_of_a_layer_of_ones_own_is_known_too():
    """Same weights, other output: here is what it computes now."""
    text = repr(compare(Scale(), Scale(rooted=True), torch.rand(16, 8)))
    assert "`sqrt` of `square` is new" in text or "`sqrt` of `pow` is new" in text, text
