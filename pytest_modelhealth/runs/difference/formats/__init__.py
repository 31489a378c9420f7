"""The shelf of formats of a difference: one a file, found by itself.

A format is a module with ``render(difference, *, colour=False)``, which returns the text.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from pytest_modelhealth.runs.difference.result import Difference


def names() -> list[str]:
    """Return the names of all formats."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def render(difference: Difference, name: str, *, colour: bool = False) -> str:
    """Return a difference in the format of this name, one of `names`.

    Args:
        difference: what to show.
        name: of the format.
        colour: whether the text goes to a terminal that shows colours.
    """
    text: str = importlib.import_module(f"{__name__}.{name}").render(difference, colour=colour)
    return text
