"""Trainable parameters that the loss does not reach, or that no optimizer is told of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    at,
    called,
    completed,
    flow_of,
    is_in_an_empty_part,
    learns,
    members,
    place,
    trainable,
)
from pytest_modelhealth.checks.loss_terms import is_switched_off
from pytest_modelhealth.checks.recurrences import recurrent_gradients
from pytest_modelhealth.checks.zero_gradients import idle_rows, zero_gradients
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Cut, Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import UNSEEN, Recurrence, near
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import ancestors, dotted, is_inside, parent

MISSING_GRADIENTS = CHECKS["missing_gradients"]
UNREGISTERED_PARAMETERS = CHECKS["unregistered_parameters"]


_FEWEST = 2


def detached_states(observation: Observation) -> Iterator[Finding]:
    """Yield the layers whose own state comes to them detached each time.

    Where each call takes one step of a sequence, gradients go back a single step. Pieces of several
    steps are truncated backpropagation. Where each call takes the same again, as in the search for
    a fixed point, the gradient of the last alone may be meant.
    """
    layers = observation.layers
    learning = [record for record in layers.values() if learns(record)]
    if not any(record.calls > _FEWEST for record in learning):
        return
    by_line: dict[str, tuple[Recurrence, list[str]]] = {}
    for found in flow_of(observation).cut_recurrences():
        name, is_detached = found.layer, {cut.operation for cut in found.cuts} <= having("detach")
        if is_detached and any(r.name == name or is_inside(r.name, name) for r in learning):
            by_line.setdefault(found.cuts[0].line, (found, []))[1].append(name)
    for found, names in by_line.values():
        record, given = layers[found.layer], layers[found.layer].inputs
        extents = sum(size > 1 for size in given.shape[1:]) if given else 0  # of a sample
        if found.takes_more and extents > 1:
            continue  # several steps at once
        yield MISSING_GRADIENTS.fault(
            record,
            f"its state is detached before each of its {found.calls} calls, so that no gradient "
            f"goes back further than one: {near(str(found.cuts[0]))}",
            value=float(found.calls),
            cause="the state is cut off at every step, and nothing learns over several: detach it "
            "before the first step only, or every so many (truncated backpropagation)",
            affected=names[1:],
            independent=True,
            severity="fail" if found.takes_more and extents == 1 else "warn",
        )


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield where the graph is cut, or where the gradient becomes exactly zero."""
    if not observation.backward:
        return
    stories = list(_stories(observation))
    root = observation.layers.get("")
    has_loss = observation.loss_path is not None or bool(observation.loss_calls)
    in_evaluation = root is not None and root.options.get("training") is False
    if stories and in_evaluation and not has_loss:  # detectors detach their proposals
        yield MISSING_GRADIENTS.inconclusive(
            stories[0].culprit.record,
            (
                "no gradient reaches its trainable parameters, but a model in evaluation mode "
                "may have its loss in training mode only: inspect it there, or with a loss"
            ),
        )
        return
    for story in stories:
        yield _violation(story, observation)
    yield from detached_states(observation)
    if math.isfinite(observation.loss or 0.0) and not is_switched_off(observation):
        yield from zero_gradients(observation)
        if observation.loss != 0.0:
            yield from recurrent_gradients(observation)
            yield from idle_rows(observation, settings)


class _Lost(NamedTuple):
    """A layer or parameter that gets no gradient, and should.

    Args:
        record: the layer, or that of the parameter.
        name: what the flow calls it.
        is_used: whether its values get to an end of the run.
    """

    record: LayerRecord
    name: str
    is_used: bool


class _Story(NamedTuple):
    """What is lost by one fault: the last of it, what cuts behind that, and all of it."""

    culprit: _Lost
    cut: Cut | None
    lost: list[_Lost]


