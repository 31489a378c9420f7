"""`Visitor`: is shown each tensor of a run, for what statistics cannot answer."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Visitor(Protocol):
    """Sees every tensor of a run, in the order in which they appear."""

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """See one tensor of a layer, which is the model's own: to be read now, never changed.

        Args:
            layer: name of the layer.
            role: ``inputs``, ``activations``, ``buffers``, ``gradients`` or
                ``parameter_gradients``.
            tensor: own name of the tensor, for buffers and gradients of parameters; else ``""``.
            value: the tensor. Gradients of parameters are still without a loss scale.
        """

    def see_output(self, output: Any) -> None:
        """See what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before: compiled code writes without a new version."""
