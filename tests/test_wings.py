"""Each wing can be deleted: the rest works, and says what is missing where it is asked for."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

from pytest_modelhealth.plugin.several_ranks.processes import start_server

PACKAGE = Path(__file__).parents[1] / "pytest_modelhealth"

INSPECTION = """
import pytest
import torch
from torch import nn

import pytest_modelhealth
from pytest_modelhealth import InspectionError, Inspector, compare

WORD = {word!r}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def test_the_rest(inspector, health_snapshot):
    x = torch.randn(16, 8)
    report = inspector(model()).run_inspection(x)
    report.assert_healthy()
    compare(model(), model(), x).assert_equivalent()
    assert "Linear" in report.render("html")
    assert report == health_snapshot


def test_an_unhealthy_model_fails():
    net = model()
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="finite"):
        Inspector(net).run_inspection(torch.randn(16, 8)).assert_healthy()


def test_what_is_missing(inspector):
    x = torch.randn(4, 8)
    net = model()
    with pytest.raises((InspectionError, ImportError)) as error:
        {asked}
    assert WORD in str(error.value) and "install the whole package again" in str(error.value)
"""

WINGS = {
    "training": "inspector(net).run_step(None, torch.optim.SGD(net.parameters(), 0.1), inputs=x)",
    "probes": "inspector(net).run_inspection(x, probes=True)",
    "data_sets": "inspector(net).run_batches([x, x])",
    "removal": "inspector(net).removable([x, x])",
    "ranks": "from pytest_modelhealth.wings import wing; wing('ranks.joint:joined')",
    "capture/deployed": "inspector(torch.export.export(net, (x,)))",
    "capture/parallel": "torch.distributed.init_process_group('gloo', rank=0, world_size=1, "
    "store=torch.distributed.HashStore()); inspector(net).run_inspection(x)",
    "plugin/suite": "from pytest_modelhealth import ModelHealthSuite",
    "plugin/several_ranks": "",
    "runs": "",
    "bundles": "",
}
"""A wing's folder, and what asks for it in a test."""

OPTIONS = {
    "runs": ["--modelhealth-json=run.json"],
    "bundles": ["--modelhealth-replay=failed"],
    "plugin/suite": ["--modelhealth-model=torch.nn:Linear"],
}
"""A wing, and an option that asks for it when pytest starts."""


def run_tests(site: Path, folder: Path, output: Path, runs: list[list[str]]) -> None:
    """Run pytest with these arguments, one after the other, on the package in another folder."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ["PYTEST_ADDOPTS"] = "-p no:cacheprovider"
    for name in [name for name in sys.modules if name.startswith(("pytest_modelhealth", "tests"))]:
        del sys.modules[name]
    sys.path.insert(0, str(site))
    for arguments in runs:
        pytest.main(["-q", *arguments])


@pytest.mark.parametrize("wing", WINGS)
def test_without_the_folder_of_a_wing_the_rest_works(wing: str, tmp_path: Path) -> None:
    """What a wing is for names it; inspecting, comparing, snapshots and pages go on."""
    copy = tmp_path / "site" / "pytest_modelhealth"
    shutil.copytree(PACKAGE, copy)
    shutil.rmtree(copy / wing)
    word = f"pytest_modelhealth.{wing.replace('/', '.')}"
    text = INSPECTION.format(word=word, asked=WINGS[wing] or "pass")
    names = ["test_the_rest", "test_an_unhealthy_model_fails"]
    names += ["test_what_is_missing"] * bool(WINGS[wing])
    if wing == "plugin/several_ranks":
        text += "\n\n@pytest.mark.modelhealth_ranks(2)\ndef test_ranks(rank):\n    pass\n"
        names.append("test_ranks")
    test = tmp_path / "test_model.py"
    test.write_text(text)
    runs = [["--snapshot-update", *(f"{test.name}::{name}" for name in names)]]
    runs += [[option, test.name] for option in OPTIONS.get(wing, ())]
    output = tmp_path / "output.txt"
    start_server()  # that of tests on several ranks, which has torch imported
    started = multiprocessing.get_context("forkserver").Process(
        target=run_tests, args=(copy.parent, tmp_path, output, runs)
    )
    started.start()
    started.join()
    said = output.read_text()
    if wing == "plugin/several_ranks":
        assert "2 passed, 1 error" in said, said
        assert word in said
    else:
        assert f"{len(names)} passed" in said, said
    for option in OPTIONS.get(wing, ()):
        assert f"{option.partition('=')[0]}: this needs {word}" in said, said
