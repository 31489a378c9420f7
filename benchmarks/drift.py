"""Whether comparisons can be trusted: refactors pass, harmful changes fail at the right layer.

Usage: ``python -m benchmarks.drift [--peers] [--list] [--wrong] [--only PATTERN]``

Scores comparisons on the pairs of the corpus, each group with a row of its own. A refactor that is
objected to is a false alarm; a harmful change is located if the first layer named is one where it
begins.
"""

from __future__ import annotations

from benchmarks.scores import print_scores
from benchmarks.tools import COMPARERS, OURS


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and the pairs where they are asked for."""
    print_scores(arguments, __doc__, COMPARERS, OURS, ("change", "refactor"))


if __name__ == "__main__":
    main()
