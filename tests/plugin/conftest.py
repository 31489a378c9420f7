"""Inner test runs that see the plugin as a user who installed it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.plugin.outcomes import OPTIONS, Run, project

ROOT = Path(__file__).parents[2]

NETS = '''
import torch
from torch import nn

BATCH = torch.linspace(-1, 1, 256).reshape(64, 4)

def healthy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def with_nan():
    """Layer "2" has a NaN weight; everything before it is healthy."""
    model = healthy()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    return model

def with_dead_relu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(-10)
    return model
'''
"""A module `nets` for the inner runs."""


@pytest.fixture(scope="session", autouse=True)
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let inner runs, in this process and others, find the plugin by its entry point."""
    paths = [str(ROOT)]
    if "modelhealth" not in entry_points(group="pytest11").names:
        folder = tmp_path_factory.mktemp("installed")
        metadata = folder / "pytest_modelhealth-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Name: pytest-modelhealth\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(
            "[pytest11]\nmodelhealth = pytest_modelhealth.plugin\n"
        )
        paths.append(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        patch.delenv("CI", raising=False)  # the short summary is longer there
        patch.delenv("GITHUB_ACTIONS", raising=False)  # its summary would tell of our inner runs
        patch.setenv("COLUMNS", "120")
        # else each process of an inner run rewrites the asserts of hypothesis and syrupy anew
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


@pytest.fixture
def nets(pytester: pytest.Pytester) -> pytest.Pytester:
    """A pytester whose tests can import the models of `NETS`."""
    pytester.makepyfile(nets=NETS)
    pytester.syspathinsert()
    return pytester


RUNS: list[Run] = []


@pytest.fixture
def everything(nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What a run of `outcomes.SUITE` with every destination gave: there is one, for all tests."""
    if not RUNS:
        folder = project(nets, monkeypatch)
        nets.runpytest("-k", "drifted", "--snapshot-update").assert_outcomes(
            passed=1, deselected=31
        )
        (nets.path / "summary.md").write_text("what an earlier command of the step wrote\n")
        RUNS.append(Run(folder, nets.runpytest(*OPTIONS)))
    return RUNS[0]