def _stories(observation: Observation) -> Iterator[_Story]:
    """Yield what is lost, by where it ends, in the order of completion."""
    lost = {one.name: one for one in _lost(observation)}
    if not lost:
        return
    flow = flow_of(observation)
    stories = {name: _Story(one, None, [one]) for name, one in lost.items() if name not in flow}
    for name, ending in flow.endings(lost).items():
        story = stories.setdefault(ending.last, _Story(lost[ending.last], ending.cut, []))
        story.lost.append(lost[name])
    by_code: dict[object, _Story] = {}
    codes: dict[Cut, object] = {}
    last_first = sorted(stories.values(), key=lambda one: -completed(one.culprit.record))
    for story in last_first:
        record, name, is_used = story.culprit
        if is_in_an_empty_part(record, observation):
            continue
        if not is_used and name in flow and _ends_a_list(name, observation, flow):
            continue
        code: object = name
        own_name = record.name.rpartition(".")[2]
        if story.cut is not None:  # in every block it is one, and so is a line that drops two
            is_numbered = own_name.isdigit() or not story.cut.line
            code = (story.cut.operation, story.cut.line, "" if is_numbered else own_name)
            code = codes.setdefault(story.cut, code)
        elif name in flow and (record.grad_off or not is_used):
            code = (flow.line(name) or name, "" if own_name.isdigit() else own_name)
        by_code.setdefault(code, story).lost.extend(story.lost)
    yield from reversed(by_code.values())


def _lost(observation: Observation) -> Iterator[_Lost]:
    lacking = {r.name: missing for r in observation.layers.values() if (missing := _lacking(r))}
    if not lacking:
        return
    flow = flow_of(observation)
    used, graph = flow.used, flow.graph
    is_sure = flow.is_exact and graph.loss is not None and graph.vertices[graph.loss].live
    to_loss = flow.feeding("loss") if is_sure else frozenset()
    for layer, missing in lacking.items():
        record = observation.layers[layer]
        unreached = record.unreached.issuperset(missing) or record.status == "no_grad_path"
        for name in _names(record, missing, flow):
            if name in to_loss or unreached:
                yield _Lost(record, name, name in used)


def _lacking(record: LayerRecord) -> list[str]:
    """Return the trainable parameters that got no gradient."""
    if "parameter_gradients" not in record.watched:
        return []
    return [name for name in trainable(record) if name not in record.parameter_gradients]


def _names(record: LayerRecord, lacking: list[str], flow: Flow) -> list[str]:
    """Return what the flow calls what lacks gradients: the layer, or parameters that were read.

    A layer may lack it for some alone, by a loss of the output's slopes. A container may hold
    some for other occasions (the token that stands for a masked patch), or read them under
    ``no_grad``.
    """
    is_leaf = record.name in flow.layers
    if is_leaf and record.gradients is None:
        return [record.name] if len(lacking) == len(trainable(record)) else []
    off = record.unreached - record.read_in_vain
    names = {name: dotted(record.name, name) for name in lacking if name not in off}
    read = [full for name, full in names.items() if full in flow or name in record.read_in_vain]
    return read or ([record.name] if is_leaf else [])


def _violation(story: _Story, observation: Observation) -> Finding:
    (record, name, is_used), flow = story.culprit, flow_of(observation)
    own = {one.name.rpartition(".")[2] for one in story.lost if one.record is record}
    names = [name for name in _lacking(record) if name in own] or _lacking(record)
    lost = {one.record.name for one in story.lost} - {record.name}
    why, cause = _why(story, flow)
    is_sure = flow.is_exact or story.cut is not None or name not in flow or bool(flow.line(name))
    if not is_used and name in flow:
        after = _later_of_its_list(name, observation, flow)
        if after:
            why = f"what it returns is not used, and that of {after!r} after it is"
            cause = f"overwritten in a loop, or only the last of several is read: {_JOIN}"
        else:  # what is returned beside others, somebody else may read
            is_sure &= not any(is_inside(name, layer) for layer in flow.reach(name) & flow.used)
    elif is_used and (part := _whole_part(story, observation, flow)):
        is_sure = False
        why = f"{why}; freeze {part!r} by requires_grad_(False) if it is not to learn"
        cause = (
            f"all of {part!r} is cut off, as a teacher, a frozen encoder, a slow copy or the other "
            "half of a GAN is; if it should learn, take away what cuts"
        )
    # a gradient ends where values are chosen among, as experts are, and may be meant to
    is_sure &= story.cut is None or story.cut.operation not in having("order")
    message = f"no gradient reaches its trainable parameters ({', '.join(names)})"
    return MISSING_GRADIENTS.fault(
        record,
        f"{message}: {why}",
        value=float(len(names)),
        cause=cause,
        affected=[name for name in observation.layers if name in lost],
        independent=True,
        severity="fail" if is_sure else "warn",
    )


