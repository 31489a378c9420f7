"""Files that options name: looked at when pytest starts, and replaced as a whole when it ends."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from pytest_modelhealth.plugin.folders import rank_suffix


class OutputFile:
    """The file that an option names, for a destination that writes one of the whole run.

    Its first three methods are a destination's hooks, which has them under pytest's names.

    Args:
        option: ``"--modelhealth-json"``.
        what: name of the content: ``"run data"``.
        help: what is written, for ``pytest --help``.
    """

    def __init__(self, option: str, what: str, help: str) -> None:  # noqa: A002 - as `argparse`
        self._option, self._what, self._help = option, what, help
        self._path = pytest.StashKey[Path]()

    def add_option(self, parser: pytest.Parser) -> None:
        """Declare the option."""
        group = parser.getgroup("modelhealth")
        group.addoption(self._option, metavar="PATH", default=None, help=self._help)

    def prepare(self, config: pytest.Config) -> None:
        """Look at the path now, so that a long run does not end without its file.

        No file is written where tests are only collected, and in xdist's workers.

        Raises:
            pytest.UsageError: it is a directory, or cannot be written.
        """
        given = config.getoption(self._option)
        if given is None or config.option.collectonly or hasattr(config, "workerinput"):
            return
        try:
            config.stash[self._path] = _prepared(config.invocation_params.dir / given)
        except OSError as error:
            raise pytest.UsageError(
                f"{self._option}: cannot write to {str(given)!r}: {error.strerror}; name a file in "
                "a directory that can be made and written to"
            ) from None

    def is_wanted(self, config: pytest.Config) -> bool:
        """Return whether the option was given, where a file is written."""
        return self._path in config.stash

    def write(
        self,
        config: pytest.Config,
        writer: Callable[[TextIO], None],
        terminalreporter: pytest.TerminalReporter,
    ) -> None:
        """Write the file if it is wanted, and say where it is, or why it is not there.

        Args:
            config: that of the run.
            writer: gets the file, opened for ASCII text.
            terminalreporter: pytest's, for the line.
        """
        from pytest_modelhealth.rendering.notation import printable

        path = config.stash.get(self._path, None)
        if path is None:
            return
        try:
            with _replacing(path) as file:
                writer(file)
        except OSError as error:  # a full disk costs the file, not the result of the run
            line = f"{self._what} could not be written to {path}: {error.strerror or error}"
        else:
            line = f"{self._what} in {path}"
        terminalreporter.write_line(f"modelhealth: {printable(line)}")


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
    _try_to_replace(path)
    return path


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Open a file that takes the place of `path` once all of it is written, and never in part.

    Devices and pipes are written to as they are.
    """
    if _is_special(path):
        with path.open("w", encoding="ascii") as file:
            yield file
        return
    temporary = _beside(path)
    try:
        with temporary.open("x", encoding="ascii") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _try_to_replace(path: Path) -> None:
    temporary = _beside(path)
    temporary.open("x").close()
    temporary.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".modelhealth-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe: to replace ``/dev/null`` would harm everybody."""
    return path.exists() and not (path.is_file() or path.is_dir())
