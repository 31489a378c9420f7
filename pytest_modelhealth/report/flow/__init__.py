"""Who feeds whom in one run: the recorded graph, and `Flow`, which answers questions about it."""

from pytest_modelhealth.report.flow.flow import Flow as Flow
from pytest_modelhealth.report.flow.graph import (
    LOSS as LOSS,
    OUTPUT as OUTPUT,
    UNSEEN as UNSEEN,
    By as By,
    Call as Call,
    Cut as Cut,
    Ending as Ending,
    Graph as Graph,
    Kind as Kind,
    Vertex as Vertex,
    near as near,
)
from pytest_modelhealth.report.flow.recurrence import Recurrence as Recurrence
