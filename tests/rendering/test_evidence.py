import pytest
import torch

from pytest_modelhealth.rendering.evidence import (
    culprit_and_predecessor,
)
from tests.builders import layer, observation
from tests.rendering import reports

ONES = torch.ones(2, 2)


def predecessor(culprit: str, role: str, *records):
    """The name of the layer that is shown beside the culprit."""
    found = culprit_and_predecessor(
        reports.judged(observation(*records), reports.violation(culprit, role=role))
    )
    return found.predecessor and found.predecessor.name


@pytest.mark.parametrize(
    ("culprit", "role", "beside"),
    [
        ("block.relu", "activations", "block.fc"),
        ("block", "activations", "stem"),
        ("stem", "activations", None),
        *(("block", role, "head") for role in ("gradients", "parameter_gradients")),
        ("block.relu", "gradients", "head"),
        ("head", "gradients", None),
    ],
)
def test_the_leaf_that_ran_before_is_shown_and_of_gradients_that_after(
    culprit: str, role: str, beside: str | None
) -> None:
    """Containers, and layers without such a tensor, are passed over."""
    seen = {"activations": ONES, "gradients": ONES, "parameter_gradients": {"weight": ONES}}
    names = ("", "stem", "block", "block.fc", "block.mask", "block.relu", "head")
    records = [layer(name, **({} if name == "block.mask" else seen)) for name in names]
    assert predecessor(culprit, role, *records) == beside


def test_the_violated_tensor_is_shown() -> None:
    """Of several tensors in a role, it is the one that the violation names."""
    gradients = {"weight": ONES, "bias": 3 * ONES}
    seen = observation(layer("fc", parameter_gradients=gradients))
    found = reports.violation("fc", role="parameter_gradients", tensor="bias")
    evidence = culprit_and_predecessor(reports.judged(seen, found))
    assert evidence.statistics(evidence.culprit).mean == 3


def test_the_numbers_of_both_layers_stand_one_below_the_other() -> None:
    """The layer before is first; lines fit a terminal."""
    values = torch.tensor([0.0] * 5 + [1.5] * 3 + [torch.nan] * 2)
    seen = observation(layer("fc", activations=values - 1.0), layer("relu", activations=values))
    text = reports.judged(seen, reports.violation("relu")).render("evidence")
    first, _, head, *rows = text.splitlines()
    assert first == "activations of relu (dead_units), beside fc computed just before"
    assert head.split() == [
        *["mean", "std", "min", "max", "zeros", "dead", "NaN", "inf", "dtype", "shape"]
    ]
    assert [row.split()[0] for row in rows] == ["fc", "relu"]
    assert rows[1].split()[5] == "50%"
    assert rows[1].split()[7:] == ["2", "0", "float32", "10"]
    assert max(map(len, text.splitlines())) <= 100


def test_a_culprit_without_values_says_why() -> None:
    """The neighbour is shown, and the reason for what is missing."""
    text = reports.absent_culprit().render("evidence")
    assert "detach() in forward" in text
    assert "fc" in text.splitlines()[3]
