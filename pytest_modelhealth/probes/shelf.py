"""Which probes there are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import cast

from pytest_modelhealth.checks import checks_in
from pytest_modelhealth.probes.probe import Probe


@cache
def all_probes() -> tuple[Probe, ...]:
    """Return one of each probe that a file of this folder defines, the gravest first."""
    found = checks_in(__name__.rpartition(".")[0], Path(__file__).parent)
    return cast("tuple[Probe, ...]", found)
