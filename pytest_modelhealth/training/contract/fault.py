"""What a training step breaks: a row of a table a finding, held against what a few calls did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.check import Listed, held_against
from pytest_modelhealth.report import (
    Inconclusive,
    LayerMode,
    Stepped,
    SteppedParameter,
    Violation,
)
from pytest_modelhealth.settings import Limit, Settings, Severity

Source = Callable[[Listed, Stepped, Settings], Iterator[Finding]]
SOURCES: dict[str, list[tuple[Source, bool]]] = defaultdict(list)
"""What each check looks for, and whether for nothing after that where there is any."""


def looks_for(check: str, *, is_last: bool = False) -> Callable[[Source], Source]:
    """Return a decorator of what yields findings of a check that are no row."""

    def register(source: Source) -> Source:
        SOURCES[check].append((source, is_last))
        return source

    return register


def fault(check: str, *row: Any, is_last: bool = False, **more: Any) -> None:
    """Add a row to what a check looks for: the arguments of `Fault`."""
    looks_for(check, is_last=is_last)(Fault(*row, **more))


@dataclass(frozen=True)
class Fault:
    """One thing that a step may do wrong.

    Args:
        subjects: what does it, of the step: parameters, layers, optimizers, names, or the step.
        what: what is wrong, one sentence that stands alone. In braces it has ``names`` (the first
            few of the subjects), ``count``, ``one`` (the first of them), ``step``, ``value`` (what
            was measured) and `facts`.
        cause: the likely cause, one sentence, with the same in braces.
        each: whether there is a finding for each of the subjects.
        measure: what of a subject is held against the limit; without one how many there are counts.
        limit: name of the setting; values beyond it are wrong.
        below: whether values below the limit are.
        grade: ``"warn"`` where a design may look the same, or what tells, by the subjects.
        independent: whether no fault elsewhere can bring this about; what warns never is.
        tensor: own name of the tensor, where the subjects do not tell.
        at: the layer and the tensor, where the subjects are neither parameters nor layers.
        facts: what else the sentences have.
        details: what else was seen, a sentence.
    """

    subjects: Callable[[Stepped], Iterable[Any]]
    what: str
    cause: str
    each: bool = False
    measure: Callable[[Any], float] | None = None
    limit: str = ""
    below: bool = False
    grade: Severity | Callable[[Sequence[Any], Stepped], Severity] = "fail"
    independent: bool = True
    tensor: str = ""
    at: Callable[[Any], tuple[str, str]] | None = None
    facts: Callable[[Sequence[Any], Stepped], Mapping[str, Any]] | None = None
    details: str = ""

    def __call__(self, check: Listed, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what is wrong, if anything is."""
        subjects, limit = list(self.subjects(stepped)), None
        if self.limit:
            limit = settings[self.limit]
            subjects = [one for one in subjects if self._is_beyond(one, limit.value)]
        for some in [[one] for one in subjects] if self.each else [subjects] if subjects else []:
            value = float(len(some)) if self.measure is None else self.measure(some[0])
            more = {} if self.facts is None else self.facts(some, stepped)
            told = {"count": len(some), "one": some[0], "step": stepped, "value": value, **more}
            told["names"] = listed([_name(one) for one in some])
            grade = self.grade if isinstance(self.grade, str) else self.grade(some, stepped)
            layers, tensor = self._place(some)
            yield broken(
                check,
                self.what.format(**told),
                self.cause.format(**told),
                layers,
                tensor=tensor or self.tensor,
                value=value,
                limit=limit,
                severity=grade,
                independent=self.independent and self.grade != "warn",
                details=(self.details.format(**told),) if self.details else (),
            )

    def _is_beyond(self, one: Any, limit: float) -> bool:
        assert self.measure is not None
        value = self.measure(one)
        return not value >= limit if self.below else value > limit

    def _place(self, some: Sequence[Any]) -> tuple[list[str], str]:
        """Return the layers that it is about, the first that does it first, and its tensor."""
        if self.at is not None:
            layer, tensor = self.at(some[0])
            return [layer], tensor
        layers = [one.layer for one in some if isinstance(one, SteppedParameter | LayerMode)]
        return layers, getattr(some[0], "own", "")


def _name(one: Any) -> str:
    return one if isinstance(one, str) else getattr(one, "name", getattr(one, "layer", ""))


def whole(applies: Callable[[Stepped], Any]) -> Callable[[Stepped], list[Stepped]]:
    """Return what gives the step itself where something applies to it."""
    return lambda step: [step] if applies(step) else []


def broken(
    check: Listed,
    what: str,
    cause: str,
    layers: Sequence[str] = (),
    *,
    value: float = 0.0,
    limit: Limit | None = None,
    **more: Any,
) -> Violation:
    """Return a violation of the whole step, or of `layers`: the first, which affects the others.

    Args:
        check: the check that it is of.
        what: what is wrong, one sentence that stands alone.
        cause: the likely cause, one sentence.
        layers: the layers that it is about.
        value: what was measured.
        limit: what `Settings` gave, where it is held against a number.
        more: what a `Violation` holds beside them.
    """
    layers = list(dict.fromkeys(layers)) or [""]
    return Violation(
        check.name,
        layers[0],
        check.role,
        value=value,
        **held_against(limit),
        message=what,
        cause=cause,
        affected=tuple(layers[1:]),
        **{"independent": True, **more},
    )


def untold(check: Listed, reason: str) -> Inconclusive:
    """Return that there was too little evidence to judge the step."""
    return Inconclusive(check.name, "", reason)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names as a phrase: the first few, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
