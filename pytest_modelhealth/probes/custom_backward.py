"""Custom functions of autograd: their backward gives the slope of their forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import at, place
from pytest_modelhealth.probes.parameter_effect import without_gradient
from pytest_modelhealth.probes.probe import Evidence, Probe
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.own_backwards import Call, Verdict
    from pytest_modelhealth.probes.intervening.running import Runs
    from pytest_modelhealth.report import Observation, Parting, ProbeRecord, Vertex, Violation

CHANGED = "each custom autograd.Function by itself, along random directions in float64"


class CustomBackward(Probe):
    """What a custom ``backward`` returns is the slope of its ``forward``.

    Some functions give another gradient on purpose, and say so by their forward: it is the
    identity (reversal, clipping, scaling of gradients), or it is flat (rounding, spikes,
    straight-through). There is no fault to be found in those, and no evidence to wait for: each is
    a note, and the verdict stays what it is. Where a model has no others the probe does not apply,
    which asked for by name it says.

    Slopes on one rank tell nothing of a function that calls a collective of `torch.distributed`:
    such a one is left out, and said to be.

    Two look like faults and designs alike, and only warn: a gradient that goes straight through
    where a forward is flat in part (a clamp), and no gradient at all, as `detach` gives none. What
    the latter cuts off from the loss `missing_gradients` names, and this probe then does not.
    """

    name = "custom_backward"
    summary = "The backward of a custom autograd.Function gives the slope of its forward."
    rank = 42
    role = "gradients"
    automatic = True
    settings = (
        Setting(
            "max_slope_error",
            float,
            default=0.01,
            minimum=5e-3,
            help="largest difference between a custom gradient and the slope, by the larger of the "
            "two (right ones: 1e-6 in float64; a coefficient that is 10 % off: 0.1)",
            per_layer=False,
        ),
    )

    def is_called_for(self, observation: Observation, settings: Settings) -> bool:
        """Whether a custom function ran."""
        return observation.own_functions

    def probe(self, runs: Runs) -> ProbeRecord:
        """Record what each function is called with, and hold it against slopes."""
        from pytest_modelhealth.probes.intervening.own_backwards import judged_calls, recorded_calls

        calls, ran = recorded_calls(runs)
        if ran.error and not calls:
            return self.not_told(f"run again, the model raises {ran.error}")
        if not calls:
            return self._nothing(runs.observation, runs.settings)
        verdicts = judged_calls(runs, calls)
        notes = tuple(dict.fromkeys(_notes(verdicts)))
        told = [verdict for verdict in verdicts if not (verdict.meant or verdict.doubt)]
        if told:
            partings = [
                replace(wrong, layer=_caller(verdict.call, runs.observation))
                for verdict in _one_each(told)
                for wrong in verdict.wrong
            ]
            return self.judged(*partings, changed=CHANGED, notes=notes)
        doubts = [verdict for verdict in verdicts if verdict.doubt]
        if doubts:
            return self.not_told("; ".join(_notes(doubts)), CHANGED)
        return self.not_applicable("; ".join(notes), notes)

    def _nothing(self, observation: Observation, settings: Settings) -> ProbeRecord:
        if self.is_called_for(observation, settings):
            return self.not_told(
                "its custom functions are classes made anew in each forward, or are called by no "
                "Function.apply; define them at the top of a module"
            )
        return self.not_applicable("no custom torch.autograd.Function takes part in the run")

    def judge(self, parting: Parting, seen: Evidence) -> Iterator[Violation]:
        """Yield that a gradient is not the slope."""
        limit = seen.settings["max_slope_error"]
        is_named_by_another = parting.kind == "none" and any(without_gradient(seen.observation))
        if parting.effect <= limit.value or is_named_by_another:
            return
        # Nobody asked where it runs by itself: what may be meant then is no failure.
        failing = {"slope", "approximation"} if seen.settings.probes(self.name) else {"slope"}
        function, _, argument = parting.place.rpartition(".")
        given, slope = parting.after or 0.0, parting.before or 0.0
        by = f"{given / slope:.2f} times the slope" if slope else "where there is none"
        yield self.violation(
            place(seen.observation, parting.layer),
            f"the backward of the custom autograd.Function {function!r}{at(parting.line)} gives "
            f"{argument!r} a gradient of {given:.4g} along a random direction, where the slope of "
            f"its forward is {slope:.4g}: {by}",
            value=parting.effect,
            limit=limit,
            cause=f"{parting.detail}; torch.autograd.gradcheck shows it number by number",
            independent=True,
            severity="fail" if parting.kind in failing else "warn",
        )


def _notes(verdicts: Iterable[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        name = verdict.call.name
        if verdict.meant:
            yield f"{name!r} changes the gradient on purpose: {verdict.meant}"
        elif verdict.doubt:
            yield f"the backward of {name!r} is not held against slopes: {verdict.doubt}"


def _one_each(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Yield the first verdict of each function that finds something: one backward, one story."""
    seen = set()
    for verdict in verdicts:
        if verdict.wrong and verdict.call.function not in seen:
            seen.add(verdict.call.function)
            yield verdict


def _caller(call: Call, observation: Observation) -> str:
    """Return the layer whose own code calls a function; the model where that is not known."""
    from pytest_modelhealth.capture.observing.autograd_graph import snake_case

    if observation.flow is None:
        return ""
    graph = observation.flow.graph
    named = snake_case(call.name)
    made: list[Vertex] = [
        graph.vertices[n] for n in graph.own_functions if graph.vertices[n].function == named
    ]
    if not made:
        return ""
    vertex = made[call.number] if len(made) == call.of else made[0]
    return graph.calls[vertex.call].layer if vertex.call >= 0 else ""
