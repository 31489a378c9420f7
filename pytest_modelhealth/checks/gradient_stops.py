"""Where gradients end in one run although the graph goes on, and for what reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Literal

from pytest_modelhealth.checks.facts import called, flow_of, gives_nothing, learns
from pytest_modelhealth.checks.normalization import DRAWS, draws
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.flow import AS_IT_IS, Edge, Factor, Stopped, Vertex
from pytest_modelhealth.settings.setting import parent
from pytest_modelhealth.statistics import TensorStatistics

FLAT = frozenset(
    {"bernoulli", "ceil", "fill", "fix", "floor", "heaviside", "normal", "poisson", "round"}
    | {"sgn", "sign", "trunc", "zero"}
)
"""Operations of autograd whose gradient is zero everywhere."""

_LINEAR = frozenset(
    {"add", "addmm", "baddbmm", "bmm", "cat", "div", "mean", "mm", "mul", "neg", "repeat", "stack"}
    | {"sub", "sum"}
)
"""Operations that pass a gradient on wherever one arrives."""

_PICK = frozenset(
    {"as_strided", "gather", "getitem", "index", "index_select", "narrow", "select", "slice"}
    | {"split", "split_with_sizes", "take_along_dim", "unbind", "unsafe_split"}
)
_JOIN = frozenset(
    {"cat", "constant_pad_nd", "copy_slices", "index_add", "index_copy", "index_put", "pad"}
    | {"scatter", "scatter_add", "select_scatter", "slice_scatter", "stack"}
)
_MASK = frozenset({"masked_fill", "masked_scatter", "where"})

_BATCH = frozenset({"input", "target"})
_OF_LAYERS = frozenset({"call", "parameter", "buffer"})
_REDUCTIONS = frozenset({"mean", "sum"})
_OFFSETS = ("bias", "beta", "shift")
_PARTLY = 0.5


class GradientStops:
    """The operands of operations to which no gradient goes back, by the reason for it.

    Args:
        observation: of one run.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._flow = flow_of(observation)
        self.for_good: dict[Edge, str] = {}
        """What never opens: a flat operation, or a factor of zero that nothing learns."""
        self.stuck: dict[Edge, tuple[str, ...]] = {}
        """Zeros that could learn but for what they are multiplied with, by name."""
        self.designs: dict[Edge, str] = {}
        """A closed gate that learns, a silent activation, a softmax without a choice."""
        self.dead: set[str] = set()
        """The silent activations among them."""
        self.without_choice: set[str] = set()
        """The softmaxes among them."""
        self.doubts: dict[Edge, str] = {}
        """What may be otherwise in another batch, or later."""
        self.perhaps: dict[Edge, str] = {}
        """A factor that may be zero: nothing shows its value."""
        self.drawn: set[Edge] = set()
        """A factor that is drawn at random, and may have kept nothing of this batch."""
        self._made: list[Edge] = []  # a factor that is made of constants, such as a mask
        factors = self._flow.factors(self._zeros, self._partly_zeros)
        for factor in factors:
            if factor.is_zero:
                self._see_zero(factor)
        self._see_unknown([factor for factor in factors if not factor.is_zero])
        for number, vertex in enumerate(self._flow.graph.vertices):
            record = observation.layers.get(vertex.name) if vertex.kind == "call" else None
            if record is not None:
                self._see_call(number, record)
            elif vertex.kind == "operation" and vertex.function in FLAT:
                self._put(self.for_good, number, f"`{vertex.name}` has a gradient of zero")

    def stopped(self, *kinds: Iterable[Edge]) -> Stopped:
        """Return what has no way past edges of some kinds to where a gradient is known to be."""
        return self._flow.stopped([edge for kind in kinds for edge in kind], self._alive)

    @cached_property
    def suspects(self) -> list[Edge]:
        """Operations that may be flat where they were evaluated."""
        return self._into(lambda v: v.function not in AS_IT_IS | _LINEAR | _PICK | _JOIN)

    @cached_property
    def cancelled(self) -> Mapping[str, Edge]:
        """What goes into both sides of differences alone, as into ``x - x.mean()``."""
        edges = self._into(lambda v: v.function == "sub" and len(v.operands) > 1)
        one_side = [self.stopped(e for e in edges if e[1] == side).names for side in (0, 1)]
        both = self.stopped(edges).names
        return {n: e for n, e in both.items() if n not in {*one_side[0], *one_side[1]}}

    @cached_property
    def masks(self) -> list[Edge]:
        """Operations that choose between values by a mask."""
        return [*self._made, *self._into(lambda v: v.function in _MASK)]

    @cached_property
    def unread(self) -> list[Edge]:
        """Operations that put together what later ones take but a part of."""
        picked = self.stopped(self._into(lambda v: v.function in _PICK), self.designs).vertices
        joins = self._into(lambda v: v.function in _JOIN)
        return [(number, position) for number, position in joins if number in picked]

    def _into(self, choose: Callable[[Vertex], bool]) -> list[Edge]:
        """Return the operands of some operations, in order."""
        vertices = enumerate(self._flow.graph.vertices)
        chosen = ((n, v) for n, v in vertices if v.kind == "operation" and choose(v))
        return [edge for number, _ in chosen for edge in self._edges(number)]

    @cached_property
    def _alive(self) -> list[str]:
        """The layers of one call at whose output a gradient arrives, in most places."""
        return [
            r.name
            for r in called(self._observation)
            if r.gradients is not None
            and r.gradients.abs_max > 0.0
            and r.gradients.zero_fraction < _PARTLY
            and r.name in self._leaves
            and [len(call.outputs) for call in self._flow.calls(r.name)] == [1]
        ]

    @cached_property
    def _leaves(self) -> frozenset[str]:
        return frozenset(self._flow.layers)

    # What is zero, and whether it will stay so.

    @cached_property
    def _zeros(self) -> list[str]:
        """The layers, parameters and buffers that are all zero."""
        names = [r.name for r in called(self._observation) if gives_zeros(r)]
        for record in self._observation.layers.values():
            for tensors in (record.parameters, record.buffers):
                zeros = [name for name, s in tensors.items() if _is_zero(s)]
                names += [f"{record.name}.{name}".removeprefix(".") for name in zeros]
        return names

    @cached_property
    def _partly_zeros(self) -> list[str]:
        """The layers that learn and give out some zeros though they are no activation."""
        return [
            r.name
            for r in called(self._observation)
            if r.activations is not None and 0.0 < r.activations.zero_fraction < 1.0 and learns(r)
        ]

    def _see_unknown(self, factors: list[Factor]) -> None:
        """Tell factors that must be zero, as what they are made of learns by no other way."""
        vertices = self._flow.graph.vertices
        partners = [
            (factor.edge[0], position)
            for factor in factors
            for position in range(len(vertices[factor.edge[0]].operands))
            if position != factor.edge[1]
        ]
        ways = self._flow.stopped(partners).names
        kinds = {name: "call" if name in self._leaves else "parameter" for name in ways}
        alive = {
            ways[name][0] for name, kind in kinds.items() if self._outlook(kind, name) == "opens"
        }
        for factor in factors:
            ((kind, name),) = factor.by
            number, position = factor.edge
            others = (o for at, o in enumerate(vertices[number].operands) if at != position)
            if any(map(self._is_random, others)):
                self.drawn.add(factor.edge)
            elif kind in _BATCH:
                self.perhaps[factor.edge] = f"values of the batch ({name!r})"
            elif kind == "constant":
                self._made.append(factor.edge)
            else:
                is_sure = factor.edge[0] in alive
                self.perhaps[factor.edge] = "" if is_sure else f"what is made of {name!r}"

    def _is_random(self, number: int) -> bool:
        vertices, seen, waiting = self._flow.graph.vertices, set[int](), [number]
        is_random = False
        while waiting:
            vertex = vertices[number := waiting.pop()]
            if vertex.function.strip("_") in DRAWS:
                is_random = True
            elif vertex.kind == "operation" and number not in seen:
                waiting.extend(vertex.operands)
            elif vertex.kind != "constant":
                return False
            seen.add(number)
        return is_random

    def _see_zero(self, factor: Factor) -> None:
        number, position = factor.edge
        vertex, layers = self._flow.graph.vertices[number], self._observation.layers
        operand = self._flow.graph.vertices[vertex.operands[position]]
        names = tuple(name for _, name in factor.by)
        kinds = {kind for kind, _ in factor.by}
        outlooks = {self._outlook(kind, name) for kind, name in factor.by}
        if "opens" in outlooks:
            self.designs[factor.edge] = ""
        elif "could learn" in outlooks:
            self.stuck[factor.edge] = names
        elif any(kind == "call" and draws(self._observation, layers[n]) for kind, n in factor.by):
            self.drawn.add(factor.edge)
        elif kinds != {"constant"}:
            kind, name = next(origin for origin in factor.by if origin[0] != "constant")
            what = f"the {kind} {name!r}, which is all zero"
            if kind == "call":
                what = f"what {name!r} gives, which is all zero"
            if kind == "parameter" or (kind == "call" and layers[name].frozen):
                what += " and frozen"
            self.for_good[factor.edge] = f"it is multiplied by {what}"
        elif vertex.call < 0:
            self.doubts[factor.edge] = "the loss takes it times 0, as a term that is not on yet is"
        elif operand.function in _REDUCTIONS:
            self.doubts[factor.edge] = (
                f"only its `{operand.name}` times 0 is used, as where a parameter is touched for "
                "distributed training"
            )
        elif names == ("0",):
            self.for_good[factor.edge] = "it is multiplied by the number 0"
        else:
            self.doubts[factor.edge] = (
                f"it is multiplied by `{names[0]}`, as the first state of a recurrence is: give a "
                "batch of more steps"
            )

    def _outlook(self, kind: str, name: str) -> Literal["opens", "could learn", "stays"]:
        """Return what becomes of zeros: they open at the first step, or another check tells.

        Others could learn but for what they are multiplied with, or stay as they are.
        """
        layer, tensor = (name, "") if kind == "call" else (parent(name), name.rpartition(".")[2])
        record = self._observation.layers.get(layer) if kind in _OF_LAYERS else None
        if record is None:
            return "stays"
        gradients = {n: s for n, s in record.parameter_gradients.items() if tensor in ("", n)}
        is_activation = kind == "call" and record.activation is not None
        if (is_activation and not _is_zero(record.inputs)) or any(
            s.abs_max > 0.0 for s in gradients.values()
        ):
            return "opens"
        return "could learn" if gradients.keys() - record.frozen else "stays"

    # What a layer that is one vertex lets through.

    def _see_call(self, number: int, record: LayerRecord) -> None:
        given, out = record.inputs, record.activations
        if _has_no_choice(record):
            self.without_choice.add(record.name)
        if gives_nothing(record) or record.name in self.without_choice:
            scores = 2 if "keys" in record.options else None  # the values pass
            self.designs.update(dict.fromkeys(self._edges(number)[:scores], ""))
        elif record.activation == "softmax" and given is not None and out is not None and out.count:
            left = given.count - given.negative_inf_count
            if given.negative_inf_count > 0 and left == round(out.mean * out.count):
                text = (
                    "a mask leaves each row of a softmax after it a single choice on this batch, "
                    "whose weight is 1: give a batch of which it leaves more"
                )
                self._put(self.doubts, number, text)
        self._see_weights(number, record)
        weights = [s for n, s in record.parameters.items() if not n.startswith(_OFFSETS)]
        has_zero_weights = bool(weights) and all(map(_is_zero, weights))
        if out is not None and out.dead_fraction == 1.0 and not has_zero_weights:
            self._put(self.designs, number, "")
            self.dead.add(record.name)

    def _see_weights(self, number: int, record: LayerRecord) -> None:
        for owner in (record, *self._inside.get(record.name, ())):
            for name, values in owner.parameters.items():
                gradient = owner.parameter_gradients.get(name)
                if not _is_zero(values) or name.startswith(_OFFSETS):
                    continue
                if gradient is not None and gradient.abs_max > 0.0:
                    self._put(self.designs, number, "")
                elif gradient is None:
                    text = f"the {name} of {owner.label!r} is all zero and frozen"
                    self._put(self.for_good, number, text)
                else:
                    for edge in self._edges(number):
                        self.stuck[edge] = (record.name,)

    @cached_property
    def _inside(self) -> dict[str, list[LayerRecord]]:
        """The layers that were never called though the one around them was: its parameters."""
        inside: dict[str, list[LayerRecord]] = {}
        for record in self._observation.layers.values():
            if record.entered is None:
                inside.setdefault(parent(record.name), []).append(record)
        return inside

    def _edges(self, number: int) -> list[Edge]:
        return [(number, place) for place in range(len(self._flow.graph.vertices[number].operands))]

    def _put(self, kind: dict[Edge, str], number: int, text: str) -> None:
        kind.update(dict.fromkeys(self._edges(number), text))


def gives_zeros(record: LayerRecord) -> bool:
    """Whether all that a layer returned is zero."""
    return _is_zero(record.activations)


def _is_zero(seen: TensorStatistics | None) -> bool:
    return seen is not None and seen.finite_count == seen.count > 0 and seen.abs_max == 0.0


def _has_no_choice(record: LayerRecord) -> bool:
    """Whether it weighs a single key, whose weight is 1 whatever its score.

    A softmax over one score of each of several is no such attention, but a wrong dimension.
    """
    out = record.activations
    if record.options.get("keys") == 1:
        return True
    if record.activation != "softmax" or out is None:
        return False
    return out.shape[-2:] == (1, 1) and out.min == 1.0
