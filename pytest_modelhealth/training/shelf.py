"""Which checks there are in all: of one run, of probes, of a training step, of a training."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pytest_modelhealth.checks import Check, all_checks, by_rank, checks_in
from pytest_modelhealth.probes import all_probes
from pytest_modelhealth.settings import Settings


@cache
def all_step_checks() -> tuple[Check, ...]:
    """Return one of each check of a training step, the gravest first."""
    return checks_in(f"{__name__.rpartition('.')[0]}.contract", Path(__file__).parent / "contract")


@cache
def all_rules() -> tuple[Check, ...]:
    """Return one of each rule for a whole training, the gravest first."""
    package = f"{__name__.rpartition('.')[0]}.monitoring.rules"
    return checks_in(package, Path(__file__).parent / "monitoring" / "rules")


@cache
def every_check() -> tuple[Check, ...]:
    """Return one of each check and probe, the gravest first."""
    return by_rank((*all_checks(), *all_probes(), *all_step_checks(), *all_rules()))


@cache
def default_settings() -> Settings:
    """Return every declared setting at its default, for all checks and probes of this package."""
    return Settings(()).with_checks(every_check())
