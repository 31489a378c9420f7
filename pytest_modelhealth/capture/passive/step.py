"""One step of the user's training, watched, and the watch that sees one after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from pytest_modelhealth.capture.observing.layer import Held, Own
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.sample_statistics import Visitor
from pytest_modelhealth.capture.observing.tensors import (
    NO_SCALE,
    KnownTensors,
    LossScale,
    find_tensors,
    is_capturing,
    noted,
    version,
)
from pytest_modelhealth.capture.passive.hooks import (
    PASSES_A_PAGE,
    WHY_OPAQUE,
    Compiled,
    PassiveHooks,
    can_be_subtracted,
    parameters_of,
)
from pytest_modelhealth.capture.step.batch import batch_size
from pytest_modelhealth.capture.step.company import notes_on_ranks
from pytest_modelhealth.capture.step.guard import is_inspecting, uninterrupted
from pytest_modelhealth.capture.step.run import observation_of
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection, named_modules
from pytest_modelhealth.report import Observation
from pytest_modelhealth.statistics import Entries, Entry, UnsupportedTensorError

_MODAL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Modules that do something else in evaluation mode."""


class WatchedStep:
    """A step that is being watched, and what was seen of it once it has ended.

    Args:
        model: the model.
        selection: which roles of which layers to observe.
        scaler: the gradient scaler, if any.
        compiled: what is compiled in this process.
        visitor: is shown each tensor.

    Attributes:
        observation: all of it, as of an inspection; there is no flow, and of the loss the value.
        recorder: what took it down, with what was found in tensors.
        hooks: what sees it, and counts its forward passes.
        updates: what an optimizer changed, by layer and own name of the parameter, and how many
            dimensions that has; of one that no optimizer touched there is nothing.
        rates: the largest learning rate that optimizers stepped parameters of a layer with.
        optimizer_steps: how many steps of optimizers.
        modes: of dropout and batch norm by layer, and of the model that has some, whether they were
            in training mode at the first forward pass.
        hook_counts: how many hooks each layer had when the step began.
    """

    observation: Observation

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        scaler: Any,
        compiled: Compiled,
        visitor: Visitor | None = None,
    ) -> None:
        self._model = model
        self._scaler = scaler
        self._scale = NO_SCALE
        self._batch = self._samples = self.optimizer_steps = 0
        self._compiled = compiled
        self._inside, self._around = compiled.parts()
        self.recorder = recorder = Recorder(
            named_modules(model), selection, visitor=visitor, compare_outputs=False
        )
        hidden = self._inside.difference(self._around.values())
        for module in hidden.intersection(recorder.by_module):
            recorder.by_module[module].opaque = WHY_OPAQUE
        self._held = {id(held[2]): held for held in recorder.held()[0]}
        self._handles: list[RemovableHandle] = []
        # of optimizers whose step runs: copies of parameters, gone when it is over
        self._copies: dict[int, dict[int, Tensor]] = {}
        # a layer may return one, and so have it hooked
        self._unhooked = [p for *_, p in self._held.values() if p._backward_hooks is None]
        self._before_step = KnownTensors[bool]()  # gradients of earlier steps
        for _, _, parameter in self._held.values():
            if parameter.grad is not None:
                self._before_step.put(parameter.grad, version(parameter.grad), True)
        self.modes: dict[str, bool] = {}
        self.hook_counts = {
            layer.name: len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module, layer in recorder.by_module.items()
        }
        self._gradients: dict[int, Entry] = {}  # as the latest backward pass left them
        self._taken: dict[int, Entry] = {}  # of those, what an optimizer took
        self.updates: dict[tuple[str, str], tuple[Entry, int]] = {}  # by the latest step
        self.rates: dict[str, float] = {}
        self._thread = get_ident()
        is_functional = not (self._inside or compiled.function)
        self.hooks = PassiveHooks(recorder, is_functional, self._begin_pass, self._end_backward)

    def register(self) -> None:
        """Put hooks on the model, and have torch tell of optimizers."""
        self.hooks.register_around(self._inside, self._around)
        if not self._compiled.runs_optimizer:
            self._handles.append(register_optimizer_step_pre_hook(self._before))
            self._handles.append(register_optimizer_step_post_hook(self._after))

    def remove(self) -> None:
        """Leave nothing on the model."""
        self.hooks.end_calls()
        self.hooks.remove()
        for parameter in self._unhooked:
            if parameter._backward_hooks is not None and not parameter._backward_hooks:
                parameter._backward_hooks = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._copies.clear()

    # Passes.

    def _begin_pass(self, arguments: Any) -> None:
        with torch._C.DisableTorchFunction():
            tensors = find_tensors(arguments)
            self._batch = batch_size(tensors)
        self._samples += self._batch
        if not self.modes:
            self.modes = {
                layer.name: module.training
                for module, layer in self.recorder.by_module.items()
                if isinstance(module, _MODAL)
            }
            if self.modes:
                self.modes.setdefault("", self._model.training)
        if self.hooks.passes % PASSES_A_PAGE == 0:
            self.recorder.merge()
        self._scale = LossScale.of(self._scaler)
        self.recorder.reader.expect(self._batch, self._scale)

    def _end_backward(self) -> None:
        with noted(self.recorder.errors), torch._C.DisableTorchFunction():
            self._read_gradients(self._held.values())

    def _read_gradients(self, parameters: Iterable[Held], scale: LossScale | None = None) -> None:
        """Read gradients that are not from before this step, which a loss scale still is in."""
        reader = self.recorder.reader
        held = [
            (layer, name, parameter.grad, id(parameter))
            for layer, name, parameter in parameters
            if parameter.grad is not None
            and "parameter_gradients" in layer.roles
            and not self._before_step.get(parameter.grad, version(parameter.grad))
        ]
        reader.expect(self._batch, self._scale if scale is None else scale)
        try:
            entries = reader.read_many([gradient for _, _, gradient, _ in held], gradients=True)
            for (layer, name, gradient, number), entry in zip(held, entries, strict=True):
                try:
                    self._gradients[number] = entry or reader.read_gradient(gradient)
                except UnsupportedTensorError as error:
                    layer.unsupported = f"{name}: {error}"
        finally:
            reader.expect(self._batch, self._scale)

    # Optimizers.

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Read what a step begins with: parameters, and gradients that no backward pass showed."""
        if is_compiling() or is_inspecting() or is_capturing() or get_ident() != self._thread:
            return
        with noted(self.recorder.errors), torch._C.DisableTorchFunction():
            numbers = self._numbers(optimizer)
            held = ((number, *self._held[number]) for number in numbers)
            self._copies[id(optimizer)] = {
                number: parameter.detach().clone()
                for number, layer, _, parameter in held
                if "parameters" in layer.roles and can_be_subtracted(parameter)
            }
            if not numbers:
                return
            self.optimizer_steps += 1
            for group in optimizer.param_groups:
                for parameter in group["params"] if group.get("lr") is not None else ():
                    if id(parameter) in self._held:
                        name = self._held[id(parameter)][0].name
                        self.rates[name] = max(float(group["lr"]), self.rates.get(name, 0.0))
            self._read_missing(optimizer, numbers)
            self._read_parameters()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Take what a step used, which a closure makes within it, and what it changed."""
        if is_compiling() or id(optimizer) not in self._copies:
            return
        with noted(self.recorder.errors), torch._C.DisableTorchFunction():
            before, numbers = self._copies.pop(id(optimizer)), self._numbers(optimizer)
            self._read_missing(optimizer, numbers)
            self._taken |= {n: self._gradients[n] for n in numbers if n in self._gradients}
            if not before:
                return
            ledger, now = self.recorder.reader.ledger, [self._held[n][2].detach() for n in before]
            entries = ledger.add_many([*before.values()], now)
            for (number, then), one, entry in zip(before.items(), now, entries, strict=True):
                layer, name, _ = self._held[number]
                self.updates[layer.name, name] = entry or ledger.add(then - one), one.ndim

    def _numbers(self, optimizer: Optimizer) -> list[int]:
        """Return which of the parameters an optimizer holds."""
        return [id(p) for p in parameters_of(optimizer) if id(p) in self._held]

    def _read_missing(self, optimizer: Optimizer, numbers: list[int]) -> None:
        if missing := [self._held[n] for n in numbers if n not in self._gradients]:
            scale = getattr(optimizer, "grad_scale", None)  # where the optimizer itself unscales
            self._read_gradients(missing, NO_SCALE if scale is None else LossScale(float(scale)))

    def _read_parameters(self) -> None:
        if "parameters" not in self.recorder.own:
            self.recorder.add_state("parameters", self._held.values())

    # What was seen.

    def settle(self, loss: Any) -> WatchedStep:
        """Take everything off the model, and make the observation."""
        self.remove()
        recorder = self.recorder
        with torch._C.DisableTorchFunction():
            missing = [held for n, held in self._held.items() if n not in self._gradients]
            self._read_gradients(missing, NO_SCALE if self._is_unscaled() else self._scale)
            self._read_parameters()
            recorder.add_state("buffers", recorder.held()[1])
            if isinstance(loss, Tensor):
                recorder.add_loss(loss)
        gradients = {**self._gradients, **self._taken}
        layers = [self._held[number][0] for number in gradients]
        names = [self._held[number][1] for number in gradients]
        recorder.own["parameter_gradients"] = Own(layers, names, Entries([*gradients.values()]))
        for layer in layers:
            layer.holds = True
        recorder.note_modules()
        value = recorder.loss if isinstance(loss, Tensor) else loss
        self.observation = observation_of(
            recorder,
            backward=self.hooks.saw_backward,
            notes=self._notes(),
            loss=None if value is None else float(value),
            samples=self._samples,
        )
        return self

    def _is_unscaled(self) -> bool:
        """Whether the scaler has taken its scale off gradients that no optimizer took."""
        if self._scaler is None or self._scale.factor == 1.0:
            return True
        states = getattr(self._scaler, "_per_optimizer_states", {}).values()
        is_done = any(state["found_inf_per_device"] for state in states)
        return is_done or LossScale.of(self._scaler).factor != self._scale.factor

    def _notes(self) -> list[str]:
        """Return what compiled code kept from being seen, and that there are other ranks."""
        notes = list(notes_on_ranks(self._model))
        if self._inside:
            notes.append(
                "the model is compiled, or a part of it: functional layers were not looked at, nor "
                "anything inside compiled code"
            )
        elif self._compiled.function:
            notes.append(
                "functional layers were not looked at: a function is compiled in this process, "
                f"{self._compiled.function}(), which would be compiled anew if the model calls it"
            )
        if self._compiled.runs_optimizer:
            notes.append("updates were not seen: the step of an optimizer is compiled")
        return notes


