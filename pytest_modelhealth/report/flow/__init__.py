"""Who feeds whom in one run: the recorded graph, and `Flow`, which answers questions about it."""

from pytest_modelhealth.report.flow.flow import Flow
from pytest_modelhealth.report.flow.graph import (
    LOSS,
    OUTPUT,
    SOURCES,
    UNSEEN,
    By,
    Call,
    Cut,
    Edge,
    Ending,
    Gate,
    Graph,
    Kind,
    Operation,
    Vertex,
    near,
)
from pytest_modelhealth.report.flow.recurrence import Recurrence

__all__ = [
    "LOSS",
    "OUTPUT",
    "SOURCES",
    "UNSEEN",
    "By",
    "Call",
    "Cut",
    "Edge",
    "Ending",
    "Flow",
    "Gate",
    "Graph",
    "Kind",
    "Operation",
    "Recurrence",
    "Vertex",
    "near",
]
