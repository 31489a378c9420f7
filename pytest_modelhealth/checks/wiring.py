"""How layers are put together: what runs and learns, and is yet not what was meant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from pytest_modelhealth.checks import axes, taken
from pytest_modelhealth.checks.facts import at, linear_maps, listed, members, trainable
from pytest_modelhealth.checks.run import Faults, Grade, Run
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import Call
from pytest_modelhealth.report.flow.graph import Vertex
from pytest_modelhealth.report.flow.inferred import NOTE
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import ancestors, parent
from pytest_modelhealth.statistics import TensorStatistics


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what is wired wrongly, one violation a story."""
    flow = observation.flow
    if flow is None or NOTE in flow.notes or not flow.graph.calls:
        return  # what is inferred of equal numbers shows no wiring
    run = Run(observation, flow)
    exact = (_unread, _odd_blocks, _one_map, *taken.RULES) if flow.is_exact else ()
    rules = (_never_called, _shared, _switches, _one_row, _padding_row, *taken.STATES)
    for rule in (*rules, *axes.RULES, *exact):
        yield from run.findings(rule)


# ---- layers that never run ----------------------------------------------------------------------


def _stand_ins(run: Run) -> Faults:
    """Yield layers called in the place of siblings of their class and shapes that never run.

    In each call of the module around them as many calls are made as there are siblings. Lists
    choose their members: there one layer is asked the same twice, or it is all of a loop.
    """
    stories: dict[str, list[tuple[str, int, list[str]]]] = {}
    groups: dict[tuple[str, object], list[str]] = defaultdict(list)
    records = [record for record in run.layers.values() if not record.functional]
    idle = {parent(record.name) for record in records if record.entered is None}
    for record in records if idle else ():
        if parent(record.name) in idle:
            groups[parent(record.name), run.form(record.name)].append(record.name)
    for (holder, _), names in groups.items():
        if not (never := [name for name in names if not run.ran(name)]):
            continue
        callers: dict[int, list[Call]] = defaultdict(list)
        for call in (one for name in names if name in run.flow for one in run.flow.calls(name)):
            callers[call.parent].append(call)
        counts = {len(calls) for calls in callers.values()}
        if counts != {len(names)} or not run.trainable(never[0]):
            continue
        calls = callers[min(callers)]
        layer, times = Counter(call.layer for call in calls).most_common(1)[0]
        again = [call for call in calls if call.layer == layer]
        kind = run.layers[holder].type_name
        if kind not in having("container") or _is_asked_for_all(run.flow, again, kind):
            stories.setdefault(again[1].line, []).append((layer, times, never))
    for line, ((layer, times, never), *others) in stories.items():
        more = f" ({len(others)} more like it)" if others else ""
        what = f"it is called {times} times{at(line)}, and {listed(map(repr, never))} of the same "
        what += f"class and shape never{more}"
        cause = f"{layer!r} is called in the place of its siblings, which learn nothing: the wrong "
        cause += "index in a loop, or a copied line"
        affected = (name for other, _, names in others for name in (other, *names))
        yield (layer, *never, *affected), what, cause, "fail"


def _is_asked_for_all(flow: Flow, again: list[Call], kind: str) -> bool:
    """Whether calls of one member of a list are all of a loop, or of the same values."""
    after, vertices = flow.after(*again[0].outputs), flow.graph.vertices
    origins = [flow.origins(*call.inputs) for call in again]
    is_row = all(not after.isdisjoint(call.inputs) for call in again[1:])
    # what is chosen by name in each block; experts that are given parts of one tensor
    is_loop = kind != "ModuleDict" if is_row else origins[0] not in origins[1:]
    is_loop &= len(again) > 2 and len({call.line for call in again}) == 1
    given = [vertices[number] for number in again[0].inputs]  # parts without a graph look alike
    is_one = len({call.inputs for call in again}) == 1
    return is_loop or (is_one and all(v.live or v.kind == "input" for v in given))


