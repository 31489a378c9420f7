"""A report as table, HTML, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.rendering.notation import number
from pytest_modelhealth.report import ROLES, HealthReport
from tests.builders import layer, observation
from tests.rendering import reports

every_case = pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)


# The table


def row(report: HealthReport, name: str) -> list[str]:
    """The words of one layer's row."""
    (line,) = [line for line in str(report).splitlines() if line[1:].split()[:1] == [name]]
    return line.replace("!", " ").split()


def test_a_row_holds_the_numbers_of_its_layer() -> None:
    """Mean, spread, extremes, zeros, dead units and norms are those numpy and torch compute."""
    torch.manual_seed(0)
    values, gradients = torch.randn(16, 4).relu(), torch.randn(16, 4)
    weights = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    values[:, 0] = 0
    seen = layer("fc", activations=values, gradients=gradients, parameter_gradients=weights)
    both = torch.cat([weights["weight"].flatten(), weights["bias"]]).double()
    exact = values.double()
    expected = [exact.mean(), exact.std(correction=0), exact.max()]
    assert row(reports.judged(observation(seen)), "fc") == [
        "fc",
        "Linear",
        "16x4",
        *(number(value.item()) for value in expected),
        f"{(exact == 0).double().mean().item():.0%}",
        "25%",
        number(gradients.double().norm().item()),
        number(both.norm().item()),
    ]
    assert "NaN/inf" not in str(reports.dead())
    assert [row(reports.nonfinite(), name).count("NaN/inf") for name in ("exp", "log")] == [2, 2]
    assert row(reports.dead(), "spare")[:4] == ["spare", "Linear", "not", "called"]


def test_layers_stand_in_execution_order_and_violated_ones_are_marked() -> None:
    """``!`` marks a row, the message follows it, and of few rows it is one."""
    lines = [line for line in str(reports.large()).splitlines() if " Linear " in line]
    assert [int(line[1:].split()[0].split(".")[2]) for line in lines] == list(range(1000))
    lines = str(reports.dead()).splitlines()
    (marked,) = [index for index, line in enumerate(lines) if line.startswith("!")]
    assert lines[marked].split()[1] == "relu"
    assert lines[marked + 1] == "    dead_units: 3 of 4 units are dead"
    text = reports.dead().render("terminal", max_rows=2)
    assert "\n!  relu" in text
    assert "fc1" not in text
    assert text.endswith("  ... and 3 more layers")


@pytest.mark.parametrize("name", ["fc", "encoder.layer.10.attention.self.query" * 3])
def test_the_table_fits_a_hundred_columns(name: str) -> None:
    """Names give way to numbers, even where every number takes its full width."""
    tiny = -torch.rand(64, 64, 7, 7) * 1e-6
    record = layer(name, type_name="BatchNorm2d" * 3, activations=tiny, gradients=tiny)
    text = str(reports.judged(observation(record)))
    assert max(map(len, text.splitlines())) <= 100
    assert number(tiny.double().mean().item()) in text


def test_what_is_said_in_a_line() -> None:
    """What ran stands below the verdict; `repr` is a line, and never fails."""
    lines = str(reports.absent_culprit()).splitlines()
    assert lines[1] == "Model, 1 violation, 2 layers, 64 samples, no backward pass"
    assert repr(reports.healthy()) == "<HealthReport healthy: no check objects to Model; 2 layers>"
    assert repr(reports.dead()) == (
        "<HealthReport unhealthy: relu (dead_units): 3 of 4 units are dead; 1 violation, 5 layers>"
    )

    def broken(seen, settings):
        raise ZeroDivisionError("in a\ncheck")

    report = HealthReport(observation(layer("fc")), default_settings(), broken, renderer=renderer)
    assert repr(report) == "<HealthReport not judged (ZeroDivisionError: in a\\ncheck); 1 layer>"


# HTML


class Page(HTMLParser):
    """The elements and the text of a page, and whether every element was closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_shows_names_as_text_and_a_row_a_layer() -> None:
    """Markup and template syntax is not obeyed; a violation has its message and likely cause."""
    page = Page(reports.hostile()._repr_html_())
    assert page.tags.count("b") == 1  # the check's name; the layer is called "<b id=..."
    assert '<b id="x">&amp;{{ 7*7 }}' in "".join(page.texts)
    assert ("id", "x") not in page.attributes
    page = Page(reports.dead()._repr_html_())
    assert page.tags.count("tr") == 1 + 5 + 1
    assert page.attributes.count(("class", "violated")) == 1
    assert page.attributes.count(("class", "unseen")) == 1
    assert ("title", "forward never called it") in page.attributes
    assert "dead_units: 3 of 4 units are dead" in "".join(page.texts)
    assert "likely cause: the bias holds them on the flat side" in "".join(page.texts)


# JSON


def refuse(name: str):
    """Stand in for a reader that knows only strict JSON."""
    raise ValueError(f"{name} is not JSON")


@every_case
def test_json_is_strict_and_the_dictionary_plain(case) -> None:
    """No NaN for readers that know none, no numpy scalar or enum for xdist's workers."""
    report = case()
    assert json.loads(report.render("json"), parse_constant=refuse) == report.to_dict()
    pending = [report.to_dict()]
    while pending:
        value = pending.pop()
        assert type(value) in (dict, list, str, int, float, bool, type(None))
        pending += value.values() if isinstance(value, dict) else []
        pending += value if isinstance(value, list) else []


