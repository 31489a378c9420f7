"""`History`: the numbers of a whole training, in constant memory."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.errors import LayerNotFoundError, suggest_layer
from pytest_modelhealth.training.monitoring.row import (
    STATISTICS,
    Reals,
    StepRow,
    require_statistic,
)

_SCALARS = ("loss", "gradient_norm", "update_ratio")


class History:
    """The watched steps so far, evenly spread over the training, the latest always among them.

    When there are `keep` of them, every second one is dropped, and from then on only every second
    one is taken. ``history["encoder.0", "gradient_norm"]`` is an array over `steps`,
    ``history["gradient_norm"]`` one over steps and `layers`.

    Args:
        keep: the most that are kept.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.stride = 1
        """One in so many watched steps is kept."""
        self._seen = 0
        self._count = 0
        self._latest_stays = True
        self._columns: dict[str, int] = {}
        self._steps = np.zeros(0, dtype=np.int64)
        self._scalars = np.zeros((0, len(_SCALARS)))
        self._values = np.zeros((0, len(STATISTICS), 0))

    def __len__(self) -> int:
        return self._count

    @property
    def steps(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Numbers of the steps, shape ``(n,)``."""
        return self._steps[: self._count].copy()

    @property
    def loss(self) -> Reals:
        """Losses, shape ``(n,)``; NaN where none was given."""
        return self._scalar("loss")

    @property
    def gradient_norm(self) -> Reals:
        """Norms of all parameter gradients, shape ``(n,)``, as in `StepRow`."""
        return self._scalar("gradient_norm")

    @property
    def update_ratio(self) -> Reals:
        """Update ratios of all parameters together, shape ``(n,)``, as in `StepRow`."""
        return self._scalar("update_ratio")

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which the first watched step ran them."""
        return tuple(self._columns)

    def __getitem__(self, key: str | tuple[str, str]) -> Reals:
        """Return a statistic: of a layer, shape ``(n,)``, or of all, shape ``(n, layers)``.

        Raises:
            LayerNotFoundError: there is no such layer.
            InspectionError: there is no such statistic.
        """
        layer, statistic = key if isinstance(key, tuple) else (None, key)
        require_statistic(statistic)
        values = self._values[: self._count, STATISTICS.index(statistic)]
        if layer is None:
            return values.copy()
        if layer not in self._columns:
            raise LayerNotFoundError(
                f"no layer {layer!r} was seen{suggest_layer(layer, self._columns)}"
            )
        return values[:, self._columns[layer]].copy()

    def add(self, row: StepRow) -> None:
        """Take a watched step."""
        self._add_columns(row)
        if not self._latest_stays:
            self._count -= 1
        elif self._count == self.keep:
            self._thin()
        self._grow()
        at = self._count
        self._steps[at] = row.step
        self._scalars[at] = [
            math.nan if row.loss is None else row.loss, row.gradient_norm, row.update_ratio
        ]  # fmt: skip
        where = [self._columns[layer] for layer in row.layers]
        self._values[at] = math.nan
        for index, statistic in enumerate(STATISTICS):
            self._values[at, index, where] = row.values[statistic]
        self._latest_stays = self._seen % self.stride == 0
        self._seen += 1
        self._count += 1

    def _scalar(self, name: str) -> Reals:
        return self._scalars[: self._count, _SCALARS.index(name)].copy()

    def _add_columns(self, row: StepRow) -> None:
        for layer in row.layers:
            self._columns.setdefault(layer, len(self._columns))
        missing = len(self._columns) - self._values.shape[2]
        if missing:
            self._values = np.pad(
                self._values, ((0, 0), (0, 0), (0, missing)), constant_values=math.nan
            )

    def _thin(self) -> None:
        """Drop every second step."""
        kept = (self._count + 1) // 2
        for table in (self._steps, self._scalars, self._values):
            table[:kept] = table[: self._count : 2].copy()
        self._count = kept
        self.stride *= 2

    def _grow(self) -> None:
        """Make room for one more, by doubling."""
        rows = len(self._steps)
        if self._count < rows:
            return
        more = min(max(rows, 16), self.keep - rows)
        self._steps = np.pad(self._steps, (0, more))
        self._scalars = np.pad(self._scalars, ((0, more), (0, 0)))
        self._values = np.pad(self._values, ((0, more), (0, 0), (0, 0)))
