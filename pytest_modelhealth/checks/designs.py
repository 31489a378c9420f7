"""Designs in which a part of a model gets no gradient, and is not meant to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.dead_units import DYING_ACTIVATIONS
from pytest_modelhealth.checks.facts import (
    IN_PROJECTION,
    called,
    completed,
    flow_of,
    is_in_an_empty_part,
    learns,
    seems_trained,
    trainable,
)
from pytest_modelhealth.report import Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import AS_IT_IS
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import is_inside, parent

MISSING_GRADIENTS = CHECKS["missing_gradients"]


class Design(NamedTuple):
    """A design that looks the same as a cut.

    Args:
        settles: what a user would change to say that it is meant.
        cause: what it may be, and what to change where it is not.
    """

    settles: str
    cause: str


def is_meant(
    record: LayerRecord,
    name: str,
    lost: Sequence[LayerRecord],
    is_used: bool,
    observation: Observation,
    flow: Flow,
) -> bool:
    """Whether a design explains that no gradient comes to a layer, or to a parameter of it."""
    if is_in_an_empty_part(record, observation):
        return True
    if is_used or name not in flow:
        return _is_slow_copy(lost, observation, flow)
    if not _holders(name, flow):
        return _ends_a_stack(name, flow)
    return dropped(name, observation, flow) is None


def _holders(name: str, flow: Flow) -> list[str]:
    """Return the modules around it that returned its values beside others that are used."""
    used = flow.used
    return [layer for layer in flow.reach(name) if is_inside(name, layer) and layer in used]


def dropped(name: str, observation: Observation, flow: Flow) -> Design | None:
    """Return why what a module returned should not be dropped, though it returned more than that.

    One of several values may be left out, and the last of a loop. What was inferred may be used.
    """
    for holder in sorted(_holders(name, flow)) if flow.is_exact else ():
        twins = [
            twin for s in _of_one_line(holder, flow) if (twin := s + name[len(holder) :]) in flow
        ]
        read = [twin for twin in twins if twin in flow.used]
        later = [twin for twin in read if _began(twin, observation) > _began(name, observation)]
        if later:
            return Design(
                f"what it returns is not used, and that of {later[-1]!r} after it is",
                "overwritten in a loop, or only the last of several is read: join them all, or "
                "leave it out before the last",
            )
        if twins and not read:
            return Design(
                f"what it returns is not used, in none of {len(twins) + 1} modules that one line "
                "calls",
                "ignored, overwritten, or what is made of it is dropped: use it, or leave it out",
            )
        if not twins and _is_mostly_idle(holder, observation, flow):
            return Design(
                f"most of what {holder!r} computes is not used",
                "an early one of several values is read, and what comes after it runs in vain: "
                "read a later one, or leave out or freeze what is not to learn",
            )
    return None


def _of_one_line(layer: str, flow: Flow) -> list[str]:
    """Return the siblings that the same line of code calls."""
    return [other for other in flow.siblings(layer) if flow.line(other) == flow.line(layer)]


def _began(layer: str, observation: Observation) -> int:
    """Return when a layer was first called; what is a parameter, never."""
    record = observation.layers.get(layer)
    return -1 if record is None or record.entered is None else record.entered


def _is_mostly_idle(holder: str, observation: Observation, flow: Flow) -> bool:
    """Whether most of what could learn in a module gets no gradient, and no block of a stack does.

    A summary of its states may be larger than they are, and is no stack.
    """
    inside = [r for r in called(observation) if is_inside(r.name, holder)]
    idle = sum(_size(record) for record in inside if not record.parameter_gradients)
    if 2 * idle <= sum(map(_size, inside)):
        return False
    blocks = {r.name for r in inside if r.name in flow}.difference(flow.layers)
    stacks = ((block, *_of_one_line(block, flow)) for block in blocks)
    return any(len(stack) > 1 and flow.used.isdisjoint(stack) for stack in stacks)


def _size(record: LayerRecord) -> int:
    """Return how many trainable numbers a layer has of its own."""
    return sum(s.count for s in trainable(record).values())


def _ends_a_stack(layer: str, flow: Flow) -> bool:
    """Whether it is the last that a line of code calls, of several that lead on but for it.

    The last residual of a stack whose output is the sum of skips (WaveNet) leads nowhere, beside
    the last skip, which takes the same and comes as often; one line may call both.
    """
    called_at: dict[tuple[str, ...], dict[str, None]] = defaultdict(dict)
    for call in flow.graph.calls:
        place = [part for part in call.layer.split(".") if not part.isdigit()]
        for key in ((call.line,), (call.line, *place)) if call.line else ():
            called_at[key].setdefault(call.layer)
    places = [list(layers) for layers in called_at.values()]
    used = flow.used
    beside = {taker for maker in flow.producers(layer) for taker in flow.consumers(maker)} & used
    return any(
        other[-1] in beside and len(other) == len(alike) and layer not in other
        for alike in places
        if alike[-1] == layer and len(alike) > 1 and used.issuperset(alike[:-1])
        for other in places
    )


def _is_slow_copy(lost: Sequence[LayerRecord], observation: Observation, flow: Flow) -> bool:
    """Whether a layer with the very same parameters learns beside it: this one makes targets.

    Norms that start at ones are all the same, so that layers of varied values are asked. Blocks of
    a stack that start equal feed one another.
    """
    off = [record for record in lost if record.grad_off]
    varied = [r for r in off if any(s.min != s.max for s in trainable(r).values())]
    record = max(varied or off, key=completed, default=None)
    return record is not None and any(
        learns(other)
        and _are_copies(record, other)
        and other.name not in flow.feeding(record.name)
        and record.name not in flow.feeding(other.name)
        for other in called(observation)
    )


def _are_copies(record: LayerRecord, other: LayerRecord) -> bool:
    """Whether another layer of the same kind has the very same trainable parameters."""
    if other is record or other.type_name != record.type_name:
        return False
    pairs = [(s, other.parameters.get(name)) for name, s in trainable(record).items()]
    return other.parameters.keys() == record.parameters.keys() and all(
        b is not None and (a.shape, a.min, a.max, a.mean) == (b.shape, b.min, b.max, b.mean)
        for a, b in pairs
    )


def design(record: LayerRecord, observation: Observation, flow: Flow) -> Design | None:
    """Return the design that a whole part of the model without gradients may be, if there is one.

    A part that only takes what the model was given, while other parts learn, may learn elsewhere,
    or was trained before.
    """
    layers, ran = observation.layers, called(observation)
    learning = [r.name for r in layers.values() if learns(r)]
    if not record.name or record.parameter_gradients or record.read_in_vain or not learning:
        return None
    part, name = record, record.name  # the outermost around it in which nothing learns
    while (name := parent(name)) and not any(is_inside(n, name) or n == name for n in learning):
        part = layers.get(name, part)
    inside = [r for r in ran if r is part or is_inside(r.name, part.name)]
    before = [layers[n] for n in flow.feeding(*(r.name for r in inside)) if n in layers]
    if not inside or any(trainable(r) and not r.grad_off for r in before):
        return None  # values come to it from what learns
    own = [r for r in inside if trainable(r)]
    if all(r.grad_off for r in own):
        frozen = [other for other in ran if not trainable(other)]
        if any(_are_copies(r, other) for r in own for other in frozen):
            return None  # that is the slow one
        return Design(
            f"freeze {part.label!r} by requires_grad_(False) if it is not to learn",
            f"{part.label!r} runs under torch.no_grad(), as a teacher, a feature extractor or a "
            "slow copy does; if it should learn, take no_grad away",
        )
    if not _is_a_network_of_several(part, observation, learning):
        return None
    return Design(
        f"freeze {part.label!r} by requires_grad_(False), or pass only what learns, if it is not "
        "to learn here",
        f"all of {part.label!r} is cut off from the networks beside it, as a discriminator's step "
        "detaches the generator; if it should learn, take the detach away",
    )


def _is_a_network_of_several(
    part: LayerRecord, observation: Observation, learning: list[str]
) -> bool:
    """Whether a part is one of several networks that a module runs, and all that learns is another.

    A network holds layers. It returned what has a graph, so that whoever called it cut it off. A
    trunk with a head, and the blocks of a list or of a `Sequential`, are one network.
    """
    above = parent(part.name)
    around = observation.layers.get(above)
    if around is None or around.entered is None or around.type_name == "Sequential":
        return False
    holds_layers = any(is_inside(name, part.name) for name in observation.layers)
    if not holds_layers or part.status != "unused_in_loss":
        return False
    return all(is_inside(name, above) and parent(name) != above for name in learning)


_MATRIX = 2


def waiting_factors(observation: Observation) -> Iterator[Finding]:
    """Yield layers of zeros that are given zeros, by rows of zeros that nothing else takes.

    Of ``up(down(x))`` the gradient of each is a product with the other. A gradient does come to
    what the second gives, so that no closed gate behind both explains it; and what the first gives
    is taken by this layer alone, so that none comes by another way. Where all of the first is zero,
    what it gives is the same for all samples, and other checks tell. A trained model may have been
    pruned.
    """
    for record in () if seems_trained(observation) else called(observation):
        weight, gradient = record.parameters.get("weight"), record.parameter_gradients.get("weight")
        given, arrived = record.inputs, record.gradients
        if weight is None or gradient is None or given is None or arrived is None:
            continue
        if "weight" in record.frozen or len(weight.shape) < _MATRIX or not given.count:
            continue
        is_zero = weight.abs_max == gradient.abs_max == given.abs_max == 0.0
        maker = _maker(record, observation) if is_zero and arrived.abs_max > 0.0 else None
        made = None if maker is None else maker.parameters.get("weight")
        if maker is None or made is None or len(made.shape) < _MATRIX or "weight" in maker.frozen:
            continue
        zeros, taken = round(made.zero_fraction * made.count), weight.shape[1]
        if taken * (made.count // made.shape[0]) <= zeros < made.count:
            yield MISSING_GRADIENTS.fault(
                record,
                "its weight is zero, is given zeros alone, and gets a gradient of exactly zero",
                tensor="weight",
                cause=f"the rows of {maker.label!r} that it takes are zero, too: each gets its "
                "gradient through the other, so that both stay zero; initialise one at random",
                affected=(maker.name,),
            )


def _maker(record: LayerRecord, observation: Observation) -> LayerRecord | None:
    """Return the layer of which this one takes a part that no other layer or operation takes."""
    flow = flow_of(observation)
    calls = flow.calls(record.name) if flow.is_exact and record.name in flow else ()
    if len(calls) != 1 or len(calls[0].inputs) != 1:
        return None
    vertices = flow.graph.vertices
    (number,) = calls[0].inputs
    taken = sum(vertex.operands.count(number) for vertex in vertices)
    if taken + flow.graph.outputs.count(number) != 1:
        return None
    while (vertex := vertices[number]).kind == "operation":
        if vertex.function not in AS_IT_IS or len(vertex.operands) != 1:
            return None
        (number,) = vertex.operands
    return observation.layers.get(vertex.name) if vertex.kind == "call" else None


FEWEST_ROWS = 4
_PROJECTIONS = ("queries", "keys", "values")
LOOK_UPS = frozenset({"embedding", "embedding_bag", "index", "index_select", "getitem", "gather"})
"""Operations that take some rows of a table, so that the others get no gradient."""


def idle_rows(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the matrices of which a part is zero and gets no gradient, while the rest learns.

    What was pruned on purpose looks the same: only a fresh model is judged. Rows that are looked up
    have no gradient where they are not asked for. Data that are zero in this batch (words that are
    not in it) leave no gradient, and wait for nothing.
    """
    flow = flow_of(observation)
    for record in called(observation):
        calls = flow.calls(record.name) if record.zero_slices and record.name in flow else ()
        given = [flow.graph.vertices[number] for call in calls for number in call.inputs]
        for name, slices in record.zero_slices.items():
            full = f"{record.name}.{name}".removeprefix(".")
            takers = flow.consumers(full) if full in flow else ()
            taken = {one.function for one in flow.operations(full, *takers)} if takers else set()
            if name in record.frozen or not taken.isdisjoint(LOOK_UPS):
                continue
            sizes = record.parameters[name].shape
            columns = slices.columns if not given or any(v.live for v in given) else ()
            kinds = (("rows", slices.rows, sizes[0]), ("columns", columns, sizes[1]))
            what, idle, size = max(kinds, key=lambda kind: len(kind[1]) / kind[2])
            limit = settings.limit("max_idle_rows", record.name)
            if len(idle) < FEWEST_ROWS or len(idle) <= limit.value * size:
                continue
            text = (
                f"{len(idle)} of the {size} {what} of its {name} are zero and get a gradient of "
                f"exactly zero{_which(name, what, idle, size)}"
            )
            if seems_trained(observation):
                doubt = "pruned on purpose they look the same; a freshly made model would tell"
                yield MISSING_GRADIENTS.inconclusive(record, f"{text}: {doubt}")
                continue
            cause, part = _cause(record, what, observation), len(idle) / size
            yield MISSING_GRADIENTS.violation(
                record, text, value=part, limit=limit, tensor=name, cause=cause
            )


