"""What the tests of the monitor share."""

from __future__ import annotations

import pytest
import torch

from pytest_modelhealth.capture.passive import hooks as compiled


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare each monitor the look through all objects, unless a test compiles; it takes 0.1 s."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(compiled, "compiled_things", list)
