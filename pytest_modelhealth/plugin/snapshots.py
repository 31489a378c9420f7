"""The fixture `health_snapshot`: ``assert report == health_snapshot``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_modelhealth.snapshot import HealthSnapshot


@pytest.fixture
def health_snapshot(request: pytest.FixtureRequest) -> HealthSnapshot:
    """The recorded statistics of a report; ``pytest --snapshot-update`` records them.

    ``assert report == health_snapshot`` fails where a layer drifted by more than the tolerance.
    ``health_snapshot(name="...")`` gives one of several in a test a name.
    """
    if not request.config.pluginmanager.hasplugin("syrupy"):
        pytest.fail(
            "health_snapshot needs the pytest plugin syrupy, which is switched off or not "
            "installed: remove -p no:syrupy, or install syrupy",
            pytrace=False,
        )
    from pytest_modelhealth.snapshot import HealthSnapshot, HealthSnapshotExtension

    # Asked for here rather than as an argument: without syrupy there is no such fixture.
    snapshot = request.getfixturevalue("snapshot")
    settings = {f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot) if f.init}
    return HealthSnapshot(**settings | {"extension_class": HealthSnapshotExtension})
