import csv
import io
import math

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import ROLES
from tests.rendering import reports


def rows(report) -> list[dict[str, str]]:
    """The table as the csv module reads it."""
    return list(csv.DictReader(io.StringIO(report.render("csv"), newline="")))


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_every_tensor_has_a_row_and_no_layer_is_absent(case) -> None:
    """One row for each layer, role and tensor, in order; a layer without tensors has one row."""
    report = case()
    expected = []
    for record in report:
        keys = [(record.name, role, name) for role in ROLES for name in record.tensors(role)]
        expected += keys or [(record.name, "", "")]
    found = [(row["layer"], row["role"], row["tensor"]) for row in rows(report)]
    assert found == expected


@pytest.mark.parametrize("case", [reports.dead, reports.nonfinite, reports.odd_statistics])
def test_numbers_are_exact(case) -> None:
    """Each float reads back as the same float, NaN and infinity included."""
    report = case()
    for row in rows(report):
        tensors = report[row["layer"]].tensors(row["role"]) if row["role"] else {}
        for name in ("mean", "std", "min", "max", "norm", "count", "nan_count"):
            if row["role"]:
                expected = float(getattr(tensors[row["tensor"]], name))
                found = float(row[name])
                assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_row_says_what_else_was_seen() -> None:
    """Calls, activation, units with their observations, the first NaN and frozen parameters."""
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    batch = torch.ones(5, 3)
    batch[4, 1] = torch.nan
    found = rows(Inspector(nn.Sequential(frozen, nn.ReLU())).run_inspection(batch))
    by_tensor = {(row["layer"], row["role"], row["tensor"]): row for row in found}
    relu = by_tensor["1", "activations", ""]
    assert (relu["activation"], relu["calls"]) == ("relu", "1")
    assert (relu["units"], relu["unit_observations"]) == ("2", "5")
    assert (relu["first_nonfinite"], relu["histogram_sampled"]) == ("4x0", "False")
    assert by_tensor["0", "parameters", "bias"]["frozen"] == "True"
    assert by_tensor["0", "parameters", "weight"]["frozen"] == "False"
    assert by_tensor["0", "parameters", "weight"]["dead_fraction"] == ""
    assert (relu["frozen"], by_tensor["0", "parameters", "bias"]["activation"]) == ("", "")


def test_the_file_is_the_text(tmp_path) -> None:
    """`to_csv` writes the same bytes on every platform, in UTF-8."""
    path = tmp_path / "health.csv"
    reports.hostile().to_csv(path)
    assert path.read_bytes() == reports.hostile().render("csv").encode()
