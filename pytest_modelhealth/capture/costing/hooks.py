"""Hooks that tell which layer runs, and what shapes go in and out; no value is read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.observing.function_mode import Call
from pytest_modelhealth.capture.observing.hooks import Frame, Hooks, guarded
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.report import Shape


class Form:
    """What goes into and comes out of a layer: attributes as in `LayerCosts`."""

    def __init__(self) -> None:
        self.input_shape: Shape | None = None
        self.output_shape: Shape | None = None
        self.dtype = ""
        self.activation_bytes = 0


class MeteringHooks(Hooks):
    """Sees the calls of layers in place of what their tensors hold.

    Attributes:
        forms: by the name of the layer.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        recorder.flow.is_on = False
        self.forms: dict[str, Form] = {}
        self._function_layer: str | None = None

    def metered_layer(self) -> str | None:
        """Return the innermost layer whose forward runs, by name; ``None`` outside of it.

        What activation checkpointing runs again in the backward pass is no forward.
        """
        if self._function_layer is not None:
            return self._function_layer
        if not self._stack or self._stack[-1].is_recomputation:
            return None
        return self._stack[-1].layer.name

    def _function(
        self, name: str | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super()._function(name, call, args, kwargs)
        finally:
            self._function_layer = None

    def _see_inputs(self, layer: Layer, frame: Frame, arguments: Any) -> None:
        super()._see_inputs(layer, frame, arguments)
        if frame.is_recomputation:
            return
        if layer.functional:
            self._function_layer = layer.name
        form = self.forms.setdefault(layer.name, Form())
        if form.input_shape is None and frame.inputs:
            form.input_shape = _shape(frame.inputs[0][0])

    def _see_output(self, layer: Layer, frame: Frame, output: Any) -> None:
        super()._see_output(layer, frame, output)
        form = self.forms.get(layer.name)
        if frame.is_recomputation or form is None:
            return
        for tensor in find_tensors(output):
            if form.output_shape is None:
                form.output_shape = _shape(tensor)
                form.dtype = str(tensor.dtype).removeprefix("torch.")
            form.activation_bytes += tensor.numel() * tensor.itemsize

    _enter_function = guarded(_see_inputs)  # type: ignore[arg-type]
    _complete_function = guarded(_see_output)  # type: ignore[arg-type]


def _shape(tensor: Tensor) -> Shape:
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tuple(tensor.values().shape)
