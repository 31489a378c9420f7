"""The summary of a model: its numbers beside torchinfo's and torch's, and what is shown of them."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torchinfo
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.rendering.model_summary import itemsize, rows
from tests.capture.test_costs import bert, gpt, net
from tests.rendering import reports
from tests.rendering.test_formats import Page


def by_name(summary) -> dict[str, dict]:
    """The rows by the name of their layer."""
    return {row["name"]: row for row in summary.rows}


@pytest.mark.parametrize(("made", "costs"), [(net, True), (bert, False), (gpt, True)])
def test_parameters_are_those_of_the_model(made, costs) -> None:
    """Of the whole, and of each module with those inside: shared ones once, frozen ones apart."""
    model, batch = made()
    report = Inspector(model).run_inspection(batch, costs=costs)
    found, summary = report.summary().totals, report.summary()
    parameters = list(model.parameters())
    assert found["parameters"] == sum(p.numel() for p in parameters)
    assert found["parameter_bytes"] == sum(p.nbytes for p in parameters)
    assert found["trainable"] == sum(p.numel() for p in parameters if p.requires_grad)
    assert found["frozen"] == sum(p.numel() for p in parameters if not p.requires_grad)
    for name, module in model.named_modules():
        row = by_name(summary)[name]
        if not any(by_name(summary)[n]["shared"] for n, _ in named_inside(model, name)):
            assert row["all_parameters"] == sum(p.numel() for p in module.parameters()), name


def named_inside(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules that lie in another one, and itself."""
    around = f"{name}." if name else ""
    named = model.named_modules()
    return [(n, m) for n, m in named if n == name or n.startswith(around)]


def test_multiply_adds_beside_torchinfo() -> None:
    """Of layers that are nothing but matrix products both count the same.

    Of sequences torchinfo counts the weights of a linear layer once a sample, whatever the length.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5, bias=False)
    )
    batch = torch.randn(4, 3, 8, 8)
    theirs = torchinfo.summary(model, input_data=batch, verbose=0)
    assert Inspector(model).summary(batch).totals["multiply_adds"] == theirs.total_mult_adds
    model, batch = bert()
    theirs = torchinfo.summary(model, input_data=batch, verbose=0)
    found = by_name(Inspector(model).summary(batch))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            steps = 2 if name.startswith("pooler") else 2 * 9
            assert found[name]["multiply_adds"] == steps * module.weight.numel()
    assert theirs.total_params == found[""]["all_parameters"]
    assert theirs.total_mult_adds < found[""]["all_multiply_adds"] / 5


def test_a_report_without_costs_has_all_that_is_free() -> None:
    """Shapes, dtypes, parameters and activations are those of a summary; no costs are made up."""
    model, batch = net()
    plain = Inspector(model).run_inspection(batch).summary()
    measured = Inspector(model).run_inspection(batch, costs=True).summary()
    free = [
        key for key in plain.rows[0]
        if not key.endswith(("multiply_adds", "saved_bytes"))
    ]  # fmt: skip
    assert len(free) > 15
    for ours, theirs in zip(plain.rows, measured.rows, strict=True):
        assert {key: ours[key] for key in free} == {key: theirs[key] for key in free}
    assert {row["multiply_adds"] for row in plain.rows} == {None}
    assert plain.totals["saved_bytes"] is plain.totals["peak_bytes"] is None
    assert "costs=True), measures it" in str(plain)
    assert "measures it" not in str(measured)
    assert rows(Inspector(model).run_inspection(batch)) == list(plain.rows)


def test_activations_are_what_was_returned() -> None:
    """Bytes over all calls, of the innermost layers where a layer holds others."""
    model, batch = net()
    made = []
    for module in (model.stem, model.norm, model.conv, model.head):
        module.register_forward_hook(lambda _, __, output: made.append(output.nbytes))
    found = Inspector(model).summary(batch)
    relu = by_name(found)["relu"]["activation_bytes"]
    assert relu == 4 * 8 * 16 * 16 * 4
    assert found.totals["activation_bytes"] == sum(made) + relu
    shared = nn.Linear(4, 4)
    found = Inspector(nn.Sequential(shared, shared)).summary(torch.randn(8, 4))
    assert by_name(found)["0"]["activation_bytes"] == 2 * 8 * 4 * 4
    assert by_name(found)["0"]["calls"] == 2
    batches = Inspector(shared).run_batches([torch.randn(8, 4)] * 3).summary()
    assert batches.totals["activation_bytes"] == 8 * 4 * 4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float64])
def test_bytes_follow_the_dtype(dtype) -> None:
    """A complex number counts once, although its statistics are of two."""
    others = (torch.float8_e4m3fn, torch.complex128, torch.bool, torch.int64, torch.uint8)
    for each in (dtype, *others):
        assert itemsize(str(each).removeprefix("torch.")) == each.itemsize
    model, batch = nn.Linear(4, 3, dtype=dtype), torch.randn(8, 4, dtype=dtype)
    inspector = Inspector(model)
    for found in (inspector.run_inspection(batch).summary(), inspector.summary(batch)):
        assert found.totals["parameters"] == 15
        assert found.totals["parameter_bytes"] == 15 * dtype.itemsize
        assert found.totals["activation_bytes"] == 8 * 3 * dtype.itemsize
        assert found.rows[0]["dtype"] == str(dtype).removeprefix("torch.")


def test_the_tree_is_in_execution_order() -> None:
    """A layer comes before those in it, a container where the first of them is called."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())]
            )
            self.first = nn.Linear(4, 4)
            self.never = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            for block in reversed(self.blocks):
                x = block(x)
            return x

    found = Inspector(Backwards()).summary(torch.randn(2, 4))
    names = ["", "first", "tanh", "blocks", "blocks.1", "blocks.1.0", "blocks.1.1", "blocks.0"]
    assert [row["name"] for row in found.rows] == [*names, "never"]
    assert [row["depth"] for row in found.rows] == [0, 1, 1, 1, 2, 3, 3, 2, 1]
    assert by_name(found)["blocks"]["all_parameters"] == 40
    shown = str(found).splitlines()
    assert next(line for line in shown if "never" in line).endswith("uncalled")
    assert "uncalled" not in next(line for line in shown if "blocks" in line)


