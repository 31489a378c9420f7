"""Workers of pytest-xdist, each a process of its own, see what one process sees."""

from __future__ import annotations

import json

import pytest

WATCHED = """
import json, os, pathlib
import pytest, torch
from torch import nn
from pytest_modelhealth import Inspector

@pytest.mark.parametrize("seed", range(4))
def test_step(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    report = Inspector(model).run_inspection(torch.randn(40, 32))
    seen = {
        f"{record.name}/{role}/{name}": [s.mean, s.std, s.min, s.max, s.zero_count]
        for record in report
        for role in ("activations", "gradients", "parameter_gradients")
        for name, s in record.tensors(role).items()
    }
    pathlib.Path(f"{os.environ['FOLDER']}/{seed}.json").write_text(json.dumps([os.getpid(), seen]))
"""


def test_workers_find_the_same_numbers_bit_for_bit(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers at a time reduce every tensor to what a single process makes of it."""
    pytester.makepyfile(WATCHED)
    found = {}
    for workers in ("-n0", "-n2"):
        folder = pytester.mkdir(workers.strip("-"))
        monkeypatch.setenv("FOLDER", str(folder))
        pytester.runpytest_subprocess(workers).assert_outcomes(passed=4)
        found[workers] = [json.loads((folder / f"{seed}.json").read_text()) for seed in range(4)]
    assert [seen for _, seen in found["-n0"]] == [seen for _, seen in found["-n2"]]
    assert len({process for process, _ in found["-n2"]}) == 2
    assert len(found["-n2"][0][1]) > 8
