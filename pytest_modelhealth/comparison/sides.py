"""What can be compared with a reference, and how each kind is run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.capture import Inputs, Request, find_engine, hinted
from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.engine import Engine
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.tensors import TensorStore, find_tensors
from pytest_modelhealth.capture.step.bare import converted_batch
from pytest_modelhealth.capture.step.company import has_process_group
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.comparison.trace import Keeper, Trace
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import is_quantised as is_quantised_module
from pytest_modelhealth.layers import named_modules, own_parameters
from pytest_modelhealth.report import Observation
from pytest_modelhealth.statistics.dense import is_quantised
from pytest_modelhealth.wings import wing


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


def reference_side(model: Any) -> Side:
    """Return the reference, which must be a model.

    Raises:
        InspectionError: it is none.
    """
    side = None if isinstance(model, Mapping) else _side(model, "reference")
    if side is None or not side.engine.runs_in_torch:
        raise InspectionError(
            f"the reference is a {type(model).__name__}: it must be a model that runs in PyTorch; "
            "a state_dict, an ONNX model, a frozen script or a compiled package can only be the "
            "candidate"
        )
    return side


def candidate_side(candidate: Any, reference: Any) -> Side:
    """Return the candidate: a model, a `state_dict` for a copy of the reference, or ONNX.

    Raises:
        InspectionError: it is nothing of these, or the `state_dict` does not fit the reference.
    """
    if not isinstance(candidate, Mapping):
        return _side(candidate, "candidate")
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
    return Side(loaded, "candidate", find_engine(loaded), note)


def _side(model: Any, name: str) -> Side:
    compiled = isinstance(model, nn.Module) and any(map(is_compiled, model.modules()))
    try:
        engine = find_engine(model, compiled="observe" if compiled else "eager")
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
            observation = _with_compiled_outputs(side, own, keeper, observation)
        if side.engine.flat_outputs:
            observation = replace(observation, loss=None)
    except Exception as error:
        error.add_note(f"raised while the {side.name} of compare(reference, candidate, ...) ran")
        raise
    if observation.errors:
        raise InspectionError(
            f"could not keep what the {side.name} computes: {observation.errors[0]}"
        )
    engine = side.engine
    return Trace(
        observation,
        keeper.entries,
        keeper.output,
        engine.flat_outputs,
        shows_functions=engine.shows_functions,
        in_torch=engine.runs_in_torch,
        rounds=side.quantised,
        names_layers=engine.runs_in_torch or side.model.program.names_layers,
    )


def _with_compiled_outputs(
    side: Side, request: Request, keeper: Keeper, observation: Observation
) -> Observation:
    """Take outputs, buffers and parameter gradients from compiled code, which nothing watches."""
    own = Keeper(keeper.store)
    request = replace(request, visitor=own)
    bare = run_step(request, side.model, [], watch=lambda recorder: nullcontext(Hooks(recorder)))
    for key, entry in own.entries.items():
        if key.role in ("outputs", "buffers", "parameter_gradients"):
            moment = keeper.entries[key].moment if key in keeper.entries else len(keeper.entries)
            keeper.entries[key] = entry._replace(moment=moment)
    return replace(observation, loss=bare.loss)


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
