"""Evaluation repeats itself: the same batch gives the same output, and leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.probes.endings import Found
from pytest_modelhealth.probes.probe import Kind, Probe
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.running import Runs

_BY = " by {effect} of its root mean square{began}{more}"
_CHANGES = "{detail} from one call to the next, in evaluation mode"
_AGAIN = "a second call"
_KINDS = {
    "dropout": Kind(
        "F.dropout without training=self.training, a Dropout made inside forward, or train() "
        "called there; where it is meant (Monte Carlo dropout), waive this probe",
        f"dropout is active in evaluation mode: another random seed changes the output{_BY}",
        run="another seed",
    ),
    "noise": Kind(
        "noise or a mask that should be drawn only if self.training; latents, policies and "
        "diffusion steps draw on purpose, and nothing that was seen tells",
        f"it draws random numbers in evaluation mode: another seed changes the output{_BY}",
        may_be_meant=True,
        run=_AGAIN,
    ),
    "again": Kind(
        "forward keeps something from call to call: a buffer that it updates, a list that it "
        "appends to, a tensor of the first batch; a queue or a carried state does so on purpose",
        f"after a call on another batch it returns something else:{_BY}",
        may_be_meant=True,
        run=_AGAIN,
    ),
    "state": Kind(
        "forward writes to it in evaluation mode: update it only if self.training, unless it is "
        "meant to be carried on",
        _CHANGES,
        may_be_meant=True,
        is_limited=False,
    ),
    "parameters": Kind(
        "forward writes to its parameters, in place or through .data, which is for the optimizer "
        "to do",
        _CHANGES,
        is_limited=False,
    ),
    "batch": Kind(
        "an in-place operation (add_, /=, masked_fill_, indexing) on an argument changes the "
        "caller's data: clone() first, or leave the underscore out",
        "its forward writes to the batch that it is given, {detail}",
        is_limited=False,
    ),
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

    kinds = _KINDS

    def probe(self, runs: Runs) -> Found:
        """Call the model with another seed, then with the usual one, without putting it back."""
        from pytest_modelhealth.probes.intervening.repeating import what_calls_change

        return Found("the seed, and the call before", what_calls_change(runs))
