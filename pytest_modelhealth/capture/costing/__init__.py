"""What a run costs: arithmetic by torch's own counter, and memory by the storages of tensors."""
