"""A loss that is given what it takes, and what an untrained model makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, zip_longest

from pytest_modelhealth.checks import loss_terms
from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import at, called, flow_of, innermost, is_fresh, linear_maps
from pytest_modelhealth.checks.loss_terms import Faults, broadcast, summands, unscaled
from pytest_modelhealth.checks.paths import is_floating
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, LayerRecord, LossCall, Observation
from pytest_modelhealth.report.flow.inferred import same_values
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.statistics import TensorStatistics

LOSS = CHECKS["loss"]

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
    for stage in (_calls, _batch_softmax, _by_hand, loss_terms.findings, _initial):
        found = list(stage(observation, settings))
        yield from found
        if any(one.grade != "warn" for one in found):
            return


def _calls(observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield the first contract that each call breaks: a later one would only follow from it."""
    contracts = (_of_classes, _of_logits, _of_log_probabilities, _of_targets)
    for call in observation.loss_calls:
        faults = (fault for contract in contracts for fault in contract(call, observation))
        for message, cause, grade in islice(faults, 1):
            culprit = _culprit(call, observation)
            yield LOSS.fault(culprit, message, cause=cause, severity=grade, independent=True)


def _of_classes(call: LossCall, observation: Observation) -> Faults:
    """Yield what is wrong with class indices, or with what is taken for classes."""
    function, targets = call.function, call.targets
    ignore = call.options.get("ignore_index", -100)
    if targets is None:
        pass
    elif targets.ignored > _MOST_IGNORED * targets.count:
        is_all = targets.ignored >= targets.count
        what = f"{function} ignores {'all' if is_all else targets.ignored} of its "
        what += f"{targets.count} targets (ignore_index={ignore})"
        cause = "the targets are masked or padded everywhere: look at how they are built"
        yield what, cause, "fail" if is_all else "warn"
    elif targets.skips_a_class and ignore in range(call.classes):
        what = f"{function} ignores class {ignore} (ignore_index={ignore}), which stands "
        what += f"{targets.ignored} times among the {targets.count} targets, and not as padding"
        cause = "a class that counts has the index of padding: pad with -100, or number from 1"
        yield what, cause, "warn"
    elif targets.tail not in (None, ignore) and call.options.get("reduction") != "none":
        # as many ids of a table are padding, which are 0 or whose rows are, as targets are; whoever
        # takes the loss of each token may mask it afterwards
        share, tail, pads = targets.tail_share, targets.tail, dict[object, str]()
        for record in called(observation):
            pad, ids = record.options.get("padding_idx"), record.inputs
            seen = record.activations if pad else ids
            is_table = "num_embeddings" in record.options and ids and ids.count == targets.count
            zeros = seen.zero_count / seen.count if is_table and seen else math.nan
            if math.isclose(zeros, share, rel_tol=_ALIKE):
                pads[pad] = record.label
        known = next((pad for pad in pads if pad is not None), None)
        if share >= _PADDED and pads and (known is not None or tail == 0):
            what = f"{share:.0%} of the targets of {function} are padding: they end in {tail}, as "
            what += f"the ids of {pads[known]!r} do in {known or 0}, and are not ignored"
            cause = f"pass ignore_index={tail}, or replace padded targets by -100"
            yield what, cause, "warn" if known is None else "fail"
    if function == "cross_entropy" and call.classes == 1:
        what = "cross_entropy over a single class is zero whatever the output"
        yield what, "one output for a yes or no: use binary_cross_entropy_with_logits", "fail"


