from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.statistics import reduce
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import BINS, EDGES, binned
from tests.rendering import histories


@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.__name__)
def test_every_history_is_told_without_a_warning(case) -> None:
    """One step, no loss, nothing seen, hostile names: the text, twice the same."""
    made = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made.summary() == made.summary()
    text = made.summary()
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_bins_hold_every_finite_value() -> None:
    """Each value is in the bin whose edges enclose it; what is beyond the scale is in the last."""
    values = torch.tensor([0.0, 3.0, -3.0, 1e9, 1e-30, torch.nan])
    parts = binned(reduce(values))
    assert len(parts) == BINS
    assert parts.sum(dtype=float) == pytest.approx(1, abs=1e-3)
    middle = BINS // 2
    place = int(np.searchsorted(EDGES, 3.0, side="right"))
    assert np.flatnonzero(parts).tolist() == [
        middle - place, middle, middle + 1, middle + place, BINS - 1
    ]  # fmt: skip
    assert np.isnan(binned(reduce(torch.full((3,), torch.nan)))).all()


def test_the_text_says_it_in_its_first_line() -> None:
    """Steps, loss, the worst layer; then a table with the gravest first, no longer than asked."""
    first, _, head, *table = histories.dying().summary().splitlines()
    assert first == (
        "training of Net: 20 steps watched (0 to 38); loss 2.00 to 0.0513; "
        "worst: relu: all units dead since step 12"
    )
    assert head.split() == ["layer", "p.grad", "update", "act.std", "dead"]
    assert [line.split()[0] for line in table] == ["relu", "fc1", "fc2"]
    assert histories.dying().summary(1).splitlines()[-1] == "  and 2 layers more"
    text = histories.exploding().summary()
    assert "loss 2.00 to nan; worst: fc2: not finite since step 15" in text
    assert "step 15: not finite first in the activations of 'fc2'" in text
    assert "no layer stands out" in histories.healthy().summary()
    assert "no step was watched yet" in histories.history(("a",), range(0)).summary()


def train(**options):
    """A monitor of ten steps of a small training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Inspector(model).monitor(**options) as monitor:
        for step in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 8)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    return monitor


def test_a_monitor_shows_its_training(tmp_path) -> None:
    """It saves the figures, prints the text, and a notebook gets it escaped."""
    monitor = train(histograms=True)
    monitor.plot(tmp_path / "all.png")
    monitor.plot_layer("0", tmp_path / "layer.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
    assert str(monitor) == monitor.summary()
    assert str(monitor).startswith("training of Sequential: 10 steps watched (0 to 9); loss ")
    assert monitor._repr_html_().startswith("<pre>training of Sequential")
    parts = monitor.history.histograms("1", "activations")
    assert parts.shape == (10, BINS)
    assert parts[:, BINS // 2] == pytest.approx(monitor.history["1", "zero_fraction"], abs=1e-3)
    assert not parts[:, : BINS // 2].any()


def test_histograms_cost_nothing_where_they_are_not_asked_for() -> None:
    """No byte is kept, and the history says how to get them."""
    history = train().history
    assert history._histograms.nbytes == 0
    with pytest.raises(InspectionError, match=r"monitor\(histograms=True\)"):
        history.histograms("0")


def test_histograms_are_thinned_as_the_rows_are() -> None:
    """A column belongs to each kept step, the latest among them."""
    history = train(histograms=True, keep=4).history
    assert history.histograms("0").shape == (len(history), BINS)
    assert history.steps[-1] == 9
    assert len(history) <= 4
    zeros = history.histograms("1")[:, BINS // 2]
    assert zeros == pytest.approx(history["1", "zero_fraction"], abs=1e-3)


def test_what_cannot_be_drawn_is_refused() -> None:
    """A history of its own, an unknown role, a number for a flag."""
    with pytest.raises(InspectionError, match="without a renderer"):
        History(4).summary()
    with pytest.raises(InspectionError, match="did you mean 'gradients'"):
        histories.with_histograms().histograms("fc1", "gradient")
    with pytest.raises(InspectionError, match="histograms must be True or False"):
        Inspector(nn.Linear(2, 2)).monitor(histograms=3)
