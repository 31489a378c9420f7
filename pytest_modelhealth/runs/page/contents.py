"""What stands on the page as text: the verdict of the run, its tests, and each result's story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pytest_modelhealth.rendering.notation import in_bytes, number, plural, printable
from pytest_modelhealth.runs.page.panels import MOST_MARGINS, Drawn, drawn, margin
from pytest_modelhealth.runs.run import FAILED, Run, Test

FULLY_TOLD = 300
"""Results that are told in full: of passing tests beyond, the numbers of the layers are left."""

DRAWN_AT_ONCE = 60_000
"""Characters of charts that stand on the page as they are, for paper and without a script; those
of other results are packed."""

TRIES = 20
"""Results whose charts are drawn to see whether they fit."""

STORIES = 4_000_000
"""Characters of stories on the page; those after it are left to the terminal and the JSON."""

TONES = {
    "unhealthy": "bad",
    "different": "bad",
    "drifted": "bad",
    "missing": "bad",
    "inconclusive": "unsure",
    "recorded": "unsure",
    "healthy": "good",
    "equivalent": "good",
    "unchanged": "good",
}
"""How each verdict reads, the gravest first."""

OF = {"step": "a training step", "training": "a training"}
"""What was run, where that is not an inspection."""


@dataclass(frozen=True)
class Result:
    """What stands on the page of one result."""

    anchor: str
    kind: str
    verdict: str
    reason: str
    place: str
    facts: list[str]
    story: str
    story_left_out: bool
    margins: list[dict[str, Any]]
    drawn: Drawn
    remarks: list[str]

    @property
    def tone(self) -> str:
        """How its verdict reads."""
        return TONES.get(self.verdict, "unsure")


@dataclass(frozen=True)
class Entry:
    """What stands on the page of one test."""

    index: int
    id: str
    file: str
    outcome: str
    seconds: str
    message: str
    results: list[Result]

    @property
    def name(self) -> str:
        """The node id without its file."""
        return self.id.removeprefix(f"{self.file}::")

    @property
    def failed(self) -> bool:
        """Whether pytest counts it as a failure."""
        return self.outcome in FAILED

    @property
    def rank(self) -> int:
        """Where it stands in the list: failures first, then what reads badly."""
        return rank(self.outcome, (result.verdict for result in self.results))


@dataclass(frozen=True)
class Contents:
    """What stands on the page as text."""

    entries: list[Entry]
    fully_told: frozenset[str]
    drawn: frozenset[str]
    verdicts: list[tuple[str, str]]
    outcomes: str
    created: str
    about: list[str]
    notes: list[str]


def contents(run: Run) -> Contents:
    """Return what of `run` stands on its page as text, the tests that failed first."""
    room = Counter(stories=STORIES, charts=DRAWN_AT_ONCE, tries=TRIES)
    entries = [_entry(index, test, room) for index, test in enumerate(run.tests)]
    entries.sort(key=attrgetter("rank"))
    results = [result for entry in entries for result in entry.results]
    verdicts = Counter(result.verdict for result in results)
    return Contents(
        entries=entries,
        fully_told=frozenset(result.anchor for result in results[:FULLY_TOLD]),
        drawn=frozenset(result.anchor for result in results if result.drawn.panels),
        verdicts=_counted(verdicts),
        outcomes=f"{plural(len(entries), 'test')}: "
        + ", ".join(
            f"{count:,} {what}" for what, count in Counter(e.outcome for e in entries).items()
        ),
        created=printable(str(run.head.get("created", "")))
        .replace("T", " ")
        .replace("+00:00", " UTC"),
        about=_about(run.head),
        notes=[printable(note) for note in run.head.get("notes", ())],
    )


def is_bad(test: Test) -> bool:
    """Return whether a test failed or has a verdict that reads badly."""
    return rank(test["outcome"], (result["verdict"] for result in test["results"])) < 2


def rank(outcome: str, verdicts: Iterable[str]) -> int:
    """Return 0 for a test that failed, else 1 to 3 by its gravest verdict."""
    if outcome in FAILED:
        return 0
    order = {"bad": 1, "unsure": 2, "good": 3}
    return min((order[TONES.get(verdict, "unsure")] for verdict in verdicts), default=3)


def anchor(index: int, nth: int) -> str:
    """Return the id of a result on the page: the `nth` of the test that ended as `index`-th."""
    return f"t{index}-{nth}"


def _counted(verdicts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return how often there is each verdict, and how it reads, the gravest first."""
    known = [verdict for verdict in TONES if verdicts[verdict]]
    others = [verdict for verdict in verdicts if verdict not in TONES]
    return [
        (f"{verdicts[verdict]:,} {printable(verdict)}", TONES.get(verdict, "unsure"))
        for verdict in known + others
    ]


