"""The folders that destinations write to: one for the run, in it one for each failing test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

import pytest

from pytest_modelhealth.errors import ModelHealthWarning

_LONGEST_NAME = 100


def writable(config: pytest.Config, option: str, given: str) -> Path:
    """Return the directory that an option names, made and tried; a test may change the current one.

    xdist's workers take it as it is.

    Raises:
        pytest.UsageError: it cannot be made or written to.
    """
    directory = config.invocation_params.dir / given
    if hasattr(config, "workerinput"):
        return directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise pytest.UsageError(
            f"{option}: cannot write to {str(given)!r}: {error.strerror}; name a directory that "
            "can be made and written to"
        ) from None
    return directory


def folder_name(nodeid: str) -> str:
    """Return a name for the test's folder, safe on every file system and its own.

    The digest keeps apart what the safe characters do not: ``test[a/b]`` and ``test[a:b]``, and on
    file systems that ignore case ``test_a`` and ``test_A``.
    """
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", nodeid).strip("-.")[-_LONGEST_NAME:]
    digest = hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{readable}-{digest}"


def rank_suffix() -> str:
    """Return ``"-rank1"`` under torchrun, for names of its own; ``""`` in the first process."""
    rank = os.environ.get("RANK", "0")
    return f"-rank{int(rank)}" if rank.isdecimal() and int(rank) else ""


def warn_once(item: pytest.Item, warned: pytest.StashKey[bool], text: str) -> None:
    """Warn of something in a test, unless the run was warned under this key."""
    if item.config.stash.get(warned, False):
        return
    item.config.stash[warned] = True
    with contextlib.suppress(ModelHealthWarning):  # under -W error; the test fails as it is
        item.warn(ModelHealthWarning(text))
