"""What every test may use, and the libraries that cannot be imported twice in one process.

pytester forgets after each in-process run the modules that the run was first to import; the next
run would then import them again, and crash. A test whose inner run calls torch.compile needs
`runpytest_subprocess`, as the compiler's modules, not loaded here, take another second.
"""

import importlib
import pkgutil
import signal
from collections.abc import Iterator

import pytest

import pytest_modelhealth

# torch._dynamo, as every optimizer imports it; it brings numpy.random, on which sklearn crashes.
for library in ("torch._dynamo", "numpy", "matplotlib.figure", "matplotlib.backends.backend_agg"):
    importlib.import_module(library)
importlib.import_module("hypothesis")  # as its own plugin does at the end of each run
# Loads all but the plugin and the kernels in C: importing it takes longer than most inner runs do,
# and what one of them loads is another class in the next, which no pickle takes.
APART = ("pytest_modelhealth.plugin", "pytest_modelhealth.statistics.native.")
for module in pkgutil.walk_packages(pytest_modelhealth.__path__, "pytest_modelhealth."):
    if not module.name.startswith(APART):
        importlib.import_module(module.name)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt: it is ignored under ``nohup ... &`` and some CI."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