def _of_logits(call: LossCall, observation: Observation) -> Faults:
    """Yield what is given in the place of logits: by its values, or by the ends of what made it."""
    function, made_by, given = call.function, call.made_by, call.input
    if given is None or not given.finite_count:
        return
    is_softmax, ndim = function == "cross_entropy", len(given.shape)
    is_sure = given.count >= _FEWEST_ROWS * call.classes or made_by == "softmax"
    if is_softmax and call.rows == "probabilities" and is_sure:
        what = "cross_entropy is given probabilities: every row of its input sums to one"
        cause = "a softmax before cross_entropy, which applies one itself: pass it the logits"
        yield what, cause, "fail"
    along, is_normalised = min(1, ndim - 1), made_by in having("softmax") and not call.rows
    if function in having("classes") and is_normalised and call.made_along not in (None, along):
        what = (
            f"{function} is given a {made_by} over dimension {call.made_along}: its classes lie "
            f"in dimension {along}"
        )
        yield what, f"check its dim: 0 are the samples, {along} the classes", "fail"
    if function not in having("logits"):
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
            cause = f"no class can get more than {math.exp(-least):.0%}: leave out the "
            cause += maker if maker in _ENDS else "clamp"
            what += f": some that are held between {low:g} and {high:g}"
            yield f"{function} takes logits and is given {what}", cause, "fail"
    met = [f"{end:g}" for end, seen in ((low, given.min), (high, given.max)) if end == seen]
    if met and all(abs(float(end)) < _FAR_BOUND for end in met):
        what += f", many of which are {' or '.join(met)}"
        cause = "what lies on the flat side gets no gradient, and all logits there are one"
        yield f"{function} takes logits and is given {what}", f"{cause}: leave it out", "fail"


def _of_log_probabilities(call: LossCall, _: Observation) -> Faults:
    """Yield what is given in the place of log-probabilities."""
    function, given = call.function, "logits"
    if function not in having("log_probabilities") or call.log_normalizer is None:
        return
    cause = "log_softmax before it is missing: use cross_entropy on logits"
    if call.rows == "probabilities":
        given, cause = "probabilities", "the logarithm is missing: use log_softmax, not softmax"
    elif function == "kl_div":
        if call.input is None or call.input.max <= _ROUNDING:
            return
        given, cause = f"values up to {call.input.max:.3g}", "log_softmax before it is missing"
    elif call.rows or call.log_normalizer <= _UNNORMALISED:
        return
    elif call.made_by == "log_softmax":
        given = f"what does not sum to one over its {call.classes} classes"
        cause = "log_softmax runs along another dimension than that of the classes: check its dim"
    yield f"{function} takes log-probabilities and is given {given}", cause, "fail"


def _of_targets(call: LossCall, observation: Observation) -> Faults:
    """Yield what is wrong with targets: numbers, or class indices that are all one."""
    function, given, target, classes = call.function, call.input, call.target, call.classes
    if given and target and target.finite_count == target.count > 0:
        yield from _of_numbers(call, given, target)
    if function in having("elementwise") and given and target:
        pairs = zip_longest(given.shape[::-1], target.shape[::-1], fillvalue=1)
        if math.prod(map(max, pairs)) > max(math.prod(given.shape), math.prod(target.shape)):
            yield broadcast(function, given.shape, target.shape)
    if call.targets is not None and call.targets.only is not None and classes >= _FEWEST_ROWS:
        # an index that has no row of weights is a place among candidates (He et al. 2020, MoCo)
        weights = (s for record in called(observation) for s in record.parameters.values())
        count = call.targets.count - call.targets.ignored
        if count >= _FEWEST_OF_ONE_CLASS and any(classes in s.shape[:2] for s in weights):
            what = f"all {count} targets of {function} are class {call.targets.only}, of {classes}"
            cause = "a placeholder, labels that did not load, or data sorted by class"
            yield f"{what} classes", f"{cause}; a batch of one class may be meant, too", "warn"


