from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import drift, drift_cost, environments
from benchmarks.cases import (
    changes,
    held_out_pairs,
    modern_changes,
    modern_refactors,
    refactors,
)
from benchmarks.cases.pair import Pair, Pairs, Said, Sides, as_module
from benchmarks.cases.subject import Subject
from benchmarks.comparers import COMPARERS, Comparer
from benchmarks.drift import grade

OPEN = [*refactors.PAIRS.pairs, *changes.PAIRS.pairs]
HELD_OUT = held_out_pairs.PAIRS.pairs
ALL = [*OPEN, *HELD_OUT]
MODERN = [*modern_refactors.PAIRS.pairs, *modern_changes.PAIRS.pairs]
BY_NAME = {pair.name: pair for pair in (*ALL, *MODERN)}


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are slower on several threads; give torch its threads back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the grading --------------------------------------------------------------------------------


def sides() -> Sides:
    """Return a model twice."""
    model = nn.Linear(2, 2)
    return Sides(Subject(model, torch.randn(3, 2)), model)


@pytest.mark.parametrize(
    ("at", "said", "cells"),
    [
        ((), Said(False), ["0 of 1", "none", "none", "0"]),
        ((), Said(True, ("fc1",)), ["1 of 1", "none", "none", "0"]),
        (("fc*",), Said(False), ["0 of 0", "0 of 1 (0%)", "0 of 1 (0%)", "0"]),
        (("fc*",), Said(True, ("head",)), ["0 of 0", "1 of 1 (100%)", "0 of 1 (0%)", "0"]),
        (("fc*",), Said(True, ("0", "fc2")), ["0 of 0", "1 of 1 (100%)", "1 of 1 (100%)", "0"]),
        (("fc*",), Said(True, (None,)), ["0 of 0", "1 of 1 (100%)", "0 of 1 (0%)", "0"]),
    ],
    ids=["passed", "false flag", "missed", "elsewhere", "located by its new name", "no layer"],
)
def test_pair_is_graded_by_verdict_and_first_layer(at, said, cells):
    """A refactor is right if it passes, a change if it is flagged and its layer named first."""
    score = grade(Comparer(lambda sides: said, ""), [Pair("it", "mlp", sides, at)])
    assert score.cells()[:4] == cells


def test_exception_of_a_comparer_flags_nothing():
    """A tool that breaks on a pair has not judged it, and its row says what it raised."""

    def breaks(sides):
        raise ZeroDivisionError("by zero")

    pairs = [Pair("good", "mlp", sides), Pair("bad", "mlp", sides, ("",))]
    score = grade(Comparer(breaks, ""), pairs)
    assert score.cells()[:4] == ["0 of 1", "0 of 1 (0%)", "0 of 1 (0%)", "2"]
    assert "| NO | ZeroDivisionError: by zero |" in list(drift.rows(score))[1]


