"""How a training went, as plain data: what began in which step, and whether it came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CourseEvent:
    """Something that began in a step of a training, and went on for a while.

    Args:
        rule: the rule whose follower saw it.
        kind: which of the things that this rule looks at.
        step: the number of the step that it began in.
        layer: the layer that it is seen at; ``""`` is the model, or its loss.
        value: what was measured when it was last seen.
        reference: what the value is compared with: what was usual here before, as a rule.
        last: the last step that it was seen in.
        rows: how many watched steps showed it.
        recovered: whether it was over by the end.
        peak: the value that was furthest off.
        role: which tensor of the layer.
        tensor: own name of the tensor, where the role has several.
        facts: what else was measured, by name.
    """

    rule: str
    kind: str
    step: int
    layer: str
    value: float
    reference: float
    last: int
    rows: int = 1
    recovered: bool = False
    peak: float = 0.0
    role: str = "activations"
    tensor: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LossSummary:
    """How the loss went, in scale-free terms. All levels are running medians.

    Args:
        count: how many losses were seen.
        first: the level at the beginning.
        best: the lowest level; `best_step` is when.
        best_step: the step of the best level.
        recent: the level now.
        noise: by how much single losses deviate from the level, the mean.
        never_negative: whether no loss was below zero.
        latest: the latest loss that is a number.
    """

    count: int = 0
    first: float = 0.0
    best: float = 0.0
    best_step: int = 0
    recent: float = 0.0
    noise: float = 0.0
    never_negative: bool = True
    latest: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether there were enough losses to speak of a level."""
        return self.count >= _ENOUGH

    @property
    def progress(self) -> float:
        """By how much the best level is below the first."""
        return self.first - self.best

    @property
    def lost(self) -> float:
        """By how much the level now is above the best."""
        return self.recent - self.best

    @property
    def is_at_floor(self) -> bool:
        """Whether the loss is next to nothing: it cannot be negative, and is near 0."""
        if not self.is_known or not self.never_negative:
            return False
        return self.recent <= max(_FLOOR * self.first, _TINY)

    @property
    def made_progress(self) -> bool:
        """Whether the loss fell by more than noise."""
        clear = max(_CLEAR * self.noise, _SOME * abs(self.first), _TINY)
        return self.is_known and self.progress > clear

    @property
    def runs_away(self) -> bool:
        """Whether a loss that can be negative falls without a bound: it rewards growth itself."""
        return self.is_known and self.recent < -_BOUNDLESS * max(abs(self.first), 1.0)

    @property
    def is_well(self) -> bool:
        """Whether the loss is near its floor, or fell and stayed near its best."""
        if not self.is_known or self.runs_away:
            return False
        kept = max(_NEAR * self.noise, _KEPT * self.progress)
        return self.is_at_floor or (self.made_progress and self.lost <= kept)

    @property
    def is_flat(self) -> bool:
        """Whether the level is where it began, and never was much lower."""
        still = max(_CLEAR * self.noise, _LITTLE * abs(self.first), _TINY)
        return self.is_known and self.progress <= still and abs(self.recent - self.first) <= still


_ENOUGH = 10
_FLOOR = 0.05
_TINY = 1e-7
_CLEAR = 3.0
_SOME = 0.03
_LITTLE = 0.02
_NEAR = 3.0
_BOUNDLESS = 1000.0
_KEPT = 0.25


@dataclass(frozen=True)
class Course:
    """How a training went that was watched.

    Args:
        steps: how many steps were watched.
        first_step, last_step: numbers of the first and the last of them.
        passes: how many forward passes these had.
        optimizer_steps: how many steps of optimizers.
        most_optimizer_steps: the most of them in one step.
        loss: how the loss went.
        events: what began, in order.
    """

    steps: int = 0
    first_step: int = 0
    last_step: int = 0
    passes: int = 0
    optimizer_steps: int = 0
    most_optimizer_steps: int = 0
    loss: LossSummary = field(default_factory=LossSummary)
    events: tuple[CourseEvent, ...] = ()
