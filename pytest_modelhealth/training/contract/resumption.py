"""A training goes on from what was saved as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


class Resumption(StepCheck):
    """All that a step goes on from is in what is saved."""

    name = "resumption"
    summary = "After loading the saved state, the next step is the same, bit for bit."
    rank = 76
    minimum_evidence = "run_step(..., resume=True)"
    role = "parameters"
    definition = (
        "After one call the state_dict of model, optimizers and what is in restore is saved, and a "
        "second call made. The state is loaded into the model as it was before, and the second "
        "call made again with the same random numbers: loss and state must be equal, bit for bit. "
        "Only on request."
    )
    source = (
        "230 of 230 healthy models resume; state in plain attributes, non-persistent buffers and "
        "counters does not"
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what differs."""
        if not stepped.resumed:
            return
        layer, _, own = stepped.resumed.rpartition(".")
        is_named = stepped.resumed in {p.name for p in stepped.parameters}
        what = (
            stepped.resumed
            if stepped.resumed.startswith("the step")
            else f"the step after loading the saved state differs: {stepped.resumed} is another"
        )
        yield self.violation(
            place(observation, layer if is_named else ""),
            what,
            value=1.0,
            tensor=own if is_named else "",
            cause="something that the step goes on from is not saved: a plain attribute, a buffer "
            "with persistent=False, a scheduler, a scaler or a moving average that is not in "
            "restore=",
            independent=True,
        )
