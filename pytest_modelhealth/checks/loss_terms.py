"""How a loss is put together: its terms, and tasks that share layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import at, completed
from pytest_modelhealth.report import Flow, LossCall, Observation, Vertex, Violation
from pytest_modelhealth.report.flow import PRODUCTS
from pytest_modelhealth.report.flow.inferred import NOTE
from pytest_modelhealth.settings import Settings

TASK_BALANCE = CHECKS["task_balance"]
LOSS = CHECKS["loss"]


_OUTSIDE = -1
"""The call of what no layer makes: the loss."""

# ---- terms that are multiplied by zero ----------------------------------------------------------


def weightless_terms(observation: Observation) -> Iterator[Violation]:
    """Yield where a term of the loss is multiplied by zero.

    Only where the loss has another term: one that is zero as a whole is a fault of its own.
    """
    flow = _known(observation)
    if flow is None:
        return
    vertices = flow.graph.vertices
    zeros = [
        f"{record.name}.{name}".lstrip(".")
        for record in observation.layers.values()
        for name, buffer in record.buffers.items()
        if buffer.count and buffer.abs_max == 0.0
    ]
    if observation.loss == 0.0 and observation.loss_path and observation.loss_path.switched_off:
        return
    lines: dict[str, str] = {}
    for number, vertex in enumerate(vertices):
        if vertex.function not in PRODUCTS or vertex.call != _OUTSIDE:
            continue
        origins = [{vertices[one].name for one in flow.origins(o)} for o in vertex.operands]
        weights = [names for names in origins if names and names <= {"0", *zeros}]
        terms = (o for place, o in enumerate(vertex.operands) if vertex.passes_gradient(place))
        is_term = bool(weights) and any(_is_of_the_output(flow, term) for term in terms)
        if is_term and flow.graph.loss in flow.after(number):
            lines.setdefault(vertex.line, min(weights[0]))
    for line, by in lines.items():
        by = by if by == "0" else f"{by!r}, which is zero throughout"
        yield LOSS.fault(
            observation.layers[""],
            f"a term of the loss is multiplied by {by}{at(line)}, and asks for nothing",
            role="loss",
            cause="a weight or a mask of zeros, or one that a schedule starts at zero: give the "
            "step at which it is on, or leave the term out; one that only keeps layers in the "
            "graph is meant so",
            independent=True,
            severity="warn",
        )


# ---- sums ---------------------------------------------------------------------------------------

_KEEPS = frozenset({"add", "alias", "clone", "neg", "reshape", "squeeze", "sub", "to_copy", "view"})
"""What is done with a sum and leaves it one."""
_BY_ELEMENT = _KEEPS | frozenset(
    {"abs", "binary_cross_entropy", "binary_cross_entropy_with_logits", "clamp", "exp", "gather"}
    | {"huber_loss", "index", "log", "log1p", "log_sigmoid", "log_softmax", "masked_fill"}
    | {"masked_select", "mse_loss", "mul", "nll_loss", "nll_loss2d", "permute", "pow", "relu"}
    | {"rsub", "select", "sigmoid", "slice", "smooth_l1_loss", "softmax", "softplus", "sum"}
    | {"transpose", "unsqueeze", "where"}
)
"""What is computed for each sample; means and divisions may be by the batch."""
_NODES = {
    "binary_cross_entropy": {"binary_cross_entropy"},
    "binary_cross_entropy_with_logits": {"binary_cross_entropy_with_logits"},
    "huber_loss": {"huber_loss"},
    "mse_loss": {"mse_loss"},
    "nll_loss": {"cross_entropy", "nll_loss"},
    "nll_loss2d": {"cross_entropy", "nll_loss"},
    "smooth_l1_loss": {"smooth_l1_loss"},
}
"""Operations that hold the reduction of a loss function, and the functions that end in them."""


def summed_over_batch(observation: Observation) -> Iterator[Violation]:
    """Yield that the loss is a sum over the samples of the batch.

    Every term that is computed from the output must be one, with nothing after it that may divide;
    or some are sums of a loss function, and all others means.
    """
    flow, root = _known(observation), observation.layers[""]
    samples = observation.samples // max(observation.batches, 1)
    if flow is None or samples < _FEWEST_SAMPLES or root.activations is None:
        return
    if root.activations.shape[:1] != (samples,):
        return
    sums, beside = _sums(observation, flow, samples)
    if sums:
        yield LOSS.fault(
            root,
            f"the loss is summed over the {samples} samples of the batch{beside}"
            f"{at(sums[0].line)}: it, and its gradient, grow with the size of the batch",
            value=float(samples),
            role="loss",
            cause="reduction='sum', or .sum() where .mean() is usual: a learning rate that suits "
            "one size of the batch does not suit another; it may be meant so",
            independent=True,
            severity="warn",
        )


def _sums(observation: Observation, flow: Flow, samples: int) -> tuple[list[Vertex], str]:
    """Return the sums that terms of the loss end in, and what to say where others are means.

    They sum over samples by hand, or as a loss function is told to. What only sums the output, and
    compares it with nothing, stands for no loss. Means may be weighted; of a sum, a weight may
    divide by the size of the batch.
    """
    vertices, met, path = flow.graph.vertices, set[int](), observation.loss_path
    compares = path is not None and path.uses_target is True
    compares = compares or any(call.target is not None for call in observation.loss_calls)
    sums: list[Vertex] = []
    is_plain, has_mean = True, False  # whether no sum but those of functions over samples is met
    todo = [] if flow.graph.loss is None else [(flow.graph.loss, False)]
    while todo:
        number, is_weighted = todo.pop()
        if number in met or not _is_of_the_output(flow, number):
            continue
        met.add(number)
        vertex, calls = vertices[number], _reduced(observation, vertices[number])
        is_by_hand = not calls and vertex.function == "sum" and compares and not is_weighted
        reductions = {call.options.get("reduction", "mean") for call in calls}
        if vertex.call != _OUTSIDE:
            return [], ""
        if is_by_hand and _keeps_samples(flow, vertex.operands):
            sums.append(vertex)
            is_plain = False
        elif calls and all(map(_is_sum, calls)) and not is_weighted:
            sums.append(vertex)
            is_plain &= all(c.input and c.input.shape[:1] == (samples,) for c in calls)
        elif vertex.function == "mean" or (reductions == {"mean"} and not any(map(_is_sum, calls))):
            has_mean = True
        elif vertex.function in {*_KEEPS, "mul", "div"}:
            is_weighted |= vertex.function not in _KEEPS
            todo.extend((operand, is_weighted) for operand in vertex.operands)
        else:
            return [], ""
    if not has_mean:
        return sums, ""
    return (sums if is_plain else []), ", beside a mean"


def _keeps_samples(flow: Flow, operands: tuple[int, ...]) -> bool:
    """Whether nothing before a sum, back to the output, may have divided by the size of the batch.

    A mean does, and so may a factor of which the size is not known: a number, or what is neither
    output nor target.
    """
    vertices = flow.graph.vertices
    todo, met = list(operands), set[int]()
    while todo:
        here = todo.pop()
        vertex = vertices[here]
        if here in met or vertex.call != _OUTSIDE or vertex.kind in ("input", "target"):
            continue
        met.add(here)
        factors = [vertices[operand].kind for operand in vertex.operands]
        is_weight = vertex.function == "mul" and (len(factors) < 2 or "constant" in factors)
        is_mean = vertex.live and vertex.function not in _BY_ELEMENT
        if vertex.kind != "operation" or is_weight or is_mean:
            return False
        todo.extend(vertex.operands)
    return True


_FEWEST_SAMPLES = 2


def _reduced(observation: Observation, vertex: Vertex) -> list[LossCall]:
    """Return the calls of loss functions that gave one number, by an operation as this is."""
    return [
        call
        for call in observation.loss_calls
        if call.function in _NODES.get(vertex.function, ())
        and call.options.get("reduction") != "none"
    ]


def _is_sum(call: LossCall) -> bool:
    return call.layer is None and (
        call.options.get("reduction") == "sum" or call.options.get("size_average") is False
    )


def _is_of_the_output(flow: Flow, number: int) -> bool:
    """Whether a vertex is made of what the model computed, and passes a gradient to it."""
    vertex = flow.graph.vertices[number]
    if not vertex.live or vertex.kind == "parameter":
        return False
    return vertex.call != _OUTSIDE or any(
        flow.graph.vertices[o].kind == "call" or flow.graph.vertices[o].call != _OUTSIDE
        for o in flow.origins(number)
    )


def _known(observation: Observation) -> Flow | None:
    """Return the flow where it shows how the user's loss was computed."""
    flow = observation.flow
    if flow is None or NOTE in flow.notes or flow.graph.loss is None:
        return None
    return flow if observation.loss_path is not None and not flow.notes else None


