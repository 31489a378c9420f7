"""What watches a run: it finds tensors, reduces them, and keeps only their statistics."""
