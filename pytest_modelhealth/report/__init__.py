"""The frozen result: what was seen of a model, and the verdict on it.

This package imports neither torch nor numpy.
"""

from pytest_modelhealth.report.flow import (
    Call,
    Cut,
    Ending,
    Flow,
    Gate,
    Graph,
    Kind,
    Recurrence,
    Step,
    Vertex,
)
from pytest_modelhealth.report.health_report import HealthReport
from pytest_modelhealth.report.judgement import (
    BrokenCheck,
    Inconclusive,
    Judge,
    Judgement,
    Reference,
    Verdict,
    Violation,
)
from pytest_modelhealth.report.observation import (
    ROLES,
    ClassTargets,
    GivenTensor,
    LayerRecord,
    LayerRecords,
    LossCall,
    LossPath,
    Noises,
    Observation,
    Option,
    Status,
    TaskGradients,
    TaskPair,
    UnregisteredParameter,
)
from pytest_modelhealth.report.probing import Outcome, Parting, Probed, ProbeRecord

__all__ = [
    "ROLES",
    "BrokenCheck",
    "Call",
    "ClassTargets",
    "Cut",
    "Ending",
    "Flow",
    "Gate",
    "GivenTensor",
    "Graph",
    "HealthReport",
    "Inconclusive",
    "Judge",
    "Judgement",
    "Kind",
    "LayerRecord",
    "LayerRecords",
    "LossCall",
    "LossPath",
    "Noises",
    "Observation",
    "Option",
    "Outcome",
    "Parting",
    "ProbeRecord",
    "Probed",
    "Recurrence",
    "Reference",
    "Status",
    "Step",
    "TaskGradients",
    "TaskPair",
    "UnregisteredParameter",
    "Verdict",
    "Vertex",
    "Violation",
]
