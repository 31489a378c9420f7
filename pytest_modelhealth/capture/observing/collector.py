"""`Collector`: takes what one batch's statistics cannot say, over the batches of a run."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pytest_modelhealth.statistics import Entry


class Collector(Protocol):
    """Sees activations and their gradients, and what the model was given, as it was read."""

    def see(
        self, layer: str, role: str, tensor: Tensor, entry: Entry, unit_dimension: int | None
    ) -> None:
        """See one tensor, which is the model's own: to be read now, never changed, never kept.

        Args:
            layer: name of the layer.
            role: ``activations``, ``gradients``, or ``inputs`` of the model.
            tensor: the tensor; a gradient is still with the loss scale.
            entry: what was found in it; of a gradient, without the loss scale.
            unit_dimension: the dimension of the units; ``None`` for none.
        """
