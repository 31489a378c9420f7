"""Watches a step that the user runs: it runs nothing, holds no tensor and changes no number."""
