"""What every follower stands on: levels, the table of a step, the loss, and episodes.

A follower is a generator named after its rule, in the file of its subject: it looks at each step
of a table, and says by `Follower.mark` what goes on and what is over.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.report import Course, CourseEvent, LossSummary
from pytest_modelhealth.training.monitoring.row import Reals, StepRow

Mask = npt.NDArray[np.bool_]

LATELY = 5
"""How many of the latest values count as lately."""

OPENING = 10
"""How many of the first values are the beginning."""

_LEAST = 1e-30


def grown(values: Any, count: int, fill: float = np.nan) -> Any:
    """Return an array with as many columns as there are layers now."""
    missing = count - values.shape[-1]
    if not missing:
        return values
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return np.pad(values, widths, constant_values=fill)


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
        self.count = np.zeros(0, dtype=np.intp)
        self._is_opening = True
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
        logs = np.log(values)
        self.valid = valid = np.isfinite(logs)
        columns = valid.nonzero()[0]
        count = self.count
        logs = logs[columns]
        self._lately[count[columns] % LATELY, columns] = logs
        count += valid
        self.low = low = np.minimum.reduce(self._lately)
        self.high = high = np.maximum.reduce(self._lately)
        if held is not None and held.any():
            learns = ~grown(held, layers, False)[columns]
            columns, logs = columns[learns], logs[learns]
        # a single value far off says little once there are some; NaN, of few, bounds nothing
        kept = np.fmin(np.fmax(logs, low[columns]), high[columns])
        self.usual[columns] += (kept - self.usual[columns]) / count[columns]
        if self._is_opening:
            self.opening = np.where(count <= OPENING, self.usual, self.opening)
            self._is_opening = bool((count < OPENING).any())

    def _grow(self, layers: int) -> None:
        self._lately = grown(self._lately, layers)
        self.count = np.pad(self.count, (0, layers - len(self.count)))
        self._is_opening = True
        self.opening = grown(self.opening, layers, 0.0)
        self.usual = grown(self.usual, layers, 0.0)

    @property
    def reference(self) -> Reals:
        """The larger of what is usual and what was at the beginning."""
        larger: Reals = np.maximum(self.usual, self.opening)
        return larger


class Level:
    """The same of a single statistic, in plain numbers."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=LATELY)
        self.count = 0
        self.low = self.high = math.nan
        self.opening = self.usual = 0.0

    def add(self, value: float, *, held: bool = False) -> None:
        """Take the value of a step; zeros and what is no number say nothing."""
        if not 0.0 < value < math.inf:
            return
        log = math.log(value)
        self.count += 1
        self._lately.append(log)
        if self.count >= LATELY:
            self.low, self.high = min(self._lately), max(self._lately)
        if not held:
            self.usual += (log - self.usual) / self.count
        if self.count <= OPENING:
            self.opening = self.usual

    @property
    def reference(self) -> float:
        """The larger of what is usual and what was at the beginning."""
        return max(self.usual, self.opening)


_WINDOW = 9
_OPENING = 5


class LossCourse:
    """Follows the loss in constant memory.

    Attributes:
        summary: how it went so far.
    """

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
            first = _level_of(self._opening)
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
        self.summary = LossSummary(
            count + 1, first, best, best_step, level, noise, is_positive, loss
        )


def _level_of(opening: list[float]) -> float:
    """Return the level that a loss begins with, whatever the first steps do to it."""
    first, *others = opening
    if others and 0.0 < first < min(others) / _BLOWN_UP:
        return first
    return sorted(opening)[:2][-1]


_BLOWN_UP = 3.0


