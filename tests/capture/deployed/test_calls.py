"""Flat rows of operations are put into the calls that they came from."""

from __future__ import annotations

from pytest_modelhealth.capture.deployed.program import (
    WHY_MIXED,
    Call,
    Node,
    Program,
    Scope,
    call_of,
    operator,
)


def node(path: str, function: str, inputs: str, output: str) -> Node:
    """Return an operation in a layer; its value names are letters."""
    parts = path.split(".") if path else []
    scopes = tuple(Scope(".".join(parts[: n + 1])) for n in range(len(parts)))
    return Node(scopes, operator(function), tuple(inputs), (output,))


def calls(*nodes: Node, outputs: str) -> tuple[str, dict[str, str]]:
    """Return the calls of a program in writing, ``fc(x: linear) -> y``, and what is mixed."""
    root, mixed = call_of(Program("Net", nodes, ("x",), tuple(outputs)))
    return written(root), mixed


def written(call: Call) -> str:
    """Return a call in writing."""
    inside = " ".join(
        written(step) if isinstance(step, Call) else step.function.__name__ for step in call.steps
    )
    taken, given = "".join(call.inputs), "".join(call.outputs)
    return f"{call.scope.path}({taken}: {inside}) -> {given}"


def test_operations_of_a_layer_are_a_call_and_equal_ones_further_on_another():
    """Of a parameter `w`, which nothing computes, no call is given."""
    assert calls(
        node("a.fc", "mul", "xw", "b"),
        node("a.fc", "add", "bv", "c"),
        node("a", "relu", "c", "d"),
        node("a.fc", "mul", "dw", "e"),
        node("a.fc", "add", "ev", "f"),
        node("", "add", "fx", "g"),
        outputs="g",
    ) == ("(x: a(x: a.fc(x: mul add) -> c relu a.fc(d: mul add) -> f) -> f add) -> g", {})


def test_a_call_that_others_interrupt_is_made_whole_where_that_can_run():
    """The runtime may run an operation of another layer in between."""
    assert calls(
        node("a", "mul", "xw", "b"),
        node("c", "relu", "x", "d"),
        node("a", "add", "bv", "e"),
        node("", "add", "de", "f"),
        outputs="f",
    ) == ("(x: a(x: mul add) -> e c(x: relu) -> d add) -> f", {})


def test_layers_that_need_each_other_are_no_calls():
    """Their operations belong to the layer around them, and that is said of them."""
    found, mixed = calls(
        node("a", "mul", "xw", "b"),
        node("c", "relu", "b", "d"),
        node("a", "add", "dv", "e"),
        node("a.fc", "sum", "e", "f"),
        outputs="f",
    )
    assert found == "(x: mul c(b: relu) -> d add a.fc(e: sum) -> f) -> f"
    assert mixed == {"a": WHY_MIXED}


def test_several_values_leave_a_call_and_one_that_nobody_reads():
    """Both are outputs; of a call that nobody reads from, it is what its last operation gave."""
    assert calls(
        node("a", "mul", "x", "b"),
        node("a", "add", "b", "c"),
        node("d", "relu", "x", "e"),
        node("", "add", "bc", "f"),
        outputs="f",
    ) == ("(x: a(x: mul add) -> bc d(x: relu) -> e add) -> f", {})


def test_calls_that_are_numbered_are_told_apart():
    """Without a number, operations of one layer that stand together are one call."""
    one = Node((Scope("a", "", 0),), operator("mul"), ("x",), ("b",))
    two = Node((Scope("a", "", 1),), operator("mul"), ("b",), ("c",))
    assert calls(one, two, outputs="c")[0] == "(x: a(x: mul) -> b a(b: mul) -> c) -> c"
    both = node("a", "mul", "x", "b"), node("a", "mul", "b", "c")
    assert calls(*both, outputs="c")[0] == "(x: a(x: mul mul) -> c) -> c"


def test_what_a_recurrent_layer_returns_is_output_used_or_not():
    """The hidden state alone may be used."""
    rnn = Node((Scope("a"),), operator("gru"), ("x",), ("b", "c"))
    assert calls(rnn, node("", "add", "c", "d"), outputs="d")[0] == "(x: a(x: gru) -> bc add) -> d"


def test_layers_mixed_with_others_keep_the_outputs_of_those_in_them():
    """What is read within a layer does not leave it, whatever lies around."""
    found, mixed = calls(
        node("a.fc", "mul", "xw", "b"),
        node("a.fc", "add", "bv", "c"),
        node("d", "relu", "c", "e"),
        node("a", "sum", "e", "f"),
        outputs="f",
    )
    assert mixed == {"a": WHY_MIXED}
    assert "a.fc(x: mul add) -> c" in found
