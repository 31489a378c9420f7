"""What stands on the page as text: the verdict of the run, its tests, and each result's story."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_modelhealth.rendering.document import labelled
from pytest_modelhealth.rendering.notation import number
from pytest_modelhealth.runs.faults import EXCEPTION, faults, inspected
from pytest_modelhealth.runs.page.panels import drawn, facts
from pytest_modelhealth.runs.run import FAILED, GRAVITY, Run, Test

# characters of charts that stand on the page as they are, for paper and without a script: those of
# the first results that need a look; those of others are packed
DRAWN_AT_ONCE = 60_000

_TONES = ("bad", "unsure", "good", "quiet")
_SAID = ("text", "headline")
_PROSE = ("likely cause", "seen", "note")  # what a story says in sentences, before its tables

# the verdict of a result that is fine, of a test that failed: nothing there is called healthy
NO_OBJECTION = "no objection"


def contents(run: Run) -> dict[str, Any]:
    """Return what ``before.html`` shows of the tests of `run`, those that failed first.

    Those that fail by the same cause stand together, the most first.
    """
    entries = [*_entries(run)]
    alike = Counter(entry["cause"] for entry in entries if entry["failed"])
    first: dict[object, int] = {}
    for at, entry in enumerate(entries):
        first.setdefault(entry["cause"], at)
        if (count := alike[entry["cause"]]) > 1:
            entry |= {"group": f"{count:,} tests: {entry['cause'][-1]}", "name": entry["id"]}
    entries.sort(key=lambda e: (e["rank"], -alike[e["cause"]], first[e["cause"]]))
    shown = [result for entry in entries for result in entry["results"]]
    verdicts = Counter((r["verdict"], r["tone"]) for r in shown if r["verdict"] != NO_OBJECTION)
    return {
        "head": run.head,
        "entries": entries,
        "verdicts": sorted(verdicts.items(), key=lambda one: _TONES.index(one[0][1])),
        "outcomes": Counter(entry["outcome"] for entry in entries),
        "inspected": inspected(sum(entry["inspected"] for entry in entries), run),
    }


def rank(test: Test) -> int:
    """Return 0 for a test that failed, 1 for one that reads badly, else 2 or 3."""
    if test["outcome"] in FAILED:
        return 0
    gravest = max((GRAVITY.get(one["verdict"], 1) for one in test["results"]), default=0)
    return 2 if test["outcome"] == "xfailed" else 3 - gravest


def anchor(index: int, nth: int) -> str:
    """Return the id of a result on the page: the `nth` of the test that ended as `index`-th."""
    return f"t{index}-{nth}"


def _entries(run: Run) -> Iterator[dict[str, Any]]:
    """Yield what stands on the page of each test, with charts as long as there is room."""
    room = DRAWN_AT_ONCE
    for index, test in enumerate(run.tests):
        is_failed, is_bad = test["outcome"] in FAILED, rank(test) < 2
        results = [(anchor(index, n), one) for n, one in enumerate(test["results"])]
        fault = next(faults(test)) if is_failed else None
        if fault is not None and fault.check == EXCEPTION:
            own = {"verdict": fault.verdict, "headline": fault.message, "text": fault.text}
            own |= {"kind": "failure", "place": fault.places[0]}
            results.insert(0, (anchor(index, len(results)), own))
        is_said = any(test["message"] in one[key] for _, one in results for key in _SAID)
        again = {"run again": shlex.join(["pytest", test["id"]]), "replay": test.get("replay")}
        again["test"] = f"{test['file']}:{test['line']}"
        entries = []
        for name, result in results:
            entry = _result(name, result, test)
            if is_bad and room > 0:
                evidence, more = drawn(result, name)
                is_in = (size := len(evidence) + len(more)) <= room
                room -= size if is_in else 3_000  # so that few are drawn in vain
                if is_in:
                    entry |= {"evidence": evidence, "more": more, "is_drawn": True}
            entry["message"] = "" if is_said else test["message"]
            entry["moves"] += [pair for pair in again.items() if pair[1]] if is_bad else []
            parts = ("message", "prose", "text", "remarks", "more")
            entry["is_told"] = is_failed or any(entry[part] for part in parts)
            entries.append(entry)
        models = (str(one.get("model", "")) for one in test["results"])
        yield {
            **{key: test[key] for key in ("id", "file", "outcome")},
            "name": test["id"].removeprefix(f"{test['file']}::"),
            "group": test["file"],
            # what tests have in common that fail by one: their models, and the culprit
            "cause": fault and (*models, fault.culprit if fault.label else fault.message),
            "failed": is_failed,
            "inspected": bool(test["results"]),
            "rank": rank(test),
            "seconds": f"{number(test['seconds'])} s" if test["seconds"] is not None else "",
            "results": entries,
        }


def _result(own: str, result: Mapping[str, Any], test: Test) -> dict[str, Any]:
    """Return what stands on the page of a result."""
    verdict, reason = str(result["verdict"]), result["headline"]
    for start in (f"{verdict}: ", "not equivalent: ", "equivalent "):  # the verdict stands there
        reason = reason.removeprefix(start)
    tone = ("good", "unsure", "bad")[GRAVITY.get(verdict, 1)]
    if test["outcome"] in ("xfailed", "xpassed"):
        verdict, tone = test["outcome"], "quiet"
    elif test["outcome"] in FAILED and tone == "good":
        verdict, tone = NO_OBJECTION, "quiet"
    # the headline stands above
    lines = result["text"].removeprefix(result["headline"]).splitlines()
    told = [labelled(line) for line in lines]
    return {
        **{key: result[key] for key in ("kind", "place")},
        "anchor": own,
        "verdict": verdict,
        "tone": tone,
        "reason": reason,
        "prose": [pair for pair in told if pair[0] in _PROSE],
        "text": "\n".join(text for label, text in told if not label).strip("\n"),
        "moves": [pair for pair in told if pair[0] and pair[0] not in _PROSE],
        "evidence": "",
        "more": "",
        "is_drawn": False,
        "facts": facts(result) if "model" in result else "",
        "remarks": [*_remarks(result)],
    }


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings, what was accepted and what could not be judged, a sentence each.

    What headline or story says is not said again.
    """
    remarks: list[Any] = [
        f"{what}: {one['label']} ({one['check']}): {template.format_map(one)}"
        for what, key, template in (
            ("warning", "warnings", "{message}"),
            ("inconclusive", "inconclusive", "{reason}"),
            ("accepted", "waived", "{message} (because: {reason})"),
        )
        for one in result.get(key, ())
    ]
    remarks += [*(result.get("notes") or ()), result.get("basis"), *(result.get("changes") or ())]
    yield from (one for one in remarks if one and not any(one in result[key] for key in _SAID))
