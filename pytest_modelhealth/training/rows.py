"""The rows of a batch, its samples, and which of them a gradient comes from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors, version

_KINDS: tuple[Any, ...] = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BY_ROW = {kind.forward for kind in _KINDS}


def rows_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that have dimensions."""
    plain = (t for t in find_tensors(batch) if t.layout is torch.strided and not t.is_nested)
    return [t for t in plain if t.ndim]


class Rows:
    """Sees which half of a batch the gradient comes from, where a layer is given it: a `Visitor`.

    The layer makes of each row of its input, a sample, one of its output: where the gradient with
    respect to that is not zero, the gradient of its weights is made of this sample too.

    Args:
        model: the model.
        batch: what the step is given; a tensor whose halves are equal tells nothing.
        samples: how many it has; 0 where that cannot be told.

    Attributes:
        reached: of each half, whether the gradient comes from it.
    """

    def __init__(self, model: nn.Module, batch: Any, samples: int) -> None:
        self.reached, self._given = [False, False], set[str]()
        half = self._half = samples // 2
        self._batch = [
            (tensor, version(tensor))
            for tensor in rows_in(batch)
            if half and not torch.equal(tensor[:half], tensor[half : 2 * half])
        ]
        # what has fewer dimensions is a single sample to them
        self._least = {
            name: 1 if isinstance(layer, nn.Embedding) else layer.weight.ndim
            for name, layer in model.named_modules()
            if type(layer).forward in _BY_ROW
        }

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """See one tensor of a layer."""
        if role == "gradients" and layer in self._given:
            for at, rows in enumerate((value[: self._half], value[self._half :])):
                self.reached[at] |= bool(rows.any())
        elif role == "inputs" and value.ndim >= self._least.get(layer, math.inf):
            for one, then in self._batch:
                is_all_of_it = value is one or (value._base is one and value.is_contiguous())
                form = len(value), value.numel(), version(one)
                if is_all_of_it and form == (len(one), one.numel(), then):
                    self._given.add(layer)

    def see_output(self, output: Any) -> None:
        """See what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before."""
