"""What every format says of a report: the verdict in a line, a layer's numbers in a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.rendering.document import Document, Note, Row
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    Column,
    number,
    percent,
    plural,
    printable,
    shape,
)
from pytest_modelhealth.report import Finding, HealthReport, LayerRecord, Outcome, Status, Verdict
from pytest_modelhealth.report.flow import near
from pytest_modelhealth.settings import APPLICABLE
from pytest_modelhealth.statistics import TensorStatistics

STATISTICS = (
    "count", "nan_count", "positive_inf_count", "negative_inf_count", "zero_count", "mean", "std",
    "min", "max", "abs_max", "rms", "norm", "zero_fraction", "dead_fraction",
)  # fmt: skip
"""The numbers of a tensor that the formats for machines write, by their names in Python."""


def label(report: HealthReport, layer: str) -> str:
    """Return a layer's name for people, on one line; the model itself is shown as its class."""
    record = report.layers.get(layer)
    return printable(record.label if record else layer or report.observation.model_type)


def headline(report: HealthReport) -> str:
    """Return the verdict and what carries it, in one line that stands alone."""
    judgement = report._judgement
    if judgement.violations:
        return f"unhealthy: {finding_text(report, judgement.violations[0])}"
    if judgement.broken:
        return f"inconclusive: {_broken(judgement.broken[0])}"
    if judgement.inconclusive:
        return _inconclusive(report)
    seen = report.observation
    part = "" if seen.part is None else f" in {seen.part}"
    if judgement.warned:
        return f"healthy{part}, {_warned(report)}"
    return f"healthy: no check objects to {printable(seen.model_type)}{part}"


def finding_text(report: HealthReport, found: Finding) -> str:
    """Return where something was found, by which check, and what it is."""
    return f"{label(report, found.layer)} ({found.check}): {printable(near(found.message))}"


def _inconclusive(report: HealthReport) -> str:
    first, *more = report._judgement.inconclusive
    text = f"inconclusive: {label(report, first.layer)} ({first.check}): {printable(first.reason)}"
    return f"{text} (and {len(more):,} more)" if more else text


def _broken(found: Finding) -> str:
    return f"check {found.check} is broken: {printable(found.message)} ({printable(found.place)})"


def _warned(report: HealthReport) -> str:
    first, *others = report.warnings
    told = [finding_text(report, one) for one in (first, *others[:1])]
    told += [f"and {len(others) - 1:,} more"] * (len(others) > 1)
    return f"{plural(len(report.warnings), 'warning')}: {'; '.join(told)}"


def counts(report: HealthReport) -> str:
    """Return how much was found in how many layers: ``"1 violation, 12 layers"``."""
    folded = sum(len(violation.folded) for violation in report.violations)
    along = f" with {plural(folded, 'consequence')}" if folded else ""
    parts = [f"{plural(len(report.violations), 'violation')}{along}"] if report.violations else []
    parts += [plural(len(report.warnings), "warning")] if report.warnings else []
    return ", ".join([*parts, plural(len(report), "layer")])


def consequences(report: HealthReport, violation: Finding, most: int = 3) -> str:
    """Return what follows from a violation, in one line, or ``""``; at most `most` are named."""
    others = violation.consequences
    if not violation.folded:
        show = "shows" if others == 1 else "show"
        began = label(report, violation.layer)
        layers = plural(others, "other layer")
        return f"{layers} only {show} what began in {began}" if others else ""
    found = list(dict.fromkeys(f"{label(report, v.layer)} ({v.check})" for v in violation.folded))
    shown = f"; {plural(others, 'other layer')} in all" if others > len(found) else ""
    return f"and {plural(len(found), 'consequence')}: {listed(found, most)}{shown}"


def run(report: HealthReport) -> str:
    """Return what was run, in one line: model, layers, samples, batches, loss, ranks."""
    seen, counted = report.observation, counts(report)
    parts = [printable(seen.model_type), counted]
    if seen.samples:
        parts.append(plural(seen.samples, "sample"))
    if seen.part is not None:
        parts.append(str(seen.part))
    elif seen.batches != 1:
        parts.append(f"{seen.batches:,} batches")
    if seen.loss is not None:
        parts.append(f"loss {number(seen.loss)}")
    if seen.ranks is not None:
        engine = f" ({printable(seen.ranks.engine)})" if seen.ranks.engine else ""
        parts.append(f"on {plural(len(seen.ranks.ranks), 'rank')}{engine}")
    if not seen.backward:
        parts.append("no backward pass")
    return ", ".join(parts)


def remarks(report: HealthReport, *, briefly: bool = False) -> list[str]:
    """Return what else a reader should know, a line each.

    These are broken checks, what only warns, waivers, errors in hooks and notes. Briefly, below
    violations where `run` does not stand: with the part of the data that was seen, and without the
    reasons for which probes do not apply.
    """
    seen, judgement = report.observation, report._judgement
    lines = [f"of {seen.part}"] if briefly and seen.part is not None else []
    lines += [_broken(found) for found in judgement.broken[0 if judgement.violations else 1 :]]
    if judgement.inconclusive and not judgement.passes:
        lines.append(_inconclusive(report))
    if judgement.warned and judgement.verdict is not Verdict.HEALTHY:
        lines.append(_warned(report))
    if judgement.waived:
        lines.append(f"waived: {plural(len(judgement.waived), 'violation')}")
    if seen.errors:
        lines.append(
            f"{plural(len(seen.errors), 'error')} inside the hooks, so observations are missing; "
            f"the first is {printable(seen.errors[0])}"
        )
    lines += _probes(report, briefly)
    return lines + [f"note: {note}" for note in notes(report)]


