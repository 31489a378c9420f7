"""`Finding`: the one record of what is wrong, and of what could not be told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_modelhealth.settings.setting import Waiver

Grade = Literal["fail", "warn", "note", "unsure", "broken"]

_NAMED = re.compile(r"(?:'[^']*'|`[^`]*`)(?:,| and| or)?(?=\s|$)|\S*\d[^\s,;:)]*|\b(?:is|are)\b")


@dataclass(frozen=True)
class Reference:
    """Statistics in a report: a layer, a role, and the tensor's own name where it has several."""

    layer: str
    role: str
    tensor: str = ""


@dataclass(frozen=True)
class Finding:
    """What a check says of one place: what is wrong there, or that it could not be told.

    Args:
        check: name of the check.
        layer: fully qualified name of the culprit.
        role: which tensor of it.
        value: what was measured.
        limit: the limit it broke; ``None`` where none is a number (nothing may be NaN).
        origin: where the limit came from (``"default"``, ``"pytest.ini: modelhealth_..."``).
        message: what is wrong, one sentence that stands alone; of an ``"unsure"`` one what was
            seen, and what the check would need.
        cause: the likely cause, one sentence.
        tensor: own name of the tensor (``"weight"``), where the role has several.
        affected: names of the layers that only show what this one began; they are counted for the
            reader, and keep the finding where only they are judged (the setting ``layers``).
        independent: whether no fault elsewhere can bring this about (a graph that is cut, a
            parameter that is not registered); other findings can be consequences.
        between_ranks: whether it is about what ranks disagree in, which says nothing of the
            numbers that each of them has by itself.
        grade: ``"fail"`` where it is wrong in any reading; ``"warn"`` where a design may look the
            same, which fails only where the setting ``severity`` says so of this check, or where
            ``strict`` is set; ``"note"`` where it is worth knowing and never fails;
            ``"unsure"`` where there was too little evidence to judge; ``"broken"`` where the check
            raised, or gave something that is no finding.
        evidence: the statistics that were read, the culprit's first, then those of what comes
            before it; the diagnosis fills it in where the check leaves it empty.
        details: what else was seen, a sentence each, the most telling first.
        folded: findings that are consequences of this one, in causal order.
        step: of a training the step that it began in.
        place: of a broken check ``path:line``, and where it raised the line itself.
        waiver: what accepted it, if anything did.
    """

    check: str
    layer: str
    role: str = ""
    value: float = 0.0
    limit: float | None = None
    origin: str = ""
    message: str = ""
    cause: str = ""
    tensor: str = ""
    affected: tuple[str, ...] = ()
    independent: bool = False
    between_ranks: bool = False
    grade: Grade = "fail"
    evidence: tuple[Reference, ...] = ()
    details: tuple[str, ...] = ()
    folded: tuple[Finding, ...] = ()
    step: int | None = None
    place: str = ""
    waiver: Waiver | None = field(default=None, metadata={"json": False})

    @property
    def kind(self) -> str:
        """What it says, up to the first comma, without names, code and numbers.

        Findings of one cause share it; it stays where sizes, names and lines move.
        """
        clause = re.split(r"[,;:(](?:\s|$)| \(", _NAMED.sub("", self.message))[0]
        return " ".join(clause.split())

    @property
    def consequences(self) -> int:
        """How many other layers only show what this one began."""
        return len(self.layers) - 1

    @property
    def layers(self) -> tuple[str, ...]:
        """The culprit, then the other layers that show what it began, each once."""
        shown = [name for finding in self.folded for name in finding.layers]
        return tuple(dict.fromkeys((self.layer, *self.affected, *shown)))

    @property
    def reason(self) -> str:
        """The message, by its name where nothing could be told."""
        return self.message


Violation = Finding
"""A `Finding`, by the name of what fails."""


class _Unsure(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Finding) and instance.grade == "unsure"


class Inconclusive(metaclass=_Unsure):
    """``Inconclusive(check, layer, reason)`` is a `Finding` of the grade ``"unsure"``.

    A finding of another grade is no instance of it.
    """

    def __new__(cls, check: str, layer: str, reason: str) -> Any:  # noqa: D102
        return Finding(check, layer, message=reason, grade="unsure")
