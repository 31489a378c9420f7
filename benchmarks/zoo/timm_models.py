"""Two hundred models of timm, untrained, on small images.

Which ones stands in ``timm_models.txt``, made by ``python -m benchmarks.zoo.timm_models``: of each
kind, which is the name up to its first size, the smallest model; of these the smallest of each of
timm's modules, then those with the fewest parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.architecture import BATCH, CLASSES, Architecture, NotBuiltError, images
from corpus.subject import Subject

MODELS = 200
SIDES = (64, 96, 128, 224, 256)
NAMES = Path(__file__).with_suffix(".txt")


def architectures() -> Iterator[Architecture]:
    """Yield the models that were chosen."""
    for name in NAMES.read_text().split():
        yield Architecture("timm", name, lambda name=name: _subject(name))


def _subject(name: str) -> Subject:
    """Return the model with images of the smallest side that it takes."""
    seed = torch.initial_seed()
    for side in SIDES:
        for options in ({"img_size": side}, {}):
            torch.manual_seed(seed)
            try:
                made = timm.create_model(name, num_classes=CLASSES, **options)
            except Exception:  # noqa: BLE001 - not all take a size
                continue
            output = _output(made, side)
            if output is not None:
                pixels, labels = images(side, BATCH if side < 200 else BATCH // 2)
                if output.shape != (1, CLASSES):  # an encoder, which has no loss of its own
                    return Subject(made.train(), pixels)
                return Subject(made.train(), pixels, labels, F.cross_entropy)
    raise NotBuiltError("no size of images fits")


def _output(model: nn.Module, side: int) -> Tensor | None:
    """Return its output for an image of this side, ``None`` where it takes none."""
    try:
        with torch.no_grad():
            output = model.eval()(torch.randn(1, 3, side, side))
    except Exception:  # noqa: BLE001 - whatever the model refuses this size with
        return None
    return output if isinstance(output, Tensor) else None


# ---- the choice ---------------------------------------------------------------------------------


def chosen() -> list[str]:
    """Return the names, those with the fewest parameters first."""
    smallest: dict[tuple[str, str], tuple[int, str]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            kind, size = (module, _kind(name)), (_parameters(name), name)
            smallest[kind] = min(size, smallest.get(kind, size))
    of_modules = {module: min(size for (m, _), size in smallest.items() if m == module)
                  for module, _ in smallest}  # fmt: skip
    first = set(of_modules.values())
    others = sorted(set(smallest.values()) - first)
    return [name for _, name in sorted(first | set(others[: MODELS - len(first)]))]


def _kind(name: str) -> str:
    """Return the name up to its first size."""
    return re.split(r"_?\d|_(?:tiny|small|base|nano|pico|atto|femto|xs|s|xxs|m|t|mini)\b", name)[0]


def _parameters(name: str) -> int:
    with torch.device("meta"):
        made = timm.create_model(name, num_classes=CLASSES)
    return sum(parameter.numel() for parameter in made.parameters())


if __name__ == "__main__":
    NAMES.write_text("\n".join(chosen()) + "\n")
