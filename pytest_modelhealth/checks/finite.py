"""No NaN and no infinity, traced to the layer that made the first; room to the ends of dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    at,
    called,
    completed,
    flow_of,
    innermost,
    largest_at,
    leaves,
    place,
)
from pytest_modelhealth.checks.paths import BREAKING, UNDERIVABLE, first_of, named
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.report.parts import named_ranks
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import dotted, is_inside
from pytest_modelhealth.statistics import TensorStatistics

FINITE = CHECKS["finite"]
HEADROOM = CHECKS["headroom"]

Bad = Callable[[TensorStatistics | None], bool]


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield one violation for each layer where non-finite values begin."""
    found = list(_state(observation))
    found += _forward(observation, {violation.layer for violation in found})
    if not found and observation.loss is not None and not math.isfinite(observation.loss):
        found = [_loss(observation, observation.loss)]
    yield from found or _backward(observation)
    flow = flow_of(observation)
    for vertex in (v for v in flow.graph.vertices if v.facts.get("wraps") == (True,)):
        layer = flow.graph.calls[vertex.call].layer if vertex.call >= 0 else ""
        message = f"a sum of whole numbers passes the end of their type{at(vertex.line)}"
        cause = "what is beyond it begins anew: count in int64, `.long()` before it"
        yield FINITE.fault(place(observation, layer), message, cause=cause, independent=True)


