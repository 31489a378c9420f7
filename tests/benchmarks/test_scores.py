"""The commands that score tools on the corpus, and what snapshots cost and agree with."""

from fnmatch import fnmatchcase as fits

import pytest
import torch
from torch import nn

from benchmarks import detection, drift, drift_cost, environments, scores
from benchmarks.tools import COMPARERS, DETECTORS, Entrant
from corpus import Shelf, Subject


def dead() -> Subject:
    """Return a net whose first layer is dead."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[0].bias, -100.0)
    return Subject(model, torch.randn(32, 4))


def net() -> Subject:
    """Return a small net with a batch."""
    return Subject(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(16, 4))


def unbiased(model):
    """Take the bias from the second layer."""
    model[1].bias = None


@pytest.fixture
def few(monkeypatch):
    """A corpus of one fault, control, change and refactor in each of two groups."""
    shelves = []
    for group, name in (("open", "seen"), ("held out", "hidden")):
        shelf = Shelf("gradient", group)
        shelf.fault(name, dead, ("0", "1"), ("bias", "dead"))(lambda s: None)
        shelf.refactor(name, net)(lambda model: None)
        shelf.change(f"{name} change", net, "1")(unbiased)
        shelves.append(shelf)
    shelves[0].control("fine", dead)

    def cases(group, role, name):
        found = (case for shelf in shelves for case in shelf.cases)
        return [c for c in found if (c.group, c.role) == (group, role) and fits(c.name, name)]

    monkeypatch.setattr(scores, "cases", cases)


def test_detection_prints_a_row_for_each_group_and_case(few, capsys):
    """The table has open and held-out cases apart; held-out ones are listed only when asked for."""
    detection.main(["--list", "--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("| modelhealth | open |"))
    assert row.startswith(f"| modelhealth | open | {'1 of 1 (100%) | ' * 3}0 | 1 of 1 (100%) | ")
    assert "| 1 of 1 | 2 of 2 |" in row
    assert any(line.startswith("| seen | dead | yes | yes | yes | dead_units at") for line in lines)
    assert any(line.startswith("| fine | 1 | dead_units at") for line in lines)
    assert not any(line.startswith("| hidden") for line in lines)
    detection.main(["--list-held-out", "--only", "hid*"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| hidden | dead | yes") for line in lines)
    assert any(line.startswith("| modelhealth | open | none |") for line in lines)


def test_drift_prints_a_row_for_each_group_and_pair(few, capsys):
    """Comparison and snapshot are each scored on open and held-out pairs, as models are."""
    drift.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("compare", "snapshot"):
        for group in ("open", "held out"):
            start = f"| {name} | {group} | {'1 of 1 (100%) | ' * 3}0 | "
            (row,) = (line for line in lines if line.startswith(start))
            assert "| 0 of 1 | 0 of 1 |" in row
    assert any(line.startswith("| seen change | net | yes | yes | yes | at 1: 1") for line in lines)
    assert not any(line.startswith("| hidden") for line in lines)
    drift.main(["--list-held-out", "--only", "hidden ch*"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| hidden change | net | yes | yes | yes | at 1") for line in lines)
    assert any(line.startswith("| compare | open | none |") for line in lines)


@pytest.mark.parametrize(("command", "entrants"), [(detection, "DETECTORS"), (drift, "COMPARERS")])
def test_peer_that_is_not_installed_is_named_and_left_out(
    command, entrants, few, monkeypatch, capsys
):
    """The table goes on without it."""
    absent = Entrant(lambda built: 1 / 0, "nothing", needs="no_such_package")
    ours = {"modelhealth": DETECTORS["modelhealth"], **{n: COMPARERS[n] for n in drift.OURS}}
    monkeypatch.setattr(command, entrants, {**ours, "absent": absent})
    command.main(["--peers", "--only", "none"])
    output = capsys.readouterr().out
    assert "- absent (not installed, left out): nothing" in output
    assert "| absent |" not in output
    assert "| modelhealth | open | none |" in output


# ---- the settings and the cost ------------------------------------------------------------------


def test_snapshot_of_another_setting_does_not_drift(monkeypatch, tmp_path):
    """What is recorded with another precision of products agrees, until a layer is scaled."""
    monkeypatch.setattr(environments, "MODELS", {"LSTM": environments.MODELS["LSTM"]})
    monkeypatch.setattr(environments, "SETTINGS", {"high": environments.Setting(precision="high")})
    environments.SETTINGS["high"].apply()
    environments.record_all(tmp_path, "high")
    environments.Setting().apply()
    ((setting, name, differs, differs_scaled, text),) = environments.read_all(tmp_path)
    assert (setting, name, differs, differs_scaled, text) == ("high", "LSTM", False, True, "")


def test_cost_has_a_column_for_each_thing_done(capsys):
    """Recording, reading and comparing are timed on each step asked for."""
    drift_cost.main(["example CNN", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert "| record | read |" in lines[2]
    assert lines[4].startswith("| example CNN |")
    assert "raises" not in lines[4]
