"""Models that left Python, as named tensors: exported, scripted, ONNX.

A kind of model reads its graph into a `Program`, which says which operation of which layer makes
which value, and is a `Runtime`, which runs a batch and gives the values by name. `DeployedModel`
shows them, layer by layer.
"""

from pytest_modelhealth.capture.deployed.exported import ExportedEngine
from pytest_modelhealth.capture.deployed.flat_graph import FlatGraphEngine
from pytest_modelhealth.capture.deployed.onnx import OnnxEngine
from pytest_modelhealth.capture.deployed.script import ScriptEngine

KINDS = (ScriptEngine, FlatGraphEngine, OnnxEngine, ExportedEngine)
