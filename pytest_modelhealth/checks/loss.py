"""A loss that is given what it takes, and that says how wrong the output is; tasks in balance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, zip_longest
from typing import Any

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    at,
    called,
    completed,
    flow_of,
    innermost,
    is_fresh,
    linear_maps,
    trainable,
)
from pytest_modelhealth.checks.paths import is_floating
from pytest_modelhealth.checks.zero_gradients import UNDERFLOW
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, LayerRecord, LossCall, Observation
from pytest_modelhealth.report.flow import Vertex
from pytest_modelhealth.report.flow.inferred import same_values
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import dotted

LOSS = CHECKS["loss"]
TASK_BALANCE = CHECKS["task_balance"]

# ---- what a loss function is given --------------------------------------------------------------

_ENDS = {
    "hardsigmoid": (0.0, 1.0),
    "relu": (0.0, None),
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
}
"""Between what the values of a function lie."""
_FAR_BOUND = 10.0
"""Logits that are clamped this far out leave a probability of e^-10: a guard."""
_REACHABLE = 0.1
"""A loss that logits cannot get below; where they may lie 5 apart, 5 classes have 0.03."""
_UNNORMALISED = 0.1
_FEWEST_ROWS = 2
_FEWEST_OF_ONE_CLASS = 16
_PADDED = 0.05
_MOST_IGNORED = 0.98
_ALIKE = 0.1
_SEVERAL = 1.5
_ROUNDING = 0.01


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what is wrong with the loss, up to the first that fails: the rest follows from it."""
    for stage in (_calls, _batch_softmax, _path, _signs, _dead, _flow, _initial):
        found = list(stage(observation, settings))
        yield from found
        if any(one.grade != "warn" for one in found):
            return


def _fault(message: str, value: float, cause: str, layer: str = "", **more: Any) -> Finding:
    return LOSS.violation(layer, message, value=value, cause=cause, independent=True, **more)


