"""The text of a `ModelHealthError`: what is broken, why probably, and what to do next."""

from __future__ import annotations

import glob
import linecache
import re
from collections.abc import Iterator

from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.rendering.document import LINES, WIDTH, Document, Row
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    Column,
    abbreviate,
    beside_limit,
    few,
    printable,
    shorten,
)
from pytest_modelhealth.rendering.places import defined_at, is_of_a_library
from pytest_modelhealth.rendering.summary import (
    consequences,
    finding_text,
    headline,
    label,
    remarks,
    run,
)
from pytest_modelhealth.report import ROLES, Finding, HealthReport
from pytest_modelhealth.report.flow import near

MAX_ROWS = 10
MAX_REMARKS = 3
_FEW = 2


def render(report: HealthReport, *, width: int | None = None) -> str:
    """Return a screenful, as wide as the terminal; its first line is verdict and worst layer."""
    worst = next(iter(report.violations), None)
    notes = few(remarks(report, briefly=worst is not None), MAX_REMARKS, "more note")
    notes = [shorten(note, WIDTH) for note in notes]
    first, ran = headline(report), run(report)
    following = "" if worst is None else consequences(report, worst)
    if worst is None:
        document = Document(first, code=[*_ways(report)], remarks=["", ran, *notes])
        return document.text(width=width, lines=LINES)
    rows = _rows(report)
    told = {"likely cause:": [worst.cause], "seen:": worst.details[:_FEW]}
    titles = ["layer", "check", "tensor", "value", "limit", "set by"]
    return Document(
        first,
        columns=[Column(title, is_text=title not in ("value", "limit")) for title in titles],
        rows=rows,
        most=MAX_ROWS,
        rest=lambda count: f"... and {count:,} more (print the report to see all)",
        below=[f"  {following}"] if following else [],
        code=[
            *(f"{k:<14}{printable(near(text))}" for k, v in told.items() for text in v if text),
            *_code(worst),
            *_way(report, worst),
            *_next_moves(report, worst),
        ],
        remarks=notes,
        narrowest=((5, 8), (0, 14), (2, 8), (1, 8)),
        names=0,
        indent="  ",
    ).text(width=width, lines=LINES)


def _ways(report: HealthReport) -> Iterator[str]:
    """Yield how to get a verdict where nothing is violated."""
    judgement, limit = report._judgement, report._settings["inconclusive"]
    if judgement.broken:
        yield "The other checks ran and object to nothing. Correct this one, or leave it out:"
        yield f'  @pytest.mark.modelhealth(skip_checks="{judgement.broken[0].check}")'
        return
    yield "Nothing is violated, but not enough was seen to call it healthy. Give what is missing,"
    if limit.value == "fail":
        yield 'or let it pass: @pytest.mark.modelhealth(inconclusive="warn")'
        yield f'"fail" was set by: {printable(limit.origin)}'
    else:
        yield "or use report.assert_healthy(), which fails for violations alone"


def _rows(report: HealthReport) -> list[Row]:
    """Return a row for each violation in execution order, the gravest the heaviest."""
    position = {name: index for index, name in enumerate(report.layers)}
    rows = []
    for rank, found in enumerate(report.violations):
        tensor = ".".join(filter(None, (found.role, found.tensor)))
        value, limit = beside_limit(found.value, found.limit), found.limit
        bounds = (NOT_SEEN, NOT_SEEN) if limit is None else (f"{limit:g}", found.origin)
        cells = [abbreviate(label(report, found.layer), 40), found.check, tensor, value, *bounds]
        row = Row([*map(printable, cells)], weight=-rank)
        rows.append((position.get(found.layer, len(position)), rank, row))
    return [row for *_, row in sorted(rows, key=lambda one: one[:2])]


def _code(worst: Finding) -> Iterator[str]:
    """Yield the code at the places that the violation names."""
    said = f"{worst.message} {worst.cause}"
    for path, line in list(dict.fromkeys(_PLACE.findall(said)))[:_FEW]:
        if code := linecache.getline(path, int(line)).strip():
            yield f"code:         {shorten(printable(code), 100)}"


