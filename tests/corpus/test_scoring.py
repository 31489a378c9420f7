"""How what a tool says of a case is graded, and ``python -m corpus list`` and ``score``."""

import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import corpus
from corpus import Shelf, Subject, run
from corpus.cards import Case
from corpus.command import main
from corpus.models.small import mlp
from corpus.scoring import COLUMNS, Finding, Score, judge, score

FAULT = Case(
    *("bias", "fault", "initialisation", "open", lambda: None),
    at=("fc1", "blocks.*"),
    words=("dead",),
    by=("units",),
)
ROOT = Case("loss", "fault", "loss", "open", lambda: None, at=("", "loss"), words=("sign",))
CHANGE = Case("eps", "change", "refactor", "open", lambda: None, at=("fc*",))
REFACTOR = Case("same", "refactor", "refactor", "open", lambda: None)


def control(name="fine", build=lambda: None):
    """Return a healthy case."""
    return Case(name, "control", "healthy", "open", build)


def judged(case, *findings):
    """Return what is made of a case by a tool with these findings."""
    return judge(lambda built: findings, case)


def cells(made: Score) -> dict[str, str]:
    """Return the row of a score by column."""
    return dict(zip(COLUMNS, made.cells(), strict=True))


@pytest.mark.parametrize(
    ("findings", "marks"),
    [
        ([], (False, False, False, False)),
        ([Finding("fc2", "units", "dead")], (True, False, False, False)),
        ([Finding("fc1", "units", "alive")], (True, True, False, True)),
        ([Finding("fc1", "finite", "dead")], (True, True, False, True)),
        ([Finding("blocks.3", "units", "Dead units")], (True, True, True, True)),
        ([Finding("fc1", text="dead")], (True, True, True, True)),
        (
            [Finding("fc2", "finite", "NaN"), Finding("fc1", "units", "dead")],
            (True, True, True, False),
        ),
        (
            [Finding("fc1", "units", "alive"), Finding("fc2", "units", "dead")],
            (True, True, False, True),
        ),
    ],
    ids=["silent", "elsewhere", "no word", "other check", "right", "nameless", "second", "split"],
)
def test_fault_is_graded_by_layer_check_and_word(findings, marks):
    """Located needs the layer; a right cause needs layer, check and word in one finding."""
    got = judged(FAULT, *findings)
    assert (got.is_caught, got.is_located, got.has_right_cause, got.leads) == marks


@pytest.mark.parametrize(
    ("case", "findings", "at_layer", "at_root_only"),
    [
        (FAULT, [Finding("fc1")], True, False),
        (FAULT, [Finding("fc2")], False, False),
        (ROOT, [Finding("")], False, True),
        (ROOT, [Finding("loss")], False, True),
        (CHANGE, [Finding("", also=("fc2",))], True, False),
    ],
    ids=["layer", "elsewhere", "model", "loss", "in the other model"],
)
def test_layer_and_root_are_told_apart(case, findings, at_layer, at_root_only):
    """Naming the model as a whole is no layer, though it may be all that is right."""
    got = judged(case, *findings)
    assert (got.is_at_layer, got.is_at_root_only) == (at_layer, at_root_only)


def test_root_does_not_pass_for_a_layer_where_any_is_right():
    """A pattern that fits every layer fits the model, too: that is counted as the root."""
    anywhere = Case("deep", "fault", "gradient", "open", lambda: None, at=("*",))
    assert judged(anywhere, Finding("")).is_at_root_only
    assert not judged(anywhere, Finding(""), Finding("4")).is_at_root_only


