"""One fault, one story: what follows from an earlier violation.

The order of causes is that of the run: the parameters and buffers that a layer starts with, what
goes into it, what comes out, the loss, then the gradients from the last layer to the first. Of two
violations the later is a consequence if the flow leads from the earlier one to it, as values go
forward and gradients back, and it could be brought about so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from pytest_modelhealth.checks.facts import completed, flow_of
from pytest_modelhealth.report import ROLES, Finding, Flow, Observation, Reference
from pytest_modelhealth.report.observation import BACKWARD_ROLES, STATE_ROLES
from pytest_modelhealth.settings.setting import dotted


def diagnose(observation: Observation, findings: Iterable[Finding]) -> list[Finding]:
    """Return `findings` with each consequence folded under the violation that explains it.

    What is left keeps its order. Violations without evidence get the tensors they speak of.
    """
    findings = list(findings)
    violations = [finding for finding in findings if finding.grade != "unsure"]
    if not violations:
        return findings
    flow, stories = flow_of(observation), list[_Story]()
    for event in sorted(_event(observation, v, rank) for rank, v in enumerate(violations)):
        story = next((story for story in stories if story.explains(event)), None)
        if story is None:
            stories.append(_Story(event, flow))
        else:
            story.folded.append(_with_evidence(event.violation, observation, flow))
    told = dict[int, Finding]()
    for story in stories:
        root = _with_evidence(story.root.violation, observation, flow)
        told[id(story.root.violation)] = replace(root, folded=tuple(story.folded))
    return [told.get(id(one), one) for one in findings if one.grade == "unsure" or id(one) in told]


_FORWARD, _LOSS, _BACKWARD = range(3)
"""The stages of a run, in their order."""


class _Event(NamedTuple):
    """A violation in its place in the run: its stage, its moment there, and its rank."""

    stage: int
    moment: float
    rank: int
    violation: Finding


def _event(observation: Observation, violation: Finding, rank: int) -> _Event:
    record, role = observation.layers.get(violation.layer), violation.role
    begun = math.inf if record is None or record.entered is None else float(record.entered)
    ended = math.inf if record is None else float(completed(record))
    if violation.between_ranks and math.isinf(begun):  # that it never ran follows
        return _Event(_FORWARD, -math.inf, rank, violation)
    if role in BACKWARD_ROLES:
        return _Event(_BACKWARD, -ended, rank, violation)
    if role == "activations":
        if violation.check == "finite":  # what a layer's own forward makes, before it returns
            shown = (observation.layers[name] for name in violation.affected)
            bad = [r for r in shown if r.activations is not None and r.activations.nonfinite_count]
            ended = min((ended, *(completed(r) - 0.5 for r in bad)))
        return _Event(_FORWARD, ended, rank, violation)
    if role in ("inputs", *STATE_ROLES):
        return _Event(_FORWARD, begun - 0.25 * (role != "inputs"), rank, violation)
    return _Event(_LOSS, 0.0, rank, violation)


class _Story:
    """A root, and where the flow leads from it: each swept when it is first asked for."""

    def __init__(self, root: _Event, flow: Flow) -> None:
        self.root, self._flow = root, flow
        self.folded = list[Finding]()  # what it explains, in causal order
        self._layer = root.violation.layer

    @cached_property
    def after(self) -> frozenset[str]:
        """What its values get to."""
        own = dotted(self._layer, self.root.violation.tensor)
        start = own if own in self._flow else self._layer
        if start not in self._flow:  # it never ran
            return frozenset({self._layer})
        return self._flow.reach(start) | {self._layer}

    @cached_property
    def before(self) -> frozenset[str]:
        """What its gradients go back to."""
        if self._layer not in self._flow:
            return frozenset({self._layer})
        return self._flow.feeding(self._layer, by="gradient") | {self._layer}

    def explains(self, effect: _Event) -> bool:
        """Whether what is seen later follows from the root."""
        fault, symptom = self.root.violation, effect.violation
        reaches_loss = self._flow.graph.loss is None or "loss" in self.after
        if fault.between_ranks or symptom.between_ranks:
            return symptom.layer == fault.layer and symptom.check in _FOLLOWING.get(fault.check, ())
        if symptom.independent or (symptom.check == "finite" and fault.check in _SILENT):
            return False
        if effect.stage is _FORWARD:
            return self._explains_forward(symptom)
        if effect.stage is _LOSS:
            return self.root.stage is _FORWARD and reaches_loss
        if self.root.stage is _LOSS:
            return True
        if self.root.stage is _BACKWARD:  # bounds on gradients hold for each layer by itself
            return fault.check != symptom.check and symptom.layer in self.before
        if fault.check == "finite":  # through the loss it reaches every gradient
            return reaches_loss
        return symptom.layer in self.before or symptom.layer in self.after

    def _explains_forward(self, symptom: Finding) -> bool:
        """Whether what a layer shows in the forward pass follows from the root.

        Parameters were there before the run; buffers are judged by what comes in, or made of it.
        """
        fault = self.root.violation
        if symptom.role in STATE_ROLES and fault.role in STATE_ROLES:
            return fault.layer == symptom.layer
        if symptom.role == "parameters":
            return False
        if symptom.role == "activations" and symptom.check == "finite" and fault.check == "finite":
            return fault.role in STATE_ROLES and symptom.layer == fault.layer  # of finite inputs
        return symptom.layer in self.after


_FOLLOWING = {
    "finite": ("same_weights",),  # a NaN in a weight of one rank
    "missing_gradients": ("unused_parameters",),
    "unused_parameters": ("wiring",),  # it is never called
}
"""What else is seen between ranks of the fault of a layer."""

_SILENT = ("dead_units", "saturation", "collapse")
"""A signal that went silent makes no NaN."""


def _with_evidence(violation: Finding, observation: Observation, flow: Flow) -> Finding:
    """Return the violation with the statistics it speaks of, and those that led to them."""
    record = observation.layers.get(violation.layer)
    if violation.evidence or record is None:
        return violation
    role = violation.role if violation.role in ROLES else "activations"
    own, names, before = Reference(record.name, role, violation.tensor), tuple[str, ...](), role
    if record.name in flow and role == "activations":
        names = flow.producers(record.name, as_it_is=True)
    elif record.name in flow and role in BACKWARD_ROLES:
        names, before = flow.consumers(record.name, as_it_is=True), "gradients"
    led = [Reference(name, before) for name in names if name in observation.layers][:1]
    if not led and role == "activations" and record.name in flow:
        led = [Reference(record.name, "inputs")]
    return replace(violation, evidence=(own, *led))
