"""`compare`: what is the same passes, what is not fails at the layer where it begins."""

from __future__ import annotations

import pytest
import torch

from pytest_modelhealth.comparing import compare
from tests.comparison.models import batch
from tests.comparison.pairs import BENIGN, HARMFUL

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", BENIGN)
def test_a_refactor_that_changes_nothing_is_equivalent(name):
    """No rewriting of the same computation is called a divergence, forward or backward."""
    torch.manual_seed(0)
    reference, candidate = BENIGN[name]()
    inputs = batch(reference) if name not in NOT_BY_TYPE else torch.randn(8, 16)
    comparison = compare(reference, candidate, inputs)
    assert comparison.equivalent, str(comparison)
    comparison.assert_equivalent()


NOT_BY_TYPE = {"sequential_to_attributes", "the_same_dropout", "unwrapped"}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_change_of_the_numbers_is_named_where_it_begins(name):
    """The layer whose own computation changed is named first, whatever it does to later ones."""
    build, layer = HARMFUL[name]
    torch.manual_seed(0)
    reference, candidate = build()
    inputs = batch(reference) if name != "weights_swapped" else torch.randn(8, 16)
    comparison = compare(reference, candidate, inputs)
    assert not comparison.equivalent
    assert comparison.first_divergence.layer == layer, str(comparison)
