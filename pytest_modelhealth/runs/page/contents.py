"""What stands on the page as text: the verdict of the run, its tests, and each result's story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from pytest_modelhealth.rendering.notation import in_bytes, number, plural, printable
from pytest_modelhealth.runs.page.panels import Drawn, drawn
from pytest_modelhealth.runs.run import FAILED, GRAVITY, Run, Test

FULLY_TOLD = 300
"""Results that are told in full: of passing tests beyond, the numbers of the layers are left."""

DRAWN_AT_ONCE = 60_000
"""Characters of charts that stand on the page as they are, for paper and without a script: those of
results that need a look, as far as they fit. Those of others are packed."""

TRIES = 20
"""Results whose charts are drawn to see whether they fit."""

_TONES = ("good", "unsure", "bad")
_VERSIONS = {"pytest_modelhealth": "pytest-modelhealth", "torch": "torch", "python": "Python"}

OF = {"step": "a training step", "training": "a training"}
"""What was run, where that is not an inspection."""


@dataclass(frozen=True)
class Contents:
    """What stands on the page as text."""

    entries: list[dict[str, Any]]
    fully_told: frozenset[str]
    drawn: frozenset[str]
    verdicts: list[tuple[str, str]]
    outcomes: str
    created: str
    about: list[str]
    notes: list[str]


def contents(run: Run) -> Contents:
    """Return what of `run` stands on its page as text, the tests that failed first."""
    entries = [*_entries(run)]
    entries.sort(key=itemgetter("rank"))
    results = [result for entry in entries for result in entry["results"]]
    verdicts = Counter(result["verdict"] for result in results)
    order = [
        *(one for one in GRAVITY if verdicts[one]),
        *(one for one in verdicts if one not in GRAVITY),
    ]
    outcomes = Counter(entry["outcome"] for entry in entries)
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    created = printable(str(run.head.get("created", "")))
    environment = run.head.get("environment", {})
    versions = [
        f"{name} {environment[key]}" for key, name in _VERSIONS.items() if environment.get(key)
    ]
    about = [*versions, environment.get("platform", "")]
    return Contents(
        entries=entries,
        fully_told=frozenset(result["anchor"] for result in results[:FULLY_TOLD]),
        drawn=frozenset(result["anchor"] for result in results if result["drawn"].panels),
        verdicts=[(f"{verdicts[one]:,} {one}", _tone(one)) for one in order],
        outcomes=f"{plural(len(entries), 'test')}: {counts}",
        created=created.replace("T", " ").replace("+00:00", " UTC"),
        about=[printable(part) for part in about if part],
        notes=[printable(note) for note in run.head.get("notes", ())],
    )


def _tone(verdict: str) -> str:
    return _TONES[GRAVITY.get(verdict, 1)]


def rank(test: Test) -> int:
    """Return 0 for a test that failed, 1 for one that reads badly, else 2 or 3."""
    if test["outcome"] in FAILED:
        return 0
    return 3 - max((GRAVITY.get(one["verdict"], 1) for one in test["results"]), default=0)


def anchor(index: int, nth: int) -> str:
    """Return the id of a result on the page: the `nth` of the test that ended as `index`-th."""
    return f"t{index}-{nth}"


def _entries(run: Run) -> Iterator[dict[str, Any]]:
    """Yield what stands on the page of each test, with charts as long as there is room."""
    room, tries = DRAWN_AT_ONCE, TRIES
    for index, test in enumerate(run.tests):
        entry = _entry(index, test)
        for shown, result in zip(entry["results"], test["results"], strict=True):
            if entry["rank"] < 2 and tries:
                tries -= 1
                charts = drawn(result, shown["anchor"])
                if charts.size <= room:
                    room -= charts.size
                    shown["drawn"] = charts
        yield entry


def _entry(index: int, test: Test) -> dict[str, Any]:
    """Return what stands on the page of a test; its rank tells where: failures are first."""
    results = test["results"]
    message, file = test["message"], printable(test["file"])
    said = any(message in text for one in results for text in (one["text"], one["headline"]))
    return {
        "index": index,
        "id": printable(test["id"]),
        "file": file,
        "name": printable(test["id"]).removeprefix(f"{file}::"),
        "outcome": printable(test["outcome"]),
        "failed": test["outcome"] in FAILED,
        "rank": rank(test),
        "seconds": f"{number(test['seconds'])} s" if test["seconds"] is not None else "",
        "message": "" if said else printable(message),
        "results": [_result(anchor(index, nth), result) for nth, result in enumerate(results)],
    }


def _result(own: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands on the page of a result."""
    verdict = str(result["verdict"])
    reason = printable(result["headline"])
    for start in (f"{verdict}: ", "not equivalent: ", "equivalent "):  # the verdict stands there
        reason = reason.removeprefix(start)
    return {
        "anchor": own,
        "kind": printable(result["kind"]),
        "verdict": printable(verdict),
        "tone": _tone(verdict),
        "reason": reason,
        "place": printable(result["place"]),
        "facts": _facts(result),
        "story": "\n".join(map(printable, result["text"].split("\n"))),
        "drawn": Drawn(),
        "remarks": _remarks(result),
    }


def _facts(result: Mapping[str, Any]) -> list[str]:
    """Return what was run, a phrase each."""
    model = printable(result["model"])
    if result["kind"] == "comparison":
        sides = f"{model} compared with {printable(result['candidate'])}"
        return [sides, plural(len(result["layers"]), "layer")]
    if result["kind"] == "drift":
        tensors = plural(result["tensors"], "tensor")
        return [model, f"{tensors} against {printable(result['snapshot'])}"]
    if result["kind"] != "inspection":
        return [model]
    totals, loss, samples = result["totals"], result["loss"], result["samples"]
    part, ranks = result.get("part"), result.get("ranks")
    batches = f"{result['batches']:,} batches" if result["batches"] != 1 else ""
    if part is not None:
        of = "" if part["of"] is None else f" of {part['of']:,}"
        batches = f"{part['batches']:,}{of} batches ({printable(part['ended_by'])} ended the run)"
    facts = [
        model,
        OF.get(result["of"], ""),
        plural(len(result["layers"]), "layer"),
        plural(totals["parameters"], "parameter") if totals["parameters"] is not None else "",
        plural(samples, "sample") if samples else "",
        batches,
        f"{plural(len(ranks['ranks']), 'rank')} ({printable(ranks['engine'])})" if ranks else "",
        f"loss {number(loss)}" if isinstance(loss, int | float) else "",
        "" if result["backward"] else "no backward pass",
        f"peak {in_bytes(totals['peak_bytes'])}" if totals["peak_bytes"] else "",
    ]
    return [fact for fact in facts if fact]


def _remarks(result: Mapping[str, Any]) -> list[str]:
    """Return warnings, what was accepted and what could not be judged, a sentence each.

    What headline or story says is not said again.
    """
    found = [
        f"{what}: {one['label']} ({one['check']}): {template.format_map(one)}"
        for what, key, template in (
            ("warning", "warnings", "{message}"),
            ("inconclusive", "inconclusive", "{reason}"),
            ("accepted", "waived", "{message} (because: {reason})"),
        )
        for one in result.get(key, ())
    ]
    found += map(str, result.get("notes") or ())
    found += filter(None, [result.get("basis")])
    found += map(str, result.get("changes") or ())
    said = (result["headline"], result["text"])
    return [printable(one) for one in found if not any(one in text for text in said)]
