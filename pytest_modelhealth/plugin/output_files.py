"""What options name, looked at when pytest starts: a file of the whole run, a folder of tests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from pytest_modelhealth.drafts import replacing, sweep
from pytest_modelhealth.errors import ModelHealthWarning
from pytest_modelhealth.plugin.options import require_wing

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run

_LONGEST_NAME = 100


@dataclass(frozen=True, eq=False)
class OutputFile:
    """The file that an option names: a destination that writes one of the whole run.

    Args:
        option: ``"--modelhealth-json"``.
        what: name of the content: ``"run data"``.
        write: writes a run of this configuration to the file, opened for ASCII text.
    """

    option: str
    what: str
    write: Callable[[Run, TextIO, pytest.Config], None]
    _path: pytest.StashKey[Path] = field(default_factory=pytest.StashKey)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Look at the path now, so that a long run does not end without its file.

        No file is written where tests are only collected, and in xdist's workers.

        Raises:
            pytest.UsageError: it is a directory, or cannot be written, or the run has no summary,
                where files are written.
        """
        given = config.getoption(self.option)
        if config.option.collectonly or hasattr(config, "workerinput"):
            return
        require_wing("runs", self.option)
        if not config.pluginmanager.hasplugin("terminal"):
            raise pytest.UsageError(f"{self.option} needs pytest's terminal: no -p no:terminal")
        try:
            config.stash[self._path] = _prepared(config.invocation_params.dir / given)
        except OSError as error:
            raise _cannot_write(self.option, given, error, "file in a directory") from None

    def pytest_modelhealth_wants_run(self, config: pytest.Config) -> bool:
        """Return whether the option was given, where a file is written."""
        return self._path in config.stash

    def pytest_modelhealth_run_ended(
        self, config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """Write the file if it is wanted, and say where it is, or why it is not there."""
        from pytest_modelhealth.rendering.notation import printable

        path = config.stash.get(self._path, None)
        if path is None:
            return
        try:
            if run.is_lost:
                raise OSError("all results are lost, and what is there stays")
            is_special = _is_special(path)
            with path.open("w", encoding="ascii") if is_special else replacing(path) as file:
                self.write(run, file, config)
        except OSError as error:  # a full disk costs the file, not the result of the run
            line = f"{self.what} could not be written to {path}: {error.strerror or error}"
        else:
            line = f"{self.what} in {path}"
        terminalreporter.write_line(f"modelhealth: {printable(line)}")


def _cannot_write(option: str, given: str, error: OSError, what: str) -> pytest.UsageError:
    return pytest.UsageError(
        f"{option}: cannot write to {str(given)!r}: {error.strerror}; name a {what} that can be "
        "made and written to"
    )


def _prepared(path: Path) -> Path:
    """Return the file to write, whose folder is made, once it is known that it can be.

    Under torchrun each process but the first has a file of its own: ``run-rank1.json``.
    """
    if _is_special(path):
        return path
    path = path.resolve()
    if rank_suffix():
        path = path.with_name(f"{path.stem}{rank_suffix()}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with tempfile.TemporaryFile(dir=path.parent):
        return path


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe: to replace ``/dev/null`` would harm everybody."""
    return path.exists() and not (path.is_file() or path.is_dir())


# Folders: one for the run, in it one for each failing test.


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
        sweep(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _cannot_write(option, given, error, "directory") from None
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
