"""What runs the checks and tells their findings as one story; loaded when a report is judged."""

from pytest_modelhealth.checks.judging.judge import judge

__all__ = ["judge"]
