import pytest
import torch

from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.rendering.notation import number
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.training import default_settings
from tests.builders import layer, observation
from tests.rendering import reports


def row(report, name: str) -> list[str]:
    """The words of one layer's row."""
    (line,) = [line for line in str(report).splitlines() if line[1:].split()[:1] == [name]]
    return line.replace("!", " ").split()


def test_a_row_holds_the_numbers_of_its_layer() -> None:
    """Mean, spread, extremes, zeros, dead units and norms are those numpy and torch compute."""
    torch.manual_seed(0)
    values, gradients = torch.randn(16, 4).relu(), torch.randn(16, 4)
    weights = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    values[:, 0] = 0
    report = reports.judged(
        observation(
            layer("fc", activations=values, gradients=gradients, parameter_gradients=weights)
        )
    )
    both = torch.cat([weights["weight"].flatten(), weights["bias"]]).double()
    expected = [
        values.double().mean(),
        values.double().std(correction=0),
        values.double().max(),
    ]
    assert row(report, "fc") == [
        "fc",
        "Linear",
        "16x4",
        *(number(value.item()) for value in expected),
        f"{(values == 0).double().mean().item():.0%}",
        "25%",
        number(gradients.double().norm().item()),
        number(both.norm().item()),
    ]


def test_layers_stand_in_execution_order() -> None:
    """A row for each layer, in the order of the report."""
    report = reports.large()
    lines = [line for line in str(report).splitlines() if " Linear " in line]
    assert len(lines) == 1000
    assert [int(line[1:].split()[0].split(".")[2]) for line in lines] == list(range(1000))


def test_violated_layers_are_marked_and_explained_below() -> None:
    """The row begins with ``!`` and the message follows it; no other row is marked."""
    lines = str(reports.dead()).splitlines()
    (marked,) = [index for index, line in enumerate(lines) if line.startswith("!")]
    assert lines[marked].split()[1] == "relu"
    assert lines[marked + 1] == "    dead_units: 3 of 4 units are dead"


def test_max_rows_keeps_the_violated_layers_and_says_what_is_missing() -> None:
    """The violated layer is shown although it is not among the first, and the rest is counted."""
    text = reports.dead().render("terminal", max_rows=2)
    assert "\n!  relu" in text
    assert "fc1" not in text
    assert text.endswith("  ... and 3 more layers")


def test_nonfinite_values_are_no_size() -> None:
    """They stand in place of the largest magnitude, and of norms."""
    assert "NaN/inf" not in str(reports.dead())
    for name in ("exp", "log"):
        assert row(reports.nonfinite(), name).count("NaN/inf") == 2
    assert row(reports.dead(), "spare")[:4] == ["spare", "Linear", "not", "called"]


@pytest.mark.parametrize("name", ["fc", "encoder.layer.10.attention.self.query" * 3])
def test_the_table_fits_a_hundred_columns(name: str) -> None:
    """Names give way to numbers, even where every number takes its full width."""
    tiny = -torch.rand(64, 64, 7, 7) * 1e-6
    record = layer(name, type_name="BatchNorm2d" * 3, activations=tiny, gradients=tiny)
    text = str(reports.judged(observation(record)))
    assert max(map(len, text.splitlines())) <= 100
    assert "-1.00e-6" not in text
    assert number(tiny.double().mean().item()) in text


def test_the_run_is_described() -> None:
    """Below the verdict stand the model, what was found and what ran."""
    lines = str(reports.absent_culprit()).splitlines()
    assert lines[1] == "Model, 1 violation, 2 layers, 64 samples, no backward pass"


def test_repr_of_a_report() -> None:
    """Verdict, culprit, check, message and counts stand in one line."""
    assert repr(reports.healthy()) == "<HealthReport healthy: no check objects to Model; 2 layers>"
    assert repr(reports.dead()) == (
        "<HealthReport unhealthy: relu (dead_units): 3 of 4 units are dead; 1 violation, 5 layers>"
    )


def test_repr_does_not_raise_where_a_check_does() -> None:
    """A broken check costs the verdict in `repr`, not the debugging session."""

    def broken(seen, settings):
        raise ZeroDivisionError("in a\ncheck")

    report = HealthReport(observation(layer("fc")), default_settings(), broken, renderer=renderer)
    assert repr(report) == ("<HealthReport not judged (ZeroDivisionError: in a\\ncheck); 1 layer>")
