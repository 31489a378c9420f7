"""torch.fx: the containers that a graph module inlined."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from corpus.models import hooked
from corpus.models.hooked import Containers, Sourced, x
from pytest_modelhealth import Inspector, ModelHealthError
from pytest_modelhealth.report import Status
from tests.capture.oracle import assert_alike, changes, fingerprint, projection, report_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_graph_module_shows_what_its_model_shows() -> None:
    """Every layer, inlined or not, functional or not, with the same numbers in the same order."""
    model, batch = Containers(), x()
    report, expected = report_of(fx.symbolic_trace(model), batch), report_of(model, batch)
    assert_alike(report, expected)
    assert (list(report.layers), report.loss) == (list(expected.layers), expected.loss)


def test_a_graph_module_is_left_as_it_was() -> None:
    """Its code, graph and attributes too; after an exception as well."""
    model, batch = fx.symbolic_trace(Containers()), x()
    code, before, forward = model.code, fingerprint(model, batch), type(model).forward
    report_of(model, batch)
    with pytest.raises(ZeroDivisionError):
        report_of(model, batch, loss=lambda output: 1 / 0)
    assert type(model).forward is forward
    assert changes(before, fingerprint(model, batch)) == []
    assert (model.code, str(model.graph)) == (code, str(copy.deepcopy(model.graph)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_made_meanwhile_know_nothing_of_us(duplicate: Any) -> None:
    """A copy made in the loss runs the graph's own code."""
    model, batch = fx.symbolic_trace(Containers()), x()
    copies = []

    def copying(output: Tensor) -> Tensor:
        copies.append(duplicate(model))
        copies[0](batch)
        return projection(output)

    report = report_of(model, batch, loss=copying)
    assert report["block"].calls == 2
    assert "enter_layer" not in copies[0].code


def test_a_call_that_the_graph_does_not_tell_is_opaque() -> None:
    """Where a container's nodes no longer stand together, or have no memory of their modules."""
    model = fx.symbolic_trace(Containers())
    block = next(n for n in model.graph.nodes if "block" in (n.meta.get("nn_module_stack") or {}))
    with model.graph.inserting_after(block):
        model.graph.call_function(torch.neg, (block,))
    model.recompile()
    report = report_of(model, x())
    assert report["body"].status is Status.OBSERVED
    assert report["block"].calls in (0, 1)  # the second call still stands together
    for node in model.graph.nodes:
        node.meta.clear()
    layer = report_of(model, x())["block"]
    assert (layer.status, layer.activations) == (Status.OPAQUE, None)
    assert "torch.fx inlined it" in layer.reason


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
    for candidate in (traced, exported):
        report = Inspector(candidate).run_inspection(torch.randn(40, 6))
        for layer in ("0.fc", "0.relu"):
            assert report[layer].source == f"{hooked.__file__}:{LINE}"
            written = next(one for one in report.to_dict()["layers"] if one["name"] == layer)
            assert written["source"] == f"{hooked.__file__}:{LINE}"
    silent = Inspector(fx.symbolic_trace(model)).run_inspection(torch.randn(40, 6))
    for layer in ("0.fc", "0.relu"):  # no line of the code that torch.fx writes
        assert silent.observation.called_at(layer) == silent[layer].source == ""
    eager = Inspector(model).run_inspection(torch.randn(40, 6)).to_dict()["layers"]
    assert {"0.fc", "0.relu"} <= {
        one["name"] for one in eager if one["source"].endswith(f":{LINE}")
    }
    judged = Inspector(exported, max_grad_norm=0.0, layers="0.fc")
    report = judged.run_inspection(torch.randn(40, 6))
    with pytest.raises(ModelHealthError, match=rf"called at \S+:{LINE}"):
        report.assert_healthy()
