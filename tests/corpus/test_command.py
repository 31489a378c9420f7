"""``python -m corpus list`` and ``score``."""

import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import corpus
from corpus import Finding, Shelf, Subject, run
from corpus.command import main
from corpus.models.small import mlp


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