_lock = threading.Lock()
_watching: weakref.WeakSet[PassiveWatch] = weakref.WeakSet()


class PassiveWatch:
    """Sees those steps of a training that lie between `begin` and `end`.

    Outside of them nothing of ours is on the model, nor on any optimizer.

    Args:
        model: the model that is trained.
        selection: which roles of which layers to observe.
        scaler: the gradient scaler that the training uses, if any.

    Attributes:
        step: the one that is being watched, if one is.
    """

    step: WatchedStep | None = None
    _compiled: Compiled | None = None

    def __init__(self, model: nn.Module, selection: Selection, scaler: Any = None) -> None:
        self._model, self._selection, self._scaler = model, selection, scaler

    def use_scaler(self, scaler: Any) -> None:
        """Take a gradient scaler; a step that is being watched is watched anew."""
        self._scaler = scaler
        if self.step is not None:
            self.begin()

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
            if not all(own.isdisjoint(other._model.modules()) for other in _watching):
                raise InspectionError(
                    f"{name} is being monitored already: one monitor of a model at a time; "
                    "end the other one first, or monitor a copy, copy.deepcopy(model)"
                )
            _watching.add(self)

    def close(self) -> None:
        """Take everything off the model and let go of it."""
        try:
            self.discard()
        finally:
            with _lock:
                _watching.discard(self)

    def __del__(self) -> None:
        """Leave nothing on the model though nobody closed this."""
        with suppress(Exception):  # the interpreter may be shutting down
            self._discard()

    def begin(self, visitor: Visitor | None = None) -> None:
        """Watch from here on; a visitor is shown each tensor.

        Raises:
            InspectionError: the layers of the model cannot be listed.
        """
        self._compiled = self._compiled or Compiled(self._model)
        with uninterrupted():
            self._discard()
            self.step = WatchedStep(
                self._model, self._selection, self._scaler, self._compiled, visitor
            )
            self.step.register()

    def end(self, loss: Any = None) -> WatchedStep:
        """Watch no longer, and return what was seen.

        Args:
            loss: the loss of the step: a tensor, a number or ``None``.

        Raises:
            InspectionError: a CUDA graph is being captured.
        """
        assert self.step is not None
        if is_capturing():
            raise InspectionError(
                "which was ended while a CUDA graph was captured: reading what was seen would end "
                "the capture; end the step after it"
            )
        try:
            return self.step.settle(loss)
        finally:
            self.discard()

    def discard(self) -> None:
        """Watch no longer, and forget what was seen."""
        with uninterrupted():
            self._discard()

    def _discard(self) -> None:
        if self.step is not None:
            self.step.remove()
            self.step = None
