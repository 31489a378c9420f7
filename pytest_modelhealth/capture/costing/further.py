"""Measures the costs of a model, beside an inspection or in its place."""

from __future__ import annotations

from dataclasses import replace

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.capture.step.loss_value import no_loss
from pytest_modelhealth.report import Costs, Observation


class FurtherRun:
    """One more run of an inspected model, begun before: the inspection may write to its batch.

    Args:
        engine: runs the model.
        request: what is inspected.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = replace(
            request, inputs=copied_batch(request.inputs), target=copied_batch(request.target)
        )

    def after(self, observation: Observation) -> Observation:
        """Return what the inspection saw, with what the same step costs."""
        if self._engine.why_not_measured:
            return replace(observation, costs=Costs(why_not=self._engine.why_not_measured))
        request = self._request
        arguments = Inputs.of(request.inputs)
        batch = arguments.args, arguments.kwargs, request.target
        try:
            beside = Beside(self._engine.module(request.model), request.loss)
            with beside.put_back(batch, evaluation=False, watched=True, fused=True):
                seen = self._engine.measure(request)
        except Exception as error:  # noqa: BLE001 - of a model that has just run without a meter
            return replace(observation, costs=Costs(why_not=_only_measured(error)))
        return replace(observation, costs=seen.costs)


def measured_forward(engine: Engine, request: Request) -> Observation:
    """Return what a forward without a loss shows, with what it costs.

    Where that cannot be measured it is inspected, and the costs say why.

    Raises:
        InspectionError: the request cannot be carried out on this model.
        Exception: whatever the user's model raises, untouched.
    """
    request = replace(request, target=None, loss=no_loss, backward=False)
    why_not = engine.why_not_measured
    if not why_not:
        try:
            return engine.measure(request)
        except Exception as error:  # noqa: BLE001 - if it is the model's own, it comes again
            why_not = _only_measured(error)
    return replace(engine.run(request), costs=Costs(why_not=why_not))


def _only_measured(error: Exception) -> str:
    return (
        "costs were not measured: while operations and saved tensors are counted, the model raises "
        f"{type(error).__name__}: {error}".partition("\n")[0]
    )
