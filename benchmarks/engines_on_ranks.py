"""Whether inspections on several ranks leave every engine as it was, case by case.

python -m benchmarks.engines_on_ranks [--ranks 2 3]

A case is an engine, 0, 1 or 2 steps of training, and what happens in the inspection. Afterwards
gradients, parameters, buffers, the state of the communication hook and three more steps must be
those of a twin that nobody inspected, bit for bit.
"""

from __future__ import annotations

import argparse
import time

from tests.capture.parallel.comparing import differences
from tests.capture.parallel.engines import ENGINES, Case, all_cases
from tests.ranks.launching import on_ranks


def table(ranks: int) -> str:
    """Return the cases that are untouched on all ranks, by engine, as a table in Markdown."""
    cases = all_cases()
    found = on_ranks(ranks, differences, cases, seconds=900)
    touched: dict[Case, str] = {}
    for one in found:
        touched |= {case: said for case, said in one.items() if said}
    lines = [f"| engine, on {ranks} ranks | untouched | otherwise |", "| --- | --- | --- |"]
    for engine in ENGINES:
        own = [case for case in cases if case[0] == engine]
        ill = [case for case in own if case in touched]
        why = "; ".join(
            f"{way} after {steps}: {touched[engine, steps, way]}" for _, steps, way in ill
        )
        lines.append(f"| {engine} | {len(own) - len(ill)} of {len(own)} | {why} |")
    lines.append(f"| all | {len(cases) - len(touched)} of {len(cases)} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    for ranks in parser.parse_args().ranks:
        began = time.perf_counter()
        print(table(ranks))
        print(f"\n{time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
