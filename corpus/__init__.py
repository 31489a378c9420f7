"""Faults in PyTorch models, healthy models that look like them, and refactors.

Any tool can be scored on it: nothing here knows one. A case builds what is judged, and its card
says what has to be named::

    from corpus import cases

    for case in cases(kind="wiring", role="fault"):
        torch.manual_seed(0)
        subject = case.build()

``python -m corpus list`` lists the cards, ``python -m corpus score`` scores a tool. How a fault is
added is in docs/reference/corpus.md.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from corpus.cards import GROUPS, KINDS, ROLES, Case, Shelf
from corpus.pair import Sides
from corpus.scoring import Finding, Tool
from corpus.subject import Subject, Training, loss_of, run

__all__ = [
    "GROUPS",
    "KINDS",
    "ROLES",
    "Case",
    "Finding",
    "Shelf",
    "Sides",
    "Subject",
    "Tool",
    "Training",
    "cases",
    "loss_of",
    "run",
    "shelves",
]


def cases(
    kind: str | None = None, group: str | None = None, role: str | None = None, name: str = "*"
) -> Iterator[Case]:
    """Yield the cases of a kind, group and role whose name fits a shell pattern.

    Each is built under the random seed of the moment, and by that alone: set it before `build`.

    Raises:
        ValueError: there is no such kind, group or role.
    """
    for what, asked, known in (
        ("kind", kind, KINDS),
        ("group", group, GROUPS),
        ("role", role, ROLES),
    ):
        if asked is not None and asked not in known:
            raise ValueError(f"no {what} {asked!r}; there are: {', '.join(known)}")
    for shelf in shelves(*([kind] if kind else KINDS)):
        for case in shelf.cases:
            is_asked = group in (None, case.group) and role in (None, case.role)
            if is_asked and fnmatchcase(case.name, name):
                yield case


def shelves(*kinds: str) -> Iterator[Shelf]:
    """Yield the shelf of each file of these kinds."""
    for kind in kinds:
        package = import_module(f"corpus.{kind}")
        for found in pkgutil.iter_modules(package.__path__):
            yield import_module(f"corpus.{kind}.{found.name}").SHELF
