"""Quantised, fused, frozen, pruned and adapted candidates."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import prune

from corpus.models.quantised import WAYS, adapted, batch, fresh, pruned, static
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


def test_an_activation_that_was_lost_is_not_folded():
    """Fused without its activation, the layer gives what it gave before that: it is missed."""
    lost = fresh()
    lost.relu1 = nn.Identity()
    comparison = compare(fresh(), static(lost, batch()), batch())
    assert comparison.first_divergence.layer == "relu1"


def test_float_modules_are_fused_without_a_word():
    """`fuse_modules` and `fuse_fx` give the same but for rounding, gradients included."""
    triples = [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"]]
    fused = quantization.fuse_modules(fresh(), triples)
    comparison = compare(fresh(), fused, batch())
    assert comparison.equivalent, str(comparison)
    assert comparison["bn2"].pair.is_folded


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_folded_into_a_linear_layer_is_equivalent(affine):
    """Its weights are those that the two have together, be there weights in the norm or not."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
    batch = torch.randn(16, 6)
    net(batch)
    net.eval()
    folded = copy.deepcopy(net)
    norm = net[1]
    scale = (norm.running_var + norm.eps).rsqrt() * (norm.weight if affine else 1.0)
    with torch.no_grad():
        folded[0].weight.mul_(scale[:, None])
        folded[0].bias.sub_(norm.running_mean).mul_(scale).add_(norm.bias if affine else 0.0)
    folded[1] = nn.Identity()
    assert compare(net, folded, batch).equivalent


def test_a_batch_norm_folded_wrongly_is_named():
    """The weights of the host are held to those that folding makes, and so to single values."""
    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid())
    reference(batch())
    reference.eval()
    folded = torch.nn.utils.fuse_conv_bn_eval(reference[0], reference[1])
    candidate = nn.Sequential(folded, nn.Identity(), nn.Sigmoid())
    assert compare(reference, candidate, batch()).equivalent
    folded.weight.data[0, 0, 0, 0] *= 1.01
    found = compare(reference, candidate, batch()).first_divergence
    assert found.layer == "0"
    assert "1 of 216" in found.cause


def test_steps_so_coarse_that_nothing_is_left_are_a_divergence():
    """Calibrated on numbers 600 times as large, each layer rounds well, and the model is gone."""
    comparison = compare(fresh(), static(fresh(), batch() * 600), batch())
    assert not comparison.equivalent


def test_a_candidate_that_trains_nothing_is_compared_forward():
    """Frozen as a whole it is equivalent, with a note; one layer frozen by itself is not."""
    whole = fresh().requires_grad_(False)
    comparison = compare(fresh(), whole, batch())
    assert comparison.equivalent
    assert any("requires_grad=False" in note for note in comparison.notes)
    one = fresh()
    one.block.fc.requires_grad_(False)
    assert compare(fresh(), one, batch()).first_divergence.layer == "block.fc"


def test_a_mask_made_permanent_is_the_same_weight():
    """The weight is compared, not what the mask hides; a mask that is lost is named."""
    permanent = pruned()
    prune.remove(permanent.conv2, "weight")
    comparison = compare(pruned(), permanent, batch())
    assert comparison.equivalent, str(comparison)
    lost = pruned()
    lost.conv2.weight_mask.fill_(1)
    prune.remove(lost.conv2, "weight")
    assert compare(pruned(), lost, batch()).first_divergence.layer == "conv2"


def test_adapters_are_the_same_live_and_merged():
    """Merged and kept or merged and taken away: the module around gives the same."""
    kept, unloaded = adapted(), adapted()
    kept.block.fc.merge()
    unloaded.block.fc = unloaded.block.fc.merge()
    for candidate in (kept, unloaded):
        comparison = compare(adapted(), candidate, batch())
        assert comparison.equivalent, str(comparison)


def test_an_adapter_that_is_not_merged_is_named():
    """Taken away without being merged, it is what is removed."""
    lost = adapted()
    lost.block.fc = lost.block.fc.base
    found = compare(adapted(), lost, batch()).first_divergence
    assert found.layer.startswith("block.fc")


def test_a_fresh_adapter_changes_nothing():
    """What is frozen for it has no gradients, and that is meant."""
    candidate = copy.deepcopy(adapted())
    nn.init.zeros_(candidate.block.fc.up.weight)
    comparison = compare(fresh(), candidate, batch())
    assert comparison.equivalent, str(comparison)
    assert any("frozen for it" in note for note in comparison.notes)