def _of_numbers(call: LossCall, given: TensorStatistics, target: TensorStatistics) -> Faults:
    function, total = call.function, target.mean * call.classes
    is_soft = function == "cross_entropy" and call.targets is None
    is_share = given.shape == target.shape and target.min >= 0.0 and target.max <= 1.0
    if is_soft and is_share and call.classes >= _FEWEST_ROWS and total > _SEVERAL:
        what = (
            f"cross_entropy takes targets that sum to one over the {call.classes} classes; these "
            f"sum to {total:.3g}"
        )
        cause = "several labels at once: use binary_cross_entropy_with_logits, or divide each row"
        yield what, f"{cause} by its sum", "fail"
    is_soft |= function == "kl_div" and not call.options.get("log_target")
    if is_soft and target.min < -_ROUNDING:
        what = f"{function} takes probabilities as targets and is given {target.min:.4g}"
        yield what, "softmax before it is missing, or log_target=True of kl_div", "fail"
    is_binary = function.startswith("binary_cross_entropy")
    if is_binary and max(-target.min, target.max - 1.0) > _ROUNDING:
        what = f"{function} takes targets from 0 to 1 and is given [{target.min:.4g}, "
        cause = "masks of 0 and 255, labels of -1 and 1, class indices, or another unit: bring them"
        yield f"{what}{target.max:.4g}]", f"{cause} to [0, 1]", "fail"


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
        shape = record.activations and record.activations.shape
        if record.activation not in having("softmax") or not shape or len(shape) < 2:
            continue
        # torch takes the first of three dimensions where none is given
        dim = record.options.get("dim", 0 if len(shape) == 3 else None)
        is_set = shape[1] == samples or math.prod(shape[1:]) == 1
        if dim in (0, -len(shape)) and shape[0] == samples and not is_set:
            what = f"its {record.activation} runs along dimension 0, over the {samples} samples"
            cause = "dim=0, or none at all for three dimensions, is the batch: use dim=1, or dim=-1"
            yield LOSS.fault(record, f"{what} of the batch", cause=cause, independent=True)


# ---- what terms written by hand are given -------------------------------------------------------

_SMALL_SCALE, _MANY_CLASSES = 0.25, 16
_SMOOTHED = 0.01


def _by_hand(observation: Observation, _: Settings) -> Iterator[Finding]:
    rules = (_cosines, _targets_by_hand, _overlaps)
    return loss_terms.said(rules, observation, flow_of(observation))


def _cosines(observation: Observation, flow: Flow) -> Faults:
    """Yield cosines times a temperature, which divides them, and products of any length magnified.

    A temperature below one is made for cosines; of vectors of any length the largest decide.
    """
    vertices, calls = flow.graph.vertices, observation.loss_calls
    has_cosines = any(c.cosines and c.classes >= _MANY_CLASSES for c in calls)
    is_of_any = bool(calls) and not any(c.cosines for c in calls)
    inputs = [n for n, v in enumerate(vertices) if v.kind == "input"]
    for vertex in flow.operation_vertices.values() if has_cosines or is_of_any else ():
        if not (vertex.call < 0 and vertex.has("softmax") and vertex.operands):
            continue  # cross_entropy is a log_softmax in the graph
        number, scale = unscaled(vertex.operands[0], flow, "view")
        made = vertices[number]
        if is_of_any and made.has("matrix") and flow.after(*inputs).issuperset(made.operands[:2]):
            if len({*made.operands}) == 2 and abs(scale) > 1.0 / _SMALL_SCALE:
                what = f"the loss{at(vertex.line)} is given products of vectors of any length, "
                cause = "cosines are divided by a temperature: normalise both to one length before"
                yield f"{what}times {scale:.3g}", cause, "warn"
        elif has_cosines and made.has("matrix") and abs(scale) < _SMALL_SCALE:
            what = f"the loss{at(vertex.line)} is given cosines times {scale:.3g}: logits that "
            what += f"differ by {2.0 * abs(scale):.2g} at most"
            cause = "cosines are divided by a temperature such as 0.07: here they are multiplied"
            yield what, f"{cause} by it, and no class can be much likelier than others", "fail"


