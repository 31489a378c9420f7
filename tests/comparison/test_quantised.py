"""Quantised, fused, frozen, pruned and adapted candidates."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from corpus.models.quantised import CASES, WAYS, batch, fresh, static
from pytest_modelhealth import Inspector, compare

OF_TORCHAO = () if find_spec("torchao") else ("torchao", "pt2e")
pytestmark = pytest.mark.filterwarnings("ignore")

ways = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.skipif(way in OF_TORCHAO, reason="needs torchao"))
        for way in WAYS
    ],
)

ENDS = {"conv1": "relu1", "conv2": "relu2", "block.fc": "block.relu"}
"""What fused layers give the output of."""


@ways
def test_rounding_in_eight_bits_is_no_difference(way):
    """Every layer that can be seen is compared, and is no further off than its limit."""
    comparison = compare(fresh(), WAYS[way](fresh(), batch()), batch())
    assert comparison.equivalent, str(comparison)
    compared = {layer.name for layer in comparison.layers.values() if layer.tensors}
    assert {"block.relu", "head"} <= compared
    Inspector(WAYS[way](fresh(), batch())).run_inspection(batch()).assert_healthy()


@ways
def test_other_weights_are_more_than_rounding(way):
    """A layer quantised with weights of another training is named in every way of quantising."""
    other = fresh()
    with torch.no_grad():
        other.block.fc.weight += 0.05 * torch.randn(24, 16, generator=torch.manual_seed(3))
    comparison = compare(fresh(), WAYS[way](other, batch()), batch())
    assert comparison.first_divergence.layer == "block.fc"
    assert "weight differs" in comparison.first_divergence.cause


def test_a_fused_layer_stands_for_the_last_of_the_layers_in_it():
    """Its output is that of the activation; norm and activation are said to be folded into it."""
    comparison = compare(fresh(), static(fresh(), batch()), batch())
    for layer, last in ENDS.items():
        pair = comparison[layer].pair
        assert (pair.output_of or layer) == last
        assert last == layer or comparison[last].pair.is_folded


@pytest.mark.parametrize("case", CASES)
def test_what_was_made_of_a_model_is_the_same_or_named_where_it_is_not(case):
    """Fused, folded, frozen, pruned and adapted; rightly and wrongly."""
    build, make, culprit, words = CASES[case]
    comparison = compare(build(), make(), batch())
    assert comparison.equivalent is (culprit is None), str(comparison)
    assert words in str(comparison)
    if culprit is not None:
        assert comparison.first_divergence.layer.startswith(culprit)
