"""A recorder that shows each tensor it sees to a visitor, for what statistics cannot answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor

from pytest_modelhealth.capture.observing.recorder import Given, Layer, Recorder
from pytest_modelhealth.statistics import Entry


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


class VisitedRecorder(Recorder):
    """Records as ever, and shows each tensor to `visitor`, which is set before the run."""

    visitor: Visitor

    def forget(self) -> None:
        """Look at every tensor anew."""
        super().forget()
        self.visitor.forget()

    def add_input(self, layer: Layer, tensor: Tensor) -> Given:
        """Take and show one tensor that `layer` was called with."""
        given = super().add_input(layer, tensor)
        self.visitor.see(layer.name, "inputs", "", tensor)
        return given

    def add_output(self, layer: Layer, tensor: Tensor, unit_dimension: int | None) -> Entry | None:
        """Take and show one tensor that a call of `layer` returned."""
        entry = super().add_output(layer, tensor, unit_dimension)
        self.visitor.see(layer.name, "activations", "", tensor)
        return entry

    def add_gradient(
        self, layers: list[Layer], gradient: Tensor, unit_dimension: int | None
    ) -> None:
        """Take and show a gradient of the loss with respect to an output of all of `layers`."""
        super().add_gradient(layers, gradient, unit_dimension)
        for layer in layers:
            self.visitor.see(layer.name, "gradients", "", gradient)

    def add_state(self, role: str, tensors: Iterable[tuple[Layer, str, Tensor]]) -> None:
        """Take parameters, their gradients or buffers; show all but the parameters."""
        super().add_state(role, tensors if role == "parameters" else self._shown(role, tensors))

    def _shown(
        self, role: str, tensors: Iterable[tuple[Layer, str, Tensor]]
    ) -> Iterator[tuple[Layer, str, Tensor]]:
        for layer, name, tensor in tensors:
            if not tensor.is_meta:
                self.visitor.see(layer.name, role, name, tensor)
            yield layer, name, tensor
