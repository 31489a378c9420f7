"""Which probes there are, and the settings that they and the checks have by default."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import cast

from pytest_modelhealth.checks import Check, all_checks, by_rank, checks_in
from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.settings import Settings


@cache
def all_probes() -> tuple[Probe, ...]:
    """Return one of each probe that a file of this folder defines, the gravest first."""
    found = checks_in(__name__.rpartition(".")[0], Path(__file__).parent)
    return cast("tuple[Probe, ...]", found)


@cache
def every_check() -> tuple[Check, ...]:
    """Return one of each check and probe, the gravest first."""
    return by_rank((*all_checks(), *all_probes()))


@cache
def default_settings() -> Settings:
    """Return every declared setting at its default, for all checks and probes of this package."""
    return Settings(()).with_checks(every_check())
