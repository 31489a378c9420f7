"""Trainable parameters that the loss does not reach, or that no optimizer is told of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
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
    listed,
    members,
    place,
    trainable,
)
from pytest_modelhealth.checks.loss_terms import is_switched_off
from pytest_modelhealth.checks.zero_gradients import idle_rows, zero_gradients
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Cut, Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import UNSEEN, Ending, Recurrence, near
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import dotted, is_inside, parent

MISSING_GRADIENTS = CHECKS["missing_gradients"]
UNREGISTERED_PARAMETERS = CHECKS["unregistered_parameters"]


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
            stories[0].record,
            "no gradient reaches its trainable parameters, but a model in evaluation mode "
            "may have its loss in training mode only: inspect it there, or with a loss",
        )
        return
    for story in stories:
        yield _finding(story, observation)
    yield from _unread(observation)
    yield from _detached_states(observation)
    if math.isfinite(observation.loss or 0.0) and not is_switched_off(observation):
        yield from zero_gradients(observation)
        if observation.loss != 0.0:
            yield from idle_rows(observation, settings)


def _detached_states(observation: Observation) -> Iterator[Finding]:
    """Yield the layers whose own state comes to them detached each time.

    Where each call takes one step of a sequence, gradients go back a single step. Pieces of several
    steps are truncated backpropagation. Where each call takes the same again, as in the search for
    a fixed point, the gradient of the last alone may be meant.
    """
    by_line: dict[str, list[Recurrence]] = defaultdict(list)
    recurrences = flow_of(observation).cut_recurrences()
    learning = [r.name for r in observation.layers.values() if learns(r)] if recurrences else []
    for one in recurrences:
        is_detached = {cut.operation for cut in one.cuts} <= having("detach")
        if is_detached and any(n == one.layer or is_inside(n, one.layer) for n in learning):
            by_line[one.cuts[0].line].append(one)
    for first, *others in by_line.values():
        given = observation.layers[first.layer].inputs
        extents = sum(size > 1 for size in given.shape[1:]) if given else 0  # of a sample
        if first.takes_more and extents > 1:
            continue  # several steps at once
        yield MISSING_GRADIENTS.fault(
            first.layer,
            f"its state is detached before each of its {first.calls} calls, so that no gradient "
            f"goes back further than one: {near(str(first.cuts[0]))}",
            value=float(first.calls),
            cause="the state is cut off at every step, and nothing learns over several: detach it "
            "before the first step only, or every so many (truncated backpropagation)",
            affected=[other.layer for other in others],
            independent=True,
            severity="fail" if first.takes_more and extents == 1 else "warn",
        )


def _unread(observation: Observation) -> Iterator[Finding]:
    """Tell of parameters that nothing reads, in modules whose reads are seen: a mask token."""
    flow = flow_of(observation)
    for record in (r for r in called(observation) if flow.is_exact and r.unreached):
        full = {name: dotted(record.name, name) for name in record.parameters}
        unread = [n for n in _lacking(record) if n in record.unreached and full[n] not in flow]
        is_seen = record.name not in flow.layers or any(name in flow for name in full.values())
        if is_seen and (names := ", ".join(n for n in unread if n not in record.read_in_vain)):
            yield MISSING_GRADIENTS.fault(
                record,
                f"nothing reads its trainable {names}",
                cause="it is for other batches, or left out of the forward",
                severity="note",
            )


class _Story(NamedTuple):
    """What is lost by one fault: the last of it, by its name in the flow, what cuts, and all."""

    record: LayerRecord
    name: str
    cut: Cut | None
    lost: dict[str, LayerRecord]


def _stories(observation: Observation) -> Iterator[_Story]:
    """Yield what is lost, by where it ends, in the order of completion."""
    lost = _lost(observation)
    if not lost:
        return
    flow = flow_of(observation)
    endings = {name: Ending(name, None) for name in lost if name not in flow} | flow.endings(lost)
    by_place: dict[object, _Story] = {}
    for name in sorted(endings, key=lambda name: -completed(lost[endings[name].last])):
        last, cut = endings[name].last, endings[name].cut
        record, is_dropped = lost[last], last in flow and last not in flow.used
        is_end = (
            is_dropped
            and any(  # nothing is used of the last of a list, and of others is
                alike[-1:] == [last]
                and around[-1] not in flow.used
                and not flow.used.isdisjoint(alike)
                for around, alike in members(last, observation.layers)
            )
        )
        if is_end or is_in_an_empty_part(record, observation):
            continue
        place: object = last  # what one line does in every block is one fault
        if cut is not None:
            place = (cut.operation, cut.line) if cut.line else cut
        elif is_dropped or (record.grad_off and last in flow):
            place = flow.line(last) or last
        by_place.setdefault(place, _Story(record, last, cut, {})).lost[name] = lost[name]
    yield from reversed(by_place.values())


def _lost(observation: Observation) -> dict[str, LayerRecord]:
    """Return what gets no gradient and should: layers, or parameters that their modules read.

    A layer may lack it for some alone, by a loss of the output's slopes. A container may hold
    some for other occasions (the token that stands for a masked patch), or read them under
    ``no_grad``.
    """
    lacking = [(r, missing) for r in observation.layers.values() if (missing := _lacking(r))]
    lost: dict[str, LayerRecord] = {}
    if not lacking:
        return lost
    flow = flow_of(observation)
    is_sure = flow.is_exact and flow.graph.loss is not None
    is_sure = is_sure and flow.graph.vertices[flow.graph.loss or 0].live
    to_loss = flow.feeding("loss") if is_sure else frozenset()
    for record, missing in lacking:
        names, in_vain = {name: dotted(record.name, name) for name in missing}, record.read_in_vain
        off = record.unreached - in_vain
        own = [f for n, f in names.items() if n not in off and (f in flow or n in in_vain)]
        if record.name in flow.layers and record.gradients is None:
            own = [record.name] if len(missing) == len(trainable(record)) else []
        unreached = record.unreached.issuperset(missing) or record.status == "no_grad_path"
        lost |= {name: record for name in own if name in to_loss or unreached}
    return lost


def _lacking(record: LayerRecord) -> list[str]:
    """Return the trainable parameters that got no gradient."""
    is_whole = record.parameter_gradients.keys() >= record.parameters.keys()
    if is_whole or "parameter_gradients" not in record.watched:
        return []
    return [name for name in trainable(record) if name not in record.parameter_gradients]


def _finding(story: _Story, observation: Observation) -> Finding:
    (record, name, cut, lost), flow = story, flow_of(observation)
    own = [n for n in _lacking(record) if dotted(record.name, n) in lost] or _lacking(record)
    affected = {one.name for one in lost.values()} - {record.name}
    why, cause = _why(story, flow)
    is_sure = flow.is_exact or cut is not None or name not in flow or bool(flow.line(name))
    if name in flow and name not in flow.used:
        if after := _later_of_its_list(name, observation, flow):
            why = f"what it returns is not used, and that of {after!r} after it is"
            cause = f"overwritten in a loop, or only the last of several is read: {_JOIN}"
        else:  # what is returned beside others, somebody else may read
            is_sure &= not any(is_inside(name, layer) for layer in flow.reach(name) & flow.used)
    elif part := _whole_part(story, observation, flow):
        is_sure = False
        why = f"{why}; freeze {part!r} by requires_grad_(False) if it is not to learn"
        cause = (
            f"all of {part!r} is cut off, as a teacher, a frozen encoder, a slow copy or the other "
            "half of a GAN is; if it should learn, take away what cuts"
        )
    # a gradient ends where values are chosen among, as experts are, and may be meant to
    is_sure &= cut is None or cut.operation not in having("order")
    return MISSING_GRADIENTS.fault(
        record,
        f"no gradient reaches its trainable parameters ({', '.join(own)}): {why}",
        value=float(len(own)),
        cause=cause,
        affected=[layer for layer in observation.layers if layer in affected],
        independent=True,
        severity="fail" if is_sure else "warn",
    )


def _whole_part(story: _Story, observation: Observation, flow: Flow) -> str:
    """Return the outermost module around a layer in which nothing learns, if it may be meant so.

    A stop is written behind it: a teacher, a frozen encoder, the other half of a GAN. The same
    graph is a bug in one and right in the next. Where what it takes would learn by it alone, where
    it is one layer, or what learns is a layer beside it, it is a bug in any.
    """
    record, part, layers = story.record, story.record.name, observation.layers
    is_written = story.cut is not None and story.cut.operation in having("detach")
    learning = [r.name for r in layers.values() if learns(r)]
    if not (part and learning and (record.grad_off or is_written)) or record.read_in_vain:
        return ""
    while (name := parent(part)) and not any(is_inside(n, name) or n == name for n in learning):
        part = name
    inside = [r.name for r in called(observation) if r.name == part or is_inside(r.name, part)]
    before = (layers[name] for name in flow.feeding(*inside) if name in layers)
    is_half = len(inside) > 1 and not any(parent(name) == parent(part) for name in learning)
    is_fed = any(
        trainable(r) and not r.grad_off and not (record.grad_off and learns(r)) for r in before
    )
    return part if not is_fed and (record.grad_off or is_half) else ""


def _later_of_its_list(name: str, observation: Observation, flow: Flow) -> str:
    """Return a later member of its list whose result is used, as in a loop that forgets."""
    for _, alike in members(name, observation.layers):
        later = alike[alike.index(name) + 1 :] if name in alike else []
        if used := [other for other in later if other in flow.used]:
            return used[-1]
    return ""


def _why(story: _Story, flow: Flow) -> tuple[str, str]:
    """Return how it comes about, and what to look at."""
    record, name, cut, _ = story
    reads = "its forward reads them, and " if name != record.name else ""
    if name not in flow:
        return "the output does not depend on what comes of them", f"{reads}{_CUT}"
    if name not in flow.used:
        return "what it returns is computed in vain", f"{_ignoring(name, flow)}, {_VAIN}"
    if record.grad_off:
        where = at(near(flow.line(record.name)))
        return f"it runs under torch.no_grad(){where}", f"the graph is cut there: {_LEARN}"
    if cut is not None and cut.operation == UNSEEN:
        where = f"before {cut.target!r}{at(near(cut.line))}"
        return f"nothing is seen to take it; a tensor of unseen origin comes in {where}", _UNSEEN
    if cut is not None:
        is_loss_s = flow.graph.loss is None or name in flow.feeding("loss")
        if cut.target == "output" and not is_loss_s:
            return f"the loss leaves it out; it is only returned, by {near(str(cut))}", _LEFT_OUT
        return near(str(cut)), f"{reads}the graph is cut there: {_LEARN}"
    if record.status == "no_grad_path":
        return "what it returns has no graph", f"in its own forward {_CUT}"
    if flow.is_exact:
        return "the graph leads there, and none comes back", f"{_NONE}: {_LEARN}"
    return "the graph is cut after it", _CUT


def _ignoring(name: str, flow: Flow) -> str:
    """Return who is given what a layer returned and makes nothing of it, if that is known."""
    made = flow.after(*(vertex for call in flow.calls(name) for vertex in call.outputs))
    for call in flow.graph.calls:
        if not made.isdisjoint(call.inputs) and made.isdisjoint(flow.inside(call.layer)):
            return f"{call.layer!r} is given it{at(near(call.line))} and takes nothing of it"
    return "it is dropped"


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
_UNSEEN = (
    "it is dropped, or cut where nothing shows it: in a script, vmap or compiled code. If that "
    "tensor is a constant that an object or a closure keeps, make it a buffer (register_buffer)"
)
_LEFT_OUT = f"a term is missing in the loss; what is returned for a log may be cut: {_LEARN}"
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
        yield UNREGISTERED_PARAMETERS.fault(
            place(observation, layer),
            f"{len(leaves)} tensors ({sum(one.count for one in leaves):,} elements) get a "
            f"gradient but are no parameters of the model: {listed(paths, _SHOWN)}",
            value=float(len(leaves)),
            cause=next(cause for kind, cause in _CAUSES.items() if kind in kinds or not kind),
            severity="warn" if kinds == {"tensor"} else "fail",
        )
