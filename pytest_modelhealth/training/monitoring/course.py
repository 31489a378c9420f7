"""The steps of a training as rules see them: the latest one, the loss so far, and events."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_modelhealth.report import CourseEvent, LossSummary
from pytest_modelhealth.training.monitoring.levels import LATELY, Levels, Mask
from pytest_modelhealth.training.monitoring.row import STATISTICS, Reals, StepRow

_WINDOW = 9
_OPENING = 5
_BLOWN_UP = 3.0


class LossCourse:
    """Follows the loss in constant memory; `summary` is how it went so far."""

    def __init__(self) -> None:
        self.summary = LossSummary()
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self._opening: list[float] = []
        self._best = math.inf

    def add(self, step: int, loss: float | None) -> None:
        """Take the loss of a step; one that is no number says nothing of a level."""
        if loss is None or not math.isfinite(loss):
            return
        before, count = self.summary, self.summary.count
        first, noise, best_step = before.first, before.noise, before.best_step
        if count < _OPENING:
            self._opening.append(loss)
            first, *others = self._opening
            # whatever the first steps do to it
            if not (others and 0.0 < first < min(others) / _BLOWN_UP):
                first = sorted(self._opening)[:2][-1]
        else:  # the recent deviations more; a single large one says little
            deviation = abs(loss - before.recent)
            if noise > 0.0 and count > 2 * _WINDOW:
                deviation = min(deviation, 5.0 * noise)
            noise += (deviation - noise) / min(count - _OPENING + 1, 50)
        self._latest.append(loss)
        level = statistics.median(self._latest)
        if count + 1 >= _OPENING and level < self._best:
            self._best, best_step = level, step
        is_positive, best = before.never_negative and loss >= 0.0, min(self._best, level)
        self.summary = LossSummary(count + 1, first, best, best_step, level, noise, is_positive)


_SPARE = 64


class Table:
    """The latest step, and what of the earlier ones every rule asks for.

    ``table["gradient_norm"]`` has a column for each layer, NaN where the step tells nothing. There
    are columns to spare for functional layers that show late, so that a rule may keep arrays of
    one size for good; of models that double the number of their layers, some are not followed.

    Attributes:
        row: the latest step.
        layers: every layer that was seen so far, by column.
        loss: how the loss went.
        steps, passes: how many steps were seen, and forward passes in them.
        most_optimizer_steps: the most that one of them had.
    """

    row: StepRow

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.loss = LossCourse()
        self.steps = self.passes = self.most_optimizer_steps = 0
        self._latest: deque[int] = deque(maxlen=LATELY)
        self._width = 0
        self._row_layers: tuple[str, ...] = ()
        self._columns: Any = []
        self._values: dict[str, Reals] = {}

    def take(self, row: StepRow) -> None:
        """Take the next step."""
        self.row = row
        self.steps += 1
        self.passes += row.passes
        self.most_optimizer_steps = max(self.most_optimizer_steps, row.optimizer_steps)
        self._latest.append(row.step)
        self.loss.add(row.step, row.loss)
        if row.layers != self._row_layers:
            self._row_layers = row.layers
            self._width = self._width or 2 * len(row.layers) + _SPARE
            self.layers = list(dict.fromkeys((*self.layers, *row.layers)))[: self._width]
            # what has no column goes into one more, which nobody reads
            known = {layer: column for column, layer in enumerate(self.layers)}
            columns = [known.get(layer, self._width) for layer in row.layers]
            is_whole = columns == list(range(len(columns)))
            self._columns = slice(len(columns)) if is_whole else columns
        table = np.full((len(STATISTICS), self._width + 1), np.nan)
        table[:, self._columns] = [row.values[name] for name in STATISTICS]
        self._values = dict(zip(STATISTICS, table[:, :-1], strict=True))

    @property
    def lately(self) -> int:
        """The first of the steps that count as lately."""
        return self._latest[0]

    def __getitem__(self, statistic: str) -> Reals:
        """Return a statistic of every layer, NaN where the latest step has none."""
        return self._values[statistic]


class Follower:
    """What goes on in a training for a rule, in constant memory.

    Args:
        rule: name of the rule.
        role: the role of its events, where they say none.
        table: the steps.
        see: the generator that is gone on with after each step, and marks what goes on.

    Attributes:
        open: kind and layer of what goes on.
        changed: what went on in the latest step.
        events: of each kind and layer the latest episode.
    """

    def __init__(self, rule: str, role: str, table: Table, see: See) -> None:
        self.open: set[tuple[str, str]] = set()
        self.changed: list[CourseEvent] = []
        self.events: dict[tuple[str, str], CourseEvent] = {}
        self._rule, self._role, self._table = rule, role, table
        self._steps = see(table, self)

    def follow(self) -> None:
        """See the latest step."""
        self.changed = []
        next(self._steps)

    def mark(
        self,
        kind: str,
        active: Mask | bool,
        value: Reals | float,
        reference: Reals | float,
        *,
        valid: Mask | bool = True,
        layer: str = "",
        role: str = "",
        tensor: str = "",
        since: Reals | int | None = None,
        rows: Reals | int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Say where something goes on in the latest step, and where it is over.

        Args:
            kind: what; what is not of each layer is of `layer`.
            active: where it goes on.
            value, reference, role, tensor, facts: as in `CourseEvent`.
            valid: where the step tells of it; elsewhere nothing is over.
            layer: which, where it is not of each.
            since: the step it began in, if that is not the one in which it is first said.
            rows: how many watched steps showed it, if not those in which it was said.
        """
        open_keys = [key for key in self.open if key[0] == kind]
        if not open_keys and not np.count_nonzero(active):
            return  # nearly always
        is_of_each, step = np.ndim(active) == 1, self._table.row.step
        for at in np.atleast_1d(active).nonzero()[0].tolist():
            key = kind, self._table.layers[at] if is_of_each else layer
            before = self.events[key] if key in self.open else None
            start, count = _at(since, at), _at(rows, at)
            measured = {name: float(_at(fact, at)) for name, fact in (facts or {}).items()}
            self.events[key] = event = CourseEvent(
                rule=self._rule,
                kind=kind,
                step=before.step if before else step if start is None else int(start),
                layer=key[1],
                value=float(_at(value, at)),
                reference=float(_at(reference, at)),
                last=step,
                rows=int(count) if count is not None else before.rows + 1 if before else 1,
                role=before.role if before else role or self._role,
                tensor=before.tensor if before else tensor,
                facts=measured or (before.facts if before else {}),
            )
            self.open.add(key)
            self.changed.append(event)
        for key in open_keys:
            at = self._table.layers.index(key[1]) if is_of_each else 0
            if _at(valid, at) and not _at(active, at):
                self.open.discard(key)
                self.events[key] = replace(self.events[key], recovered=True)

    def mark_levels(
        self, kind: str, active: Mask, levels: Levels, *, role: str = "", fell: bool = False
    ) -> None:
        """Say where all of the latest values left what was usual, so that it began before.

        Args:
            kind, active, role: as in `mark`.
            levels: logarithms of what is measured.
            fell: whether the values fell, so that the largest of them counts, and not the least.
        """
        if not self.open and not np.count_nonzero(active):
            return  # as in `mark`, before anything is computed
        value = np.exp(levels.high if fell else levels.low)
        reference = np.exp(levels.usual if fell else levels.reference)
        since, valid = self._table.lately, levels.valid
        self.mark(kind, active, value, reference, valid=valid, role=role, since=since)


See = Callable[[Table, Follower], Iterator[None]]


def _at(column: Any, at: int) -> Any:
    return column[at] if np.ndim(column) else column
