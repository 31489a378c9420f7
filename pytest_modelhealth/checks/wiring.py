"""How layers are put together: what runs and learns, and is yet not what was meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import at
from pytest_modelhealth.checks.paths import as_given, is_floating
from pytest_modelhealth.checks.recurrences import lost_states
from pytest_modelhealth.checks.siblings import (
    Siblings,
    StandIn,
    standing_in,
    without_residual,
)
from pytest_modelhealth.report import Flow, LayerRecord, Observation, Violation
from pytest_modelhealth.report.flow import AS_IT_IS, FILLED, Vertex
from pytest_modelhealth.report.flow.inferred import NOTE
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import is_inside, parent
from pytest_modelhealth.statistics import TensorStatistics

WIRING = CHECKS["wiring"]


_SUM = "add"
_DOUBLED = {
    "add": (
        "adds a value to itself",
        "a residual that adds the branch in place of the input; to double it, multiply by 2",
    ),
    "cat": ("joins a value to itself", "a copied line: one of the two should be another value"),
    "stack": ("stacks a value on itself", "a copied line: one of the two should be another value"),
    "where": (
        "chooses by `where` between a value and the same value",
        "a mask that hides nothing: one side should be another value",
    ),
}
"""Operations that are nothing to do with one value twice: what to say, and why it may be."""
_SAME_AGAIN = ("upsample", "relu", "gelu", "silu", "tanh", "sigmoid")
"""What the same values come of again: its options change the shape alone, if it has any."""
_PURE = frozenset({"mul", "rsub", "sub", "add", "neg", "eq", "ne", "lt", "gt", "le", "ge"}) | {
    "bitwise_not", "invert", "logical_not", "bool", "long", "int", "type", "cpu", "cuda", "div",
}  # fmt: skip
"""Operations that change nothing but what they return, where they have one operand."""


def findings(observation: Observation, settings: Settings) -> Iterator[Violation]:
    """Yield what is wired wrongly, one violation a story."""
    flow = observation.flow
    if flow is None or NOTE in flow.notes or not flow.graph.calls:
        return
    groups = Siblings(observation, flow)
    yield from _stand_ins(observation, flow, groups)
    yield from _one_row(observation, flow)
    yield from lost_states(observation, flow)
    if flow.is_exact:
        if flow.graph.outputs:
            yield from _unread(observation, flow, groups)
        doubled = list(_doubled(observation, flow))
        yield from doubled
        known = [name for violation in doubled for name in violation.layers]
        yield from _residuals(observation, flow, groups, known)


# ---- a layer in the place of another ------------------------------------------------------------


def _stand_ins(observation: Observation, flow: Flow, groups: Siblings) -> Iterator[Violation]:
    stories: dict[str, list[StandIn]] = {}
    for one in standing_in(observation, flow, groups):
        calls = flow.calls(one.layer)
        same = [call for call in calls if call.parent == calls[0].parent]
        line = same[1].line if len(same) > 1 else calls[0].line  # the first may be the right one
        stories.setdefault(line, []).append(one)
    for line, found in stories.items():
        layer, never, times, _ = found[0]
        is_sure = any(one.is_sure for one in found)
        so_are = f" ({len(found) - 1} more like it)" if len(found) > 1 else ""
        yield WIRING.fault(
            observation.layers[layer],
            f"it is called {times} times{at(line)}, and {_listed(never)} of the same class and "
            f"shape never{so_are}",
            value=float(times),
            cause=f"{layer!r} is called in the place of its siblings, which learn nothing: the "
            "wrong index in a loop, or a copied line"
            + ("" if is_sure else "; chosen so on purpose they look the same"),
            affected=(*never, *(name for one in found[1:] for name in (one.layer, *one.never))),
            severity="fail" if is_sure else "warn",
        )


# ---- a residual that siblings have --------------------------------------------------------------


def _residuals(
    observation: Observation, flow: Flow, groups: Siblings, known: Collection[str]
) -> Iterator[Violation]:
    found = list(without_residual(observation, flow, groups))
    names, told = {layer for layer, _, _ in found}, list(known)
    for layer, inner, siblings in found:
        culprit = parent(layer) if inner else layer  # whose own code it is
        if any(culprit == o or is_inside(culprit, o) or is_inside(o, culprit) for o in told):
            continue
        if layer in flow and not names.isdisjoint(flow.consumers(layer)):
            continue  # the last layer of a branch stands for it
        told.append(culprit)
        past = (
            f"in it no residual goes past {inner.rpartition('.')[2]!r}"
            if inner
            else ("no residual goes past it")
        )
        yield WIRING.violation(
            observation.layers[culprit],
            f"it differs from its {siblings} siblings, which agree: {past}, nothing that it is "
            f"made of is added to what comes of it{at(flow.line(layer) if layer in flow else '')}",
            value=float(siblings),
            cause="left out by a condition or a copied line, or something else is added in its "
            "place; or meant so: nothing that was seen tells",
            independent=True,
            severity="warn",
        )


# ---- tables asked for one row -------------------------------------------------------------------


_COMPARISONS = frozenset({"eq", "ne", "lt", "gt", "le", "ge", "isin", "bool", "logical_not"})
_COARSE = frozenset(
    {"and", "bitwise_and", "bitwise_right_shift", "bucketize", "div", "floor_divide", "floordiv"}
    | {"fmod", "mod", "remainder", "rshift", "truediv", "rrshift", "true_divide"}
)
"""Operations that make kinds of ids, of which a batch may well hold one only."""
_FILLING = frozenset({"where", "masked_fill"})
_LOOK_UPS = frozenset({"embedding", "embedding_bag", "index", "index_select", "getitem", "gather"})
_FEWEST_IDS = 8
_FEWEST_ROWS = 4
_DO_NOT_COUNT = (
    "positions that do not count, so that every token gets the same row: "
    "torch.arange(length) counts"
)


def _one_row(observation: Observation, flow: Flow) -> Iterator[Violation]:
    """Yield the tables that are asked for one row by indices that the model made.

    They are constants, where nothing else tells positions, or were computed from ids in the batch
    that differ. Of ids that it was given `inputs` tells.
    """
    sources, constants = {}, set[str]()
    for record in observation.layers.values():
        rows, given = record.options.get("num_embeddings"), record.inputs
        if record.name not in flow or not isinstance(rows, int) or given is None:
            continue
        if is_floating(given) or given.count < 2 or given.min != given.max:
            continue
        made = _made_of(flow, *(n for c in flow.calls(record.name) for n in c.inputs))
        kinds = {one.kind for one in made}
        if made and kinds <= {"constant", "buffer"}:
            # indices for each sample are kinds of it, a table of fewer rows has kinds of tokens
            length = 0 if given.shape in ((), (observation.samples,)) else given.shape[-1]
            if rows >= length > 1:
                sources[record.name] = made
        elif flow.is_exact and kinds <= {"input", "constant", "buffer"}:
            yield from _computed(observation, flow, record, made)
    constants.update(sources, (one.name for made in sources.values() for one in made))
    # another table that no batch asks for several rows may be the one that tells positions
    counts = any(
        _differs(r.inputs) and flow.feeding(r.name).isdisjoint(flow.inputs)
        for r in observation.layers.values()
        if "num_embeddings" in r.options and r.name in flow and sources
    )
    for layer, made in sources.items():
        if not _has_positions(flow, layer, constants):
            why = f": they come from `{made[0].name}`{at(made[0].line)}, not from the batch"
            is_sure = made[0].kind == "constant" and not counts
            yield _all_indices(observation.layers[layer], why, _DO_NOT_COUNT, is_sure=is_sure)
    yield from _constant_rows(observation, flow)


def _computed(
    observation: Observation, flow: Flow, record: LayerRecord, made: list[Vertex]
) -> Iterator[Violation]:
    """Yield that ids, all equal, were computed from some that differ.

    They have the shape of ids in the batch, or are positions: without a batch dimension, of a table
    that is as long as the sequence.
    """
    given, rows = record.inputs, record.options["num_embeddings"]
    assert given is not None
    assert isinstance(rows, int)
    differing = {n: w for n in flow.inputs if _differs(w := as_given(observation, n)) and w}
    of_tokens = {w.shape for w in differing.values() if not is_floating(w)}
    shape = given.shape
    are_tokens = len(shape) > 1 and shape[-1] > 1
    if shape not in of_tokens:
        are_tokens = rows == shape[-1] and len(shape) == 1 + (shape[0] == 1 < len(shape))
    source = next((o.name for o in made if o.kind == "input" and o.name in differing), None)
    if source is None or not are_tokens or min(rows, given.count) < _FEWEST_IDS:
        return
    operations = flow.operations(source, record.name)
    functions = dict.fromkeys(one.function for one in operations)
    if not functions.keys() - AS_IT_IS - {"long", "int"}:
        return
    line = ([one.line for one in operations if one.line] or [""])[-1]
    may_be_meant = not _FILLING.isdisjoint(functions)
    if not _COMPARISONS.isdisjoint(functions):
        may_be_meant |= rows < shape[-1]
    elif not _COARSE.isdisjoint(functions):  # kinds, beside the ids themselves
        may_be_meant |= any(
            "num_embeddings" in r.options and source in flow.feeding(r.name)
            for r in observation.layers.values()
            if r.name in flow and _differs(r.inputs)
        )
    yield _all_indices(
        record,
        f", and {source!r}, which they are computed from, differs{at(line)}",
        f"ids or positions are destroyed on the way from {source!r} "
        f"({', '.join(f'`{name}`' for name in functions)}), so that every token gets the same row"
        + ("; one kind for all may be meant, too" if may_be_meant else ""),
        is_sure=not may_be_meant,
    )


def _all_indices(record: LayerRecord, why: str, cause: str, *, is_sure: bool) -> Violation:
    given = record.inputs
    assert given is not None
    return WIRING.fault(
        record,
        f"all {given.count} of its indices are {given.min:.0f}{why}",
        value=given.min,
        cause=cause,
        role="inputs",
        severity="fail" if is_sure else "warn",
    )


def _differs(given: TensorStatistics | None) -> bool:
    return given is not None and given.finite_count > 0 and given.min != given.max


def _made_of(flow: Flow, *numbers: int) -> list[Vertex]:
    """Return the layers and sources that vertices are made of, in order."""
    return [flow.graph.vertices[number] for number in sorted(flow.origins(*numbers))]


def _has_positions(flow: Flow, table: str, constants: set[str]) -> bool:
    """Whether what a table gives out meets values, before the next layer, that no batch made."""
    following = [name for name in flow.consumers(table) if name in flow]
    if not following:
        return False
    beside = set(flow.producers(following[0])) - {table} - constants
    return any({name, *flow.feeding(name)}.isdisjoint(flow.inputs) for name in beside)


def _constant_rows(observation: Observation, flow: Flow) -> Iterator[Violation]:
    """Yield the parameters of which a function is asked for one row by a constant."""
    for vertex in flow.graph.vertices:
        if (
            vertex.function
            not in frozenset(
                {"embedding", "embedding_bag", "index", "index_select", "getitem", "gather"}
            )
            or len(vertex.operands) != 2
        ):
            continue
        table, made = (_made_of(flow, operand) for operand in vertex.operands)
        if {one.kind for one in table} != {"parameter"} or not made:
            continue
        if any(one.name not in FILLED or one.kind != "constant" for one in made):
            continue
        layer, _, own = table[0].name.rpartition(".")
        rows = observation.layers[layer].parameters[own].shape[0]
        beside = {table[0].name, *(one.name for one in made)}
        if rows >= _FEWEST_ROWS and not _has_positions(flow, table[0].name, beside):
            yield WIRING.fault(
                observation.layers[layer],
                f"{own!r} is asked for one of its {rows} rows only: the indices come from "
                f"`{made[0].name}`{at(made[0].line)}, not from the batch",
                cause=f"{_DO_NOT_COUNT}; a row for all may be meant, too",
                role="parameters",
                tensor=own,
                severity="warn",
            )


# ---- inputs that nothing reads ------------------------------------------------------------------


def _unread(observation: Observation, flow: Flow, groups: Siblings) -> Iterator[Violation]:
    vertices, root = flow.graph.vertices, observation.layers[""]
    given = [number for number, vertex in enumerate(vertices) if vertex.kind == "input"]
    unread = [number for number in given if _is_ignored(flow, number)]
    names = [vertices[n].name for n in unread if not vertices[n].name.endswith("]")]
    inner = [] if names else _unread_inside(observation, flow)
    if not names and not inner:
        return
    count, where = len(names or inner), " inside an object" if inner else ""
    is_, it = ("are", "them") if count > 1 else ("is", "it")
    message = f"{_listed(names or inner)} {is_} given{where} and nothing reads {it}"
    towers, value = None if inner else next(_towers_on_one(flow, groups), None), float(count)
    if not inner and len(unread) == len(given):
        message += ": the output is the same whatever the batch"
        cause = "the model computes from its own tensors alone"
        yield WIRING.fault(root, message, value=value, role="inputs", cause=cause)
    elif towers is not None:
        first, second, source = towers
        again = "again" if first == second else f"as {first!r} is"
        yield WIRING.fault(
            observation.layers[second],
            f"it is given {source!r}{at(flow.calls(second)[-1].line)}, {again}, and {message}",
            value=value,
            role="inputs",
            cause="two towers are fed the same: a copied line with the wrong argument",
            independent=True,
        )
    else:
        cause = "an argument or key that is not passed on, that this model has no use for, or that "
        cause += "only others read, as a loss or a metric: leave it out of the batch"
        yield WIRING.violation(
            root, message, value=value, role="inputs", cause=cause, severity="warn"
        )


def _unread_inside(observation: Observation, flow: Flow) -> list[str]:
    """Return numbers inside an object of the batch that nothing takes, labels and ids apart.

    A dictionary may hold what only a loss reads; what a loss was given elsewhere is not told.
    """
    vertices = enumerate(flow.graph.vertices)
    met = {vertex.name: number for number, vertex in vertices if vertex.kind == "input"}
    targets = {(c.target.shape, c.target.dtype) for c in observation.loss_calls if c.target}
    return [
        one.name
        for one in observation.given
        if one.name.endswith("]")
        and one.dtype.startswith(("float", "bfloat"))
        and (one.shape, one.dtype) not in targets
        and (one.name not in met or _is_ignored(flow, met[one.name]))
    ]


def _is_ignored(flow: Flow, number: int) -> bool:
    """Whether nothing comes of a vertex but other forms of it, which nothing takes."""
    after, graph = flow.after(number), flow.graph
    if not after.isdisjoint({*graph.outputs, graph.loss}):
        return False
    made = [graph.vertices[n] for n in after - {number}]
    pure = all(v.kind == "operation" and v.function in AS_IT_IS | _PURE for v in made)
    return pure and all(after.issuperset(v.operands) for v in made)


def _towers_on_one(flow: Flow, groups: Siblings) -> Iterator[tuple[str, str, str]]:
    """Yield what is called with the same input twice: one layer, or two alike that hold others."""
    vertices = flow.graph.vertices
    inputs = frozenset(flow.inputs)
    seen: set[tuple[int, str, tuple[int, ...]]] = set()
    for call in flow.graph.calls:
        this = (call.parent, call.layer, call.inputs)
        is_given = bool(call.inputs) and vertices[call.inputs[0]].kind == "input"
        if is_given and this in seen and groups.has_parameters(call.layer):
            yield call.layer, call.layer, vertices[call.inputs[0]].name
        seen.add(this)
    for group in groups.alike:
        names = [name for name in group if name in flow]
        given = [flow.producers(name, as_it_is=True) for name in names]
        is_pair = len(names) == 2 and len(groups.below[names[0]]) > 1
        if is_pair and given[0] == given[1] and len(given[0]) == 1 and given[0][0] in inputs:
            yield names[0], names[1], given[0][0]


# ---- a value joined with itself -----------------------------------------------------------------


def _doubled(observation: Observation, flow: Flow) -> Iterator[Violation]:
    graph = flow.graph
    unsure = {  # what may be several values: it is, or was passed on, as by an idle dropout
        number
        for call in graph.calls
        if len(call.outputs) > 1 or not set(call.outputs).isdisjoint(call.inputs)
        for number in call.outputs
    }
    lines: dict[tuple[str, str], list[str]] = {}
    for number, vertex in enumerate(graph.vertices):
        layer = graph.calls[vertex.call].layer if vertex.call >= 0 else None
        if vertex.function not in _DOUBLED or not vertex.live or layer is None:
            continue
        values = Counter(_value(observation, flow, operand) for operand in vertex.operands)
        if 2 not in values.values() or not unsure.isdisjoint(vertex.operands):
            continue
        made = _made_of(flow, number)
        if vertex.function == _SUM or any(one.kind == "call" for one in made):
            lines.setdefault((vertex.function, vertex.line), []).append(layer)
    for (function, line), layers in lines.items():
        does, cause = _DOUBLED[function]
        yield WIRING.violation(
            observation.layers[layers[0]],
            f"it {does}{at(line)}",
            value=float(len(layers)),
            cause=cause,
            affected=dict.fromkeys(layers[1:]),
            severity="warn",
        )
    outputs = [n for n in dict.fromkeys(graph.outputs) if graph.vertices[n].live]
    values = Counter(_value(observation, flow, number) for number in outputs)
    for (name, *_), times in values.items():
        record = observation.layers.get(str(name))
        if times > 1 and record is not None and not record.functional:
            line = flow.calls(record.name)[-1].line
            yield WIRING.violation(
                record,
                f"it is called {times} times with the same{at(line)}, and all of it is returned",
                value=float(times),
                cause="two that should differ, and are one layer: a copied line, or one object "
                "under two names",
                severity="warn",
            )


def _value(
    observation: Observation, flow: Flow, number: int
) -> tuple[str, tuple[int, ...]] | tuple[int]:
    """Return what is the same for what is computed twice: what makes it, and of what."""
    vertex = flow.graph.vertices[number]
    record = observation.layers.get(vertex.name) if vertex.kind == "call" else None
    if record is not None and not record.functional:
        is_noise = "Drop" in record.type_name or "RReLU" in record.type_name
        is_random = is_noise or bool(record.options.get("dropout"))
        return (number,) if is_random else (vertex.name, vertex.operands)
    function = vertex.function if record is None else record.type_name
    is_plain = vertex.kind in ("call", "operation") and function.startswith(_SAME_AGAIN)
    return (function, vertex.operands) if is_plain else (number,)


# ---- words --------------------------------------------------------------------------------------


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_SHOWN = 3
