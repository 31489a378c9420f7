"""How what a step does wrong is written down: a row each, or a function where a row cannot say it.

A row has the subjects that do it, of the `Stepped`, and two sentences; a new one is a call of
`fault` more. What needs numbers from `Settings`, or several sentences, is decorated by `looks_for`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Finding, Stepped
from pytest_modelhealth.settings import Settings, Severity

Source = Callable[[Listed, Stepped, Settings], Iterator[Finding]]
SOURCES: dict[str, list[tuple[Source, bool]]] = defaultdict(list)
"""What each check looks for, and whether for nothing after that where there is any."""


def looks_for(check: str, *, is_last: bool = False) -> Callable[[Source], Source]:
    """Return a decorator of what yields findings of a check that are no row."""

    def register(source: Source) -> Source:
        SOURCES[check].append((source, is_last))
        return source

    return register


def fault(
    check: str,
    subjects: Callable[[Stepped], Iterable[Any]],
    what: str,
    cause: str,
    *,
    each: bool = False,
    grade: Severity | Callable[[Sequence[Any], Stepped], Severity] = "fail",
    independent: bool = True,
    tensor: str = "",
) -> None:
    """Add one thing that a step may do wrong to what a check looks for.

    Args:
        check: the check.
        subjects: what does it, of the step: parameters, layers, optimizers, names, or the step.
        what: what is wrong, one sentence that stands alone. In braces it has ``names`` (the first
            few of the subjects), ``count``, ``one`` (the first of them) and ``step``.
        cause: the likely cause, one sentence, with the same in braces.
        each: whether there is a finding for each of the subjects.
        grade: ``"warn"`` where a design may look the same, or what tells, by the subjects.
        independent: whether no fault elsewhere can bring this about; what warns never is.
        tensor: own name of the tensor, where the subjects do not tell.
    """

    def find(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
        subject = list(subjects(step))
        for some in [[one] for one in subject] if each else [subject] if subject else []:
            words = {"count": len(some), "one": some[0], "step": step}
            words["names"] = listed([_name(one) for one in some])
            yield broken(
                check,
                what.format(**words),
                cause.format(**words),
                [one.layer for one in some if hasattr(one, "own") or hasattr(one, "training")],
                value=float(len(some)),
                tensor=getattr(some[0], "own", tensor),
                severity=grade if isinstance(grade, str) else grade(some, step),
                independent=independent and grade != "warn",
            )

    looks_for(check)(find)


def _name(one: Any) -> str:
    return one if isinstance(one, str) else getattr(one, "name", getattr(one, "layer", ""))


def broken(
    check: Listed, what: str, cause: str, layers: Sequence[str] = (), **more: Any
) -> Finding:
    """Return a finding of the whole step, or of `layers`: the first, which affects the others.

    Args:
        check: the check that it is of.
        what: what is wrong, one sentence that stands alone.
        cause: the likely cause, one sentence.
        layers: the layers that it is about.
        more: what else `Check.violation` takes.
    """
    first, *others = dict.fromkeys(layers or [""])
    fields = {"value": 0.0, "independent": True, **more}
    return check.violation(first, what, cause=cause, affected=others, **fields)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names as a phrase: the first few, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
