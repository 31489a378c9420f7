"""The text of a `ModelHealthError`: what is broken, why probably, and what to do next."""

from __future__ import annotations

import glob
import linecache
import re
from collections.abc import Iterator

from pytest_modelhealth.rendering.evidence import culprit_and_predecessor
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    abbreviate,
    beside_limit,
    plural,
    printable,
    shorten,
    some,
    table,
)
from pytest_modelhealth.rendering.places import called_at, defined_at, is_of_a_library
from pytest_modelhealth.rendering.summary import (
    consequences,
    headline,
    in_execution_order,
    label,
    remarks,
    run,
)
from pytest_modelhealth.report import HealthReport, Vertex, Violation
from pytest_modelhealth.report.flow import AS_IT_IS, Flow, near

MAX_ROWS = 10
MAX_REMARKS = 3
_FEW = 2


def render(report: HealthReport) -> str:
    """Return at most a screenful (24 lines); its first line is verdict and worst layer."""
    if not report.violations:
        judgement, limit = report._judgement, report._settings["inconclusive"]
        if judgement.broken:
            ways = [
                "The other checks ran and object to nothing. Correct this one, or leave it out:",
                f'  @pytest.mark.modelhealth(skip_checks="{judgement.broken[0].check}")',
            ]
        else:
            enough = "not enough was seen to call it healthy"
            ways = [
                f"Nothing is violated, but {enough}. Give what is missing,",
                "or use report.assert_healthy(), which fails for violations alone",
            ]
            if limit.value == "fail":
                ways[1] = 'or let it pass: @pytest.mark.modelhealth(inconclusive="warn")'
                ways.append(f'"fail" was set by: {printable(limit.origin)}')
        return "\n".join([headline(report), "", *ways, "", run(report), *_remarks(report)])
    worst = report.violations[0]
    following = consequences(report, worst)
    return "\n".join(
        [
            headline(report),
            "",
            *_violations(report),
            *([f"  {following}"] if following else ()),
            "",
            *([f"likely cause: {printable(near(worst.cause))}"] if worst.cause else ()),
            *(f"seen:         {printable(near(line))}" for line in worst.details[:_FEW]),
            *_code(worst),
            *_way(report, worst),
            *_next_moves(report, worst),
            *_remarks(report),
        ]
    )


def _violations(report: HealthReport) -> Iterator[str]:
    """Yield a line for each of the gravest violations, in execution order."""
    gravest = in_execution_order(report, report.violations[:MAX_ROWS])
    rows: list[tuple[str, ...]] = [("layer", "check", "tensor", "value", "limit", "set by")]
    for violation in gravest:
        name = abbreviate(label(report, violation.layer), 40)
        tensor = printable(".".join(filter(None, (violation.role, violation.tensor))))
        value, limit = beside_limit(violation.value, violation.limit), violation.limit
        bounds = (NOT_SEEN, NOT_SEEN) if limit is None else (f"{limit:g}", violation.origin)
        rows.append((name, violation.check, tensor, value, *map(printable, bounds)))
    if any(violation.folded for violation in report.violations[1:]):
        explained = ["explains", *(f"{len(violation.folded):,} more" for violation in gravest)]
        rows = [(*row, cell) for row, cell in zip(rows, explained, strict=True)]
    yield from (f"  {line}" for line in table(rows, left=(0, 1, 2, 5, 6)))
    if len(report.violations) > MAX_ROWS:
        yield f"  ... and {len(report.violations) - MAX_ROWS:,} more (print the report to see all)"


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
    if made.function not in AS_IT_IS:
        return bool(made.line) and (made.live or not report.observation.backward)
    return not made.live and any(flow.graph.vertices[o].live for o in made.operands)


def _next_moves(report: HealthReport, worst: Violation) -> Iterator[str]:
    """Yield how to look at the worst layer, how to accept it and how to move the limit."""
    found = culprit_and_predecessor(report)
    if report.probes.get(worst.check) is not None:
        yield f'look:         report.probes["{worst.check}"]'
    elif found is not None and found.culprit.tensors(found.role):
        role = "" if found.role == "activations" else f', "{found.role}"'
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


def _remarks(report: HealthReport) -> Iterator[str]:
    lines = remarks(report, briefly=bool(report.violations))
    yield from (shorten(line, 100) for line in lines[:MAX_REMARKS])
    if len(lines) > MAX_REMARKS:
        yield f"... and {plural(len(lines) - MAX_REMARKS, 'more note')}"
