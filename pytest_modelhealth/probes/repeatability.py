"""Evaluation repeats itself: the same batch gives the same output, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import at
from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.probes.words import began, figures, parting_at, ratio
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.report import Observation, Parting, ProbeRecord, Violation

_DROPOUTS = frozenset(
    {"dropout", "bernoulli", "alpha_dropout", "feature_dropout", "native_dropout"}
)
_SEED = 20_240_229
_MOVED = 1e-4
"""`Embedding(max_norm=...)` moves its rows by rounding from call to call, which is less."""

_CAUSES = {
    "dropout": "F.dropout without training=self.training, a Dropout made inside forward, or "
    "train() called there; where it is meant (Monte Carlo dropout), waive this probe",
    "again": "forward keeps something from call to call: a buffer that it updates, a list that it "
    "appends to, a tensor of the first batch that it caches",
    "state": "forward writes to it in evaluation mode, so that what it returns will depend on what "
    "ran before: update it only if self.training",
    "parameters": "forward writes to its parameters, in place or through .data, which is for the "
    "optimizer to do",
    "batch": "an in-place operation (add_, /=, masked_fill_, indexing) on an argument changes the "
    "caller's data: clone() first, or leave the underscore out",
}


class Repeatability(Probe):
    """In evaluation mode a model is a function of its batch."""

    name = "repeatability"
    summary = "In evaluation mode the same batch gives the same output, again and again."
    rank = 41
    definition = (
        "In evaluation mode, another random seed does not change the output by a dropout; a second "
        "call gives the same output, within max_call_effect of its root mean square, and changes "
        "neither floating buffers and attributes, nor the lengths of lists, nor parameters; the "
        "forward does not write to its batch. Other draws (latents, policies) are a note."
    )
    source = (
        "dropout active in evaluation and a forward that mutates its input lead the practitioners' "
        "lists; of 803 healthy runs 25 draw numbers in evaluation by design, none by a dropout"
    )
    minimum_evidence = "one batch on which evaluation runs"
    settings = (
        Setting(
            "max_call_effect",
            float,
            default=1e-5,
            minimum=0.0,
            help="largest change of the output from one call to the next on the same batch, by its "
            "root mean square (healthy models: 0; float32 rounds at 1e-7)",
            per_layer=False,
        ),
    )

    def probe(self, runs: Runs) -> ProbeRecord:
        """Call the model with another seed, then with the usual one, without putting it back."""
        from pytest_modelhealth.probes.intervening.repeating import call_twice

        base = runs.base
        if base.error:
            return self.not_told(f"in evaluation mode the model raises {base.error}")
        if not base.outputs:
            return self.not_told("the model returns no tensor to hold against another run's")
        other, again, changed = call_twice(runs, _SEED)
        if other.error or again.error:
            error = other.error or again.error
            return self.not_told(f"called again, the model raises {error}", "the call, repeated")
        partings = list(_by_seed(runs, base, other))
        notes: tuple[str, ...] = ()
        if partings and partings[0].kind == "noise":
            drawn = partings.pop(0)
            where = drawn.layer or type(runs.model).__name__
            drawing = f"{where!r} draws numbers{at(drawn.line)}"
            notes = (f"in evaluation mode the random seed changes the output: {drawing}",)
        partings += _by_call(runs, base, again, changed)
        return self.judged(*partings, changed="the seed, and a second call", notes=notes)

    def judge(
        self,
        parting: Parting,
        record: ProbeRecord,
        observation: Observation,
        settings: Settings,
    ) -> Iterator[Violation]:
        """Yield what does not repeat itself."""
        limit = settings["max_call_effect"] if parting.kind in ("dropout", "again") else None
        if limit is not None and parting.effect <= limit.value:
            return
        yield self.violation(
            observation.layers.get(parting.layer, observation.layers[""]),
            _message(parting),
            value=parting.effect,
            limit=limit,
            role=parting.role,
            tensor=parting.tensor,
            cause=_CAUSES[parting.kind],
            independent=True,
            details=figures(
                parting, "another seed" if parting.kind == "dropout" else "a second call"
            ),
        )


def _message(parting: Parting) -> str:
    if parting.kind == "dropout":
        return (
            "dropout is active in evaluation mode: another random seed changes the output by "
            f"{ratio(parting.effect)} of its root mean square{began(parting)}"
        )
    if parting.kind == "again":
        return (
            "called a second time on the same batch, it returns something else: the output "
            f"changes by {ratio(parting.effect)} of its root mean square{began(parting)}"
        )
    if parting.kind == "batch":
        return "its forward writes to the batch that it is given"
    return f"{parting.detail} from one call to the next, in evaluation mode"


def _by_seed(runs: Runs, base: Ran, other: Ran) -> Iterator[Parting]:
    """Yield what another seed changes: by a dropout, or by other noise."""
    from pytest_modelhealth.probes.intervening.locating import largest, where_seeds_part

    found = largest(base.outputs, other.outputs)
    if found is None or not found.effect > 0.0:
        return
    place = where_seeds_part(runs, (runs.batch(), runs.batch()), _SEED)
    kind = "noise"
    if place is not None and place.observation is not None:
        record = place.observation.layers[place.layer]
        names = {step.rstrip("_") for step in place.between}
        is_module = "dropout" in record.type_name.lower() or "droppath" in record.type_name.lower()
        is_called = bool(record.options.get("dropout_training") and record.options["dropout_p"])
        kind = "dropout" if is_module or is_called or names & _DROPOUTS else "noise"
    yield parting_at(kind, found, place)


def _by_call(
    runs: Runs, base: Ran, again: Ran, changed: list[tuple[str, str, str, float]]
) -> Iterator[Parting]:
    """Yield what a call before it changes in a call, and what calls leave behind."""
    from pytest_modelhealth.probes.intervening.locating import largest
    from pytest_modelhealth.report import Parting

    found = largest(base.outputs, again.outputs)
    layer = changed[0][0] if changed else ""
    if found is not None and found.effect > 0.0:
        what = changed[0][2] if changed else ""
        yield Parting("again", found.effect, layer, place=str(found.place), before=found.before,
                      after=found.after, detail=what)  # fmt: skip
    else:
        for layer, own, what, effect in changed:
            role = "parameters" if own else "activations"
            if not own or effect > _MOVED:
                yield Parting(
                    "parameters" if own else "state", effect, layer, role, own, detail=what
                )
    if base.wrote:
        yield Parting("batch", 1.0, role="inputs")
