"""What a tool makes of the cases: whether it objects, where, and with what cause.

A case is caught if the tool objects, at all. It is located at a layer if an objection names a layer
that the card accepts, and only at the root if the model as a whole is all that is named rightly: by
design where a loss or a batch is at fault, and no great help where a layer is. Its cause is right
if such an objection says why. It is only warned of if nothing but a warning names place and cause,
and named if an objection or a warning names either. A healthy case that is objected to with any
seed is a false alarm. What a tool raises counts as neither.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from corpus.cards import Case
from corpus.words import MODEL


@dataclass(frozen=True)
class Finding:
    """One objection.

    Args:
        layer: the layer that it names, as in `named_modules`; ``""`` is the model itself, and
            ``None`` that no place is named.
        check: the check or function that raised it, if it has a name.
        text: its sentences, with the cause where one is given.
        warns: whether it only warns, and fails nothing.
        also: further names of the same place, such as that in the other model of a pair.
    """

    layer: str | None
    check: str = ""
    text: str = ""
    warns: bool = False
    also: tuple[str | None, ...] = ()

    @property
    def names(self) -> tuple[str | None, ...]:
        """Every name of its place."""
        return (self.layer, *self.also)


Tool = Callable[[Any], Iterable[Finding]]
"""Judges what a case builds: a `Subject`, a `Training`, or the `Sides` of a pair. It returns what
it objects to, the gravest first, of a pair the place where the two part; nothing where all is well.
It may raise `NotImplementedError` where it does not judge what it is given."""


@dataclass(frozen=True)
class Judged:
    """What a tool made of a case with one seed.

    Args:
        case: the case.
        seed: the random seed that it was built and judged under.
        objections: what fails, the gravest first.
        warnings: what only warns.
        error: what was raised instead.
        seconds: how long judging took, building apart.
    """

    case: Case
    seed: int = 0
    objections: Sequence[Finding] = ()
    warnings: Sequence[Finding] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        """Whether there was an objection at all."""
        return bool(self.objections)

    @property
    def is_located(self) -> bool:
        """Whether an objection names a right place, be it a layer or the model itself."""
        return any(self.case.is_at(*found.names) for found in self.objections)

    @property
    def is_at_layer(self) -> bool:
        """Whether an objection names a right layer."""
        return any(
            self.case.is_at(name)
            for found in self.objections
            for name in found.names
            if name not in MODEL
        )

    @property
    def is_at_root_only(self) -> bool:
        """Whether the model as a whole is all that objections name rightly."""
        return self.is_located and not self.is_at_layer

    @property
    def has_right_cause(self) -> bool:
        """Whether an objection that names a right place is of a fitting check and says why."""
        return any(map(self._is_right, self.objections))

    @property
    def leads(self) -> bool:
        """Whether the gravest objection is one that names a right place."""
        return bool(self.objections) and self.case.is_at(*self.objections[0].names)

    @property
    def is_only_warned_of(self) -> bool:
        """Whether nothing fails, and a warning names place and cause."""
        return not self.is_caught and any(map(self._is_right, self.warnings))

    @property
    def is_named(self) -> bool:
        """Whether an objection or a warning names a right place, or the cause."""
        return any(
            self.case.is_at(*found.names) or self.case.is_named_in(found.text)
            for found in (*self.objections, *self.warnings)
        )

    @property
    def is_right(self) -> bool:
        """Whether a sick case has its right cause, and a healthy one no objection."""
        if self.error:
            return False
        return self.has_right_cause if self.case.is_sick else not self.is_caught

    def _is_right(self, found: Finding) -> bool:
        case = self.case
        return (
            case.is_at(*found.names)
            and (not case.by or not found.check or found.check in case.by)
            and (not case.words or case.is_named_in(found.text))
        )


def judge(tool: Tool, case: Case, seed: int = 0) -> Judged | None:
    """Return what a tool makes of a case under a seed, or ``None`` where it does not judge it."""
    torch.manual_seed(seed)
    built = case.build()
    torch.manual_seed(seed)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch and the tools warn of some of the cases
            findings, error = list(tool(built)), ""
    except NotImplementedError:
        return None
    except Exception as raised:  # noqa: BLE001 - what a tool raises belongs into its row
        findings, error = [], f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
    objections = [found for found in findings if not found.warns]
    warned = [found for found in findings if found.warns]
    return Judged(case, seed, objections, warned, error, time.perf_counter() - start)


@dataclass
class Score:
    """What a tool made of several cases."""

    judged: list[Judged] = field(default_factory=list)

    @property
    def sick(self) -> list[Judged]:
        """The faults and harmful changes."""
        return [one for one in self.judged if one.case.is_sick]

    @property
    def healthy(self) -> list[Judged]:
        """The controls and refactors, once for each seed."""
        return [one for one in self.judged if not one.case.is_sick]

    @property
    def alarms(self) -> list[Judged]:
        """The healthy ones that were objected to."""
        return [one for one in self.healthy if one.is_caught]

    @property
    def false_alarms(self) -> int:
        """On how many healthy cases some seed was objected to."""
        return len({one.case.name for one in self.alarms})

    def cells(self) -> list[str]:
        """Return its row of the table, a cell for each of `COLUMNS`."""
        shares = [
            _share([getattr(one, name) for one in self.sick])
            for name in ("is_caught", "is_located", "is_at_layer")
        ]
        shares.append(str(sum(one.is_at_root_only for one in self.sick)))
        shares += [
            _share([getattr(one, name) for one in self.sick])
            for name in ("has_right_cause", "leads")
        ]
        warned = str(sum(one.is_only_warned_of for one in self.sick))
        named = _share([one.is_named for one in self.sick])
        controls = len({one.case.name for one in self.healthy})
        over_all = f"{len(self.alarms)} of {len(self.healthy)}"
        raised = str(sum(bool(one.error) for one in self.judged))
        seconds = f"{sum(one.seconds for one in self.judged):.0f}"
        alarms = f"{self.false_alarms} of {controls}"
        return [*shares, warned, named, alarms, over_all, raised, seconds]


COLUMNS = ["caught", "located", "at a layer", "only at the root", "right cause"]
COLUMNS += ["in the first line", "only warned of", "named", "false alarms", "over all seeds"]
COLUMNS += ["raised", "seconds"]


def _share(marks: list[bool]) -> str:
    part, whole = sum(marks), len(marks)
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def score(tool: Tool, cases: Iterable[Case], seeds: int = 1) -> Score:
    """Return what a tool makes of cases: the sick ones with seed 0, the healthy with every seed."""
    made = Score()
    for case in cases:
        tries = 1 if case.is_sick else seeds
        made.judged += [one for seed in range(tries) if (one := judge(tool, case, seed))]
    return made
