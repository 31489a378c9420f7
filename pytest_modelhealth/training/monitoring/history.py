"""`History`: the numbers of a whole training, in constant memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest_layer
from pytest_modelhealth.report.verdict import Renderer
from pytest_modelhealth.training.monitoring.row import (
    STATISTICS,
    Event,
    Origin,
    Reals,
    StepRow,
    require_statistic,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCALARS = ("loss", "gradient_norm", "update_ratio")


class History:
    """The watched steps so far, evenly spread over the training, the latest always among them.

    When there are `keep` of them, every second one is dropped, and from then on only every second
    one is taken. ``history["encoder.0", "gradient_norm"]`` is an array over `steps`,
    ``history["gradient_norm"]`` one over steps and `layers`.

    Args:
        keep: the most that are kept.
        renderer: what draws it.
        model_type: name of the model's class.
    """

    def __init__(
        self,
        keep: int,
        *,
        renderer: Renderer | None = None,
        model_type: str = "the model",
    ) -> None:
        self.keep = keep
        self.model_type = model_type
        self.first_origin: tuple[int, Origin] | None = None
        """The first watched step that had a value that is no number, and where it came from."""
        self._renderer = renderer
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
        return values[:, self._column(layer)].copy()

    @property
    def watched(self) -> int:
        """How many steps were watched, those dropped since included."""
        return self._seen

    def _column(self, layer: str) -> int:
        if layer not in self._columns:
            raise LayerNotFoundError(
                f"no layer {layer!r} was seen{suggest_layer(layer, self._columns)}"
            )
        return self._columns[layer]

    # How it is shown.

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        events: Iterable[tuple[int, str, str]] = (),
        worst: Event | None = None,
    ) -> Figure:
        """Return a figure of the training: the loss, below it all layers through time.

        Args:
            path: a file to save it to.
            events: what went wrong, each a step, a layer and a text (`Event`): these are marked.
            worst: the gravest of them, which the line at the top names.

        Raises:
            InspectionError: no step was watched yet, or `path` is no path.
            OSError: the file cannot be written.
        """
        saved: Any = path
        if saved is not None and not (isinstance(saved, str | os.PathLike) and os.fspath(saved)):
            raise InspectionError(
                "a figure is saved to the path of a file, such as 'training.png', not to "
                f"{path!r} ({type(path).__name__})"
            )
        if not self._count:
            raise InspectionError("no step was watched yet: step_end() ends the first one")
        figure: Figure = self._shown("training", "plot_training", events, worst)
        if path is not None:
            figure.savefig(path)
        return figure

    def summary(self, k: int = 10, *, worst: Event | None = None) -> str:
        """Return the training as text: a line on all of it, and the `k` layers to look at first.

        Args:
            k: how many layers.
            worst: the gravest thing that went wrong, which the first line names.
        """
        text: str = self._shown("progress", "summary", k, worst)
        return text

    def _shown(self, form: str, function: str, *args: Any) -> Any:
        if self._renderer is None:
            raise InspectionError("this history was made without a renderer: it cannot be shown")
        return self._renderer(form, function)(self, *args)

    def add(self, row: StepRow) -> None:
        """Take a watched step."""
        if self.first_origin is None and row.origin is not None:
            self.first_origin = row.step, row.origin
        self._add_columns(row)
        if not self._latest_stays:
            self._count -= 1
        elif self._count == self.keep:
            self._thin()
        self._grow()
        at = self._count
        self._steps[at] = row.step
        loss = math.nan if row.loss is None else row.loss
        self._scalars[at] = loss, row.gradient_norm, row.update_ratio
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
