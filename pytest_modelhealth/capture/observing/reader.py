"""Reads tensors while a model runs: each once, as long as nobody writes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.observing.scaling import LossScale
from pytest_modelhealth.capture.observing.tensors import KnownTensors
from pytest_modelhealth.statistics import Entry, Ledger, UnsupportedTensorError


class Reader:
    """Finds the statistics of tensors; it keeps none of these.

    Args:
        ledger: reads them.
        scale: the scale of the loss, which is taken off gradients.
        samples: the size of the batch.
    """

    def __init__(self, ledger: Ledger, scale: LossScale, samples: int) -> None:
        self.ledger = ledger
        self._scale = scale
        self._samples = samples
        self._known = KnownTensors[Entry]()

    def expect(self, samples: int, scale: LossScale) -> None:
        """Take the size of the batch that comes now, and the scale of its loss."""
        self._samples, self._scale = samples, scale

    def forget(self) -> None:
        """Look at every tensor anew: compiled code writes to memory without a new version."""
        self._known = KnownTensors()

    def read(self, tensor: Tensor, unit_dimension: int | None) -> Entry:
        """Return the entry of a tensor, which is read unless it is one seen before, unchanged.

        The output of a layer is usually the input of the next and the output of its container.

        Raises:
            UnsupportedTensorError: it cannot be read.
        """
        entry = self._known.get(tensor)
        if entry is None or not (unit_dimension is None or entry.has_units):
            entry = self.ledger.add(tensor, unit_dimension, self._samples)
            if not tensor.is_inference():  # a write would not show
                self._known.put(tensor, entry)
        return entry

    def read_gradient(self, gradient: Tensor, unit_dimension: int | None = None) -> Entry:
        """Return the entry of a gradient without the scale of the loss.

        Raises:
            UnsupportedTensorError: it cannot be read.
        """
        if self._scale.factor == 1.0:
            return self.ledger.add(gradient, unit_dimension)
        unscaled = self._scale.unscale(gradient)
        return self.ledger.add(unscaled, unit_dimension).of_dtype(gradient.dtype)

    def read_many(self, tensors: Sequence[Tensor], *, gradients: bool) -> list[Entry | None]:
        """Return the entry of each tensor, ``None`` for one that is to be read by itself."""
        if not (gradients and self._scale.factor != 1.0):
            try:
                return self.ledger.add_many(tensors)
            except Exception:  # noqa: BLE001 - ours: read by itself, it is of one layer
                pass
        return [None] * len(tensors)

    def of_loss(self, value: Any) -> Entry | None:
        """Return the entry of what a loss function took or gave, if it is a tensor with values.

        A loss is often given a model's output in another shape.
        """
        if not isinstance(value, Tensor):
            return None
        base = value._base
        if base is not None and base.dtype is value.dtype and base.numel() == value.numel():
            entry = self._known.get(base) or self._known_view(base)
            if entry is not None and base.is_contiguous() and value.is_contiguous():
                return entry.reshaped(tuple(value.shape))
        try:
            return self._known.get(value) or self.ledger.add(value)
        except UnsupportedTensorError:
            return None

    def _known_view(self, base: Tensor) -> Entry | None:
        """Return the entry of an unchanged view of all of `base`: a linear layer returns one."""
        for tensor in reversed(self._known.tensors()):
            if (
                tensor._base is base
                and tensor.dtype is base.dtype
                and tensor.numel() == base.numel()
                and tensor.is_contiguous()
                and (entry := self._known.get(tensor)) is not None
            ):
                return entry
        return None
