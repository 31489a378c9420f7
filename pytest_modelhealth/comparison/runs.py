"""The two runs of a comparison: what can be compared, how it is run, and every tensor of a run."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.capture import Inputs, Request, find_engine, hinted
from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.engine import Engine
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.tensors import (
    KnownTensors,
    TensorStore,
    contents,
    find_tensors,
    pairs,
    version,
)
from pytest_modelhealth.capture.step.bare import converted_batch
from pytest_modelhealth.capture.step.company import has_process_group
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import is_quantised as is_quantised_module
from pytest_modelhealth.layers import named_modules, own_parameters
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.statistics import UnsupportedTensorError
from pytest_modelhealth.statistics.dense import dense_values, is_quantised
from pytest_modelhealth.wings import wing

Modules = Mapping[str, nn.Module]


class Key(NamedTuple):
    """Names one tensor of a run: the `number`-th that a layer showed in a role."""

    layer: str
    role: str
    tensor: str = ""
    number: int = 0


class KeptTensor(NamedTuple):
    """What is kept of a tensor."""

    slot: int  # its number in the store; a tensor seen again, unchanged, has the same
    moment: int  # its place in the order in which the tensors of the run appeared
    shape: tuple[int, ...]  # its shape, complex and sparse ones as real and dense
    dtype: torch.dtype  # its dtype, likewise


@dataclass
class Trace:
    """Everything that one run showed."""

    observation: Observation  # the statistics
    entries: dict[Key, KeptTensor]  # the tensors, by their names
    output: str = ""  # how the output is built, for people: ``"tuple(tensor 4x3, tensor 4)"``
    modules: Modules = field(default_factory=dict)  # the modules by name, of a model that is there
    engine: Engine | type[Engine] = Engine  # what ran it
    rounds: bool = False  # whether its layers compute with quantised numbers
    names_layers: bool = True  # whether its layers have the names of the model that it was made of

    @property
    def layers(self) -> Mapping[str, LayerRecord]:
        """The layers by their names."""
        return self.observation.layers

    @property
    def model_type(self) -> str:
        """Class name of the model."""
        return self.observation.model_type

    @cached_property
    def of_role(self) -> Mapping[tuple[str, str], list[Key]]:
        """The names of the tensors of each layer and role, in order of appearance."""
        found: dict[tuple[str, str], list[Key]] = defaultdict(list)
        for key in self.entries:
            found[key.layer, key.role].append(key)
        return found

    @cached_property
    def depths(self) -> dict[int, int]:
        """How many layers have computed something when each tensor appears, by its moment."""
        depth, seen, found = 1, set(), {}
        for key, entry in self.entries.items():
            found[entry.moment] = depth
            if key.role in ("activations", "gradients") and entry.slot not in seen:
                seen.add(entry.slot)
                depth += 1
        return found


@dataclass(frozen=True)
class TwoRuns:
    """The runs of both models, and which layer of one is which of the other."""

    a: Trace  # the reference's run
    b: Trace  # the candidate's run
    alignment: Alignment  # which layer is which
    store: TensorStore  # holds the tensors of both


class Watcher:
    """A visitor that names each tensor and hands it on; `take` may raise what is unsupported."""

    def __init__(self, take: Callable[[Key, Tensor], None]) -> None:
        self._take = take
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """Name a tensor by its layer, role and how many there were before it."""
        name = layer, role, tensor
        number = self._counts[name]
        self._counts[name] += 1
        self._see(Key(layer, role, tensor, number), value)

    def see_output(self, output: Any) -> None:
        """Take what the model returned as tensors of the role ``outputs``."""
        for number, tensor in enumerate(find_tensors(output)):
            self._see(Key("", "outputs", "", number), tensor)

    def forget(self) -> None:
        """Take no tensor for one seen before."""

    def _see(self, key: Key, value: Tensor) -> None:
        # That a tensor has no values to read, the recorder has said of this layer.
        with suppress(UnsupportedTensorError), torch.no_grad(), torch._C.DisableTorchFunction():
            self._take(key, value)


class Keeper(Watcher):
    """Keeps every tensor in a store."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__(self._keep)
        self.store = store
        self.entries: dict[Key, KeptTensor] = {}
        self.output = ""  # how it is built, for people: "tuple(tensor 4x3, tensor 4)"
        self._slots = KnownTensors[KeptTensor]()
        self._memory_is_reused = False

    def see_output(self, output: Any) -> None:
        """Keep what the model returned, and how it is built."""
        self.output = structure(output)
        super().see_output(output)

    def forget(self) -> None:
        """Keep every tensor anew."""
        self._slots = KnownTensors[KeptTensor]()
        self._memory_is_reused = True

    def _keep(self, key: Key, value: Tensor) -> None:
        """Keep a tensor, once if it is shown several times unchanged."""
        if self._memory_is_reused and key.role == "gradients":  # which come without a word
            self._slots = KnownTensors[KeptTensor]()
        now = version(value)
        known = self._slots.get(value, now)
        if known is None:
            values = dense_values(value).values
            known = KeptTensor(self.store.put(values), 0, tuple(values.shape), values.dtype)
            if now is not None:  # a write would not show
                self._slots.put(value, now, known)
        self.entries[key] = known._replace(moment=len(self.entries))


