"""Gradients that are exactly zero although the graph leads from the loss to the parameter.

A gate that starts closed, a branch that starts at zero and a draw that left out a batch open as
soon as the model is trained: three steps on the batch, undone, decide what an inspection cannot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    at,
    called,
    completed,
    flow_of,
    is_in_an_empty_part,
    learns,
    members,
    seems_trained,
    steps_of,
)
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, LayerRecord, Observation, Outcome, ProbeRecord
from pytest_modelhealth.report.flow import Vertex
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import dotted

MISSING_GRADIENTS = CHECKS["missing_gradients"]

STEPS = 3
"""Steps of training after which a gradient that is still zero is taken to stay so."""
TRIAL = "zero_gradients"
"""What the record of these steps is called among those of the probes."""
ZERO, ROWS, COLUMNS = "zero", "rows", "columns"
"""What the steps leave at zero: whole parameters, or rows or columns of one."""

FEWEST_ROWS = 4
_MATRIX = 2
_MOST = 16
"""Stories to tell; each is a sweep of its own."""
_FEWEST_SAMPLES = 4
"""Of fewer, stochastic depth leaves out all too often: of 3 one time in 8, where it keeps half."""


def zero_parameters(observation: Observation) -> dict[str, LayerRecord]:
    """Return the matrices and kernels whose gradient is exactly zero, by full name.

    A bias is only added, and a scale or a temperature may stand at its bound. Over sequences of one
    step a recurrent layer learns nothing of its state.
    """
    flow = flow_of(observation)
    return {
        dotted(record.name, name): record
        for record in observation.layers.values()
        for name, gradient in record.parameter_gradients.items()
        if gradient.abs_max == 0.0 and gradient.finite_count == gradient.count > 0
        if name not in record.frozen and len(gradient.shape) >= _MATRIX
        if not (name.startswith("weight_hh") and learns(record) and steps_of(record, flow) < 2)
    }


def call_for_steps(observation: Observation) -> bool:
    """Whether a gradient of zero was seen that a few steps of training may open."""
    if not (observation.backward and observation.has_zero_gradients):
        return False
    return bool(zero_parameters(observation)) or next(zero_slices(observation), None) is not None


def zero_slices(
    observation: Observation,
) -> Iterator[tuple[LayerRecord, str, str, Collection[int]]]:
    """Yield matrices of which four rows or columns or more are zero, and their gradients.

    Each with its layer, its own name and which they are. Rows that are looked up have no gradient
    where they are not asked for, and columns none where the batch is zero.
    """
    flow = flow_of(observation)
    for record in called(observation):
        calls = flow.calls(record.name) if record.zero_slices and record.name in flow else ()
        given = [flow.graph.vertices[number] for call in calls for number in call.inputs]
        for name, slices in record.zero_slices.items():
            full = dotted(record.name, name)
            takers = flow.consumers(full) if full in flow else ()
            taken = {one.function for one in flow.operations(full, *takers)} if takers else set()
            if name in record.frozen or not taken.isdisjoint(having("choice", "table")):
                continue
            columns = slices.columns if not given or any(v.live for v in given) else ()
            size = dict(zip((ROWS, COLUMNS), record.parameters[name].shape, strict=False))
            choices = (ROWS, slices.rows), (COLUMNS, columns)
            kind, idle = max(choices, key=lambda one: len(one[1]) / size[one[0]])
            if len(idle) >= FEWEST_ROWS:
                yield record, name, kind, idle


def zero_gradients(observation: Observation) -> Iterator[Finding]:
    """Yield where gradients are exactly zero, one finding a story, and stay so over a few steps."""
    zero, trial = zero_parameters(observation), _trial(observation)
    if trial is not None:
        lasting = {name for one in trial.partings if one.kind == ZERO for name in one.names}
        yield from _opened({name: one for name, one in zero.items() if name not in lasting})
        zero = {name: record for name, record in zero.items() if name in lasting}
    if not zero:
        return
    if observation.loss == 0.0:  # `loss` names one that is off, `dead_units` what is dead
        if not any(map(_is_dead, called(observation))):
            last = max(zero.values(), key=completed)
            yield MISSING_GRADIENTS.inconclusive(last, _NOTHING_TO_LEARN)
        return
    flow = flow_of(observation)
    names: dict[str, list[str]] = defaultdict(list)  # of parameters, by what the flow calls them
    is_routed, inner = any(v.has("route") for v in flow.operation_vertices.values()), {*flow.layers}
    for full, record in zero.items():
        name = record.name if record.name in inner else full
        if name in flow and not _is_by_design(name, record, observation, is_routed):
            names[name].append(full)
    records = {name: zero[own[0]] for name, own in names.items()}
    # what is given zeros by others follows from these
    idle = {n for n, r in records.items() if r.inputs is not None and r.inputs.abs_max == 0.0}
    stories: dict[object, list[tuple[str, list[Vertex]]]] = defaultdict(list)
    first = [name for name in names if name not in idle] or [*names]  # in the same order always
    alive, vertices = {r.name for r in called(observation) if _is_alive(r)}, flow.graph.vertices
    through = {n for n, v in enumerate(vertices) if v.name not in alive}
    for name in flow.last_of(*first, by="gradient")[:_MOST] if first else ():
        inside = flow.inside(name)  # what gradients would come back by, up to where they do
        met = flow.walk(inside, "gradient", through=through | inside) - inside
        way = [vertices[number] for number in sorted(met)]
        if any(v.kind == "call" and _is_dead(observation.layers[v.name]) for v in way):
            continue  # `dead_units` tells of it
        place = next(((v.function, v.line) for v in _steps(way) if v.line), name)
        stories[place].append((name, way))
    for story in stories.values():
        culprit, way = max(story, key=lambda one: completed(records[one[0]]))
        record, ends = records[culprit], [name for name, _ in story]
        before = flow.feeding(*ends, by="gradient").union(ends, idle) & names.keys()
        affected = {records[name].name for name in before} - {record.name}
        own = [full for name in ends if records[name] is record for full in names[name]]
        tensors = [full.rpartition(".")[2] for full in own]
        yield _finding(record, tensors, way, affected, observation)


def _opened(zero: dict[str, LayerRecord]) -> Iterator[Finding]:
    """Tell of the gradients that were zero at first alone: a closed gate, a branch of zero."""
    for first, *others in [[*zero]] if zero else ():
        more = f" and of {len(others)} more" if others else ""
        yield MISSING_GRADIENTS.fault(
            zero[first],
            f"the gradient of {first}{more} is exactly zero, until a step of training",
            cause="a gate or a branch starts at zero and opens, as adapters do by design",
            affected=dict.fromkeys(r.name for r in zero.values() if r is not zero[first]),
            severity="note",
        )


def _is_by_design(name: str, record: LayerRecord, run: Observation, is_routed: bool) -> bool:
    """Whether a layer gives out nothing, is given a constant as first queries are, or was routed.

    That is: one in its place in a list learns beside it, and the flow shows a choice.
    """
    flow = flow_of(run)
    if is_in_an_empty_part(record, run):
        return True
    origins = flow.origins(*(number for call in flow.calls(name) for number in call.inputs))
    if origins and all(flow.graph.vertices[number].kind == "constant" for number in origins):
        return True
    if name != record.name or not is_routed:
        return False
    alike = {other for _, there in members(name, run.layers) for other in there}
    return not alike <= {name, *flow.feeding(name), *flow.reach(name)}


def _trial(observation: Observation) -> ProbeRecord | None:
    """Return what the steps left at zero; ``None`` where they could not be run."""
    record = observation.probes.get(TRIAL)
    return record if record is not None and record.outcome is Outcome.JUDGED else None


def _finding(
    record: LayerRecord,
    tensors: list[str],
    way: list[Vertex],
    affected: Collection[str],
    observation: Observation,
) -> Finding:
    flow, made = flow_of(observation), _steps(way)
    calls = [observation.layers[v.name] for v in way if v.kind == "call"]
    goes_on, is_tried = any(map(_is_alive, calls)), _trial(observation) is not None
    steps = [v for v in made if v.has("flat")] or [v for v in made if not v.has("sum")]
    factors = _factors(made, observation, flow)
    said = [*factors.values(), *(f"`{v.function}`{at(v.line)}" for v in steps if v not in factors)]
    through = [*dict.fromkeys(said), *(repr(r.name) for r in calls)][:_NAMED]
    cause = (
        f"nothing comes back through {', '.join(through) or 'the loss'}: a clamp, rounding, a "
        f"saturated function, a factor of zero, or a backward that returns zeros; {_REMEDY}"
    )
    if record.activations is not None and record.activations.dtype == "float16" and not goes_on:
        cause = UNDERFLOW
    # a softmax has a single key to weigh; of a score alone `wiring` tells
    weights = [r.activations for r in calls if r.activation == "softmax"]
    is_of_one = any(seen is not None and seen.shape[-1:] == (1,) for seen in weights)
    is_of_one |= any(r.options.get("keys") == 1 for r in calls)
    if is_of_one:
        cause = "a softmax over a single value, as over one key, gives 1 whatever it is given"
    # of what a batch alone may have left out nothing is sure: a mask, one key, a head at the end
    is_partial = (
        observation.samples < _FEWEST_SAMPLES
        or not flow.is_exact
        or any(v.has("choice") for v in made)
        or is_of_one
        or _is_masked(made, observation, flow)
        or (not goes_on and any(map(learns, called(observation))))
    )
    if is_partial:
        cause += "; this batch alone may leave it out, or nothing reads that part"
    if learns(record) and tensors[0].startswith(("weight_ih", "weight_hh")):
        cause = f"one step, layer or direction alone is read of its states ({', '.join(through)}): "
        cause += "out[:, -1] is the last step, h_n[-1] the last layer; join two directions"
        is_partial = record.options.get("bidirectional") is True or any(
            v.has("index") for v in made
        )
    tried, trial = f", and still is after {STEPS} steps of training", observation.probes.get(TRIAL)
    if not is_tried:
        why = "this run allows no further one" if trial is None else trial.reason
        tried = f"; whether training opens it was not tried: {why}"
    return MISSING_GRADIENTS.fault(
        record,
        f"the gradient of its {' and '.join(tensors)} is exactly zero{tried}",
        tensor=tensors[0],
        cause=cause,
        affected=[name for name in observation.layers if name in affected],
        severity="fail" if is_tried and not is_partial else "warn",
    )


def _is_dead(record: LayerRecord) -> bool:
    """Whether it is an activation that no sample gets through."""
    seen = record.activations
    return record.activation is not None and seen is not None and seen.dead_fraction == 1.0


def _is_alive(record: LayerRecord) -> bool:
    """Whether gradients arrive at what a layer gives, at most places: a class token is one."""
    seen = record.gradients
    return seen is not None and seen.abs_max > 0.0 and seen.zero_fraction < _PARTLY


def _steps(way: list[Vertex]) -> list[Vertex]:
    """Return the operations on a way that do more than lay values out anew."""
    return [v for v in way if v.kind == "operation" and (not v.has("view") or v.has("choice"))]


def _is_masked(made: list[Vertex], observation: Observation, flow: Flow) -> bool:
    """Whether a factor is of the batch, or made or drawn by the forward: it may be otherwise."""
    known = {"0", *(r.name for r in observation.layers.values() if r.parameters)}
    kept = {
        number
        for number, vertex in enumerate(flow.graph.vertices)
        if vertex.name in known or vertex.kind in ("parameter", "buffer", "unknown")
    }
    factors = (o for v in made if v.has("product") for o in v.operands)
    return any(kept.isdisjoint(flow.walk([factor], back=True)) for factor in factors)


def _factors(made: list[Vertex], observation: Observation, flow: Flow) -> dict[Vertex, str]:
    """Return the products on a way with a factor of zero, and what to say of each."""
    zeros = {r.name for r in called(observation) if r.activations and r.activations.abs_max == 0.0}
    for record in observation.layers.values():
        state = {**record.parameters, **record.buffers}
        zeros |= {dotted(record.name, n) for n, s in state.items() if s.count and not s.abs_max}
    found = {}
    for vertex in made:
        for operand in vertex.operands if vertex.has("product") else ():
            names = {flow.graph.vertices[number].name for number in flow.origins(operand)}
            if names and names <= zeros | having("zeros"):
                found[vertex] = f"`{vertex.function}`{at(vertex.line)} by {min(names)!r}, all zero"
    return found


def idle_rows(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the matrices of which rows are zero and get a gradient of exactly zero, and go on to.

    What was pruned on purpose looks the same: only a fresh model is judged.
    """
    trial, layers = _trial(observation), observation.layers
    for one in trial.partings if trial is not None else ():
        if one.kind not in (ROWS, COLUMNS):
            continue
        record, limit = layers[one.layer], settings.limit("max_idle_rows", one.layer)
        if one.effect <= limit.value:
            continue
        text = f"{one.detail} of its {one.tensor} are zero, get a gradient of exactly zero, and "
        text += f"still do after {STEPS} steps of training"
        if seems_trained(observation):
            doubt = "pruned on purpose they look the same; a freshly made model would tell"
            yield MISSING_GRADIENTS.inconclusive(record, f"{text}: {doubt}")
            continue
        yield MISSING_GRADIENTS.violation(
            record,
            text,
            value=one.effect,
            limit=limit,
            tensor=one.tensor,
            cause="what they give is multiplied by zeros (queries by keys, a value by its gate, "
            "weights by those before them), or an activation after them is dead from the start: "
            "neither begins; initialise one of them at random",
        )


_NAMED = 3
_PARTLY = 0.5
_REMEDY = (
    "take that away, let it pass straight through, as in x + (f(x) - x).detach(), or initialise at "
    "random what is zero on both sides of a product"
)
_NOTHING_TO_LEARN = (
    "the loss is exactly 0 on this batch, as a hinge is that every sample satisfies: give a batch "
    "from which there is something to learn"
)

UNDERFLOW = (
    "the gradient underflows float16, or the loss is flat here: scale the loss (GradScaler), or "
    "use bfloat16"
)
