"""What an observation holds beside layers: costs, extremes, probes, removable units, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from pytest_modelhealth.report.finding import Finding
from pytest_modelhealth.report.merging import Merge, Rule, of_each

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """How large a parameter is.

    Args:
        count: number of elements.
        nbytes: what they take.
    """

    count: int
    nbytes: int


@dataclass(frozen=True)
class LayerCosts:
    """What the calls of one layer took, without the layers inside.

    Args:
        multiply_adds: half of the floating-point operations that torch's counter sees, to which a
            multiplication and an addition are two. What it has no formula for (activations,
            normalisations, additions) is 0.
        saved_bytes: storages that autograd keeps for the backward pass, each at the first layer
            that has it saved; without parameters, buffers and the batch, which are there anyway.
            ``None`` where that could not be seen.
        activation_bytes: what the tensors take that its calls returned.
        input_shape, output_shape: of the first tensor that its first call took and returned;
            ``None`` where there was none.
        dtype: of the latter, without ``torch.``.
        parameters: its own, by their own names; a tied one at the first layer that owns it.
    """

    multiply_adds: int = 0
    saved_bytes: int | None = 0
    activation_bytes: int = 0
    input_shape: Shape | None = None
    output_shape: Shape | None = None
    dtype: str = ""
    parameters: Mapping[str, Size] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """What a run of the model took, measured beside the inspection.

    Args:
        layers: by name, each that was called or owns parameters.
        multiply_adds: of the forward of the model, as in `LayerCosts`.
        saved_bytes: what its forward had saved for the backward pass.
        held_bytes: what parameters, buffers and batch take, each storage once.
        peak_bytes: the most that was held at one time, with `held_bytes` in it: storages of tensors
            on all devices, without what kernels use for themselves.
        backward: whether loss and backward pass are in the peak.
        cuda_peak_bytes: the most that the allocator of CUDA had handed out, less what it had at the
            start, and with what the model and its batch hold there; ``None`` without CUDA.
        why_not: why nothing was measured, a sentence; ``""`` where it was.
        why_not_saved: why `saved_bytes` alone was not.
    """

    layers: Mapping[str, LayerCosts] = field(default_factory=dict)
    multiply_adds: int = 0
    saved_bytes: int | None = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    backward: bool = False
    cuda_peak_bytes: int | None = None
    why_not: str = ""
    why_not_saved: str = ""


@dataclass(frozen=True)
class Extreme:
    """Where a value stood that stands out; all are counted from 0.

    Args:
        value: the value itself.
        batch: number of its batch.
        sample: its place along the dimension of samples; ``None`` where dimension 0 of the tensor
            is not as long as the batch.
        index: its place in the tensor; ``None`` where that stayed on another device.
    """

    value: float
    batch: int
    sample: int | None = None
    index: tuple[int, ...] | None = None

    def moved(self, batches: int) -> Extreme:
        """Return the same after so many batches more."""
        return replace(self, batch=self.batch + batches)

    def __str__(self) -> str:
        sample = "" if self.sample is None else f", sample {self.sample}"
        return f"batch {self.batch}{sample}"


Extremes = Mapping[str, Extreme]
"""By role: ``activations``, ``gradients``, and ``inputs`` of the model."""


def _first(order: Callable[[Extreme], float]) -> Rule:
    """Return the rule that gives the first by an order, each counted by its place in the run."""

    def rule(values: list[Extreme], of: Merge) -> Extreme:
        return min((one.moved(s) for one, s in zip(values, of.starts, strict=True)), key=order)

    return rule


largest_of_each = of_each(_first(lambda one: -abs(one.value)))
earliest_of_each = of_each(_first(lambda one: one.batch))


@dataclass(frozen=True)
class Part:
    """That a run ended before all batches were seen.

    Args:
        batches: how many were seen.
        of: how many there are; ``None`` where the batches do not say.
        ended_by: what ended it: ``"max_batches=10"``.
    """

    batches: int
    of: int | None
    ended_by: str

    def __str__(self) -> str:
        """Return ``"12 of 57 batches (max_batches=12 ended the run)"``."""
        seen = f"{self.batches:,} of {self.of:,}" if self.of is not None else f"{self.batches:,}"
        noun = "batch" if (self.batches if self.of is None else self.of) == 1 else "batches"
        return f"{seen} {noun} ({self.ended_by} ended the run)"


@dataclass(frozen=True, slots=True)
class Definition:
    """A class, as strings: a report holds no class, and a pickle of it imports none.

    Args:
        module: name of the Python module.
        qualname: its qualified name there, ``"make.<locals>.Net"`` inside a function.
        path: the file; ``""`` where there is none.
        line: first line of one of its own functions, 0 where it has none.
    """

    module: str
    qualname: str
    path: str
    line: int


class Outcome(StrEnum):
    """What became of a probe that was asked for."""

    JUDGED = "judged"
    NOT_APPLICABLE = "not_applicable"
    NOT_TOLD = "not_told"


@dataclass(frozen=True)
class Parting:
    """Something that changed and should not have, or did not and should have.

    Args:
        kind: which of the things that the probe looks at, in its own words.
        effect: how much, in the unit of the probe's limit.
        layer: where the two runs part: the first layer in execution order that differs where
            nothing was changed. ``""`` is the model itself.
        role: which tensor of that layer: ``activations``, or ``parameters`` and their like.
        tensor: own name of the tensor, where the role has several.
        place: where in it the two are furthest apart, its index: ``"(2, 0, 5)"``.
        before: its value there in the run that the probe is held against.
        after: its value there in the run that was changed.
        between: the operations by which the layer's own code did it between its submodules.
        taker: the submodule that is given what differs, where that is the place.
        line: ``path:line`` of the user's code there; ``""`` if unknown.
        detail: what else is to be said of it.
        names: full names of the parameters that were moved, where it was those.
    """

    kind: str
    effect: float
    layer: str = ""
    role: str = "activations"
    tensor: str = ""
    place: str = ""
    before: float | None = None
    after: float | None = None
    between: tuple[str, ...] = ()
    taker: str = ""
    line: str = ""
    detail: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeRecord:
    """What one probe did to a batch, and what followed.

    Args:
        probe: its name.
        outcome: whether it could be judged.
        reason: why it does not apply, or could not be told; ``""`` where it was judged.
        changed: what was changed, for people: ``"every second sample, by its neighbour"``.
        partings: what it found, in execution order.
        notes: what else a reader should know.
        forwards: runs of the model that it took beyond the inspection and the base run that all
            probes share.
        backwards: backward passes likewise.
        seconds: how long they took.
    """

    probe: str
    outcome: Outcome = Outcome.JUDGED
    reason: str = ""
    changed: str = ""
    partings: tuple[Parting, ...] = ()
    notes: tuple[str, ...] = ()
    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Probed:
    """All probes of one inspection.

    Args:
        records: by name, in the order in which they ran.
        base_forwards: runs of the unchanged batch that they share.
        base_seconds: how long these took.
    """

    records: tuple[ProbeRecord, ...] = ()
    base_forwards: int = 0
    base_seconds: float = 0.0

    def __getitem__(self, name: str) -> ProbeRecord:
        """Return the record of a probe.

        Raises:
            KeyError: it did not run.
        """
        for record in self.records:
            if record.probe == name:
                return record
        raise KeyError(name)

    def get(self, name: str) -> ProbeRecord | None:
        """Return the record of a probe, ``None`` where it did not run."""
        return next((record for record in self.records if record.probe == name), None)

    @property
    def forwards(self) -> int:
        """Runs of the model in all."""
        return self.base_forwards + sum(record.forwards for record in self.records)

    @property
    def seconds(self) -> float:
        """How long all of them took."""
        return self.base_seconds + sum(record.seconds for record in self.records)


@dataclass(frozen=True)
class RemovableLayer:
    """The units of one layer that can go.

    Args:
        name: the layer whose weights make the units.
        units: how many it has.
        inactive: units that no output depended on, whatever the sample: dead behind their
            activation, or read by nothing.
        duplicates: pairs of a unit and its twin, which is kept: a unit before it with the same
            weights, bias and entries of a norm, bit for bit.
        samples: how many samples (tokens, where units are features of a sequence) said so.
        produced: the parameters that make the units, those of a norm behind them too, each with the
            dimension of it in which they lie.
    """

    name: str
    units: int
    inactive: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, int], ...] = ()
    samples: int = 0
    produced: tuple[tuple[str, int], ...] = ()

    @property
    def removable(self) -> tuple[int, ...]:
        """All units that can go, in order."""
        return tuple(sorted({*self.inactive, *(unit for unit, _ in self.duplicates)}))

    @property
    def fraction(self) -> float:
        """Part of the units that can go."""
        return len(self.removable) / self.units if self.units else 0.0


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the ranks of a device mesh, as its `DTensor` says.

    Args:
        shape: shape of the whole tensor.
        offset: where this rank's part begins in it.
        is_cut: whether each rank has a part of it, and not the whole or a term of a sum.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    is_cut: bool = False


def _distinct(values: list[tuple[Finding, ...]], _: Merge) -> tuple[Finding, ...]:
    """Return each finding once, as it was first seen."""
    found: dict[tuple[str, ...], Finding] = {}
    for one in chain(*values):
        found.setdefault((one.check, one.layer, one.role, one.tensor), one)
    return tuple(found.values())


@dataclass(frozen=True)
class Ranks:
    """That an observation is of several ranks.

    Args:
        ranks: the ranks that took part, in order.
        engine: what distributes the model, for people: ``"DDP"``, ``"FSDP2 and tensor parallel"``.
        disagreements: where ranks disagree, in execution order, held against no limit yet.
    """

    ranks: tuple[int, ...]
    engine: str
    disagreements: tuple[Finding, ...] = field(default=(), metadata={"merge": _distinct})


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for people: ``"rank 1"``, ``"ranks 0 and 2"``."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
