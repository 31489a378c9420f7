"""Which layer, unit and class never fire: one line first, then all of them, then the classes."""

from __future__ import annotations

from pytest_modelhealth.data_sets.words import headline
from pytest_modelhealth.rendering.notation import abbreviate, percent, plural, printable, table
from pytest_modelhealth.report import ByClass, HealthReport

MAX_ROWS = 40
MAX_UNITS = 40
"""Characters that the indices of units may take."""


def render(report: HealthReport, *, max_rows: int | None = MAX_ROWS) -> str:
    """Return the findings of ``run_batches(..., by=...)``.

    Args:
        report: the report.
        max_rows: show at most so many lines of each table; ``None`` shows all.
    """
    found = report.by_class
    if found is None:
        return "no statistics by class: run_batches(batches, by='target') has them"
    lines = [printable(headline(found) or _nothing(found))]
    for rows in (*([_silent(found)] if found.silent else []), _classes(found)):
        most = len(rows) if max_rows is None else max_rows + 1
        lines += ["", *table(rows[:most], left=(0, 1) if len(rows[0]) > 4 else (0,))]
        if len(rows) > most:
            lines.append(f"... and {len(rows) - most:,} more")
    if found.left_out:
        names = ", ".join(map(printable, list(found.left_out)[:3]))
        more = f" and {len(found.left_out) - 3:,} more" if len(found.left_out) > 3 else ""
        why = next(iter(found.left_out.values()))
        lines += ["", f"not split: {names}{more}: {printable(why)}"]
    return "\n".join(lines)


def _nothing(found: ByClass) -> str:
    if not found.judged:
        return "no layer has units that can fall silent: none is an activation with a flat side"
    layers = plural(len(found.judged), "layer")
    return f"every unit that fires for some class fires for each ({layers} with a flat side)"


def _silent(found: ByClass) -> list[list[str]]:
    rows = [["layer", "class", "never fire", "of", "samples", "units"]]
    for one in found.silent:
        units = ", ".join(map(str, one.units))
        shown = units if len(units) <= MAX_UNITS else units[: MAX_UNITS - 5].rpartition(",")[0]
        rows.append(
            [
                abbreviate(printable(one.layer), 40),
                printable(str(one.label)),
                f"{len(one.units):,}",
                f"{one.of:,}",
                f"{one.samples:,}",
                shown if shown == units else f"{shown}, ...",
            ]
        )
    return rows


def _classes(found: ByClass) -> list[list[str]]:
    rows = [["class", "samples", "share", "outputs"]]
    whole = sum(found.samples.values())
    for label, samples in found.samples.items():
        outputs = "all the same" if label in found.alike else ""
        share = percent(samples / whole) if whole else ""
        rows.append([printable(str(label)), f"{samples:,}", share, outputs])
    return rows
