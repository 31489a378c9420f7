"""ONNX graphs: read as programs, and run by onnxruntime with every value as an output."""
