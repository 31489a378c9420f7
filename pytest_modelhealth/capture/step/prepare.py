"""What is taken down of model and batch before the forward runs."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.flow import Source
from pytest_modelhealth.capture.observing.function_mode import FunctionalLayers
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.observing.operators import note_source_lines
from pytest_modelhealth.capture.observing.recorder import Placements, Recorder
from pytest_modelhealth.capture.observing.tensors import (
    LossScale,
    attributes,
    contents,
    find_tensors,
    is_a,
    pairs,
    version,
)
from pytest_modelhealth.capture.step.batch import Inputs, batch_size
from pytest_modelhealth.capture.step.company import Company
from pytest_modelhealth.capture.step.isolation import Inspection
from pytest_modelhealth.capture.step.loss import TaskLosses
from pytest_modelhealth.capture.step.state import State, graph_leaves
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.report import (
    GivenTensor,
    Kind,
    LossPath,
    TaskGradients,
    UnregisteredParameter,
)
from pytest_modelhealth.statistics import UnsupportedTensorError, reduce

_DEEPEST = 6
_TORCH_KEEPS = frozenset(vars(nn.Module()))
_RUNNING: tuple[type, ...] = (types.FrameType, types.GeneratorType, type(iter([])))


class Place(NamedTuple):
    """Where a tensor is: its path in a registered layer, and what holds it there."""

    path: str
    layer: str
    kind: str


class Registered:
    """The parameters of a model and the leaves of a batch, as they are before the forward.

    They are kept, so that none of them can make room for another of the same id.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor], batch: Any) -> None:
        self._model = model
        tensors = list(find_tensors(batch))
        behind = graph_leaves([t.grad_fn for t in tensors if t.grad_fn is not None])
        self._known = [*parameters, *tensors, *behind]
        self._ids = {id(None), *map(id, self._known)}

    def knows(self, module: nn.Module) -> bool:
        """Whether every parameter of `module` is one of them."""
        held = module._parameters
        return not held or self._ids.issuperset(map(id, held.values()))

    def leaves_out(
        self, leaves: Iterable[Tensor], line: Callable[[Tensor], str]
    ) -> tuple[UnregisteredParameter, ...]:
        """Return what of `leaves` has a gradient and is the model's, but no parameter of it.

        What the model does not hold belongs to somebody else, a loss or another model, unless
        nobody does: then the forward made it, and `line` tells where.
        """
        strays = [leaf for leaf in leaves if id(leaf) not in self._ids and leaf.grad is not None]
        if not strays:
            return ()
        held = places(self._model, {id(leaf) for leaf in strays})
        found = []
        for leaf in strays:
            place = held.get(id(leaf))
            if place is None and _is_made_by_the_forward(leaf):
                place = Place("", "", "made")
            if place is not None:
                found.append(_unregistered(leaf, place, "" if place.path else line(leaf)))
        return tuple(sorted(found, key=lambda one: (one.layer, one.path)))


def _is_made_by_the_forward(leaf: Tensor) -> bool:
    """Whether this is a parameter that only the graph holds.

    Our own lists of leaves hang on nothing but running functions.
    """
    return isinstance(leaf, nn.Parameter) and not any(
        not isinstance(holder, _RUNNING)
        and not (isinstance(holder, list | tuple) and _is_local(holder))
        for holder in gc.get_referrers(leaf)
    )


def _is_local(container: Any) -> bool:
    return all(isinstance(r, (*_RUNNING, list, tuple)) for r in gc.get_referrers(container))


def _unregistered(leaf: Tensor, place: Place, line: str) -> UnregisteredParameter:
    try:
        gradient = None if leaf.grad is None else reduce(leaf.grad)
    except UnsupportedTensorError:
        gradient = None
    return UnregisteredParameter(place.path, place.layer, place.kind, leaf.numel(), gradient, line)


def places(model: nn.Module, wanted: set[int]) -> dict[int, Place]:
    """Return where in the model's attributes each of the tensors is, by id."""
    found: dict[int, Place] = {}
    seen: set[int] = set()
    for layer, module in model.named_modules():
        seen.add(id(module))
        for name, value in vars(module).items():
            if name not in _TORCH_KEEPS:
                for path, tensor, kind in _walk(value, name, "attribute", seen, 0):
                    if id(tensor) in wanted:
                        found.setdefault(id(tensor), Place(path, layer, kind))
        for name, parameter in module._parameters.items():  # it was not there before the forward
            if id(parameter) in wanted:
                found.setdefault(id(parameter), Place(name, layer, "made"))
    return found


