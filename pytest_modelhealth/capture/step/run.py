"""One inspected step: forward, loss, backward, and what was seen, on a model left untouched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pytest_modelhealth.capture.engine import Request
from pytest_modelhealth.capture.observing.autograd_graph import loss_path
from pytest_modelhealth.capture.observing.flow import Source, counter
from pytest_modelhealth.capture.observing.function_mode import FunctionalLayers
from pytest_modelhealth.capture.observing.graphs import note_source_lines
from pytest_modelhealth.capture.observing.hooks import Hooks, observed
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.records import layer_records
from pytest_modelhealth.capture.observing.tensors import (
    NEVER_LAZY,
    LossScale,
    find_tensors,
    is_a,
    is_capturing,
    noted,
    version,
)
from pytest_modelhealth.capture.step.batch import Inputs, batch_size
from pytest_modelhealth.capture.step.company import Company, in_company
from pytest_modelhealth.capture.step.guard import Inspection, Leaves, collected_rarely, exited_whole
from pytest_modelhealth.capture.step.loss import TaskLosses, compute_loss, may_need_target
from pytest_modelhealth.capture.step.state import State, graph_leaves
from pytest_modelhealth.capture.step.unregistered import Registered
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import ensure_match, named_modules
from pytest_modelhealth.report import (
    GivenTensor,
    Kind,
    LossPath,
    Observation,
    TaskGradients,
    UnregisteredParameter,
)
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.wings import wing

Watch = Callable[[Recorder], AbstractContextManager[Hooks]]
"""Lets a recorder see the layers of a model while it runs."""


@contextmanager
def observed_eagerly(recorder: Recorder) -> Iterator[Hooks]:
    """Let `recorder` see every layer by hooks."""
    with eagerly(), observed(recorder) as hooks:
        yield hooks


_SHALLOW = 10_000
"""Graphs of fewer nodes are freed where they are."""

_STACK = 1 << 29
"""Bytes of stack to free others on; what is not touched takes no memory."""


@contextmanager
def deep_graphs_freed() -> Iterator[list[Any]]:
    """Free the graph of a run, whose last nodes are put into the list that is given.

    In torch 2.13 nodes that Python has looked at are freed one inside the other. Some 50,000 in a
    row overflow a stack of 8 MiB, whether or not they are watched. Whoever else holds a part of the
    graph must have let go of it when the context ends.
    """
    first = counter()
    nodes: list[Any] = []
    yield nodes
    if counter() - first < _SHALLOW:
        return
    size = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=nodes.clear)
        thread.start()
        thread.join()
    except RuntimeError:  # no room for such a stack: it is freed here, as without us
        nodes.clear()
    finally:
        threading.stack_size(size)


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled models eagerly: a warm one ignores hooks that were added later.

    Without torch._dynamo, which takes a second to import, nothing is compiled yet: the stance is
    taken when a forward first compiles something.
    """
    compile_ = torch.compile
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
            return

        @wraps(compile_)
        def compile_eagerly(*args: Any, **kwargs: Any) -> Any:
            torch.compile = compile_
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            return compile_(*args, **kwargs)

        stack.callback(setattr, torch, "compile", compile_)
        torch.compile = compile_eagerly
        yield


def run_step(
    request: Request,
    model: nn.Module,
    notes: list[str],
    watch: Watch = observed_eagerly,
    state: State | None = None,
) -> Observation:
    """Run the request's batch through `model`, which stands for the request's, watched.

    Args:
        notes: what a reader should know of this model.
        watch: hooks on every module, unless a kind of model has another way.
        state: what `model` holds, where the caller has looked already.

    Raises:
        InspectionError: the request cannot be carried out on this model.
        Exception: whatever the user's model or loss raises, untouched.
    """
    if is_capturing():
        raise InspectionError(
            f"cannot inspect {type(request.model).__name__} while a CUDA graph is captured: "
            "reading a tensor would end the capture; inspect it before or after torch.cuda.graph"
        )
    with (
        deep_graphs_freed() as graph,
        exited_whole(collected_rarely(), in_company(model, state)) as company,
    ):
        return _Step(request, model, notes, company).run(watch, graph)


