"""Whether comparisons can be trusted: refactors pass, harmful changes fail at the right layer.

Usage: ``python -m benchmarks.drift [--peers] [--list] [--only PATTERN]``

A refactor that is objected to is a false flag. A harmful change is flagged if it is objected to,
and located if the first layer named is one where it begins. Pairs of
`benchmarks.cases.held_out_pairs`, on which nothing is tuned, have a row of their own.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.cases import changes, held_out_pairs, modern_changes, modern_refactors, refactors
from benchmarks.cases.pair import Pair, Said
from benchmarks.comparers import COMPARERS, OURS, Comparer
from benchmarks.timing import header, machine, row

SHELVES = {
    "open": [*refactors.PAIRS.pairs, *changes.PAIRS.pairs],
    "modern": [*modern_refactors.PAIRS.pairs, *modern_changes.PAIRS.pairs],
    "held out": held_out_pairs.PAIRS.pairs,
}


@dataclass(frozen=True)
class Graded:
    """What a comparer made of a pair.

    Args:
        pair: the pair.
        said: what was said of it.
        error: what was raised instead.
    """

    pair: Pair
    said: Said = field(default_factory=lambda: Said(False))
    error: str = ""

    @property
    def is_located(self) -> bool:
        """Whether the first layer named is a right one."""
        return self.said.differs and self.pair.is_at(*self.said.layers)

    @property
    def is_right(self) -> bool:
        """Whether a refactor passed, or a harmful change was flagged at its layer."""
        if self.error:
            return False
        return not self.said.differs if self.pair.is_benign else self.is_located


@dataclass
class Score:
    """What a comparer made of a group of pairs."""

    graded: list[Graded] = field(default_factory=list)
    seconds: float = 0.0

    def cells(self) -> list[str]:
        """Return its row of the table."""
        benign = [one for one in self.graded if one.pair.is_benign]
        harmful = [one for one in self.graded if not one.pair.is_benign]
        return [
            f"{sum(one.said.differs for one in benign)} of {len(benign)}",
            _share(sum(one.said.differs for one in harmful), len(harmful)),
            _share(sum(one.is_located for one in harmful), len(harmful)),
            str(sum(bool(one.error) for one in self.graded)),
            f"{self.seconds:.0f}",
        ]


COLUMNS = ["false flags", "flagged", "first layer named", "raised", "seconds"]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"


def grade(comparer: Comparer, pairs: Sequence[Pair]) -> Score:
    """Return what the comparer makes of the pairs."""
    score = Score()
    for pair in pairs:
        torch.manual_seed(0)
        sides = pair.build()
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch and the tools warn of some of the pairs
                graded = Graded(pair, comparer.judge(sides))
        except Exception as raised:  # noqa: BLE001 - what a tool raises belongs into its row
            text = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"
            graded = Graded(pair, error=text)
        score.seconds += time.perf_counter() - start
        score.graded.append(graded)
    return score


def rows(score: Score, wrong_only: bool = False) -> Iterator[str]:
    """Yield a row for each pair."""
    yield header(["pair", "reference", "may be", "right", "said"])
    for one in score.graded:
        if wrong_only and one.is_right:
            continue
        kind = (
            "equivalent" if one.pair.is_benign else f"wrong at {', '.join(map(repr, one.pair.at))}"
        )
        yield row([one.pair.name, one.pair.architecture, kind, _yes(one), _said(one)])


def _yes(graded: Graded) -> str:
    return "yes" if graded.is_right else "NO"


def _said(graded: Graded) -> str:
    text = graded.error or graded.said.text or "no difference"
    return text.replace("|", "\\|").replace("\n", " ")


def pairs(names: Sequence[str], wanted: Callable[[str], bool], options: argparse.Namespace) -> None:
    """Print the table of the pairs, and the pairs where they are asked for."""
    scores = {}
    for name in names:
        comparer = COMPARERS[name]
        there = "" if comparer.is_installed else " (not installed, left out)"
        print(f"- {name}{there}: {comparer.asked}")
    for name in names:
        for group, shelf in SHELVES.items():
            if COMPARERS[name].is_installed:
                chosen = [pair for pair in shelf if wanted(pair.name)]
                scores[name, group] = grade(COMPARERS[name], chosen)
    print("\n" + header(["", "pairs", *COLUMNS]))
    for (name, group), score in scores.items():
        print(row([name, group, *score.cells()]))
    for (name, group), score in scores.items():
        if options.list_held_out if group == "held out" else options.list or options.wrong:
            print(f"\n{name}, {group}\n")
            print("\n".join(rows(score, options.wrong)))


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, and the pairs where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", action="store_true", help="the peers, too")
    parser.add_argument("--list", action="store_true", help="every open pair")
    parser.add_argument("--list-held-out", action="store_true", help="every held-out pair")
    parser.add_argument("--wrong", action="store_true", help="of those, what was not right")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of pairs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"{machine()}; 1 thread\n")
    start = time.perf_counter()
    names = tuple(COMPARERS) if options.peers else OURS
    pairs(names, lambda name: fnmatchcase(name, options.only), options)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
