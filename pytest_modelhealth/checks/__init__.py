"""The checks: a catalogue of what they declare, and what runs them.

A run that sets a limit loads the catalogue alone: what reads an observation loads with the first
that is judged, as does `judging`.
"""

from pytest_modelhealth.checks.catalogue import all_checks, default_settings, every_check
from pytest_modelhealth.checks.check import Check, by_rank, with_own_checks

__all__ = ["Check", "all_checks", "by_rank", "default_settings", "every_check", "with_own_checks"]