def _never_called(run: Run) -> Faults:
    """Yield stand-ins, and the outermost modules that never run and whose parameters nothing reads.

    What a dictionary of modules holds is chosen by name; where the flow shows a choice, so is what
    a list holds, and what lies in it.
    """
    stories = [*_stand_ins(run)]
    yield from stories
    passed = {name for layers, *_ in stories if not isinstance(layers, int) for name in layers[1:]}
    is_routed = any(
        v.has("route") or v.function == "item" for v in run.flow.operation_vertices.values()
    )
    is_routed |= run.layers[""].options.get("draws_in_python") is True  # skipped by chance
    told, records = dict[str, int](), run.layers.values()
    has_run = any(record.entered is not None for record in records if record.name)
    for record in records if has_run else ():
        name = record.name
        if record.status != "not_called" or not name or run.ran(name):
            continue
        is_inside = not passed.isdisjoint((name, *ancestors(name)))
        kind, count = run.layers[parent(name)].type_name, run.trainable(name)
        is_chosen = is_routed and (kind in having("container") or any(members(name, run.layers)))
        if count and not is_inside and not is_chosen and kind != "ModuleDict":
            told[name] = count
        passed.add(name)
    if told:
        is_ = "are" if len(told) > 1 else "is"
        what = f"{listed(map(repr, told))} {is_} never called, and nothing reads the "
        cause = "left out of the forward, or for other batches: if so, freeze what is not to learn"
        yield (*told,), f"{what}{sum(told.values()):,} parameters", cause, "warn"


def _switches(run: Run) -> Faults:
    """Yield modules with a backward of their own, or a `requires_grad` their weights do not have.

    A class may have it of its own, to say how it was made: then all of its weights are so.
    """
    own = {run.layer_of(number) for number in run.flow.graph.own_functions}
    for record in run.layers.values():
        if record.name and record.options.get("backward") is True and record.name not in own:
            what = "its class defines backward(), which nobody calls: gradients are of its forward"
            yield (record.name,), what, "it is for a torch.autograd.Function, not a module", "warn"
        if not isinstance(flag := record.options.get("requires_grad"), bool):
            continue
        held = (one for one in run.inside.get(record.name, ()) if one.parameters)
        if any(bool(trainable(one)) is not flag for one in held):
            state = "learn" if flag is False else "are frozen"
            what = f"its requires_grad is {flag}, and its weights {state} all the same"
            cause = f"an attribute of a module does nothing: call requires_grad_({flag})"
            yield (record.name,), what, cause, "warn"


# ---- one module in several places ---------------------------------------------------------------


def _shared(run: Run) -> Faults:
    """Yield what learns and is one object in several places of a list, or of several lists.

    One block that is called again by one name is a design (ALBERT), and so is a part of the same
    name in two modules (tied embeddings), but of a batch normalisation: its statistics mix.
    """
    layers, flow = run.layers, run.flow
    own = {name: record for record in layers.values() for name in (record.name, *record.aliases)}
    held: dict[str, set[str]] = defaultdict(set)
    for name, record in own.items():
        held[own[parent(name)].name].add(record.name)
    for record in layers.values():
        if not record.aliases or record.name not in flow or not run.trainable(record.name):
            continue
        # a place in each object that holds it; a list that is shared itself has each member once
        names = (record.name, *record.aliases)
        places = dict.fromkeys((own[parent(n)].name, n.rpartition(".")[2]) for n in names)
        homes = Counter(home for home, _ in places)
        lists = [home for home in homes if layers[home].type_name in having("container")]
        calls = flow.calls(record.name)
        given = {tuple(flow.first_alike[number] for number in call.inputs) for call in calls}
        is_whole = len(calls) > 1 < len(lists) and held[lists[0]] == held[lists[1]]
        is_counted = "running_mean" in record.buffers and record.options.get("training") is True
        if repeated := [home for home in lists if homes[home] > 1]:
            what = f"it stands {homes[repeated[0]]} times in {repeated[0]!r}: one set of weights"
            cause = "`[layer] * n` repeats one module; make each anew, or tie them knowingly"
        elif len(given) > 1 and is_counted:
            what = (
                f"one batch normalisation stands in {listed(map(repr, homes))}, on different inputs"
            )
            cause = "its running statistics mix those of all of them: give each its own"
        elif is_whole or (len(given) > 1 and len(lists) > 1):
            what = f"it stands in {listed(map(repr, lists))}, which "
            what += "are the same" if len(given) == 1 else "are given different inputs"
            cause = "lists made of the same objects share their weights: make each anew, or tie "
            cause += "them knowingly"
        else:
            continue
        yield (record.name,), what, cause, "warn"


