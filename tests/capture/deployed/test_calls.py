"""Flat rows of operations are put into the calls that they came from."""

from __future__ import annotations

from pytest_modelhealth.capture.deployed.program import Operation, Ran, Scope, calls_of


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