def test_depth_and_rows_are_limits() -> None:
    """What is cut off is said, lines fit, and the row of a container sums what it holds."""
    model, batch = bert()
    inspector = Inspector(model)
    full, shallow = inspector.summary(batch), inspector.summary(batch, depth=1)
    shown = str(shallow).splitlines()
    assert len(shown) < len(str(full).splitlines()) / 2
    assert any(line.startswith("  encoder") for line in shown)
    assert not any(line.startswith("    ") for line in shown)
    assert shallow.rows == full.rows
    assert max(map(len, str(full).splitlines())) <= 100
    assert max(map(len, full.render(width=140).splitlines())) <= 140
    short = str(inspector.summary(batch, max_rows=3))
    assert "more lines: summary(max_rows=None) shows all" in short
    assert "embeddings" in short
    assert "pooler" not in short
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(InspectionError, match="depth must be a whole number"):
            inspector.summary(batch, depth=wrong)
        with pytest.raises(InspectionError, match="max_rows must be"):
            inspector.summary(batch, max_rows=wrong)


def test_ties_and_frozen_layers_are_told() -> None:
    """In the row; the name of the other is in the data."""
    model, batch = gpt()
    model.transformer.h[1].requires_grad_(False)
    summary = Inspector(model).summary(batch)
    assert by_name(summary)["lm_head"]["shared"] == {"weight": "transformer.wte.weight"}
    lines = str(summary).splitlines()
    assert next(line for line in lines if line.startswith("  lm_head")).endswith("tied")
    assert next(line for line in lines if line.startswith("      1 ")).endswith("frozen")


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_every_report_has_a_summary(case) -> None:
    """As text, HTML and JSON, and none of them asks for a verdict."""
    report = case()
    found = report.summary()
    page = Page(found._repr_html_())
    assert page.open == []
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert ("id", "x") not in page.attributes  # no name is obeyed
    assert all(letter.isprintable() or letter == "\n" for letter in str(found))
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert repr(found).startswith(report.observation.model_type[:3])
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    assert not report._verdict_asked
    # every row has the same keys, so that a data frame has no holes
    assert len({tuple(row) for row in found.rows}) <= 1


def test_what_was_left_out_by_watch_is_unknown() -> None:
    """Parameters that were not looked at are no zero; measured costs have them all the same.

    A summary is not handed on to be judged.
    """
    made = []
    model, batch = net()
    inspector = Inspector(model, on_report=made.append).watch("stem")
    total = sum(p.numel() for p in model.parameters())
    assert inspector.summary(batch).totals["parameters"] == total
    assert made == []
    with pytest.raises(InspectionError, match="nothing was inspected yet"):
        _ = inspector.report
    assert inspector.run_inspection(batch).summary().totals["parameters"] is None