# ---- a block that does otherwise than its siblings ----------------------------------------------

_FEWEST_BLOCKS = 4


def _odd_blocks(run: Run) -> Faults:
    """Yield blocks in the middle of a list that run other operations or layers than all others."""
    layers, flow = run.layers, run.flow
    names = (call.layer for call in flow.graph.calls)
    lists = {parent(name): name for name in names if name.rpartition(".")[2].isdigit()}
    for alike in ([*members(name, layers)][-1][0] for name in lists.values()):
        if len(alike) < _FEWEST_BLOCKS or len({layers[name].type_name for name in alike}) > 1:
            continue
        ran = [flow.calls(name) if name in flow else () for name in alike]
        if {len(calls) for calls in ran} != {1}:
            continue
        sizes = [
            tuple(None if seen is None else seen.shape for seen in (own.inputs, own.activations))
            for own in map(layers.__getitem__, alike)
        ]
        if len({*zip(map(run.form, alike), sizes, strict=True)}) > 1 or any(
            set(one.outputs) <= set(one.inputs) for (one,) in ran
        ):
            continue  # one that returns what it is given is skipped for a step
        made = [  # the layers and operations that each runs, by their own name in it
            Counter(
                v.name.removeprefix(f"{name}.") if v.kind == "call" else v.function
                for v in map(flow.graph.vertices.__getitem__, flow.inside(name))
                if not v.has("view")
            )
            for name in alike
        ]
        usual = next((one for one in made if made.count(one) == len(made) - 1), None)
        place = next((n for n, one in enumerate(made) if one != usual), 0)
        if usual is None or place in (0, len(made) - 1):
            continue
        layer, lacks, more = alike[place], usual - made[place], made[place] - usual
        what = [f"lacks {', '.join(f'`{n}`' for n in sorted(lacks))}"] if lacks else []
        what += [f"runs {', '.join(f'`{n}`' for n in sorted(more))} besides"] if more else []
        cause = "a residual, a norm or a mask left out by a condition or a copied line; or meant so"
        text = f"it {' and '.join(what)}{at(flow.line(layer))}, unlike its siblings"
        yield (layer,), text, f"{cause}: nothing that was seen tells", "warn"


def _one_map(run: Run) -> Faults:
    """Tell of linear maps in a row with nothing between, which are no more than one.

    A narrow one between is a map of lower rank, which one alone is not.
    """
    pairs: dict[str, str] = {}
    learning = (run.layers[name] for name in run.flow.layers if name in run.layers)
    maps = {record.name: linear_maps(record) for record in learning if trainable(record)}
    plain = {
        name: found[0]
        for name, found in maps.items()
        if len(found) == 1 and found[0].tensor == "weight" and len(found[0].weights.shape) == 2
    }
    # what no other of them is called with, in another layout at most, need not be asked for
    taken = [n for name in plain for call in run.flow.calls(name) for n in call.inputs]
    held = run.flow.walk(taken, "whole", back=True)
    for name, one in plain.items():
        if run.flow.values[name] and held.isdisjoint(run.flow.values[name]):
            continue
        as_it_is = run.flow.consumers(name, as_it_is=True)
        behind = plain.get(as_it_is[0]) if len(as_it_is) == 1 else None
        if behind and one.fan_out >= min(one.fan_in, behind.fan_out):
            pairs |= {name: as_it_is[0]} if run.flow.consumers(name) == as_it_is else {}
    if pairs:
        (name, other), *others = pairs.items()
        what = f"{other!r} takes what it gives with nothing between: the two are one linear map"
        what += f" ({len(others)} more like it)" if others else ""
        cause = "an activation left out, or a head on a head, which does no harm"
        yield (name, other, *(one for pair in others for one in pair)), what, cause, "note"


# ---- tables asked for one row -------------------------------------------------------------------


