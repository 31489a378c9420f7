"""Runs of a model beside an inspected one, after which everything is as it was, parameters too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.capture.step.apart import Inspection
from pytest_modelhealth.capture.step.forward import eagerly
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.capture.step.memory import Memory
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.capture.step.untouched import untouched


class Beside:
    """A model that is run again and again, each time from the state that it has now.

    The parameters are copied once, which takes the memory that their gradients took in the
    inspection: a run may write to them.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._state = State(model)
        self._parameters = Memory([] if self.is_lazy else self._state.leaves)

    @property
    def is_lazy(self) -> bool:
        """Whether parameters have no values before the first run."""
        return bool(self._state.lazy)

    @contextmanager
    def put_back(self, batch: Any, *, evaluation: bool, watched: bool = False) -> Iterator[None]:
        """Put everything back that happens to the model inside, however it ends.

        Args:
            batch: what it is run on.
            evaluation: whether it is in evaluation mode inside.
            watched: whether an engine runs it inside, which keeps runs apart by itself.
        """
        inspection = Inspection(self._state, self.model)
        apart = [] if watched else [inspection.apart(), eagerly()]
        with exited_whole(self._written_back(), untouched(inspection, batch), *apart, _unfused()):
            if evaluation:
                self.model.eval()
            yield

    @contextmanager
    def _written_back(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._parameters.restore()


@contextmanager
def _unfused() -> Iterator[None]:
    """Let torch's attention run as in training: fused, it passes over padded rows."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