def structure(value: Any) -> str:
    """Return how an output is built, its tensors by shape."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return "tensor " + ("x".join(map(str, value.shape)) or "scalar")
    if issubclass(kind, Mapping):
        keys = (
            (k if type(k) in (str, int) else type(k).__name__, part) for k, part in pairs(value)
        )
        parts = (f"{key}: {structure(part)}" for key, part in keys)
        return f"{kind.__name__}({', '.join(parts)})"
    if issubclass(kind, tuple | list):
        return f"{kind.__name__}({', '.join(map(structure, contents(value, kind)))})"
    return kind.__name__


def container(value: str) -> str:
    """Return what `structure` says without the names of classes, which a refactor may change."""
    for name in ("OrderedDict(", "ModelOutput(", "list("):
        value = value.replace(name, "(")
    return value


@dataclass(frozen=True)
class Side:
    """A model under comparison."""

    model: Any  # what runs
    name: str  # ``"reference"`` or ``"candidate"``
    engine: Engine  # what runs it
    note: str = ""  # what a reader should know of how it came about

    @property
    def module(self) -> nn.Module:
        """The module that has the layers."""
        return self.engine.module(self.model)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by its name as a layer."""
        return {named.name: named.module for named in named_modules(self.module)}

    @property
    def quantised(self) -> bool:
        """Whether layers of it compute with quantised numbers, or keep quantised weights."""
        model: Any = self.model
        return (not self.engine.runs_in_torch and model.program.rounds) or any(
            is_quantised_module(module)
            or any(p is not None and is_quantised(p) for p in own_parameters(module).values())
            for module in self.modules.values()
        )

    @property
    def is_frozen(self) -> bool:
        """Whether it has parameters, and none of them is trained."""
        parameters = list(self.module.parameters())
        return bool(parameters) and not any(p.requires_grad for p in parameters)


def sides(reference: Any, candidate: Any) -> tuple[Side, Side]:
    """Return the two models; a `state_dict` is loaded into a copy of the reference.

    Raises:
        InspectionError: one is nothing that can be run, or the `state_dict` does not fit.
    """
    ours = None if isinstance(reference, Mapping) else _side(reference, "reference")
    if ours is None or not ours.engine.runs_in_torch:
        raise InspectionError(
            f"the reference is a {type(reference).__name__}: it must be a model that runs in "
            "PyTorch; a state_dict, an ONNX model, a frozen script or a compiled package can only "
            "be the candidate"
        )
    if not isinstance(candidate, Mapping):
        return ours, _side(candidate, "candidate")
    if not isinstance(reference, nn.Module):
        raise InspectionError(
            "a state_dict is loaded into a copy of the reference, which must be a torch.nn.Module, "
            f"not a {type(reference).__name__}"
        )
    loaded = copy.deepcopy(reference)
    try:
        loaded.load_state_dict(dict(candidate))
    except (RuntimeError, AttributeError, TypeError) as error:
        message = f"the state_dict does not fit the reference: {error}"
        raise InspectionError(message) from None
    note = f"a copy of the reference with the {len(candidate)} tensors of the state_dict"
    return ours, Side(loaded, "candidate", find_engine(loaded), note)


