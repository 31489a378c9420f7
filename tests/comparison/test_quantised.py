"""Quantised, fused, frozen, pruned and adapted candidates."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import prune

from corpus.models.quantised import (
    WAYS,
    adapted,
    batch,
    edited,
    folded,
    fresh,
    normed,
    pruned,
    static,
    unloaded,
    unmasked,
    wrongly_folded,
)
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


TRIPLES = [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"]]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str | None, str]] = {
    # fused without its activation, the layer gives what it gave before that: it is missed
    "an activation that was lost": (
        fresh, lambda: static(edited(fresh, lambda m: setattr(m, "relu1", nn.Identity())), batch()),
        "relu1", "",
    ),
    "fused": (fresh, lambda: quantization.fuse_modules(fresh(), TRIPLES), None, ""),
    # the weights of the host are held to those that folding makes, and so to single values
    "a norm folded": (normed, lambda: edited(normed, folded), None, ""),
    "a norm without weights folded": (
        lambda: normed(False), lambda: edited(lambda: normed(False), folded), None, ""
    ),
    "a norm folded wrongly": (
        normed, lambda: edited(normed, wrongly_folded), "1", "1 of 2,400"
    ),
    # calibrated on numbers 600 times as large, each layer rounds well, and the model is gone
    "steps so coarse that nothing is left": (
        fresh, lambda: static(fresh(), batch() * 600), "", ""
    ),
    "frozen as a whole": (
        fresh, lambda: fresh().requires_grad_(False), None, "requires_grad=False"
    ),
    "one layer frozen": (
        fresh, lambda: edited(fresh, lambda m: m.block.fc.requires_grad_(False)), "block.fc", ""
    ),
    # the weight is compared, not what the mask hides
    "a mask made permanent": (
        pruned, lambda: edited(pruned, lambda m: prune.remove(m.conv2, "weight")), None, ""
    ),
    "a mask lost": (pruned, lambda: edited(pruned, unmasked), "conv2", ""),
    # merged and kept or merged and taken away: the module around gives the same
    "an adapter merged": (
        adapted, lambda: edited(adapted, lambda m: m.block.fc.merge()), None, ""
    ),
    "and unloaded": (adapted, lambda: edited(adapted, unloaded), None, ""),
    "unloaded without being merged": (
        adapted, lambda: edited(adapted, lambda m: setattr(m.block, "fc", m.block.fc.base)),
        "block.fc", "",
    ),
    # what is frozen for it has no gradients, and that is meant
    "a fresh adapter": (
        fresh, lambda: edited(adapted, lambda m: nn.init.zeros_(m.block.fc.up.weight)), None,
        "frozen for it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_was_made_of_a_model_is_the_same_or_named_where_it_is_not(case):
    """Fused, folded, frozen, pruned and adapted; rightly and wrongly."""
    build, make, culprit, words = CASES[case]
    comparison = compare(build(), make(), batch())
    assert comparison.equivalent is (culprit is None), str(comparison)
    assert words in str(comparison)
    if culprit is not None:
        assert comparison.first_divergence.layer.startswith(culprit)
