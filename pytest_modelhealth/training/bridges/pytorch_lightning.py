"""The callback for `pytorch_lightning.Trainer`."""

from __future__ import annotations

from typing import Any

from pytest_modelhealth.training.bridges.following import Follower
from pytest_modelhealth.training.bridges.lightning import made


def callback(follower: Follower) -> Any:
    """Return a `pytorch_lightning.Callback`."""
    from pytorch_lightning import Callback

    return made(Callback, follower)
