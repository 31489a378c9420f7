"""What a loss is made of: its terms, their signs and gradients, its targets; tasks in balance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import at, completed, flow_of, learns, trainable
from pytest_modelhealth.checks.run import Grade
from pytest_modelhealth.checks.zero_gradients import UNDERFLOW
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, Observation
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.settings.setting import dotted

LOSS = CHECKS["loss"]
TASK_BALANCE = CHECKS["task_balance"]
Faults = Iterator[tuple[str, str, Grade]]
"""What is wrong, the likely cause, and the grade."""
Rule = Callable[[Observation, Flow], Faults]


def findings(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield what is wrong with the loss as a whole and with its terms, up to what fails."""
    flow = flow_of(observation)
    has_loss = observation.loss_path is not None or bool(observation.loss_calls)
    is_seen = observation.backward and flow.is_exact and flow.graph.loss is not None
    yield from said((*_RULES, *(_OF_THE_GRAPH if has_loss and is_seen else ())), observation, flow)


def said(rules: Iterable[Rule], observation: Observation, flow: Flow) -> Iterator[Finding]:
    """Yield what rules say of the loss, each once, up to the first that fails."""
    for rule in rules:
        told = list(dict.fromkeys(rule(observation, flow)))
        for what, cause, grade in told:
            more = {"cause": cause, "severity": grade, "role": "loss", "independent": True}
            yield LOSS.fault("", what, **more)
        if any(grade == "fail" for _, _, grade in told):
            return


# ---- the loss as a whole ------------------------------------------------------------------------


def _path(observation: Observation, flow: Flow) -> Faults:
    """Yield the first fault of the loss as a whole.

    It is independent of the output if no gradient came; it may reach layers without the output.
    """
    path, root, loss = observation.loss_path, observation.layers[""], observation.loss
    if path is None:
        return
    sent = root.gradients
    seen = any(record.gradients is not None for record in observation.layers.values())
    is_something = loss is not None and math.isfinite(loss) and loss != 0.0
    if (shapes := _all_pairs(flow)) is not None:
        is_output = root.activations is not None and root.activations.shape == shapes[1]
        yield broadcast("the loss", *(reversed(shapes) if is_output else shapes))
    elif path.reaches_output is False and observation.backward and not seen:
        cause = "it is computed from something else, or from a copy without a graph"
        yield "the loss does not depend on the output of the model", cause, "fail"
    elif is_switched_off(observation):
        cause = "a loss weight of zero, or a mask that selects nothing"
        yield "the loss is multiplied by zero, and passes no gradient to the output", cause, "fail"
    elif is_something and sent and sent.finite_count == sent.count > 0 == sent.abs_max:
        cause = "the loss is constant: what it computes cancels out, or is multiplied by zero"
        if root.activations is not None and root.activations.dtype == "float16":
            cause = UNDERFLOW
        elif flat := sorted(having("flat").intersection(path.operations)):
            cause = f"{' and '.join(flat)} in the loss passes no gradient at these values"
        what = f"the loss is {loss:.3g}, and its gradient at the output is exactly zero"
        yield what, cause, "fail"
    elif path.uses_target is False and all(call.target is None for call in observation.loss_calls):
        cause = (
            "it compares the output with nothing, or with itself; a parameter that is not needed "
            "is named with a leading underscore: loss=lambda output, _: ..."
        )
        yield "the loss never reads its target", cause, "fail"


def broadcast(
    what: str, output: tuple[int, ...], target: tuple[int, ...]
) -> tuple[str, str, Severity]:
    """Return that numbers of two shapes are compared, all with all."""
    shapes = f"{what} compares an output of shape {output} with a target of shape {target}"
    cause = "one has a dimension too many: squeeze(1) the output, or unsqueeze(1) the target"
    return f"{shapes}: broadcast, each sample with every other's target", cause, "fail"


