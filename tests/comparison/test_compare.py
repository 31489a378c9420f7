"""`compare`: what is the same passes, what is not fails at the layer where it begins."""

from __future__ import annotations

import pytest
import torch

from corpus.models.paired import batch
from corpus.pairs import BENIGN, HARMFUL
from pytest_modelhealth.comparing import compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OF_SIXTEEN = {"sequential_to_attributes", "the_same_dropout", "unwrapped", "weights_swapped"}


@pytest.mark.parametrize("name", [*BENIGN, *HARMFUL])
def test_what_computes_the_same_is_equivalent_and_the_rest_parts_where_it_begins(name):
    """No rewriting is a divergence; a change is named first at the layer that it is in."""
    build, layer = HARMFUL.get(name) or (BENIGN[name], None)
    torch.manual_seed(0)
    reference, candidate = build()
    inputs = torch.randn(8, 16) if name in OF_SIXTEEN else batch(reference)
    comparison = compare(reference, candidate, inputs)
    assert comparison.equivalent is (layer is None), str(comparison)
    if layer is not None:
        assert comparison.first_divergence.layer == layer, str(comparison)
