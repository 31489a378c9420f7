"""The history of a training: arrays in constant memory that stand for all of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_modelhealth import InspectionError, LayerNotFoundError
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow


def row(step: int, layers: tuple[str, ...] = ("a", "b"), **fields: float) -> StepRow:
    """Return a row whose statistics are all the step's number, a layer's index added."""
    values = {s: np.arange(len(layers)) + float(step) for s in STATISTICS}
    numbers = {"loss": float(step), "gradient_norm": 1.0, "update_ratio": math.nan} | fields
    return StepRow(step, layers=layers, values=values, **numbers)


def history(keep: int, steps: int) -> History:
    """Return a history of so many steps."""
    made = History(keep)
    for step in range(steps):
        made.add(row(step))
    return made


def test_arrays_go_by_steps_and_layers() -> None:
    """Every statistic of every layer, and those of the step, are there; they are copies."""
    seen = history(8, 3)
    assert len(seen) == 3
    assert seen.steps.tolist() == [0, 1, 2]
    assert seen.layers == ("a", "b")
    assert seen["b", "gradient_norm"].tolist() == [1.0, 2.0, 3.0]
    assert seen["zero_fraction"].tolist() == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert seen.loss.tolist() == [0.0, 1.0, 2.0]
    assert seen.gradient_norm.tolist() == [1.0, 1.0, 1.0]
    assert np.isnan(seen.update_ratio).all()
    seen.loss[:] = 7
    seen["a", "gradient_norm"][:] = 7
    assert seen.loss.tolist() == [0.0, 1.0, 2.0]
    assert seen["a", "gradient_norm"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("keep", [2, 3, 8, 9])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9, 10, 17, 100, 1000])
def test_what_is_kept_is_spread_evenly_and_ends_with_the_latest(keep: int, steps: int) -> None:
    """Never more than `keep`, at equal distances from the first on, and the latest beside them."""
    seen = history(keep, steps)
    kept = seen.steps.tolist()
    assert 1 <= len(kept) <= keep
    assert kept[0] == 0
    assert kept[-1] == steps - 1
    assert set(np.diff(kept[:-1])) <= {seen.stride}
    assert len(kept) >= min(steps, keep // 2)
    assert seen.loss.tolist() == kept
    assert seen["b", "update_norm"].tolist() == [step + 1 for step in kept]


def test_layers_that_come_later_were_not_seen_before() -> None:
    """And those that stay away are NaN from then on."""
    seen = History(4)
    seen.add(row(0, ("a", "b")))
    seen.add(row(1, ("b", "c")))
    assert seen.layers == ("a", "b", "c")
    assert seen["b", "gradient_norm"].tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(seen["a", "gradient_norm"], [0.0, math.nan])
    np.testing.assert_array_equal(seen["c", "gradient_norm"], [math.nan, 2.0])


def test_what_there_is_not_is_named() -> None:
    """A layer or statistic that does not exist is refused, with the nearest."""
    seen = history(4, 2)
    for known in (seen, row(0)):
        with pytest.raises(InspectionError, match="did you mean 'gradient_norm'"):
            known["a", "gradient_nrm"]
        with pytest.raises(LayerNotFoundError, match="no layer 'c'"):
            known["c", "gradient_norm"]
    with pytest.raises(InspectionError, match="unknown statistic 'a'"):
        seen["a"]
    assert len(History(4)) == 0
    assert History(4)["gradient_norm"].shape == (0, 0)
