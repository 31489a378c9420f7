"""Whether this process was forked: torch's threads stayed with the parent then.

An OpenMP runtime that had threads before a fork waits for them forever in the child.
"""

from __future__ import annotations

import os
from pathlib import Path

_FORKED_NOT_EXECUTED = 0x40  # PF_FORKNOEXEC of Linux, in the flags of /proc/self/stat


def _was_forked() -> bool:
    """Return whether this process was forked before this module was imported.

    Where there is no ``/proc``, the kernel has no threads to share work with either.
    """
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError:
        return False
    return bool(int(after_name.split()[6]) & _FORKED_NOT_EXECUTED)


def _become_child() -> None:
    global is_child
    is_child = True


is_child = _was_forked()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_child)