def _targets_by_hand(observation: Observation, flow: Flow) -> Faults:
    """Yield products of log-probabilities and what is no probability: a loss written by hand.

    Advantages of all actions are a difference or product, and may be negative.
    """
    vertices = flow.graph.vertices
    for vertex in flow.operation_vertices.values():
        is_of_a_loss = vertex.call >= 0 or observation.loss_path is not None
        if not is_of_a_loss or "likelihood" not in vertex.facts:
            continue  # without a loss the output is multiplied by random numbers
        of_softmax, least, most, total, highest = vertex.facts["likelihood"]
        made = [vertices[flow.as_it_is(o)[-1]] for o in vertex.operands if not vertices[o].live]
        is_computed = any(m.has("product", "sum") and len(m.operands) > 1 for m in made)
        # -target * log_softmax(output) has its sign on the other side
        is_signed = most > _ROUNDING or any(m.has("never_positive") for m in made)
        if of_softmax and least < -_ROUNDING and is_signed and not is_computed:
            what = f"log-probabilities are multiplied by targets down to {least:.3g}"
            cause = "logits or log-probabilities in the place of probabilities: take their softmax"
            yield f"{what}{at(vertex.line)}", cause, "fail"
        elif of_softmax and least > 0.0 and most <= 1.0 + _ROUNDING and total > 1.0 + _SMOOTHED:
            what = f"log-probabilities are multiplied by targets whose rows sum to {total:.3g}"
            cause = "smoothed targets keep 1 - s of the class, and share s among all"
            yield f"{what}{at(vertex.line)}", cause, "warn"
        elif least >= 0.0 and abs(total - 1.0) < _ROUNDING < highest:
            what = f"probabilities are multiplied by logarithms up to {highest:.3g}"
            cause = "what the logarithm is taken of is above 1: softmax before it is missing"
            yield f"{what}{at(vertex.line)}", cause, "fail"


def _overlaps(observation: Observation, flow: Flow) -> Faults:
    """Yield overlaps, as Dice or IoU, of what has values below zero, and those to be minimised.

    That is a sum of ``a * b`` divided by sums of both.
    """
    vertices, layers, weights = flow.graph.vertices, observation.layers, summands(flow)
    for number, vertex in flow.operation_vertices.items():
        if not vertex.has("quotient") or len(vertex.operands) != 2:
            continue
        above, below = (set(_summed(operand, flow)) for operand in vertex.operands)
        for made in (vertices[n] for n in above if vertices[n].has("product")):
            factors = {flow.as_it_is(operand)[-1] for operand in made.operands}
            homes = {flow.homes[n] for n in factors if factors <= below}
            outs = [record.activations for name, record in layers.items() if name in homes]
            least = min((out.min for out in outs if out is not None), default=0.0)
            if len(factors) == 2 and least < -_ROUNDING:
                what = f"an overlap{at(vertex.line)} is of values down to {least:.3g}"
                cause = "Dice and IoU take shares from 0 to 1: a sigmoid or softmax is missing"
                yield what, cause, "fail"
            is_wanted = any(vertices[n].kind == "target" for n in factors)
            if is_wanted and factors <= below and weights.get(number, 0.0) > 0.0:
                what = f"the loss grows with an overlap{at(vertex.line)} of output and target"
                yield what, "an overlap is a score: 1 less it is a loss", "warn"


def _summed(number: int, flow: Flow) -> Iterator[int]:
    """Yield what the totals are of that are added up to a vertex, in another layout at most."""
    made = flow.graph.vertices[number]
    if made.has("total") and made.operands:
        inner = flow.graph.vertices[number := flow.as_it_is(made.operands[0])[-1]]
        parts = inner.operands if inner.has("sum") else (number,)
        yield from (flow.as_it_is(part)[-1] for part in parts)
    elif made.has("sum", "view", "clamp") or (made.has("product") and len(made.operands) == 1):
        for operand in made.operands:
            yield from _summed(operand, flow)


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
        is_scaled = call.cosines and call.input.abs_max <= _LARGEST_COSINE
        is_own = out.rms > _MAGNIFIES * usual and not is_scaled
        if ratio <= limit.value or not is_own or not is_fresh(observation):
            continue
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
        cause = f"{why}; the logits have a root mean square of {call.input.rms:.3g}: 1 is usual"
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
