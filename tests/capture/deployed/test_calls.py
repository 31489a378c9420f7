"""Flat rows of operations, PT2E graphs too, are put into the calls that they came from."""

from __future__ import annotations

import pytest
from torch import nn

from corpus.models.quantised import batch, fresh, pt2e
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.capture.deployed.program import Operation, Ran, Scope, calls_of
from pytest_modelhealth.report import Status


def operation(path: str | None, name: str, inputs: str, output: str, **options: bool) -> Operation:
    """Return an operation in a layer, ``None`` where that is not known; value names are letters."""
    parts = path.split(".") if path else []
    scopes = tuple(Scope(".".join(parts[: n + 1])) for n in range(len(parts)))
    return Operation(name, None if path is None else scopes, tuple(inputs), (output,), **options)


def calls(*operations: Operation, outputs: str) -> list[str]:
    """Return the calls in writing, ``a(x) -> y``, in the order in which they end."""
    found = calls_of(Ran(operations, ("x",), tuple(outputs), {}, None))
    return [
        f"{one.layer}{one.function and ':' + one.function}({''.join(one.inputs)}) "
        f"-> {''.join(one.outputs)}"
        for one in sorted(found, key=lambda one: (one.last, -one.depth))
    ]


def test_operations_of_a_layer_are_a_call_and_equal_ones_further_on_another():
    """Of a parameter `w`, which nothing computes, no call is given; a function is one itself."""
    assert calls(
        operation("a.fc", "mul", "xw", "b"),
        operation("a.fc", "add", "bv", "c"),
        operation("a", "relu", "c", "d"),
        operation("a.fc", "mul", "dw", "e"),
        operation("a.fc", "add", "ev", "f"),
        operation("", "add", "fx", "g"),
        outputs="g",
    ) == ["a.fc(x) -> c", "a:relu(c) -> d", "a.fc(d) -> f", "a(x) -> f"]


def test_a_call_that_others_interrupt_is_one():
    """The runtime may run an operation of another layer in between."""
    assert calls(
        operation("a", "mul", "xw", "b"),
        operation("c", "relu", "x", "d"),
        operation("a", "add", "bv", "e"),
        operation("", "add", "de", "f"),
        outputs="f",
    ) == ["c:relu(x) -> d", "c(x) -> d", "a(x) -> e"]


def test_a_run_that_repeats_itself_is_several_calls():
    """Of a layer of torch or one with others in it; the user's own may add twice."""
    linear = Scope("fc", "torch.nn.modules.linear.Linear")
    twice = [Operation("linear", (linear,), (a,), (b,)) for a, b in ("xb", "bc")]
    assert calls(*twice, outputs="c") == ["fc(x) -> b", "fc(b) -> c"]
    twice = [operation("a.fc", "linear", "x", "b"), operation("a.act", "relu", "b", "c")]
    twice += [operation("a.fc", "linear", "c", "d"), operation("a.act", "relu", "d", "e")]
    assert [one for one in calls(*twice, outputs="e") if one[:2] == "a("] == [
        "a(x) -> c",
        "a(c) -> e",
    ]
    sums = [operation("a", "add", "x", "b"), operation("a", "add", "b", "c")]
    assert calls(*sums, outputs="c") == ["a(x) -> c"]
    numbered = [
        Operation("mul", (Scope("a", "", n),), (a,), (b,)) for n, (a, b) in enumerate(("xb", "bc"))
    ]
    assert calls(*numbered, outputs="c") == ["a(x) -> b", "a(b) -> c"]


def test_rounding_between_layers_is_of_neither():
    """What is rounded is taken as it is; a layer with others in it gives what rounding made."""
    assert calls(
        operation("a.fc", "linear", "x", "b"),
        operation(None, "quantize", "b", "c", rounds=True),
        operation(None, "dequantize", "c", "d", rounds=True),
        operation("fc", "linear", "d", "e"),
        outputs="e",
    ) == ["a.fc(x) -> b", "a(x) -> d", "fc(d) -> e"]


def test_what_comes_out_of_unknown_operations_is_not_taken_for_an_input():
    """An optimiser put them in; what a layer with others gives to them is not known either."""
    assert calls(
        operation("a.fc", "add", "x", "b"),
        operation(None, "MatMulInteger", "b", "c"),
        operation("fc", "add", "c", "d"),
        outputs="d",
    ) == ["a.fc(x) -> b", "a(x) -> ", "fc() -> d"]


# ---- graphs of PT2E quantisation -----------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> nn.Module:
    """Return a small CNN, quantised."""
    pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    return pt2e(fresh(), batch())


@pytest.mark.filterwarnings("ignore")
def test_layers_have_their_names_and_the_values_of_the_graph(graph):
    """Each layer is seen under the name it had; the last one gives what the graph returns."""
    report = Inspector(graph).run_inspection(batch())
    names = ["conv1", "relu1", "conv2", "block", "block.fc", "block.relu", "head"]
    assert all(report[name].status is Status.OBSERVED for name in names)
    expected = graph(batch())
    assert report["head"].activations.mean == pytest.approx(float(expected.mean()), rel=1e-5)
    assert report["conv2"].inputs.dtype == "quint8"
    assert report["conv1"].parameters["weight"].dtype == "qint8"
    assert report["block"].type_name == "Block"
    report.assert_healthy()
    with pytest.raises(InspectionError, match="no backward pass"):
        Inspector(graph).run_inspection(batch(), backward=True)
    weight = report["block.fc"].parameters["weight"]  # whole numbers with scales of channels
    reference = fresh().block.fc.weight
    assert weight.shape == tuple(reference.shape)
    assert weight.abs_max == pytest.approx(float(reference.abs().max()), rel=0.01)
