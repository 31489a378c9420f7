"""What probes say of two runs that part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import at

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Parting


def ratio(effect: float) -> str:
    """Return an effect as a few digits."""
    return f"{effect:.2g}"


def began(parting: Parting) -> str:
    """Return where the two runs part, as the end of a sentence."""
    if parting.taker:
        steps = ", ".join(f"`{step}`" for step in parting.between[-_FEW:])
        by = f" by {steps}" if steps else ""
        return f"; it begins in its own code{by}, before {parting.taker!r}{at(parting.line)}"
    return f"; it begins there{at(parting.line)}" if parting.line else ""


def figures(parting: Parting, changed: str) -> tuple[str, ...]:
    """Return the numbers of both runs where they part, as a sentence."""
    if parting.before is None or parting.after is None:
        return ()
    where = f"what {parting.taker!r} is given" if parting.taker else "its output"
    if parting.role == "loss":
        where = "the loss"
    there = f" at {parting.place}" if parting.place else ""
    return (f"{where}{there} is {parting.before:.4g}; with {changed}, {parting.after:.4g}",)


_FEW = 3

Causes = tuple[tuple[frozenset[str], str], ...]
"""Operations and parts of classes' names, in lower case, each with the cause that they point to."""


def cause(parting: Parting, culprit: LayerRecord, causes: Causes, otherwise: str) -> str:
    """Return the likely cause, by what the layer is or does where two runs part."""
    steps = {step.rstrip("_").lower() for step in parting.between}
    kind = "" if parting.taker else culprit.type_name.lower()
    for names, text in causes:
        if any(name in steps or (kind and name in kind) for name in names):
            return text
    return otherwise