def _walk(
    value: Any, path: str, kind: str, seen: set[int], depth: int
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield each tensor that attributes and containers lead to, with its path."""
    if is_a(value, Tensor):
        yield path, value, kind
        return
    if depth > _DEEPEST or id(value) in seen:
        return
    for suffix, item in _items(value):
        seen.add(id(value))
        inside = "module" if is_a(value, nn.Module) else kind
        yield from _walk(item, path + suffix, inside, seen, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if is_a(value, nn.Module):
        for held in (value._parameters, value._modules, value._buffers):
            yield from ((f".{name}", item) for name, item in held.items())
        rest = {n: v for n, v in vars(value).items() if not n.startswith("_")}
        yield from ((f".{name}", item) for name, item in rest.items())
    elif issubclass(kind, Mapping):
        yield from ((f"[{_key(key)}]", item) for key, item in pairs(value))
    elif issubclass(kind, list | tuple | set):
        yield from ((f"[{index}]", item) for index, item in enumerate(contents(value, kind)))
    elif not (issubclass(kind, type) or callable(value)):
        yield from ((f".{name}", item) for name, item in attributes(value).items())


def _key(key: object) -> str:
    return repr(key) if type(key) in (str, int, bool, float) else type(key).__name__


@dataclass
class Step:
    """One inspected step: what it starts from, and what its phases find beside the layers.

    Args:
        request: what is asked.
        model: the module that runs.
        arguments: what it is called with.
        company: what this rank has of it, where it may be spread over several.
        inspection: the inspection that this is.
        recorder: takes down the layers.
        scale: the scale of the loss.
        samples: size of the batch.
        registered: the leaves that are known before the forward.
        versions: what is not copied beforehand, and its version: a parameter, by the name of its
            layer and its own, or a tensor of the batch, by its number.
        tasks: the named losses, where there are several.
        notes: what a reader should know.
        is_differentiated: whether a backward pass is asked for and can be run.
        no_gradients, loss_path, unregistered, task_gradients, given: as in `Observation`.
        functions: who saw which parameters functions were given, where those are seen.
    """

    request: Request
    model: nn.Module
    arguments: Inputs
    company: Company
    inspection: Inspection
    recorder: Recorder
    scale: LossScale
    samples: int
    registered: Registered
    versions: list[tuple[Sequence[str], Tensor, int | None]]
    tasks: TaskLosses | None
    notes: list[str]
    is_differentiated: bool = False
    no_gradients: str = ""
    loss_path: LossPath | None = None
    unregistered: tuple[UnregisteredParameter, ...] = ()
    task_gradients: tuple[TaskGradients, ...] = field(default=())
    functions: FunctionalLayers | None = None
    given: tuple[GivenTensor, ...] = ()

    @property
    def batch(self) -> Any:
        """All that the user gave to run."""
        return self.arguments.args, self.arguments.kwargs, self.request.target

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The user's loss."""
        function: Any = self.tasks or self.request.loss
        return function  # type: ignore[no-any-return]

    @property
    def hooks(self) -> Hooks:
        """What sees the layers, once they run."""
        assert self.inspection.hooks is not None
        return self.inspection.hooks


def prepare(
    request: Request,
    model: nn.Module,
    notes: list[str],
    company: Company,
) -> Step:
    """Return the step that is about to run.

    Raises:
        InspectionError: the request cannot be carried out on this model.
    """
    state, scale = company.state, LossScale.of(request.scaler)
    arguments = Inputs.of(request.inputs)
    tensors = find_tensors((arguments.args, arguments.kwargs, request.target))
    samples = batch_size(tensors)
    recorder = Recorder(
        named_modules(model),
        request.selection,
        scale,
        samples,
        request.visitor,
        request.collectors,
    )
    note_source_lines(recorder)
    if company.on_ranks:
        from pytest_modelhealth.capture.parallel.placements import of_gradient, placement_of

        recorder.placements = Placements(placement_of, of_gradient)
    parameters = recorder.held("_parameters")
    held = ((Kind.PARAMETER, parameters), (Kind.BUFFER, recorder.held("_buffers")))
    recorder.flow.name_sources(_sources(arguments, request.target, held, state))
    named: list[tuple[Sequence[str], Tensor]] = [((lyr.name, n), t) for lyr, n, t in parameters]
    named += [((str(number),), tensor) for number, tensor in enumerate(tensors)]
    registered = Registered(model, [tensor for _, _, tensor in parameters], tensors)
    step = Step(
        request=request,
        model=model,
        arguments=arguments,
        company=company,
        inspection=Inspection(state, request.model),
        recorder=recorder,
        scale=scale,
        samples=samples,
        registered=registered,
        versions=[(name, tensor, version(tensor)) for name, tensor in named],
        tasks=TaskLosses(request.loss) if isinstance(request.loss, Mapping) else None,
        notes=[*notes, *_prepare_unregistered(recorder, registered, state)],
        given=tuple(_given(arguments)),
    )
    _refuse_fake(state, tensors)
    return step


def _sources(
    arguments: Inputs, target: Any, held: Iterable[tuple[Kind, list[Held]]], state: State
) -> Iterator[Source]:
    """Yield the batch and what the model holds with their names in the flow."""
    yield from ((Kind.INPUT, *named) for named in _inputs(arguments))
    yield from ((Kind.TARGET, *named) for named in _numbered("target", target))
    for kind, tensors in held:
        for layer, name, tensor in tensors:
            yield kind, (layer.name, name), tensor
    for tensor in (*state.leaves, *state.tensors):
        yield Kind.UNKNOWN, ("attribute",), tensor
    kept = {
        id(names): names
        for module in state.modules
        if (names := getattr(type(module).forward, "__globals__", {}))
    }
    for name, value in (item for names in kept.values() for item in [*names.items()]):
        if is_a(value, Tensor):
            yield Kind.UNKNOWN, (name,), value


def _inputs(arguments: Inputs) -> Iterator[tuple[tuple[str], Tensor]]:
    for key, value in (*enumerate(arguments.args), *arguments.kwargs.items()):
        yield from _numbered(f"input {key}", value)


def _given(arguments: Inputs) -> Iterator[GivenTensor]:
    for (name,), tensor in _inputs(arguments):
        shape = () if tensor.is_nested else tuple(tensor.shape)
        yield GivenTensor(name, shape, str(tensor.dtype).removeprefix("torch."))


def _numbered(name: str, value: Any) -> Iterator[tuple[tuple[str], Tensor]]:
    tensors = find_tensors(value)
    for index, tensor in enumerate(tensors):
        yield (name if len(tensors) == 1 else f"{name}[{index}]",), tensor


def _prepare_unregistered(recorder: Recorder, registered: Registered, state: State) -> list[str]:
    """Return a note on modules with parameters that torch does not know to be in the model."""
    others = [module for module in state.modules if module not in recorder.by_module]
    unknown = [module for module in others if not registered.knows(module)]
    if not unknown:
        return []
    types = ", ".join(sorted({type(module).__name__ for module in unknown}))
    note = (
        f"{len(unknown)} modules ({types}) are kept in plain attributes, lists or dictionaries: "
        "model.parameters() leaves them out, and they were not looked into; nn.ModuleList and "
        "nn.ModuleDict register them"
    )
    return [note]


def _refuse_fake(state: State, batch: Iterable[Tensor]) -> None:
    """Do nothing if everything that is to run has values.

    Raises:
        InspectionError: a `FakeTensorMode` is on, or a tensor was made in one.
    """
    fake = None
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        fake = "it runs in a FakeTensorMode"
    elif FakeTensor in set(map(type, (*state.leaves, *state.tensors))):
        fake = "it was made in a FakeTensorMode"
    elif FakeTensor in set(map(type, batch)):
        fake = "its batch was made in a FakeTensorMode"
    if fake:
        raise InspectionError(
            f"cannot inspect {type(state.modules[0]).__name__}: {fake}, whose tensors have shapes "
            "and no values, so there is nothing to observe; make model and batch outside the mode, "
            "and inspect them there"
        )
