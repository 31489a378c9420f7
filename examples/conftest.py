"""The data that more than one example uses, read once a run."""

from __future__ import annotations

import pytest

from examples.data import Digits, read_digits


@pytest.fixture(scope="session")
def digits() -> Digits:
    """The digits, split into training and test data."""
    return read_digits()
