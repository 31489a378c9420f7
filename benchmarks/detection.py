"""Whether verdicts can be trusted: faults caught and located, healthy models left alone.

Usage: ``python -m benchmarks.detection [--peers] [--list] [--seeds 5] [--group wiring]``

A fault is caught if the verdict is unhealthy, located if a violation names the layer at fault, and
its cause is right if that violation comes from a fitting check and says why. It is only warned of
if the verdict is not unhealthy and a warning names layer and cause. A control on which any
seed is unhealthy is a false alarm; what a detector raised is counted apart. It is named if an
objection or a warning names the layer at fault, or the operation. Cases of
`benchmarks.cases.held_out`, on which nothing is tuned, have a row of their own, and so have those
of wiring, which were written before the checks that judge them.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.cases import (
    controls,
    designs,
    faults,
    fields,
    held_out,
    libraries,
    perception,
    routes,
    starts,
    uncommon,
    wiring_faults,
    wiring_lookalikes,
    wirings,
)
from benchmarks.cases.subject import Control, Fault, Healthy, Shelf
from benchmarks.detectors import DETECTORS, Detector, Finding
from benchmarks.timing import header, machine, row

SHELVES = {
    "open": [
        faults.SHELF,
        uncommon.SHELF,
        fields.SHELF,
        perception.SHELF,
        controls.SHELF,
        designs.SHELF,
        libraries.SHELF,
        starts.SHELF,
        wirings.SHELF,
        routes.SHELF,
    ],
    "held out": [held_out.SHELF],
    "wiring": [wiring_faults.SHELF, wiring_lookalikes.SHELF],
}


@dataclass(frozen=True)
class Graded:
    """What a detector made of a fault.

    Args:
        fault: the fault.
        findings: what was objected to, the gravest first.
        error: what it raised instead.
        warnings: what only warns.
    """

    fault: Fault
    findings: list[Finding]
    error: str = ""
    warnings: list[Finding] = field(default_factory=list)

    @property
    def is_caught(self) -> bool:
        """Whether there was an objection at all."""
        return bool(self.findings)

    @property
    def is_located(self) -> bool:
        """Whether an objection names the layer at fault."""
        return any(self.fault.is_at(found.layer) for found in self.findings)

    @property
    def has_right_cause(self) -> bool:
        """Whether an objection that names the layer is of a fitting check and says why."""
        return any(map(self._is_right, self.findings))

    @property
    def is_only_warned_of(self) -> bool:
        """Whether nothing fails, and a warning names the layer and says why."""
        return not self.is_caught and any(map(self._is_right, self.warnings))

    def _is_right(self, found: Finding) -> bool:
        return (
            self.fault.is_at(found.layer)
            and (not self.fault.by or found.check in self.fault.by)
            and self.fault.is_named_in(found.text)
        )

    @property
    def is_named(self) -> bool:
        """Whether an objection or a warning names the layer at fault, or the operation."""
        return any(
            self.fault.is_at(found.layer) or self.fault.is_named_in(found.text)
            for found in (*self.findings, *self.warnings)
        )

    @property
    def leads(self) -> bool:
        """Whether the gravest objection is the one that names the layer."""
        return bool(self.findings) and self.fault.is_at(self.findings[0].layer)


@dataclass(frozen=True)
class Alarm:
    """A healthy control that was objected to, or that the detector could not run."""

    control: Control
    seed: int
    findings: list[Finding]
    error: str = ""


@dataclass
class Score:
    """What a detector made of a group of cases."""

    graded: list[Graded] = field(default_factory=list)
    controls: int = 0
    runs: int = 0
    alarms: list[Alarm] = field(default_factory=list)
    not_run: list[Alarm] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def false_alarms(self) -> int:
        """On how many controls some seed was unhealthy."""
        return len({alarm.control.name for alarm in self.alarms})

    def cells(self) -> list[str]:
        """Return its row of the table."""
        faults = len(self.graded)
        shares = [
            _share(sum(getattr(graded, name) for graded in self.graded), faults)
            for name in ("is_caught", "is_located", "has_right_cause", "leads")
        ]
        alarms = f"{self.false_alarms} of {self.controls}"
        raised = len(self.not_run) + sum(bool(graded.error) for graded in self.graded)
        named = _share(sum(graded.is_named for graded in self.graded), faults)
        over_all = f"{len(self.alarms)} of {self.runs}"
        warned = str(sum(graded.is_only_warned_of for graded in self.graded))
        return [*shares, warned, named, alarms, over_all, str(raised), f"{self.seconds:.0f}"]


COLUMNS = ["caught", "located", "right cause", "in the first line", "only warned of", "named"]
COLUMNS += ["false alarms", "over all seeds", "raised", "seconds"]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def _judge(detector: Detector, build: Healthy, seed: int) -> tuple[list[Finding], str, float]:
    """Return the findings, the error if it raised one, and the seconds that judging took."""
    torch.manual_seed(seed)
    subject = build()
    torch.manual_seed(seed)
    start = time.perf_counter()
    try:
        findings, error = detector.judge(subject), ""
    except Exception as raised:  # noqa: BLE001 - what a tool raises belongs into its row
        findings, error = [], f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
    return findings, error, time.perf_counter() - start


def grade(detector: Detector, cases: Sequence[Fault], score: Score) -> None:
    """Add what the detector makes of the faults, each with seed 0."""
    for fault in cases:
        findings, error, seconds = _judge(detector, fault.build, seed=0)
        failing = [found for found in findings if not found.warns]
        warnings = [found for found in findings if found.warns]
        score.graded.append(Graded(fault, failing, error, warnings))
        score.seconds += seconds


def alarm(detector: Detector, cases: Sequence[Control], seeds: int, score: Score) -> None:
    """Add what the detector makes of the controls, each with every seed."""
    for control in cases:
        score.controls += 1
        for seed in range(seeds):
            findings, error, seconds = _judge(detector, control.build, seed)
            score.runs += 1
            score.seconds += seconds
            failing = [found for found in findings if not found.warns]
            if failing or error:
                seen = score.alarms if failing else score.not_run
                seen.append(Alarm(control, seed, failing, error))


def measure(
    detector: Detector, shelves: Sequence[Shelf], seeds: int, wanted: Callable[[str], bool]
) -> Score:
    """Return what the detector makes of the wanted cases of these shelves."""
    score = Score()
    for shelf in shelves:
        grade(detector, [fault for fault in shelf.faults if wanted(fault.name)], score)
        alarm(detector, [one for one in shelf.controls if wanted(one.name)], seeds, score)
    return score


def rows(score: Score) -> Iterator[str]:
    """Yield a row for each fault, and one for each control that was objected to."""
    yield header(["fault", "in", "caught", "located", "right cause", "first finding"])
    for graded in score.graded:
        marks = (graded.is_caught, graded.is_located, graded.has_right_cause)
        said = ["yes" if mark else "NO" for mark in marks]
        yield row([graded.fault.name, graded.fault.architecture, *said, _first(graded)])
    yield "\n" + header(["false alarm", "seed", "said"])
    for alarm in (*score.alarms, *score.not_run):
        yield row([alarm.control.name, alarm.seed, _first(alarm)])


def _first(judged: Graded | Alarm) -> str:
    if not judged.findings:
        return judged.error
    first = judged.findings[0]
    text = f"{first.check} at {first.layer or 'the model'}: {first.text}"
    return text.replace("|", "\\|").replace("\n", " ")


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and the cases where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", action="store_true", help="the peers, too")
    parser.add_argument("--list", action="store_true", help="every open case")
    parser.add_argument(
        "--list-held-out", action="store_true", help="every held-out and wiring case"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of each control; default: 5")
    parser.add_argument("--group", choices=SHELVES, help="of these groups only one")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    detectors = dict(DETECTORS) if options.peers else {"modelhealth": DETECTORS["modelhealth"]}
    print(f"{machine()}; 1 thread, {options.seeds} seeds\n")
    for name, detector in detectors.items():
        there = "" if detector.is_installed else " (not installed, left out)"
        print(f"- {name}{there}: {detector.asked}")

    start = time.perf_counter()
    scores = {
        (name, group): measure(
            detector, shelves, options.seeds, lambda case: fnmatchcase(case, options.only)
        )
        for name, detector in detectors.items()
        if detector.is_installed
        for group, shelves in SHELVES.items()
        if options.group in (None, group)
    }
    print("\n" + header(["", "cases", *COLUMNS]))
    for (name, group), score in scores.items():
        print(row([name, group, *score.cells()]))
    print(f"\n{time.perf_counter() - start:.0f} s in all, building and training included")
    for (name, group), score in scores.items():
        if options.list if group == "open" else options.list_held_out:
            print(f"\n{name}, {group}\n")
            print("\n".join(rows(score)))


if __name__ == "__main__":
    main()
