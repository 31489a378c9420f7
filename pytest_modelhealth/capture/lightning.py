"""A `LightningModule`: a batch that comes alone goes into its `training_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from pytest_modelhealth.capture.eager import EagerEngine
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.step.training_step import (
    is_lightning,
    is_own,
    is_run_by_training_step,
    run_by_training_step,
)
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation


class LightningEngine(Engine):
    """Runs a `LightningModule` as any other module, by its `training_step` where that is asked for.

    What it logs goes nowhere, and no trainer is needed.
    """

    precedence: ClassVar[int] = 1

    def __init__(self) -> None:
        self._eager = EagerEngine()

    def supports(self, model: object) -> bool:
        """Whether `model` is a `LightningModule`."""
        return is_lightning(model)

    @contextmanager
    def called(self, request: Request) -> Iterator[Request]:
        """Have a call of the model run its `training_step`, if the request is one for that.

        It returns what the forward returned meanwhile, too: most such steps return no more than a
        number, which tells no sample from another.
        """
        with self._called(request, with_outputs=True) as prepared:
            yield prepared

    @contextmanager
    def _called(self, request: Request, *, with_outputs: bool = False) -> Iterator[Request]:
        if not is_run_by_training_step(request):
            yield request
            return
        with run_by_training_step(request, with_outputs=with_outputs) as prepared:
            yield prepared

    def run(self, request: Request) -> Observation:
        """Run the batch with hooks on every module that can have them."""
        return self._run(request, self._eager.run)

    def measure(self, request: Request) -> Observation:
        """Run the batch with hooks that tell which layer runs, and measure what that costs."""
        return self._run(request, self._eager.measure)

    def _run(self, request: Request, run: Callable[[Request], Observation]) -> Observation:
        try:
            with self._called(request) as prepared:
                return run(prepared)
        except InspectionError:
            raise
        except Exception as error:
            note = _note(request, str(error))
            if note and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise


def _note(request: Request, message: str) -> str:
    """Return what to say of an exception, by what ran; ``""`` if there is nothing to say."""
    name = type(request.model).__name__
    if is_run_by_training_step(request):
        if "attached to a `Trainer`" in message:
            return (
                f"No trainer runs here. If training_step of {name} needs one, attach it first, "
                "module.trainer = Trainer(...)."
            )
        return (
            f"The batch went into training_step of {name}, as it came alone; with loss=..., "
            "inputs and target go into its forward and the loss."
        )
    if request.loss is None and is_own(request.model, "training_step"):
        return (
            f"{name} steps its optimizers itself (automatic_optimization=False), so the batch went "
            "into its forward; run_step(batch=batch) runs its training_step."
        )
    return ""
