"""The verdicts on models whose removable units are known."""

import pytest

from pytest_modelhealth import Inspector
from tests.removal.blind import CASES, Units


@pytest.mark.parametrize("name", CASES)
def test_what_was_planted_is_found_and_nothing_else(name):
    """Each unit that can go, of each sort, in each layer; and why look-alikes stay."""
    case = CASES[name]()
    result = Inspector(case.model).removable(case.batches, **case.options)
    found = {
        layer.name: Units(layer.inactive, layer.duplicates, layer.unread)
        for layer in result.layers.values()
    }
    assert found == case.expected
    assert set(result.refused) == case.refused
