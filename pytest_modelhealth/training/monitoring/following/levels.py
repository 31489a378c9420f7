"""`Levels`: what is usual for a positive statistic of each layer, and what it is lately."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.training.monitoring.row import Reals

Mask = npt.NDArray[np.bool_]

LATELY = 5
"""How many of the latest values count as lately."""

OPENING = 10
"""How many of the first values are the beginning."""

_LEAST = 1e-30


def grown(values: Reals, count: int, fill: float = np.nan) -> Reals:
    """Return an array with as many columns as there are layers now."""
    missing = count - values.shape[-1]
    if not missing:
        return values
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return np.pad(values, widths, constant_values=fill)


def held_of(mask: Mask, count: int) -> Mask:
    """Return a mask with as many columns as there are layers now: false for new ones."""
    missing = count - len(mask)
    return np.pad(mask, (0, missing)) if missing else mask


class Levels:
    """Logarithms of a statistic, layer by layer; of a step that has none for a layer, nothing.

    Args:
        zeros: whether zeros are values (next to nothing), or say nothing.

    Attributes:
        count: how many values each layer had.
        low, high: the least and the largest lately; NaN while there are few.
        opening: the mean of the first values.
        usual: the mean so far; it stands still while `held`.
        valid: which layers had a value in the latest step.
    """

    def __init__(self, *, zeros: bool = False) -> None:
        self._least = _LEAST if zeros else 0.0
        self._lately = np.full((LATELY, 0), np.nan)
        self.count = np.zeros(0)
        self.low = self.high = np.zeros(0)
        self.opening = np.zeros(0)
        self.usual = np.zeros(0)
        self.valid = np.zeros(0, dtype=bool)

    def add(self, values: Reals, held: Mask | None = None) -> None:
        """Take the values of a step.

        Args:
            values: one of each layer.
            held: where what is usual is to stay as it is; fewer layers where some are new.
        """
        layers = len(values)
        if layers != len(self.count):
            self._grow(layers)
        if self._least:
            values = np.maximum(values, self._least)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(values)
        self.valid = valid = np.isfinite(logs)
        if valid.all():
            at = self.count.astype(np.intp) % LATELY
            self._lately[at, np.arange(layers)] = logs
        else:
            columns = np.flatnonzero(valid)
            self._lately[self.count[columns].astype(np.intp) % LATELY, columns] = logs[columns]
        self.count += valid
        self.low = self._lately.min(axis=0)
        self.high = self._lately.max(axis=0)
        learns = valid
        if held is not None:
            learns = valid & ~held_of(held, layers)
        share = np.where(learns, 1.0 / np.maximum(self.count, 1.0), 0.0)
        steady = np.where(valid, logs, 0.0)
        clipped = np.where(
            self.count > OPENING, np.minimum(np.maximum(steady, self.low), self.high), steady
        )
        self.usual += share * (clipped - self.usual)
        self.opening = np.where(self.count <= OPENING, self.usual, self.opening)

    def _grow(self, layers: int) -> None:
        self._lately = grown(self._lately, layers)
        self.count = grown(self.count, layers, 0.0)
        self.opening = grown(self.opening, layers, 0.0)
        self.usual = grown(self.usual, layers, 0.0)

    @property
    def reference(self) -> Reals:
        """The larger of what is usual and what was at the beginning."""
        larger: Reals = np.maximum(self.usual, self.opening)
        return larger