def _which(name: str, what: str, idle: Collection[int], size: int) -> str:
    """Return which they are, in brackets, where that can be said in a few words."""
    if name == IN_PROJECTION and what == "rows":
        third = size // len(_PROJECTIONS)
        parts = {place // third for place in idle}
        if len(parts) * third == len(idle):
            return f" (those of {' and '.join(_PROJECTIONS[part] for part in sorted(parts))})"
    is_one_range = max(idle) - min(idle) + 1 == len(idle)
    return f" ({min(idle)} to {max(idle)})" if is_one_range else ""


def _cause(record: LayerRecord, what: str, observation: Observation) -> str:
    flow = flow_of(observation)
    if what == "columns":
        return (
            "the weights from these units are zero, and so is what the units give: neither can "
            "begin; initialise one of the two at random"
        )
    takers = [observation.layers.get(n) for n in flow.consumers(record.name, as_it_is=True)]
    dying = [r for r in takers if r is not None and r.activation in DYING_ACTIVATIONS]
    if dying:
        return (
            f"filters that start at zero give {dying[0].label!r} nothing above zero, which passes "
            "no gradient back: they are dead from the start; initialise them at random"
        )
    return (
        "what these rows give is multiplied by something of the same matrix or another that is "
        "zero too (queries by keys, a value by its gate), so that neither gets a gradient and both "
        "stay zero: initialise one of them at random"
    )
