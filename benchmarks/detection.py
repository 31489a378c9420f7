"""Whether verdicts can be trusted: faults caught and located, healthy models left alone.

Usage: ``python -m benchmarks.detection [--peers] [--list] [--seeds 5] [--group blind]``

Scores tools on the faults and controls of the corpus, each group with a row of its own; what the
columns mean, `corpus.scoring` says. ``python -m corpus score`` has a row for each kind of fault.
"""

from __future__ import annotations

from benchmarks.scores import print_scores
from benchmarks.tools import DETECTORS


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and the cases where they are asked for."""
    print_scores(arguments, __doc__, DETECTORS, ("modelhealth",), ("fault", "control"), seeds=5)


if __name__ == "__main__":
    main()