def test_statistics_are_exact_and_complete() -> None:
    """Numbers are the very floats, exponents make the histogram, and what is no number is null."""
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
    data = reports.nonfinite().to_dict()
    log, exp = (one["activations"] for one in data["layers"])
    assert data["loss"] is log["mean"] is None
    assert (exp["nan_count"], exp["positive_inf_count"], exp["negative_inf_count"]) == (1, 1, 1)
    assert math.isfinite(exp["mean"])


def test_findings_limits_and_losses_are_data() -> None:
    """Violations, waivers, limits with their origin, choices by pattern, calls of losses."""
    data = reports.dead().to_dict()
    assert (data["format_version"], data["verdict"]) == (1, "unhealthy")
    assert data["violations"][0]["layer"] == "relu"
    assert data["settings"]["max_dead_fraction"]["origin"] == "default"
    waived = reports.waived().to_dict()
    assert waived["waived"][0]["waiver"]["reason"] == "sparse on purpose"
    assert waived["unused_waivers"][0]["layers"] == "fc9"
    settings = {"thresholds": {"*": {"max_grad_norm": 3}}, "severity": {"dead_*": "warn"}}
    report = Inspector(nn.Linear(4, 3), **settings).run_inspection(
        torch.randn(8, 4), torch.arange(8) % 3, loss=nn.functional.cross_entropy
    )
    data = json.loads(report.render("json"))
    written, origin = data["settings"], "argument of inspector"
    assert written["severity"]["value"] == [
        {"checks": "dead_*", "severity": "warn", "origin": origin}
    ]
    (limit,) = written["thresholds"]["value"]
    assert limit["limit"] == {"value": 3.0, "origin": f"{origin} for '*'"}
    assert (limit["layers"], limit["setting"]) == ("*", "max_grad_norm")
    (call,) = data["loss_calls"]
    assert (call["function"], call["layer"], call["classes"]) == ("cross_entropy", None, 3)
    assert (call["input"]["shape"], call["targets"]["count"]) == ([8, 3], 8)
    assert data["loss_path"]["operations"] == ["nll_loss", "log_softmax"]


# CSV


def rows(report: HealthReport) -> list[dict[str, str]]:
    """The table as the csv module reads it."""
    return list(csv.DictReader(io.StringIO(report.render("csv"), newline="")))


@every_case
def test_every_tensor_has_a_row_with_its_very_numbers(case) -> None:
    """In order, NaN and infinity included; a layer without tensors has one row."""
    report = case()
    expected = []
    for record in report:
        keys = [(record.name, role, name) for role in ROLES for name in record.tensors(role)]
        expected += keys or [(record.name, "", "")]
    table = rows(report)
    assert [(one["layer"], one["role"], one["tensor"]) for one in table] == expected
    for one in table:
        tensors = report[one["layer"]].tensors(one["role"]) if one["role"] else {}
        for name in ("mean", "std", "min", "max", "norm", "count", "nan_count"):
            if one["role"]:
                exact = float(getattr(tensors[one["tensor"]], name))
                assert float(one[name]) == exact or math.isnan(exact)


def test_a_row_says_what_else_was_seen() -> None:
    """Calls, activation, units with their observations, the first NaN and frozen parameters."""
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    batch = torch.ones(5, 3)
    batch[4, 1] = torch.nan
    table = rows(Inspector(nn.Sequential(frozen, nn.ReLU())).run_inspection(batch))
    by_tensor = {(one["layer"], one["role"], one["tensor"]): one for one in table}
    relu, bias = by_tensor["1", "activations", ""], by_tensor["0", "parameters", "bias"]
    weight = by_tensor["0", "parameters", "weight"]
    assert (relu["activation"], relu["calls"], relu["units"]) == ("relu", "1", "2")
    assert (relu["unit_observations"], relu["first_nonfinite"]) == ("5", "4x0")
    assert (bias["frozen"], weight["frozen"], relu["frozen"]) == ("True", "False", "")
    assert (weight["dead_fraction"], bias["activation"]) == ("", "")


@pytest.mark.parametrize("form", ["json", "csv"])
def test_the_file_is_the_text(tmp_path, form) -> None:
    """The same bytes on every platform, in UTF-8."""
    path = tmp_path / f"health.{form}"
    getattr(reports.hostile(), f"to_{form}")(path)
    assert path.read_bytes() == reports.hostile().render(form).encode()
