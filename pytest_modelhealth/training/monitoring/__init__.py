"""The training monitor: sees steps of a loop that the user runs, and keeps their numbers."""
