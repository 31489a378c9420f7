"""What a training does: the contract of one step, and the monitor of many.

`contract` is a shelf of checks of a training step, `stepping` runs the step for them, `monitoring`
watches the steps of the user's own loop.
"""

from pytest_modelhealth.training.shelf import all_step_checks, default_settings, every_check

__all__ = ["all_step_checks", "default_settings", "every_check"]
