"""A smaller copy of a model as text."""

from __future__ import annotations

from pytest_modelhealth.removal.smaller import SmallerCopy
from pytest_modelhealth.rendering.model_summary_text import scaled, whole
from pytest_modelhealth.rendering.notation import (
    abbreviate,
    number,
    percent,
    printable,
    shorten,
    table,
)
from pytest_modelhealth.rendering.removable import ranges

COLUMNS = ("layer", "units", "left", "cut")
_NAME, _INDICES = 40, 40
"""Characters of a name and of a list of indices in the table."""


def line(made: SmallerCopy) -> str:
    """Return how much smaller it is, and how far its outputs are off, in one line."""
    name = printable(made.report.observation.model_type)
    sizes = [_part(*made.parameters, "parameters")]
    if made.multiply_adds is not None:
        sizes.append(_part(*made.multiply_adds, "multiply-adds"))
    return f"{name}: a smaller copy with {', '.join(sizes)}; {_outputs(made)}"


def _part(before: int, after: int, what: str) -> str:
    return f"{percent(after / before if before else 1.0)} of its {scaled(before).strip()} {what}"


def _outputs(made: SmallerCopy) -> str:
    if made.difference == 0.0:
        return "its outputs are the same, bit for bit"
    return (
        f"its outputs differ by {number(made.difference)} of their size, and rounding explains "
        f"{number(made.limit)}"
    )


def text(made: SmallerCopy) -> str:
    """Return the line, a table of what was cut, and what was left alone."""
    rows = [
        (
            abbreviate(_label(name), _NAME),
            whole(made.sizes[name]),
            whole(made.sizes[name] - len(gone)),
            shorten(ranges(gone), _INDICES),
        )
        for name, gone in made.cut.items()
    ]
    body = [line(made), "", *table([COLUMNS, *rows], left=(0, 3)), "", _training(made)]
    refused = [f"  {_label(name)}: {printable(why)}" for name, why in made.refused.items()]
    return "\n".join([*body, *(["left alone:", *refused] if refused else [])])


def _training(made: SmallerCopy) -> str:
    moved = made.difference_in_training
    if moved is None:
        return "it was not run in training mode, in which the model fails"
    if moved <= made.limit:
        return "in training mode, dropout aside, outputs are the same as well"
    return (
        f"in training mode, dropout aside, outputs differ by {number(moved)} of their size: units "
        "are known to go in evaluation mode"
    )


def _label(name: str) -> str:
    return printable(name) or "the model"
