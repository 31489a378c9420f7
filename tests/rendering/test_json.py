import json
import math

import numpy as np
import pytest
import torch

from pytest_modelhealth import Inspector
from tests.builders import layer, observation
from tests.rendering import reports


def refuse(name: str):
    """Stand in for a reader that knows only strict JSON."""
    raise ValueError(f"{name} is not JSON")


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_the_text_is_strict_json_of_the_dictionary(case) -> None:
    """Reading it gives `to_dict` back, without the NaN and Infinity that JSON does not know."""
    report = case()
    assert json.loads(report.render("json"), parse_constant=refuse) == report.to_dict()


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_the_dictionary_holds_plain_data(case) -> None:
    """No numpy scalar, enum or other subclass: what crosses to an xdist controller is plain."""
    pending = [case().to_dict()]
    while pending:
        value = pending.pop()
        assert type(value) in (dict, list, str, int, float, bool, type(None))
        pending += value.values() if isinstance(value, dict) else []
        pending += value if isinstance(value, list) else []


def test_statistics_are_exact_and_complete() -> None:
    """Numbers are the very floats, and the histogram can be built from the exponents."""
    torch.manual_seed(0)
    values = torch.randn(16, 4)
    values[:, 1] = 0
    report = reports.judged(observation(layer("fc", activations=values)))
    seen = report["fc"].activations
    (data,) = report.to_dict()["layers"]
    written = data["activations"]
    assert (written["mean"], written["std"], written["norm"]) == (seen.mean, seen.std, seen.norm)
    exponents = np.floor(np.log2(np.abs(values.double().numpy()[values.numpy() != 0])))
    assert written["exponents"]["lowest"] == exponents.min()
    assert np.sum(written["exponents"]["counts"]) == len(exponents)
    assert written["units"] == {"count": 4, "dead": [1], "observations": 16}


def test_nan_and_infinity_are_null_and_counted() -> None:
    """What JSON cannot write is null; how often it was there is a number."""
    data = reports.nonfinite().to_dict()
    exp = data["layers"][1]["activations"]
    assert data["loss"] is None
    assert data["layers"][0]["activations"]["mean"] is None
    assert (exp["nan_count"], exp["positive_inf_count"], exp["negative_inf_count"]) == (1, 1, 1)
    assert math.isfinite(exp["mean"])


def test_findings_and_limits_are_included() -> None:
    """Violations, waivers and the limits in force with their origin are data too."""
    data = reports.dead().to_dict()
    assert data["format_version"] == 1
    assert data["verdict"] == "unhealthy"
    assert data["violations"][0]["layer"] == "relu"
    assert data["settings"]["max_dead_fraction"]["origin"] == "default"
    waived = reports.waived().to_dict()
    assert waived["waived"][0]["waiver"]["reason"] == "sparse on purpose"
    assert waived["unused_waivers"][0]["layers"] == "fc9"


def test_choices_by_pattern_are_included_by_name() -> None:
    """Limits by layer and severities by check are dictionaries, not bare rows."""
    settings = {"thresholds": {"*": {"max_grad_norm": 3}}, "severity": {"dead_*": "warn"}}
    report = Inspector(torch.nn.Linear(4, 2), **settings).run_inspection(torch.randn(8, 4))
    written = report.to_dict()["settings"]
    origin = "argument of inspector"
    assert written["severity"]["value"] == [
        {"checks": "dead_*", "severity": "warn", "origin": origin}
    ]
    (limit,) = written["thresholds"]["value"]
    assert limit["limit"] == {"value": 3.0, "origin": f"{origin} for '*'"}
    assert (limit["layers"], limit["setting"]) == ("*", "max_grad_norm")


def test_the_file_is_the_text(tmp_path) -> None:
    """`to_json` writes what `render` returns."""
    path = tmp_path / "health.json"
    reports.hostile().to_json(path)
    assert path.read_bytes() == reports.hostile().render("json").encode()


def test_losses_are_written_with_what_they_were_given() -> None:
    """A call of a loss function has the statistics of its input and target, as plain data."""
    model = torch.nn.Linear(4, 3)
    target = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    report = Inspector(model).run_inspection(
        torch.randn(8, 4), target, loss=torch.nn.functional.cross_entropy
    )
    data = json.loads(report.render("json"))
    (call,) = data["loss_calls"]
    assert (call["function"], call["layer"], call["classes"]) == ("cross_entropy", None, 3)
    assert call["input"]["shape"] == [8, 3]
    assert call["targets"]["count"] == 8
    assert data["loss_path"]["operations"] == ["nll_loss", "log_softmax"]