def _calls(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield the first contract that each call breaks: a later one would only follow from it."""
    contracts = (_of_classes, _of_logits, _of_log_probabilities, _of_targets)
    for call in observation.loss_calls:
        found = next((f for contract in contracts for f in contract(call, observation)), None)
        if found is not None:
            yield replace(found, layer=_culprit(call, observation).name)


def _of_classes(call: LossCall, observation: Observation) -> Iterator[Finding]:
    """Yield what is wrong with class indices, or with what is taken for classes."""
    function, targets = call.function, call.targets
    ignore = call.options.get("ignore_index", -100)
    if targets is not None and targets.ignored >= targets.count:
        yield _fault(
            f"{function} ignores all of its {targets.count} targets (ignore_index={ignore})",
            float(targets.ignored),
            "the targets are masked or padded everywhere: look at how they are built",
        )
    elif targets is not None and targets.ignored > _MOST_IGNORED * targets.count:
        yield _fault(
            f"{function} ignores {targets.ignored} of its {targets.count} targets "
            f"(ignore_index={ignore})",
            float(targets.ignored),
            "nearly all are masked: look at how they are built",
            severity="warn",
        )
    elif targets is not None and targets.skips_a_class and ignore in range(call.classes):
        yield _fault(
            f"{function} ignores class {ignore} (ignore_index={ignore}), which stands "
            f"{targets.ignored} times among the {targets.count} targets, and not as padding",
            float(targets.ignored),
            "a class that counts has the index of padding: pad with -100, or number classes from 1",
            severity="warn",
        )
    elif targets is not None and targets.tail not in (None, ignore):
        # as many ids of a table are padding, known where that is 0, as targets are; whoever takes
        # the loss of each token may mask it afterwards
        share = targets.tail_share
        tables = [
            record
            for record in called(observation)
            if record.options.get("padding_idx") == 0 and (ids := record.inputs) is not None
            if ids.count == targets.count
            and math.isclose(ids.zero_count / ids.count, share, rel_tol=_ALIKE)
        ]
        if tables and share >= _PADDED and call.options.get("reduction") != "none":
            yield _fault(
                f"{share:.0%} of the targets of {function} are padding: they end in "
                f"{targets.tail}, as the ids of {tables[0].label!r} in its padding_idx, and are "
                "not ignored",
                share,
                f"pass ignore_index={targets.tail}, or replace padded targets by -100",
            )
    if function == "cross_entropy" and call.classes == 1:
        yield _fault(
            "cross_entropy over a single class is zero whatever the output",
            1.0,
            "one output for a yes or no: use binary_cross_entropy_with_logits",
        )


def _of_logits(call: LossCall, observation: Observation) -> Iterator[Finding]:
    """Yield what is given in the place of logits: by its values, or by the ends of what made it."""
    function, made_by, given = call.function, call.made_by, call.input
    if call.over_batch:
        yield _fault(
            f"the input of {function} sums to one over the batch, not over its {call.classes} "
            "classes",
            1.0,
            "a softmax along dimension 0, where the samples lie: use dim=1, or dim=-1",
        )
    is_softmax = function == "cross_entropy"
    if is_softmax and call.rows == "probabilities":
        rows = given.count // call.classes if given is not None else 0
        if rows < _FEWEST_ROWS and made_by != "softmax":
            why = f"its {rows} row sums to one; give at least {_FEWEST_ROWS} samples"
            yield LOSS.inconclusive("", why)
        yield _fault(
            "cross_entropy is given probabilities: every row of its input sums to one",
            1.0,
            "a softmax before cross_entropy, which applies one itself: pass it the logits",
        )
    along = None if given is None else min(1, len(given.shape) - 1)
    is_normalised = is_softmax and made_by == "log_softmax" and not call.rows
    if is_normalised and call.made_along not in (None, along) and not call.over_batch:
        yield _fault(
            f"cross_entropy is given a log_softmax over dimension {call.made_along}: its classes "
            f"lie in dimension {along}",
            1.0,
            "cross_entropy takes logits, and normalises them itself: leave out the log_softmax",
        )
    if function not in having("logits") or given is None or not given.finite_count:
        return
    maker = made_by or _culprit(call, observation).activation or ""
    low, high = _ENDS.get(maker) or call.clamped or (None, None)
    what = f"the output of a {maker}" if maker in _ENDS else "what was clamped"
    if low is not None and high is not None:
        reach = high - low  # the least loss of a target for logits that differ by it at most
        least = math.log1p(math.exp(-reach / 2.0))
        if is_softmax:
            least = math.log1p((call.classes - 1) * math.exp(-reach))
        if least > _REACHABLE:
            yield _fault(
                f"{function} takes logits and is given {what}: some that are held between {low:g} "
                f"and {high:g}",
                least,
                f"no class can get more than {math.exp(-least):.0%}: leave out the "
                f"{maker if maker in _ENDS else 'clamp'} before it, which is one too many",
            )
    met = [f"{end:g}" for end, seen in ((low, given.min), (high, given.max)) if end == seen]
    if met and all(abs(float(end)) < _FAR_BOUND for end in met):
        yield _fault(
            f"{function} takes logits and is given {what}, many of which are {' or '.join(met)}",
            1.0,
            "what lies on the flat side gets no gradient, and all logits there are one: leave it "
            "out",
        )


def _of_log_probabilities(call: LossCall, _: Observation) -> Iterator[Finding]:
    """Yield what is given in the place of log-probabilities."""
    function, taken = call.function, call.input
    if function not in having("log_probabilities") or call.log_normalizer is None:
        return
    is_above = function == "kl_div" and taken is not None and taken.max > _ROUNDING
    is_known = call.rows == "log_probabilities" or function == "kl_div"
    if call.rows == "probabilities":
        given, cause = "probabilities", "the logarithm is missing: use log_softmax, not softmax"
    elif is_above and taken is not None:
        given, cause = f"values up to {taken.max:.3g}", "log_softmax before it is missing"
    elif is_known or call.log_normalizer <= _UNNORMALISED:
        return
    elif call.made_by == "log_softmax":
        given = f"what does not sum to one over its {call.classes} classes"
        cause = "log_softmax runs along another dimension than that of the classes: check its dim"
    else:
        given, cause = "logits", "log_softmax before it is missing: use cross_entropy on logits"
    message = f"{function} takes log-probabilities and is given {given}"
    yield _fault(message, call.log_normalizer, cause)


def _of_targets(call: LossCall, observation: Observation) -> Iterator[Finding]:
    """Yield what is wrong with targets: numbers, or class indices that are all one."""
    function, given, target, classes = call.function, call.input, call.target, call.classes
    is_finite = target is not None and target.finite_count == target.count > 0
    if function == "cross_entropy" and call.targets is None and given and target and is_finite:
        total = target.mean * classes
        is_share = given.shape == target.shape and target.min >= 0.0 and target.max <= 1.0
        if is_share and classes >= _FEWEST_ROWS and total > _SEVERAL:
            yield _fault(
                f"cross_entropy takes targets that sum to one over the {classes} classes; these "
                f"sum to {total:.3g}",
                total,
                "several labels at once: use binary_cross_entropy_with_logits, or divide each row "
                "of the targets by its sum",
            )
    is_kl = function == "kl_div" and not call.options.get("log_target")
    is_kl |= function == "cross_entropy" and call.targets is None
    if is_kl and target and is_finite and target.min < -_ROUNDING:
        yield _fault(
            f"{function} takes probabilities as targets and is given {target.min:.4g}",
            target.min,
            "logits or log-probabilities in the place of probabilities: apply softmax, or say "
            "log_target=True to kl_div",
        )
    is_binary = function.startswith("binary_cross_entropy")
    if is_binary and target and is_finite and max(-target.min, target.max - 1.0) > _ROUNDING:
        yield _fault(
            f"{function} takes targets from 0 to 1 and is given [{target.min:.4g}, "
            f"{target.max:.4g}]",
            target.max if target.max > 1.0 else target.min,
            "masks of 0 and 255, labels of -1 and 1, class indices, or values in another unit: "
            "bring the targets to [0, 1]",
        )
    if function in having("elementwise") and given and target:
        pairs = zip_longest(given.shape[::-1], target.shape[::-1], fillvalue=1)
        if math.prod(map(max, pairs)) > max(math.prod(given.shape), math.prod(target.shape)):
            yield _broadcast(function, given.shape, target.shape)
    if call.targets is not None and call.targets.only is not None and classes >= _FEWEST_ROWS:
        # an index that has no row of weights is a place among candidates (He et al. 2020, MoCo)
        weights = (s for record in called(observation) for s in record.parameters.values())
        count = call.targets.count - call.targets.ignored
        if count >= _FEWEST_OF_ONE_CLASS and any(classes in s.shape[:2] for s in weights):
            yield _fault(
                f"all {count} targets of {function} are class {call.targets.only}, of {classes} "
                "classes",
                float(count),
                "a placeholder, labels that did not load, or data sorted by class and not "
                "shuffled; a batch of one class may be meant, too",
                severity="warn",
            )


def _broadcast(what: str, output: tuple[int, ...], target: tuple[int, ...]) -> Finding:
    return _fault(
        f"{what} compares an output of shape {output} with a target of shape "
        f"{target}: broadcast, every sample is compared with every other's target",
        float(math.prod(output)),
        "one of the two has a dimension too many: squeeze(1) the output, or unsqueeze(1) the "
        "target",
    )


def _batch_softmax(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield a softmax over the samples in a model that gives something for each of them.

    Pooling over a set (multiple instances, the nodes of a graph) gives one thing for all, or
    weights with nothing beside the set; a square of similarities is normalised either way.
    """
    samples = observation.samples // max(observation.batches, 1)
    whole = observation.layers[""].activations
    if whole is None or whole.shape[:1] != (samples,):
        return
    for record in called(observation):
        dimension = record.options.get("dim")
        if record.activation not in having("softmax") or not isinstance(dimension, int):
            continue
        shape = () if record.activations is None else record.activations.shape
        is_over_samples = len(shape) > 1 and shape[0] == samples and dimension in (0, -len(shape))
        if is_over_samples and shape[1] != samples and math.prod(shape[1:]) > 1:
            message = (
                f"its {record.activation} runs along dimension 0, over the {samples} samples of "
                "the batch"
            )
            yield _fault(message, 0.0, "dim=0 is the batch: use dim=1, or dim=-1", record.name)


# ---- the loss as a whole ------------------------------------------------------------------------


def _path(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield the first fault of the loss as a whole.

    It is independent of the output if no gradient came; it may reach layers without the output.
    """
    path, root, loss = observation.loss_path, observation.layers[""], observation.loss
    if path is None:
        return
    sent = root.gradients
    seen = any(record.gradients is not None for record in observation.layers.values())
    is_something = loss is not None and math.isfinite(loss) and loss != 0.0
    if (shapes := _all_pairs(flow_of(observation))) is not None:
        is_output = root.activations is not None and root.activations.shape == shapes[1]
        yield _broadcast("the loss", *(reversed(shapes) if is_output else shapes))
        return
    if path.reaches_output is False and observation.backward and not seen:
        message = "the loss does not depend on the output of the model"
        cause = "it is computed from something else, or from a copy without a graph"
    elif is_switched_off(observation):
        message = "the loss is multiplied by zero, and passes no gradient to the output"
        cause = "a loss weight of zero, or a mask that selects nothing"
    elif is_something and sent and sent.finite_count == sent.count > 0 == sent.abs_max:
        message = f"the loss is {loss:.3g}, and its gradient at the output is exactly zero"
        cause = "the loss is constant: what it computes cancels out, or is multiplied by zero"
        if root.activations is not None and root.activations.dtype == "float16":
            cause = UNDERFLOW
        elif flat := sorted(having("flat").intersection(path.operations)):
            cause = f"{' and '.join(flat)} in the loss passes no gradient at these values"
    elif path.uses_target is False and all(call.target is None for call in observation.loss_calls):
        message = "the loss never reads its target"
        cause = (
            "it compares the output with nothing, or with itself; a parameter that is not needed "
            "is named with a leading underscore: loss=lambda output, _: ..."
        )
    else:
        return
    yield _fault(message, 0.0, cause, role="loss")


def _all_pairs(flow: Flow) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shapes of as many numbers that arithmetic of the loss broadcasts: (N, 1) and (N,).

    A loss that itself brings one into that shape compares all pairs on purpose.
    """
    vertices = flow.graph.vertices
    for vertex in vertices:
        sizes = vertex.facts.get("sizes") if vertex.call < 0 and vertex.live else None
        if sizes is None or not vertex.has("sum", "product", "quotient"):
            continue
        one, other, _ = sizes
        held = (vertices[n] for operand in vertex.operands for n in flow.as_it_is(operand))
        is_meant = any(v.call < 0 and (v.facts.get("sizes") or v.has("slice")) for v in held)
        if len(one) != len(other) and math.prod(one) == math.prod(other) and not is_meant:
            return one, other
    return None


def is_switched_off(observation: Observation) -> bool:
    """Whether the loss is zero by a factor; a hinge may be zero because all samples satisfy it."""
    path = observation.loss_path
    if observation.loss != 0.0 or path is None or not path.switched_off:
        return False
    return having("hinge").isdisjoint(path.operations)


def _signs(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield a loss that can never be positive, and terms of it that it falls with.

    A term is a call of one of torch's losses, or a divergence from a normal distribution in closed
    form; one that is all of the loss is negated, others may be an adversary's.
    """
    flow, loss, path = flow_of(observation), observation.loss or 0.0, observation.loss_path
    vertices, signs = flow.graph.vertices, _summands(flow)
    terms = [n for n in signs if vertices[n].has("loss") or _is_divergence(n, signs, flow)]
    negated = [n for n in terms if signs[n] < 0]
    ends = [n for n in signs if not set(vertices[n].operands).intersection(signs)]
    is_all = bool(negated) and len(ends) == len(terms) == 1
    if loss < 0.0 and (is_all or (path is not None and path.sign < 0)):
        message = f"the loss is {loss:.3g} and can never be positive: it is negated"
        cause = "a minus sign too many or too few: minimising it makes the model worse"
        yield _fault(message, loss, cause, role="loss")
        return
    for vertex in dict.fromkeys(vertices[n] for n in negated if not is_all):
        what = f"`{vertex.name}`" if vertex.has("loss") else "the divergence of a normal"
        yield _fault(
            f"the loss falls as {what}{at(vertex.line)} grows: it is subtracted",
            -1.0,
            "a minus sign too many or too few; an adversary's loss may be meant so",
            role="loss",
            severity="warn",
        )
    for vertex in vertices:
        if vertex.call < 0 and vertex.live and vertex.has("difference") and _is_zero(vertex):
            message = f"the loss subtracts a value from itself{at(vertex.line)}: that is zero"
            yield _fault(
                message, 0.0, "a copied line: one of the two should be another", role="loss"
            )


def _is_zero(vertex: Vertex) -> bool:
    return len(vertex.operands) == 2 and len({*vertex.operands}) == 1 and not vertex.cuts


def _summands(flow: Flow) -> dict[int, int]:
    """Return what the loss is summed up of, and by which sign; 0 where it is by both."""
    signs, vertices = dict[int, int](), flow.graph.vertices
    todo = [] if flow.graph.loss is None else [(flow.graph.loss, 1)]
    while todo:
        number, sign = todo.pop()
        if signs.setdefault(number, sign) != sign:
            signs[number] = 0
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
            todo.append((operands[0], sign if factor > 0 else -sign))
    return signs


def _is_divergence(number: int, signs: dict[int, int], flow: Flow) -> bool:
    """Whether it is the variance of ``mean ** 2 + exp(v) - v``, beside the logarithm of it."""
    vertex, sign = flow.graph.vertices[number], signs[number]
    squares = any(
        v.function in ("pow", "square") and signs[n] == sign
        for n in signs
        for v in (flow.graph.vertices[n],)
    )
    return vertex.function == "exp" and squares and signs.get(vertex.operands[0]) == -sign


def _dead(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield calls of torch's losses whose value goes nowhere."""
    flow = flow_of(observation)
    for vertex in flow.graph.vertices if flow.graph.loss is not None else ():
        if vertex.facts.get("unused") and vertex.has("loss"):
            yield _fault(
                f"the value of `{vertex.name}`{at(vertex.line)} is dropped: nothing takes it",
                0.0,
                "`loss = ` where `loss += ` was meant, or a term that is left out of the sum",
                role="loss",
                severity="warn",
            )


# ---- what reaches the loss without a gradient, and what gets one by mistake ---------------------


def _flow(observation: Observation, _: Settings) -> Iterator[Finding]:
    flow = flow_of(observation)
    if observation.loss_path is None and not observation.loss_calls:
        return
    if observation.backward and flow.is_exact and flow.graph.loss is not None:
        yield from _terms(observation, flow)
        yield from _targets(flow)
        yield from _draws(observation, flow)
        yield from _spread(flow)


def _learning(numbers: set[int], observation: Observation, flow: Flow) -> bool:
    """Whether trainable parameters are among vertices, or of layers that are."""
    names, layers = flow.names_of(numbers), observation.layers.values()
    return any(
        record.name in names or dotted(record.name, name) in names
        for record in layers
        for name in trainable(record)
    )


def _terms(observation: Observation, flow: Flow) -> Iterator[Finding]:
    """Yield summands of the loss that values of parameters get to, and no gradient comes from."""
    vertices, todo = flow.graph.vertices, [flow.graph.loss or 0]
    met, lines = set[int](), set[str]()
    for number in todo:  # which grows
        vertex = vertices[number]
        if number in met or not vertex.operands:
            continue
        met.add(number)
        is_joined = vertex.has("total", "average") and vertices[vertex.operands[0]].has("join")
        is_scaled = vertex.has("product", "quotient") and len(vertex.operands) == 1
        factors = [vertices[o] for o in vertex.operands if vertex.has("product")]
        is_off = any(one.kind == "constant" and one.has("zeros") for one in factors)
        if vertex.live and not is_off:
            is_sum = vertex.has("sum", "join", "turns_sign") and not vertex.has("loss")
            todo += vertex.operands if is_sum or is_joined or is_scaled else ()
            continue
        before = flow.walk([number], back=True)
        is_made = flow.names_of(before) & observation.layers.keys()
        if not vertex.line or vertex.line in lines or not is_made:
            continue
        lines.add(vertex.line)
        # a stop that is written may be meant
        is_stopped = is_off or any(vertices[n].has("detach") for n in before)
        is_sure = _learning(before, observation, flow) and not is_stopped
        yield _fault(
            f"a term of the loss, `{vertex.name}`{at(vertex.line)}, passes no gradient back",
            0.0,
            "it counts in the loss and teaches nothing: a weight of zero, .item(), detach, no_grad,"
            " argmax, a comparison or rounding on its way, or all it is made of is frozen",
            role="loss",
            severity="fail" if is_sure else "warn",
        )


def _targets(flow: Flow) -> Iterator[Finding]:
    """Yield targets that are a sum of data and of what a network gives, with its gradient."""
    vertices = flow.graph.vertices
    for vertex in vertices:
        is_pair = len(vertex.operands) == 2 and vertex.live and not vertex.cuts
        is_loss = vertex.has("elementwise") or (vertex.has("difference") and vertex.call < 0)
        if not is_pair or not is_loss:
            continue
        sides = vertex.operands if vertex.has("difference") else vertex.operands[1:]
        for sum_ in (n for side in sides for n in flow.as_it_is(side) if vertices[n].has("sum")):
            parts = [flow.as_it_is(operand)[-1] for operand in vertices[sum_].operands]
            is_data = any(vertices[part].kind in ("input", "target") for part in parts)
            if is_data and vertices[sum_].call < 0 and all(vertices[s].live for s in sides):
                yield _fault(
                    f"the target of `{vertex.name}`{at(vertex.line)} has a gradient: it is data "
                    f"and what a network gives, added{at(vertices[sum_].line)}",
                    0.0,
                    "the target moves towards the prediction: compute it under no_grad, or detach",
                    role="loss",
                    severity="warn",
                )


def _draws(observation: Observation, flow: Flow) -> Iterator[Finding]:
    """Yield random draws by trainable values that pass none of them a gradient, fed to layers."""
    vertices = flow.graph.vertices
    to_loss = flow.walk([flow.graph.loss or 0], "gradient", back=True)
    for number, vertex in enumerate(vertices):
        made_by = {held for operand in vertex.operands for held in flow.as_it_is(operand)}
        origins = {held for held in made_by if vertices[held].live}
        is_flat = not vertex.live or vertex.has("flat")  # of bernoulli gradients of zero come
        if not vertex.has("sample") or not is_flat or not origins:
            continue
        between = flow.walk([number], "from operations")
        taking = {n for n in between & to_loss if flow.homes[n] is not None}
        is_straight = any(vertices[n].has("sum") for n in between & flow.walk(origins, "gradient"))
        if not is_straight and _learning(taking, observation, flow):
            yield _fault(
                f"`{vertex.name}`{at(vertex.line)} draws by values that are trained, feeds a layer "
                "and passes no gradient back",
                0.0,
                "reparametrise: mean + std * torch.randn_like(std), .rsample(), or straight "
                "through; of a policy it may be meant",
                role="loss",
                severity="warn",
            )


def _spread(flow: Flow) -> Iterator[Finding]:
    """Yield sums over the batch that are added to one number a sample."""
    vertices = flow.graph.vertices
    for vertex in vertices:
        count = vertex.facts.get("samples") if vertex.live and not vertex.cuts else None
        for operand in vertex.operands if count is not None else ():
            held = operand
            while vertices[held].has("view", "product", "turns_sign") and vertices[held].operands:
                held = vertices[held].operands[0]
            total = vertices[held]
            sizes = total.facts.get("sizes", ((),))[0] if total.has("total") else ()
            if sizes[:1] == (count,) and len(total.facts.get("dims", ())) == len(sizes):
                yield _fault(
                    f"a sum over the whole batch{at(total.line)} is added to one number a sample"
                    f"{at(vertex.line)}",
                    1.0 * total.facts["sizes"][0][0],
                    f"it counts {count} times as much as meant, and more with a larger batch: sum "
                    "over the other dimensions alone, or divide by the number of samples",
                    role="loss",
                    severity="warn",
                )


# ---- the loss of an untrained model -------------------------------------------------------------

_FEWEST_TARGETS = 8
_MAGNIFIES = 3.0
_LARGEST_COSINE = 128.0
"""ArcFace (Deng et al. 2019) and CosFace (Wang et al. 2018) scale by 64, CLIP by 100 at most."""


def _initial(observation: Observation, settings: Settings) -> Iterator[Finding]:
    for call in observation.loss_calls:
        guess, culprit = _uniform_guess(call), _culprit(call, observation)
        given, out = culprit.inputs, culprit.activations
        if guess is None or call.value is None or call.input is None or given is None or not out:
            continue
        ratio, limit = call.value / guess, settings.limit("max_initial_loss", culprit.name)
        # logits that are large by its inputs are not its doing; ids are no scale, as models that
        # are given them start from tables, whose values are about one
        usual = given.rms if is_floating(given) else 1.0
        if ratio <= limit.value or not out.rms > _MAGNIFIES * usual or not is_fresh(observation):
            continue
        if call.cosines and call.input.abs_max <= _LARGEST_COSINE:
            continue  # a scale that losses with a margin have
        message = (
            f"the loss of the untrained model is {call.value:.3g}, {ratio:.3g} times that of a "
            f"uniform guess ({guess:.3g})"
        )
        count = call.targets.count - call.targets.ignored if call.targets else call.input.count
        if count < _FEWEST_TARGETS:
            reason = f"{message}, but {count} targets say little; give at least {_FEWEST_TARGETS}"
            yield LOSS.inconclusive(culprit, reason)
            continue
        bias = culprit.parameters.get("bias")
        why = "its forward multiplies or sums up what comes in, or weights before it are too large"
        if call.cosines:
            why = f"cosines times {call.input.abs_max:.3g} or more: a temperature too small"
        elif bias is not None and 2.0 * bias.rms > out.rms:
            why = f"its bias is too large (up to {bias.abs_max:.3g})"
        elif any(2.0 * m.scale * usual > out.rms for m in linear_maps(culprit)):
            why = "its weights are too large"
        cause = (
            f"{why}; the logits have a root mean square of {call.input.rms:.3g} where about 1 is "
            "usual"
        )
        yield LOSS.violation(culprit, message, value=ratio, limit=limit, cause=cause)


def _uniform_guess(call: LossCall) -> float | None:
    """Return the loss of a uniform guess; ``None`` where that is not known."""
    if call.options.get("reduction", "mean") != "mean" or call.options.get("weight"):
        return None
    if call.function == "cross_entropy" and call.targets is not None and call.classes > 1:
        return math.log(call.classes)
    is_binary = call.function == "binary_cross_entropy_with_logits"
    return math.log(2.0) if is_binary and not call.options.get("pos_weight") else None


def _culprit(call: LossCall, observation: Observation) -> LayerRecord:
    """Return the layer whose output the loss is given, else the one that calls it."""
    flow, ran = flow_of(observation), called(observation)
    if flow.graph.loss is not None:
        feeding = flow.feeding("loss")
        ran = [record for record in ran if record.name in feeding]
    makers = [record for record in ran if same_values(record.activations, call.input)]
    if makers:  # of several heads, that with these values
        return innermost(makers)[-1]
    return observation.layers.get(call.layer or "", observation.layers[""])


# ---- tasks --------------------------------------------------------------------------------------

_MOST_BY_WEIGHT = 1e4
"""Auxiliary terms are given weights down to 1e-3 on purpose; units and sums go beyond."""


def unbalanced(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield tasks that ask nothing of any layer, and pairs of which one drowns the other."""
    layers, silent = observation.layers, []
    for task in observation.tasks:
        reached = [layers[name] for name in task.gradient_norms if name in layers]
        if not reached or any(task.gradient_norms.values()) or not math.isfinite(task.loss):
            continue
        if task.loss != 0.0:
            silent.append(task)
            yield TASK_BALANCE.fault(
                max(reached, key=completed),
                f"task {task.name!r} has a loss of {task.loss:.3g} and asks nothing of any of "
                f"the {len(reached)} layers that it reaches: its gradient is exactly zero",
                cause="it is flat here: rounded, clamped, chosen by an index, or multiplied by "
                "zero beside a constant",
            )
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
        yield TASK_BALANCE.violation(
            layer,
            f"task {strong.name!r} has {ratio:.3g} times the gradient of task "
            f"{weak.name!r} here, where the two meet (norms {high:.3g} and {low:.3g})",
            value=ratio,
            limit=limit,
            cause=f"they differ in scale (losses of {strong.loss:.3g} and {weak.loss:.3g}): weight "
            f"{weak.name!r} by about {min(ratio, 1e9):.0g}, or normalise the targets"
            + ("; a small weight may be meant so" if may_be_meant else ""),
            independent=True,
            severity="warn" if may_be_meant else "fail",
        )
