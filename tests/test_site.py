"""Every check has a model that it fails, and the reference has what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_every_check_has_a_model_that_fails_it_and_a_page_that_shows_it():
    """One run of all these tests: each fails with its check as culprit, as the reference says."""
    made = subprocess.run(
        [sys.executable, "scripts/failing_checks.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
