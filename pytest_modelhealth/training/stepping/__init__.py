"""Runs a training step a few times, watched and changed, and puts everything back."""
