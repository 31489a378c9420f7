"""What probes did and what followed, as plain data: a record a probe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
