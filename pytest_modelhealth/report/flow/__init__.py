"""Who feeds whom in one run: the recorded graph, and `Flow`, which answers questions about it."""

from pytest_modelhealth.report.flow.flow import Flow
from pytest_modelhealth.report.flow.graph import (
    LOSS,
    OUTPUT,
    UNSEEN,
    By,
    Call,
    Cut,
    Ending,
    Graph,
    Kind,
    Vertex,
    near,
)
from pytest_modelhealth.report.flow.recurrence import Recurrence

__all__ = [
    "LOSS",
    "OUTPUT",
    "UNSEEN",
    "By",
    "Call",
    "Cut",
    "Ending",
    "Flow",
    "Graph",
    "Kind",
    "Recurrence",
    "Vertex",
    "near",
]
