from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import detection
from benchmarks.cases import (
    controls,
    designs,
    faults,
    fields,
    held_out,
    libraries,
    perception,
    routes,
    starts,
    uncommon,
    wirings,
)
from benchmarks.cases.models import mlp
from benchmarks.cases.subject import Control, Fault, Shelf, Subject, loss_of, run, trained
from benchmarks.detection import Score, alarm, grade
from benchmarks.detectors import DETECTORS, Detector
from benchmarks.finding import Finding

FAULTS = [*faults.SHELF.faults, *uncommon.SHELF.faults, *fields.SHELF.faults]
FAULTS += perception.SHELF.faults + starts.SHELF.faults + held_out.SHELF.faults
FAULTS += wirings.SHELF.faults + routes.SHELF.faults
CONTROLS = [*controls.SHELF.controls, *designs.SHELF.controls, *uncommon.SHELF.controls]
CONTROLS += fields.SHELF.controls + perception.SHELF.controls
CONTROLS += libraries.SHELF.controls + starts.SHELF.controls + held_out.SHELF.controls
CONTROLS += wirings.SHELF.controls + routes.SHELF.controls
BY_NAME = {case.name: case for case in (*FAULTS, *CONTROLS)}


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are slower on several threads; give torch its threads back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, seed: int = 0) -> Subject:
    """Return the subject of the case of this name."""
    torch.manual_seed(seed)
    return BY_NAME[name].build()


# ---- the grading --------------------------------------------------------------------------------

FAULT = Fault("bias", "mlp", lambda: None, at=("fc1", "blocks.*"), words=("dead",), by=("units",))


def graded(*findings: Finding) -> detection.Graded:
    """Return what is made of `FAULT` by a detector with these findings."""
    score = Score()
    grade(Detector(lambda subject: list(findings), ""), [FAULT], score)
    return score.graded[0]


@pytest.mark.parametrize(
    ("findings", "marks"),
    [
        ([], (False, False, False, False)),
        ([Finding("fc2", "units", "dead")], (True, False, False, False)),
        ([Finding("fc1", "units", "alive")], (True, True, False, True)),
        ([Finding("fc1", "finite", "dead")], (True, True, False, True)),
        ([Finding("blocks.3", "units", "Dead units")], (True, True, True, True)),
        (
            [Finding("fc2", "finite", "NaN"), Finding("fc1", "units", "dead")],
            (True, True, True, False),
        ),
        (
            [Finding("fc1", "units", "alive"), Finding("fc2", "units", "dead")],
            (True, True, False, True),
        ),
    ],
    ids=["silent", "elsewhere", "no word", "other check", "right", "second", "split"],
)
def test_fault_is_graded_by_layer_check_and_word(findings, marks):
    """Located needs the layer; a right cause needs layer, check and word in one finding."""
    got = graded(*findings)
    assert (got.is_caught, got.is_located, got.has_right_cause, got.leads) == marks


def test_warning_is_no_catch_and_no_alarm():
    """A fault that a warning names rightly is counted apart; a control may be warned of."""
    warning = Finding("fc1", "units", "dead", warns=True)
    got = graded(warning)
    assert (got.is_caught, got.leads, got.is_only_warned_of) == (False, False, True)
    assert not graded(Finding("fc1", "units", "dead"), warning).is_only_warned_of
    assert not graded(Finding("fc2", "units", "dead", warns=True)).is_only_warned_of
    assert got.is_named
    assert graded(Finding("fc2", "units", "dead")).is_named  # by its cause alone
    assert not graded(Finding("fc2", "units", "alive")).is_named
    score = Score()
    alarm(Detector(lambda subject: [warning], ""), [Control("fine", lambda: None)], 2, score)
    assert (score.false_alarms, len(score.not_run)) == (0, 0)


def test_exception_of_a_detector_is_no_catch():
    """A tool that breaks on a case has not judged it, and its row says what it raised."""

    def breaks(subject):
        raise ZeroDivisionError("by zero")

    score = Score()
    grade(Detector(breaks, ""), [FAULT], score)
    assert not score.graded[0].is_caught
    assert score.graded[0].error == "ZeroDivisionError: by zero"
    alarm(Detector(breaks, ""), [Control("fine", lambda: None)], 2, score)
    assert (score.false_alarms, len(score.not_run)) == (0, 2)
    assert score.cells()[8] == "3"