class Table:
    """The latest step, and what of the earlier ones every follower asks for.

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
        self._first_step = self._passes = self._optimizer_steps = self._most = 0
        self._latest: deque[int] = deque(maxlen=LATELY)
        self._columns: dict[str, int] = {}
        self._known: tuple[str, ...] = ()
        self._where: np.ndarray[tuple[int], np.dtype[np.intp]] | None = None

    def take(self, row: StepRow) -> None:
        """Take the next step."""
        self.row = row
        if not self.steps:
            self._first_step = row.step
        self.steps += 1
        self._passes += row.passes
        self._optimizer_steps += row.optimizer_steps
        self._most = max(self._most, row.optimizer_steps)
        self._latest.append(row.step)
        self.loss.add(row.step, row.loss)
        if row.layers == self._known:
            return
        self._known = row.layers
        for layer in row.layers:
            if layer not in self._columns:
                self._columns[layer] = len(self.layers)
                self.layers.append(layer)
        where = np.array([self._columns[layer] for layer in row.layers], dtype=np.intp)
        is_same = np.array_equal(where, np.arange(len(self.layers)))
        self._where = None if is_same else where

    def course(self, events: Iterable[CourseEvent] = ()) -> Course:
        """Return how the training went so far, with what followers say of it."""
        return Course(
            steps=self.steps,
            first_step=self._first_step,
            last_step=self.row.step if self.steps else 0,
            passes=self._passes,
            optimizer_steps=self._optimizer_steps,
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
    """What goes on in a training for a rule, as one that sees each step says, in constant memory.

    Args:
        rule: name of the rule.
        role: the role of its events, where they say none.
        table: the steps.
        see: follows them: it is gone on with after each step of the table.

    Attributes:
        open: kind and layer of what goes on.
        changed: what went on in the latest step.
    """

    def __init__(self, rule: str, role: str, table: Table, see: See) -> None:
        self.open: set[tuple[str, str]] = set()
        self.changed: list[CourseEvent] = []
        self._events: dict[tuple[str, str], CourseEvent] = {}
        self._rule, self._role, self._table = rule, role, table
        self._steps = see(table, self)

    def follow(self) -> None:
        """See the latest step."""
        self.changed = []
        next(self._steps)

    def events(self) -> Iterator[CourseEvent]:
        """Yield what was seen: of each kind and layer the latest episode."""
        yield from self._events.values()

    def mark(
        self,
        kind: str,
        active: Mask | bool,
        value: Reals | float,
        reference: Reals | float,
        *,
        told: Mask | bool = True,
        layer: str = "",
        role: str = "",
        tensor: str = "",
        sign: int = 1,
        since: Reals | int | None = None,
        rows: Reals | int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Say where something goes on in the latest step, and where it is over.

        Args:
            kind: what; what is not of each layer is of `layer`.
            active: where it goes on.
            value, reference, role, tensor, facts: as in `CourseEvent`.
            told: where the step tells of it; elsewhere nothing is over.
            layer: which, where it is not told of each.
            sign: -1 where the least value is furthest off.
            since: the step it began in, if that is not the one in which it is first said.
            rows: how many watched steps showed it, if not those in which it was said.
        """
        open_here = [own for own in self.open if own[0] == kind]
        if not open_here and not (active.any() if isinstance(active, np.ndarray) else active):
            return  # nearly always
        every = self._table.layers if isinstance(active, np.ndarray) else [layer]
        active, told = np.broadcast_to(active, len(every)), np.broadcast_to(told, len(every))
        own = (role or self._role, tensor)
        columns = (value, reference, since, rows, *(facts or {}).values())
        for at in active.nonzero()[0].tolist():
            numbers: list[Any] = [c[at] if isinstance(c, np.ndarray) else c for c in columns]
            others = dict(zip(facts or (), map(float, numbers[4:]), strict=True))
            number, usual, begin, count = numbers[:4]
            self._go_on(kind, every[at], own, sign, number, usual, begin, count, others)
        for key in open_here:
            at = every.index(key[1])
            if told[at] and not active[at]:
                self.open.discard(key)
                self._events[key] = replace(self._events[key], recovered=True)

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
        value, sign = (levels.high, -1) if fell else (levels.low, 1)
        value, reference, since = np.exp(value), np.exp(reference), self._table.lately
        told = levels.valid
        self.mark(kind, active, value, reference, told=told, role=role, sign=sign, since=since)

    def _go_on(
        self,
        kind: str,
        layer: str,
        own: tuple[str, str],
        sign: int,
        value: float,
        reference: float,
        since: float | None,
        rows: float | None,
        facts: dict[str, float],
    ) -> None:
        key, step = (kind, layer), self._table.row.step
        before = self._events[key] if key in self.open else None
        self._events[key] = event = CourseEvent(
            rule=self._rule,
            kind=kind,
            step=before.step if before else step if since is None else int(since),
            layer=layer,
            value=float(value),
            reference=float(reference),
            last=step,
            rows=int(rows) if rows is not None else before.rows + 1 if before else 1,
            peak=float(max(before.peak * sign, value * sign) * sign if before else value),
            role=before.role if before else own[0],
            tensor=before.tensor if before else own[1],
            facts=facts or (before.facts if before else {}),
        )
        self.open.add(key)
        self.changed.append(event)


See = Callable[[Table, Follower], Iterator[None]]


class Runs:
    """For how many steps in a row something went on in each layer.

    Attributes:
        count: how many.
        since: the step that the latest began in.
    """

    def __init__(self) -> None:
        self.count: Reals = np.zeros(0)
        self.since: Reals = np.zeros(0)

    def add(self, active: Mask, told: Mask, step: int) -> None:
        """Take a step: where something goes on, and where the step tells of it at all."""
        count, self.since = (grown(v, len(active), 0.0) for v in (self.count, self.since))
        self.since[active & (count == 0.0)] = step
        self.count = np.where(active, count + 1.0, np.where(told, 0.0, count))
