"""The card of a case, the words that cards are written in, and the shelf that cards are put on."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from corpus.pair import Edit, Sides
from corpus.subject import Healthy

KINDS = {
    "initialisation": "weights and biases as they are first drawn, or as a checkpoint has them",
    "wiring": "what is computed from what: a part unread, skipped, doubled or fed the wrong tensor",
    "gradient": "the way back: cut, stopped, rounded off or faded before it reaches a parameter",
    "loss": "the loss, what it is given, and what it weighs",
    "data": "the batch and the target",
    "normalisation": "norms, their epsilons, scales and statistics",
    "numerics": "NaN, infinity, overflow, underflow, and scales that lead there or to a flat end",
    "step": "what surrounds one: modes, registered parameters, running statistics, the last step",
    "leak": "what one place sees that it must not: "
    "another sample, the future, padding, chance, an earlier call",
    "training": "the user's own training step: optimizer, order of calls, scale, modes, state",
    "loop": "a training of some hundred steps: one that goes wrong on the way",
    "refactor": "two models, of which one was made from the other and should compute the same",
    "deployed": "a model, and what was frozen, exported, quantised, pruned or merged from it",
    "reported": "what people reported in public trackers, rebuilt small; its fix is a control",
    "threads": "as reported, a second set: other bugs, most of which train and are only worse",
    "pulls": "as reported, a third set, as the reports come, with designs that look like them",
    "steps": "reported training steps and trainings, rebuilt small; the fix is a control",
    "healthy": "models as they are used, which look like no fault",
}
"""Each kind of fault; a control is of the kind of fault that it looks like."""

GROUPS = {
    "open": "on which a tool may be tuned",
    "held out": "on which nothing is tuned: looked at as a score only",
    "blind": "written before the checks that judge it, without a look at them",
}

ROLES = {
    "fault": "a healthy subject with a fault put into it: objections are right, where they name it",
    "control": "a healthy subject: every objection is a false alarm",
    "change": "a pair that differs: objections are right, where the first names the place",
    "refactor": "a pair that computes the same: every objection is a false alarm",
}


FILE = re.compile(r"[\w./\\-]+\.py(:\d+)?")


@dataclass(frozen=True)
class Case:
    """The card of a case.

    Args:
        name: what was done, in words.
        role: one of `ROLES`.
        kind: one of `KINDS`.
        group: one of `GROUPS`.
        build: makes what is judged, under the current random seed: the sick or healthy subject, or
            the two sides of a pair.
        architecture: name of the healthy subject; empty for some controls.
        at: shell patterns of the layer names that are right; ``""`` is the model itself. Of a pair,
            by their names in either model. Empty where nothing is wrong.
        words: one of them stands in what is said of the layer, and gives the right cause; empty
            where naming the layer is all that is asked.
        by: names of pytest-modelhealth's checks that may say it; empty where any may, and not asked
            of what carries no check's name.
        why: one sentence on why it is a fault.
        healthy: makes the subject of a fault as it was before.
        source: address of the report that it was rebuilt from.
    """

    name: str
    role: str
    kind: str
    group: str
    build: Callable[[], Any]
    architecture: str = ""
    at: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    why: str = ""
    healthy: Healthy | None = None
    source: str = ""

    @property
    def is_sick(self) -> bool:
        """Whether a tool should object."""
        return self.role in ("fault", "change")

    def is_at(self, *layers: str | None) -> bool:
        """Whether one of these layers is a right place."""
        return any(
            fnmatchcase(layer, pattern)
            for layer in layers
            if layer is not None
            for pattern in self.at
        )

    def is_named_in(self, text: str) -> bool:
        """Whether a text gives the right cause; never where the card has no words.

        Names of files are passed over: those of the corpus have the kind of the fault in them.
        """
        said = FILE.sub("", text.lower())
        return any(word in said for word in self.words)


Make = Callable[[bool], Any]
Sabotage = Callable[[Any], object]
"""Puts a fault into a healthy subject."""


@dataclass
class Shelf:
    """The cases of one file, in the order written: all of one kind and one group."""

    kind: str
    group: str = "open"
    cases: list[Case] = field(default_factory=list)

    def fault(
        self,
        name: str,
        healthy: Healthy,
        at: str | Iterable[str],
        words: str | Iterable[str],
        by: str | Iterable[str] = (),
        *,
        why: str = "",
    ) -> Callable[[Sabotage], Sabotage]:
        """Add the fault that the decorated function puts into a healthy subject."""

        def add(sabotage: Sabotage) -> Sabotage:
            def build() -> Any:
                sick = healthy()
                sabotage(sick)
                return sick

            card = {"at": _some(at), "words": _some(words), "by": _some(by), "why": why}
            card |= {"architecture": healthy.__name__, "healthy": healthy}
            self._add("fault", name, build, **card)
            return sabotage

        return add

    def control(self, name: str, build: Healthy) -> None:
        """Add a healthy subject."""
        self._add("control", name, build)

    def report(
        self, source: str, name: str, at: str | Iterable[str], words: str | Iterable[str]
    ) -> Callable[[Make], Make]:
        """Add a fault that was reported at an address, and its fix as a control.

        The decorated function makes the one or the other, by its argument ``fixed``.
        """

        def add(make: Make) -> Make:
            card = {"at": _some(at), "words": _some(words), "why": inspect.getdoc(make) or ""}
            healthy = functools.partial(make, True)
            card |= {"architecture": make.__name__, "healthy": healthy, "source": source}
            self._add("fault", name, functools.partial(make, False), **card)
            self._add("control", f"fixed: {name}", healthy, source=source)
            return make

        return add

    def refactor(self, name: str, healthy: Healthy) -> Callable[[Edit], Edit]:
        """Add what the decorated function makes of a model, and what computes the same."""
        return functools.partial(self._pair, "refactor", name, healthy, {})

    def change(
        self, name: str, healthy: Healthy, at: str | Iterable[str], *, why: str = ""
    ) -> Callable[[Edit], Edit]:
        """Add what the decorated function makes of a model, wrong from the layer `at` on."""
        card = {"at": _some(at), "why": why}
        return functools.partial(self._pair, "change", name, healthy, card)

    def _pair(
        self, role: str, name: str, healthy: Healthy, card: dict[str, Any], edit: Edit
    ) -> Edit:
        def build() -> Sides:
            reference = healthy()
            candidate = copy.deepcopy(reference.model)
            made = edit(candidate)
            return Sides(reference, candidate if made is None else made)

        self._add(role, name, build, architecture=healthy.__name__, **card)
        return edit

    def _add(self, role: str, name: str, build: Callable[[], Any], **card: Any) -> None:
        self.cases.append(Case(name, role, self.kind, self.group, build, **card))


def _some(values: str | Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)
