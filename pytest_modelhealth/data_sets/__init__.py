"""Runs over whole data sets: their batches, modes and ends, and what is collected over them."""
