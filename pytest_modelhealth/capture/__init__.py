"""The shelf of model kinds: a file a kind, behind the one seam in `engine`."""

from pytest_modelhealth.capture.engine import Engine, Request, find_engine
from pytest_modelhealth.capture.step.batch import Inputs, hinted

__all__ = ["Engine", "Inputs", "Request", "find_engine", "hinted"]