def test_false_alarms_are_counted_by_control_and_by_run():
    """Two controls with three seeds, one of them objected to twice: 1 of 2, and 2 of 6."""
    unsound = [Finding("fc1", "units", "dead")]
    cases = [Control(name, lambda name=name: name) for name in ("good", "bad")]
    seen = []

    def judge(subject):
        seen.append(subject)
        return unsound if subject == "bad" and seen.count("bad") > 1 else []

    score = Score()
    alarm(Detector(judge, ""), cases, 3, score)
    assert not score.not_run
    assert (score.false_alarms, len(score.alarms), score.runs) == (1, 2, 6)
    assert score.cells()[6:8] == ["1 of 2", "2 of 6"]


def test_each_run_of_a_case_draws_from_its_seed():
    """What a subject is made of depends on the seed alone, not on what ran before."""
    drawn = []
    cases = [Control("noise", lambda: drawn.append(torch.rand(()).item()))]
    for _ in range(2):
        alarm(Detector(lambda subject: [], ""), cases, 2, Score())
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


def test_command_prints_a_row_for_each_group_and_case(monkeypatch, capsys):
    """The table has open and held-out cases apart; held-out ones are listed only when asked for."""
    shelf, hidden = Shelf(), Shelf()
    for name, where in (("seen", shelf), ("hidden", hidden)):
        where.fault(name, dead, ("0", "1"), ("bias", "dead"))(lambda s: None)
    shelf.control("fine", dead)
    monkeypatch.setattr(detection, "SHELVES", {"open": [shelf], "held out": [hidden]})
    detection.main(["--list", "--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("| modelhealth | open |")).startswith(
        "| modelhealth | open | 1 of 1 (100%) | 1 of 1 (100%) | 1 of 1 (100%) | "
    )
    assert "| 1 of 1 | 2 of 2 |" in next(line for line in lines if "| open |" in line)
    assert any(line.startswith("| seen | dead | yes | yes | yes | dead_units at") for line in lines)
    assert any(line.startswith("| fine | 1 | dead_units at") for line in lines)
    assert not any(line.startswith("| hidden") for line in lines)
    detection.main(["--list-held-out", "--only", "hid*"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| hidden | dead | yes") for line in lines)
    assert any(line.startswith("| modelhealth | open | none |") for line in lines)


def dead() -> Subject:
    """Return a net whose first layer is dead."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[0].bias, -100.0)
    return Subject(model, torch.randn(32, 4))


# ---- the cases ----------------------------------------------------------------------------------


def test_there_are_cases_enough():
    """At least 90 faults over 12 architectures and 64 controls, enough of each held out."""
    assert len(FAULTS) >= 90
    assert len({fault.architecture for fault in FAULTS}) >= 12
    assert len(CONTROLS) >= 64
    assert len(BY_NAME) == len(FAULTS) + len(CONTROLS), "two cases share a name"
    assert len(held_out.SHELF.faults) >= 50
    assert len(held_out.SHELF.controls) >= 70


def test_open_cases_are_made_without_the_held_out_ones():
    """No other file of cases names held_out, so reading them gives nothing of it away."""
    folder = Path(held_out.__file__).parent
    others = [path for path in folder.glob("*.py") if path.name != "held_out.py"]
    assert others
    assert not [path.name for path in others if "held_out" in path.read_text()]


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_culprit_is_a_layer_of_the_model(name):
    """Each place that a fault accepts, but the loss and functions, is a layer of its model."""
    subject = build(name)
    layers = [layer for layer, _ in subject.model.named_modules()]
    assert any(BY_NAME[name].is_at(layer) for layer in layers)


def test_trained_subject_has_learnt_once_for_each_seed():
    """Its loss fell by half, each seed has its own, and what is returned is a copy."""
    made = []

    def healthy() -> Subject:
        made.append(None)
        return mlp()

    def loss(subject: Subject) -> float:
        return loss_of(subject, run(subject.model, subject.inputs), subject.target).item()

    torch.manual_seed(0)
    fresh, first, again = healthy(), trained(healthy), trained(healthy)
    assert loss(first) == loss(again) < loss(fresh) / 2
    nn.init.zeros_(first.model.head.weight)
    assert again.model.head.weight.any()
    torch.manual_seed(1)
    assert loss(trained(healthy)) != loss(again)
    assert len(made) == 3


# ---- a sample of the measurement ----------------------------------------------------------------

CAUGHT = [
    "weights of a hidden layer all zero",
    "ReLU module dead by its bias",
    "channels dead by a batch norm's shift",
    "detach in mid-net",
    "argmax where a softmax was meant",
    "comparison makes the features",
    "log of a ReLU",
    "torch.where hides a log from forward only",
    "a NaN in a convolution's weight",
    "running mean is NaN",
    "twenty sigmoid layers",
    "twenty layers with three times the gain",
    "dead units behind clamp",
    "a state that grows instead of decaying",
    "binary targets of 0 and 255",
    "loss weight of zero",
]
WARNED_OF = [
    "no_grad around the encoder",
    "time embedded under no_grad",
    "made images detached in the generator's step",
]
LEFT_ALONE = [
    "mlp, trained",
    "resnet, initialised",
    "gpt, trained, batch of 1",
    "cnn, initialised, eval",
    "24 convolutions of deviation 0.05, initialised, eval",
    "scales drawn around 0.1, shifts by 0.1, eval",
    "teacher under no_grad, not frozen",
    "regression, trained, bfloat16",
    "transformers mixtral",
    "transformers t5",
    "resnet, last norm of each branch zero",
    "gpt with fresh LoRA adapters",
    "deep plain ReLU of 40 layers",
    "embedding of 5000 rows, 17 of them used",
    "loss on one output of two",
    "padding masked with -inf",
    "hinge that every sample satisfies",
    "SimSiam",
    "compressed attention, shorter than a window",
    "states of a tower without its summary",
    "a scale for each channel of a convolution",
    "content queries that start at zero",
    "attention over one token",
    "an indexer with a loss of its own",
    "an adapter without its context",
    "a gate that starts at zero",
    "clipped policy gradient, first step",
    "noise prediction, last convolution zero",
]


@pytest.mark.parametrize("name", CAUGHT)
def test_fault_is_caught_and_located(name):
    """One inspection with default settings names the layer at fault and says why."""
    score = Score()
    grade(DETECTORS["modelhealth"], [BY_NAME[name]], score)
    assert score.graded[0].has_right_cause, score.graded[0]


@pytest.mark.parametrize("name", WARNED_OF)
def test_fault_that_looks_like_a_design_is_warned_of(name):
    """Nothing fails, and a warning names the layer and says why."""
    score = Score()
    grade(DETECTORS["modelhealth"], [BY_NAME[name]], score)
    assert score.graded[0].is_only_warned_of


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_healthy_model_is_left_alone(name):
    """No check objects to it."""
    score = Score()
    alarm(DETECTORS["modelhealth"], [BY_NAME[name]], 1, score)
    assert not score.alarms + score.not_run


# ---- the peers ----------------------------------------------------------------------------------


def test_peer_that_is_not_installed_is_named_and_left_out(monkeypatch, capsys):
    """The table goes on without it."""
    absent = Detector(lambda subject: 1 / 0, "nothing", needs="no_such_package")
    monkeypatch.setattr(detection, "DETECTORS", {**DETECTORS, "absent": absent})
    monkeypatch.setattr(detection, "SHELVES", {"open": [Shelf()]})
    detection.main(["--peers"])
    output = capsys.readouterr().out
    assert "- absent (not installed, left out): nothing" in output
    assert "| absent |" not in output
    assert "| modelhealth | open | none |" in output


@pytest.mark.parametrize("name", [name for name, one in DETECTORS.items() if one.needs])
@pytest.mark.parametrize("case", ["no_grad around the encoder", "mlp, trained"])
def test_peer_judges(name, case):
    """Each peer finds an encoder that gets no gradient, and nothing wrong with a trained net."""
    detector = DETECTORS[name]
    if not detector.is_installed:
        pytest.skip(f"{detector.needs} is not installed")
    found = detector.judge(build(case))
    assert bool(found) == (case in WARNED_OF)
    assert not found or any(one.layer.startswith("encoder") for one in found)
