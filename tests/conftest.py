"""What every test may use, and the libraries that cannot be imported twice in one process.

pytester forgets after each in-process run the modules that the run was first to import; the next
run would then import them again, and crash. A test whose inner run calls torch.compile needs
`runpytest_subprocess`, as the compiler's modules, not loaded here, take another second.
"""

import functools
import gc
import importlib
import pkgutil
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

import pytest_modelhealth

# Beside other processes an example may take longer than the 0.2 s that it has by default.
settings.register_profile("tests", settings.default, deadline=None)
settings.load_profile("tests")

# torch._dynamo, as every optimizer imports it; it brings numpy.random, on which sklearn crashes.
# hypothesis, as its own plugin imports a part of it at the end of each run.
LIBRARIES = (
    "torch._dynamo",
    "numpy",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "hypothesis",
)
# Loads all but the plugin and the kernels in C: importing it takes longer than most inner runs do,
# and what one of them loads is another class in the next, which no pickle takes.
APART = ("pytest_modelhealth.plugin", "pytest_modelhealth.statistics.native.")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is loaded out of every collection of garbage: it is a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_runtest_setup() -> None:
    """Have all exports to ONNX share one table of operators: each makes its own, in a second."""
    exporter = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(exporter, "ONNXRegistry", None)
    made = getattr(registry, "from_torchlib", None)
    if registry is not None and made is not None and not hasattr(made, "cache_info"):
        registry.from_torchlib = staticmethod(functools.cache(made))


@pytest.fixture(scope="session")
def libraries() -> None:
    """Load what inner runs in this process must not load, which takes longer than collecting."""
    for library in LIBRARIES:
        importlib.import_module(library)
    for module in pkgutil.walk_packages(pytest_modelhealth.__path__, "pytest_modelhealth."):
        if not module.name.startswith(APART):
            importlib.import_module(module.name)
    gc.freeze()


@pytest.fixture
def pytester(libraries: None, pytester: pytest.Pytester) -> pytest.Pytester:
    """Return pytest's own, after the libraries."""
    return pytester


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt: it is ignored under ``nohup ... &`` and some CI."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
