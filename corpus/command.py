"""``python -m corpus list`` and ``python -m corpus score``."""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module

import torch

from corpus import GROUPS, KINDS, ROLES, Case, Tool, cases
from corpus.scoring import COLUMNS, Finding, Judged, Score, score

TOOLS = {name: f"benchmarks.tools:{name}" for name in ("modelhealth", "probed", "fixture")}
"""Tools by a short name."""


def main(arguments: list[str] | None = None) -> None:
    """Print cards, or the score of a tool."""
    parser = argparse.ArgumentParser(prog="python -m corpus", description="A corpus of faults.")
    commands = parser.add_subparsers(required=True)
    shown = commands.add_parser("list", help="the cards")
    shown.add_argument("--cards", action="store_true", help="with what has to be named, and why")
    shown.set_defaults(run=show)
    scored = commands.add_parser("score", help="what a tool makes of the cases")
    scored.add_argument(
        "--tool",
        default="modelhealth",
        metavar="NAME",
        help=f"{', '.join(TOOLS)}, or module:function; default: modelhealth",
    )
    scored.add_argument("--seeds", type=int, default=1, help="of each control; default: 1")
    scored.add_argument("--list", action="store_true", help="every case, but what is held out")
    scored.add_argument("--wrong", action="store_true", help="of these, what was not right")
    scored.add_argument("--rules", action="store_true", help="what each kind of finding caught")
    scored.set_defaults(run=print_score)
    for command in (shown, scored):
        command.add_argument("--kind", choices=KINDS, help="of these kinds only one")
        command.add_argument("--group", choices=GROUPS, help="of these groups only one")
        command.add_argument("--role", choices=ROLES, help="of these roles only one")
        command.add_argument("--only", default="*", metavar="PATTERN", help="names of cases")
    options = parser.parse_args(arguments)
    options.run(options)


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for."""
    return list(cases(options.kind, options.group, options.role, options.only))


# ---- list ---------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> None:
    """Print the cards."""
    print(header(["case", "in", "role", "kind", "group", *(CARD if options.cards else ())]))
    for case in chosen(options):
        what = [case.name, case.architecture, case.role, case.kind, case.group]
        print(row([*what, *(card(case) if options.cards else ())]))


CARD = ("where", "words", "why")


def card(case: Case) -> tuple[str, ...]:
    """Return the cells of what has to be named, and why."""
    where = ", ".join(layer or "the model" for layer in case.at)
    return where, ", ".join(case.words), case.why


# ---- score --------------------------------------------------------------------------------------


def print_score(options: argparse.Namespace) -> None:
    """Print a row for each kind and group, and the cases where they are asked for."""
    tool = tool_of(options.tool)
    prepare()
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in chosen(options):
        groups.setdefault((case.kind, case.group), []).append(case)
    start = time.perf_counter()
    scores = {name: score(tool, group, options.seeds) for name, group in groups.items()}
    table({**scores, **totals(scores)}, ["kind", "cases"], time.perf_counter() - start)
    if options.rules:
        print("\n" + "\n".join(by_rule(one for made in scores.values() for one in made.judged)))
    for (kind, group), made in scores.items():
        if (options.list or options.wrong) and (group != "held out" or options.group == group):
            print(f"\n{kind}, {group}\n")
            print("\n".join(rows(made, options.wrong)))


def tool_of(name: str) -> Tool:
    """Return the function of a tool, by its short name or as ``module:function``."""
    module, _, function = TOOLS.get(name, name).partition(":")
    if not function:
        raise SystemExit(f"no tool {name!r}: {', '.join(TOOLS)}, or module:function")
    return getattr(import_module(module), function)


def prepare() -> None:
    """Let torch use one thread, which is faster on small tensors, and quieten transformers."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)


Name = tuple[str, ...]
"""What stands in the first cells of a row."""


def table(scores: Mapping[Name, Score], heads: Sequence[str], seconds: float) -> None:
    """Print a row for each score, under the heads of its name."""
    print("\n" + header([*heads, *COLUMNS]))
    for name, made in scores.items():
        print(row([*name, *made.cells()]))
    print(f"\n{seconds:.0f} s in all, building and training included")


def totals(scores: Mapping[Name, Score]) -> dict[Name, Score]:
    """Return the score of each group over all kinds, where there are several."""
    sums: dict[Name, Score] = {}
    for (_, group), made in scores.items():
        sums.setdefault(("all", group), Score()).judged += made.judged
    return sums if len({kind for kind, _ in scores}) > 1 else {}


def rows(made: Score, wrong_only: bool = False) -> Iterator[str]:
    """Yield a row for each case: the sick ones, and the healthy ones that were objected to."""
    yield header(["case", "in", "caught", "located", "right cause", "first finding"])
    for one in made.sick:
        if not (wrong_only and one.is_right):
            marks = (one.is_caught, one.is_located, one.has_right_cause)
            said = ["yes" if mark else "NO" for mark in marks]
            yield row([one.case.name, one.case.architecture, *said, first(one)])
    yield "\n" + header(["false alarm", "seed", "said"])
    for one in made.healthy:
        if one.is_caught or one.error:
            yield row([one.case.name, one.seed, first(one)])


def by_rule(judged: Iterable[Judged]) -> Iterator[str]:
    """Yield a row for each kind of finding: how many cases it speaks of, in which grade.

    A kind is a check and how its sentences begin, names and numbers left out.
    """
    counts: dict[tuple[str, str], Counter[str]] = {}
    for one in judged:
        side = "fault" if one.case.is_sick else "healthy"
        grades = (("fail", one.objections), ("warn", one.warnings))
        for rule, grade in {(rule_of(f), grade) for grade, found in grades for f in found}:
            counts.setdefault(rule, Counter())[f"{side} {grade}"] += 1
    columns = [f"{side} {grade}" for side in ("fault", "healthy") for grade in ("fail", "warn")]
    yield header(["check", "finding", *columns])
    for rule, count in sorted(counts.items()):
        yield row([*rule, *(count[column] for column in columns)])


def rule_of(found: Finding) -> tuple[str, str]:
    """Return the check of a finding and the first words of its sentence."""
    words = re.sub(r"'[^']*'|`[^`]*`|\S*[\d/.=]\S*|[^\w\s]", " ", found.text.partition(":")[0])
    return found.check, " ".join(words.split()[:7]) or " ".join(found.text.split()[:4])


def first(one: Judged) -> str:
    """Return the gravest finding in words, or what was raised instead."""
    findings = one.objections or one.warnings
    if not findings:
        return one.error
    found = findings[0]
    by = f"{found.check} " if found.check else ""
    text = f"{by}at {found.layer or 'the model'}: {found.text}"
    return text.replace("|", "\\|").replace("\n", " ")


def row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def header(cells: Sequence[object]) -> str:
    """Return the two first rows of a Markdown table."""
    return row(cells) + "\n" + row(["---"] * len(cells))
