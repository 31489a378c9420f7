"""Models that say how large their images are: timm's, by ``pretrained_cfg`` or ``default_cfg``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from pytest_modelhealth.guessing.drawing import Candidate, normal, samples
from pytest_modelhealth.guessing.kinds.kind import Kind
from pytest_modelhealth.guessing.trying import Trial

_NAMES = ("pretrained_cfg", "default_cfg")


class PicturedModel(Kind):
    """A model whose settings have an ``input_size``."""

    precedence = 20

    def recognises(self, model: nn.Module) -> bool:
        """Whether one of its settings is a size (channels, height, width)."""
        return any(_size(model, name) for name in _NAMES)

    def candidates(self, model: nn.Module, trial: Trial) -> Iterator[Candidate]:
        """Yield images of that size, also with the channels of the first convolution."""
        for name in _NAMES:
            size = _size(model, name)
            if size is None:
                continue
            first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
            channels = size[0] if first is None else first.in_channels
            for shape in dict.fromkeys((size, (channels, *size[1:]))):
                how = f"images of input_size in {type(model).__name__}.{name}"
                yield Candidate((normal(samples(*shape), *shape),), how=how)


def _size(model: nn.Module, name: str) -> tuple[int, ...] | None:
    settings: Any = getattr(model, name, None)
    if isinstance(settings, Mapping):
        size = settings.get("input_size")
    else:
        size = getattr(settings, "input_size", None)
    is_size = isinstance(size, tuple | list) and all(type(n) is int for n in size)
    return tuple(size) if is_size and size else None
