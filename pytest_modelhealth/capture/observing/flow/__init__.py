"""Records who feeds whom while a model runs, and holds neither tensors nor nodes of autograd.

Two sources: autograd's sequence numbers for what has a gradient, and the function mode that is on
anyway for what has none. Every node of autograd takes the next number of its thread when it is
made, so the counter before and after a call of a layer tells which nodes are the call's own; the
nodes between layers are walked once and remembered by number. docs/decisions/0016-flow.md has why.
"""

from pytest_modelhealth.capture.observing.flow.origins import Source
from pytest_modelhealth.capture.observing.flow.recorder import FlowRecorder
from pytest_modelhealth.capture.observing.flow.rows import OpenCall, counter

__all__ = ["FlowRecorder", "OpenCall", "Source", "counter"]
