"""torch.fx: what a graph module shows, and the lines that graphs know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

from corpus.models import hooked
from corpus.models.hooked import Containers, Sourced, x
from pytest_modelhealth import Inspector, ModelHealthError
from pytest_modelhealth.report import Status
from tests.capture.oracle import changes, fingerprint, report_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_graph_module_shows_the_layers_that_it_calls_and_is_left_as_it_was() -> None:
    """With the numbers of its model, after an exception as well; what was inlined is opaque."""
    model, batch = Containers(), x()
    traced = fx.symbolic_trace(model)
    code, before = traced.code, fingerprint(traced, batch)
    report, expected = report_of(traced, batch), report_of(model, batch)
    assert report.loss == expected.loss
    for name, seen in report.layers.items():
        if seen.status is Status.OBSERVED and name in expected.layers and name:
            assert seen.activations.mean == expected[name].activations.mean, name
    assert (report["block"].status, report["block"].activations) == (Status.OPAQUE, None)
    assert "torch.fx inlined it" in report["block"].reason
    assert report["block.lin"].status is Status.OBSERVED
    with pytest.raises(ZeroDivisionError):
        report_of(traced, batch, loss=lambda output: 1 / 0)
    assert changes(before, fingerprint(traced, batch)) == []
    assert traced.code == code


LINE = 1 + next(
    place
    for place, text in enumerate(Path(hooked.__file__).read_text(encoding="utf-8").splitlines())
    if text.endswith("# the line that is sought")
)


def test_each_layer_has_the_line_it_comes_from_where_the_graph_knows_it() -> None:
    """Exported programs keep source lines, and fx does where asked to; the failure says it."""
    model = nn.Sequential(Sourced(), nn.Linear(6, 2))
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    traced = fx.GraphModule(model, tracer.trace(model))
    exported = torch.export.export(model, (torch.randn(40, 6),))
    for candidate, function in ((traced, "relu"), (exported, "0.relu")):
        report = Inspector(candidate).run_inspection(torch.randn(40, 6))
        for layer in ("0.fc", function):
            assert report[layer].source == f"{hooked.__file__}:{LINE}"
            written = next(one for one in report.to_dict()["layers"] if one["name"] == layer)
            assert written["source"] == f"{hooked.__file__}:{LINE}"
    silent = Inspector(fx.symbolic_trace(model)).run_inspection(torch.randn(40, 6))
    for layer in ("0.fc", "relu"):  # no line of the code that torch.fx writes
        assert silent.observation.called_at(layer) == silent[layer].source == ""
    eager = Inspector(model).run_inspection(torch.randn(40, 6)).to_dict()["layers"]
    assert {"0.fc", "0.relu"} <= {
        one["name"] for one in eager if one["source"].endswith(f":{LINE}")
    }
    judged = Inspector(exported, max_grad_norm=0.0, layers="0.fc")
    report = judged.run_inspection(torch.randn(40, 6))
    with pytest.raises(ModelHealthError, match=rf"called at \S+:{LINE}"):
        report.assert_healthy()
