"""`History`: the numbers of a whole training, in constant memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest_layer
from pytest_modelhealth.report import Finding
from pytest_modelhealth.report.verdict import Renderer
from pytest_modelhealth.training.monitoring.row import (
    STATISTICS,
    Event,
    Reals,
    StepRow,
    require_statistic,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History:
    """The watched steps so far, evenly spread over the training, the latest always among them.

    When there are `keep` of them, every second one is dropped, and from then on only every second
    one is taken. ``history["encoder.0", "gradient_norm"]`` is an array over `steps`,
    ``history["gradient_norm"]`` one over steps and `layers`.

    Args:
        keep: the most that are kept.
        renderer: what draws it.
        model_type: name of the model's class.

    Attributes:
        watched: how many steps were watched, those dropped since included.
        stride: one in so many watched steps is kept.
        first_origin: the first watched step that had a value that is no number, and where it came
            from.
    """

    def __init__(
        self, keep: int, *, renderer: Renderer | None = None, model_type: str = "the model"
    ) -> None:
        self.keep = keep
        self.model_type = model_type
        self.stride = 1
        self.watched = 0
        self.first_origin: tuple[int, Finding] | None = None
        self._renderer = renderer
        self._numbers: list[tuple[int, float, float, float]] = []  # the step and its scalars
        self._values: list[tuple[tuple[str, ...], Reals]] = []  # layers, statistics by layers
        self._latest_stays = True
        self._columns: dict[str, int] = {}

    def add(self, row: StepRow) -> None:
        """Take a watched step."""
        if self.first_origin is None and row.origin is not None:
            self.first_origin = row.step, row.origin
        for layer in row.layers:
            self._columns.setdefault(layer, len(self._columns))
        layers = row.layers
        if self._values and layers == self._values[-1][0]:
            layers = self._values[-1][0]  # the names are held once
        if not self._latest_stays:
            del self._numbers[-1], self._values[-1]
        elif len(self) == self.keep:
            del self._numbers[1::2], self._values[1::2]
            self.stride *= 2
        self._latest_stays = self.watched % self.stride == 0
        self.watched += 1
        loss = math.nan if row.loss is None else row.loss
        self._numbers.append((row.step, loss, row.gradient_norm, row.update_ratio))
        self._values.append((layers, np.array([row.values[name] for name in STATISTICS])))

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def steps(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Numbers of the steps, shape ``(n,)``."""
        return np.array([numbers[0] for numbers in self._numbers], dtype=np.int64)

    @property
    def loss(self) -> Reals:
        """Losses, shape ``(n,)``; NaN where none was given."""
        return np.array([numbers[1] for numbers in self._numbers], dtype=float)

    @property
    def gradient_norm(self) -> Reals:
        """Norms of all parameter gradients, shape ``(n,)``, as in `StepRow`."""
        return np.array([numbers[2] for numbers in self._numbers], dtype=float)

    @property
    def update_ratio(self) -> Reals:
        """Update ratios of all parameters together, shape ``(n,)``, as in `StepRow`."""
        return np.array([numbers[3] for numbers in self._numbers], dtype=float)

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
        if layer is not None and layer not in self._columns:
            raise LayerNotFoundError(
                f"no layer {layer!r} was seen{suggest_layer(layer, self._columns)}"
            )
        values = np.full((len(self), len(self._columns)), math.nan)
        index, known = STATISTICS.index(statistic), None
        for at, (layers, table) in enumerate(self._values):
            if layers is not known:
                known, columns = layers, [self._columns[name] for name in layers]
            values[at, columns] = table[index]
        return values if layer is None else values[:, self._columns[layer]].copy()

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
        if not len(self):
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
        text: str = self._shown("training", "document", k, worst).text()
        return text

    def _shown(self, form: str, function: str, *args: Any, **options: Any) -> Any:
        if self._renderer is None:
            raise InspectionError("this history was made without a renderer: it cannot be shown")
        return self._renderer(form, function)(self, *args, **options)
