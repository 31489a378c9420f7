"""The frozen result: what was seen of a model, and the verdict on it.

This package imports neither torch nor numpy. Names that are imported under themselves are its own.
"""

from pytest_modelhealth.report.finding import (
    Finding as Finding,
    Grade as Grade,
    Inconclusive as Inconclusive,
    Reference as Reference,
    Violation as Violation,
)
from pytest_modelhealth.report.flow import Cut as Cut, Flow as Flow, Kind as Kind, Vertex as Vertex
from pytest_modelhealth.report.health_report import HealthReport as HealthReport
from pytest_modelhealth.report.model_summary import ModelSummary as ModelSummary
from pytest_modelhealth.report.observation import (
    MEASURED as MEASURED,
    ROLES as ROLES,
    UNCALLED as UNCALLED,
    ClassTargets as ClassTargets,
    GivenTensor as GivenTensor,
    LayerRecord as LayerRecord,
    LayerRecords as LayerRecords,
    LossCall as LossCall,
    LossPath as LossPath,
    Noises as Noises,
    Observation as Observation,
    Option as Option,
    Status as Status,
    TaskGradients as TaskGradients,
    TaskPair as TaskPair,
    UnregisteredParameter as UnregisteredParameter,
    ZeroSlices as ZeroSlices,
)
from pytest_modelhealth.report.parts import (
    Costs as Costs,
    Definition as Definition,
    Extreme as Extreme,
    LayerCosts as LayerCosts,
    Outcome as Outcome,
    Part as Part,
    Parting as Parting,
    Probed as Probed,
    ProbeRecord as ProbeRecord,
    Shape as Shape,
    Size as Size,
)
from pytest_modelhealth.report.training import (
    Course as Course,
    CourseEvent as CourseEvent,
    LayerMode as LayerMode,
    LossSlope as LossSlope,
    LossSummary as LossSummary,
    Stepped as Stepped,
    SteppedOptimizer as SteppedOptimizer,
    SteppedParameter as SteppedParameter,
)
from pytest_modelhealth.report.verdict import Judgement as Judgement, Verdict as Verdict