def _all_pairs(flow: Flow) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shapes of as many numbers that arithmetic of the loss broadcasts: (N, 1) and (N,).

    A loss that itself brings one into that shape compares all pairs on purpose.
    """
    vertices = flow.graph.vertices
    for vertex in flow.operation_vertices.values():
        sizes = vertex.facts.get("sizes") if vertex.call < 0 and vertex.live else None
        if sizes is None or not vertex.has("sum", "product", "quotient"):
            continue
        one, other, _ = sizes
        held = (vertices[n] for operand in vertex.operands for n in flow.as_it_is(operand))
        is_meant = any(  # `x[:, None]` is an `unsqueeze`; to squeeze is to forget the other side
            v.call < 0 and (v.facts.get("sizes") or v.has("slice") or v.name == "unsqueeze")
            for v in held
        )
        if len(one) != len(other) and math.prod(one) == math.prod(other) and not is_meant:
            return one, other
    return None


def is_switched_off(observation: Observation) -> bool:
    """Whether the loss is zero by a factor; a hinge may be zero because all samples satisfy it."""
    path = observation.loss_path
    if observation.loss != 0.0 or path is None or not path.switched_off:
        return False
    return having("hinge").isdisjoint(path.operations)


def _signs(observation: Observation, flow: Flow) -> Faults:
    """Yield a loss that can never be positive, and terms of it that it falls with.

    A term is a call of one of torch's losses, or a divergence from a normal distribution in closed
    form; one that is all of the loss is negated, others may be an adversary's.
    """
    loss, path = observation.loss or 0.0, observation.loss_path
    vertices, signs = flow.graph.vertices, summands(flow)
    terms = [n for n in signs if vertices[n].has("loss") or _is_divergence(n, signs, flow)]
    negated = [n for n in terms if signs[n] < 0]
    ends = [n for n in signs if not set(vertices[n].operands).intersection(signs)]
    is_all = bool(negated) and len(ends) == len(terms) == 1
    cause = "a minus sign too many or too few"
    if loss < 0.0 and (is_all or (path is not None and path.sign < 0)):
        what = f"the loss is {loss:.3g} and can never be positive: it is negated"
        yield what, f"{cause}: minimising it makes the model worse", "fail"
        return
    for vertex in (vertices[n] for n in negated if not is_all):
        what = f"`{vertex.name}`" if vertex.has("loss") else "the divergence of a normal"
        what = f"the loss falls as {what}{at(vertex.line)} grows: it is subtracted"
        yield what, f"{cause}; an adversary's loss may be meant so", "warn"
    for vertex in flow.operation_vertices.values():
        is_pair = len(vertex.operands) == 2 and len({*vertex.operands}) == 1 and not vertex.cuts
        if is_pair and vertex.call < 0 and vertex.live and vertex.has("difference"):
            what = f"the loss subtracts a value from itself{at(vertex.line)}: that is zero"
            yield what, "a copied line: one of the two should be another", "fail"


def summands(flow: Flow) -> dict[int, float]:
    """Return what the loss is summed up of, and times what; 0 where it is by both signs."""
    signs, vertices = dict[int, float](), flow.graph.vertices
    todo = [] if flow.graph.loss is None else [(flow.graph.loss, 1.0)]
    while todo:
        number, sign = todo.pop()
        if (before := signs.setdefault(number, sign)) != sign:
            signs[number] = before if before * sign > 0.0 else 0.0
            continue
        vertex = vertices[number]
        operands, factor = vertex.operands, vertex.facts.get("number", 0.0)
        if vertex.has("difference"):
            if len(operands) == 2 and not vertex.cuts:  # what has no gradient stands last
                todo += [(operands[0], sign), (operands[1], -sign)]
            elif len(operands) == 1:
                todo.append((operands[0], -sign if vertex.function == "rsub" else sign))
        elif vertex.has("sum", "join", "total", "average", "view") and not vertex.has("detach"):
            todo += [(operand, sign) for operand in operands]
        elif vertex.has("turns_sign") and not vertex.has("loss"):
            todo += [(operand, -sign) for operand in operands[:1]]
        elif vertex.has("product", "quotient") and len(operands) == 1 and factor:
            todo.append((operands[0], sign / factor if vertex.has("quotient") else sign * factor))
    return signs


def _is_divergence(number: int, signs: dict[int, float], flow: Flow) -> bool:
    """Whether it is the variance of ``mean ** 2 + exp(v) - v``, beside the logarithm of it."""
    if (exponent := _exponent(number, flow)) is None:
        return False
    sign, vertices = signs[number], flow.graph.vertices
    made = ((vertices[n], other) for n, other in signs.items() if other * sign > 0.0)
    squares = (v for v, _ in made if v.function in ("pow", "square", "mul") and not v.facts)
    return (
        any(len({*v.operands}) == 1 for v in squares) and signs.get(exponent[0], 0.0) * sign < 0.0
    )


def _exponent(number: int, flow: Flow) -> tuple[int, float] | None:
    """Return what an exponential, or a root of one, is taken of, and times what."""
    number, scale, vertices = flow.as_it_is(number, "whole")[-1], 1.0, flow.graph.vertices
    if vertices[number].function == "sqrt" and vertices[number].operands:
        number, scale = flow.as_it_is(vertices[number].operands[0], "whole")[-1], 0.5
    if vertices[number].function != "exp" or not vertices[number].operands:
        return None
    number, times = unscaled(vertices[number].operands[0], flow, "whole")
    return number, scale * times


def unscaled(number: int, flow: Flow, layout: str) -> tuple[int, float]:
    """Return what a vertex is a multiple of, in another layout, and how many times that."""
    scale, made = 1.0, flow.graph.vertices[number]
    while made.operands:
        factor = made.facts.get("number", 0.0) if len(made.operands) == 1 else 0.0
        if made.has("margin") and made.has("product", "quotient") and factor:  # no 1 / x
            scale *= 1.0 / factor if made.has("quotient") else factor
        elif not made.has(layout):
            break
        number = made.operands[0]
        made = flow.graph.vertices[number]
    return number, scale


def _latents(observation: Observation, flow: Flow) -> Faults:
    """Yield draws ``mean + s * noise`` by another spread than the one whose divergence is taken.

    The divergence of a normal is ``mean ** 2 + exp(v) - v``, in which ``exp(v)`` is the square of
    s. What is never negative is no logarithm of a spread: noise would never be less than one.
    """
    vertices, weights = flow.graph.vertices, summands(flow)
    spreads = [  # of what noise is multiplied by: where, what it is the exponential of, times what
        (vertex.line, *exponent)
        for vertex in flow.operation_vertices.values()
        if vertex.has("product") and len(vertex.operands) == 2
        for one, other in (vertex.operands, vertex.operands[::-1])
        if vertices[other].has("draw") and (exponent := _exponent(one, flow))
    ]
    variances = dict[int, float]()
    for number in (n for n in weights if _is_divergence(n, weights, flow)):
        base, times = _exponent(number, flow) or (0, 1.0)
        spreads.append((vertices[number].line, base, 0.5 * times))
        variances[base] = times
    for line, base, times in spreads if variances else ():
        made, square = vertices[base], variances.get(base, 2.0 * times)
        record = observation.layers.get(made.name) if made.kind == "call" else None
        name = made.function if record is None else str(record.activation)
        if name in having("never_negative"):
            what = f"a spread{at(line)} is the exponential of `{name}`: it is never below one"
            yield what, "the logarithm of a spread may be of either sign", "warn"
            return
        if not math.isclose(2.0 * times, square, rel_tol=1e-4):
            what = f"noise{at(line)} is scaled by exp({times:g} v), and the divergence takes "
            what += f"exp({square:g} v) for its variance"
            cause = "a variance in the place of a deviation: that is exp(0.5 * logvar)"
            yield what, cause, "fail"


def _alike_targets(observation: Observation, flow: Flow) -> Faults:
    """Yield one constant asked of a layer that learns, for data and for what is made of it alike.

    Of what is made alone it is what a generator is taught by.
    """
    vertices, asked = flow.graph.vertices, dict[tuple[str, str], list[set[str]]]()
    for number, vertex in flow.operation_vertices.items():
        if vertex.has("loss") and vertex.live and len(vertex.operands) == 2:
            made, target = (flow.as_it_is(operand)[-1] for operand in vertex.operands)
            feeding = flow.names_of(flow.walk([number], back=True)) & observation.layers.keys()
            key = str(flow.homes[made]), vertices[target].function
            if vertices[target].has("zeros") or key[1] in ("ones", "ones_like", "new_ones"):
                asked.setdefault(key, []).append(feeding)
    for (layer, constant), ways in asked.items():
        is_learning = layer in observation.layers and learns(observation.layers[layer])
        if is_learning and any(one < other for one in ways for other in ways):
            what = f"all that {layer!r} gives out is asked to be `{constant}`, of whatever it is"
            yield what, "real and made have one target: nothing is told apart", "warn"


def _dead(_: Observation, flow: Flow) -> Faults:
    """Yield calls of torch's losses whose value goes nowhere."""
    for vertex in flow.operation_vertices.values() if flow.graph.loss is not None else ():
        if vertex.facts.get("unused") and vertex.has("loss"):
            what = f"the value of `{vertex.name}`{at(vertex.line)} is dropped: nothing takes it"
            cause = "`loss = ` where `loss += ` was meant, or a term that is left out of the sum"
            yield what, cause, "warn"


