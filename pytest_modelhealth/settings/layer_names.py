"""How fully qualified names of layers lie in each other: ``encoder.0.fc1`` in ``encoder.0``."""

from __future__ import annotations

from collections.abc import Iterator


def is_inside(layer: str, container: str) -> bool:
    """Whether a layer lies in another; every other lies in the model, ``""``."""
    return layer != container and (not container or layer.startswith(f"{container}."))


def parent(layer: str) -> str:
    """Return the layer that one lies in next, ``""`` for the model and what lies right in it."""
    return layer.rpartition(".")[0]


def ancestors(layer: str) -> Iterator[str]:
    """Yield the layers that one lies in, the innermost first and the model, ``""``, last."""
    while layer:
        layer = parent(layer)
        yield layer