class _Step:
    """What an inspected step starts from, and what its phases find beside the layers."""

    def __init__(
        self, request: Request, model: nn.Module, notes: list[str], company: Company
    ) -> None:
        self._request, self._model, self._company = request, model, company
        self._arguments = arguments = Inputs.of(request.inputs)
        self._batch = arguments.args, arguments.kwargs, request.target
        tensors, state = find_tensors(self._batch), company.state
        self._samples, self._scale = batch_size(tensors), LossScale.of(request.scaler)
        self._recorder = recorder = Recorder(
            named_modules(model),
            request.selection,
            self._scale,
            self._samples,
            request.visitor,
        )
        note_source_lines(recorder)
        if company.on_ranks:
            recorder.placement_of = wing("capture.parallel.placements:placement_of")
        parameters, buffers = recorder.held()
        held = ((Kind.PARAMETER, parameters), (Kind.BUFFER, buffers))
        recorder.flow.name_sources(_sources(arguments, request.target, held, state))
        # what is not copied beforehand, and its version
        self._parameters, self._tensors = parameters, [p for _, _, p in parameters] + tensors
        self._versions = _versions(self._tensors)
        self._registered = Registered(model, self._tensors[: len(parameters)], tensors)
        self._tasks = TaskLosses(request.loss) if isinstance(request.loss, Mapping) else None
        self._notes = [*notes, *company.notes]
        # modules with parameters that torch does not know to be in the model
        others = [module for module in state.modules if module not in recorder.by_module]
        unknown = [module for module in others if not self._registered.knows(module)]
        if unknown:
            types = ", ".join(sorted({type(module).__name__ for module in unknown}))
            self._notes.append(
                f"{len(unknown)} modules ({types}) are kept in plain attributes, lists or "
                "dictionaries: model.parameters() leaves them out, and they were not looked into; "
                "nn.ModuleList and nn.ModuleDict register them"
            )
        self._functions: FunctionalLayers | None = None
        self._is_differentiated = False
        self._no_gradients = ""
        self._loss_path: LossPath | None = None
        self._unregistered: tuple[UnregisteredParameter, ...] = ()
        self._task_gradients: tuple[TaskGradients, ...] = ()
        shapes = [(n, t, () if t.is_nested else t.shape) for (n,), t in _named_inputs(arguments)]
        self._given = tuple(
            GivenTensor(name, tuple(shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor, shape in shapes
        )
        _refuse_fake(state, tensors)

    def run(self, watch: Watch, graph: list[Any]) -> Observation:
        """Run all phases; `graph` takes the last nodes of their graph, which nothing else holds."""
        request, recorder = self._request, self._recorder
        inspection = Inspection(self._company.state, request.model)
        with exited_whole(
            inspection.apart(), inspection.untouched(self._batch), watch(recorder)
        ) as hooks:
            inspection.hooks = hooks
            self._functions = hooks.functions if hooks.functions.is_on else None
            output = self._arguments.call(self._model)
            if request.visitor is not None:
                request.visitor.see_output(output)
            inspection.doing = "loss"
            loss, ends = self._run_loss(output, hooks)
            del output
            with self._company.parameters_shown():  # as the forward left them
                recorder.note_modules()
                parameters, buffers = recorder.held()
                recorder.add_state("buffers", buffers)
                recorder.add_state("parameters", parameters)
            graph += [*ends, None if loss is None else loss.grad_fn]
            inspection.doing = "backward pass"
            self._run_backward(loss, ends, parameters, hooks)
        return self._settle()

    def _run_loss(self, output: Any, hooks: Hooks) -> tuple[Tensor | None, list[Any]]:
        """Return the loss, ``None`` where there is none, and the nodes that the output ends in."""
        function: Any = self._tasks or self._request.loss
        target, returned = self._request.target, find_tensors(output)
        with torch._C.DisableTorchFunction():
            ends = [tensor.grad_fn for tensor in returned]  # the loss may write to them
        loss = compute_loss(output, target, function)
        if function is not None and loss is not None and hooks.functions.is_on:
            targets = find_tensors(target) if may_need_target(function) else []
            with torch._C.DisableTorchFunction():
                uses_target = self._recorder.flow.has_met(targets) if targets else None
                self._loss_path = replace(loss_path(loss, ends), uses_target=uses_target)
        is_given = function is not None or any(loss is tensor for tensor in returned)
        self._recorder.flow.finish(returned, loss, is_given)
        if loss is not None and not loss.is_meta:
            self._recorder.add_loss(loss)
        return loss, [tensor.grad_fn for tensor in returned if tensor.grad_fn is not None]

    def _run_backward(
        self, loss: Tensor | None, ends: Sequence[Any], parameters: list[Held], hooks: Hooks
    ) -> None:
        """Differentiate `loss` where that is asked for and possible.

        Raises:
            InspectionError: gradients were demanded, and there is no path for them, or `backward`
                is nothing of the kind.
        """
        self._settle_backward(loss, bool(ends), parameters)
        if loss is None or not self._is_differentiated:
            return
        if loss.requires_grad:
            if self._tasks is not None:
                self._task_gradients, notes = self._tasks.gradients(parameters, self._scale)
                self._notes += notes
            self._differentiate(self._scale.apply(loss), parameters, hooks)
        if loss.requires_grad or self._loss_path is not None:
            company = self._company
            with company.parameters_shown():
                self._recorder.note_unreached(
                    parameters, lambda: company.known(graph_leaves(ends)), hooks.functions.read
                )

    def _settle_backward(
        self, loss: Tensor | None, has_graph: bool, parameters: list[Held]
    ) -> None:
        """Decide whether there is a backward pass, and say why no parameter gets a gradient."""
        backward = self._request.backward
        if not (backward is None or isinstance(backward, bool) or callable(backward)):
            raise InspectionError(
                f"backward must be True, False, None or a function backward(loss), not {backward!r}"
            )
        if backward is False:
            return
        why = remedy = ""
        if not torch.is_grad_enabled():
            why = "gradients are off here (torch.no_grad() or inference_mode())"
            remedy = "inspect outside of it"
        elif loss is None:
            why = "the output holds no floating-point number to differentiate"
            remedy = "give a loss, or return what the output is computed from"
        if backward is not None and (loss is None or why or not loss.requires_grad):
            raise InspectionError(
                f"no backward pass: {why or 'the loss depends on nothing that requires a gradient'}"
                "; leave backward out to inspect the forward pass alone"
            )
        if why:
            self._notes.append(f"no backward pass: {why}")
        self._is_differentiated = not why
        if parameters:
            self._no_gradients = (
                f"{why}; {remedy}" if why else _why_no_gradients(loss, has_graph, parameters)
            )

    def _differentiate(self, loss: Tensor, parameters: list[Held], hooks: Hooks) -> None:
        """Run the backward pass; take gradients, and the leaves it reached that are no parameters.

        No list of leaves may outlive a function: `Registered` asks what else holds one.
        """
        backward, recorder, company = self._request.backward, self._recorder, self._company
        known = set(map(id, company.state.leaves))
        leaves = graph_leaves([loss.grad_fn])
        unknown = [leaf for leaf in leaves if id(leaf) not in known]
        with Leaves(unknown) as others, hooks.differentiating():
            others.set_aside()
            if callable(backward):
                backward(loss)
            else:
                loss.backward()
            del unknown
            # a function mode would see each attribute
            with torch._C.DisableTorchFunction(), company.parameters_shown():
                gradients = [(lyr, n, g) for lyr, n, p in parameters if (g := p.grad) is not None]
                if self._request.averager is not None:
                    gradients = self._request.averager(gradients)
                elif company.on_ranks:
                    summed = wing("capture.parallel.placements:summed")
                    gradients = [(layer, name, summed(g)) for layer, name, g in gradients]
                recorder.add_state("parameter_gradients", gradients)
                with noted(recorder.errors, "rows of zeros: "):
                    recorder.note_zero_slices()
                with noted(recorder.errors, "unregistered parameters: "):
                    line = recorder.flow.line_of_leaf
                    self._unregistered = self._registered.leaves_out(leaves, line)

    def _settle(self) -> Observation:
        """Return all that was seen.

        Raises:
            LayerNotFoundError: a rule of the request matches no layer.
        """
        recorder, notes = self._recorder, self._notes
        versions = zip(self._versions, _versions(self._tensors), strict=True)
        for index in [i for i, (was, now) in enumerate(versions) if was != now and was is not None]:
            what = f"tensor {index - len(self._parameters)} of the batch"
            if index < len(self._parameters):
                layer, own, _ = self._parameters[index]
                what = f"the parameter {dotted(layer.name, own)!r}"
            notes.append(f"the forward wrote to {what}, which is not undone")
        named = ((layer.name, layer.module) for layer in recorder.layers.values())
        ensure_match(self._request.selection.rules, named, self._request.model)
        if self._scale.factor != 1.0 and "parameter_gradients" in recorder.own:
            gradients = [e for e in recorder.own["parameter_gradients"].entries if e is not None]
            overflowed = sum(entry.statistics.nonfinite_count > 0 for entry in gradients)
            if overflowed:
                notes.append(
                    f"under the loss scale of {self._scale.factor:g} the gradients of {overflowed} "
                    f"of {len(gradients)} parameters are not finite: GradScaler would skip this "
                    "step and lower the scale"
                )
        return observation_of(
            recorder,
            backward=self._is_differentiated,
            functions=self._functions,
            notes=notes,
            loss=recorder.loss,
            no_gradients=self._no_gradients,
            samples=self._samples,
            loss_path=self._loss_path,
            unregistered=self._unregistered,
            tasks=self._task_gradients,
            own_functions=recorder.flow.has_own_functions,
            has_zero_gradients=recorder.has_zero_gradients,
            sample_deviation=recorder.sample_deviation,
            flow=recorder.flow.flow(),
            given=self._given,
        )


def observation_of(
    recorder: Recorder,
    *,
    backward: bool,
    notes: Sequence[str],
    functions: FunctionalLayers | None = None,
    **more: Any,
) -> Observation:
    """Return what a recorder took down, which holds nothing of the model any longer."""
    layers = layer_records(recorder, backward=backward, functions=functions)
    recorder.let_go()
    return Observation(
        # what waits on a device is tensors, which a report must not hold either
        layers=dict(layers) if recorder.reader.ledger.has_queued else layers,
        model_type=recorder.layers[""].type_name,
        backward=backward,
        notes=(*notes, *recorder.notes),
        errors=tuple(recorder.errors),
        loss_calls=tuple(recorder.loss_calls.seen),
        **more,
    )


def _versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return the version of each tensor, of plain ones in a fourth of the time."""
    if NEVER_LAZY.issuperset(map(type, tensors)):
        with suppress(RuntimeError):  # one was made in inference mode
            return [*map(attrgetter("_version"), tensors)]
    return [*map(version, tensors)]


def _sources(
    arguments: Inputs, target: Any, held: Iterable[tuple[Kind, list[Held]]], state: State
) -> Iterator[Source]:
    """Yield the batch and what the model holds with their names in the flow."""
    yield from ((Kind.INPUT, *named) for named in _named_inputs(arguments))
    yield from ((Kind.TARGET, *named) for named in _named("target", target))
    for kind, tensors in held:
        yield from ((kind, (layer.name, name), tensor) for layer, name, tensor in tensors)
    for tensor in (*state.leaves, *state.tensors):
        yield Kind.UNKNOWN, ("attribute",), tensor
    forwards = [type(module).forward for module in state.modules]
    kept = {id(names): names for f in forwards if (names := getattr(f, "__globals__", {}))}
    for name, value in (item for names in kept.values() for item in [*names.items()]):
        if is_a(value, Tensor):
            yield Kind.UNKNOWN, (name,), value


def _named_inputs(arguments: Inputs) -> Iterator[tuple[tuple[str], Tensor]]:
    for key, value in (*enumerate(arguments.args), *arguments.kwargs.items()):
        yield from _named(f"input {key}", value)


def _named(name: str, value: Any) -> Iterator[tuple[tuple[str], Tensor]]:
    tensors = find_tensors(value)
    for index, tensor in enumerate(tensors):
        yield (name if len(tensors) == 1 else f"{name}[{index}]",), tensor


def _refuse_fake(state: State, batch: list[Tensor]) -> None:
    """Do nothing if everything that is to run has values.

    Raises:
        InspectionError: a `FakeTensorMode` is on, or a tensor was made in one.
    """
    where = ""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        where = "it runs"
    elif FakeTensor in set(map(type, (*state.leaves, *state.tensors))):
        where = "it was made"
    elif FakeTensor in set(map(type, batch)):
        where = "its batch was made"
    if where:
        raise InspectionError(
            f"cannot inspect {type(state.modules[0]).__name__}: {where} in a FakeTensorMode, whose "
            "tensors have shapes and no values, so there is nothing to observe; make model and "
            "batch outside the mode, and inspect them there"
        )


def _why_no_gradients(loss: Tensor | None, has_graph: bool, parameters: list[Held]) -> str:
    """Return why `loss` gives no parameter a gradient and what would, ``""`` where it may give one.

    An output of the model may have a graph all the same.
    """
    if loss is None or loss.grad_fn is not None or any(loss is p for _, _, p in parameters):
        return ""
    if not any(parameter.requires_grad for _, _, parameter in parameters):
        return "every parameter is frozen (requires_grad=False); unfreeze what is trained"
    if has_graph:
        return (
            "the loss is a new tensor without a graph, although the output has one; compute it "
            "from the output without .detach(), .item() or torch.tensor(...)"
        )
    return (
        "neither output nor loss depends on a parameter; look for .detach(), .item(), .numpy(), "
        "argmax or no_grad in the forward"
    )
