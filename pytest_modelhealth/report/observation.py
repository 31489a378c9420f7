"""What a run saw of a model: a record a layer, its losses and its tasks, as plain data."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pytest_modelhealth.errors import LayerNotFoundError, require_kind, suggest
from pytest_modelhealth.report.flow import Flow
from pytest_modelhealth.report.merging import Merge, known, merged, of_each
from pytest_modelhealth.report.parts import (
    Costs,
    Definition,
    Extremes,
    Part,
    Placement,
    Probed,
    Ranks,
    RemovableLayer,
    earliest_of_each,
    largest_of_each,
)
from pytest_modelhealth.report.training import Course, Stepped

if TYPE_CHECKING:
    from pytest_modelhealth.statistics import TensorStatistics

ROLES = ("inputs", "activations", "gradients", "parameters", "parameter_gradients", "buffers")
"""Which tensor of a layer: what `watch(what=...)` and `get_statistics(what=...)` take.

``gradients`` are those of the loss with respect to the activations.
"""
BACKWARD_ROLES, STATE_ROLES = ("gradients", "parameter_gradients"), ("parameters", "buffers")

Option = float | int | bool | str | None

MEASURED = frozenset({"typical_score", "value_std"})
"""Options that are no settings, but were measured on the operands of fused attention."""


class Status(StrEnum):
    """What became of a layer. Every layer ends with one."""

    OBSERVED = "observed"
    NOT_CALLED = "not_called"
    PARAMETERS_READ = "parameters_read"
    NO_GRAD_PATH = "no_grad_path"
    UNUSED_IN_LOSS = "unused_in_loss"
    ALIAS_OF_INPUT = "alias_of_input"
    OPAQUE = "opaque"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class ZeroSlices:
    """Rows and columns of a parameter in which all weights are zero, and all gradients of them.

    Args:
        rows: indices along dimension 0, mostly the outputs.
        columns: indices along dimension 1, mostly the inputs.
    """

    rows: frozenset[int] = field(metadata={"merge": "common"})
    columns: frozenset[int] = field(metadata={"merge": "common"})


FULLNESS = (
    Status.OBSERVED,
    Status.ALIAS_OF_INPUT,
    Status.UNUSED_IN_LOSS,
    Status.NO_GRAD_PATH,
    Status.UNSUPPORTED,
    Status.OPAQUE,
    Status.PARAMETERS_READ,
    Status.NOT_CALLED,
)
"""What became of a layer, from what tells most to what tells least."""
UNCALLED = frozenset({Status.NOT_CALLED, Status.PARAMETERS_READ})
"""What became of layers that no call shows."""


def _of_the_fullest(values: list[Any], of: Merge) -> Any:
    """Return that of the record that saw most of its layer."""
    ranks = [FULLNESS.index(record.status) for record in of.records]
    return values[ranks.index(min(ranks))]


def _zero_in_all(values: list[Mapping[str, ZeroSlices]], of: Merge) -> dict[str, ZeroSlices]:
    """Return the slices that are zero wherever there are gradients of the parameter."""
    each = [*zip(values, of.records, strict=True)]
    return {
        name: merged([one[name] for one in values if name in one])
        for name in dict.fromkeys(chain(*values))
        if all(name in one for one, record in each if name in record.parameter_gradients)
    }


def _options(values: list[Mapping[str, Option]], of: Merge) -> dict[str, Option]:
    """Return those of the first rank, and the mean of what each measured."""
    measured = [{name: v[name] for name in sorted(MEASURED & v.keys())} for v in values]
    return {**values[0], **of_each(known(fmean))(measured, of)}


def _same_on_all(values: list[bool | None], of: Merge) -> bool | None:
    """Whether activations are the same for all samples of all ranks."""
    equal = [r.activations for r, is_equal in zip(of.records, values, strict=True) if is_equal]
    means = {seen.mean for seen in equal if seen is not None and seen.finite_count}
    told = [value for value in values if value is not None]
    return all(told) and len(means) < 2 if told else None


@dataclass(frozen=True)
class LayerRecord:
    """Everything seen of one layer.

    Args:
        name: fully qualified name, as `torch.nn.Module.named_modules` spells it; ``""`` is the
            model itself. A functional activation is named after the module that calls it.
        type_name: class of the module, or the function's name for a functional layer.
        status: what became of it.
        reason: why, where the status is not ``observed``.
        functional: whether it is a function call rather than a module.
        activation: canonical name of the activation function it is (``"relu"``), or ``None``.
        entered: when its first call began, on the clock of all calls and returns of the run;
            ``None`` if it was never called.
        completed: when its last call returned, on the same clock.
        calls: how often it was called.
        aliases: further names of the same module.
        inputs, activations, gradients: statistics over calls and tensors; ``None`` if not seen.
        parameters, parameter_gradients, buffers: statistics by the tensor's own name in the layer;
            a tied weight stands only at the first layer that owns it.
        tied: of each parameter that is one of an earlier layer, the full name there, by its own
            name: ``{"weight": "embedding.weight"}``.
        frozen: names of the parameters that do not require gradients.
        unreached: names of the parameters without a gradient on which, in the graph of autograd, no
            output of the model depends.
        read_in_vain: those of `unreached` whose values the forward gave to a function of torch.
        grad_off: whether gradients were switched off (``torch.no_grad``) when a call of it returned
            what has no graph.
        nonfinite_calls: for ``inputs`` and ``activations``, the first call, from 0, in which
            there was a NaN or positive infinity (a mask is made of negative ones); of the first
            batch that had one.
        watched: the roles that were to be observed.
        source: ``path:line`` of the user's code that first calls it, ``""`` where it is not known.
        options: how the module or the call is set up, where a check reads it: ``dim`` of a softmax,
            ``training`` of a module, ``num_embeddings`` and ``padding_idx`` of an embedding.
        equal_samples: whether its activations were the same for every sample of the batch; ``None``
            where that was not seen, or there is only one sample.
        equal_input_samples: whether its inputs were; looked at only where `equal_samples` is true,
            and for the model itself.
        zero_slices: of each parameter that has such, and others besides, the rows and columns in
            which weights and gradients are all zero; looked at on the CPU, and not in embeddings.
        definitions: where the ``class`` statement of its module may stand, the likeliest first;
            empty where it is functional.
        largest: by role, where the largest magnitude of a run over batches stood; empty where one
            batch was run by itself.
        nonfinite: by role, where the first NaN or positive infinity stood, likewise.
        placements: how tensors lie on several ranks, where that is known: by role, of parameters,
            their gradients and buffers by role and own name (``"parameters.weight"``).
        ill_ranks: by role, the ranks with a NaN or infinity, where each rank has another tensor.
    """

    name: str
    type_name: str
    status: Status = field(metadata={"merge": _of_the_fullest})
    reason: str = field(default="", metadata={"merge": _of_the_fullest})
    functional: bool = False
    activation: str | None = None
    entered: int | None = field(default=None, metadata={"merge": "known"})
    completed: int | None = field(default=None, metadata={"merge": "known"})
    calls: int = field(default=0, metadata={"merge": "sum", "ranks": "max"})
    aliases: tuple[str, ...] = ()
    inputs: TensorStatistics | None = field(
        default=None, metadata={"merge": "statistics", "ranks": "apart"}
    )
    activations: TensorStatistics | None = field(
        default=None, metadata={"merge": "statistics", "ranks": "apart"}
    )
    gradients: TensorStatistics | None = field(
        default=None, metadata={"merge": "statistics", "ranks": "apart"}
    )
    parameters: Mapping[str, TensorStatistics] = field(
        default_factory=dict, metadata={"merge": "latest of each", "ranks": "apart"}
    )
    parameter_gradients: Mapping[str, TensorStatistics] = field(
        default_factory=dict, metadata={"merge": "statistics of each", "ranks": "apart"}
    )
    buffers: Mapping[str, TensorStatistics] = field(
        default_factory=dict, metadata={"merge": "latest of each", "ranks": "apart"}
    )
    frozen: frozenset[str] = field(default=frozenset(), metadata={"ranks": "common"})
    unreached: frozenset[str] = field(default=frozenset(), metadata={"ranks": "common"})
    read_in_vain: frozenset[str] = field(default=frozenset(), metadata={"ranks": "common"})
    tied: Mapping[str, str] = field(default_factory=dict)
    grad_off: bool = field(default=False, metadata={"merge": "any"})
    nonfinite_calls: Mapping[str, int] = field(
        default_factory=dict,
        metadata={"merge": "first with any", "ranks": of_each(lambda values, _: min(values))},
    )
    watched: frozenset[str] = frozenset(ROLES)
    source: str = ""
    options: Mapping[str, Option] = field(default_factory=dict, metadata={"ranks": _options})
    equal_samples: bool | None = field(
        default=None, metadata={"merge": "all known", "ranks": _same_on_all}
    )
    equal_input_samples: bool | None = field(default=None, metadata={"merge": "all known"})
    zero_slices: Mapping[str, ZeroSlices] = field(
        default_factory=dict, metadata={"merge": _zero_in_all}
    )
    definitions: tuple[Definition, ...] = field(default=(), metadata={"json": False})
    largest: Extremes = field(default_factory=dict, metadata={"merge": largest_of_each})
    nonfinite: Extremes = field(default_factory=dict, metadata={"merge": earliest_of_each})
    placements: Mapping[str, Placement] = field(default_factory=dict, metadata={"ranks": "apart"})
    ill_ranks: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict, metadata={"merge": of_each(lambda v, _: tuple(sorted({*chain(*v)})))}
    )

    @property
    def label(self) -> str:
        """The name for people: the class name where the layer is the model itself."""
        return self.name or self.type_name

    def tensors(self, what: str) -> dict[str, TensorStatistics]:
        """Return what was seen in role `what`, by the tensor's own name (``""`` where it has none).

        Raises:
            LayerNotFoundError: `what` is no role.
        """
        if what not in ROLES:
            raise LayerNotFoundError(
                f"unknown role {what!r}{suggest(what, ROLES)} Roles: {', '.join(ROLES)}."
            )
        seen = getattr(self, what)
        if what in ROLES[3:]:
            return dict(seen)
        return {} if seen is None else {"": seen}

    def statistics(self, what: str = "activations") -> TensorStatistics | None:
        """Return the statistics of role `what`, merged over its tensors; ``None`` if not seen."""
        merged: TensorStatistics | None = None
        for statistics in self.tensors(what).values():
            merged = statistics if merged is None else merged.merge(statistics)
        return merged

    def why_not_seen(self, what: str) -> str:
        """Return a sentence on why there is nothing in role `what`."""
        if self.status is not Status.OBSERVED:
            why = f"its status is {self.status}: {self.reason}"
        else:
            why = "the layer has none, or watch() left this role out"
        return f"no {what.replace('_', ' ')} were seen of layer {self.label!r}: {why}"

    def merge(self, other: LayerRecord) -> LayerRecord:
        """Return what both saw of this layer; the status is the one that saw more.

        Parameters and buffers are no flow through the layer: they are the later ones.

        Raises:
            InspectionError: `other` is no record.
        """
        require_kind(other, LayerRecord)
        return merged((self, other))


class LayerRecords(Mapping[str, LayerRecord]):
    """Layers' records by name, each made when somebody first asks for it: often nobody does.

    A copy and a pickle are plain dictionaries.
    """

    def __init__(self, names: Iterable[str], make: Callable[[str], LayerRecord]) -> None:
        self._records: dict[str, LayerRecord | None] = dict.fromkeys(names)
        self._make, self._unmade = make, len(self._records)

    def __getitem__(self, name: str) -> LayerRecord:
        record = self._records[name]
        if record is None:
            record = self._records[name] = self._make(name)
            self._unmade -= 1
            if not self._unmade:
                del self._make  # it holds what was seen of every layer
        return record

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def _all(self) -> Any:
        for name in self._records if self._unmade else ():
            _ = self[name]
        return self._records

    def values(self) -> ValuesView[LayerRecord]:
        """Return all records, in order."""
        return self._all().values()  # type: ignore[no-any-return]

    def items(self) -> ItemsView[str, LayerRecord]:
        """Return all names and records, in order."""
        return self._all().items()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type[dict[str, LayerRecord]], tuple[dict[str, LayerRecord]]]:
        return dict, (self._all(),)


@dataclass(frozen=True)
class GivenTensor:
    """A tensor of the batch, as it was given.

    Args:
        name: what it is called in the flow: ``"input 0"``, ``"input 0[1]"`` inside an object.
        shape: its shape.
        dtype: its dtype, without ``torch.``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


