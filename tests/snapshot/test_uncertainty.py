"""Numbers with their noise in parentheses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelhealth.snapshot.uncertainty import read, spell


@pytest.mark.parametrize(
    ("value", "noise", "text"),
    [
        (0.60641231, 3.4e-6, "0.606412(4)"),
        (123456.0, 20.0, "1.2346(2)e5"),
        (1.5e-9, 9.99e-13, "1.500(1)e-9"),
        (1e-12, 3e-9, "0(3)e-9"),
        (-2.0, 0.5, "-2.0(5)"),
        (0.25, None, "0.25"),
        (0.0, 0.0, "0"),
        (-0.0, None, "0"),
        (math.nan, 1.0, "nan"),
        (math.inf, None, "inf"),
    ],
)
def test_the_noise_stands_behind_the_last_digit(
    value: float, noise: float | None, text: str
) -> None:
    """The digit in parentheses counts units of the last place, rounded up."""
    assert spell(value, noise) == text


@given(
    st.floats(-10, 10),
    st.floats(-30, 20).flatmap(lambda e: st.sampled_from([10.0**e, -(10.0**e)])),
)
def test_reading_gives_number_and_noise_back(exponent: float, value: float) -> None:
    """The noise read is that written or up to twice it, and the number is within half of it."""
    noise = abs(value) * 10**exponent
    read_value, read_noise = read(spell(value, noise))
    assert read_noise is not None
    assert noise * 0.9999 <= read_noise <= noise * 2.0001
    assert abs(read_value - value) <= 0.51 * read_noise + 1e-15 * abs(value)


@pytest.mark.parametrize("text", ["", "(3)", "1.2(34)", "1.2(x)", "1.2(3", "1.2(3)e", "low"])
def test_what_is_no_number_is_refused(text: str) -> None:
    """Anything else is a `ValueError`, and nothing is evaluated."""
    with pytest.raises(ValueError):
        read(text)
