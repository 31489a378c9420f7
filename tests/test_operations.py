"""The table of operations: each name once, each trait defined and borne."""

from collections import Counter

import pytest

from pytest_modelhealth.operations import _TABLE, TRAITS, having, name_of


def test_each_name_stands_once():
    """So that what is known of an operation is read off one row."""
    operations = [row.split(" : ")[0] for row in _TABLE.splitlines() if row]
    names = Counter(name for cell in operations for name in cell.replace("/", ", ").split(", "))
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_is_borne(trait: str):
    """One that no operation has any longer goes."""
    assert having(trait)


def test_an_unknown_trait_is_no_empty_answer():
    """A misspelt query would find nothing, and a check would be silent."""
    with pytest.raises(KeyError):
        having("vieew")


def test_spellings_are_one_operation():
    """By an operator, in place, batched or not; what the table does not have is its own name."""
    assert {name_of(spelling) for spelling in ("iadd", "radd", "add")} == {"add"}
    assert name_of("bmm") == name_of("matmul") == "mm"
    assert name_of("my_function") == "my_function"
    assert having("whole") < having("view")
