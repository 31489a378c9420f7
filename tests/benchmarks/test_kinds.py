"""The table of kinds is what a run of it gives."""

import pytest

from benchmarks import kinds

ROWS = {
    cells[0]: cells[1:]
    for line in kinds.PAGE.read_text("utf-8").splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split(" | ")])[0] in kinds.KINDS
}


def test_page_has_a_row_for_each_kind():
    """In the order in which they are made."""
    assert list(ROWS) == list(kinds.KINDS)


@pytest.mark.filterwarnings("ignore")  # torch and torchao warn that some kinds are deprecated
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in kinds.SLOW else [])
        for name in kinds.KINDS
    ],
)
def test_row_is_what_a_run_gives(name):
    """Counts of what is seen and the verdict; what it rests on may be another machine's."""
    counted = len(kinds.COUNTED)
    cells = kinds.examine(name).cells()
    assert cells[:counted] == ROWS[name][:counted]
    assert cells[-2].partition(":")[0] == ROWS[name][-2].partition(":")[0]


def test_what_is_not_seen_is_not_counted():
    """A hook-less form has no layer of the model, though its own names may end alike."""
    model, batch = kinds.made()

    class Wrapped(kinds.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = kinds.nn.Flatten()

        def forward(self, x):
            return self.stem(x)

    counts, rest = kinds.seen(model, Wrapped(), batch)
    assert counts["modules"] == "1 of 11"
    assert (counts["functions"], counts["parameters"], rest) == ("0 of 4", "0 of 18", "")
    counts, rest = kinds.seen(model, object(), batch)
    assert (counts, rest.partition(":")[0]) == ({}, "cannot inspect an object of type object")