def _about(head: Mapping[str, Any]) -> list[str]:
    environment = head.get("environment", {})
    versions = [
        f"{name} {environment[key]}"
        for key, name in (
            ("pytest_modelhealth", "pytest-modelhealth"),
            ("torch", "torch"),
            ("python", "Python"),
        )
        if environment.get(key)
    ]
    return [printable(part) for part in (*versions, environment.get("platform", "")) if part]


def _entry(index: int, test: Test, room: Counter[str]) -> Entry:
    results = [
        _result(anchor(index, nth), result, room, needs_a_look=is_bad(test))
        for nth, result in enumerate(test["results"])
    ]
    message = test["message"]
    said = any(message in text for r in test["results"] for text in (r["text"], r["headline"]))
    return Entry(
        index=index,
        id=printable(test["id"]),
        file=printable(test["file"]),
        outcome=printable(test["outcome"]),
        seconds=f"{number(test['seconds'])} s" if test["seconds"] is not None else "",
        message="" if said else printable(message),
        results=results,
    )


def _result(
    own: str, result: Mapping[str, Any], room: Counter[str], *, needs_a_look: bool
) -> Result:
    verdict = str(result["verdict"])
    story = _lines(result["text"])
    left_out = len(story) > room["stories"]
    room["stories"] -= 0 if left_out else len(story)
    charts = drawn(result, own) if needs_a_look and room["tries"] > 0 else Drawn()
    room["tries"] -= charts.size > 0
    if charts.size > room["charts"]:
        charts = Drawn()
    room["charts"] -= charts.size
    margins = result.get("margins") or []
    headline = printable(result["headline"])
    return Result(
        anchor=own,
        kind=printable(result["kind"]),
        verdict=printable(verdict),
        reason=_reason(headline, verdict),
        place=printable(result["place"]),
        facts=_facts(result),
        story="" if left_out else story,
        story_left_out=left_out,
        margins=[margin(one) for one in margins[:MOST_MARGINS]],
        drawn=charts,
        remarks=_remarks(result),
    )


def _reason(headline: str, verdict: str) -> str:
    """Return a headline without the verdict that stands before it on the page."""
    for start in (f"{verdict}: ", "not equivalent: ", "equivalent "):
        headline = headline.removeprefix(start)
    return headline


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _facts(result: Mapping[str, Any]) -> list[str]:
    """Return what was run, a phrase each."""
    model = printable(result["model"])
    if result["kind"] == "comparison":
        return [
            f"{model} compared with {printable(result['candidate'])}",
            plural(len(result["layers"]), "layer"),
        ]
    if result["kind"] == "drift":
        return [
            model,
            f"{plural(result['tensors'], 'tensor')} against {printable(result['snapshot'])}",
        ]
    if result["kind"] != "inspection":
        return [model]
    totals = result["totals"]
    loss, samples = result["loss"], result["samples"]
    facts = [
        model,
        OF.get(result["of"], ""),
        plural(len(result["layers"]), "layer"),
        plural(totals["parameters"], "parameter") if totals["parameters"] is not None else "",
        plural(samples, "sample") if samples else "",
        _batches(result),
        _ranks(result.get("ranks")),
        f"loss {number(loss)}" if isinstance(loss, int | float) else "",
        "" if result["backward"] else "no backward pass",
        f"peak {in_bytes(totals['peak_bytes'])}" if totals["peak_bytes"] else "",
    ]
    return [fact for fact in facts if fact]


def _ranks(found: Mapping[str, Any] | None) -> str:
    """Return how many ranks saw it together, and what distributes the model."""
    if found is None:
        return ""
    return f"{plural(len(found['ranks']), 'rank')} ({printable(found['engine'])})"


def _batches(result: Mapping[str, Any]) -> str:
    """Return how many batches were seen, and of how many, where it was a part of them."""
    part = result.get("part")
    if part is None:
        return f"{result['batches']:,} batches" if result["batches"] != 1 else ""
    whole = "" if part["of"] is None else f" of {part['of']:,}"
    return f"{part['batches']:,}{whole} batches ({printable(part['ended_by'])} ended the run)"


def _remarks(result: Mapping[str, Any]) -> list[str]:
    """Return warnings, what was accepted and what could not be judged, a sentence each.

    What headline or story says is not said again.
    """
    found = [
        *(_sentence("warning", item, item["message"]) for item in result.get("warnings", ())),
        *(
            _sentence("inconclusive", item, item["reason"])
            for item in result.get("inconclusive", ())
        ),
        *(
            _sentence("accepted", item, f"{item['message']} (because: {item['reason']})")
            for item in result.get("waived", ())
        ),
        *(result.get("notes") or ()),
        *([result["basis"]] if result.get("basis") else []),
        *(result.get("changes") or ()),
    ]
    said = (result["headline"], result["text"])
    return [printable(r) for r in map(str, found) if not any(r in text for text in said)]


def _sentence(what: str, item: Mapping[str, Any], text: str) -> str:
    return f"{what}: {item['label']} ({item['check']}): {text}"
