"""Every parameter that gets a gradient is held by an optimizer, and every one held can get one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.training.contract.step_check import StepCheck, listed

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped, SteppedParameter, Violation
    from pytest_modelhealth.settings import Settings


class TrainedParameters(StepCheck):
    """What should learn is in the optimizer."""

    name = "trained_parameters"
    summary = "The optimizer holds every trainable parameter that gets a gradient."
    rank = 60
    definition = (
        "A violation: an optimizer that was given holds none of the model's parameters; a "
        "parameter gets a gradient that is not zero, is held by no optimizer that was given or "
        "stepped, and does not move otherwise; a parameter is held, and its layer only ran with "
        "gradients off, unless something else moves it, as a moving average is."
    )
    source = "exact: of 35 healthy and look-alike steps of the first measurement none breaks it"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Violation]:
        """Yield what is not held, then what is held in vain."""
        if _holds_none(stepped):
            yield self._none(stepped, observation)
            return
        if stepped.strays:
            yield self._strays(stepped, observation)
        missing = [p for p in stepped.parameters if _is_missing(p)]
        if missing:
            yield self._missing(missing, stepped, observation)
        unreached = [p for p in stepped.parameters if _is_unreached(p, stepped)]
        if unreached:
            yield self._unreached(unreached, observation)

    def _none(self, stepped: Stepped, observation: Observation) -> Violation:
        held = sum(optimizer.holds for optimizer in stepped.optimizers)
        kind = stepped.optimizers[0].type_name
        return self.violation(
            place(observation),
            f"{kind} holds {held} tensors, and none of them is one of the model's "
            f"{len(stepped.parameters)} parameters: nothing of it is in an optimizer",
            value=0.0,
            cause="the optimizer was made from another model or copy, before parameters were "
            "replaced, or from a generator that was used up: make it after the model is complete, "
            "from list(model.parameters())",
            independent=True,
        )

    def _strays(self, stepped: Stepped, observation: Observation) -> Violation:
        layer = stepped.strays[0].rpartition(".")[0]
        return self.violation(
            place(observation, layer),
            f"{len(stepped.strays)} parameters get a gradient, and no optimizer made before knows "
            f"of them: {listed(stepped.strays)}",
            value=float(len(stepped.strays)),
            cause="modules in a plain list or dictionary are not registered (use nn.ModuleList, "
            "nn.ModuleDict), or parameters are made, or replaced by new ones, in the forward or "
            "the step: make the optimizer after them, and write into them in place",
            independent=True,
        )

    def _missing(
        self, missing: list[SteppedParameter], stepped: Stepped, observation: Observation
    ) -> Violation:
        names = [p.name for p in missing]
        layers = list(dict.fromkeys(p.layer for p in missing))
        foreign = sum(optimizer.foreign for optimizer in stepped.optimizers)
        details = (
            [f"the optimizer holds {foreign} tensors that are not the model's"] if foreign else []
        )
        total = sum(p.trainable for p in stepped.parameters)
        return self.violation(
            place(observation, layers[0]),
            f"{len(missing)} of {total} trainable parameters get a gradient and are "
            f"{'in no optimizer' if stepped.optimizers else 'not moved by the step'}, so that they "
            f"never learn: {listed(names)}",
            value=float(len(missing)),
            tensor=missing[0].own,
            cause=(
                "they were made or replaced after the optimizer was, which holds the old ones"
                if foreign
                else "the parameter groups leave them out, or they were made after the optimizer; "
                "what should not learn is frozen by requires_grad_(False)"
            ),
            affected=layers[1:],
            independent=True,
            details=details,
        )

    def _unreached(self, unreached: list[SteppedParameter], observation: Observation) -> Violation:
        layers = list(dict.fromkeys(p.layer for p in unreached))
        return self.violation(
            place(observation, layers[0]),
            f"{len(unreached)} parameters that the optimizer holds never get a gradient: their "
            f"layers only run with gradients off: {listed([p.name for p in unreached])}",
            value=float(len(unreached)),
            tensor=unreached[0].own,
            cause="torch.no_grad() or inference_mode() is around a part that should learn; what "
            "should not is frozen by requires_grad_(False) and left out of the optimizer",
            affected=layers[1:],
            independent=True,
        )


def _holds_none(stepped: Stepped) -> bool:
    """Whether no optimizer holds a parameter of the model, and nobody moves one by hand."""
    moved = any(any(p.changes) for p in stepped.parameters)
    return bool(stepped.parameters) and not moved and not any(p.held for p in stepped.parameters)


def _is_missing(parameter: SteppedParameter) -> bool:
    gets = any(size for size in parameter.added if size is not None)
    return parameter.trainable and gets and not parameter.held and not any(parameter.changes)


def _is_unreached(parameter: SteppedParameter, stepped: Stepped) -> bool:
    if not (parameter.trainable and parameter.held) or any(parameter.changes):
        return False
    if any(size is not None for size in parameter.added):
        return False
    return any(mode.layer == parameter.layer and mode.without_gradient for mode in stepped.modes)
