"""How a training went, thinned to what a page can show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.report import HealthReport

if TYPE_CHECKING:
    from pytest_modelhealth.training.monitoring.history import History

MOST_STEPS = 256
MOST_LAYERS = 32

SHOWN = (
    "activation_rms",
    "gradient_norm",
    "parameter_gradient_norm",
    "update_ratio",
    "dead_fraction",
)

NONFINITE = {
    "activation_rms": "activation_nonfinite",
    "gradient_norm": "gradient_nonfinite",
    "parameter_gradient_norm": "parameter_gradient_nonfinite",
}
"""What counts the values that a statistic leaves out: with any, it is no number."""


def of_course(report: HealthReport) -> dict[str, Any] | None:
    """Return the steps of a monitored training by the keys of the file of a run.

    Of many steps, evenly spaced ones and the last; of many layers, those that something is found
    in, then the others in order.
    """
    history = report._history
    if history is None or not len(history):
        return None
    every = -(-len(history) // MOST_STEPS)
    taken = sorted({*range(0, len(history), every), len(history) - 1})
    judgement = report._judgement
    accused = [found.layer for found in (*judgement.violations, *judgement.warned)]
    names = list(dict.fromkeys((*(n for n in accused if n in history.layers), *history.layers)))
    return {
        "steps": history.steps[taken].tolist(),
        "loss": history.loss[taken].tolist(),
        "layers": {
            name: {statistic: _values(history, name, statistic, taken) for statistic in SHOWN}
            for name in names[:MOST_LAYERS]
        },
    }


def _values(history: History, layer: str, statistic: str, taken: list[int]) -> list[float]:
    """Return a statistic at the steps `taken`, NaN where values of the tensor were not finite."""
    values: list[float] = history[layer, statistic][taken].tolist()
    if statistic not in NONFINITE:
        return values
    bad = history[layer, NONFINITE[statistic]][taken].tolist()
    return [math.nan if count else value for value, count in zip(values, bad, strict=True)]
