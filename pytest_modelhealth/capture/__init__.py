"""The shelf of model kinds: a file a kind, behind the one seam in `engine`."""

from pytest_modelhealth.capture.engine import Engine, Request, find_engine
from pytest_modelhealth.capture.step.hints import hinted
from pytest_modelhealth.capture.step.inputs import Inputs

__all__ = ["Engine", "Inputs", "Request", "find_engine", "hinted"]
