"""Files that are written beside what they replace, and what killed runs left of them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_HOST = re.sub(r"\W", "", platform.node())[:20]
_LONGEST_RUN = 7 * 24 * 3600  # seconds; asked only where a process cannot be looked for


def new_name() -> str:
    """Return a name by which `sweep` knows whose draft it is."""
    return f".modelhealth-{_HOST}-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def sweep(folder: Path) -> None:
    """Remove the drafts in a folder of runs on this machine that were killed."""
    with suppress(OSError):  # the folder is gone, or may not be read
        for path in folder.glob(f".modelhealth-{_HOST}-*.tmp"):
            pid = path.name.split("-")[2]
            if not pid.isdecimal() or _is_running(int(pid), path):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_running(pid: int, path: Path) -> bool:
    if sys.platform == "win32":  # where signal 0 ends a process
        return time.time() - path.lstat().st_mtime < _LONGEST_RUN
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user
        return True
    return True


@contextmanager
def replacing(path: Path, encoding: str = "ascii") -> Iterator[TextIO]:
    """Open a file that takes the place of `path` once all of it is written, and never in part."""
    sweep(path.parent)
    draft = path.with_name(new_name())
    try:
        with draft.open("x", encoding=encoding) as file:
            yield file
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)  # it is gone where all went well
