"""Files that options name: looked at when pytest starts, and replaced as a whole when it ends.

`path_of` and `write` are for the destinations that write one file of the whole run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run


def path_of(config: pytest.Config, option: str) -> Path | None:
    """Return the file that `option` names, ``None`` where it was not given and in xdist's workers.

    Its folder is made, so that a long run does not end without it. Under torchrun each process but
    the first has a file of its own: ``run-rank1.json``.

    Raises:
        pytest.UsageError: it is a directory, or cannot be written.
    """
    given = config.getoption(option)
    if given is None or hasattr(config, "workerinput"):
        return None
    path = config.invocation_params.dir / given
    try:
        if _is_special(path):
            return path
        path = _of_this_rank(path.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _try_to_replace(path)
    except OSError as error:
        raise pytest.UsageError(
            f"{option}: cannot write to {str(given)!r}: {error.strerror}; name a file in a "
            "directory that can be made and written to"
        ) from None
    return path


def write(
    path: Path,
    what: str,
    run: Run,
    writer: Callable[[Run, TextIO], None],
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Have `writer` write the run, and say in the summary where it is, or why it is not there.

    Args:
        path: what `path_of` returned.
        what: name of the content: ``"run data"``.
        run: handed to `writer`.
        writer: gets the run and the file, opened for ASCII text.
        terminalreporter: pytest's, for the line.
    """
    from pytest_modelhealth.rendering.notation import printable

    try:
        with replacing(path) as file:
            writer(run, file)
    except OSError as error:  # a full disk costs the file, not the result of the run
        line = f"{what} could not be written to {path}: {error.strerror or error}"
    else:
        line = f"{what} in {path}"
    terminalreporter.write_line(f"modelhealth: {printable(line)}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
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
    return path.with_name(f".modelhealth-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe: to replace ``/dev/null`` would harm everybody."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _of_this_rank(path: Path) -> Path:
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal() or int(rank) == 0:
        return path
    return path.with_name(f"{path.stem}-rank{int(rank)}{path.suffix}")
