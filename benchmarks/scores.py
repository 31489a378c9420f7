"""What `detection` and `drift` share: the score of several tools on the corpus, group by group."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.timing import machine
from benchmarks.tools import Entrant
from corpus import GROUPS, Case, cases
from corpus.command import prepare, rows, table
from corpus.scoring import score


def print_scores(
    arguments: list[str] | None,
    description: str,
    entrants: Mapping[str, Entrant],
    ours: Sequence[str],
    roles: Sequence[str],
    seeds: int = 1,
) -> None:
    """Print the table of the tools asked for, and the cases where they are asked for."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--peers", action="store_true", help="the peers, too")
    parser.add_argument("--list", action="store_true", help="every open case")
    parser.add_argument("--list-held-out", action="store_true", help="every other case")
    parser.add_argument("--wrong", action="store_true", help="of those, what was not right")
    parser.add_argument(
        "--seeds", type=int, default=seeds, help=f"of each healthy case; default: {seeds}"
    )
    parser.add_argument("--group", choices=GROUPS, type=_group, help="of these groups only one")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases")
    options = parser.parse_args(arguments)
    prepare()
    chosen = {name: entrants[name] for name in (entrants if options.peers else ours)}
    print(f"{machine()}; 1 thread, {options.seeds} seeds\n")
    for name, entrant in chosen.items():
        there = "" if entrant.is_installed else " (not installed, left out)"
        print(f"- {name}{there}: {entrant.asked}")
    start = time.perf_counter()
    scores = {
        (name, group): score(entrant.judge, wanted(group, roles, options.only), options.seeds)
        for name, entrant in chosen.items()
        if entrant.is_installed
        for group in GROUPS
        if options.group in (None, group)
    }
    table(scores, ["", "cases"], time.perf_counter() - start)
    for (name, group), made in scores.items():
        is_asked = options.list or options.wrong if group == "open" else options.list_held_out
        if is_asked:
            print(f"\n{name}, {group}\n")
            print("\n".join(rows(made, options.wrong)))


def wanted(group: str, roles: Sequence[str], only: str) -> Iterator[Case]:
    """Yield the cases of a group that play one of these roles.

    Those of the kind ``deployed`` are left out: the peers compare modules.
    """
    for role in roles:
        for case in cases(group=group, role=role, name=only):
            if case.kind != "deployed":
                yield case


def _group(name: str) -> str:
    """Return the name of a group; the blind cases were called by what most of them are."""
    return "blind" if name == "wiring" else name
