"""The frozen result: what was seen of a model, and the verdict on it.

This package imports neither torch nor numpy.
"""

from pytest_modelhealth.report.costs import Costs, LayerCosts, Shape, Size
from pytest_modelhealth.report.course import Course, CourseEvent, LossSummary
from pytest_modelhealth.report.data_sets import Extreme, Label, Part
from pytest_modelhealth.report.definition import Definition
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
from pytest_modelhealth.report.model_summary import ModelSummary
from pytest_modelhealth.report.observation import (
    MEASURED,
    ROLES,
    UNCALLED,
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
    ZeroSlices,
)
from pytest_modelhealth.report.probing import Outcome, Parting, Probed, ProbeRecord
from pytest_modelhealth.report.replayed import Replayed
from pytest_modelhealth.report.stepping import (
    HalfInfluence,
    LayerMode,
    LeftOver,
    LossSlope,
    Stepped,
    SteppedOptimizer,
    SteppedParameter,
)

__all__ = [
    "MEASURED",
    "ROLES",
    "UNCALLED",
    "BrokenCheck",
    "Call",
    "ClassTargets",
    "Costs",
    "Course",
    "CourseEvent",
    "Cut",
    "Definition",
    "Ending",
    "Extreme",
    "Flow",
    "Gate",
    "GivenTensor",
    "Graph",
    "HalfInfluence",
    "HealthReport",
    "Inconclusive",
    "Judge",
    "Judgement",
    "Kind",
    "Label",
    "LayerCosts",
    "LayerMode",
    "LayerRecord",
    "LayerRecords",
    "LeftOver",
    "LossCall",
    "LossPath",
    "LossSlope",
    "LossSummary",
    "ModelSummary",
    "Noises",
    "Observation",
    "Option",
    "Outcome",
    "Part",
    "Parting",
    "ProbeRecord",
    "Probed",
    "Recurrence",
    "Reference",
    "Replayed",
    "Shape",
    "Size",
    "Status",
    "Step",
    "Stepped",
    "SteppedOptimizer",
    "SteppedParameter",
    "TaskGradients",
    "TaskPair",
    "UnregisteredParameter",
    "Verdict",
    "Vertex",
    "Violation",
    "ZeroSlices",
]
