"""One observation of the stages of a pipeline, as one process would see the model that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pytest_modelhealth.report.flow import Call, Flow, Graph, Kind, Vertex
from pytest_modelhealth.report.observation import FULLNESS, UNCALLED, LayerRecord, Observation

ON_ITS_WAY = "to"
"""What brings values from one stage to the next: a copy that changes none."""


class StageNames:
    """Names of layers in the whole model.

    A layer keeps its name where one stage alone has it. What several stages have is put into its
    stage, ``stage1.fc``, and all that is beside it in the same child of the model, too. A container
    that goes on in a later stage, as the model itself does, is one layer.

    Args:
        stages: the names of the layers of each stage.
    """

    def __init__(self, stages: Mapping[int, Iterable[str]]) -> None:
        holders: dict[str, set[int]] = {}
        containers = {""}
        for stage, names in stages.items():
            for name in names:
                holders.setdefault(name, set()).add(stage)
                containers.add(name.rpartition(".")[0])
        self._clashing = {
            _child(name)
            for name, having in holders.items()
            if len(having) > 1 and name not in containers
        }

    def whole(self, stage: int, name: str) -> str:
        """Return the name in the model of what is called `name` in a stage."""
        return f"stage{stage}.{name}" if name and _child(name) in self._clashing else name


def joined_stages(stages: Mapping[int, Observation], model_type: str) -> Observation:
    """Return what was seen of all stages as one model, in their order.

    What goes into a container that spans stages is what the first of them was given, what comes out
    what the last returned. Moments of a later stage come after all of an earlier one.

    Args:
        stages: what was seen of each, by its number.
        model_type: what the model is called.
    """
    order = sorted(stages)
    stages = {stage: _opened(stage, stages[stage]) for stage in order}
    seen = [stages[stage] for stage in order]
    names = StageNames({stage: stages[stage].layers for stage in order})
    layers: dict[str, LayerRecord] = {}
    begin = 0
    for stage in order:
        for record in stages[stage].layers.values():
            moved = _moved(record, begin, _naming(names, stage))
            before = layers.get(moved.name)
            layers[moved.name] = moved if before is None else _continued(before, moved, stage)
        begin = 1 + max((record.completed or 0 for record in layers.values()), default=0)
    first, last = seen[0], seen[-1]
    layers[""] = replace(layers[""], type_name=model_type)
    whole = replace(
        first,
        layers={record.name: record for record in sorted(layers.values(), key=_when)},
        model_type=model_type,
        loss=last.loss,
        backward=any(one.backward for one in seen),
        no_gradients=first.no_gradients if all(one.no_gradients for one in seen) else "",
        samples=max(one.samples for one in seen),
        notes=_once(note for one in seen for note in one.notes),
        errors=_once(error for one in seen for error in one.errors),
        loss_calls=tuple(
            replace(call, layer=call.layer and names.whole(stage, call.layer))
            for stage in order
            for call in stages[stage].loss_calls
        ),
        loss_path=last.loss_path,
        unregistered=tuple(
            replace(one, layer=names.whole(stage, one.layer))
            for stage in order
            for one in stages[stage].unregistered
        ),
        own_functions=any(one.own_functions for one in seen),
        sample_deviation=last.sample_deviation,
    )
    return replace(whole, flow=_joined_flow(stages, names, whole))


def stages_of(seen: Observation, numbers: Iterable[int]) -> dict[int, Observation]:
    """Return what was seen of each stage, of a module that holds them as ``stage0``, ``stage2``."""
    found = {}
    for stage in numbers:
        holder, inner = _holder(stage), _inner_naming(stage)
        records = [r for r in seen.layers.values() if f"{r.name}.".startswith(f"{holder}.")]
        layers = {(made := _renamed(record, inner)).name: made for record in records}
        found[stage] = replace(
            seen, layers=layers, model_type=layers[""].type_name if "" in layers else ""
        )
    return found


def flow_of_stage(flow: Flow, stage: int) -> Flow:
    """Return the flow of a stage, whose layers were called as those of a module that holds it.

    Parameters and buffers have the names that they have in the stage already.
    """
    inner = _inner_naming(stage)

    def graph() -> Graph:
        held = flow.graph
        calls = tuple(replace(call, layer=inner(call.layer)) for call in held.calls)
        vertices = tuple(
            replace(vertex, name=inner(vertex.name)) if vertex.kind is Kind.CALL else vertex
            for vertex in held.vertices
        )
        return replace(held, vertices=vertices, calls=calls)

    return Flow(graph)


def _holder(stage: int) -> str:
    return f"stage{stage}"


def _inner_naming(stage: int) -> Callable[[str], str]:
    holder = _holder(stage)
    return lambda name: name.removeprefix(holder).removeprefix(".")


def _opened(stage: int, seen: Observation) -> Observation:
    """Return a stage that is one layer as a model that holds this layer alone, as ``stage0``."""
    if set(seen.layers) != {""}:
        return seen
    only = seen.layers[""]
    bare = LayerRecord("", only.type_name, only.status, only.reason, watched=only.watched)
    for field in _OF_A_CONTAINER:
        bare = replace(bare, **{field: getattr(only, field)})
    begin, end = only.entered or 0, only.completed or 0
    if only.calls:
        bare = replace(bare, entered=begin, completed=end + 2)
        only = replace(only, entered=begin + 1, completed=end + 1)

    def named(name: str) -> str:
        return name or f"stage{stage}"

    layers = {"": bare, named(""): _renamed(only, named)}
    flow = None if seen.flow is None else Flow(lambda: _opened_graph(graph, named))
    graph = Graph() if seen.flow is None else seen.flow.graph
    calls = tuple(
        replace(call, layer=named("") if call.layer == "" else call.layer)
        for call in seen.loss_calls
    )
    return replace(seen, layers=layers, flow=flow, loss_calls=calls)


_OF_A_CONTAINER = (
    *("calls", "inputs", "activations", "gradients", "nonfinite_calls", "equal_samples"),
    *("equal_input_samples", "largest", "nonfinite", "grad_off", "source", "definitions"),
)


def _opened_graph(graph: Graph, named: Callable[[str], str]) -> Graph:
    calls = [
        replace(call, layer=named(call.layer), parent=call.parent + 1, last=call.last + 1)
        for call in graph.calls
    ]
    outer = [replace(call, parent=-1, last=len(calls)) for call in graph.calls[:1]]
    vertices = [
        replace(
            vertex,
            name=_source_name(vertex, named),
            call=vertex.call if vertex.call < 0 else vertex.call + 1,
        )
        for vertex in graph.vertices
    ]
    return replace(graph, vertices=tuple(vertices), calls=(*outer, *calls))


def _child(name: str) -> str:
    return name.partition(".")[0]


def _once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _when(record: LayerRecord) -> tuple[bool, int]:
    return record.status in UNCALLED, record.entered or 0


def _naming(names: StageNames, stage: int) -> Callable[[str], str]:
    return lambda name: names.whole(stage, name)


def _moved(record: LayerRecord, begin: int, rename: Callable[[str], str]) -> LayerRecord:
    return replace(
        _renamed(record, rename),
        entered=None if record.entered is None else record.entered + begin,
        completed=None if record.completed is None else record.completed + begin,
    )


def _renamed(record: LayerRecord, rename: Callable[[str], str]) -> LayerRecord:
    return replace(
        record,
        name=rename(record.name),
        aliases=tuple(map(rename, record.aliases)),
        tied={own: _renamed_tensor(full, rename) for own, full in record.tied.items()},
    )


def _renamed_tensor(full: str, rename: Callable[[str], str]) -> str:
    layer, _, own = full.rpartition(".")
    return f"{rename(layer)}.{own}".lstrip(".")


def _continued(first: LayerRecord, later: LayerRecord, stage: int) -> LayerRecord:
    """Return one record of a container that began in an earlier stage and goes on in this one."""
    later = _apart(first, later, stage)
    fuller = first if FULLNESS.index(first.status) <= FULLNESS.index(later.status) else later
    given = first if first.calls else later
    made = later if later.calls else first
    return replace(
        fuller,
        name=first.name,
        type_name=first.type_name,
        aliases=(*first.aliases, *later.aliases),
        entered=given.entered,
        completed=made.completed,
        calls=max(first.calls, later.calls),
        inputs=given.inputs,
        activations=made.activations,
        gradients=made.gradients,
        parameters={**first.parameters, **later.parameters},
        parameter_gradients={**first.parameter_gradients, **later.parameter_gradients},
        buffers={**first.buffers, **later.buffers},
        zero_slices={**first.zero_slices, **later.zero_slices},
        tied={**first.tied, **later.tied},
        frozen=first.frozen | later.frozen,
        unreached=first.unreached | later.unreached,
        read_in_vain=first.read_in_vain | later.read_in_vain,
        grad_off=first.grad_off or later.grad_off,
        nonfinite_calls=_ends(given.nonfinite_calls, made.nonfinite_calls),
        equal_samples=made.equal_samples,
        equal_input_samples=given.equal_input_samples,
        largest=_ends(given.largest, made.largest),
        nonfinite=_ends(given.nonfinite, made.nonfinite),
        placements=_ends(given.placements, made.placements),
        assembled=_ends(given.assembled, made.assembled),
        source=first.source or later.source,
    )


def _apart(first: LayerRecord, later: LayerRecord, stage: int) -> LayerRecord:
    """Return the later record with the stage in names of tensors that the first has, too."""
    known = {*first.parameters, *first.buffers, *first.frozen}

    def named(own: str) -> str:
        return f"stage{stage}.{own}" if own in known else own

    if known.isdisjoint({*later.parameters, *later.buffers, *later.frozen}):
        return later
    mapped = ("parameters", "parameter_gradients", "buffers", "zero_slices", "tied")
    sets = ("frozen", "unreached", "read_in_vain")
    changes: dict[str, Any] = {
        field: {named(own): held for own, held in getattr(later, field).items()} for field in mapped
    }
    changes |= {field: frozenset(map(named, getattr(later, field))) for field in sets}
    return replace(later, **changes)


def _ends(given: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of inputs by the first stage, and of all else by the last."""
    of_inputs = {role: found for role, found in given.items() if role == "inputs"}
    rest = {role: found for role, found in made.items() if role != "inputs"}
    own = {role: found for role, found in given.items() if _is_own(role)}
    return {**own, **of_inputs, **rest}


