"""Two models on one batch: which layers are the same, where they first differ, and why."""
