"""Along which axes values are cut, summed, normalised and masked: what `wiring` says of these.

Sizes, numbers and sums of weights were read while the operations ran (`Vertex.facts`).
"""

from __future__ import annotations

import math
from itertools import pairwise

from pytest_modelhealth.checks.facts import linear_maps
from pytest_modelhealth.checks.run import Faults, Rule, Run
from pytest_modelhealth.operations import having
from pytest_modelhealth.report.flow import Vertex


def _reshaped(run: Run) -> Faults:
    """Yield views that cut one axis and join its parts to others, in place of a transposition."""
    vertices, takers = run.vertices, run.takers
    for number, vertex in run.having("sizes"):
        if not (vertex.has("regroup") and vertex.operands and number in run.variable):
            continue
        before, after = vertex.facts["sizes"]
        maker = vertices[run.before(vertex.operands[0], "copy")[-1]]
        # what is widened or loses a slice in between is shifted on purpose, as relative positions
        is_shift = maker.has("slice") and vertices[maker.operands[0]].has("regroup")
        slices = (n for n in takers[number] if vertices[n].has("slice"))
        is_shift |= any(vertices[n].has("regroup", "copy") for s in slices for n in takers[s])
        if not is_shift and not maker.has("join", "pad") and cuts_across(before, after):
            what = f"a reshape cuts {before} into {after}, across axes: rows mix places"
            yield number, what, "`transpose` or `permute` before it was meant", "fail"


