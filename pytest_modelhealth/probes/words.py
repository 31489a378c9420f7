"""What probes say of two runs that part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import at
from pytest_modelhealth.report import Parting

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.locating import Apart, Place


def ratio(effect: float) -> str:
    """Return an effect as a few digits."""
    return f"{effect:.2g}"


def parting_at(kind: str, found: Apart, place: Place | None, where: str) -> Parting:
    """Return what was found at the output, and where in the model it begins.

    Args:
        kind: which of the things that the probe looks at.
        found: how far outputs are apart.
        place: where layers part, if that was found.
        where: the place in the output, for people.
    """
    if place is None:
        return Parting(kind, found.effect, place=where, before=found.before, after=found.after)
    return Parting(
        kind,
        found.effect,
        place.layer,
        role="activations",
        place=where,
        before=place.apart.before,
        after=place.apart.after,
        between=" -> ".join(f"`{step}`" for step in place.between),
        line=place.line,
        detail=place.given,
    )


def began(parting: Parting) -> str:
    """Return where the two runs part, as the end of a sentence."""
    if parting.before is None or parting.after is None:
        return ""
    figures = f"{parting.before:.4g} becomes {parting.after:.4g}"
    own = f" in its own code, by {parting.between}," if parting.between else ""
    into = f" before {parting.detail!r}" if parting.detail else ""
    return f"; it begins{own}{into}{at(parting.line)}: {figures} for {parting.place}"