def _side(model: Any, name: str) -> Side:
    is_run_compiled = isinstance(model, nn.Module) and any(map(is_compiled, model.modules()))
    try:
        engine: Engine = (
            wing("capture.compiled:CompiledEngine")() if is_run_compiled else find_engine(model)
        )
    except InspectionError as error:
        raise InspectionError(f"the {name}: {error}") from None
    return Side(engine.load(model), name, engine)


def run(
    side: Side,
    request: Request,
    store: TensorStore,
    like: tuple[torch.dtype | None, torch.device | None] = (None, None),
) -> Trace:
    """Run the request's batch through a side, brought to a dtype and device; keep every tensor.

    Raises:
        InspectionError: the request cannot be carried out on this model.
        Exception: whatever the model or the loss raises, with a note on which of the two it was.
    """
    keeper = Keeper(store)
    try:
        batch = converted_batch(request.inputs, *like)
        target = converted_batch(request.target, None, like[1]) if like[1] else request.target
        own = replace(request, model=side.model, inputs=batch, target=target, visitor=keeper)
        if side.quantised or (side.is_frozen and request.backward is None):
            own = replace(own, backward=False)
        if side.engine.flat_outputs:  # which the loss was not written for
            own = replace(own, loss=lambda *_: torch.zeros(()))
        if has_process_group():
            own = replace(own, averager=wing("capture.parallel.placements:gathered"))
        with hinted(own):
            observation = side.engine.run(own)
        if side.engine.compiled:
            observation = replace(observation, loss=_compiled_outputs(own, keeper))
        if side.engine.flat_outputs:
            observation = replace(observation, loss=None)
    except Exception as error:
        error.add_note(f"raised while the {side.name} of compare(reference, candidate, ...) ran")
        raise
    if observation.errors:
        raise InspectionError(
            f"could not keep what the {side.name} computes: {observation.errors[0]}"
        )
    return Trace(
        observation,
        keeper.entries,
        keeper.output,
        side.modules,
        side.engine,
        rounds=side.quantised,
        names_layers=side.engine.runs_in_torch or side.model.program.names_layers,
    )


def _compiled_outputs(request: Request, keeper: Keeper) -> float | None:
    """Keep outputs, buffers and parameter gradients of compiled code alone; return its loss.

    Nothing watches inside of it.
    """
    own = Keeper(keeper.store)
    request = replace(request, visitor=own)
    bare = run_step(request, request.model, [], watch=lambda one: nullcontext(Hooks(one)))
    for key, entry in own.entries.items():
        if key.role in ("outputs", "buffers", "parameter_gradients"):
            moment = keeper.entries[key].moment if key in keeper.entries else len(keeper.entries)
            keeper.entries[key] = entry._replace(moment=moment)
    return bare.loss


def placement(side: Side, inputs: Any) -> tuple[torch.dtype | None, torch.device | None]:
    """Return the dtype and device that the batch must have for this model; ``None`` as it is.

    A model whose parameters are all of one floating dtype, or all on one device, takes its batch
    likewise.
    """
    parameters = [p for p in side.module.parameters() if not p.is_meta]
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    devices = {p.device for p in parameters}
    plain = (inputs.args, inputs.kwargs) if isinstance(inputs, Inputs) else inputs
    tensors = list(find_tensors(plain))
    floating = {t.dtype for t in tensors if t.is_floating_point()}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 and floating - dtypes else None
    device = next(iter(devices)) if len(devices) == 1 else None
    return dtype, device if {t.device for t in tensors} - {device} else None
