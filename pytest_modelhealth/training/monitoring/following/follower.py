"""`Follower`: what a rule remembers, and the episodes that it sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pytest_modelhealth.report import CourseEvent
from pytest_modelhealth.training.monitoring.following.levels import Mask
from pytest_modelhealth.training.monitoring.following.table import Table
from pytest_modelhealth.training.monitoring.row import Reals


class Follower(ABC):
    """Sees each step of a training for a rule, in constant memory.

    Args:
        rule: name of the rule.
    """

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self._events: dict[tuple[str, str], CourseEvent] = {}
        self._open: set[tuple[str, str]] = set()
        self.changed: list[CourseEvent] = []
        """What went on in the latest step."""

    def follow(self, table: Table) -> None:
        """See the latest step."""
        self.changed = []
        self.see(table)

    @abstractmethod
    def see(self, table: Table) -> None:
        """See the latest step, and say what goes on and what is over."""

    def events(self) -> Iterator[CourseEvent]:
        """Yield what was seen: of each kind and layer the latest episode."""
        yield from self._events.values()

    def go_on(
        self,
        kind: str,
        layer: str,
        step: int,
        value: float,
        reference: float,
        *,
        role: str = "activations",
        tensor: str = "",
        began: int | None = None,
        rows: int | None = None,
        sign: int = 1,
        facts: Mapping[str, float] | None = None,
    ) -> None:
        """Say that something goes on in a layer in this step.

        Args:
            kind, layer: what, and where.
            step: number of the step.
            value, reference, role, tensor, facts: as in `CourseEvent`.
            began: the step it began in, if that is not the one in which it is first said.
            rows: how many watched steps showed it, if not those in which it was said.
            sign: -1 where the least value is furthest off.
        """
        key = kind, layer
        before = self._events.get(key)
        if before is None or key not in self._open:
            event = CourseEvent(
                rule=self.rule,
                kind=kind,
                step=step if began is None else began,
                layer=layer,
                value=value,
                reference=reference,
                last=step,
                rows=1 if rows is None else rows,
                peak=value,
                role=role,
                tensor=tensor,
                facts=facts or {},
            )
        else:
            event = replace(
                before,
                value=value,
                reference=reference,
                last=step,
                rows=before.rows + 1 if rows is None else rows,
                peak=max(before.peak * sign, value * sign) * sign,
                facts=before.facts if facts is None else facts,
            )
        self._events[key] = event
        self._open.add(key)
        self.changed.append(event)

    def end(self, kind: str, layer: str = "") -> None:
        """Say that something is over, if it went on."""
        key = kind, layer
        if key in self._open:
            self._open.discard(key)
            self._events[key] = replace(self._events[key], recovered=True)

    def is_open(self, kind: str, layer: str = "") -> bool:
        """Whether something goes on."""
        return (kind, layer) in self._open

    def mark(
        self,
        table: Table,
        kind: str,
        active: Mask,
        told: Mask,
        value: Reals,
        reference: Reals,
        *,
        role: str = "activations",
        sign: int = 1,
        facts: Mapping[str, Reals] | None = None,
        lately: bool = False,
    ) -> None:
        """Say in which layers something goes on in the latest step, and where it is over.

        Args:
            table: has the latest step.
            kind, role, sign: as in `go_on`.
            active: where it goes on.
            told: where the step tells of it; elsewhere nothing is over.
            value, reference, facts: of each layer.
            lately: whether it takes all of the latest values to tell, so that it began before.
        """
        if active.any():
            for at in active.nonzero()[0].tolist():
                found = {name: float(values[at]) for name, values in (facts or {}).items()}
                self.go_on(
                    kind,
                    table.layers[at],
                    table.row.step,
                    float(value[at]),
                    float(reference[at]),
                    role=role,
                    began=table.lately if lately else None,
                    sign=sign,
                    facts=found,
                )
        for own, layer in list(self._open):
            if own == kind:
                at = table.column(layer)
                if told[at] and not active[at]:
                    self.end(kind, layer)
