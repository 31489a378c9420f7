"""Evaluation repeats itself: the same batch gives the same output, and leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.probes.endings import Found
from pytest_modelhealth.probes.probe import Probe, began, ratio
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.running import Runs
    from pytest_modelhealth.report import Parting

_OUTPUTS = frozenset({"dropout", "noise", "again"})
"""What is measured at the output."""
_DESIGNS = frozenset({"noise", "again", "state"})
"""What is meant in some models: policies and latents draw, queues and states are carried on."""

_CAUSES = {
    "dropout": "F.dropout without training=self.training, a Dropout made inside forward, or "
    "train() called there; where it is meant (Monte Carlo dropout), waive this probe",
    "noise": "noise or a mask that should be drawn only if self.training; latents, policies and "
    "diffusion steps draw on purpose, and nothing that was seen tells",
    "again": "forward keeps something from call to call: a buffer that it updates, a list that it "
    "appends to, a tensor of the first batch; a queue or a carried state does so on purpose",
    "state": "forward writes to it in evaluation mode: update it only if self.training, unless it "
    "is meant to be carried on",
    "parameters": "forward writes to its parameters, in place or through .data, which is for the "
    "optimizer to do",
    "batch": "an in-place operation (add_, /=, masked_fill_, indexing) on an argument changes the "
    "caller's data: clone() first, or leave the underscore out",
}
_CHANGES = "{detail} from one call to the next, in evaluation mode"
_MESSAGES = {
    "dropout": "dropout is active in evaluation mode: another random seed changes the output",
    "noise": "it draws random numbers in evaluation mode: another seed changes the output",
    "again": "after a call on another batch it returns something else:",
    "state": _CHANGES,
    "parameters": _CHANGES,
    "batch": "its forward writes to the batch that it is given, {detail}",
}


class Repeatability(Probe):
    """In evaluation mode a model is a function of its batch."""

    name = "repeatability"
    summary = "In evaluation mode the same batch gives the same output, again and again."
    rank = 34
    settings = (
        Ratio(
            "max_call_effect",
            default=1e-5,
            help="largest change of the output by another seed or a call before, by its root mean "
            "square (healthy models: 0; float32 rounds at 1e-7)",
            per_layer=False,
        ),
    )

    designs, about_tensors = _DESIGNS, frozenset(_CAUSES)
    unlimited = frozenset(_CAUSES) - _OUTPUTS
    known = _CAUSES
    other_runs = dict.fromkeys(_CAUSES, "a second call") | {"dropout": "another seed"}

    def probe(self, runs: Runs) -> Found:
        """Call the model with another seed, then with the usual one, without putting it back."""
        from pytest_modelhealth.probes.intervening.repeating import what_calls_change

        return Found("the seed, and the call before", what_calls_change(runs))

    def message(self, parting: Parting) -> str:
        """Return what does not repeat itself."""
        kept = f"; {parting.detail}" if parting.detail else ""
        said = _MESSAGES[parting.kind].format(detail=parting.detail)
        if parting.kind not in _OUTPUTS:
            return said
        return f"{said} by {ratio(parting.effect)} of its root mean square{began(parting)}{kept}"
