"""What the server has imported that ranks are forked from: what a test on several ranks needs.

It runs none of the user's code: what a fork inherits is the same for each test. It has one thread
and no CUDA context, as neither survives a fork. Importing this module does it; `PROBLEM` says why
nothing can be forked, or is empty.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import tempfile
import threading
import traceback
from pathlib import Path


def _warm_up() -> str:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    _load_plugins()  # first, as it rewrites asserts only of what is not imported yet
    if not (threads := _threads()):
        _load_libraries()
        threads = _threads()
    if threads:
        return f"threads were started by what was imported: {threads}"
    gc.collect()
    gc.freeze()  # else the first collection in each rank copies every page
    import torch

    return "CUDA was initialised by what was imported" if torch.cuda.is_initialized() else ""


def _load_plugins() -> None:
    """Run pytest on an empty folder: that imports its plugins, with their asserts rewritten."""
    import pytest

    os.environ.pop("PYTEST_ADDOPTS", None)
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder) / "pytest.ini"
        ini.write_text("[pytest]\n")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            pytest.main(["-c", str(ini), "--rootdir", folder, "-p", "no:cacheprovider", folder])


def _load_libraries() -> None:
    """Import what a test on several ranks is likely to use, and what makes its reports."""
    import torch._dynamo  # which the first step of an optimizer imports
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel  # noqa: F401

    import pytest_modelhealth.capture.engine
    import pytest_modelhealth.inspector
    import pytest_modelhealth.plugin.several_ranks.rank_process
    import pytest_modelhealth.rendering.failure  # noqa: F401


def _threads() -> str:
    named = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    tasks = Path("/proc/self/task")
    if not named and tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        return "one in native code"
    return ", ".join(named)


try:
    PROBLEM = _warm_up()
except BaseException:  # noqa: BLE001 - the parent tells it
    PROBLEM = traceback.format_exc()