def notes(report: HealthReport) -> list[str]:
    """Return what is worth knowing of a run and what was found in it, a sentence each."""
    found = [finding_text(report, one) for one in report._judgement.notes]
    return [*found, *map(printable, report.observation.notes)]


def _probes(report: HealthReport, briefly: bool) -> list[str]:
    """Return what probes ran and what they took, and what they note, a line each."""
    probed, asked = report.observation.probes, report._settings.probes
    # one that ran by itself and found nothing is no part of a failure
    own = {violation.check for violation in report.violations}
    told = [r for r in probed.records if not briefly or asked(r.probe) or r.probe in own]
    if not told:
        return []
    judged = [record.probe for record in told if record.outcome is Outcome.JUDGED]
    cost = f"{plural(probed.forwards, 'further forward')}, {number(probed.seconds)} s"
    lines = [f"probes: {', '.join(judged) or 'none'} judged ({cost})"]
    doubtful = {found.check for found in report.inconclusive}
    for record in told:
        lines += [f"note: {record.probe}: {printable(note)}" for note in record.notes]
        is_quiet = APPLICABLE in report._settings["probes"].value and not asked(record.probe)
        if record.outcome is Outcome.NOT_APPLICABLE and not briefly and not is_quiet:
            lines.append(f"note: {record.probe} does not apply: {printable(record.reason)}")
        if (
            record.outcome is Outcome.NOT_TOLD
            and asked(record.probe)
            and record.probe not in doubtful
        ):
            lines.append(f"note: {record.probe} cannot tell: {printable(record.reason)}")
    return lines


def _of(role: str, form: Callable[[TensorStatistics], str]) -> Callable[[LayerRecord], str]:
    def cell(record: LayerRecord) -> str:
        seen = record.statistics(role)
        return NOT_SEEN if seen is None else form(seen)

    return cell


_FLOWING = "L2 norm of the loss's gradient with respect to the"


def _size(name: str) -> Callable[[TensorStatistics], str]:
    return lambda seen: "NaN/inf" if seen.nonfinite_count else number(getattr(seen, name))


_OF_ACTIVATIONS: dict[str, tuple[str, Callable[[TensorStatistics], str]]] = {
    "output": ("shape of the first output, or why there is none", lambda seen: shape(seen.shape)),
    "mean": ("mean of the activations", lambda seen: number(seen.mean)),
    "std": ("their standard deviation", lambda seen: number(seen.std)),
    "abs max": ("their largest magnitude", _size("abs_max")),
    "zeros": ("part that is zero", lambda seen: percent(seen.zero_fraction)),
    "dead": ("part of the units never active", lambda seen: percent(seen.dead_fraction)),
}
COLUMNS = (
    Column("layer", "fully qualified name", lambda r: printable(r.label), is_text=True),
    Column("type", "class of the module, or the function", lambda r: printable(r.type_name), True),
    *(Column(title, said, _of("activations", f)) for title, (said, f) in _OF_ACTIVATIONS.items()),
    Column("grad", f"{_FLOWING} activations", _of("gradients", _size("norm"))),
    Column("p.grad", f"{_FLOWING} parameters", _of("parameter_gradients", _size("norm"))),
)


def document(report: HealthReport, max_rows: int | None = None) -> Document:
    """Return the verdict, what was run, and a row a layer: of more than `max_rows` the gravest."""
    below: dict[str, list[Note]] = defaultdict(list)
    violated = {found.layer for found in report.violations}
    every = [(f, False) for f in report.violations] + [(f, True) for f in report.warnings]
    for found, warns in every:
        text, cause = (printable(near(text)) for text in (found.message, found.cause))
        follows = consequences(report, found)
        text += f" ({follows})" * bool(follows and found.folded)
        asides = [f"likely cause: {cause}"] * bool(cause) + [follows] * (not found.folded)
        below[found.layer].append(Note(found.check, text, asides, warns))
    following = {consequence.layer for v in report.violations for consequence in v.folded}
    rows = []
    for record in report:
        name = record.name
        weight = (name in violated) + (name in below)
        kind = ["seen", "warned", "violated"]
        mark = "!" if name in violated else "~" if name in following else ""
        cells = [column.cell(record) for column in COLUMNS]
        if record.status is not Status.OBSERVED:
            kind[0], cells[2] = "unseen", record.status.replace("_", " ")
        rows.append(Row(cells, kind[weight], record.reason, "", mark, below[name], weight))
    return Document(
        headline(report),
        report._judgement.verdict.value,
        facts=[run(report), *remarks(report)],
        columns=COLUMNS,
        rows=rows,
        most=max_rows,
        rest=lambda count: f"  ... and {plural(count, 'more layer')}",
        narrowest=((1, 12), (0, 28), (1, 8), (0, 16)),
        names=0,
        marks=True,
    )


def terminal(report: HealthReport, *, max_rows: int | None = None, width: int = 100) -> str:
    """Return the verdict and a line a layer in execution order, each violation below its layer.

    ``!`` marks a layer with a violation, ``~`` one with a consequence of another's. Of more layers
    than `max_rows` the violated ones are shown first; names are cut to fit, numbers never.
    """
    return document(report, max_rows).text(width=width)


def html(report: HealthReport) -> str:
    """Return a self-contained ``<div>``; every name and message in it is escaped."""
    return document(report).html()


def line(report: HealthReport) -> str:
    """Return verdict, worst layer and counts. Never raises: debuggers and logs call `repr`."""
    try:
        return f"<HealthReport {headline(report)}; {counts(report)}>"
    except Exception as error:  # noqa: BLE001 - a check may raise anything, repr may not
        reason = f"{type(error).__name__}: {printable(str(error))}"
        return f"<HealthReport not judged ({reason}); {plural(len(report), 'layer')}>"
