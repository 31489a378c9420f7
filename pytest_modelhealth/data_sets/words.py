"""What a run over batches found, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.report import ByClass, Observation, SilentUnits

MOST_UNITS = 8
"""Indices that a sentence names."""

MOST_FINDINGS = 3
"""Layers and classes that a note names."""


def notes(observation: Observation) -> Iterator[str]:
    """Yield what a reader should know of a run over batches."""
    found = observation.by_class
    if found is not None and (said := headline(found)):
        yield f"by class: {said}"


def headline(found: ByClass) -> str:
    """Return the gravest findings in one line, ``""`` where there is none."""
    parts = [phrase(one) for one in found.silent[:MOST_FINDINGS]]
    if len(found.silent) > MOST_FINDINGS:
        more = len(found.silent) - MOST_FINDINGS
        parts.append(f"{more:,} more of layer and class")
    if found.alike:
        classes = ", ".join(map(str, found.alike[:MOST_UNITS]))
        parts.append(f"all samples of class {classes} give the same output")
    return "; ".join(parts)


def phrase(one: SilentUnits) -> str:
    """Return what never fires for one class, in words that stand alone."""
    layer, samples = one.layer, f"{one.samples:,} sample{'' if one.samples == 1 else 's'}"
    if one.is_whole and one.of > 1:
        return (
            f"{layer}: no unit fires for class {one.label} (of {one.of} that fire for others, "
            f"{samples})"
        )
    count = len(one.units)
    verb = "unit never fires" if count == 1 else "units never fire"
    shown = ", ".join(map(str, one.units[:MOST_UNITS])) + (", ..." if count > MOST_UNITS else "")
    return f"{layer}: {count} {verb} for class {one.label} ({shown}; {samples})"
