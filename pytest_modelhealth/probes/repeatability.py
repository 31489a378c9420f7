"""Evaluation repeats itself: the same batch gives the same output, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.probes.probe import Probe, began, ratio
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.repeating import Calls
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.report import Parting, ProbeRecord

_DROPOUTS = frozenset(
    {"dropout", "bernoulli", "alpha_dropout", "feature_dropout", "native_dropout"}
)
_SEED = 20_240_229
_MOVED = 1e-4
"""`Embedding(max_norm=...)` moves its rows by rounding from call to call, which is less."""

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

    def probe(self, runs: Runs) -> ProbeRecord:
        """Call the model with another seed, then with the usual one, without putting it back."""
        from pytest_modelhealth.probes.intervening.repeating import call_again

        base = runs.base
        if base.error:
            return self.not_told(f"in evaluation mode the model raises {base.error}")
        if not base.outputs:
            return self.not_told("the model returns no tensor to hold against another run's")
        calls = call_again(runs, _SEED)
        if error := calls.again.error or calls.other.error:
            return self.not_told(f"called again, the model raises {error}", "the call, repeated")
        partings = [*_by_seed(runs, base, calls.other), *_by_call(runs, calls)]
        return self.judged(*partings, changed="the seed, and the call before")

    def message(self, parting: Parting) -> str:
        """Return what does not repeat itself."""
        effect = f"{ratio(parting.effect)} of its root mean square{began(parting)}"
        if parting.kind == "dropout":
            return (
                "dropout is active in evaluation mode: another random seed changes the output by "
                f"{effect}"
            )
        if parting.kind == "noise":
            return (
                "it draws random numbers in evaluation mode: another seed changes the output by "
                f"{effect}"
            )
        if parting.kind == "again":
            kept = f"; {parting.detail}" if parting.detail else ""
            return f"after a call on another batch it returns something else: by {effect}{kept}"
        if parting.kind == "batch":
            return f"its forward writes to the batch that it is given, {parting.detail}"
        return f"{parting.detail} from one call to the next, in evaluation mode"


def _by_seed(runs: Runs, base: Ran, other: Ran) -> Iterator[Parting]:
    """Yield what another seed changes: by a dropout, or by other noise."""
    from pytest_modelhealth.probes.intervening.differences import largest
    from pytest_modelhealth.probes.intervening.locating import parting_at, where_seeds_part

    found = largest(base.outputs, other.outputs)
    if found is None or not found.effect > 0.0 or runs.unsteady:
        return
    place = where_seeds_part(runs, (runs.batch(), runs.batch()), _SEED)
    kind = "noise"
    if place is not None and place.observation is not None:
        record = place.observation.layers[place.layer]
        names = {step.rstrip("_") for step in place.between}
        is_module = "dropout" in record.type_name.lower() or "droppath" in record.type_name.lower()
        options = record.options
        is_called = bool(options.get("dropout_p") and options.get("dropout_training", True))
        kind = "dropout" if is_module or is_called or names & _DROPOUTS else "noise"
    yield parting_at(kind, found, place)


def _by_call(runs: Runs, calls: Calls) -> Iterator[Parting]:
    """Yield what a call before it changes in a call, and what calls leave behind."""
    from pytest_modelhealth.probes.intervening.batches import named_inputs
    from pytest_modelhealth.probes.intervening.differences import largest
    from pytest_modelhealth.report import Parting

    found = largest(runs.base.outputs, calls.again.outputs)
    states = [change for change in calls.changed if not change[1]]
    if found is not None and found.effect > 0.0:
        layer, _, what, _ = states[0] if states else ("", "", "", 0.0)
        yield Parting(
            "again",
            found.effect,
            layer,
            place=str(found.place),
            before=found.before,
            after=found.after,
            detail=what,
        )
    else:
        for layer, _, what, effect in states[:1]:
            yield Parting("state", effect, layer, detail=what)
    for layer, own, what, effect in calls.changed:
        if own and effect > _MOVED:
            yield Parting("parameters", effect, layer, "parameters", own, detail=what)
            break
    if runs.base.wrote:
        named = named_inputs(runs)
        detail = ", ".join(f"input {named[number]!r}" for number in runs.base.wrote)
        yield Parting("batch", 1.0, role="inputs", detail=detail)