def cuts_across(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether axes are cut, and not just joined, split, or joined with a neighbour's part."""
    olds, news = ([size for size in sizes if size != 1] for sizes in (before, after))
    if 0 in olds or math.prod(olds) != math.prod(news):
        return False
    ndim = len(olds)
    while olds and news:  # from the right, in parts that hold the same values
        is_inner, old, new = len(olds) == ndim, [olds.pop()], [news.pop()]
        while (held := math.prod(old)) != (made := math.prod(new)):
            (old if held < made else new).append((olds if held < made else news).pop())
        # stacked frames may have the sizes of a transposition, where values of a place are stacked
        is_turned = len(old) == 2 and old == new[::-1] and not is_inner
        if len(old) > 1 < len(new) and (is_turned or _is_across(old, new)):
            return True
    return False


def _is_across(old: list[int], new: list[int]) -> bool:
    ends = [[math.prod(sizes[: n + 1]) for n in range(len(sizes))] for sizes in (old, new)]
    points = sorted({1, *ends[0], *ends[1]})
    if any(high % low for low, high in pairwise(points)):
        return True
    # which old and which new axis each piece between two points is of
    pieces = [tuple(sum(end < point for end in side) for side in ends) for point in points[1:]]
    joined = [{a for a, axis in pieces if axis == one} for one in range(len(new))]
    split = {axis for axis, _ in pieces if [a for a, _ in pieces].count(axis) > 1}
    found = {axis for axis in split if old[axis] in new}  # in pieces, and as it was elsewhere
    torn = (all(len(joined[one]) > 1 for a, one in pieces if a == axis) for axis in found)
    return any(torn) or (bool(found) and any(len(axes & split) > 1 for axes in joined))


_SCORING = ("view", "sum", "product", "quotient", "fill")
_KEYS = "`softmax(dim=...)` runs over queries, heads or samples in place of what is summed over"


def _other_axis(run: Run) -> Faults:
    """Yield products that add up weights along an axis on which they do not sum to one."""
    for number, vertex in run.having("softmax"):
        softmax = run.softmaxes.get(vertex.facts["softmax"])
        problem = _of_product(vertex)
        if not problem or softmax not in run.given or vertex.call < 0:
            continue
        maker, met = run.vertices[softmax], [softmax]
        for one in met:  # which grows
            added = (n for n in run.takers[one] if run.vertices[n].has("view", "sum"))
            met += [n for n in added if n not in met]
        is_divided = any(run.vertices[n].has("total") for one in met for n in run.takers[one])
        scores = set(run.before(maker.operands[0], *_SCORING))
        earlier = {run.vertices[n].operands[0] for n in run.softmaxes.values() if n < softmax}
        if is_divided or earlier & scores.difference(run.flow.as_it_is(maker.operands[0])):
            continue  # the second is routing by agreement, which adds to the scores before
        products = [run.vertices[n].operands for n in scores if run.vertices[n].has("matrix")]
        is_scored = any(len([o for o in taken if o in run.given]) > 1 for taken in products)
        (dim,), (sizes,) = maker.facts["dims"], maker.facts["sizes"]
        what = f"after a softmax over dimension {dim} of {sizes} {problem}"
        yield number, what, _KEYS, "fail" if is_scored else "warn"


def _of_product(vertex: Vertex) -> str:
    """Return what is wrong with a product of weights and values; behind a dropout none has sums."""
    facts, is_along = vertex.facts, vertex.facts["is_along"]
    sums, slack = facts.get("sums"), max(1e-4, 8.0 * facts.get("eps", 0.0))
    if sums is None:
        return "" if is_along is not False else "weights are added up along another"
    is_off = sums[0] < 1.0 - slack or sums[1] > 1.0 + slack
    return f"weights sum to {sums[0]:.3g} to {sums[1]:.3g} in a product" if is_off else ""


_LEAST_WEIGHT = 1e-3
_BOOLEAN = "a score of -inf hides: `masked_fill(mask, float('-inf'))`, or a mask of booleans"


def _unmasked(run: Run) -> Faults:
    """Yield masks of scores that hide nothing, or everything, or that nothing takes."""
    for number, vertex in run.having("is_binary"):
        facts, (is_binary,) = vertex.facts, vertex.facts["is_binary"]
        how, fill = facts.get("mask", "plus"), facts.get("fill", 0.0)
        (kept,), (is_all,) = facts.get("kept", (0.0,)), facts.get("is_all_hidden", (False,))
        if is_all or facts.get("keeps_padding") == (True,):
            what = "every place of every row" if is_all else "all but the padding"
            what = f"a mask hides {what} from the softmax"
            yield number, what, "inverted, or compared with the wrong id", "fail"
        elif is_binary and how == "plus":
            yield number, "a mask of 0 and 1 is added to scores: it hides nothing", _BOOLEAN, "warn"
        elif is_binary and not kept <= _LEAST_WEIGHT and not _is_own(run, vertex):
            does = f"fills scores with {fill:.3g}" if how == "fill" else "multiplies scores by 0"
            what = f"a mask {does}, and a softmax leaves {kept:.2g} to what it should hide"
            yield number, what, _BOOLEAN, "fail"


def _is_own(run: Run, softmax: Vertex) -> bool:
    """Whether what hides scores was drawn at random, or was computed of the scores themselves."""
    made = (run.vertices[n] for n in run.before(softmax.operands[0], *_SCORING))
    for scores, *masks in (v.operands for v in made if v.has("fill", "product") and v.operands):
        met = run.flow.walk(masks, back=True)
        if scores in met or any(run.vertices[n].has("draw") for n in met):
            return True
    return False


def _nothing_to_normalise(run: Run) -> Faults:
    """Yield what normalises a single value. A sequence of one has one key: that is no fault."""
    for number, vertex in run.having("among"):
        if vertex.facts["among"] == 1 and number in run.given:
            what = "a vector of one value is divided by its length, which leaves its sign"
            yield number, what, "another dimension was meant", "fail"
    for number, vertex in (
        (n, v) for n, v in run.flow.operation_vertices.items() if v.has("quotient")
    ):
        value, divisors = vertex.operands[:1], vertex.operands[1:]
        sums = [run.vertices[n] for o in divisors for n in run.before(o, "view", "sum")]
        facts = [s.facts for s in sums if s.has("total") and s.operands == value]
        if any(one["sizes"][0][d] == 1 for one in facts for d in one.get("dims", ())):
            what = "a single value is divided by its sum, which gives 1 whatever it is"
            yield number, what, "another dimension was meant, or there is nothing to weigh", "warn"
    for number in run.softmaxes.values():
        (dim,), (sizes,) = run.vertices[number].facts["dims"], run.vertices[number].facts["sizes"]
        made = run.before(run.vertices[number].operands[0], "copy", "product", "quotient")[-1]
        record = run.record(made) if sizes[dim] == 1 else None
        shapes = [one.weights.shape for one in linear_maps(record)] if record else []
        is_unit = any(s[0] == 1 and dim == (1 if len(s) > 2 else len(sizes) - 1) for s in shapes)
        if is_unit or (sizes[dim] == 1 and run.vertices[made].function == "topk"):
            what = "a softmax runs over one value, and gives 1 whatever it is"
            yield number, what, "a sigmoid or another dimension was meant", "fail"


def _scaled(run: Run) -> Faults:
    """Yield attentions whose scale is another than the root of the width that they sum over."""
    for number, vertex in run.having("operands"):
        facts, product = vertex.facts, run.vertices[run.before(number, "view")[-1]]
        width = facts["operands"][0][-1]
        views = (view for operand in product.operands for view in run.views(operand))
        wholes = {old[-1] for old, new in views if len(old) < len(new) and old[-1] > width}
        wholes.add(math.isqrt(width) ** 2)  # of a root that was cast to an integer
        wrong = [(width, 0.5, "multiplied")]
        wrong += [(whole, -0.5, "divided") for whole in wholes if whole != width]
        later = () if "scale" in facts else run.takers[number]  # a fused one gives out no scores
        for root, power, how in wrong:
            if any(run.is_scaled(n, root, power) for n in later):
                what = f"scores of queries and keys of {width} numbers are {how} by the root of "
                yield number, f"{what}{root}", f"{width} ** -0.5 is the usual factor", "warn"
        is_scaled = any(run.is_scaled(n, width) for n in later) or facts.get("scale", 1.0) is None
        taken = product.operands[:2] if is_scaled else ()
        if run.given.issuperset(taken) and any(run.is_scaled(one, width) for one in taken):
            what = f"scores are divided by the root of {width}, and so were queries or keys"
            yield number, what, "leave one out, or pass `scale=1.0` to the attention", "fail"


_KEEPS_PLACES = having("features") - having("normalization")


def _mixed_places(run: Run) -> Faults:
    """Yield normalisations over places that the layer before kept apart."""
    for number, vertex in enumerate(run.vertices):
        record = run.record(number)
        given = None if record is None else record.inputs
        if record is None or given is None or len(given.shape) != 3 or not vertex.operands:
            continue
        scale = record.parameters.get("weight")
        is_layer = record.type_name == "LayerNorm" and scale is not None and len(scale.shape) == 2
        made = vertex.operands[0]
        while (maker := run.record(made)) and maker.activation not in (None, "softmax", "glu"):
            made = run.vertices[made].operands[0]
        if maker is None or maker.type_name not in _KEEPS_PLACES:
            continue
        laid_out = (run.vertices[n] for n in run.flow.as_it_is(run.vertices[made].operands[0]))
        is_turned = any(v.has("whole") and not v.has("regroup", "copy") for v in laid_out)
        if is_layer or (record.type_name == "BatchNorm1d" and not is_turned):
            what = f"it normalises over dimension 1, whose places {maker.label!r} keeps apart"
            yield number, what, "the last dimension was meant, or a transposition before", "warn"


def _positions_by_sample(run: Run) -> Faults:
    """Yield tables whose rows are added to samples, where steps lie in the dimension after."""
    for number, vertex in run.having("table"):
        sizes, (is_varied,) = vertex.facts["table"], vertex.facts["is_varied"]
        is_counted = any(_is_counted(run, one) for one in vertex.operands)
        is_first = vertex.facts["along"] == 0 and sizes[0] == run.samples != sizes[1]
        if is_varied and is_counted and is_first and run.are_apart(number, sizes[1]):
            what = f"a table is added row by row to the samples of {sizes}"
            yield number, what, "its rows are positions: here dimension 1 has the steps", "fail"


def _over_samples(run: Run) -> Faults:
    """Yield what attends or recurs along the samples, where each has steps of its own.

    One that attends along the steps elsewhere may compare samples on purpose.
    """
    samples, met = run.samples, list[tuple[int, int, str]]()
    for number, vertex in run.having("made", "scale"):
        (sizes,) = vertex.facts.get("operands") or vertex.facts["sizes"]
        is_square = "scale" in vertex.facts or sizes[-1] == samples
        if is_square and sizes[-2:-1] == (samples,) and run.steps in sizes[:-2]:
            met.append((number, run.steps, ""))
    for call, record, sizes in run.sequences():
        if sizes[0] == samples and record.options["batch_first"] is False:
            met.append((call.outputs[0], sizes[1], record.type_name))
    for number, steps, layer in met:
        if samples == 1 or steps in (1, samples) or not run.are_apart(number, steps):
            continue
        is_sure = bool(layer) and (layer != "MultiheadAttention" or steps not in run.along)
        does = "attends" if layer in ("", "MultiheadAttention") else "recurs"
        what = f"it {does} along the {samples} samples of the batch, not along their {steps} steps"
        cause = "`batch_first=True`, or a transposition, was meant"
        yield number, what, cause, "fail" if is_sure else "warn"


def _among_heads(run: Run) -> Faults:
    """Yield attentions of each place's heads to one another: no transposition came before."""
    for number, vertex in run.having("made", "scale"):
        (sizes,) = vertex.facts.get("operands") or vertex.facts["sizes"]
        made = [number] if "scale" in vertex.facts else run.before(vertex.operands[0], *_SCORING)
        for product in (n for n in made if n == number or run.vertices[n].has("matrix")):
            for old, new in run.views(run.vertices[product].operands[0])[:1]:
                is_split = len(new) == 4 and old == (*new[:2], new[2] * new[3])
                attended = new if product == number else (*new[:3], *new[2:3])
                if is_split and sizes == attended and 1 < new[2] != new[1] > 1:
                    what = f"the {new[2]} heads of each place of {new} attend to one another"
                    cause = "`transpose(1, 2)` of queries, keys and values was left out"
                    yield number, what, cause, "warn"


def _repeated_masks(run: Run) -> Faults:
    """Yield masks repeated for each head in another order than that of samples and heads."""
    met: list[tuple[tuple[int, ...], list[int]]] = []  # samples and heads in order, what is taken
    for call, record, sizes in run.sequences():
        if isinstance(heads := record.options.get("num_heads"), int):
            samples = sizes[0 if record.options["batch_first"] is True else 1]
            met.append(((samples, heads), [*call.inputs]))
    for softmax in run.softmaxes.values():
        made = run.before(run.vertices[softmax].operands[0], *_SCORING)
        products = (v.operands for n in made if (v := run.vertices[n]).has("matrix"))
        laid_out = (view for taken in products for o in taken for view in run.views(o))
        orders = [old[:2] for old, new in laid_out if new[:1] == (math.prod(old[:2]),)]
        met += [(orders[0], made)] if orders else []
    for (slow, fast), taken in met:
        masks = (o for o in taken if o in run.given)
        for one in (n for o in masks for n in run.before(o, "view", "comparison")):
            name, views = run.vertices[one].name, run.vertices[one].facts.get("sizes", ())
            repeated = {"repeat": slow, "repeat_interleave": fast}.get(name)
            is_mixed = [axes[0] for axes in views] == [repeated, slow * fast]
            if slow != fast and is_mixed:
                what = f"`{name}` repeats a mask in another order than that of {slow} by {fast} "
                what += "samples and heads, which get those of one another"
                yield one, what, "samples come first: `repeat_interleave(heads, 0)`", "fail"


def _is_counted(run: Run, table: int) -> bool:
    """Whether rows of a table of the model's own were taken by their number."""
    met = run.flow.walk([table], back=True)
    sources = [run.vertices[n] for n in met if not run.vertices[n].operands]
    return all(v.kind in ("parameter", "buffer") or v.has("constant") for v in sources) and any(
        run.vertices[n].has("slice", "index", "table") or run.record(n) is not None for n in met
    )


RULES: list[Rule] = [_reshaped, _other_axis, _unmasked, _nothing_to_normalise, _scaled]
RULES += [_mixed_places, _positions_by_sample, _over_samples, _among_heads, _repeated_masks]
