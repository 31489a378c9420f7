"""Each mutation finds its one line, so that a changed line is noticed before the benchmark runs."""

from __future__ import annotations

from benchmarks.mutations import MUTATIONS, ROOT, _home


def test_each_mutation_has_one_line() -> None:
    for mutation in MUTATIONS:
        assert _home(ROOT, mutation).suffix == ".py"
