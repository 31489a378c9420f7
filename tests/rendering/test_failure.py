"""The text of a failure."""

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.settings import Limit
from tests.builders import layer, observation
from tests.rendering import reports


def test_the_whole_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence, consequences, cause and next moves, each once."""
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(ModelHealthError) as caught:
        reports.dead().assert_healthy()
    assert str(caught.value).splitlines() == [
        "unhealthy: relu (dead_units): 3 of 4 units are dead",
        "",
        "  layer  check       tensor       value  limit  set by",
        "  relu   dead_units  activations  0.750    0.5  pytest.ini: modelhealth_max_dead_fraction",
        "  2 other layers only show what began in relu",
        "",
        "likely cause: the bias holds them on the flat side",
        'look:         report.plot_histogram("relu")',
        'accept it:    @pytest.mark.modelhealth_waive("relu", check="dead_units", reason="...")',
    ]


def test_consequences_and_violations_are_counted() -> None:
    """Two buffers that are NaN are one consequence; the ten gravest stand in execution order."""
    follows = tuple(reports.violation("fc2", tensor=name) for name in ("mean", "var"))
    text = reports.dead(folded=follows, affected=("fc2", "loss")).render("failure")
    assert "  and 1 consequence: fc2 (dead_units); 2 other layers in all" in text.splitlines()
    seen = reports.large().observation
    names = list(seen.layers)
    found = [reports.violation(name) for name in (names[500], *names[20:0:-1])]
    lines = reports.judged(seen, *found).render("failure").splitlines()
    listed = [line.split(".")[2] for line in lines if "activations" in line]
    assert listed == [*map(str, range(12, 21)), "500"]
    assert "  ... and 11 more (print the report to see all)" in lines


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("default", "@pytest.mark.modelhealth(max_dead_fraction=...)"),
        ("argument of assert_healthy", "max_dead_fraction, argument of assert_healthy"),
    ],
)
def test_the_limit_is_named_where_it_can_be_moved(origin: str, expected: str) -> None:
    """A default limit is moved by a marker, any other one where it was set."""
    limit = default_settings()["max_dead_fraction"].value
    settings = default_settings()
    if origin != "default":
        settings = settings.override({"max_dead_fraction": limit}, origin)
    assert settings["max_dead_fraction"] == Limit(limit, origin)
    found = reports.violation("fc1", limit=limit, origin=origin)
    report = reports.judged(reports.healthy().observation, found, settings=settings)
    assert f"other limit:  {expected}" in report.render("failure").splitlines()


@pytest.mark.parametrize("name", ["", "fc", "it's", 'say "so"', "a\\b", "li[0]*?", "日本\n"])
def test_the_waiver_can_be_pasted(name: str) -> None:
    """The marker is Python, and its pattern accepts this layer and no other."""
    report = reports.judged(observation(layer(name)), reports.violation(name))
    (line,) = [line for line in report.render("failure").splitlines() if "waive(" in line]
    call = ast.parse(line.partition("@")[2], mode="eval").body
    assert isinstance(call, ast.Call)
    pattern = ast.literal_eval(call.args[0])
    assert fnmatchcase(name, pattern)
    assert not fnmatchcase(f"{name}0", pattern)


def test_what_else_a_reader_should_know_is_a_line_each() -> None:
    """At the end, cut to a screen's width; the next move works: no histogram of what never was."""
    lines = reports.hostile().render("failure").splitlines()
    assert lines[-3].startswith("inconclusive: opaque (finite): ")
    assert lines[-2].startswith("1 error inside the hooks, so observations are missing")
    assert lines[-1].startswith("note: ")
    assert max(map(len, lines[-3:])) <= 100
    assert "plot_histogram" not in reports.absent_culprit().render("failure")


class Rooted(nn.Module):
    """A branch whose gradient is cut off, or not finite, by one line."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.stem, self.fc, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(self.stem(x))
        h = h.detach() if self.detach else torch.sqrt(h * (h > 0))  # the line
        out: Tensor = self.head(h.reshape(-1, 8))
        return out


@pytest.mark.parametrize(
    ("detach", "operation", "way"),
    [(True, "detach", "`detach`"), (False, "sqrt", "`mul` -> `sqrt`")],
)
def test_the_operation_its_line_and_its_code_are_named_once(
    detach: bool, operation: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is seen from the current folder; the way goes through what changes values."""
    torch.manual_seed(0)
    monkeypatch.chdir(Path(__file__).parent)
    text = Inspector(Rooted(detach)).run_inspection(torch.randn(32, 4)).render("failure")
    (place,) = (
        f"test_failure.py:{number}"
        for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.endswith("# the line")
    )
    assert text.count(f"`{operation}` at {place}, between fc and head") == 1
    assert str(Path(__file__).parent) not in text
    assert "code:         h = h.detach() if self.detach else torch.sqrt(h * (h > 0))" in text
    assert f"way:          stem -> fc -> {way} -> head" in text
