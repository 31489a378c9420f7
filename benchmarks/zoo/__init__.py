"""Models of other libraries, each source a file; those not installed have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

from benchmarks.zoo.architecture import Architecture


def _source(module: str, library: str) -> Callable[[], Iterator[Architecture]]:
    def architectures() -> Iterator[Architecture]:
        if find_spec(library) is not None:
            yield from import_module(f"benchmarks.zoo.{module}").architectures()

    return architectures


SOURCES = {
    "torchvision": _source("torchvision_models", "torchvision"),
    "timm": _source("timm_models", "timm"),
    "transformers": _source("transformer_models", "transformers"),
    "trained": _source("trained_models", "sklearn"),
    "graphs": _source("graph_models", "torch_geometric"),
}
