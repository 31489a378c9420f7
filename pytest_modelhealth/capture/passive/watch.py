"""`PassiveWatch`: sees the steps of a training that the user runs, one at a time."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

from torch import nn

from pytest_modelhealth.capture.observing.cuda_graphs import is_capturing
from pytest_modelhealth.capture.passive.compiled import CompiledObjects
from pytest_modelhealth.capture.passive.step import PassiveStep, WatchedStep
from pytest_modelhealth.capture.step.apart import is_inspecting
from pytest_modelhealth.capture.step.interruption import uninterrupted
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection

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
