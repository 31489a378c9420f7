"""Keeps the statistics of every layer while a model runs, and settles its status afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.flow import FlowRecorder
from pytest_modelhealth.capture.observing.losses import LOSS_FUNCTIONS, SeenLoss, see_loss
from pytest_modelhealth.capture.observing.options import module_options
from pytest_modelhealth.capture.observing.samples import equal_samples
from pytest_modelhealth.capture.observing.scaling import NO_SCALE, LossScale
from pytest_modelhealth.capture.observing.tensors import holds_numbers, version
from pytest_modelhealth.layers import (
    ModuleKinds,
    NamedModule,
    Selection,
    UnitDimensions,
    has_forward,
)
from pytest_modelhealth.report import LayerRecord, LayerRecords, LossCall, Option, Status
from pytest_modelhealth.statistics import (
    Entry,
    Ledger,
    TensorStatistics,
    UnsupportedTensorError,
)


class _Nothing(dict[str, Any]):
    """An empty mapping that a data class takes for a default: it is hashed, and never filled."""

    __hash__ = object.__hash__  # type: ignore[assignment]


_NOTHING = _Nothing()


@dataclass(slots=True, eq=False)
class Layer:
    """What is kept of one layer while the model runs."""

    name: str
    type_name: str
    roles: frozenset[str]
    module: nn.Module | None = None
    aliases: tuple[str, ...] = ()
    activation: str | None = None
    opaque: str = ""
    calls_no_functional_layer: bool = False
    frozen: frozenset[str] = frozenset()
    functional: bool = False
    entered: int | None = None
    completed: int | None = None
    calls: int = 0
    inputs: list[Entry] = field(default_factory=list)
    activations: list[Entry] = field(default_factory=list)
    gradients: list[Entry] = field(default_factory=list)
    parameters: Mapping[str, Entry] = _NOTHING
    parameter_gradients: Mapping[str, Entry] = _NOTHING
    buffers: Mapping[str, Entry] = _NOTHING
    returned_own: bool = False
    returned_input: bool = False
    returned_no_tensor: str = ""
    requires_grad: bool = False
    grad_off: bool = False
    passed_with_graph: bool = False
    raised: str = ""
    traced: bool = False
    not_called: str = ""
    unsupported: str = ""
    source: str = ""
    options: Mapping[str, Option] = _NOTHING
    unreached: frozenset[str] = frozenset()
    read_in_vain: frozenset[str] = frozenset()
    tied: Mapping[str, str] = _NOTHING
    equal_samples: bool | None = None
    equal_input_samples: bool | None = None

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or self.type_name


class _Seen(weakref.ref[Tensor]):
    """A tensor that was read, its version then and what was found."""

    __slots__ = ("entry", "version")

    entry: Entry
    version: int


Given = tuple[Tensor, int | None, Entry | None]
"""A tensor that a layer was called with, its version then, and what was found if it was read."""

Held = tuple[Layer, str, Tensor]
"""A parameter, a buffer or a gradient: the layer that has it, and its own name there."""


class Recorder:
    """The layers of one run. Tensors come in, are read at once, and are not kept."""

    def __init__(
        self,
        modules: Iterable[NamedModule],
        selection: Selection,
        scale: LossScale = NO_SCALE,
        samples: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.layers: dict[str, Layer] = {}
        self.flow = FlowRecorder()
        """Who feeds whom."""
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.loss_calls: list[LossCall] = []
        self._losses: list[SeenLoss] = []
        self.by_module: dict[nn.Module, Layer] = {}
        self._selection = selection
        self._scale = scale
        self._samples = samples
        self.unit_dimension = UnitDimensions().of
        """Tells where the units of an output of a module lie."""
        self._ledger = Ledger() if ledger is None else ledger
        self._loss: Entry | float | None = None
        self._seen: dict[int, _Seen] = {}
        self._events = 0
        kinds = ModuleKinds()
        for name, module, aliases, opaque in modules:
            kind = kinds.of(module)
            layer = Layer(  # by position, which is quicker by a quarter
                name,
                kind.type_name,
                selection.roles(name, module),
                module,
                aliases,
                kind.activation,
                opaque,
                kind.calls_no_functional_layer(module),
                _frozen(module),
            )
            self.layers[name] = self.by_module[module] = layer

    def functional_layer(self, caller: Layer, function: str, index: int) -> Layer:
        """Return the layer of the `index`-th call of `function` in one call of `caller`."""
        stem = f"{caller.name}.{function}" if caller.name else function
        while True:
            name = f"{stem}_{index}" if index else stem
            layer = self.layers.get(name)
            if layer is None:
                layer = Layer(name, function, self._selection.roles(name, None), functional=True)
                layer.activation = None if function == _ATTENTION else function
                self.layers[name] = layer
            if layer.module is None:
                return layer
            index += 1  # a module has this name already

    def fail(self, layer: Layer, error: Exception) -> None:
        """Note that an error of ours cost what could have been seen of `layer`."""
        what = f"{type(error).__name__}: {error}"
        layer.unsupported = f"an error in pytest-modelhealth: {what}"
        self.errors.append(f"layer {layer.label!r}: {what}")

    def note_blind_spot(self, layer: Layer) -> None:
        """Note that functional layers inside `layer` were left alone."""
        note = (
            f"functional layers inside {layer.label!r} were not looked at: without gradients its "
            "fused path gives other numbers while it is watched"
        )
        if note not in self.notes:
            self.notes.append(note)

    def forget(self) -> None:
        """Look at every tensor anew: compiled code writes to memory without a new version."""
        self._seen.clear()

    def enter(self, layer: Layer) -> None:
        """Note that a call of `layer` begins."""
        layer.calls += 1
        self._events += 1
        if layer.entered is None:
            layer.entered = self._events

    def add_inputs(self, layer: Layer, tensors: list[Tensor]) -> list[Given]:
        """Take what `layer` was called with; integers only where there is nothing else."""
        has_numbers = len(tensors) > 1 and any(map(holds_numbers, tensors))
        return [
            (tensor, version(tensor), None)
            if has_numbers and not holds_numbers(tensor)
            else self.add_input(layer, tensor)
            for tensor in tensors
        ]

    def add_input(self, layer: Layer, tensor: Tensor) -> Given:
        """Take one tensor that `layer` was called with."""
        entry = None
        if "inputs" in layer.roles:
            entry = self._read(layer, tensor, None)
            if entry is not None:
                _add(layer.inputs, entry)
        return tensor, version(tensor), entry

    def complete(self, layer: Layer) -> None:
        """Note that a call of `layer` has returned."""
        self._events += 1
        layer.completed = self._events

    def add_output(self, layer: Layer, tensor: Tensor, unit_dimension: int | None) -> Entry | None:
        """Take one tensor that `layer` returned, and where its units lie.

        Returns:
            What was found; ``None`` where it cannot be read or was not looked at.
        """
        if "activations" not in layer.roles:
            return None
        entry = self._read(layer, tensor, unit_dimension)
        if entry is not None:
            _add(layer.activations, entry)
        return entry

    def compare_samples(
        self,
        layer: Layer,
        given: list[Given],
        returned: list[Tensor],
        entries: list[Entry | None],
    ) -> None:
        """Note whether a call of `layer` returned the same for every sample, and was given it.

        Args:
            layer: the layer.
            given: what it was called with.
            returned: the tensors it returned.
            entries: what `add_output` found in these.
        """
        if layer.equal_samples is False or "activations" not in layer.roles:
            return
        equal = equal_samples(returned, self._samples, entries)
        if equal is not None:
            layer.equal_samples = equal
        if (equal or not layer.name) and layer.equal_input_samples is not False:
            unchanged, known = [], []
            for tensor, version_then, entry in given:
                if version(tensor) == version_then:
                    unchanged.append(tensor)
                    known.append(entry)
            equal = equal_samples(unchanged, self._samples, known)
            if equal is not None:
                layer.equal_input_samples = equal

    def add_loss_call(
        self,
        layer: Layer | None,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        value: Any,
    ) -> None:
        """Take what a loss function was given and gave; it was called by `layer`, if by any."""
        try:
            with torch._C.DisableTorchFunction():
                name = None if layer is None else layer.name
                seen = see_loss(
                    call, args, kwargs, value, layer=name, samples=self._samples, read=self._known
                )
                self._losses.append(seen)
                waits = isinstance(value, Tensor) and self._ledger.queues(value)
                if not waits or len(self._losses) > _MOST_WAITING_LOSSES:
                    self.settle_losses()
        except Exception as error:  # noqa: BLE001 - ours, as in a hook
            self.errors.append(f"loss {LOSS_FUNCTIONS[call]}: {type(error).__name__}: {error}")

    def settle_losses(self) -> None:
        """Work out what was seen of the calls of loss functions."""
        seen, self._losses = self._losses, []
        for loss in seen:
            try:
                self.loss_calls.append(loss.settled())
            except Exception as error:  # noqa: BLE001 - ours, as in a hook
                self.errors.append(f"loss {loss.call.function}: {type(error).__name__}: {error}")

    def note_options(self) -> None:
        """Take down how every module is set up."""
        for module, layer in self.by_module.items():
            own = module_options(module)
            layer.options = {**own, **layer.options} if layer.options else own

    def note_ties(self) -> None:
        """Take down which parameters are those of an earlier layer, where `held` has them."""
        owners: dict[int, tuple[Layer, str]] = {}
        for module, layer in self.by_module.items():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                owner, own_name = owners.setdefault(id(parameter), (layer, name))
                if owner is not layer or own_name != name:
                    full_name = f"{owner.name}.{own_name}" if owner.name else own_name
                    layer.tied = {**layer.tied, name: full_name}

    def held(self, kind: Literal["_parameters", "_buffers"]) -> list[Held]:
        """Return each parameter or buffer once, at the first layer that owns it.

        They are read from the module's own dictionary: a parametrised attribute computes when read.
        """
        found: dict[int, Held] = {}
        for module, layer in self.by_module.items():
            held = getattr(module, kind)
            if held:
                for name, tensor in held.items():
                    if tensor is not None and id(tensor) not in found:
                        found[id(tensor)] = (layer, name, tensor)
        return list(found.values())

    def note_unreached(
        self,
        parameters: Iterable[Held],
        leaves: Callable[[], Iterable[Tensor]],
        read: Collection[int] = (),
    ) -> None:
        """Note which parameters without a gradient no output of the model depends on.

        Args:
            parameters: those of the model.
            leaves: returns those that the outputs depend on; asked only if a gradient is missing.
            read: ids of the parameters that functions were given all the same.
        """
        with torch._C.DisableTorchFunction():
            if any(p.grad is None and p.requires_grad for _, _, p in parameters):
                self._note_unreached({id(leaf) for leaf in leaves()}, read)

    def _note_unreached(self, reached: set[int], read: Collection[int]) -> None:
        for module, layer in self.by_module.items():
            for name, parameter in module._parameters.items() if layer.calls else ():
                if (
                    parameter is not None
                    and parameter.requires_grad
                    and parameter.grad is None
                    and id(parameter) not in reached
                ):
                    layer.unreached |= {name}
                    if id(parameter) in read:
                        layer.read_in_vain |= {name}

    def add_gradient(
        self, layers: list[Layer], gradient: Tensor, unit_dimension: int | None
    ) -> None:
        """Read the gradient of the loss with respect to a tensor that all of `layers` returned."""
        try:
            entry = self._read_gradient(gradient, unit_dimension)
        except UnsupportedTensorError as error:
            for layer in layers:
                layer.unsupported = str(error)
            return
        for layer in layers:
            _add(layer.gradients, entry)

    def add_loss(self, loss: Tensor) -> None:
        """Take the loss; from another device its value is fetched with everything else."""
        with torch._C.DisableTorchFunction():
            try:
                self._loss = self._ledger.add(loss)
            except Exception:  # noqa: BLE001 - of a tensor class of the user's own, or an error of ours
                self._loss = float(loss.detach())

    @property
    def loss(self) -> float | None:
        """The value of the loss, ``None`` where there is none."""
        if isinstance(self._loss, Entry):
            return self._loss.statistics.mean_of_all
        return self._loss

    def add_state(self, role: str, tensors: Iterable[Held]) -> None:
        """Read parameters, their gradients or buffers."""
        is_scaled = role == "parameter_gradients" and self._scale.factor != 1.0
        read = self._read_gradient if is_scaled else self._ledger.add
        held = [(layer, name, tensor) for layer, name, tensor in tensors if role in layer.roles]
        found: dict[Layer, dict[str, Entry]] = {}
        # what we ask of a tensor is no call of the user's: a function mode would see each
        with torch._C.DisableTorchFunction():
            entries = [None] * len(held) if is_scaled else self._read_many(held)
            for (layer, name, tensor), known in zip(held, entries, strict=True):
                try:
                    entry = read(tensor) if known is None else known
                    found.setdefault(layer, {})[name] = entry
                except UnsupportedTensorError as error:
                    layer.unsupported = f"{name}: {error}"
                except Exception as error:  # noqa: BLE001 - ours, as in a hook
                    self.fail(layer, error)
        for layer, by_name in found.items():
            setattr(layer, role, by_name)

    def _read_many(self, held: list[Held]) -> list[Entry | None]:
        """Return the entry of each tensor, ``None`` for one that is to be read by itself."""
        try:
            return self._ledger.add_many([tensor for _, _, tensor in held])
        except Exception:  # noqa: BLE001 - ours: read by itself, it is of one layer
            return [None] * len(held)

    def _read_gradient(self, gradient: Tensor, unit_dimension: int | None = None) -> Entry:
        if self._scale.factor == 1.0:
            return self._ledger.add(gradient, unit_dimension)
        unscaled = self._scale.unscale(gradient)
        return self._ledger.add(unscaled, unit_dimension).of_dtype(gradient.dtype)

    def _read(self, layer: Layer, tensor: Tensor, unit_dimension: int | None) -> Entry | None:
        """Return the entry of a tensor, which is read unless it is one seen before, unchanged.

        The output of a layer is usually the input of the next and the output of its container.
        """
        seen_version, key = version(tensor), id(tensor)
        seen = self._seen.get(key)
        if seen is not None and seen() is tensor and seen.version == seen_version:
            entry = seen.entry
            if unit_dimension is None or entry.has_units:
                return entry
        try:
            entry = self._ledger.add(tensor, unit_dimension, self._samples)
        except UnsupportedTensorError as error:
            layer.unsupported = str(error)
            return None
        if seen_version is not None:
            seen = self._seen[key] = _Seen(tensor)
            seen.version, seen.entry = seen_version, entry
        return entry

    def _seen_before(self, tensor: Tensor) -> Entry | None:
        """Return the entry of an earlier look at the same unchanged tensor, if there was one."""
        seen = self._seen.get(id(tensor))
        if seen is not None and seen() is tensor and seen.version == version(tensor):
            return seen.entry
        return None

    def _seen_view(self, base: Tensor) -> Entry | None:
        """Return the entry of an unchanged view of all of `base`: a linear layer returns one."""
        for seen in reversed(list(self._seen.values())):
            tensor = seen()
            if (
                tensor is not None
                and tensor._base is base
                and tensor.dtype is base.dtype
                and tensor.numel() == base.numel()
                and tensor.is_contiguous()
                and version(tensor) == seen.version
            ):
                return seen.entry
        return None

    def _known(self, value: Any) -> Entry | None:
        """Return the entry of what a loss function took or gave, if it is a tensor with values.

        A loss is often given a model's output in another shape.
        """
        if not isinstance(value, Tensor):
            return None
        base = value._base
        if base is not None and base.dtype is value.dtype and base.numel() == value.numel():
            entry = self._seen_before(base) or self._seen_view(base)
            if entry is not None and base.is_contiguous() and value.is_contiguous():
                return entry.reshaped(tuple(value.shape))
        try:
            return self._seen_before(value) or self._ledger.add(value)
        except UnsupportedTensorError:
            return None

    def records(
        self, *, backward: bool, read: Collection[int] | None = None
    ) -> Mapping[str, LayerRecord]:
        """Return every layer's record in execution order, those never called last.

        `read` has the ids of the parameters that functions were given, where those are seen.

        The run is over: from here on no layer knows its module, which a report must not hold.
        """
        never = float("inf")
        ordered = sorted(
            self.layers.values(), key=lambda lyr: never if lyr.entered is None else lyr.entered
        )
        uncalled = [layer for layer in ordered if not layer.calls]
        owners = _owners(ordered) if uncalled else {}
        for layer in ordered:
            if layer.traced and not layer.requires_grad:  # a trace is checked without gradients
                layer.opaque = layer.opaque or _TRACED
        for layer in uncalled:
            layer.not_called = _why_not_called(layer, owners)
            if read is not None and has_forward(layer.module) and not layer.opaque:
                layer.opaque = _why_out_of_sight(layer, owners, read)
        if read is not None and uncalled:
            _note_containers_out_of_sight(ordered)
        for layer in ordered:
            layer.module = None
        seen = {layer.name: layer for layer in ordered}
        records = LayerRecords(seen, partial(_record, backward=backward))
        # what waits on a device is tensors, which a report must not hold either
        return dict(records) if self._ledger.has_queued else records


_ATTENTION = "scaled_dot_product_attention"


_MOST_WAITING_LOSSES = 64
"""Of calls of losses on another device so many wait, as the samples taken of them need memory."""


_MOST_ENTRIES = 256
"""A layer that is called more often has what was found in its calls merged meanwhile."""


def _add(entries: list[Entry], entry: Entry) -> None:
    entries.append(entry)
    if len(entries) > _MOST_ENTRIES:
        entries[:] = [Entry.of(merged)] if (merged := _merged(entries)) else []


def _merged(entries: Iterable[Entry]) -> TensorStatistics | None:
    merged: TensorStatistics | None = None
    for entry in entries:
        merged = entry.statistics if merged is None else merged.merge(entry.statistics)
    return merged


def _each(entries: Mapping[str, Entry]) -> dict[str, TensorStatistics]:
    return {name: entry.statistics for name, entry in entries.items()}


def _record(layer: Layer, *, backward: bool) -> LayerRecord:
    status, reason = _status(layer, backward=backward)
    return LayerRecord(
        name=layer.name,
        type_name=layer.type_name,
        status=status,
        reason=reason,
        functional=layer.functional,
        activation=layer.activation,
        entered=layer.entered,
        completed=layer.completed,
        calls=layer.calls,
        aliases=layer.aliases,
        inputs=_merged(layer.inputs),
        activations=_merged(layer.activations),
        gradients=_merged(layer.gradients),
        parameters=_each(layer.parameters),
        parameter_gradients=_each(layer.parameter_gradients),
        buffers=_each(layer.buffers),
        frozen=layer.frozen,
        unreached=layer.unreached,
        read_in_vain=layer.read_in_vain,
        tied=layer.tied,
        grad_off=layer.grad_off,
        nonfinite_calls=_nonfinite_calls(layer),
        watched=layer.roles,
        source=layer.source,
        options={**layer.options, **_scores(layer)} if layer.functional else layer.options,
        equal_samples=layer.equal_samples,
        equal_input_samples=layer.equal_input_samples,
    )


def _nonfinite_calls(layer: Layer) -> dict[str, int]:
    """Return in which call each role first held a NaN or positive infinity.

    What was merged, or differs in number from call to call, does not tell.
    """
    first = {}
    for role, entries in (("inputs", layer.inputs), ("activations", layer.activations)):
        per_call, rest = divmod(len(entries), max(layer.calls, 1))
        if rest or not per_call:
            continue
        for index, entry in enumerate(entries):
            seen = entry.statistics
            if seen.nan_count + seen.positive_inf_count:
                first[role] = index // per_call
                break
    return first


def _scores(layer: Layer) -> dict[str, Option]:
    """Return what the operands of fused attention say of the scores, which are never in memory.

    ``typical_score`` is the root mean square of the products of independent queries and keys.
    """
    if layer.type_name != _ATTENTION or len(layer.inputs) < 3:
        return {}
    query, key, value = (entry.statistics for entry in layer.inputs[:3])
    width = query.shape[-1] if query.shape else 1
    scale = layer.options.get("scale", width**-0.5)
    factor = scale if isinstance(scale, float) else width**-0.5
    return {
        "typical_score": query.rms * key.rms * width**0.5 * abs(factor),
        "value_std": value.std,
        "keys": key.shape[-2] if len(key.shape) > 1 else 1,
    }


def _status(layer: Layer, *, backward: bool) -> tuple[Status, str]:
    if layer.opaque:
        return Status.OPAQUE, layer.opaque
    if not layer.calls:
        return Status.NOT_CALLED, layer.not_called
    if layer.unsupported:
        return Status.UNSUPPORTED, layer.unsupported
    if not (layer.returned_own or layer.returned_input):
        return Status.UNSUPPORTED, _why_no_numbers(layer)
    if not layer.returned_own:
        return Status.ALIAS_OF_INPUT, "it returned its own input, whose gradient is not its alone"
    if backward and "gradients" in layer.roles and not layer.gradients:
        if layer.passed_with_graph:
            return Status.UNSUPPORTED, "gradients came only with create_graph=True: not the loss's"
        if layer.requires_grad:
            return Status.UNUSED_IN_LOSS, "its output requires a gradient but none came back"
        return Status.NO_GRAD_PATH, "its output does not require a gradient"
    return Status.OBSERVED, ""


def _why_no_numbers(layer: Layer) -> str:
    if layer.raised:
        return f"it raised {layer.raised}, which the model caught"
    if layer.returned_no_tensor:
        return f"it returned {layer.returned_no_tensor}, no tensor"
    return "its output holds no floating-point tensor"


def _owners(layers: Iterable[Layer]) -> dict[int, Layer]:
    """Return by the id of each parameter the first layer that has it and was called."""
    owners: dict[int, Layer] = {}
    for layer in layers:
        for parameter in _parameters(layer) if layer.calls else ():
            owners.setdefault(parameter, layer)
    return owners


def _why_not_called(layer: Layer, owners: Mapping[int, Layer]) -> str:
    if isinstance(layer.module, nn.ModuleList | nn.ModuleDict) and not has_forward(layer.module):
        return "it has no forward: it only holds other layers"
    if not has_forward(layer.module):
        return "it has no forward: it holds others, or other methods of it are used, unseen"
    tied = next((owners[p] for p in _parameters(layer) if p in owners), None)
    if tied is not None:
        return f"it was never called; {tied.label!r}, tied to its parameters, was"
    if layer.parameter_gradients:
        return (
            "it was never called, yet its parameters were used: by .forward(), by a copy, a graph "
            "or compiled code made of it, or read directly"
        )
    return "it was never called in this batch"


_TRACED = "torch.jit.trace wrote it down; what ran then is a script, which calls no hooks"
_BY_UNSEEN_CODE = (
    "a script, compiled code or an autograd function of the user's own, where no hook is called"
)


def _why_out_of_sight(layer: Layer, owners: Mapping[int, Layer], read: Collection[int]) -> str:
    """Return why an uncalled layer ran all the same where nothing shows it, if it did.

    Its parameters got gradients, but no function that was called from Python was given them.
    """
    held = {} if layer.module is None else layer.module._parameters
    used = [held.get(name) for name in layer.parameter_gradients]
    if any(type(p) is nn.Parameter and id(p) not in read and id(p) not in owners for p in used):
        return f"it was never called; its parameters were used by {_BY_UNSEEN_CODE}"
    return ""


def _note_containers_out_of_sight(layers: list[Layer]) -> None:
    """Take what is around layers that ran out of sight, and what stands among them, for the same.

    A layer that could have a gradient, and has none, was left out.
    """
    uncalled = [lyr for lyr in layers if not (lyr.calls or lyr.opaque) and has_forward(lyr.module)]
    hidden = {n for lyr in layers if lyr.opaque and not lyr.calls for n in _around(lyr.name)}
    called = {n for lyr in layers if lyr.calls for n in _around(lyr.name)} if hidden else set()
    around = {layer.name for layer in uncalled if layer.name in hidden - called}
    for layer in uncalled if around else ():
        if layer.name in around:
            layer.opaque = f"it was never called; what it holds was run by {_BY_UNSEEN_CODE}"
        elif around.intersection(_around(layer.name)) and layer.frozen.issuperset(_own(layer)):
            layer.opaque = f"it was never called; what is around it was run by {_BY_UNSEEN_CODE}"


def _around(name: str) -> list[str]:
    """Return the names of the layers that a layer lies in."""
    return [name[:index] for index, letter in enumerate(name) if letter == "."]


def _own(layer: Layer) -> list[str]:
    held = {} if layer.module is None else layer.module._parameters
    return [name for name, parameter in held.items() if parameter is not None]


def _parameters(layer: Layer) -> list[int]:
    """Return the ids of the layer's own parameters."""
    if layer.module is None:
        return []
    return [id(p) for p in layer.module._parameters.values() if p is not None]


_NONE: frozenset[str] = frozenset()


def _frozen(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that require no gradient."""
    frozen = _NONE
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.requires_grad:
            frozen |= {name}
    return frozen
