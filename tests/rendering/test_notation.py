"""How numbers and names are written."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_modelhealth.rendering import notation

FLOATS = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)


@given(st.floats(-1e308, 1e308, allow_subnormal=False))
def test_numbers_keep_three_significant_digits(value: float) -> None:
    """Read back, a number is off by at most half of its third digit; it has ten characters."""
    assert len(notation.number(value)) <= 10
    assert float(notation.number(value)) == pytest.approx(value, rel=0.005)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (-0.0, "0"),
        (1.0, "1.00"),
        (-0.00123, "-0.00123"),
        (9.999e-4, "0.00100"),
        (1.5e-7, "1.50e-7"),
        (99999.0, "1.00e5"),
        (12345.0, "12345"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float | None, text: str) -> None:
    """Powers of ten stand only where they are shorter; zero has no sign."""
    assert notation.number(value) == text


@given(FLOATS, FLOATS)
@example(0.50001, 0.5)
def test_a_value_is_never_written_like_the_limit_it_broke(value: float, limit: float) -> None:
    """Different numbers are told apart however close they are."""
    written = float(notation.beside_limit(value, limit).replace(",", ""))
    assert written != limit or value == limit


@given(st.integers(0, 10**9), st.integers(1, 10**9))
@example(999, 1000)
@example(1, 1000)
def test_percent_says_none_and_all_only_where_it_is_true(part: int, whole: int) -> None:
    """``0%`` is exactly none and ``100%`` exactly all."""
    part = min(part, whole)
    text = notation.percent(part / whole)
    assert (text == "0%") == (part == 0)
    assert (text == "100%") == (part == whole)


@given(st.text())
def test_printable_text_is_one_line_that_a_terminal_only_prints(text: str) -> None:
    """No control character, line break or invisible mark is left, and plain text stays as it is."""
    shown = notation.printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


@given(st.text("ab.01", min_size=1), st.integers(4, 30))
def test_an_abbreviated_name_fits(name: str, width: int) -> None:
    """A name that fits is left alone, and layers of a stack stay different from each other."""
    short = notation.abbreviate(name, width)
    assert len(short) <= width
    assert short == name or len(name) > width
    names = [f"encoder.layer.{i}.attention.self.query" for i in range(12)]
    assert notation.abbreviate(names[10], 20) == "e.l.10.a.self.query"
    assert len({notation.abbreviate(name, 20) for name in names}) == len(names)