def _whole_part(story: _Story, observation: Observation, flow: Flow) -> str:
    """Return the outermost module around a layer in which nothing learns, if it may be meant so.

    A stop is written behind it, it takes only what the model was given, and it runs under
    ``no_grad`` or is one network of several: the same graph is a bug in one and right in the next.
    """
    record, layers = story.culprit.record, observation.layers
    is_written = record.grad_off or (
        story.cut is not None and story.cut.operation in having("detach")
    )
    learning = [r.name for r in layers.values() if learns(r)]
    if not (record.name and learning and is_written) or record.read_in_vain:
        return ""
    part = record.name
    while (name := parent(part)) and not any(is_inside(n, name) or n == name for n in learning):
        part = name
    inside = [r.name for r in called(observation) if r.name == part or is_inside(r.name, part)]
    own_cut = part in layers and layers[part].status == "no_grad_path" and not record.grad_off
    before = [layers[name] for name in flow.feeding(*inside) if name in layers]
    # one of several networks that a module runs; a trunk with a head, and blocks in a row, are one
    around, above = layers.get(parent(part)), parent(part)
    is_one_of_several = (
        (around is not None and around.entered is not None and around.type_name != "Sequential")
        and len(inside) > 1
        and all(is_inside(name, above) and parent(name) != above for name in learning)
    )
    if own_cut or not (record.grad_off or is_one_of_several):
        return ""
    is_fed = any(trainable(r) and not r.grad_off for r in before)
    return "" if is_fed and not _has_a_twin(part, layers) else part


def _has_a_twin(part: str, layers: Mapping[str, LayerRecord]) -> bool:
    """Whether a module beside it holds the very same parameters: one of the two is a slow copy."""
    values: dict[str, dict[str, object]] = defaultdict(dict)
    inside = [r for r in layers.values() if parent(part) in ancestors(r.name)]
    for record in inside:
        head, _, rest = record.name.removeprefix(parent(part)).removeprefix(".").partition(".")
        for name, seen in record.parameters.items():
            values[head][f"{rest}.{name}"] = (seen.shape, seen.min, seen.max, seen.mean)
    own = values.pop(part.rpartition(".")[2], None)
    return own in values.values()


def _later_of_its_list(name: str, observation: Observation, flow: Flow) -> str:
    """Return a later member of its list whose result is used, as in a loop that forgets."""
    for _, alike in members(name, observation.layers):
        later = alike[alike.index(name) + 1 :] if name in alike else []
        if used := [other for other in later if other in flow.used]:
            return used[-1]
    return ""


def _ends_a_list(name: str, observation: Observation, flow: Flow) -> bool:
    """Whether nothing of the last member of a list is used, while what those before it gave is."""
    return any(
        alike[-1:] == [name] and around[-1] not in flow.used and not flow.used.isdisjoint(alike)
        for around, alike in members(name, observation.layers)
    )


