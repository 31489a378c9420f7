"""One step of the user's training, watched, and the watch that sees one after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pytest_modelhealth.capture.observing.layer import Held, Layer
from pytest_modelhealth.capture.observing.recorder import Recorder, merged_entries
from pytest_modelhealth.capture.observing.records import in_order, layer_records
from pytest_modelhealth.capture.observing.tensors import (
    NO_SCALE,
    KnownTensors,
    LossScale,
    find_tensors,
    is_capturing,
    noted,
)
from pytest_modelhealth.capture.passive.hooks import (
    PASSES_A_PAGE,
    WHY_OPAQUE,
    Compiled,
    CompiledObjects,
    PassiveHooks,
)
from pytest_modelhealth.capture.passive.updates import OptimizerSteps
from pytest_modelhealth.capture.step.batch import batch_size
from pytest_modelhealth.capture.step.company import notes_on_ranks
from pytest_modelhealth.capture.step.isolation import is_inspecting, uninterrupted
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection, named_modules
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.statistics import Entry, TensorStatistics, UnsupportedTensorError

_MODAL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Modules that do something else in evaluation mode."""


@dataclass(eq=False)
class WatchedStep:
    """What was seen of a step.

    Args:
        observation: all of it, as of an inspection; there is no flow, and of the loss the value.
        updates: what an optimizer changed, by layer and own name of the parameter; of one that no
            optimizer touched there is nothing.
        rates: the largest learning rate that optimizers stepped parameters of a layer with.
        passes: how many forward passes there were.
        optimizer_steps: how many steps of optimizers.
        modes: of dropout and batch norm by layer, and of the model that has some, whether they were
            in training mode at the first forward pass.
        hooks: how many hooks each layer had when the step began.
    """

    observation: Observation
    updates: dict[tuple[str, str], TensorStatistics]
    rates: dict[str, float]
    passes: int
    optimizer_steps: int
    modes: dict[str, bool]
    hooks: dict[str, int]
    _layers: list[Layer]

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Every layer by name, in execution order, those never called last."""
        return {layer.name: layer for layer in in_order(self._layers)}

    def statistics(self, layer: Layer, role: str) -> TensorStatistics | None:
        """Return what was seen of a layer in a role, merged over its tensors."""
        entries: Iterable[Entry] = layer.seen.get(role) or layer.own.get(role, {}).values()
        return merged_entries(entries)


class PassiveStep:
    """A step that is being watched.

    Args:
        model: the model.
        selection: which roles of which layers to observe.
        scaler: the gradient scaler, if any.
        compiled: what is compiled in this process.
    """

    def __init__(
        self, model: nn.Module, selection: Selection, scaler: Any, compiled: CompiledObjects
    ) -> None:
        self._model = model
        self._scaler = scaler
        self._scale = NO_SCALE
        self._batch = self._samples = 0
        self._objects = compiled
        self._compiled = Compiled.of(model, compiled)
        self._recorder = recorder = Recorder(named_modules(model), selection, compare_outputs=False)
        for module in self._compiled.hidden.intersection(recorder.by_module):
            recorder.by_module[module].opaque = WHY_OPAQUE
        self._held = {id(held[2]): held for held in recorder.held("_parameters")}
        self._before = KnownTensors[bool]()  # gradients of earlier steps
        for _, _, parameter in self._held.values():
            if parameter.grad is not None:
                self._before.put(parameter.grad, True)
        self._modes: dict[str, bool] = {}
        self._hook_counts = {
            layer.name: len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module, layer in recorder.by_module.items()
        }
        self._gradients: dict[int, Entry] = {}  # as the latest backward pass left them
        self._taken: dict[int, Entry] = {}  # of those, what an optimizer took
        self._is_state_read = False
        is_functional = not (self._compiled.inside or compiled.function)
        self._hooks = PassiveHooks(recorder, is_functional, self._begin_pass, self._end_backward)
        wanted = {n: (p, "parameters" in lyr.roles) for n, (lyr, _, p) in self._held.items()}
        ledger = recorder.reader.ledger
        self._steps = OptimizerSteps(wanted, ledger, self._see_update, recorder.errors)

    def register(self) -> None:
        """Put hooks on the model, and have torch tell of optimizers."""
        self._hooks.register_around(self._compiled)
        if not self._objects.runs_optimizer:
            self._steps.register()

    def remove(self) -> None:
        """Leave nothing on the model."""
        self._hooks.end_calls()
        self._hooks.remove()
        self._steps.remove()

    @property
    def passes(self) -> int:
        """How many forward passes there were."""
        return self._hooks.passes

    # What happens meanwhile.

    def _begin_pass(self, arguments: Any) -> None:
        with torch._C.DisableTorchFunction():
            tensors = find_tensors(arguments)
            self._batch = batch_size(tensors)
        self._samples += self._batch
        if not self._modes:
            self._modes = {
                layer.name: module.training
                for module, layer in self._recorder.by_module.items()
                if isinstance(module, _MODAL)
            }
            if self._modes:
                self._modes.setdefault("", self._model.training)
        if self._hooks.passes % PASSES_A_PAGE == 0:
            self._recorder.merge()
        self._scale = LossScale.of(self._scaler)
        self._recorder.reader.expect(self._batch, self._scale)

    def _end_backward(self) -> None:
        with noted(self._recorder.errors), torch._C.DisableTorchFunction():
            self._read_gradients(filter(self._is_new, self._held.values()))

    def _is_new(self, held: Held) -> bool:
        """Whether a parameter has a gradient that is not from before this step."""
        gradient = held[2].grad
        return gradient is not None and not self._before.get(gradient)

    def _see_update(self, parameters: list[int], optimizer: Optimizer, is_over: bool) -> None:
        """Take what an optimizer uses; a closure makes that within its step.

        Gradients that no backward pass showed are read now.
        """
        missing = [self._held[number] for number in parameters if number not in self._gradients]
        if missing:
            scale = getattr(optimizer, "grad_scale", None)  # where the optimizer itself unscales
            factor = NO_SCALE if scale is None else LossScale(float(scale))
            self._read_gradients(filter(self._is_new, missing), factor)
        if is_over:
            for number in parameters:
                if number in self._gradients:
                    self._taken[number] = self._gradients[number]
        else:
            self._read_parameters()

    def _read_gradients(self, parameters: Iterable[Held], scale: LossScale | None = None) -> None:
        """Read the gradients of parameters, which a loss scale still is in."""
        reader = self._recorder.reader
        held = [
            (layer, name, parameter.grad, id(parameter))
            for layer, name, parameter in parameters
            if parameter.grad is not None and "parameter_gradients" in layer.roles
        ]
        self._recorder.reader.expect(self._batch, self._scale if scale is None else scale)
        try:
            found = reader.read_many([gradient for _, _, gradient, _ in held], gradients=True)
            for (layer, name, gradient, number), entry in zip(held, found, strict=True):
                try:
                    self._gradients[number] = entry or reader.read_gradient(gradient)
                except UnsupportedTensorError as error:
                    layer.unsupported = f"{name}: {error}"
        finally:
            self._recorder.reader.expect(self._batch, self._scale)

    def _read_parameters(self) -> None:
        if not self._is_state_read:
            self._is_state_read = True
            self._recorder.add_state("parameters", self._held.values())

    # What was seen.

    def settle(self, loss: Any) -> WatchedStep:
        """Take everything off the model, and return what was seen."""
        self.remove()
        recorder = self._recorder
        with torch._C.DisableTorchFunction():
            missing = [held for n, held in self._held.items() if n not in self._gradients]
            scale = NO_SCALE if self._is_unscaled() else self._scale
            self._read_gradients(filter(self._is_new, missing), scale)
            self._read_parameters()
            recorder.add_state("buffers", recorder.held("_buffers"))
            if isinstance(loss, Tensor):
                recorder.add_loss(loss)
        for number, entry in {**self._gradients, **self._taken}.items():
            layer, name, _ = self._held[number]
            layer.own.setdefault("parameter_gradients", {})[name] = entry
        recorder.note_modules()
        layers = list(recorder.layers.values())
        records = layer_records(layers, backward=self._hooks.saw_backward)
        recorder.let_go()
        recorder.loss_calls.settle()
        updates = {self._held[n][:2]: entry for n, entry in self._steps.updates.items()}
        rates: dict[str, float] = {}
        for number, rate in self._steps.rates.items():
            name = self._held[number][0].name
            rates[name] = max(rate, rates.get(name, rate))
        return WatchedStep(
            self._observation(records, loss),
            {(layer.name, name): entry.statistics for (layer, name), entry in updates.items()},
            rates,
            self.passes,
            self._steps.count,
            self._modes,
            self._hook_counts,
            layers,
        )

    def _notes(self) -> list[str]:
        """Return what compiled code kept from being seen, and that there are other ranks."""
        notes = list(notes_on_ranks(self._model))
        if self._compiled.inside:
            notes.append(
                "the model is compiled, or a part of it: functional layers were not looked at, nor "
                "anything inside compiled code"
            )
        elif self._objects.function:
            notes.append(
                "functional layers were not looked at: a function is compiled in this process, "
                f"{self._objects.function}(), which would be compiled anew if the model calls it"
            )
        if self._objects.runs_optimizer:
            notes.append("updates were not seen: the step of an optimizer is compiled")
        return notes

    def _is_unscaled(self) -> bool:
        """Whether the scaler has taken its scale off gradients that no optimizer took."""
        if self._scaler is None or self._scale.factor == 1.0:
            return True
        states = getattr(self._scaler, "_per_optimizer_states", {}).values()
        is_done = any(state["found_inf_per_device"] for state in states)
        return is_done or LossScale.of(self._scaler).factor != self._scale.factor

    def _observation(self, records: Any, loss: Any) -> Observation:
        recorder = self._recorder
        value = recorder.loss if isinstance(loss, Tensor) else loss
        layers: dict[str, LayerRecord] = records
        if recorder.reader.ledger.has_queued:  # what waits on a device is tensors
            layers = dict(records)
        return Observation(
            layers=layers,
            model_type=recorder.layers[""].type_name,
            loss=None if value is None else float(value),
            backward=self._hooks.saw_backward,
            samples=self._samples,
            notes=(*recorder.notes, *self._notes()),
            errors=tuple(recorder.errors),
            loss_calls=tuple(recorder.loss_calls.settled),
        )


_lock = threading.Lock()
_watching: weakref.WeakSet[PassiveWatch] = weakref.WeakSet()


class PassiveWatch:
    """Sees those steps of a training that lie between `begin` and `end`.

    Outside of them nothing of ours is on the model, nor on any optimizer.

    Args:
        model: the model that is trained.
        selection: which roles of which layers to observe.
        scaler: the gradient scaler that the training uses, if any.
    """

    def __init__(self, model: nn.Module, selection: Selection, scaler: Any = None) -> None:
        self._step: PassiveStep | None = None
        self._model = model
        self._selection = selection
        self._scaler = scaler
        self._compiled: CompiledObjects | None = None

    @property
    def is_on(self) -> bool:
        """Whether a step is being watched."""
        return self._step is not None

    def use_scaler(self, scaler: Any) -> None:
        """Take a gradient scaler; a step that is being watched is watched anew."""
        self._scaler = scaler
        if self.is_on:
            self.begin()

    @property
    def has_seen(self) -> bool:
        """Whether a forward pass was seen in the step that is being watched."""
        return self._step is not None and self._step.passes > 0

    def open(self) -> None:
        """Claim the model: one watch at a time.

        Raises:
            InspectionError: another watches it, or a part of it, or it is being inspected.
        """
        name = type(self._model).__name__
        if is_inspecting():
            raise InspectionError(
                f"cannot monitor {name} from within an inspection: begin the monitor outside of it"
            )
        own = set(self._model.modules())
        with _lock:
            for other in _watching:
                if not own.isdisjoint(other._model.modules()):
                    raise InspectionError(
                        f"{name} is being monitored already: one monitor of a model at a time; "
                        "end the other one first, or monitor a copy, copy.deepcopy(model)"
                    )
            _watching.add(self)

    def close(self) -> None:
        """Take everything off the model and let go of it."""
        try:
            with uninterrupted():
                self._close()
        except BaseException:  # a signal that came in before it was held
            self._close()
            raise

    def _close(self) -> None:
        self._discard()
        with _lock:
            _watching.discard(self)

    def __del__(self) -> None:
        """Leave nothing on the model though nobody closed this."""
        with suppress(Exception):  # the interpreter may be shutting down
            self._discard()

    def begin(self) -> None:
        """Watch from here on.

        Raises:
            InspectionError: the layers of the model cannot be listed.
        """
        if self._compiled is None:
            self._compiled = CompiledObjects(self._model)
        with uninterrupted():
            self._discard()
            step = PassiveStep(self._model, self._selection, self._scaler, self._compiled)
            self._step = step
            step.register()

    def end(self, loss: Any = None) -> WatchedStep:
        """Watch no longer, and return what was seen.

        Args:
            loss: the loss of the step: a tensor, a number or ``None``.

        Raises:
            InspectionError: a CUDA graph is being captured.
        """
        step = self._step
        assert step is not None
        if is_capturing():
            raise InspectionError(
                "which was ended while a CUDA graph was captured: reading what was seen would end "
                "the capture; end the step after it"
            )
        try:
            return step.settle(loss)
        finally:
            self.discard()

    def discard(self) -> None:
        """Watch no longer, and forget what was seen."""
        with uninterrupted():
            self._discard()

    def _discard(self) -> None:
        if self._step is not None:
            self._step.remove()
            self._step = None