def _is_nan_or_positive_inf(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.nan_count + statistics.positive_inf_count > 0


def _is_not_finite(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.nonfinite_count > 0


def _state(observation: Observation) -> Iterator[Finding]:
    """Yield parameters that are not finite and buffers that are NaN.

    An infinite buffer is usually a mask.
    """
    cause = "an initialiser, a step or a checkpoint wrote it, or a running statistic met NaN"
    for record in observation.layers.values():
        found = [("parameters", n, s) for n, s in record.parameters.items() if s.nonfinite_count]
        found += [("buffers", n, s) for n, s in record.buffers.items() if s.nan_count]
        for role, name, statistics in found:
            yield _violation(observation, record, role, statistics, cause, name)


def _forward(observation: Observation, explained: set[str]) -> Iterator[Finding]:
    """Yield the layers that made bad values of good ones, the first to return first.

    A layer did that itself, or a forward did before it, by operations of its own.
    """
    is_bad: Bad = _is_nan_or_positive_inf
    ill = [record for record in called(observation) if _is_not_finite(record.activations)]
    if not any(is_bad(record.activations) for record in ill):
        is_bad = is_bad if math.isfinite(observation.loss or 0.0) else _is_not_finite
    root, flow = observation.layers[""], flow_of(observation)
    if root.inputs is not None and is_bad(root.inputs):
        cause = "the batch itself holds them: look at the data, not at the model"
        yield _violation(observation, root, "inputs", root.inputs, cause)
        return
    bad = sorted((record for record in ill if is_bad(record.activations)), key=completed)
    if not bad:
        return
    reached = {*explained, *flow.reach(*(name for name in explained if name in flow))}
    causes: dict[str, str] = {}
    for record in bad:
        origin = None if record.name in reached else _origin(record, observation, is_bad)
        if origin is not None:
            place, cause = origin
            made = observation.layers.get(place)
            shows = made is not None and _is_not_finite(made.activations)
            causes.setdefault(place if shows else record.name, cause)
            reached |= {record.name, *flow.reach(record.name)}
    if not (causes or explained):  # inputs unwatched: the first to return
        causes[bad[0].name] = _forward_cause(bad[0])
    for name, cause in causes.items():
        record = observation.layers[name]
        if record.activations is not None:
            yield _violation(observation, record, "activations", record.activations, cause)


def _origin(record: LayerRecord, observation: Observation, is_bad: Bad) -> tuple[str, str] | None:
    """Return which layer's forward made the bad values of a layer, and how, if good ones came.

    -inf may have come from before it, but for a softmax, which is given that by masks. One that is
    called several times may have made its first bad values in a call before it was given any.
    """
    given, flow = record.inputs, flow_of(observation)
    first_in, first_out = (record.nonfinite_calls.get(r) for r in ("inputs", "activations"))
    is_first = first_in is not None and first_out is not None and first_out < first_in
    is_inner = not any(is_inside(name, record.name) for name in observation.layers)
    before = [(name, record.name) for name in flow.producers(record.name)] if is_inner else []
    if not is_first and (given is None or is_bad(given)):
        return next(_made_between(before, observation, BREAKING), None)
    is_masked = bool(given and given.negative_inf_count)
    if is_masked and record.activation not in having("softmax"):
        for made in _made_between(before, observation, BREAKING[:1]):
            return made
    ends = () if is_inner else flow.consumers(record.name)
    ways = [(source, end) for end in ends for source in flow.producers(end)]
    own = (way for way in _made_between(ways, observation, BREAKING) if way[0] == record.name)
    return next(own, (record.name, _forward_cause(record)))


def _made_between(
    ways: list[tuple[str, str]], observation: Observation, kinds: Sequence[frozenset[str]]
) -> Iterator[tuple[str, str]]:
    """Yield the layers whose forward may make bad values between two others, and how."""
    flow = flow_of(observation)
    passed = {way: flow.operations(*way) for way in ways}
    for kind in kinds:
        for (source, taker), operations in passed.items():
            if risky := first_of(operations, kind):
                given, call = observation.layers.get(source), risky[-1].call
                reach = "" if given is None else _reach(given.activations, _GIVEN)
                layer = flow.graph.calls[call].layer if call >= 0 else "loss"
                how = f"{named(risky)}, between {source} and {taker}, makes them"
                yield layer, f"{how}: clamp its argument or add an epsilon{reach}"


_GIVEN = "what it is given lies"


def _forward_cause(record: LayerRecord) -> str:
    out, given, reach = record.activations, record.inputs, _reach(record.inputs)
    if record.activation in having("softmax") and given and given.negative_inf_count:
        return "a row of its input is nothing but -inf: every position is masked"
    if out is not None and out.inf_count and out.dtype == "float16":
        return f"float16 ends at 65504{reach}: scale down, or use bfloat16 or float32 here"
    return (
        f"a division by zero, a log or root outside its domain, or an overflow{reach}: clamp the "
        "argument or add an epsilon"
    )


def _reach(statistics: TensorStatistics | None, what: str = "its inputs lie") -> str:
    if statistics is None or not statistics.finite_count:
        return ""
    return f" ({what} in [{statistics.min:.3g}, {statistics.max:.3g}])"


def _loss(observation: Observation, loss: float) -> Finding:
    root, flow = observation.layers[""], flow_of(observation)
    sources = flow.producers("loss") if flow.graph.loss is not None else ()
    passed = [made for source in sources for made in flow.operations(source, "loss")]
    risky = first_of(list(dict.fromkeys(passed)), *BREAKING[:2])
    alone = _alone(root.ill_ranks.get("loss", ()), observation)
    message = f"the loss is {loss}{alone} although every activation is finite"
    cause = (
        f"the loss function{f' ({named(risky)})' if risky else ''}: log(0), a division by an empty "
        f"mask, or labels out of range{_reach(root.activations, 'outputs lie')}"
    )
    return FINITE.violation(root, message, value=loss, role="loss", cause=cause)


def _backward(observation: Observation) -> Iterator[Finding]:
    """Yield where the backward pass turns finite gradients into something else.

    They begin at a layer whose gradients are bad while no layer that it feeds has bad ones, or at a
    parameter. Layers that one operation takes show the same fault.
    """
    flow = flow_of(observation)
    bad = [record for record in called(observation) if _is_not_finite(record.gradients)]
    begun = [(record.name, record, "gradients", "") for record in reversed(innermost(bad))]
    for record in called(observation):
        for name, statistics in record.parameter_gradients.items():
            if statistics.nonfinite_count and record not in bad:
                own = dotted(record.name, name)
                source = own if own in flow else record.name
                begun.append((source, record, "parameter_gradients", name))
    stories: list[tuple[Finding, Collection[object], set[str]]] = []
    for source, record, role, tensor in begun:
        if any(source in behind for _, _, behind in stories):
            continue
        behind = {source, *flow.feeding(source, by="gradient")}
        makers, cause = _maker(source, record, role, flow)
        same = next((one for one in stories if not set(makers).isdisjoint(one[1])), None)
        if same is not None:
            same[2].update(behind)
            continue
        statistics = record.tensors(role)[tensor]
        violation = _violation(observation, record, role, statistics, cause, tensor)
        stories.append((violation, makers, behind))
    for violation, _, behind in reversed(stories):
        affected = _affected(observation, observation.layers[violation.layer], behind)
        yield replace(violation, affected=tuple(affected))


def _maker(
    source: str, record: LayerRecord, role: str, flow: Flow
) -> tuple[Collection[object], str]:
    """Return whose backward makes bad gradients of finite ones, and that in words."""
    if source == record.name and role == "parameter_gradients":
        return (source,), "its own backward makes them: the gradients that reach it are finite"
    takers = flow.consumers(source)
    makers: Collection[object] = [name for name in takers if name not in ("output", "loss")]
    what = " or ".join([repr(name) for name in makers][:2]) or "the loss"
    if risky := first_of([o for o in flow.operations(source, *takers) if o.live], *UNDERIVABLE):
        taker = next(name for name in takers if risky[0] in flow.operations(source, name))
        makers, what = risky, f"{named(risky)}, between {source} and {taker},"
    given = record.activations if source == record.name else None
    return makers, (
        f"the backward of {what} makes them: the derivative of sqrt, norm, pow or log is "
        "infinite at 0, even where a mask drops the result; clamp its argument or add an epsilon"
        f"{_reach(given, _GIVEN)}"
    )


def _violation(
    observation: Observation,
    record: LayerRecord,
    role: str,
    statistics: TensorStatistics,
    cause: str,
    tensor: str = "",
) -> Finding:
    where = role.replace("_", " ")
    if tensor:
        where = f"{where.removesuffix('s')} {tensor!r}"
    parts = ((statistics.nan_count, "NaN"), (statistics.inf_count, "inf"))
    counts = " and ".join(f"{count} {name}" for count, name in parts if count)
    is_first = role == "activations" and not _is_not_finite(record.inputs)
    return FINITE.fault(
        record,
        f"{counts} of {statistics.count} values in its {where}"
        f"{_alone(record.ill_ranks.get(role, ()), observation)}"
        f"{', made from finite inputs' if is_first else ''}"
        f"{_first(record, role, statistics, observation)}",
        value=float(statistics.nonfinite_count),
        role=role,
        tensor=tensor,
        cause=cause,
        affected=_affected(observation, record),
    )


def _alone(ranks: Collection[int], observation: Observation) -> str:
    """Return ``" on rank 1 alone"``, and nothing where it is all ranks."""
    is_some = observation.ranks is not None and 0 < len(ranks) < len(observation.ranks.ranks)
    return f" on {named_ranks(ranks)} alone" if is_some else ""


def _first(
    record: LayerRecord, role: str, statistics: TensorStatistics, observation: Observation
) -> str:
    """Say where the first one is: batch, index, sample, and the call where there are several."""
    if found := record.nonfinite.get(role):
        at = "" if found.index is None else f" at [{', '.join(map(str, found.index))}]"
        return f", the first in {found}{at}"
    index = statistics.first_nonfinite
    if index is None:
        return ""
    text = f", the first at [{', '.join(map(str, index))}]"
    per_batch = observation.samples / observation.batches
    if role not in ("parameters", "parameter_gradients", "buffers") and index:
        text += f" (sample {index[0]})" if statistics.shape[:1] == (per_batch,) else ""
    call = record.nonfinite_calls.get(role)
    return f"{text} of call {call + 1} of {record.calls}" if call and record.calls > 1 else text


def _affected(
    observation: Observation, culprit: LayerRecord, behind: Collection[str] | None = None
) -> Iterator[str]:
    """Yield the other layers that show what came of this one; of gradients, those `behind` it."""
    flow, reached = flow_of(observation), frozenset[str]()
    if behind is None and culprit.name in flow:
        reached = flow.reach(culprit.name)
    for record in called(observation):
        shows = record.name in reached and _is_not_finite(record.activations)
        if behind is None or record.name in behind:
            shows = shows or _is_not_finite(record.gradients)
        if shows and record is not culprit:
            yield record.name


# ---- room to the end of a dtype, the one in use or one planned -----------------------------------

_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028e38}
_MASK = 0.9
_FEWEST_VALUES = 16
_WIDE = "bfloat16 or float32"
_WITH_AN_END = ("activations", "parameters", "gradients", "parameter_gradients")


def headroom(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the first tensor of each role that comes too near the end of its dtype."""
    found: dict[str, Finding] = {}
    planned, end = str(settings["planned_dtype"].value), _LARGEST["float16"]
    for record in leaves(observation):
        limit = settings.limit("max_range_used", record.name)
        for role in _WITH_AN_END if limit.value is not None else ():
            for tensor, statistics in record.tensors(role).items():
                # float16 ends before the others
                if statistics.abs_max / end > limit.value and role not in found:
                    for one in _overflow(record, role, tensor, planned, limit):
                        found.setdefault(role, one)
    yield from (found[role] for role in _WITH_AN_END if role in found)


def _overflow(
    record: LayerRecord, role: str, tensor: str, planned: str, limit: Limit
) -> Iterator[Finding]:
    statistics = record.tensors(role)[tensor]
    if statistics.count - statistics.zero_count < _FEWEST_VALUES or statistics.nonfinite_count:
        return
    # leaving out the lowest number of a dtype, which masks use
    is_mask = statistics.min <= -_MASK * _LARGEST.get(statistics.dtype, _LARGEST["float32"])
    reached = statistics.max if is_mask else statistics.abs_max
    for dtype in sorted({statistics.dtype, planned} & _LARGEST.keys()):
        used = reached / _LARGEST[dtype]
        if used > limit.value:
            yield HEADROOM.violation(
                record,
                f"its {role.replace('_', ' ')} reach {reached:.4g}, {used:.3g} times the "
                f"largest number of {dtype} ({_LARGEST[dtype]:.5g})",
                value=used,
                limit=limit,
                role=role,
                tensor=tensor,
                cause=f"the next batch may overflow: scale down, normalise, or use {_WIDE}",
                details=largest_at(record, role) if reached == statistics.abs_max else (),
            )
