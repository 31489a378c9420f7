"""Tests on several ranks: ``@pytest.mark.modelhealth_ranks(2)`` and the fixture `rank`.

This process takes such a test over, sets up none of its fixtures, and reports what its ranks said.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import pytest

from pytest_modelhealth.wings import why_missing, wing

MARKER = "modelhealth_ranks"
DEFAULT_SECONDS = 120.0
"""Long enough for a model to be built and compiled on a busy machine; a test whose ranks wait for
each other costs no more than this, where a process group alone waits half an hour."""


class Wanted(NamedTuple):
    """On how many ranks a test runs, and after how many seconds they are ended."""

    size: int
    seconds: float


WANTED = pytest.StashKey[Wanted]()  # what the mark of a test asks for

_WRONG = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and leave files of the whole run to the first process of torchrun."""
    if _under_torchrun(config) and os.environ["RANK"] != "0":
        for name in ("htmlpath", "xmlpath"):
            if getattr(config.option, name, None):
                setattr(config.option, name, None)
    config.addinivalue_line(
        "markers",
        f"{MARKER}(n, *, seconds=120): run this test on n ranks, each a process with a process "
        "group of gloo; after so many seconds all are ended, and it is said where each was.",
    )


@pytest.fixture(scope="session")
def rank(pytestconfig: pytest.Config) -> int:
    """The number of this process among those of a test on several ranks: 0 to n - 1."""
    number = _rank_of(pytestconfig)
    if number is not None:
        return number
    if _under_torchrun(pytestconfig):
        return int(os.environ["RANK"])
    pytest.fail(
        f"the fixture rank is for tests marked with @pytest.mark.{MARKER}(2)", pytrace=False
    )


def _rank_of(config: pytest.Config) -> int | None:
    """Return which rank this process is; ``None`` where it is the one that reports."""
    return getattr(config, "workerinput", {}).get("modelhealth_rank")


def _under_torchrun(config: pytest.Config) -> bool:
    """Whether torchrun, or what sets the same variables, started this process and others."""
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    is_one = all(given) and given[0].isdecimal() and given[1].isdecimal() and int(given[1]) > 1
    return is_one and _rank_of(config) is None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take notice of marks, also of those that a conftest.py added to what was collected."""
    for item in items:
        wanted = _wanted(item)
        if wanted is None:
            continue
        if _under_torchrun(item.config) and hasattr(item.config, "workerinput"):
            wanted = (
                f"{item.name}: under torchrun its processes run the tests on several ranks: leave "
                "-n of pytest-xdist out"
            )
        if missing := why_missing("plugin.several_ranks"):
            wanted = f"{item.name}: {missing}"
        if isinstance(wanted, str):
            item.stash[_WRONG] = wanted
        else:
            item.stash[WANTED] = wanted


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a test whose mark is wrong end here; the others of its file run."""
    if _WRONG in item.stash:
        pytest.fail(item.stash[_WRONG], pytrace=False)


def _is_taken_over(item: pytest.Item) -> bool:
    if WANTED not in item.stash:  # asked for every test of every suite
        return False
    plans = any(item.config.getoption(name, False) for name in ("setuponly", "setupplan"))
    elsewhere = _rank_of(item.config) is not None or _under_torchrun(item.config)
    return not elsewhere and not plans


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start what ranks are forked from, which imports torch while other tests run.

    Under torchrun the tests run where they are instead. Not in xdist's workers, of which few may
    run such a test.
    """
    config = session.config
    if config.option.collectonly or hasattr(config, "workerinput"):
        return
    if not any(WANTED in item.stash for item in session.items):
        return
    if _under_torchrun(config):
        torchrun = wing("plugin.several_ranks.torchrun:Torchrun")
        config.pluginmanager.register(torchrun(config), "modelhealth.torchrun")
    elif any(map(_is_taken_over, session.items)):
        wing("plugin.several_ranks.processes:start_server")()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on its ranks, and report one result."""
    if not _is_taken_over(item):
        return None
    wing("plugin.several_ranks.running:protocol")(item, nextitem, item.stash[WANTED])
    return True


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Have the time limit of pytest-timeout, where it is lower, be that of the ranks."""
    if not _is_taken_over(item):
        return None
    wanted = item.stash[WANTED]
    item.stash[WANTED] = wanted._replace(seconds=min(wanted.seconds, settings.timeout))
    return True


def _wanted(item: pytest.Item) -> Wanted | str | None:
    """Return what the closest mark of a test asks for, or what is wrong with it."""
    mark = item.get_closest_marker(MARKER)
    if mark is None:
        return None
    size, seconds = [*mark.args, None][0], mark.kwargs.get("seconds", DEFAULT_SECONDS)
    is_size = type(size) is int and size > 0 and len(mark.args) == 1
    is_limit = type(seconds) in (int, float) and 0 < seconds < math.inf
    if is_size and is_limit and {*mark.kwargs} <= {"seconds"}:
        return Wanted(size, float(seconds))
    given = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return (
        f"@{MARKER}({', '.join(given)}) on {item.name}: it takes the number of ranks, a whole "
        f"number from 1, and seconds=, a number above 0: {MARKER}(2, seconds=300)"
    )
