import io
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_modelhealth.rendering.evidence import (
    BAR,
    bar,
    bin_starts,
    binned,
    culprit_and_predecessor,
)
from pytest_modelhealth.statistics import reduce
from tests.builders import layer, observation
from tests.rendering import reports

ONES = torch.ones(2, 2)


def predecessor(culprit: str, role: str, *records):
    """The name of the layer that is shown beside the culprit."""
    found = culprit_and_predecessor(
        reports.judged(observation(*records), reports.violation(culprit, role=role))
    )
    return found.predecessor and found.predecessor.name


@pytest.mark.parametrize(
    ("culprit", "role", "beside"),
    [
        ("block.relu", "activations", "block.fc"),
        ("block", "activations", "stem"),
        ("stem", "activations", None),
        *(("block", role, "head") for role in ("gradients", "parameter_gradients")),
        ("block.relu", "gradients", "head"),
        ("head", "gradients", None),
    ],
)
def test_the_leaf_that_ran_before_is_shown_and_of_gradients_that_after(
    culprit: str, role: str, beside: str | None
) -> None:
    """Containers, and layers without such a tensor, are passed over."""
    seen = {"activations": ONES, "gradients": ONES, "parameter_gradients": {"weight": ONES}}
    names = ("", "stem", "block", "block.fc", "block.mask", "block.relu", "head")
    records = [layer(name, **({} if name == "block.mask" else seen)) for name in names]
    assert predecessor(culprit, role, *records) == beside


def test_the_violated_tensor_is_shown() -> None:
    """Of several tensors in a role, it is the one that the violation names."""
    gradients = {"weight": ONES, "bias": 3 * ONES}
    seen = observation(layer("fc", parameter_gradients=gradients))
    found = reports.violation("fc", role="parameter_gradients", tensor="bias")
    evidence = culprit_and_predecessor(reports.judged(seen, found))
    assert evidence.statistics(evidence.culprit).mean == 3


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
@example([1e-45, 1.2e-38, 3.4e38])
@example([1e-45])
def test_no_finite_value_is_lost_between_the_bins(values: list[float]) -> None:
    """Each bin holds as many values as numpy counts between its edges."""
    tensor = torch.tensor(values, dtype=torch.float32)
    seen = reduce(tensor)
    starts = bin_starts([seen])
    edges = np.exp2(np.array(starts, dtype=np.float64))
    edges[-1] = np.inf
    finite = tensor.double().numpy()[np.isfinite(values)]
    positive = np.histogram(finite[finite > 0], [0, *edges])[0]
    negative = np.histogram(-finite[finite < 0], [0, *edges])[0]
    zeros = int((finite == 0).sum())
    assert binned(seen, starts) == [*negative[::-1], zeros, *positive]


def test_rows_are_few_and_shares_of_all_values() -> None:
    """10 bins, 2 of small values, zero, NaN: each has its share written beside the bar."""
    wide = torch.cat([torch.logspace(-40, 38, 999), -torch.logspace(-40, 38, 999)])
    wide[0] = torch.nan
    seen = observation(layer("a", activations=wide), layer("b", activations=wide))
    text = reports.judged(seen, reports.violation("b")).render("evidence")
    assert len(text.split("\n\n")[1].splitlines()) <= 1 + 14
    assert max(map(len, text.splitlines())) <= 100
    values = torch.tensor([0.0] * 5 + [1.5] * 3 + [torch.nan] * 2)
    seen = observation(layer("relu", activations=values))
    text = reports.judged(seen, reports.violation("relu")).render("evidence")
    shares = {
        line.strip().split("  ")[0]: line.split()[-1] for line in text.splitlines() if "█" in line
    }
    assert shares == {"zero": "50%", "1 .. 2": "30%", "NaN, inf": "20%"}


def test_a_culprit_without_values_says_why() -> None:
    """The neighbour is shown, and the reason for what is missing."""
    text = reports.absent_culprit().render("evidence")
    assert "detach() in forward" in text
    assert "fc" in text.splitlines()[2]


@given(st.floats(0, 1))
def test_a_bar_is_as_long_as_its_part(part: float) -> None:
    """To an eighth of a character; nothing has no bar, and something has one."""
    drawn = bar(part, "▏▎▍▌▋▊▉█")
    eighths = sum("▏▎▍▌▋▊▉█".index(letter) + 1 for letter in drawn)
    assert eighths == pytest.approx(part * BAR * 8, abs=1)
    assert bool(drawn) == (part > 0)


def test_bars_are_ascii_where_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot encode blocks gets ``#``."""
    report = reports.dead()
    assert "█" in report.render("evidence")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert report.render("evidence").isascii()
    assert "####" in report.render("evidence")