def test_warning_is_no_catch_and_no_alarm():
    """A fault that a warning names rightly is counted apart; a control may be warned of."""
    warning = Finding("fc1", "units", "dead", warns=True)
    got = judged(FAULT, warning)
    assert (got.is_caught, got.leads, got.is_only_warned_of) == (False, False, True)
    assert not judged(FAULT, Finding("fc1", "units", "dead"), warning).is_only_warned_of
    assert not judged(FAULT, Finding("fc2", "units", "dead", warns=True)).is_only_warned_of
    assert got.is_named
    assert judged(FAULT, Finding("fc2", "units", "dead")).is_named  # by its cause alone
    assert not judged(FAULT, Finding("fc2", "units", "alive")).is_named
    made = score(lambda built: [warning], [control()], 2)
    assert (made.false_alarms, cells(made)["raised"]) == (0, "0")


@pytest.mark.parametrize(
    ("case", "findings", "marks"),
    [
        (REFACTOR, [], (True, "0 of 1", "none", "none")),
        (REFACTOR, [Finding("fc1")], (False, "1 of 1", "none", "none")),
        (CHANGE, [], (False, "0 of 0", "0 of 1 (0%)", "0 of 1 (0%)")),
        (CHANGE, [Finding("head")], (False, "0 of 0", "1 of 1 (100%)", "0 of 1 (0%)")),
        (CHANGE, [Finding("0", also=("fc2",))], (True, "0 of 0", *["1 of 1 (100%)"] * 2)),
        (CHANGE, [Finding(None)], (False, "0 of 0", "1 of 1 (100%)", "0 of 1 (0%)")),
    ],
    ids=["passed", "false alarm", "missed", "elsewhere", "located by its new name", "no layer"],
)
def test_pair_is_graded_by_objection_and_first_layer(case, findings, marks):
    """A refactor is right if it passes, a change if it is flagged and its layer named first."""
    made = score(lambda built: findings, [case])
    row = cells(made)
    got = (row["false alarms"], row["caught"], row["in the first line"])
    assert (made.judged[0].is_right, *got) == marks


def test_exception_of_a_tool_is_neither_catch_nor_alarm():
    """A tool that breaks on a case has not judged it, and its row says what it raised."""

    def breaks(built):
        raise ZeroDivisionError("by zero")

    made = score(breaks, [FAULT, control(), CHANGE], 2)
    assert not any(one.is_caught or one.is_right for one in made.judged)
    assert made.judged[0].error == "ZeroDivisionError: by zero"
    assert (made.false_alarms, cells(made)["raised"]) == (0, "4")


def test_case_that_a_tool_does_not_judge_is_left_out():
    """A tool for single models takes no pair, which is no fault of its own."""

    def single(built):
        raise NotImplementedError

    assert score(single, [CHANGE, REFACTOR]).judged == []


def test_false_alarms_are_counted_by_control_and_by_run():
    """Two controls with three seeds, one of them objected to twice: 1 of 2, and 2 of 6."""
    seen = []

    def tool(built):
        seen.append(built)
        return [Finding("fc1")] if built == "bad" and seen.count("bad") > 1 else []

    cases = [control(name, lambda name=name: name) for name in ("good", "bad")]
    row = cells(score(tool, cases, 3))
    assert (row["false alarms"], row["over all seeds"]) == ("1 of 2", "2 of 6")


def test_each_run_of_a_case_draws_from_its_seed():
    """What is built depends on the seed alone, not on what ran before."""
    drawn = []
    noise = control("noise", lambda: drawn.append(torch.rand(()).item()))
    for _ in range(2):
        score(lambda built: [], [noise], 2)
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


# ---- the command ---------------------------------------------------------------------------------