def _why(story: _Story, flow: Flow) -> tuple[str, str]:
    """Return how it comes about, and what to look at."""
    record, name, is_used = story.culprit
    reads = "its forward reads them, and " if name != record.name else ""
    if name not in flow:
        return "the output does not depend on what comes of them", f"{reads}{_CUT}"
    if not is_used:
        cause = f"{_ignoring(name, flow)}: it is dropped, {_VAIN}"
        return "what it returns is computed in vain", cause
    if record.grad_off:
        where = at(near(flow.line(record.name)))
        return f"it runs under torch.no_grad(){where}", f"the graph is cut there: {_LEARN}"
    to_loss = flow.feeding("loss") if flow.graph.loss is not None else {name}
    if story.cut is not None and story.cut.target == "output" and name not in to_loss:
        return f"the loss leaves it out; it is only returned, by {near(str(story.cut))}", (
            "a term is missing in the loss; what is returned for a log may be cut. If it "
            "should not learn, freeze it by requires_grad_(False)"
        )
    if story.cut is not None and story.cut.operation == UNSEEN:
        where = f"before {story.cut.target!r}{at(near(story.cut.line))}"
        return f"nothing is seen to take it; a tensor of unseen origin comes in {where}", (
            "it is dropped, or cut where nothing shows it: in a script, vmap or compiled code."
            " If that tensor is a constant that an object or a closure keeps, make it a buffer"
            " (register_buffer)"
        )
    if story.cut is not None:
        return near(str(story.cut)), f"{reads}the graph is cut there: {_LEARN}"
    if record.status == "no_grad_path":
        return "what it returns has no graph", f"in its own forward {_CUT}"
    if flow.is_exact:
        return "the graph leads there, and none comes back", f"{_NONE}: {_LEARN}"
    takers = map(repr, flow.consumers(name, as_it_is=True))
    return f"the graph is cut before {next(takers, 'the loss')}", _CUT


def _ignoring(name: str, flow: Flow) -> str:
    """Return who is given what a layer returned and makes nothing of it, if that is known."""
    returned = [vertex for call in flow.calls(name) for vertex in call.outputs]
    made = flow.after(*returned)
    for call in flow.graph.calls:
        if not made.isdisjoint(call.inputs) and made.isdisjoint(flow.inside(call.layer)):
            return f"{call.layer!r} is given it{at(near(call.line))} and takes nothing of it"
    return "nobody takes it"


_CUT = (
    "the graph is cut: .detach(), .data, .item(), .numpy(), torch.tensor(...), argmax, a "
    "comparison or no_grad"
)
_VAIN = (
    "overwritten or not used any more, or the graph is cut where its values leave it: .item(), "
    ".tolist(), .numpy(), torch.tensor(...)"
)
_JOIN = "join them all, or leave it out before the last"
_LEARN = "if it should learn, take away what cuts; if not, freeze it by requires_grad_(False)"
_NONE = "the graph is cut in a backward: that of an autograd.Function after it returns None"


_SHOWN = 3


_CAUSES = {
    "module": "modules in a plain list, dictionary or object are not registered: use "
    "nn.ModuleList or nn.ModuleDict",
    "attribute": "parameters in a plain list, dictionary or object are not registered: use "
    "nn.ParameterList or nn.ParameterDict",
    "tensor": "a tensor with requires_grad is no parameter: wrap it in nn.Parameter, or leave it, "
    "if the model is not to learn it",
    "": "the forward makes them anew, or what is kept is computed of them (nn.Parameter(...) * 2), "
    "so that no optimizer holds them: make each nn.Parameter once, in __init__, and keep it",
}
"""By the kind of what holds the leaves, the first that is there."""


def unregistered(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield one violation for each layer that keeps such leaves."""
    for layer, group in groupby(observation.unregistered, key=lambda one: one.layer):
        leaves = list(group)
        kinds = {one.kind for one in leaves}
        paths = [one.path for one in leaves if one.path]
        if made := len(leaves) - len(paths):
            lines = dict.fromkeys(near(one.line) for one in leaves if one.line)
            used = f" (used at {', '.join([*lines][:_SHOWN])})" if lines else ""
            paths.insert(0, f"{made} that only the graph holds{used}")
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        yield UNREGISTERED_PARAMETERS.fault(
            place(observation, layer),
            f"{len(leaves)} tensors ({sum(one.count for one in leaves):,} elements) get a "
            f"gradient but are no parameters of the model: {', '.join(paths[:_SHOWN])}{more}",
            value=float(len(leaves)),
            cause=next(cause for kind, cause in _CAUSES.items() if kind in kinds or not kind),
            severity="warn" if kinds == {"tensor"} else "fail",
        )