def _one_row(run: Run) -> Faults:
    """Yield the tables that are asked for one row by indices that the model itself made.

    They are constants, where no other table tells positions. Of ids that come of the batch
    `inputs` tells.
    """
    facts = (vertex.facts for vertex in run.flow.operation_vertices.values())
    tells = any(one.get("is_varied") == (True,) and one["along"] == 1 for one in facts)
    alike = list[tuple[LayerRecord, TensorStatistics, Vertex]]()
    for record in run.layers.values():
        rows, given = record.options.get("num_embeddings"), record.inputs
        if record.name not in run.flow or not isinstance(rows, int) or given is None:
            continue
        numbers = run.flow.origins(*(n for c in run.flow.calls(record.name) for n in c.inputs))
        sources = [run.vertices[number] for number in sorted(numbers)]
        if given.finite_count > 0 and {one.kind for one in sources} <= {"constant", "buffer"}:
            tells |= given.min < given.max
            # indices for each sample are kinds of it, a table of fewer rows has kinds of tokens
            if given.shape != (run.samples,) and rows >= (0, *given.shape)[-1] > 1:
                alike += [(record, given, sources[0])] if given.min == given.max else []
    for record, given, source in alike if not tells else ():
        what = f"all {given.count} of its indices are {given.min:.0f}: they come from "
        what += f"`{source.name}`{at(source.line)}, not from the batch"
        cause = "positions that do not count, so that every token gets the same row: "
        grade: Grade = "fail" if source.kind == "constant" else "warn"
        yield (record.name,), what, f"{cause}torch.arange(length) counts", grade


def _padding_row(run: Run) -> Faults:
    """Yield fresh tables whose row of the padding is not zero, and is read."""
    for _, vertex in run.having("padding"):
        record, (row, largest) = run.layers[vertex.name], vertex.facts["padding"]
        is_tied = "weight" in record.tied or f"{record.name}.weight" in run.tied
        if largest > 0.0 and not is_tied and run.is_fresh and "weight" in trainable(record):
            what = f"row {row} of its weights, which is that of the padding and which the batch "
            what += f"reads, is not zero: its largest number is {largest:.3g}"
            cause = "an initialiser wrote over the zeros, and as padding_idx keeps gradients from "
            cause += "it, it stays: zero the row afterwards"
            yield (record.name,), what, cause, "warn"


# ---- inputs that nothing reads ------------------------------------------------------------------

_PURE = having("view", "integer", "comparison", "sum", "product", "quotient", "turns_sign")
"""Operations that change nothing but what they return."""


def _unread(run: Run) -> Faults:
    """Yield inputs that nothing reads; what lies inside an object may be for others."""
    vertices, flow, graph = run.vertices, run.flow, run.flow.graph
    given = [number for number, vertex in enumerate(vertices) if vertex.kind == "input"]
    unread = [n for n in given if not vertices[n].name.endswith("]") and _is_ignored(flow, n)]
    if not unread or not graph.outputs:
        return
    is_, it = ("are", "them") if len(unread) > 1 else ("is", "it")
    what = f"{listed(repr(vertices[n].name) for n in unread)} {is_} given and nothing reads {it}"
    cause = "an argument that is not passed on, or that this model has no use for: leave it out"
    grade: Grade = "warn"
    first = dict[object, str]()
    for call in graph.calls:
        inside = run.inside.get(call.layer, [])
        if not {*call.inputs[:1]} & {*given} or not any(one.parameters for one in inside):
            continue
        form = run.form(call.layer) if len(inside) > 1 else call.layer
        other = first.setdefault((call.parent, form, call.inputs), call.layer)
        if call is not flow.calls(other)[0]:
            again = "again" if other == call.layer else f"as {other!r} is"
            given_to = vertices[call.inputs[0]].name
            what = f"it is given {given_to!r}{at(call.line)}, {again}, and {what}"
            cause = "two towers are fed the same: a copied line with the wrong argument"
            yield (call.layer,), what, cause, "fail"
            return
    if unread == given:
        what += ": the output is the same whatever the batch"
        cause = "the model computes from its own tensors alone"
        # a generator draws what others are given
        is_drawn = any(vertices[n].has("draw") for n in flow.walk(graph.outputs, back=True))
        grade = "warn" if is_drawn else "fail"
    yield ("",), what, cause, grade


def _is_ignored(flow: Flow, number: int) -> bool:
    """Whether nothing comes of a vertex but other forms of it, which nothing takes."""
    after, graph = flow.after(number), flow.graph
    made = [graph.vertices[n] for n in after - {number}]
    return after.isdisjoint({*graph.outputs, graph.loss}) and all(
        v.kind == "operation" and v.function in _PURE and after.issuperset(v.operands) for v in made
    )
