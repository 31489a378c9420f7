"""The graphs of TorchScript."""
