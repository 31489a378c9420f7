"""Several processes, one report; imported only where there is a process group."""

END_OF_TEST = "PYTEST_MODELHEALTH_END_OF_TEST"
"""The environment variable that says when ranks of a test are ended, as `time.time` counts."""
