"""Loads, before any test, the libraries that cannot be imported twice in one process.

pytester forgets after each in-process run the modules that the run was first to import; the next
run would then import them again, and crash. A test whose inner run calls torch.compile needs
`runpytest_subprocess`, as the compiler's modules, not loaded here, take another second.
"""

import importlib

# torch._dynamo, as every optimizer imports it; it brings numpy.random, on which sklearn crashes.
for library in ("torch._dynamo", "numpy", "matplotlib.figure", "matplotlib.backends.backend_agg"):
    importlib.import_module(library)