def unbalanced(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield each pair of tasks of which one drowns the other."""
    layers, silent = observation.layers, []
    for task in observation.tasks:
        reached = [layers[name] for name in task.gradient_norms if name in layers]
        if not task.gradient_norms or any(task.gradient_norms.values()):
            continue
        silent.append(task)
        if task.loss != 0.0 and math.isfinite(task.loss) and reached:
            yield TASK_BALANCE.fault(
                max(reached, key=completed),
                f"task {task.name!r} has a loss of {task.loss:.3g} and asks nothing of any of "
                f"the {len(reached)} layers that it reaches: its gradient is exactly zero",
                cause="it is flat here: rounded, clamped, chosen by an index, or multiplied by "
                "zero beside a constant",
            )
    for a, b in combinations(observation.tasks, 2):
        if any(task.loss != 0.0 for task in (a, b) if task in silent):
            continue
        shared = [layers[n] for n in a.gradient_norms if n in b.gradient_norms and n in layers]
        if not shared:
            continue
        layer = max(shared, key=completed).name
        strong, weak = sorted((a, b), key=lambda t: t.gradient_norms[layer], reverse=True)
        high, low = strong.gradient_norms[layer], weak.gradient_norms[layer]
        limit = settings.limit("max_task_ratio", layer)
        if not (math.isfinite(high) and high > limit.value * low):
            continue
        if weak.loss == 0.0:
            reason = f"the loss of task {weak.name!r} is zero: it asks for nothing on this batch"
            yield TASK_BALANCE.inconclusive(observation.layers[layer], reason)
            continue
        ratio = high / low if low else math.inf
        losses = f"{strong.loss:.3g} and {weak.loss:.3g}"
        why = f"their losses differ in scale ({losses})"
        if abs(strong.loss) <= _APART * abs(weak.loss):
            why = f"their losses are {losses}, and what lies between differs in scale"
        may_be_meant = limit.origin == "default" and ratio <= _MOST_BY_WEIGHT
        yield TASK_BALANCE.violation(
            observation.layers[layer],
            f"task {strong.name!r} has {ratio:.3g} times the gradient of task "
            f"{weak.name!r} here, where the two meet (norms {high:.3g} and {low:.3g})",
            value=ratio,
            limit=limit,
            cause=f"{why}: weight them, for example {weak.name!r} by {min(ratio, 1e9):.0g}, or "
            "normalise the targets" + ("; a small weight may be meant so" if may_be_meant else ""),
            independent=True,
            severity="warn" if may_be_meant else "fail",
        )


_APART = 10.0
_MOST_BY_WEIGHT = 1e4
"""Auxiliary terms are given weights down to 1e-3 on purpose; units and sums go beyond."""
