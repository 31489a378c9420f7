"""The shelf of checks: a file an invariant, found by looking into this folder."""

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.checks.shelf import all_checks, default_settings, with_own_checks

__all__ = ["Check", "Finding", "all_checks", "default_settings", "judge", "with_own_checks"]
