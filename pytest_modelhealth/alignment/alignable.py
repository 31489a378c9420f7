"""What an alignment reads of a layer, be it of a run or of a snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pytest_modelhealth.report import UNCALLED, LayerRecord, Status
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import TensorStatistics

Fingerprint = tuple[object, ...]


class Values(NamedTuple):
    """What tells the values of a parameter from those of others, as in `TensorStatistics`.

    Args:
        shape: its shape.
        size: number of elements.
        zeros: number of zeros.
        min: smallest value.
        max: largest value.
        rms: root mean square.
    """

    shape: tuple[int, ...]
    size: int
    zeros: int
    min: float
    max: float
    rms: float

    @classmethod
    def of(cls, seen: TensorStatistics) -> Values:
        """Return those of a tensor."""
        return cls(seen.shape, seen.count, seen.zero_count, seen.min, seen.max, seen.rms)

    @property
    def fingerprint(self) -> tuple[int, int, str, str]:
        """Number of elements and zeros, extremes to five digits: the same if transposed."""
        return self.size, self.zeros, f"{self.min:.4e}", f"{self.max:.4e}"

    def equals_joined(self, parts: Iterable[Values]) -> bool:
        """Whether these are the values of several parameters together."""
        shapes, sizes, zeros, least, most, rms = zip(*parts, strict=True)
        size, squares = sum(sizes), sum(n * x * x for n, x in zip(sizes, rms, strict=True))
        mean = math.sqrt(squares / size) if size else math.nan
        joined = Values(shapes[0], size, sum(zeros), min(least), max(most), mean)
        same_rms = math.isclose(mean, self.rms, rel_tol=1e-5, abs_tol=1e-12)
        return joined.fingerprint == self.fingerprint and same_rms


@dataclass(frozen=True)
class Alignable:
    """What an alignment reads of a layer.

    Args:
        name: its name, ``""`` for the model itself.
        type_name: name of its class, or of the function.
        kind: what it computes: `F.relu` and `nn.ReLU` are of one kind.
        order: its place in execution order; ``None`` where it was never called.
        status: what became of it.
        calls: how often it was called.
        output: shape of its output; ``()`` where there was none.
        output_size: number of elements in all its outputs; ``None`` where there was none.
        parameters: the values of its own parameters, by name.
        trained: whether any of its parameters got a gradient.
        tied: full names of the parameters of earlier layers that its own, by name, are.
        functional: whether it is a function and no module.
    """

    name: str
    type_name: str
    kind: str
    order: int | None
    status: Status
    calls: int
    output: tuple[int, ...] = ()
    output_size: int | None = None
    parameters: Mapping[str, Values] = field(default_factory=dict)
    trained: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)
    functional: bool = False

    @classmethod
    def of(cls, record: LayerRecord) -> Alignable:
        """Return what an alignment reads of a layer that ran."""
        seen = record.activations
        return cls(
            name=record.name,
            type_name=record.type_name,
            kind=record.activation or record.type_name,
            order=record.entered,
            status=record.status,
            calls=record.calls,
            output=() if seen is None else seen.shape,
            output_size=None if seen is None else seen.count,
            parameters={name: Values.of(one) for name, one in record.parameters.items()},
            trained=bool(record.parameter_gradients),
            tied=record.tied,
            functional=record.functional,
        )

    @property
    def own_name(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> float:
        """Its place in execution order; those never called come last."""
        return math.inf if self.order is None else self.order

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """A key of the values of its parameters; empty where it has none."""
        return tuple(sorted(values.fingerprint for values in self.parameters.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each parameter, in ascending order."""
        return tuple(sorted(values.size for values in self.parameters.values()))

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter, in ascending order."""
        return tuple(sorted(values.shape for values in self.parameters.values()))

    @property
    def is_inert(self) -> bool:
        """Whether it gives what it takes, or is never called."""
        idle = self.status is Status.ALIAS_OF_INPUT or self.status in UNCALLED
        return idle or self.type_name == "Identity"

    def has_other_values(self, other: Alignable) -> bool:
        """Whether the values of their parameters differ, be it in the last digits."""
        if self.fingerprint != other.fingerprint:
            return True
        ours, theirs = (sorted(v.rms for v in one.parameters.values()) for one in (self, other))
        return ours != theirs

    def has_form_of(self, other: Alignable) -> bool:
        """Whether the two are of one kind, with parameters of the same sizes."""
        return self.kind == other.kind and self.sizes == other.sizes


def containers(names: Iterable[str]) -> frozenset[str]:
    """Return the names of the layers that others lie in."""
    return frozenset(above for name in names for above in ancestors(name))
