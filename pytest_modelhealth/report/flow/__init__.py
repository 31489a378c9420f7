"""Who feeds whom in one run: the recorded graph, and `Flow`, which answers questions about it."""

from pytest_modelhealth.report.flow.flow import Flow
from pytest_modelhealth.report.flow.graph import (
    AS_IT_IS,
    LOSS,
    OUTPUT,
    PRODUCTS,
    SOURCES,
    SUMS,
    WHOLE,
    By,
    Call,
    Cut,
    Ending,
    Gate,
    Graph,
    Kind,
    Operation,
    Step,
    Vertex,
    near,
)
from pytest_modelhealth.report.flow.recurrence import Recurrence

__all__ = [
    "AS_IT_IS",
    "LOSS",
    "OUTPUT",
    "PRODUCTS",
    "SOURCES",
    "SUMS",
    "WHOLE",
    "By",
    "Call",
    "Cut",
    "Ending",
    "Flow",
    "Gate",
    "Graph",
    "Kind",
    "Operation",
    "Recurrence",
    "Step",
    "Vertex",
    "near",
]
