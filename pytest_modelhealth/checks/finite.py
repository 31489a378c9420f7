"""No NaN and no infinity, traced to the layer that made the first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import called, completed, flow_of, innermost, leaves
from pytest_modelhealth.checks.paths import BREAKING, UNDERIVABLE, first_of, named
from pytest_modelhealth.report import Flow, LayerRecord, Observation, Violation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics import TensorStatistics

FINITE = CHECKS["finite"]


Bad = Callable[["TensorStatistics | None"], bool]
Kinds = Sequence[frozenset[str]]
_LINEAR = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Bilinear")


def findings(observation: Observation, settings: Settings) -> Iterator[Violation]:
    """Yield one violation for each layer where non-finite values begin."""
    state = list(_state(observation))
    forward = list(_forward(observation, {violation.layer for violation in state}))
    if state or forward:
        yield from state
        yield from forward
    elif not math.isfinite(observation.loss or 0.0):
        yield _loss(observation)
    else:
        yield from _backward(observation)


def _is_nan_or_positive_inf(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.nan_count + statistics.positive_inf_count > 0


def _is_not_finite(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.nonfinite_count > 0


def _state(observation: Observation) -> Iterator[Violation]:
    """Yield parameters that are not finite and buffers that are NaN.

    An infinite buffer is usually a mask.
    """
    for record in observation.layers.values():
        for role, cause in _STATE.items():
            for name, statistics in record.tensors(role).items():
                if statistics.nonfinite_count if role == "parameters" else statistics.nan_count:
                    yield _violation(observation, record, role, statistics, cause, name)
    for found in _of_some_ranks(observation):
        if found.role in _STATE:  # of replicas the report shows one, which is sound
            record = observation.layers[found.layer]
            yield FINITE.fault(
                record,
                found.message,
                value=found.value,
                role=found.role,
                tensor=found.tensor,
                cause=_STATE[found.role],
                affected=_affected(observation, record),
            )


_STATE = {
    "parameters": "an initialiser, a step or a checkpoint wrote it: look before this batch",
    "buffers": "a running statistic met NaN in training, or the buffer was never filled",
}


def _forward(observation: Observation, explained: set[str]) -> Iterator[Violation]:
    is_bad: Bad = _is_nan_or_positive_inf
    if not any(is_bad(record.activations) for record in called(observation)):
        is_bad = is_bad if math.isfinite(observation.loss or 0.0) else _is_not_finite
    root = observation.layers.get("")
    if root is not None and is_bad(root.inputs) and root.inputs is not None:
        cause = "the batch itself holds them: look at the data, not at the model"
        yield _violation(observation, root, "inputs", root.inputs, cause)
        return
    causes = _origins(observation, is_bad, explained)
    for record in sorted(called(observation), key=completed):
        out = record.activations
        if record.name in causes.keys() - explained and out is not None and is_bad(out):
            yield _violation(observation, record, "activations", out, causes[record.name])


def _origins(observation: Observation, is_bad: Bad, explained: set[str]) -> dict[str, str]:
    """Return the layers that made bad activations of values that were not, each with its cause.

    A layer did that itself, or its forward did between the layers that it holds. -inf may have come
    from before it, but for a softmax, which is given that by masks. One that is called several
    times may have made its first bad values in a call before it was given any.
    """
    flow, inner = flow_of(observation), {record.name for record in leaves(observation)}
    bad = [record for record in called(observation) if is_bad(record.activations)]
    good = [r for r in bad if r.inputs is not None and not is_bad(r.inputs)]
    handed = {
        r.name: _made_for(r.name, observation, is_bad, BREAKING[:1])
        for r in good
        if r.name in inner and r.activation not in _SOFTMAX
        if r.inputs is not None and r.inputs.negative_inf_count
    }
    own = [r for r in good if handed.get(r.name) is None]
    for record in bad:
        given, made = (record.nonfinite_calls.get(role) for role in ("inputs", "activations"))
        if given is not None and made is not None and made < given:
            own.append(record)
    makers = innermost(own)
    if not makers:  # inputs unwatched, or nothing bad leaves the model: the first to return
        makers = innermost(bad)[:1]
        handed = {r.name: _made_for(r.name, observation, is_bad) for r in makers}
    causes: dict[str, str] = {}
    for record in makers:
        within: str | None = None
        if record.name not in inner:  # its operations may tell how its forward does it
            takers = [r.name for r in sorted(bad, key=completed) if is_inside(r.name, record.name)]
            after = (*takers[:1], *flow.consumers(record.name))
            between = [(source, taker) for taker in after for source in flow.producers(taker)]
            made_by = _made_between(between, observation, BREAKING)
            within = next((cause for layer, cause in made_by if layer == record.name), None)
        _, before = handed.get(record.name) or ("", "")
        causes[record.name] = within or before or _forward_cause(record, observation)
    known = {name for name in (*causes, *explained) if name in flow}
    reached = {*known, *flow.reach(*known)}
    for taker in bad:  # beside all of these, a layer's forward may make others
        if taker.name not in inner or taker.name in reached:
            continue
        if found := _made_for(taker.name, observation, is_bad):
            reached |= {taker.name, *flow.reach(taker.name)}
            shows = any(record.name == found[0] for record in bad)
            causes.setdefault(found[0] if shows else taker.name, found[1])
    return causes


_SOFTMAX = ("softmax", "log_softmax")


def _made_for(
    taker: str, observation: Observation, is_bad: Bad, kinds: Kinds = BREAKING
) -> tuple[str, str] | None:
    """Return the layer whose forward makes bad values for `taker` of good ones, and how."""
    sources = flow_of(observation).producers(taker)
    given = [observation.layers[name] for name in sources if name in observation.layers]
    if any(record.activations is None or is_bad(record.activations) for record in given):
        return None
    return next(_made_between([(source, taker) for source in sources], observation, kinds), None)


def _made_between(
    ways: list[tuple[str, str]], observation: Observation, kinds: Kinds
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


def _forward_cause(record: LayerRecord, observation: Observation) -> str:
    out, given, reach = record.activations, record.inputs, _reach(record.inputs)
    assert out is not None
    has_masks = given is not None and given.negative_inf_count > 0
    if record.activation in _SOFTMAX and has_masks:
        return "a row of its input is nothing but -inf: every position is masked"
    if out.inf_count and out.dtype == "float16":
        return f"float16 ends at 65504{reach}: scale down, or use bfloat16 or float32 here"
    if any(is_inside(name, record.name) for name in observation.layers):
        return (
            f"its own forward makes them between its submodules{reach}: look for a division, log, "
            "sqrt, exp or power there"
        )
    if record.type_name in _LINEAR and not has_masks:
        return f"its products overflow {out.dtype}{reach}"
    return (
        f"a division by zero, a log or root outside its domain, or an overflow{reach}: clamp the "
        "argument or add an epsilon"
    )


def _reach(statistics: TensorStatistics | None, what: str = "its inputs lie") -> str:
    if statistics is None or not statistics.finite_count:
        return ""
    return f" ({what} in [{statistics.min:.3g}, {statistics.max:.3g}])"


def _loss(observation: Observation) -> Violation:
    root, flow, loss = observation.layers[""], flow_of(observation), observation.loss
    sources = flow.producers("loss") if flow.graph.loss is not None else ()
    passed = [made for source in sources for made in flow.operations(source, "loss")]
    risky = first_of(list(dict.fromkeys(passed)), *BREAKING[:2])
    where = f" ({named(risky)})" if risky else ""
    ill = (d.ranks for d in _of_some_ranks(observation) if d.role == "loss" and d.others)
    return FINITE.violation(
        root,
        f"the loss is {loss}{_alone(next(ill, ()), observation)} although every activation is "
        "finite",
        value=math.nan if loss is None else loss,
        role="loss",
        cause=f"the loss function{where}: log(0), a division by an empty mask, or labels out of "
        f"range{_reach(root.activations, 'outputs lie')}",
    )


def _backward(observation: Observation) -> Iterator[Violation]:
    """Yield where the backward pass turns finite gradients into something else.

    They begin at a layer whose gradients are bad while no layer that it feeds has bad ones. Layers
    that one operation takes show the same fault.
    """
    flow = flow_of(observation)
    found: list[tuple[Violation, Collection[object], set[str]]] = []
    for source, record, role, tensor in _bad_gradients(observation):
        if any(source in behind for _, _, behind in found):
            continue
        behind = {source, *flow.feeding(source, by="gradient")}
        makers, cause = _maker(source, record, role, flow)
        same = next((one for one in found if not set(makers).isdisjoint(one[1])), None)
        if same is not None:
            same[2].update(behind)
            continue
        statistics = record.tensors(role)[tensor]
        violation = _violation(observation, record, role, statistics, cause, tensor)
        found.append((violation, makers, behind))
    for violation, _, behind in reversed(found):
        affected = _affected(observation, observation.layers[violation.layer], behind)
        yield replace(violation, affected=tuple(affected))


def _bad_gradients(observation: Observation) -> Iterator[tuple[str, LayerRecord, str, str]]:
    """Yield bad gradients, the last layer first, then those that only parameters show.

    Each with what it is called in the flow, its record, role and tensor.
    """
    flow = flow_of(observation)
    bad = [record for record in called(observation) if _is_not_finite(record.gradients)]
    for record in reversed(innermost(bad)):
        yield record.name, record, "gradients", ""
    for record in called(observation):
        for name, statistics in record.parameter_gradients.items():
            if statistics.nonfinite_count and not _is_not_finite(record.gradients):
                source = f"{record.name}.{name}".lstrip(".")
                found = source if source in flow else record.name
                yield found, record, "parameter_gradients", name


def _maker(
    source: str, record: LayerRecord, role: str, flow: Flow
) -> tuple[Collection[object], str]:
    """Return whose backward makes bad gradients of finite ones, and that in words."""
    if source == record.name and role == "parameter_gradients":
        return (source,), "its own backward makes them: the gradients that reach it are finite"
    takers = flow.consumers(source)
    passed = [o for o in flow.operations(source, *takers) if o.live]
    if risky := first_of(passed, *UNDERIVABLE):
        taker = next(name for name in takers if risky[0] in flow.operations(source, name))
        given = record.activations if source == record.name else None
        return risky, (
            f"the backward of {named(risky)}, between {source} and {taker}, makes them: its "
            "derivative is infinite somewhere (a root or a logarithm at 0), even where a mask "
            f"drops the result; clamp its argument or add an epsilon{_reach(given, _GIVEN)}"
        )
    layers = [name for name in takers if name not in ("output", "loss")]
    what = " or ".join(map(repr, layers[:2])) or "the loss"
    return layers or ["the loss"], (
        f"the backward of {what}, which takes this output, makes them: the derivative of sqrt, "
        f"norm, pow or log at 0, or of a masked division{_reach(record.activations)}"
    )


def _violation(
    observation: Observation,
    record: LayerRecord,
    role: str,
    statistics: TensorStatistics,
    cause: str,
    tensor: str = "",
) -> Violation:
    where = role.replace("_", " ")
    if tensor:
        where = f"{where.removesuffix('s')} {tensor!r}"
    parts = ((statistics.nan_count, "NaN"), (statistics.inf_count, "inf"))
    counts = " and ".join(f"{count} {name}" for count, name in parts if count)
    assembly = record.assembled.get(role)  # a tensor that is another on each rank
    some = () if assembly is None or assembly.how == "replicas" else assembly.nonfinite
    is_first = role == "activations" and not _is_nan_or_positive_inf(record.inputs)
    return FINITE.fault(
        record,
        f"{counts} of {statistics.count} values in its {where}"
        f"{_alone(some, observation)}"
        f"{', made from finite inputs' if is_first else ''}"
        f"{_first(record, role, statistics, observation)}",
        value=float(statistics.nonfinite_count),
        role=role,
        tensor=tensor,
        cause=cause,
        affected=_affected(observation, record),
    )


def _of_some_ranks(observation: Observation) -> Iterator[Disagreement]:
    """Yield what is not finite on ranks of which the statistics do not tell."""
    if observation.ranks is not None:
        yield from (d for d in observation.ranks.disagreements if d.kind == FINITE.name)


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
    flow = flow_of(observation)
    is_forward = behind is None and culprit.name in flow
    reached = flow.reach(culprit.name) if is_forward else frozenset()
    for record in called(observation):
        shows = record.name in reached and _is_not_finite(record.activations)
        if behind is None or record.name in behind:
            shows = shows or _is_not_finite(record.gradients)
        if shows and record is not culprit:
            yield record.name
