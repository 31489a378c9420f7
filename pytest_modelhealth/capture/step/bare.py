"""Runs of a model beside an inspected one, also in another dtype; everything is as it was after."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.company import in_company, refuse_again_and_again
from pytest_modelhealth.capture.step.guard import Guard, Inspection, exited_whole
from pytest_modelhealth.capture.step.run import eagerly
from pytest_modelhealth.capture.step.state import Memory, State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import type_name


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model.

    Tensors that it computed and keeps in attributes, as a pruned layer its weight, are cut off from
    their graph in it.

    Raises:
        InspectionError: it cannot be copied.
    """
    held = [value for module in model.modules() for value in vars(module).values()]
    memo: dict[int, Tensor] = {
        id(value): value.detach().clone()
        for value in held
        if type(value) is Tensor and not value.is_leaf
    }
    # torch itself cannot copy buffers that are not initialised
    lazy = [buffer for buffer in State(model).lazy if isinstance(buffer, UninitializedBuffer)]
    memo |= {id(b): UninitializedBuffer(device=b.device, dtype=b.dtype) for b in lazy}  # type: ignore[call-arg]
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InspectionError(
            f"{type(model).__name__} cannot be copied, and so not be run in another way: {error}"
        ) from error


def converted_batch(
    batch: Any, dtype: torch.dtype | None, device: torch.device | None = None
) -> Any:
    """Return a copy of a batch with its floating tensors in `dtype`, and all on `device`.

    Complex ones get the complex dtype of that width.
    """
    result = copied_batch(batch)
    for tensor in find_tensors(result) if result is not batch else ():
        if tensor.is_leaf:
            if device is not None:
                tensor.data = tensor.data.to(device)
            if dtype is not None and tensor.is_complex():
                tensor.data = tensor.data.to(dtype.to_complex())
            elif dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return result


class Beside:
    """A model that is run again and again, each time from the state that it has now.

    The parameters are copied once, which takes the memory that their gradients took in the
    inspection: a run may write to them. Modules in a loss are put back too, such as keep a mean.

    Raises:
        InspectionError: `fully_shard` cut its parameters, which cannot be copied and put back.
    """

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self.model = model
        losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]
        owners = [getattr(one, "__self__", one) for one in losses]
        self._all = nn.ModuleList([model, *(o for o in owners if isinstance(o, nn.Module))])
        self._state = State(self._all)
        refuse_again_and_again(self._all)
        self._parameters = Memory([] if self.is_lazy else self._state.leaves)

    @property
    def is_lazy(self) -> bool:
        """Whether parameters have no values before the first run."""
        return bool(self._state.lazy)

    @property
    def may_train(self) -> bool:
        """Whether a module is in training mode."""
        return any(getattr(module, "training", True) for module in self._state.modules)

    @contextmanager
    def put_back(
        self, batch: Any, *, evaluation: bool, watched: bool = False, fused: bool = False
    ) -> Iterator[Guard]:
        """Put everything back that happens to the model inside, however it ends.

        Args:
            watched: whether an engine runs it inside, which keeps runs apart by itself.
            fused: whether torch's attention may take its fused path.
        """
        with exited_whole(in_company(self._all, self._state)) as company:
            inspection = Inspection(company.state, self.model)
            apart = [] if watched else [inspection.apart(), eagerly()]
            switched = [_silenced()] if fused else [_unfused(), _silenced()]
            untouched = inspection.untouched(batch, self._parameters)
            with exited_whole(*apart, *switched, untouched) as guard:
                if evaluation:
                    self.model.eval()
                yield guard


@contextmanager
def _unfused() -> Iterator[None]:
    """Let torch's attention run as in training: fused, it passes over padded rows."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


_silenced = partial(warnings.catch_warnings, action="ignore")
"""Keeps warnings of changed batches to ourselves: a deviation over one sample, say."""


@contextmanager
def in_mode(model: Any, training: bool | None) -> Iterator[None]:
    """Have `model` be in a mode inside; ``None`` leaves it in its own.

    A `train` of the user's own is called, as it may keep parts frozen; what it changes, values of
    parameters among them, is put back.

    Raises:
        InspectionError: the model has no modes.
    """
    if training is None:
        yield
        return
    if getattr(model, "training", None) is None:  # exported, or run by another runtime
        raise InspectionError(_ONE_MODE.format(type_name(model)))
    state = State(model)
    kinds = [getattr(type(m), name) for m in state.modules for name in ("train", "eval")]
    are_own = any(not getattr(one, "__module__", "").startswith("torch.") for one in kinds)
    guard = Guard(state, values=are_own, numbers=False)
    with exited_whole(guard):
        try:
            model.train(training)
        except NotImplementedError:  # the module of an exported program
            raise InspectionError(_ONE_MODE.format(type_name(model))) from None
        yield


_ONE_MODE = (
    "{} is in the mode it was made in, for good: leave training out, or inspect the model that it "
    "was made of"
)
