"""The lines that the mutations change, which the benchmark takes minutes to miss."""

from __future__ import annotations

from benchmarks.mutations import MUTATIONS, ROOT, _home


def test_each_mutation_has_one_line() -> None:
    """A line that was changed is noticed where that happens."""
    for mutation in MUTATIONS:
        assert _home(ROOT, mutation).suffix == ".py"