# ---- what reaches the loss without a gradient, and what gets one by mistake ---------------------


def _learning(numbers: set[int], observation: Observation, flow: Flow) -> bool:
    """Whether trainable parameters are among vertices, or of layers that are."""
    names, layers = flow.names_of(numbers), observation.layers.values()
    return any(
        record.name in names or dotted(record.name, name) in names
        for record in layers
        for name in trainable(record)
    )


def _terms(observation: Observation, flow: Flow) -> Faults:
    """Yield summands of the loss that values of parameters get to, and no gradient comes from."""
    vertices, todo = flow.graph.vertices, [flow.graph.loss or 0]
    met, lines, inner = set[int](), set[str](), set[int]()  # the last are parts of each number
    for number in todo:  # which grows
        vertex = vertices[number]
        if number in met or not vertex.operands:
            continue
        met.add(number)
        is_mean = vertex.has("total", "average")
        if number in inner or (is_mean and not vertices[vertex.operands[0]].has("join")):
            inner.update(vertex.operands[: 1 if is_mean else None])
        is_scaled = vertex.has("product", "quotient") and len(vertex.operands) == 1
        factors = [vertices[o] for o in vertex.operands if vertex.has("product")]
        is_off = any(one.kind == "constant" and one.has("zeros") for one in factors)
        if vertex.live and not is_off:
            is_sum = vertex.has("sum", "join", "turns_sign") and not vertex.has("loss")
            todo += vertex.operands if is_sum or is_scaled else vertex.operands[:is_mean]
            continue
        before = flow.walk([number], back=True)
        is_made = flow.names_of(before) & observation.layers.keys()
        if not vertex.line or vertex.line in lines or not is_made:
            continue
        # a stop that is written may be meant
        is_stopped = is_off or any(vertices[n].has("detach") for n in before)
        is_taught = _learning(before, observation, flow)
        if number in inner and (is_off or not is_taught):  # of a frozen reference
            continue
        is_sure = is_taught and not is_stopped
        lines.add(vertex.line)
        cause = (
            "it counts in the loss and teaches nothing: a weight of zero, .item(), detach, no_grad,"
            " argmax, a comparison or rounding on its way, or all it is made of is frozen"
        )
        what = f"a term of the loss, `{vertex.name}`{at(vertex.line)}, passes no gradient back"
        yield what, cause, "fail" if is_sure else "warn"


