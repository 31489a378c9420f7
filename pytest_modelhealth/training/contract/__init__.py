"""The shelf of checks of a training step: a file is a check, found by looking into this folder.

As with all checks, a run that sets a limit loads every file, so that none imports torch.
"""

from pytest_modelhealth.training.contract.step_check import StepCheck

__all__ = ["StepCheck"]
