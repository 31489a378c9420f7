"""Snapshots: a report as a file that people review, and drift from it judged by its noise."""
