"""The one place that writes down what hooks and operators see of layers while a model runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.flow import FlowRecorder
from pytest_modelhealth.capture.observing.layer import Given, Held, Layer, Own, module_options
from pytest_modelhealth.capture.observing.loss_calls import LossCalls
from pytest_modelhealth.capture.observing.sample_statistics import (
    Deviation,
    Visitor,
    equal_samples,
    sample_deviations,
    zero_slices,
)
from pytest_modelhealth.capture.observing.tensors import (
    NO_SCALE,
    LossScale,
    Reader,
    holds_numbers,
    version,
)
from pytest_modelhealth.layers import (
    ATTENTION,
    NamedModule,
    Selection,
    UnitDimensions,
    activation_of,
    is_quantised,
    is_simple,
    original_class,
    own_parameters,
    replays_cuda_graph,
    type_name,
)
from pytest_modelhealth.report import Option
from pytest_modelhealth.report.parts import Placement
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.statistics import Entry, Ledger, UnsupportedTensorError


class Recorder:
    """The layers of one run. Tensors come in, are read at once, and are not kept.

    A visitor is shown each tensor. To measure by how much samples of the model's outputs deviate
    takes a pass over them.
    """

    def __init__(
        self,
        modules: Iterable[NamedModule],
        selection: Selection,
        scale: LossScale = NO_SCALE,
        samples: int = 0,
        visitor: Visitor | None = None,
        *,
        compare_outputs: bool = True,
    ) -> None:
        self.layers: dict[str, Layer] = {}  # all of them, by name
        self.by_module: dict[nn.Module, Layer] = {}
        self.own: dict[str, Own] = {}  # what was found in parameters and buffers, by role
        self.errors: list[str] = []  # ours
        self.has_zero_gradients = False  # a parameter's, or those of rows of one, as far as known
        self.notes: list[str] = []
        # the hash of Python's random state, and modes of modules, when the first layer was called
        self._drawn: int | None = None
        self._modes: dict[str, bool] = {}
        self.reader = Reader(Ledger(), scale, samples)
        self.flow = FlowRecorder()
        self.loss_calls = LossCalls(self.reader, self.errors)
        self.unit_dimension = UnitDimensions().of
        # tells how tensors lie on several ranks, where there are such
        self.placement_of: Callable[[Tensor], Placement | None] | None = None
        self._selection = selection
        self._visitor = visitor
        self._compare_outputs = compare_outputs
        self._deviations: list[Deviation] = []
        self._loss: Entry | float | None = None
        # the line of a functional call, where a graph knows it: by caller, function and number
        self.lines: dict[tuple[str, str, int], str] = {}
        self._events = 0
        classes: dict[type, tuple[str, type, str | None, bool, bool]] = {}
        all_roles = None if selection.rules else selection.roles("", None)
        for name, module, aliases, opaque in modules:
            known = classes.get(type(module))
            if known is None:
                kind = original_class(module)
                activation, is_packed = activation_of(kind), is_quantised(module)
                known = type_name(module), kind, activation, is_simple(kind), is_packed
                # of a stand-in, one stands for several
                if kind is type(module) and "_ty" not in vars(module):
                    classes[kind] = known
            kind_name, kind, activation, is_torchs, is_packed = known
            layer = Layer(name, kind_name, all_roles or selection.roles(name, module))
            layer.module, layer.kind = module, kind
            if activation or is_packed:
                layer.activation, layer.is_packed = activation, is_packed
            if "forward" in module.__dict__:
                layer.replays = replays_cuda_graph(module)
            elif is_torchs and not module._modules:
                layer.is_torchs_own = True
            if aliases or opaque:
                layer.aliases, layer.opaque = aliases, opaque
            parameters = own_parameters(module) if is_packed else module._parameters
            for own, parameter in parameters.items() if parameters else ():
                if parameter is not None and not parameter.requires_grad:
                    layer.frozen = layer.frozen | {own}
            self.layers[name] = self.by_module[module] = layer

    def merge(self) -> None:
        """Merge what was found in the calls of each layer so far, which takes less memory."""
        for layer in self.layers.values():
            layer.merge()
        self.reader.forget()
        self.reader.ledger.turn_over()

    def note(self, text: str) -> None:
        """Take down what a reader should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    # What a layer is.

    def functional_layer(
        self, caller: Layer, function: str, index: int, options: Mapping[str, Option]
    ) -> Layer:
        """Return the layer of the `index`-th call of `function` in one call of `caller`."""
        stem = dotted(caller.name, function)
        while True:
            name = f"{stem}_{index}" if index else stem
            layer = self.layers.get(name)
            if layer is None:
                layer = Layer(name, function, self._selection.roles(name, None))
                layer.functional = True
                layer.activation = None if function == ATTENTION else function
                layer.source = self.lines.get((caller.name, function, index), "")
                self.layers[name] = layer
            if layer.module is None:
                layer.options = options
                return layer
            index += 1  # a module has this name already

    def note_modules(self) -> None:
        """Take down how modules are set up."""
        public: dict[type, tuple[list[str], list[str]]] = {}
        for module, layer in self.by_module.items():
            options = module_options(module, public)
            if "backward" in vars(type(module)):
                options["backward"] = True
            if self._modes.get(layer.name, here := options.get("training")) is not here:
                options["training_before"] = not here
            if not layer.name and self._drawn not in (None, hash(random.getstate())):
                options["draws_in_python"] = True
            layer.options = {**options, **layer.options} if layer.options else options

    # What became of a call.

    def enter(self, layer: Layer, tensors: Sequence[Tensor] = ()) -> list[Given]:
        """Note that a call of `layer` begins, and take what it is called with.

        Integers are read only where there is nothing else.
        """
        layer.calls += 1
        self._events += 1
        if layer.entered is None:
            layer.entered = self._events
            if self._drawn is None:
                self._drawn = hash(random.getstate())
                self._modes = {
                    one.name: mode
                    for module, one in self.by_module.items()
                    if isinstance(mode := module.__dict__.get("training"), bool)
                }
        has_numbers = len(tensors) > 1 and any(map(holds_numbers, tensors))
        given: list[Given] = []
        for tensor in tensors:
            now, entry = version(tensor), None
            if not has_numbers or holds_numbers(tensor):
                is_table = not layer.name and tensor.ndim == 2 and tensor.is_floating_point()
                entry = self._add(layer, "inputs", tensor, 1 if is_table else None, now)
            given.append((tensor, now, entry))
        return given

    def complete(self, layer: Layer) -> None:
        """Note that a call of `layer` has returned."""
        self._events += 1
        layer.completed = self._events

    def note_returned(self, layer: Layer, requires_grad: bool) -> bool:
        """Note that a call of `layer` returned a tensor with numbers that it was not given.

        Returns:
            Whether a gradient of it is asked for and may come.
        """
        layer.returned_own = True
        if requires_grad and "gradients" in layer.roles:
            layer.requires_grad = True
            return True
        layer.grad_off = layer.grad_off or not torch.is_grad_enabled()
        return False

    def note_pass_with_graph(self, layers: Iterable[Layer]) -> None:
        """Note that gradients of `layers` came in a pass that builds a graph."""
        for layer in layers:
            layer.passed_with_graph = True

    def fail(self, layer: Layer, error: Exception) -> None:
        """Note that an error of ours cost what could have been seen of `layer`."""
        what = f"{type(error).__name__}: {error}"
        layer.unsupported = f"an error in pytest-modelhealth: {what}"
        self.errors.append(f"layer {layer.label!r}: {what}")

    # Its tensors.

    def forget(self) -> None:
        """Look at every tensor anew: compiled code writes to memory without a new version."""
        self.reader.forget()
        if self._visitor is not None:
            self._visitor.forget()

    def add_output(
        self,
        layer: Layer,
        tensor: Tensor,
        unit_dimension: int | None,
        made_by: tuple[int, ...] | None = None,
    ) -> Entry | None:
        """Take one tensor that `layer` returned; return what was found, if it was read.

        `made_by` is the vertex of a call that made this one tensor, where a flow is recorded.
        """
        entry = self._add(layer, "activations", tensor, unit_dimension, version(tensor))
        if entry is not None:
            entry.made_by = made_by or entry.made_by
            if entry.samples_equal is False and layer.name:
                layer.equal_samples = False  # of nearly all
        return entry

    def _add(
        self,
        layer: Layer,
        role: str,
        tensor: Tensor,
        unit_dimension: int | None,
        version_now: int | None,
    ) -> Entry | None:
        entry, known = None, self.reader.known
        if role in layer.roles:
            try:
                # the output of a layer is usually the input of the next and that of its container
                entry = known.get(tensor, version_now)
                if entry is None or (unit_dimension is not None and not entry.has_units):
                    entry = self.reader.ledger.add(tensor, unit_dimension, self.reader.samples)
                    if version_now is not None:  # a write would not show
                        known.put(tensor, version_now, entry)
                if role in layer.seen:
                    layer.add(role, entry)
                else:
                    layer.seen[role] = entry
            except UnsupportedTensorError as error:
                layer.unsupported = str(error)
        if self._visitor or self.placement_of:
            self._show(layer, role, tensor)
        return entry

    def _show(self, layer: Layer, role: str, tensor: Tensor) -> None:
        """Show a tensor to those who look on."""
        if role in layer.roles and self.placement_of is not None:
            _place(layer, role, self.placement_of(tensor))
            if role == "activations" and layer.activation is not None:  # element by element
                _place(layer, role, layer.placements.get("inputs"))
        if self._visitor is not None:
            self._visitor.see(layer.name, role, "", tensor)

    def add_gradient(
        self, layers: list[Layer], gradient: Tensor, unit_dimension: int | None
    ) -> None:
        """Read the gradient of the loss with respect to a tensor that all of `layers` returned."""
        try:
            entry = self.reader.read_gradient(gradient, unit_dimension)
            for layer in layers:
                layer.add("gradients", entry)
        except UnsupportedTensorError as error:
            for layer in layers:
                layer.unsupported = str(error)
        for layer in layers:
            if self.placement_of is not None:  # that of the activation, where nothing else tells
                placement = self.placement_of(gradient) or layer.placements.get("activations")
                _place(layer, "gradients", placement)
            if self._visitor is not None:
                self._visitor.see(layer.name, "gradients", "", gradient)

    def compare_samples(
        self,
        layer: Layer,
        given: Sequence[Given],
        returned: list[Tensor],
        entries: list[Entry | None],
    ) -> None:
        """Note whether a call of `layer` returned the same for every sample, and was given it."""
        if "activations" not in layer.roles:
            return
        if not layer.name and self._compare_outputs:
            self._deviations += sample_deviations(
                returned, entries, self.reader.samples, self.reader.ledger
            )
        if layer.equal_samples is False:
            return
        equal = equal_samples(returned, self.reader.samples, entries)
        if equal is not None:
            layer.equal_samples = equal
        if (equal or not layer.name) and layer.equal_input_samples is not False:
            unchanged = [(one, entry) for one, then, entry in given if version(one) == then]
            tensors, known = zip(*unchanged, strict=True) if unchanged else ((), ())
            equal = equal_samples(tensors, self.reader.samples, known)
            if equal is not None:
                layer.equal_input_samples = equal

    def let_go(self) -> None:
        """Hold no module any longer: a report must not; nor what is known of tensors."""
        self.by_module.clear()
        self.reader.forget()
        for layer in self.layers.values():
            layer.module = None

    # What a model holds, and its loss.

    def held(self) -> tuple[list[Held], list[Held]]:
        """Return parameters and buffers, each at its first layer; in further ones they are tied."""
        parameters, buffers = dict[int, Held](), dict[int, Held]()
        for module, layer in self.by_module.items():
            held = own_parameters(module) if layer.is_packed else module._parameters
            for name, tensor in held.items() if held else ():
                if tensor is not None:
                    own = layer, name, tensor
                    first = parameters.setdefault(id(tensor), own)
                    if first is not own:
                        layer.tied = {**layer.tied, name: dotted(first[0].name, first[1])}
            if module._buffers:
                for name, tensor in module._buffers.items():
                    if tensor is not None:
                        buffers.setdefault(id(tensor), (layer, name, tensor))
        return [*parameters.values()], [*buffers.values()]

    def add_state(self, role: str, tensors: Iterable[Held]) -> None:
        """Read parameters, their gradients or buffers."""
        every = list(tensors)
        if self._visitor is not None and role != "parameters":
            for layer, name, tensor in every:
                if not tensor.is_meta:
                    self._visitor.see(layer.name, role, name, tensor)
        held = [one for one in every if role in one[0].roles] if self._selection.rules else every
        layers, names, read_now = zip(*held, strict=True) if held else ((), (), ())
        are_gradients = role == "parameter_gradients"
        read = self.reader.read_gradient if are_gradients else self.reader.ledger.add
        # what we ask of a tensor is no call of the user's: a function mode would see each
        with torch._C.DisableTorchFunction():
            entries = self.reader.read_many(read_now, gradients=are_gradients)
            for index in entries.unread:
                layer, name, tensor = held[index]
                try:
                    entries[index] = read(tensor)
                except UnsupportedTensorError as error:
                    layer.unsupported = f"{name}: {error}"
                except Exception as error:  # noqa: BLE001 - ours, as in a hook
                    self.fail(layer, error)
            if self.placement_of is not None:
                for layer, name, tensor in held:
                    _place(layer, f"{role}.{name}", self.placement_of(tensor))
        for layer in layers:
            layer.holds = True
        self.own[role] = Own(layers, names, entries)

    def note_zero_slices(self) -> None:
        """Note the rows and columns of parameters that are zero and get a gradient of zero.

        It looks only where the statistics of both have counted that many zeros.
        """
        own, weights = self.own["parameter_gradients"], self.own["parameters"].entries
        gradients, of_weights = own.entries, dict[tuple[Layer, str], int]()
        zeros_of_weights = weights.zeros()
        for index, zeros in enumerate(gradients.zeros()):
            if zeros == 0 or (zeros is None and gradients[index] is None):
                continue
            place = layer, name = own.layers[index], own.names[index]
            if not of_weights:
                of_weights = {p: at for at, p in enumerate(self.own["parameters"].places())}
            module: Any = layer.module
            parameter = module._parameters[name]
            # on another device it is not known yet
            self.has_zero_gradients |= zeros is None or zeros == parameter.numel()
            at = of_weights.get(place)
            if not zeros or at is None or not zeros_of_weights[at]:
                continue  # nearly no weights have any
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue  # most batches leave out most rows of a table
            slices = zero_slices(parameter, weights[at], gradients[index])
            if slices is not None:
                layer.zero_slices = {**layer.zero_slices, name: slices}
                self.has_zero_gradients = True
        if self.has_zero_gradients:  # they may have shrunk away, which no step of training undoes
            largest = gradients.largest()
            shrunk = any(one is not None and 0.0 < one < _NEXT_TO_ZERO for one in largest)
            self.has_zero_gradients = not shrunk

    def note_unreached(
        self,
        parameters: Iterable[Held],
        leaves: Callable[[], Iterable[Tensor]],
        read: Collection[int] = (),
    ) -> None:
        """Note which parameters without a gradient no output of the model depends on.

        The leaves that outputs depend on are asked for only if a gradient is missing; `read` are
        ids of the parameters that functions were given all the same.
        """
        with torch._C.DisableTorchFunction():
            missing = {id(p) for _, _, p in parameters if p.grad is None and p.requires_grad}
            if not missing:
                return
            missing.difference_update(map(id, leaves()))
            for layer in self.by_module.values():
                for name, parameter in layer.parameters.items() if layer.calls else ():
                    if id(parameter) in missing:
                        layer.unreached = {**layer.unreached, name: id(parameter) in read}

    def add_loss(self, loss: Tensor) -> None:
        """Take the loss; from another device its value is fetched with everything else."""
        with torch._C.DisableTorchFunction():
            try:
                self._loss = self.reader.ledger.add(loss)
            except Exception:  # noqa: BLE001 - of a tensor class of the user's own, or an error of ours
                self._loss = float(loss.detach())

    @property
    def sample_deviation(self) -> float | None:
        """By how much the samples of the model's outputs deviate, as in `Observation`."""
        found = (deviation.ratio for deviation in self._deviations)
        return max(filter(math.isfinite, found), default=None)

    @property
    def loss(self) -> float | None:
        """The value of the loss, ``None`` where there is none."""
        return self._loss.statistics.mean_of_all if isinstance(self._loss, Entry) else self._loss


_NEXT_TO_ZERO = 1e-30
"""float32 ends at 1e-38, and subnormal numbers at 1e-45: what is next to that was larger before."""


def _place(layer: Layer, role: str, placement: Placement | None) -> None:
    if placement is not None:
        layer.placements = {role: placement, **layer.placements}