def lines(capsys):
    """Return the rows of what was printed."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]


def test_list_has_a_row_for_each_card(capsys):
    """Of the kind, group and role asked for; with its card where that is asked for."""
    main(["list", "--kind", "loss", "--group", "open", "--role", "fault"])
    table = lines(capsys)
    assert table[0] == "| case | in | role | kind | group |"
    assert "| accuracy as loss | sequential | fault | loss | open |" in table
    main(["list", "--cards", "--only", "accuracy as loss"])
    (*_, card) = lines(capsys)
    assert "| the model, loss, 4, 0 | detach, " in card
    assert card.endswith(" and nothing learns from it. |")


@pytest.fixture
def tool(monkeypatch):
    """A tool of somebody else's, which objects to the model as a whole, and takes no pairs."""

    def objects(built):
        if not isinstance(built, Subject):
            raise NotImplementedError
        return [Finding("", text="no derivative")]

    monkeypatch.setitem(sys.modules, "somebodys", SimpleNamespace(tool=objects))
    return "somebodys:tool"


def test_score_has_a_row_for_each_kind_and_group(tool, capsys):
    """Any function can be scored; what it names at the root alone is counted apart."""
    main(["score", "--tool", tool, "--only", "accuracy as loss", "--list"])
    table = lines(capsys)
    assert table[2].startswith(
        "| loss | open | 1 of 1 (100%) | 1 of 1 (100%) | 0 of 1 (0%) | 1 | 0 of 1 (0%) |"
    )
    assert "| accuracy as loss | sequential | yes | yes | NO | at the model: no deri" in table[5]
    main(["score", "--tool", tool, "--only", "normal* flow", "--seeds", "2", "--rules"])
    table = lines(capsys)
    assert table[2].endswith(" | 1 of 1 | 2 of 2 | 0 | 0 |")
    assert table[-1] == "|  | no derivative | 0 | 0 | 2 | 0 |"


def test_score_sums_up_kinds(tool, capsys):
    """The last rows have each group over all kinds, where there are several."""
    main(["score", "--tool", tool, "--only", "softmax over the batch"])
    rows = [line.split(" | ")[:3] for line in lines(capsys)[2:]]
    assert rows == [
        ["| loss", "open", "1 of 1 (100%)"],
        ["| refactor", "open", "none"],
        ["| all", "open", "1 of 1 (100%)"],
    ]


def test_pairs_are_left_to_tools_that_judge_them(tool, capsys):
    """A tool that takes no pairs has no figures on them."""
    main(["score", "--tool", tool, "--kind", "refactor", "--only", "kernels flipped"])
    assert lines(capsys)[2].startswith("| refactor | open | none |")


def test_held_out_cases_are_listed_only_when_asked_for(tool, capsys):
    """Their figures are shown, and their names only with their group."""
    asked = ["score", "--tool", tool, "--only", "negative squared error", "--list"]
    main(asked)
    assert not [line for line in lines(capsys) if "negative squared" in line]
    main([*asked, "--group", "held out"])
    assert [line for line in lines(capsys) if "negative squared" in line]


def test_unknown_tool_is_refused():
    """A name that is neither known nor a module's function ends the command and says so."""
    with pytest.raises(
        SystemExit, match="no tool 'nobodys': modelhealth, probed, fixture, or module:function"
    ):
        main(["score", "--tool", "nobodys"])


def test_code_of_the_page_runs(capsys, monkeypatch):
    """The tool of docs/reference/corpus.md is scored, its loop runs, and its fault is one."""
    page = Path(corpus.__file__).parent.parent / "docs" / "reference" / "corpus.md"
    fences = re.findall(
        r"^( *)```py\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    tool, loop, fault = (textwrap.dedent(code) for _, code in fences)
    names = {}
    exec(tool, names)
    monkeypatch.setitem(sys.modules, "mytool", SimpleNamespace(**names))
    main(["score", "--tool", "mytool:judge", "--only", "detach in mid-net"])
    assert lines(capsys)[2].startswith("| gradient | open | 1 of 1 (100%) | 1 of 1 (100%) |")
    exec(loop, {})
    shelf = Shelf("wiring")
    exec(fault, {"fault": shelf.fault, "mlp": mlp, "Subject": Subject})
    (case,) = shelf.cases
    subject = case.build()
    assert (run(subject.model, subject.inputs).std(0) < 1e-6).all()
