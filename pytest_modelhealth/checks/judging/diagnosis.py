"""One fault, one story: violations that follow from an earlier one are folded under it.

The order of causes is that of the run: the parameters and buffers that a layer starts with, what
goes into it, what comes out, the loss, then the gradients from the last layer to the first. Of two
violations the later is a consequence if the earlier one's tensor reaches it (`DataFlow`) and
could bring it about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.data_flow import DataFlow, Port
from pytest_modelhealth.checks.evidence import completed
from pytest_modelhealth.report import ROLES, LayerRecord, Observation, Reference, Violation


def diagnose(observation: Observation, findings: Iterable[Finding]) -> list[Finding]:
    """Return `findings` with each consequence folded under the violation that explains it.

    What is left keeps its order. Violations without evidence get the tensors they speak of.
    """
    findings = list(findings)
    violations = [finding for finding in findings if isinstance(finding, Violation)]
    if not violations:
        return findings
    flow = DataFlow(observation)
    consequences = _consequences(observation, flow, violations)
    told: list[Finding] = []
    for finding in findings:
        if not isinstance(finding, Violation):
            told.append(finding)
        elif id(finding) in consequences:
            folded = tuple(_with_evidence(v, observation, flow) for v in consequences[id(finding)])
            told.append(replace(_with_evidence(finding, observation, flow), folded=folded))
    return told


class _Stage(IntEnum):
    """The stages of a run, in their order."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2


_BACKWARD_ROLES = ("gradients", "parameter_gradients")
_STATE_ROLES = ("parameters", "buffers")


@dataclass(frozen=True)
class _Event:
    """A violation in its place in the run: its stage, its moment there, and the gravity of it."""

    stage: _Stage
    moment: float
    gravity: int
    violation: Violation

    @property
    def when(self) -> tuple[int, float, int]:
        return (self.stage, self.moment, self.gravity)


def _event(observation: Observation, violation: Violation, gravity: int) -> _Event:
    record, role = observation.layers.get(violation.layer), violation.role
    begun = math.inf if record is None or record.entered is None else float(record.entered)
    ended = math.inf if record is None else float(completed(record))
    if role in _BACKWARD_ROLES:
        return _Event(_Stage.BACKWARD, -ended, gravity, violation)
    if role in _STATE_ROLES:
        return _Event(_Stage.FORWARD, begun - 0.25, gravity, violation)
    if role in ("inputs", "activations"):
        moment = begun if role == "inputs" else ended
        return _Event(_Stage.FORWARD, moment, gravity, violation)
    return _Event(_Stage.LOSS, 0.0, gravity, violation)


def _consequences(
    observation: Observation, flow: DataFlow, violations: list[Violation]
) -> dict[int, list[Violation]]:
    """Return the roots by identity, each with what it explains in causal order."""
    events = [_event(observation, v, gravity) for gravity, v in enumerate(violations)]
    explained: dict[int, list[Violation]] = {}
    roots: list[tuple[_Event, frozenset[Port]]] = []
    for event in sorted(events, key=lambda event: event.when):
        cause = next((root for root, reach in roots if _explains(root, reach, event, flow)), None)
        if cause is not None:
            explained[id(cause.violation)].append(event.violation)
        else:
            explained[id(event.violation)] = []
            roots.append((event, _reach(event, flow)))
    return explained


def _reach(event: _Event, flow: DataFlow) -> frozenset[Port]:
    """Return what the forward pass carries a fault to; what flows back is told by `_explains`."""
    return flow.reached(_port(event.violation))


def _port(violation: Violation) -> Port:
    return Port(violation.layer, output=violation.role != "inputs")


def _explains(cause: _Event, reach: frozenset[Port], effect: _Event, flow: DataFlow) -> bool:
    fault, symptom = cause.violation, effect.violation
    if symptom.independent or (_is_not_finite(symptom) and fault.check in _SILENT):
        return False
    if effect.stage is _Stage.FORWARD:
        return _explains_forward(fault, reach, symptom)
    if effect.stage is _Stage.LOSS:
        return cause.stage is _Stage.FORWARD
    if _is_not_finite(fault):  # through the loss it reaches every gradient
        return True
    is_upstream = _port(fault) in flow.reached(_port(symptom))
    if cause.stage is _Stage.BACKWARD:  # bounds on gradients hold for each layer by itself
        return is_upstream and fault.check != symptom.check
    return is_upstream or _port(symptom) in reach


def _explains_forward(fault: Violation, reach: frozenset[Port], symptom: Violation) -> bool:
    """Whether what a layer shows in the forward pass follows from an earlier fault.

    Parameters were there before the run; buffers are judged by what comes in, or made of it.
    """
    if symptom.role in _STATE_ROLES and fault.role in _STATE_ROLES:
        return fault.layer == symptom.layer
    if symptom.role == "parameters":
        return False
    if symptom.role == "buffers":
        return Port(symptom.layer, output=False) in reach
    return _port(symptom) in reach


_SILENT = ("dead_units", "saturation", "collapse")
"""A signal that went silent makes no NaN."""


def _is_not_finite(violation: Violation) -> bool:
    return violation.check == "finite"


def _with_evidence(violation: Violation, observation: Observation, flow: DataFlow) -> Violation:
    """Return the violation with the statistics it speaks of, and those that led to them."""
    record = observation.layers.get(violation.layer)
    if violation.evidence or record is None:
        return violation
    role = violation.role if violation.role in ROLES else "activations"
    evidence = [Reference(record.name, role, violation.tensor)]
    evidence += _before(record, role, observation, flow)
    return replace(violation, evidence=tuple(evidence))


def _before(
    record: LayerRecord, role: str, observation: Observation, flow: DataFlow
) -> list[Reference]:
    """Return what a tensor was computed from, as far as it is known."""
    if role in _BACKWARD_ROLES:
        takers = [
            name
            for name in observation.layers
            if flow.source(name) == Port(record.name, output=True)
        ]
        return [Reference(name, "gradients") for name in takers[:1]]
    if role != "activations":
        return []
    source = flow.source(record.name)
    if source is None or not source.output:
        return [Reference(record.name, "inputs")]
    return [Reference(source.layer, "activations")]
