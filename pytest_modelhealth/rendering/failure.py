"""The text of a `ModelHealthError`: what is broken, why probably, and what to do next."""

from __future__ import annotations

import glob
import linecache
import re
import shutil
from collections.abc import Iterator

from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    Column,
    abbreviate,
    beside_limit,
    plural,
    printable,
    shorten,
    some,
)
from pytest_modelhealth.rendering.places import called_at, defined_at, is_of_a_library
from pytest_modelhealth.rendering.summary import (
    consequences,
    headline,
    label,
    remarks,
    run,
)
from pytest_modelhealth.report import ROLES, HealthReport, Vertex, Violation
from pytest_modelhealth.report.flow import Flow, near

MAX_LINES = 24
"""A screen: of more violations than it has room for, the gravest are listed."""

MAX_ROWS = 10
MAX_REMARKS = 3
_FEW = 2


def render(report: HealthReport, *, width: int | None = None) -> str:
    """Return a screenful; its first line is verdict and worst layer.

    Args:
        report: the report.
        width: characters that the table and remarks may take; `None` asks the terminal, and takes
            60 at least and 100 at most.
    """
    width = width or min(max(shutil.get_terminal_size((100, MAX_LINES)).columns, 60), 100)
    worst = next(iter(report.violations), None)
    every = remarks(report, briefly=worst is not None)
    notes = [shorten(note, width) for note in every[:MAX_REMARKS]]
    if len(every) > MAX_REMARKS:
        notes.append(f"... and {plural(len(every) - MAX_REMARKS, 'more note')}")
    if worst is None:
        ran = ["", run(report), *notes]
        return Document(headline(report), code=[*_ways(report)], remarks=ran).text()
    cause = [f"likely cause: {printable(near(worst.cause))}"] if worst.cause else []
    code = [
        *cause,
        *(f"seen:         {printable(near(line))}" for line in worst.details[:_FEW]),
        *_code(worst),
        *_way(report, worst),
        *_next_moves(report, worst),
    ]
    rest = [f"  {following}"] if (following := consequences(report, worst)) else []
    # beside the headline, the titles, two blanks, and how many are left out
    room = MAX_LINES - 5 - len([*rest, *code, *notes])
    listed = min(MAX_ROWS, max(room, 1))
    if (left_out := len(report.violations) - listed) > 0:
        rest.insert(0, f"  ... and {left_out:,} more (print the report to see all)")
    columns, rows = _violations(report, listed)
    return Document(
        headline(report),
        columns=columns,
        rows=rows,
        rest="\n".join(rest),
        code=code,
        remarks=notes,
        narrowest=((5, 8), (0, 14), (2, 8), (1, 8)),
        names=0,
        indent="  ",
    ).text(width=width)


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


def _violations(report: HealthReport, most: int) -> tuple[list[Column], list[Row]]:
    """Return a row for each of the gravest violations, in execution order."""
    position = {name: index for index, name in enumerate(report.layers)}
    gravest = sorted(
        report.violations[:most], key=lambda found: position.get(found.layer, len(position))
    )
    titles = ["layer", "check", "tensor", "value", "limit", "set by"]
    rows = []
    for found in gravest:
        tensor = ".".join(filter(None, (found.role, found.tensor)))
        value, limit = beside_limit(found.value, found.limit), found.limit
        bounds = (NOT_SEEN, NOT_SEEN) if limit is None else (f"{limit:g}", found.origin)
        cells = [abbreviate(label(report, found.layer), 40), found.check, tensor, value]
        rows.append(Row([*map(printable, (*cells, *bounds))]))
    return [Column(t, "", str, t not in ("value", "limit")) for t in titles], rows


def _code(worst: Violation) -> Iterator[str]:
    """Yield the code at the places that the violation names."""
    said = f"{worst.message} {worst.cause}"
    for path, line in list(dict.fromkeys(_PLACE.findall(said)))[:_FEW]:
        if code := linecache.getline(path, int(line)).strip():
            yield f"code:         {shorten(printable(code), 100)}"


_PLACE = re.compile(r"([^\s`]+\.py):(\d+)")


def _way(report: HealthReport, worst: Violation) -> Iterator[str]:
    """Yield what feeds the worst layer, what it feeds, the operations between, and where it is."""
    flow, layer = report.flow, worst.layer
    line, own = called_at(report, layer), defined_at(report, layer)
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
    passed = flow.operations(layer, *after[:1])
    steps = [f"`{made.function}`" for made in passed if _is_telling(made, report, flow)]
    steps = list(dict.fromkeys(steps))
    if len(steps) > 2 * _FEW:
        steps[_FEW:-_FEW] = ["..."]
    shown = " -> ".join(filter(None, (some(before, _FEW), layer, *steps, some(after, _FEW))))
    told = ", ".join(f"{what} at {place}" for what, place in known.items())
    yield f"way:          {printable(shown)}" + (f"  ({told})" if told else "")


def _is_telling(made: Vertex, report: HealthReport, flow: Flow) -> bool:
    """Whether an operation changes values, or cuts the gradient; masks and layouts go without."""
    if not made.has("view"):
        return bool(made.line) and (made.live or not report.observation.backward)
    return not made.live and any(flow.graph.vertices[o].live for o in made.operands)


def _next_moves(report: HealthReport, worst: Violation) -> Iterator[str]:
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
    setting = _setting(report, worst)
    if setting is not None and worst.origin == "default":
        yield f"other limit:  @pytest.mark.modelhealth({setting}=...)"
    elif setting is not None:
        yield f"other limit:  {setting}, {printable(worst.origin)}"
    yield (
        f"accept it:    @pytest.mark.modelhealth_waive({_quoted(glob.escape(worst.layer))}, "
        f'check="{worst.check}", reason="...")'
    )


def _quoted(text: str) -> str:
    """Return `text` as a Python string literal, in double quotes where it holds no quotes."""
    literal = repr(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in text else literal


def _setting(report: HealthReport, violation: Violation) -> str | None:
    """Return the name of the setting that holds the limit that was broken, if one does."""
    for check in report._settings.checks:
        for setting in check.settings if check.name == violation.check else ():
            limit = report._settings.limit(setting.name, violation.layer)
            if (limit.value, limit.origin) == (violation.limit, violation.origin):
                return setting.name
    return None
