"""The steps of a training as rules see them: the latest one, the loss so far, and events."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pytest_modelhealth.report import Course, CourseEvent, LossSummary
from pytest_modelhealth.training.monitoring.levels import LATELY, Levels, Mask
from pytest_modelhealth.training.monitoring.row import Reals, StepRow

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


class Table:
    """The latest step, and what of the earlier ones every rule asks for.

    Attributes:
        row: the latest step.
        layers: every layer that was seen so far, by column.
        loss: how the loss went.
        steps: how many steps were seen.
    """

    row: StepRow

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.loss = LossCourse()
        self.steps = 0
        self._passes = self._most = 0
        self._latest: deque[int] = deque(maxlen=LATELY)
        self._columns: dict[str, int] = {}
        self._row_layers: tuple[str, ...] = ()
        self._where: np.ndarray[tuple[int], np.dtype[np.intp]] | None = None

    def take(self, row: StepRow) -> None:
        """Take the next step."""
        self.row = row
        self.steps += 1
        self._passes += row.passes
        self._most = max(self._most, row.optimizer_steps)
        self._latest.append(row.step)
        self.loss.add(row.step, row.loss)
        if row.layers == self._row_layers:
            return
        self._row_layers = row.layers
        for layer in row.layers:
            self._columns.setdefault(layer, len(self._columns))
        self.layers = list(self._columns)
        where = np.array([self._columns[layer] for layer in row.layers], dtype=np.intp)
        is_same = np.array_equal(where, np.arange(len(self.layers)))
        self._where = None if is_same else where

    def course(self, events: Iterable[CourseEvent] = ()) -> Course:
        """Return how the training went so far, with what rules say of it."""
        return Course(
            steps=self.steps,
            passes=self._passes,
            most_optimizer_steps=self._most,
            loss=self.loss.summary,
            events=tuple(sorted(events, key=lambda event: event.step)),
        )

    @property
    def lately(self) -> int:
        """The first of the steps that count as lately."""
        return self._latest[0]

    def values(self, statistic: str) -> Reals:
        """Return a statistic of every layer, NaN where the latest step has none."""
        values = self.row.values[statistic]
        if self._where is None:
            return values
        every = np.full(len(self.layers), np.nan)
        every[self._where] = values
        return every


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
    """

    def __init__(self, rule: str, role: str, table: Table, see: See) -> None:
        self.open: set[tuple[str, str]] = set()
        self.changed: list[CourseEvent] = []
        self.events: dict[tuple[str, str], CourseEvent] = {}  # of each the latest episode
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
        if not open_keys and not np.any(active):
            return  # nearly always
        layers = self._table.layers if isinstance(active, np.ndarray) else [layer]
        active, valid = np.broadcast_to(active, len(layers)), np.broadcast_to(valid, len(layers))
        step = self._table.row.step
        for at in active.nonzero()[0].tolist():
            key = kind, layers[at]
            before = self.events[key] if key in self.open else None
            start, count = _at(since, at), _at(rows, at)
            self.events[key] = event = CourseEvent(
                rule=self._rule,
                kind=kind,
                step=before.step if before else step if start is None else int(start),
                layer=layers[at],
                value=float(_at(value, at)),
                reference=float(_at(reference, at)),
                last=step,
                rows=int(count) if count is not None else before.rows + 1 if before else 1,
                role=before.role if before else role or self._role,
                tensor=before.tensor if before else tensor,
                facts={name: float(_at(fact, at)) for name, fact in (facts or {}).items()}
                or (before.facts if before else {}),
            )
            self.open.add(key)
            self.changed.append(event)
        for key in open_keys:
            at = layers.index(key[1])
            if valid[at] and not active[at]:
                self.open.discard(key)
                self.events[key] = replace(self.events[key], recovered=True)

    def mark_levels(
        self,
        kind: str,
        active: Mask,
        levels: Levels,
        reference: Reals,
        *,
        role: str = "",
        fell: bool = False,
    ) -> None:
        """Say where all of the latest values left a reference, so that it began before.

        Args:
            kind, active, role: as in `mark`.
            levels: logarithms of what is measured.
            reference: that of what it is held against.
            fell: whether the largest of the latest values counts, and not the least.
        """
        value = np.exp(levels.high if fell else levels.low)
        since, valid = self._table.lately, levels.valid
        self.mark(kind, active, value, np.exp(reference), valid=valid, role=role, since=since)


See = Callable[[Table, Follower], Iterator[None]]


def _at(column: Any, at: int) -> Any:
    return column[at] if isinstance(column, np.ndarray) and column.ndim else column
