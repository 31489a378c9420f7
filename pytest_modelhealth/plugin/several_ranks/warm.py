"""What the server has imported that ranks are forked from: what a test on several ranks needs.

Importing this module imports it. None of the user's code is run: what a fork inherits is the same
for each test.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import tempfile
from pathlib import Path

import pytest

# no library may start threads, which do not survive a fork
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["OPENBLAS_NUM_THREADS"] = "1"


# An empty folder has pytest import its plugins, with their asserts rewritten. That comes first, as
# it rewrites asserts only of what is not imported yet.
os.environ.pop("PYTEST_ADDOPTS", None)
with tempfile.TemporaryDirectory() as folder:
    ini = Path(folder) / "pytest.ini"
    ini.write_text("[pytest]\n")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["-c", str(ini), "--rootdir", folder, "-p", "no:cacheprovider", folder])

# what a test on several ranks is likely to use, and what makes its reports
import torch._dynamo  # which the first step of an optimizer imports
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401

import pytest_modelhealth.capture.engine
import pytest_modelhealth.inspector
import pytest_modelhealth.plugin.several_ranks.rank_process
import pytest_modelhealth.rendering.failure  # noqa: F401

gc.collect()
gc.freeze()  # else the first collection in each rank copies every page
