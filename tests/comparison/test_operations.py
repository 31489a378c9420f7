"""Comparisons name the operation that is new or gone between two layers, with its line."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from corpus.models import changed
from corpus.models.changed import Block, Scale
from pytest_modelhealth.comparing import compare


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
    "rooted": "`abs` of `masked_fill` is new (changed.py:",
    "detached": "`detach` of `masked_fill` is new (changed.py:",
    "rewritten": "its own code after",
}


@pytest.mark.parametrize("wrong", WORDS)
def test_the_operation_that_is_new_or_gone_is_named(wrong):
    """A lost residual or mask, a new function, a detach; no long lists. A line is that of it."""
    torch.manual_seed(0)
    text = repr(compare(*twins(wrong), torch.randn(16, 8)))
    assert WORDS[wrong] in text, text
    if wrong == "rooted":
        numbers = {int(n) for n in re.findall(r"changed\.py:(\d+)", text)}
        lines = Path(changed.__file__).read_text().splitlines()
        assert numbers
        assert all("left.abs().sqrt()" in lines[number - 1] for number in numbers)


def test_the_code_of_a_layer_of_ones_own_is_known_too():
    """Same weights, other output: here is what it computes now."""
    text = repr(compare(Scale(), Scale(rooted=True), torch.rand(16, 8)))
    assert "`sqrt` of `square` is new" in text or "`sqrt` of `pow` is new" in text, text
