"""Models that left Python, as named tensors: exported, scripted, ONNX.

A kind of model reads its graph into a `Program`, which says which operation of which layer makes
which value, and is a `Runtime`, which runs a batch and gives the values by name. `DeployedModel`
shows them, layer by layer.
"""

from pytest_modelhealth.capture.deployed import exported, flat_graph, onnx, script

__all__ = ["exported", "flat_graph", "onnx", "script"]