def _is_own(role: str) -> bool:
    return role.partition(".")[0] in ("parameters", "parameter_gradients", "buffers")


def _joined_flow(
    stages: Mapping[int, Observation], names: StageNames, whole: Observation
) -> Flow | None:
    """Return the flow of the first microbatch through all stages; ``None`` where one has none."""
    graphs = {n: one.flow.graph for n, one in stages.items() if one.flow is not None}
    if len(graphs) < len(stages) or not all(_is_of_one_call(graph) for graph in graphs.values()):
        return None
    joining = _Joining(names, whole)
    for stage in sorted(graphs):
        joining.add(stage, graphs[stage])
    return Flow(joining.graph)


def _is_of_one_call(graph: Graph) -> bool:
    return [call.layer for call in graph.calls if call.parent < 0] == [""]


class _Joining:
    """Puts the graph of each stage behind that of the one before.

    The call of a stage is no call of its own: its layers are called by the model.
    """

    def __init__(self, names: StageNames, whole: Observation) -> None:
        self._names, self._whole = names, whole
        self._vertices: list[Vertex] = []
        self._calls = [Call("", whole.model_type, -1, 0)]
        self._inputs: tuple[int, ...] = ()
        self._outputs: tuple[int, ...] = ()
        self._notes: dict[str, None] = {}
        self._own_functions: list[int] = []
        self._stage = -2

    def add(self, stage: int, graph: Graph) -> None:
        """Add the stage that follows; it takes what the one right before it returned."""
        base, calls = len(self._vertices), len(self._calls) - 1
        received = self._outputs if stage == self._stage + 1 else ()
        rename = _naming(self._names, stage)

        def called(number: int) -> int:
            return number + calls if number > 0 else number

        def at(vertices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(vertex + base for vertex in vertices)

        for vertex in graph.vertices:
            self._vertices.append(
                _received(vertex, received, self._vertices)
                or replace(
                    vertex,
                    name=_source_name(vertex, rename),
                    operands=at(vertex.operands),
                    call=called(vertex.call),
                )
            )
        for call in graph.calls[1:]:
            self._calls.append(
                replace(
                    call,
                    layer=rename(call.layer),
                    parent=called(call.parent),
                    last=called(call.last),
                    inputs=at(call.inputs),
                    outputs=at(call.outputs),
                )
            )
        self._inputs = self._inputs or at(graph.calls[0].inputs)
        self._outputs = at(graph.outputs)
        self._own_functions += at(graph.own_functions)
        self._notes |= dict.fromkeys(graph.notes)
        self._stage = stage

    def graph(self) -> Graph:
        """Return the graph of all."""
        loss = None
        vertices = list(self._vertices)
        if self._whole.loss is not None:
            loss = len(vertices)
            vertices.append(Vertex(Kind.OPERATION, "loss", self._outputs, live=True))
        calls = list(self._calls)
        calls[0] = replace(
            calls[0], last=len(calls) - 1, inputs=self._inputs, outputs=self._outputs
        )
        own = tuple(self._own_functions)
        return Graph(tuple(vertices), tuple(calls), self._outputs, loss, tuple(self._notes), own)


def _received(vertex: Vertex, outputs: tuple[int, ...], vertices: list[Vertex]) -> Vertex | None:
    """Return what stands for an input of a stage that the one before it sent."""
    number = vertex.name.removeprefix("input ")
    if vertex.kind is not Kind.INPUT or not number.isdigit() or int(number) >= len(outputs):
        return None
    sent = outputs[int(number)]
    return Vertex(Kind.OPERATION, ON_ITS_WAY, (sent,), call=0, live=vertices[sent].live)


def _source_name(vertex: Vertex, rename: Callable[[str], str]) -> str:
    if vertex.kind is Kind.CALL:
        return rename(vertex.name)
    if vertex.kind in (Kind.PARAMETER, Kind.BUFFER):
        return _renamed_tensor(vertex.name, rename)
    return vertex.name