def _targets(_: Observation, flow: Flow) -> Faults:
    """Yield targets that are a sum of data and of what a network gives, with its gradient."""
    vertices = flow.graph.vertices
    for vertex in flow.operation_vertices.values():
        is_pair = len(vertex.operands) == 2 and vertex.live and not vertex.cuts
        is_loss = vertex.has("elementwise") or (vertex.has("difference") and vertex.call < 0)
        if not is_pair or not is_loss:
            continue
        sides = vertex.operands if vertex.has("difference") else vertex.operands[1:]
        for sum_ in (n for side in sides for n in flow.as_it_is(side) if vertices[n].has("sum")):
            parts = [flow.as_it_is(operand)[-1] for operand in vertices[sum_].operands]
            is_data = any(vertices[part].kind in ("input", "target") for part in parts)
            if is_data and vertices[sum_].call < 0 and all(vertices[s].live for s in sides):
                what = f"the target of `{vertex.name}`{at(vertex.line)} has a gradient: it is data"
                cause = "the target moves towards the prediction: compute it under no_grad"
                what += f" and what a network gives, added{at(vertices[sum_].line)}"
                yield what, f"{cause}, or detach", "warn"


def _draws(observation: Observation, flow: Flow) -> Faults:
    """Yield random draws by trainable values that pass none of them a gradient, fed to layers."""
    vertices = flow.graph.vertices
    sampled = [(n, v) for n, v in flow.operation_vertices.items() if v.has("sample")]
    to_loss = flow.walk([flow.graph.loss or 0] if sampled else (), "gradient", back=True)
    for number, vertex in sampled:
        made_by = {held for operand in vertex.operands for held in flow.as_it_is(operand)}
        origins = {held for held in made_by if vertices[held].live}
        is_flat = not vertex.live or vertex.has("flat")  # of bernoulli gradients of zero come
        if not is_flat or not origins:
            continue
        between = flow.walk([number], "from operations")
        taking = {n for n in between & to_loss if flow.homes[n] is not None}
        is_straight = any(vertices[n].has("sum") for n in between & flow.walk(origins, "gradient"))
        if not is_straight and _learning(taking, observation, flow):
            what = f"`{vertex.name}`{at(vertex.line)} draws by values that are trained, feeds a"
            cause = "reparametrise: mean + std * torch.randn_like(std), .rsample(), or straight"
            cause += " through; of a policy it may be meant"
            yield f"{what} layer and passes no gradient back", cause, "warn"


