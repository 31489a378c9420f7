"""The shelf of checks: a file an invariant, found by looking into this folder.

A run that sets a limit loads every file of it, so that each imports what it needs to be declared,
and the report for types alone. What judges a report is `judging`, which loads with the first.
"""

from pytest_modelhealth.checks.check import (
    Check,
    Finding,
    all_checks,
    by_rank,
    checks_in,
    with_own_checks,
)

__all__ = ["Check", "Finding", "all_checks", "by_rank", "checks_in", "with_own_checks"]