def test_command_prints_a_row_for_each_group_and_pair(monkeypatch, capsys):
    """The table has open and held-out pairs apart; held-out ones are listed only when asked for."""
    shelves = {}
    for group, name in (("open", "seen"), ("held out", "hidden")):
        pairs = Pairs()
        pairs.refactor(name, net)(lambda model: None)
        pairs.change(f"{name} change", net, "1")(unbiased)
        shelves[group] = pairs.pairs
    monkeypatch.setattr(drift, "SHELVES", shelves)
    drift.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    for name in ("compare", "snapshot"):
        for group in ("open", "held out"):
            start = f"| {name} | {group} | 0 of 1 | 1 of 1 (100%) | 1 of 1 (100%) | 0 |"
            assert any(line.startswith(start) for line in lines)
    assert any(line.startswith("| seen | net | equivalent | yes | no difference") for line in lines)
    assert not any(line.startswith("| hidden") for line in lines)
    drift.main(["--list-held-out", "--only", "hidden ch*"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| hidden change | net | wrong at '1' | yes | 1") for line in lines)
    assert any(line.startswith("| compare | open | 0 of 0 | none |") for line in lines)


def unbiased(model):
    """Take the bias from the second layer."""
    model[1].bias = None


def net() -> Subject:
    """Return a small net with a batch."""
    return Subject(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(16, 4))


# ---- the pairs ----------------------------------------------------------------------------------


def test_there_are_pairs_enough():
    """At least 44 refactors and 44 harmful changes over 12 architectures, a third held out."""
    benign = [pair for pair in ALL if pair.is_benign]
    assert len(benign) >= 44
    assert len(ALL) - len(benign) >= 44
    assert len({pair.architecture for pair in ALL}) >= 12
    assert len(BY_NAME) == len(ALL) + len(MODERN), "two pairs share a name"
    assert len(modern_refactors.PAIRS.pairs) >= 25
    assert len(modern_changes.PAIRS.pairs) >= 25
    assert 0.3 < len(HELD_OUT) / len(ALL) < 0.4


def test_open_pairs_are_made_without_the_held_out_ones():
    """No other file of pairs imports them, so reading these gives nothing of them away."""
    folder = Path(held_out_pairs.__file__).parent
    others = [path for path in folder.glob("*.py") if path.name != "held_out_pairs.py"]
    assert others
    assert not [path.name for path in others if "held_out_pairs" in path.read_text()]


COMPILED = ("compiled by inductor", "compiled for autograd")  # seconds each, and a compiler


@pytest.mark.parametrize("name", [p.name for p in ALL if p.is_benign and p.name not in COMPILED])
def test_refactor_gives_the_same_outputs(name):
    """By torch.testing, with a tolerance far above rounding and far below any harmful change."""
    torch.manual_seed(0)
    made = BY_NAME[name].build()
    ours, theirs = (output_of(model, made) for model in (made.reference.model, as_module(made)))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def output_of(model, made):
    """Return what a model makes of the batch of its pair, under a seed of its own."""
    torch.manual_seed(1)
    inputs = made.reference.inputs
    with torch.no_grad():
        if isinstance(inputs, dict):
            return model(**inputs).logits
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@pytest.mark.parametrize("name", [pair.name for pair in ALL if not pair.is_benign])
def test_first_wrong_layer_is_a_layer(name):
    """Each harmful change accepts a layer of the reference, or the reference itself."""
    torch.manual_seed(0)
    pair = BY_NAME[name]
    made = pair.build()
    assert any(pair.is_at(layer) for layer, _ in made.reference.model.named_modules())


# ---- a sample of the measurement ----------------------------------------------------------------

SAMPLE = [
    "attributes into a Sequential",
    "layer norm written out",
    "q, k and v fused",
    "batch norms folded",
    "channels last",
    "one layer scaled by 1.001",
    "eps of a batch norm 1e-3 for 1e-5",
    "causal mask shifted by one",
    "residual dropped",
    "embedding and head untied",
    "mask as finite numbers that are added",
    "adapters merged without their scale",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_pair_is_judged_rightly_side_by_side(name):
    """A refactor passes; a harmful change is flagged at its layer."""
    (graded,) = grade(COMPARERS["compare"], [BY_NAME[name]]).graded
    assert graded.is_right, graded


@pytest.mark.parametrize(
    "name", ["layer norm written out", "batch first into time first", *SAMPLE[-5:]]
)
def test_pair_is_judged_rightly_by_a_snapshot(name):
    """So it is by a snapshot of the reference."""
    (graded,) = grade(COMPARERS["snapshot"], [BY_NAME[name]]).graded
    assert graded.is_right, graded


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


# ---- the peers ----------------------------------------------------------------------------------


def test_peer_that_is_not_installed_is_named_and_left_out(monkeypatch, capsys):
    """The table goes on without it."""
    absent = Comparer(lambda sides: 1 / 0, "nothing", needs="no_such_package")
    monkeypatch.setattr(drift, "COMPARERS", {"compare": COMPARERS["compare"], "absent": absent})
    monkeypatch.setattr(drift, "SHELVES", {"open": []})
    drift.main(["--peers"])
    output = capsys.readouterr().out
    assert "- absent (not installed, left out): nothing" in output
    assert "| absent |" not in output
    assert "| compare | open | 0 of 0 |" in output


@pytest.mark.parametrize("name", [name for name, one in COMPARERS.items() if one.needs])
@pytest.mark.parametrize("case", ["residual dropped", "nothing, but saved and loaded"])
def test_peer_judges(name, case):
    """Each peer sees a lost residual, and nothing in a copy."""
    if not COMPARERS[name].is_installed:
        pytest.skip(f"{COMPARERS[name].needs} is not installed")
    (graded,) = grade(COMPARERS[name], [BY_NAME[case]]).graded
    assert not graded.error
    assert graded.said.differs != graded.pair.is_benign