def _spread(_: Observation, flow: Flow) -> Faults:
    """Yield sums over the batch that are added to one number a sample."""
    vertices = flow.graph.vertices
    for vertex in flow.operation_vertices.values():
        count = vertex.facts.get("samples") if vertex.live and not vertex.cuts else None
        for operand in vertex.operands if count is not None else ():
            total = vertices[flow.as_it_is(operand, "view", "product", "turns_sign")[-1]]
            sizes = total.facts.get("sizes", ((),))[0] if total.has("total") else ()
            if sizes[:1] == (count,) and len(total.facts.get("dims", ())) == len(sizes):
                what = f"a sum over the whole batch{at(total.line)} is added to one number a sample"
                cause = f"it counts {count} times as much as meant: sum over the other dimensions"
                cause += " alone, or divide by the number of samples"
                yield f"{what}{at(vertex.line)}", cause, "warn"


_RULES: list[Rule] = [_path, _signs, _dead, _latents, _alike_targets]
_OF_THE_GRAPH: list[Rule] = [_terms, _targets, _draws, _spread]


# ---- tasks --------------------------------------------------------------------------------------

_MOST_BY_WEIGHT = 1e4
"""Auxiliary terms are given weights down to 1e-3 on purpose; units and sums go beyond."""


def unbalanced(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield tasks that ask nothing of any layer, and pairs of which one drowns the other."""
    layers, silent = observation.layers, []
    for task in observation.tasks:
        reached = [layers[name] for name in task.gradient_norms if name in layers]
        is_silent = reached and not any(task.gradient_norms.values())
        if is_silent and math.isfinite(task.loss) and task.loss != 0.0:
            silent.append(task)
            message = (
                f"task {task.name!r} has a loss of {task.loss:.3g} and asks nothing of any of the "
                f"{len(reached)} layers that it reaches: its gradient is exactly zero"
            )
            cause = "it is flat here: rounded, clamped, chosen by an index, or times zero"
            yield TASK_BALANCE.fault(max(reached, key=completed), message, cause=cause)
    for pair in combinations(observation.tasks, 2):
        names = [n for n in pair[0].gradient_norms if n in pair[1].gradient_norms and n in layers]
        if not names or any(task in silent for task in pair):
            continue
        layer = max((layers[name] for name in names), key=completed)
        weak, strong = sorted(pair, key=lambda task: task.gradient_norms[layer.name])
        high, low = strong.gradient_norms[layer.name], weak.gradient_norms[layer.name]
        limit = settings.limit("max_task_ratio", layer.name)
        if not (math.isfinite(high) and high > limit.value * low):
            continue
        if weak.loss == 0.0:
            reason = f"the loss of task {weak.name!r} is zero: it asks for nothing on this batch"
            yield TASK_BALANCE.inconclusive(layer, reason)
            continue
        ratio = high / low if low else math.inf
        may_be_meant = limit.origin == "default" and ratio <= _MOST_BY_WEIGHT
        message = (
            f"task {strong.name!r} has {ratio:.3g} times the gradient of task {weak.name!r} here, "
            f"where the two meet (norms {high:.3g} and {low:.3g})"
        )
        cause = (
            f"they differ in scale (losses of {strong.loss:.3g} and {weak.loss:.3g}): weight "
            f"{weak.name!r} by about {min(ratio, 1e9):.0g}, or normalise the targets"
        )
        grade: Severity = "fail"
        if may_be_meant:
            cause, grade = f"{cause}; a small weight may be meant so", "warn"
        told: dict[str, Any] = {"cause": cause, "independent": True, "severity": grade}
        yield TASK_BALANCE.violation(layer, message, value=ratio, limit=limit, **told)
