"""What every test may use, and the libraries that cannot be imported twice in one process.

pytester forgets after each in-process run the modules that the run was first to import; the next
run would then import them again, and crash. A test whose inner run calls torch.compile needs
`runpytest_subprocess`, as the compiler's modules, not loaded here, take another second.
"""

import importlib
import signal
from collections.abc import Iterator

import pytest

from pytest_modelhealth.checks import default_settings

# torch._dynamo, as every optimizer imports it; it brings numpy.random, on which sklearn crashes.
for library in ("torch._dynamo", "numpy", "matplotlib.figure", "matplotlib.backends.backend_agg"):
    importlib.import_module(library)
# Loads every check: what an inner run loads is another class in the next, which no pickle takes.
default_settings()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt: it is ignored under ``nohup ... &`` and some CI."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
