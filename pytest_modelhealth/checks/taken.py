"""What is made and goes where it was not meant to: twice, over a skip, or nowhere; lost states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from pytest_modelhealth.checks.facts import SEQUENCES, at, trainable
from pytest_modelhealth.checks.run import Faults, Rule, Run
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Flow, LayerRecord
from pytest_modelhealth.report.flow import Call, Kind, Vertex


def _doubled(run: Run) -> Faults:
    """Yield sums, joins and choices of one value and the same."""
    # of several results each may be another, and what a dropout drops is drawn anew
    calls, drops = run.flow.graph.calls, having("dropout")
    several = (c.outputs for c in calls if len(c.outputs) > 1 or c.type_name in drops)
    unsure = {number for outputs in several for number in outputs}
    for number, vertex in run.flow.operation_vertices.items():
        is_of_two = vertex.function in ("add", "cat", "stack", "where") and vertex.live
        is_of_two &= vertex.call >= 0 and unsure.isdisjoint(vertex.operands)
        if is_of_two and 2 in Counter(_made(run, o) for o in vertex.operands).values():
            cause = "a copied line, or a branch in place of the input; to double it, multiply by 2"
            # halves that are taken apart again, as of a reversible network, are meant
            parts = (run.vertices[taker] for taker in run.takers[number])
            is_twin = vertex.has("join") and any(one.has("slice") for one in parts)
            what = f"its `{vertex.function}` takes one value twice"
            if 2 not in Counter(vertex.operands).values():
                what += ", which is computed twice of the same"
            yield number, what, cause, "note" if is_twin else "warn"


def _made(run: Run, number: int) -> Hashable:
    """Return what is equal for two values that were computed alike, without weights, of the same.

    Of a layer without parameters its class, how it is set up and what came out: sizes in tuples are
    no options.
    """
    vertex, record = run.vertices[number], run.record(number)
    if vertex.has("total", "average") and "dims" in vertex.facts:
        return vertex.name, vertex.operands, vertex.facts["dims"]
    seen = None if record is None else record.activations
    if record is None or seen is None or record.parameters or record.buffers or not vertex.operands:
        return number
    said = (*record.options.items(), seen.shape, seen.count, seen.mean, seen.std, seen.min)
    return record.type_name, vertex.operands, said, seen.max


def _without_effect(run: Run) -> Faults:
    """Yield activations of what came of the same one, and the lesser of a value and its clamp."""
    calls, norms = run.flow.graph.calls, having("normalization")
    for number, vertex in enumerate(run.vertices):
        record, is_bound = run.record(number), vertex.name.startswith(("max", "min"))
        name, operands = record and record.activation, vertex.operands
        is_norm = record is not None and record.type_name in norms
        if not (name or is_bound or is_norm or vertex.facts):
            continue
        made = [run.before(o, "whole", "pad")[-1] for o in operands if name or is_bound]
        before = run.record(made[0]) if name and made else None
        if before is not None and before.activation == name:
            around = {calls[run.vertices[n].call].parent for n in (number, made[0])}
            what = f"it is given the result of a {name} at {before.label!r}, and is one itself"
            cause = "one too many, or in the wrong place: behind another layer it would be missing"
            yield number, what, cause, "warn" if len(around) == 1 else "note"
        givers = (run.flow.as_it_is(o, "whole")[-1] for o in operands if is_norm)
        if any(run.record(giver) is record for giver in givers):
            what = "it is given its own result: what is normalised is normalised again"
            yield number, what, "a line too many, or the wrong variable in it", "warn"
        if vertex.facts.get("is_infinite") == (True,):
            what = f"all that `{vertex.function}` takes, row by row, is infinite"
            cause = "what was to be left out is taken: -inf hides from maxima, inf from minima"
            yield number, what, cause, "fail"
        for one, other in (made, made[::-1]) if is_bound and len(made) == 2 else ():
            clamp = run.vertices[other]
            if clamp.has("clamp") and any(map(run.flow.is_alike, clamp.operands[:1], [one])):
                what = f"`{vertex.function}` of a value and of its own `{clamp.function}`: one of "
                what += "the two bounds has no effect"
                cause = "another was to be clamped: a ratio, before it is multiplied (PPO)"
                yield number, what, cause, "warn"


def _edges(run: Run) -> Faults:
    """Yield messages added up where they were read, or whose weights are normalised elsewhere.

    Edges are more than nodes, of which each end has its own indices.
    """
    made, added = run.vertices, {n for n, v in run.having("are_more") if "add" in v.function}
    for number in (n for n in added if made[n].facts["are_more"] and made[n].operands):
        (message, *_), here = made[number].operands, made[number].facts["indices"]
        adds = f"`{made[number].function}` adds"
        weighted = (made[n] for n in run.before(message, "view", "product", "quotient"))
        for above, below in (v.operands for v in weighted if v.has("quotient") and v.operands[1:]):
            reads = [made[n] for n in run.before(below, "view", "sum") if made[n].has("index")]
            taken = {*run.before(above, "view", "product")}  # whose sums are what it is divided by
            sums = (o for v in reads for o in v.operands[:1] if o in added)
            ends = {made[n].facts["indices"] for n in sums if taken & {*made[n].operands}}
            if ends and here not in ends:
                what = f"weights of edges are divided by their sums at one end, and {adds} "
                cause = "weights of what a node is given sum to one at the node that is given it"
                yield number, f"{what}them up at the other", cause, "warn"
        while made[message].has("view", "product", "quotient") and not made[message].operands[1:]:
            message = made[message].operands[0]
        if made[message].has("index") and made[message].facts.get("indices") == here:
            what = f"{adds} messages up at the indices that they were read at: each node gets "
            cause = "source and target are the two rows of the edges: read one, add to the other"
            yield number, f"{what}copies of itself", cause, "fail"


def _overwritten(run: Run) -> Faults:
    """Yield sums of a branch and a skip that an activation in the branch has written over.

    Where the block itself calls it, what it returns may be the skip that is meant.
    """
    calls = run.flow.graph.calls
    for number, vertex in run.flow.operation_vertices.items():
        is_sum = vertex.has("sum") and not vertex.has("difference") and vertex.call >= 0
        for skip in vertex.operands if is_sum else ():
            made, others = run.vertices[skip], set(vertex.operands) - {skip}
            inside = [c for c in run.flow.around(made.call) if calls[c].parent == vertex.call]
            # a conversion gives its operand back where it changes nothing
            if not inside or made.has("view") or skip in calls[inside[0]].outputs:
                continue
            if {*made.operands} & {*calls[inside[0]].inputs} and others & run.flow.after(skip):
                what = f"the skip that it adds was written over by {made.name!r} before"
                cause = "an activation with inplace=True on the input of the block: leave it out"
                yield number, what, cause, "warn"


def _untaken(run: Run) -> Faults:
    """Yield what nothing takes each time that its line runs: results, pieces, what is written.

    Activations that give probabilities may be kept for others to look at.
    """
    graph, made = run.flow.graph, [*_pieces(run)]
    ends = {*graph.outputs, graph.loss}
    for call in graph.calls:
        record = run.layers.get(call.layer)
        kinds = {record.activation, record.type_name} if record and call.outputs else set()
        if kinds & having("dying", "dropout"):
            is_taken = any(run.takers[n] or n in ends for n in call.outputs)
            cause = "`act(x)` where `x = act(x)` was meant: it changes nothing in place"
            made.append((call.outputs[0], "what it returns is dropped", cause, is_taken))
    writes = {n for n, v in run.flow.operation_vertices.items() if "is_held" in v.facts}
    for number, vertex in run.flow.operation_vertices.items():
        is_taken, name = bool(run.takers[number]) or number in ends, f"`{vertex.function}`"
        if vertex.facts.get("is_held") is False and not _is_kept(run, vertex):
            cause = "indexing by a mask or a list copies, and what is written there is lost"
            into = (run.vertices[n] for n in run.flow.walk([number], back=True, through=writes))
            if any(v.kind is Kind.CONSTANT for v in into):
                is_live = vertex.live or "unused" in vertex.facts  # what leads nowhere made nodes
                cause = _KEPT if is_live and vertex.call >= 0 else _LOGGED
            made.append((number, f"nothing reads what {name} writes", cause, is_taken))
        elif vertex.function == "masked_fill" or vertex.has("dropout"):
            cause = "it returns a new tensor, and writes nothing in place"
            made.append((number, f"nothing takes the result of {name}", cause, is_taken))
    lines = {(run.vertices[number].line, what) for number, what, _, is_taken in made if is_taken}
    for number, what, cause, _ in made:
        if (line := run.vertices[number].line) and (line, what) not in lines:
            yield number, what, cause, "note" if cause is _LOGGED else "warn"


_KEPT = "a tensor was made to hold it, and is dropped: return it, or have the next line take it"
_LOGGED = "a tensor was made to hold it, which this run does not use: for a log, or left over"


def _is_kept(run: Run, write: Vertex) -> bool:
    """Whether something is written into what others hold, or into memory that others share."""
    held = (run.vertices[n] for operand in write.operands for n in run.flow.as_it_is(operand))
    made = (Kind.CALL, Kind.OPERATION, Kind.CONSTANT)
    return any(v.has("detach") or v.kind not in made for v in held)


def _pieces(run: Run) -> Iterator[tuple[int, str, str, bool]]:
    """Yield each piece that features of a layer that learns are cut into, and if it is used."""
    graph, used = run.flow.graph, dict[tuple[int, str], dict[int, int]]()
    for number in sorted(run.flow.walk([n for n in (*graph.outputs, graph.loss) if n], back=True)):
        vertex = run.vertices[number]
        if "pieces" in vertex.facts and vertex.live and vertex.operands:
            index = vertex.name.rstrip("]").rpartition("[")[2]
            pieces = used.setdefault((vertex.operands[0], vertex.line), {})
            pieces[int(index) if index.isdigit() else 0] = number
    for (operand, _), pieces in used.items():
        number = next(iter(pieces.values()))
        facts, record = run.vertices[number].facts, run.record(run.flow.as_it_is(operand)[-1])
        views, (dim,) = run.views(operand), facts["dims"]
        is_last = record is not None and record.type_name in having("features")
        # the axis of the features, which may lie in several by now
        axis = (len(views[-1][0]) if views else facts["ndim"]) - 1 if is_last else 1
        is_cut = (dim >= axis if is_last else dim == axis) and all(
            old[:axis] == new[:axis] for old, new in views
        )
        for one in range(facts["pieces"] if record and trainable(record) and is_cut else 0):
            what = f"nothing reads piece {one} of {facts['pieces']} that it is cut into"
            cause = "a gate, a half of a projection or a branch that was left out"
            yield number, what, cause, one in pieces


def _remembered(run: Run) -> Faults:
    """Yield writes into a plain tensor that the model keeps."""
    for number, vertex in run.flow.operation_vertices.items():
        held = (run.vertices[run.flow.as_it_is(n)[-1]].kind for n in vertex.operands)
        if vertex.facts.get("is_held") and vertex.call >= 0 and Kind.UNKNOWN in held:
            what = "it writes into a tensor that it keeps, and that is no buffer"
            yield number, what, "`register_buffer` has it saved and moved with the model", "note"


# ---- states that are not carried on --------------------------------------------------------------

_FEWEST_STEPS = 3
_SOURCES = frozenset({"constant", "parameter", "buffer"})
"""What a state is made of that no step made."""


def _lost_states(run: Run) -> Faults:
    """Yield cells that are called step by step, each time without a past, or a part of it."""
    for record in run.layers.values():
        is_cell = _is_recurrent(record) and record.name in run.flow
        calls = run.flow.calls(record.name) if is_cell else ()
        if len(calls) < _FEWEST_STEPS or len({call.parent for call in calls}) > 1:
            continue
        if how := _how_states_are_lost(run.flow, calls):
            what = f"it is called {len(calls)} times{at(calls[1].line)}, once a step, with {how}"
            cause = "a state is not carried from step to step, so that nothing is remembered and "
            cause += "the weights of the state learn nothing: assign all that it returns (not "
            cause += "`h, _ = cell(x, (h, c))`) and pass it on"
            yield (record.name,), what, cause, "fail"


def _one_state(run: Run) -> Faults:
    """Yield LSTMs that are given a hidden state that one has made as their cell, too.

    A tensor that is given twice is told once: of two, the first may be a state and the input.
    """
    told = dict(run.having("is_one_state"))
    for number, vertex in told.items():
        before = (run.before(operand, "view", "index", "join") for operand in vertex.operands)
        given, *states = ({told[n].name for n in met if n in told} for met in before)
        makers = set[str]().union(*states)
        if vertex.facts["is_one_state"] == (True,) and makers and not (given and len(states) == 1):
            what = "it is given a hidden state as its cell, too: the two are equal throughout"
            cause = "`(h, h)`, or a copied line, where `(h, c)` was meant: the cell's is lost"
            yield number, what, cause, "fail" if vertex.name in makers else "warn"


def _how_states_are_lost(flow: Flow, calls: Sequence[Call]) -> str:
    """Return which states are constants in calls that take one part of a sequence each."""
    parts, vertices = {call.inputs[0] for call in calls}, flow.graph.vertices
    # the parts of what has no graph look alike
    if len(parts) < len(calls) and {vertices[part].function for part in parts} != {"unbind"}:
        return ""
    states = [*zip(*(call.inputs[1:] for call in calls[1:]), strict=False)]
    made = [flow.after(*call.outputs) for call in calls[:-1]]
    carried = [all(n in after for n, after in zip(one, made, strict=True)) for one in states]
    constant = [
        {str(vertices[origin].kind) for origin in flow.origins(*one)} <= _SOURCES for one in states
    ]
    if any(carried) and any(constant):
        return "one of its states the same constant each time, while another is carried on"
    after = frozenset[int]().union(*made)
    if all(constant) and all(after.isdisjoint(call.inputs) for call in calls):
        return "a state that no step made: nothing of what it returns comes back to it"
    return ""


def _is_recurrent(record: LayerRecord) -> bool:
    """Whether a layer has weights for its own state and takes one step at a time, as cells do."""
    if not any(name.startswith("weight_hh") for name in record.parameters):
        return False
    shape = () if record.inputs is None else record.inputs.shape
    is_batch_first = record.options.get("batch_first")
    return is_batch_first is None or (len(shape) == SEQUENCES and shape[bool(is_batch_first)] == 1)


RULES: list[Rule] = [_doubled, _without_effect, _edges, _overwritten, _untaken]
STATES: list[Rule] = [_lost_states, _one_state, _remembered]
"""What needs no exact flow."""