def _same(values: list[Any], _: Merge) -> Any:
    """Return what all have; ``None`` where they differ."""
    return values[0] if len({*values}) == 1 else None


def _tail_share(values: list[float], of: Merge) -> float:
    """Return the share over all targets; 0 where ranks have different tails."""
    if _same([one.tail for one in of.records], of) is None:
        return 0.0
    ends: float = sum(share * one.count for share, one in zip(values, of.records, strict=True))
    count: int = sum(one.count for one in of.records)
    return ends / max(count, 1)


@dataclass(frozen=True)
class ClassTargets:
    """Class indices that a loss was given as target.

    Args:
        count: how many there are, those to be ignored among them.
        ignored: how many are to be ignored.
        tail: the index that several samples end in, twice or more; ``None`` if there is none.
        tail_share: share of the targets that are such ends.
        only: the one class that all others are; ``None`` where there are several.
        skips_a_class: whether less than half are to be ignored, some of them in the midst of
            others: they are no padding.
    """

    count: int = field(metadata={"ranks": "sum"})
    ignored: int = field(metadata={"ranks": "sum"})
    tail: int | None = field(default=None, metadata={"ranks": _same})
    tail_share: float = field(default=0.0, metadata={"ranks": _tail_share})
    only: int | None = field(default=None, metadata={"ranks": _same})
    skips_a_class: bool = field(default=False, metadata={"ranks": "any"})


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function of torch.

    Args:
        function: its name in `torch.nn.functional`.
        layer: the layer whose forward called it; ``None`` where it was called outside the model.
        input: statistics of its first argument.
        target: statistics of its target.
        options: its plain arguments by name; ``weight`` and ``pos_weight`` are true where given.
        value: what it returned, the mean where that is no scalar.
        classes: number of classes in the input; 0 where the function knows none.
        rows: ``"probabilities"`` or ``"log_probabilities"`` where every row of classes is, else
            ``""``; of many rows a sample is looked at.
        log_normalizer: median absolute logarithm of what the exponentials of a row sum to; 0 for
            log-probabilities.
        made_by: the operation that made the input (``"softmax"``), where its graph tells.
        made_along: the dimension that the operation ran along.
        clamped: the bounds that a clamp of the input had, if one made it; ``None`` is no bound.
        cosines: whether it is made of inner products of vectors of length one, times a scale and
            with a margin or not, as far as its graph tells.
        targets: what the class indices are, where the target holds such.
    """

    function: str
    layer: str | None
    input: TensorStatistics | None
    target: TensorStatistics | None
    options: Mapping[str, Option] = field(default_factory=dict)
    value: float | None = field(default=None, metadata={"ranks": "mean"})
    classes: int = 0
    rows: str = ""
    log_normalizer: float | None = field(default=None, metadata={"ranks": "mean"})
    made_by: str = ""
    made_along: int | None = None
    clamped: tuple[float | None, float | None] | None = None
    cosines: bool = False
    targets: ClassTargets | None = field(default=None, metadata={"ranks": "record"})


@dataclass(frozen=True)
class LossPath:
    """How the user's loss was computed from the output of the model.

    Args:
        operations: what autograd recorded between the two, each operation once.
        reaches_output: whether the loss depends on the output.
        sign: 1 if the loss cannot be negative, whatever the output, -1 if it cannot be positive, 0
            where neither is certain.
        uses_target: whether anything was computed from the target; ``None`` if it has no tensors.
        switched_off: whether something on the way is multiplied by zero, or by a mask of zeros.
    """

    operations: tuple[str, ...] = ()
    reaches_output: bool | None = None
    sign: int = 0
    uses_target: bool | None = None
    switched_off: bool = False


@dataclass(frozen=True)
class UnregisteredParameter:
    """A leaf that got a gradient from the loss and that ``named_parameters()`` does not know.

    Args:
        path: where it sits in the model (``"blocks[0].weight"``); ``""`` where nothing but the
            graph holds it.
        layer: the registered module whose attributes lead to it.
        kind: ``"module"`` if a module owns it that torch does not know to be in the model,
            ``"attribute"`` if a parameter is kept as such, ``"tensor"`` if it is no parameter,
            ``"made"`` if the forward made it.
        count: number of its elements.
        gradient: statistics of its gradient.
        line: ``path:line`` of the user's code that first uses one without a path, if known.
    """

    path: str
    layer: str
    kind: str
    count: int
    gradient: TensorStatistics | None
    line: str = ""


@dataclass(frozen=True)
class TaskPair:
    """How the gradients of a task lie to those of a later one.

    Args:
        other: the later task.
        cosines: cosine of the angle between the two by layer, over the layer's own parameters.
    """

    other: str
    cosines: Mapping[str, float]


@dataclass(frozen=True)
class TaskGradients:
    """What one of several named losses asks of the model.

    Args:
        name: name of the task.
        loss: value of its loss.
        gradient_norms: L2 norm of the gradients of a layer's own parameters, by layer, of those
            that it reaches.
        pairs: how these gradients lie to those of each later task that reaches the same layers.
    """

    name: str
    loss: float
    gradient_norms: Mapping[str, float]
    pairs: tuple[TaskPair, ...] = ()


def _layers_of_ranks(values: list[Mapping[str, LayerRecord]], of: Merge) -> dict[str, LayerRecord]:
    """Merge layers by name, of each that of the rank first that saw most of it."""

    def rule(records: list[LayerRecord], of: Merge) -> LayerRecord:
        return merged(sorted(records, key=lambda r: FULLNESS.index(r.status)), of.over)

    layers = of_each(rule)(values, of)
    return dict(sorted(layers.items(), key=lambda item: item[1].status in UNCALLED))


def _mean_loss(values: list[float | None], of: Merge) -> float | None:
    each = zip(values, of.records, strict=True)
    known = [(loss * record.batches, record.batches) for loss, record in each if loss is not None]
    return sum(loss for loss, _ in known) / sum(n for _, n in known) if known else None


def _loss_calls(values: list[tuple[LossCall, ...]], of: Merge) -> tuple[LossCall, ...]:
    """Return those of the first; in evaluation batches of one class each hold several together."""
    first, root = values[0], of.records[0].layers.get("")
    if root is None or root.options.get("training") or len({*map(len, values)}) > 1:
        return first
    return tuple(
        replace(one, targets=replace(one.targets, only=None))
        if one.targets and any(c.targets and c.targets.only != one.targets.only for c in calls)
        else one
        for one, calls in zip(first, zip(*values, strict=True), strict=True)
    )


def _loss_calls_of_ranks(values: list[tuple[LossCall, ...]], of: Merge) -> tuple[LossCall, ...]:
    each = ([calls[n] for calls in values if calls[n:]] for n in range(len(values[0])))
    return tuple(merged(calls, of.over) for calls in each)


@dataclass(frozen=True)
class Observation:
    """What one run, or several merged ones, saw of a model; made by `capture`.

    Args:
        layers: every layer by name, in execution order, those never called last.
        model_type: class name of the model.
        loss: value of the loss; ``None`` where there was none.
        backward: whether a backward pass ran.
        no_gradients: why there was no gradient to see although nobody left the backward pass out,
            and what would give one, a phrase; ``""`` where there was one, or nothing to train.
        batches: number of batches merged.
        samples: size of dimension 0 of the model's first input tensor, summed over batches.
        notes: what a reader should know, a sentence each ("eager values of a compiled model").
        errors: errors inside our own hooks; observations that they cost are missing.
        loss_calls: calls of torch's loss functions, in order, those of the first batch.
        loss_path: how the loss was computed from the output of the first batch, where the user
            gave a loss.
        unregistered: leaves with a gradient that are no parameters of the model, those of the first
            batch.
        tasks: what each of several named losses asks of the model, those of the first batch.
        flow: who feeds whom in the first batch; ``None`` where nothing was recorded.
        probes: what probes did with the first batch, and what followed.
        stepped: what a training step did; ``None`` where none was run.
        course: how a training went that was watched; ``None`` where none was.
        given: the tensors that the model was called with, those of the first batch.
        own_functions: whether a custom `torch.autograd.Function` of the user's took part.
        has_zero_gradients: whether a parameter, or rows or columns of one that are zero, may have a
            gradient of exactly zero: it is known without a look at the layers.
        sample_deviation: by how much samples deviate from each other, relative to the deviation of
            all numbers of an output: the root of the mean variance along dimension 0 over that of
            the whole, 0 to 1. Of several outputs and batches the largest; ``None`` where no
            floating output has two values a sample or more.
        costs: what a run takes in arithmetic and memory, of the first batch; ``None`` where that
            was not asked for.
        unlisted: why nothing inside the model could be seen, not even which layers it has; ``""``
            where that could be.
        removable: by layer, the units that can go; ``None`` where nobody asked for them.
        part: that a run over batches ended before the last one; ``None`` where all were run.
        ranks: how it was put together from several ranks; ``None`` where it is of one process.
    """

    layers: Mapping[str, LayerRecord] = field(
        metadata={"merge": "record of each", "ranks": _layers_of_ranks, "json": False}
    )
    model_type: str
    loss: float | None = field(default=None, metadata={"merge": _mean_loss})
    backward: bool = field(default=False, metadata={"merge": "any"})
    no_gradients: str = field(default="", metadata={"merge": "all"})
    batches: int = field(default=1, metadata={"merge": "sum", "ranks": "max"})
    samples: int = field(default=0, metadata={"merge": "sum"})
    notes: tuple[str, ...] = field(default=(), metadata={"merge": "union"})
    errors: tuple[str, ...] = field(default=(), metadata={"merge": "in a row", "ranks": "union"})
    loss_calls: tuple[LossCall, ...] = field(
        default=(), metadata={"merge": _loss_calls, "ranks": _loss_calls_of_ranks}
    )
    loss_path: LossPath | None = field(default=None, metadata={"ranks": "record"})
    unregistered: tuple[UnregisteredParameter, ...] = ()
    tasks: tuple[TaskGradients, ...] = ()
    flow: Flow | None = field(default=None, metadata={"ranks": "known", "json": False})
    probes: Probed = field(default_factory=Probed)
    stepped: Stepped | None = None
    course: Course | None = None
    given: tuple[GivenTensor, ...] = ()
    own_functions: bool = field(default=False, metadata={"merge": "any"})
    has_zero_gradients: bool = field(default=False, metadata={"merge": "any", "json": False})
    sample_deviation: float | None = field(default=None, metadata={"merge": "max"})
    costs: Costs | None = None
    unlisted: str = ""
    removable: Mapping[str, RemovableLayer] | None = None
    part: Part | None = field(default=None, metadata={"merge": "apart"})
    ranks: Ranks | None = field(default=None, metadata={"merge": "record"})

    @property
    def outputs_only(self) -> str:
        """Why its inputs and outputs alone were seen, nothing inside; ``""`` where more was."""
        inner = [record for record in self.layers.values() if record.name]
        if self.unlisted or any(record.status is not Status.OPAQUE for record in inner):
            return self.unlisted
        return inner[0].reason if inner else ""

    @property
    def is_of_own_step(self) -> bool:
        """Whether steps of the user's own training were seen, not a run of ours."""
        return self.flow is None and not (self.stepped is None and self.course is None)

    def called_at(self, layer: str) -> str:
        """Return ``path:line`` of the user's code that first called a layer; ``""`` if unknown."""
        record = self.layers.get(layer)
        if record is not None and record.source:
            return record.source
        return self.flow.line(layer) if self.flow is not None and layer in self.flow else ""

    def merge(self, other: Observation) -> Observation:
        """Return what both saw, layer by layer; the loss is the mean over batches.

        Raises:
            InspectionError: `other` is no observation.
        """
        require_kind(other, Observation)
        return merged((self, other), starts=(0, self.batches))


Noises = Mapping[tuple[str, str, str], Mapping[str, float]]
"""The noise of each statistic by layer, role and own name of a tensor; ``("", "loss", "")`` has
that of the loss as ``"value"``."""
