"""What a test's results object to: the culprit of each, and the places that lead there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_modelhealth.runs.run import FAILED, Test


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a model, or only looks like it.

    Args:
        verdict: that of the result.
        label: the culprit for people; ``""`` where there is none.
        check: name of the check, or the kind of result where no check found it.
        message: what is wrong.
        cause: why probably, or ``""``.
        text: what the failure says.
        fails: whether it fails the test, rather than warns.
        places: ``path:line`` from the likeliest to repair to the surest to exist: the call of the
            culprit, its class, the inspection, the test; of a batch, those that made it.
    """

    verdict: str
    label: str
    check: str
    message: str
    cause: str
    text: str
    fails: bool
    places: tuple[str, ...]

    @property
    def culprit(self) -> str:
        """Who and by which check: ``"encoder.1 (dead_units)"``."""
        return f"{self.label} ({self.check})" if self.label else self.check


def faults(test: Test) -> Iterator[Fault]:
    """Yield what fails a test, the gravest of each result first, then what only warns."""
    found = list(_found(test)) if test["outcome"] in FAILED else []
    yield from found
    if test["outcome"] in (*FAILED, "passed"):
        for result in _inspections(test):
            yield from (_of_finding(test, result, one, False) for one in result["warnings"])


def _found(test: Test) -> Iterator[Fault]:
    for result in test["results"]:
        if result["verdict"] == "unhealthy":
            yield from (_of_finding(test, result, one, True) for one in result["violations"])
        elif result["verdict"] == "inconclusive" and "inconclusive: " in test["message"]:
            for one in result["inconclusive"]:
                yield _fault(test, result, one["label"], one["check"], one["reason"])
        elif result["verdict"] == "different":
            parted = result["divergence"] or {"label": "", "story": result["headline"], "cause": ""}
            what = ": ".join(filter(None, (parted["story"], parted["cause"])))
            yield _fault(test, result, parted["label"], "comparison", what)
        elif result["verdict"] in ("drifted", "missing"):
            label = next((one["layer"] or result["model"] for one in result["drifts"]), "")
            yield _fault(test, result, label, "drift", result["story"] or result["headline"])


def _inspections(test: Test) -> Iterable[Mapping[str, Any]]:
    return (result for result in test["results"] if result["kind"] == "inspection")


def _of_finding(
    test: Test, result: Mapping[str, Any], finding: Mapping[str, Any], fails: bool
) -> Fault:
    is_of_the_batch = finding["layer"] == "" and finding["role"] == "inputs"
    places = () if is_of_the_batch else (finding["called_at"], finding["defined_at"])
    said = (finding["label"], finding["check"], finding["message"], finding["cause"])
    return _fault(test, result, *said, places=places, fails=fails)


def _fault(
    test: Test,
    result: Mapping[str, Any],
    label: str,
    check: str,
    message: str,
    cause: str = "",
    *,
    places: tuple[str, ...] = (),
    fails: bool = True,
) -> Fault:
    here = (*places, result["place"], f"{test['file']}:{test['line']}")
    known = tuple(place for place in here if place)
    return Fault(result["verdict"], label, check, message, cause, result["text"], fails, known)
