"""Keeps inspections that run at the same time apart, and refuses two of one model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.step.state import MOMENTS, State
from pytest_modelhealth.errors import InspectionError

_lock = threading.Lock()
_running: list[Inspection] = []
_last_end = 0


class Inspection:
    """An inspection that has begun, in the thread that makes it.

    Attributes:
        state: what its model holds.
        doing: what of the user's runs now.
        hooks: what sees it, once there is something to see.
        random_state: that of all random generators when the first of those that run now, in
            whatever threads, began: what they all put back.
    """

    def __init__(self, state: State, model: nn.Module) -> None:
        self.state = state
        self.doing = "forward"
        self.hooks: Hooks | None = None
        self.random_state: dict[str, Any] | None = None
        self._model = model
        self._thread = threading.current_thread()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run apart from all others, those that this one runs inside among them.

        Raises:
            InspectionError: one that runs has modules or tensors in common with this.
        """
        global _last_end
        with _lock:
            here = [other for other in _running if other._thread is self._thread]
            for other in _running:
                self._refuse_beside(other)
            if self.state.moment < _last_end and not self.state.is_as_it_was():
                raise InspectionError(
                    f"cannot inspect {self._label}: it was inspected in another thread until now, "
                    f"and was looked at meanwhile; {_NEXT_MOVE}"
                )
            if _running and not here:
                self.random_state = _running[0].random_state
            _running.append(self)
        try:
            with ExitStack() as stack:
                if here and here[-1].hooks is not None:
                    stack.enter_context(here[-1].hooks.blind())
                yield
        finally:
            with _lock:
                _running.remove(self)
                _last_end = next(MOMENTS)

    @property
    def _label(self) -> str:
        return type(self._model).__name__

    def _refuse_beside(self, other: Inspection) -> None:
        common = _common(self.state, other.state)
        if common is None:
            return
        if self._model is other._model:
            whole = f"{self._label} is being inspected already"
        else:
            whole = f"{other._label}, with which it shares {common}, is being inspected already"
        place = f"in the thread {other._thread.name!r}"
        if other._thread is self._thread:
            layer = other.hooks.running_layer if other.hooks is not None else None
            inside = f", in the layer {layer!r}" if layer and other.doing == "forward" else ""
            place = f"and this call comes from its {other.doing}{inside}"
        raise InspectionError(f"cannot inspect {self._label}: {whole}, {place}; {_NEXT_MOVE}")


def is_inspecting() -> bool:
    """Whether an inspection is running in this thread."""
    if not _running:
        return False
    here = threading.current_thread()
    return any(inspection._thread is here for inspection in _running)


_NEXT_MOVE = (
    "one inspection of a model at a time: make the other one before or after it, or on a copy, "
    "copy.deepcopy(model)"
)


def _common(a: State, b: State) -> str | None:
    """Return what two models have in common, if anything; a module before tensors."""
    held = {id(thing) for thing in _things(b)}
    shared = next((thing for thing in _things(a) if id(thing) in held), None)
    if shared is None:
        return None
    if isinstance(shared, nn.Module):
        return f"a module ({type(shared).__name__})"
    kind = "parameter" if isinstance(shared, nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(shared.shape)}"


def _things(state: State) -> list[nn.Module | Tensor]:
    return [*state.modules, *state.leaves, *state.tensors]