def warning_texts(report: HealthReport, findings: tuple[Finding, ...]) -> dict[str, str]:
    """Return what is warned of by its cause: the first finding of a kind, its code, the others."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for found in findings:
        kinds.setdefault((found.check, found.kind), []).append(found)
    texts = {}
    for cause, (first, *others) in kinds.items():
        also = [f"likewise:     {listed([label(report, one.layer) for one in others], 4)}"]
        lines = [finding_text(report, first), *_code(first), *also[: len(others)]]
        texts[" ".join(cause)] = "\n".join(lines)
    return texts


_PLACE = re.compile(r"([^\s`]+\.py):(\d+)")


def _way(report: HealthReport, worst: Finding) -> Iterator[str]:
    """Yield what feeds the worst layer, what it feeds, the operations between, and where it is."""
    flow, layer = report.flow, worst.layer
    line, own = report.observation.called_at(layer), defined_at(report, layer)
    places = {
        "called": "" if _PLACE.search(worst.cause) else line,
        "class": "" if own and is_of_a_library(own) else own,  # no business of the user's
    }
    known = {what: printable(near(place)) for what, place in places.items() if place}
    if flow is None or not layer or layer not in flow:
        titles = {"called": "called at:", "class": "class:"}
        yield from (f"{titles[what]:<14}{place}" for what, place in known.items())
        return
    before = flow.producers(layer, as_it_is=True) or flow.producers(layer)
    after = flow.consumers(layer)
    steps = []
    for made in flow.operations(layer, *after[:1]):
        if made.has("view"):  # masks and layouts go without, unless they cut the gradient
            is_told = not made.live and any(flow.graph.vertices[o].live for o in made.operands)
        else:
            is_told = bool(made.line) and (made.live or not report.observation.backward)
        steps += [f"`{made.function}`"] * (is_told and f"`{made.function}`" not in steps)
    if len(steps) > 2 * _FEW:
        steps[_FEW:-_FEW] = ["..."]
    shown = " -> ".join(filter(None, (listed(before, _FEW), layer, *steps, listed(after, _FEW))))
    told = ", ".join(f"{what} at {place}" for what, place in known.items())
    yield f"way:          {printable(shown)}" + (f"  ({told})" if told else "")


def _next_moves(report: HealthReport, worst: Finding) -> Iterator[str]:
    """Yield how to look at the worst layer, how to accept it and how to move the limit."""
    culprit = report.layers.get(worst.layer)
    shown = worst.role if worst.role in ROLES else "activations"
    is_training = report.observation.is_of_own_step  # what is wrong there is in no histogram
    if report.probes.get(worst.check) is not None:
        yield f'look:         report.probes["{worst.check}"]'
    elif culprit is not None and not is_training and culprit.tensors(shown):
        role = "" if shown == "activations" else f', "{shown}"'
        yield f"look:         report.plot_histogram({_quoted(worst.layer)}{role})"
    else:
        is_course = report.observation.course is not None
        yield f"look:         {'monitor.plot()' if is_course else 'print(report)'}"
    for setting in (
        s for c in report._settings.checks if c.name == worst.check for s in c.settings
    ):
        limit = report._settings.limit(setting.name, worst.layer)
        if (limit.value, limit.origin) == (worst.limit, worst.origin):
            moved = f"@pytest.mark.modelhealth({setting.name}=...)"
            other = f"{setting.name}, {printable(worst.origin)}"
            yield f"other limit:  {moved if worst.origin == 'default' else other}"
            break
    yield (
        f"accept it:    @pytest.mark.modelhealth_waive({_quoted(glob.escape(worst.layer))}, "
        f'check="{worst.check}", reason="...")'
    )


def _quoted(text: str) -> str:
    """Return `text` as a Python string literal, in double quotes where it holds no quotes."""
    literal = repr(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in text else literal
