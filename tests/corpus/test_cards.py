"""The cards: complete, in one vocabulary, and nothing of what is held out given away."""

import re
from collections import Counter
from pathlib import Path

import pytest

import corpus
from corpus import GROUPS, KINDS, ROLES, cases

FOLDER = Path(corpus.__file__).parent
CASES = list(cases())


def test_counts_by_group_and_role():
    """What is added raises a number here; nothing is lost."""
    assert Counter((case.group, case.role) for case in CASES) == {
        ("open", "fault"): 270,
        ("open", "control"): 707,
        ("open", "change"): 58,
        ("open", "refactor"): 49,
        ("held out", "fault"): 55,
        ("held out", "control"): 77,
        ("held out", "change"): 25,
        ("held out", "refactor"): 22,
        ("blind", "fault"): 747,
        ("blind", "control"): 1227,
        ("blind", "change"): 99,
        ("blind", "refactor"): 91,
    }


def test_no_two_cases_share_a_name_and_a_model():
    """A case is known by its kind, its role, its name and what it was put into."""
    seen = Counter((case.kind, case.role, case.name, case.architecture) for case in CASES)
    assert [key for key, count in seen.items() if count > 1] == []


def test_cards_are_written_in_one_vocabulary():
    """Kind, group and role are words of the vocabulary; pairs are of kinds of their own."""
    for case in CASES:
        assert (case.kind in KINDS, case.group in GROUPS, case.role in ROLES) == (True,) * 3
        assert (case.role in ("change", "refactor")) == (case.kind in ("refactor", "deployed"))
        assert case.kind != "healthy" or case.role == "control"


def test_sick_cases_say_where_and_why():
    """Each has places, and one sentence on why it is a fault; a fault has words, too."""
    sick = [case for case in CASES if case.is_sick]
    assert not [case for case in sick if not case.at]
    assert not [case for case in sick if not case.why.endswith(".") or len(case.why) > 100]
    assert not [case for case in sick if case.role == "fault" and not case.words]
    assert not [case for case in sick if any(word != word.lower() for word in case.words)]


def test_names_of_files_give_no_cause():
    """A tool that quotes the line of a fault has not said why it is one."""
    case = next(cases(name="weights drawn with std 1"))
    assert case.is_named_in("the weights are large")
    assert not case.is_named_in(
        "it differs (faults.py:3) at /work/corpus/initialisation/faults.py:3"
    )


def test_healthy_cases_have_nothing_to_name():
    """A control and a refactor accept no objection."""
    assert not [c for c in CASES if not c.is_sick and (c.at or c.words or c.by or c.why)]


def test_each_kind_has_faults_and_healthy_cases_that_look_like_them():
    """Without its controls a kind rewards a tool that objects to everything."""
    for kind in KINDS:
        roles = {case.role for case in cases(kind=kind)}
        assert roles & {"control", "refactor"}
        assert kind == "healthy" or roles & {"fault", "change"}


def test_open_cases_are_made_without_the_held_out_ones():
    """No other file names what is held out, so reading them gives nothing of it away."""
    files = [path for path in FOLDER.rglob("*.py") if not path.stem.startswith("held_out")]
    assert files
    assert not [path.name for path in files if "held_out" in path.read_text(encoding="utf-8")]


def test_group_of_a_file_is_in_its_name():
    """A reader sees what not to open."""
    for kind in KINDS:
        for path in (FOLDER / kind).glob("[!_]*.py"):
            group = next((g for g in GROUPS if path.stem.startswith(g.replace(" ", "_"))), "open")
            (shelf,) = (s for s in corpus.shelves(kind) if s is module(path).SHELF)
            assert (shelf.kind, shelf.group) == (kind, group)


def module(path):
    """Return the module of a file of the corpus."""
    return corpus.import_module(f"corpus.{path.parent.name}.{path.stem}")


def test_corpus_knows_no_tool():
    """Nothing in it imports a tool, this project's included, nor the tests or benchmarks."""
    stranger = re.compile(
        r"^\s*(from|import) .*\b(pytest_modelhealth|benchmarks|tests)\b", re.MULTILINE
    )
    for path in FOLDER.rglob("*.py"):
        assert not stranger.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("what", ["kind", "group", "role"])
def test_unknown_choice_is_refused(what):
    """A misspelt word raises and lists those there are, rather than giving no cases."""
    with pytest.raises(ValueError, match=rf"no {what} 'wirring'; there are: "):
        list(cases(**{what: "wirring"}))


def test_cases_are_chosen_by_a_pattern_of_their_names():
    """As in a shell."""
    assert [case.name for case in cases(name="raw colours*")] == ["raw colours from 0 to 255"]
