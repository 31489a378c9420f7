"""What a training step did in a few calls, and how a training went, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SteppedParameter:
    """One parameter over the calls of a step; each tuple has an entry a call.

    Args:
        name: its full name.
        dimensions: how many it has.
        dtype: its dtype, without ``torch.``.
        trainable: whether it required a gradient before the first call.
        held: whether an optimizer that was given, or that stepped, holds it; where there is none,
            whether the step moves it, or moves none.
        added: L2 norm of what backward passes left as its gradient, before anything else was done
            to it; ``None`` where none reached it.
        gradients: L2 norm of its gradient when its optimizer first stepped in the call; ``None``
            where it had none then, or no optimizer of it stepped.
        updates: L2 norm of what its optimizers changed in the call, by that of its values before.
        changes: the same of the whole call, whoever changed it.
        swallowed: in half precision, share of its elements that had a gradient and did not change,
            over all calls.
        traits: what is true of it, of these: ``used_again`` (an optimizer stepped on a gradient
            that it had stepped on before), ``piled`` (one stepped on a gradient with a pass that
            another had stepped on before), ``between`` (its gradient was written to between two
            passes that add up), ``erased`` (it was all zero when the optimizer stepped, in every
            call, although backward passes left another), ``late`` (the first call writes to it
            after the step), ``shared`` (several optimizers that stepped hold it, and not the very
            same parameters), ``zero`` (it is a matrix of zeros before the first call), ``kept`` (it
            has a gradient before that, though it is frozen).
    """

    name: str
    dimensions: int
    dtype: str
    trainable: bool
    held: bool
    added: tuple[float | None, ...] = ()
    gradients: tuple[float | None, ...] = ()
    updates: tuple[float, ...] = ()
    changes: tuple[float, ...] = ()
    swallowed: float = 0.0
    traits: frozenset[str] = frozenset()

    @property
    def layer(self) -> str:
        """The layer that has it."""
        return self.name.rpartition(".")[0]

    @property
    def own(self) -> str:
        """Its own name there."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class SteppedOptimizer:
    """One optimizer.

    Args:
        type_name: its class.
        given: whether it was given to `run_step`; others were seen as they stepped.
        holds: how many tensors it holds.
        foreign: how many of them are not the model's.
        first: the first parameter of the model that it holds.
        steps: how often it stepped, a number a call.
        rates: largest learning rate of its groups when it first stepped, of each call in which it
            did.
        initial_rate: its largest rate by a schedule's reckoning; ``None`` without a schedule.
        decay: largest rate times weight decay of a group.
        betas: decay rates of its averages; empty where it has none.
        spread: largest learning rate of its groups, by the least positive one.
        frozen_groups: how many groups hold nothing but frozen parameters, of several.
        direction: cosine between its first update and the gradient that it was made from; ``None``
            where there was none.
        traits: what is true of it, of these: ``maximizes`` (a group does), ``anew`` (it was not
            given, and stepped in one call only), ``unreached`` (it was given, and steps on no
            gradient ever), ``unused`` (it was given, never steps, and gradients of what it holds
            are cleared), ``closure`` (it was given one), ``constant`` (which returned the very same
            number each time), ``twice`` (a group has a parameter twice), ``emptied`` (its state is
            gone before each later step), ``early`` (a schedule moves on before each of its steps),
            ``hurried`` (one moves on twice or more for each), ``partly`` (of groups with one rate
            some keep it, and others never step with it).
    """

    type_name: str
    given: bool
    holds: int
    foreign: int
    first: str = ""
    steps: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    initial_rate: float | None = None
    decay: float = 0.0
    betas: tuple[float, ...] = ()
    spread: float = 1.0
    frozen_groups: int = 0
    direction: float | None = None
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LayerMode:
    """In which modes a layer ran.

    Args:
        layer: its name.
        training: of each call of the step, whether the layer was in training mode whenever it ran
            with gradients on; ``None`` where it did not run so.
        trainable: whether it has a parameter that requires a gradient.
        kind: ``"dropout"``, ``"batch_norm"`` or ``""``.
        traits: what is true of it, of these: ``unseen`` (in training mode, it ran both with and
            without gradients in a call), ``drifts`` (it is frozen, and its running statistics
            move), ``hasty`` (their momentum is more than 0.5), ``still`` (they never moved,
            although it ran in training mode), ``twice`` (a backward pass runs it again in training
            mode), ``anew`` (and from other random numbers), ``aside`` (a dropout, it ran in
            training mode only, and without gradients only).
    """

    layer: str
    training: tuple[bool | None, ...] = ()
    trainable: bool = False
    kind: str = ""
    traits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LossSlope:
    """How the gradient at the optimizer's step lies to the slope of the loss that is returned.

    Args:
        slope: of the loss along the gradient, per unit of length of all parameters.
        gradient: L2 norm of the gradient at the step; the slope, if it is that of the loss.
        added: L2 norm of what backward passes left, before clipping or unscaling; ``None`` where
            another direction stands there.
        scale: the loss scale that a scaler multiplies the loss by, and that `added` is without.
    """

    slope: float
    gradient: float
    added: float | None = None
    scale: float = 1.0

    @property
    def factor(self) -> float:
        """The gradient by the slope: 1 where the optimizer descends the loss that is returned."""
        return self.gradient / self.slope if self.slope else float("inf")


@dataclass(frozen=True)
class Stepped:
    """What a training step did.

    Args:
        losses: what each call returned; ``None`` for what is no number.
        parameters: every parameter of the model.
        optimizers: every optimizer that was given, or stepped.
        modes: every layer that ran.
        samples: how many samples the batch has; 0 where its tensors share no first dimension.
        runs_whole: whether the model runs on all of these at once.
        passes: how many backward passes the first call had.
        wasted: how many of these were cleared before any optimizer stepped on a gradient of theirs.
        dropped: how many of the first call's were cleared so by a later call.
        clips: norms of what `clip_grad_norm_` was given in the first call.
        clips_late: whether all of that came after the last step of an optimizer.
        writes: whether the first call writes to its batch.
        slope: the gradient by the slope of the loss; ``None`` where that cannot be told.
        halves: whether a gradient changes when each half of the batch is replaced by the other;
            empty where that cannot be told.
        unlearned: parameters that ran, are held and have no gradient, on which the returned loss
            depends all the same, and its slope along them.
        sign: 1 if the loss that is returned cannot be negative, as far as its graph tells, -1 if it
            cannot be positive, 0 where neither is certain.
        is_loss: whether a loss function of torch made the number that is returned.
        climbs: cosine between the gradient and what moved weights beside optimizers in the first
            call; ``None`` where nothing did.
        switched: whether the step itself brings the model to evaluation mode to train in it.
        seeds: whether the random numbers drawn are the same in every call.
        strays: parameters that get a gradient, or were made by the step, and that no optimizer
            holds, as the model did not know them.
        unheld: parameters around the step whose gradients add up, and that no optimizer holds.
        advances: whether a learning rate schedule moved on.
        switches: modules with an attribute ``requires_grad`` that is no setting of theirs.
        raised: what the call after those of `losses` raised; ``""`` if none did.
        growing: containers and variables that kept more of autograd's graph after each call.
        untied: two weights that are tied, and not in the model, and what says that they are.
        overfit: loss of the first and the best of the last calls on the one batch, and which that
            was; ``None`` where that was not asked for.
        resumed: what differs after the step is resumed from its saved state, the first such.
    """

    losses: tuple[float | None, ...]
    parameters: tuple[SteppedParameter, ...] = ()
    optimizers: tuple[SteppedOptimizer, ...] = ()
    modes: tuple[LayerMode, ...] = ()
    samples: int = 0
    runs_whole: bool = False
    passes: int = 0
    wasted: int = 0
    dropped: int = 0
    clips: tuple[float, ...] = ()
    clips_late: bool = False
    writes: bool = False
    slope: LossSlope | None = None
    halves: tuple[bool, ...] = ()
    unlearned: tuple[tuple[str, ...], float] = ((), 0.0)
    sign: int = 0
    is_loss: bool = False
    climbs: float | None = None
    switched: bool = False
    seeds: bool = False
    strays: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()
    advances: bool = False
    switches: tuple[str, ...] = ()
    raised: str = ""
    growing: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    overfit: tuple[float, float, int] | None = None
    resumed: str = ""

    @property
    def trained(self) -> tuple[SteppedParameter, ...]:
        """The trainable parameters that an optimizer holds."""
        return tuple(p for p in self.parameters if p.trainable and p.held)


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
    """

    count: int = 0
    first: float = 0.0
    best: float = 0.0
    best_step: int = 0
    recent: float = 0.0
    noise: float = 0.0
    never_negative: bool = True

    @property
    def is_known(self) -> bool:
        """Whether there were enough losses to speak of a level."""
        return self.count >= 10

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
        is_near = self.recent <= max(0.05 * self.first, _TINY)
        return self.is_known and self.never_negative and is_near

    @property
    def is_well(self) -> bool:
        """Whether the loss is near its floor, or fell by more than noise and stayed near its best.

        One that can be negative and falls without a bound rewards growth itself.
        """
        if not self.is_known or self.recent < -1000.0 * max(abs(self.first), 1.0):
            return False
        clear = max(3.0 * self.noise, 0.03 * abs(self.first), _TINY)
        has_kept = self.lost <= max(3.0 * self.noise, 0.25 * self.progress)
        return self.is_at_floor or (self.progress > clear and has_kept)

    @property
    def is_flat(self) -> bool:
        """Whether the level is where it began, and never was much lower."""
        still = max(3.0 * self.noise, 0.02 * abs(self.first), _TINY)
        return self.is_known and self.progress <= still and abs(self.recent - self.first) <= still


_TINY = 1e-7


@dataclass(frozen=True)
class Course:
    """How a training went that was watched.

    Args:
        steps: how many steps were watched.
        passes: how many forward passes these had.
        most_optimizer_steps: the most steps of optimizers in one of them.
        loss: how the loss went.
        events: what began, in order.
    """

    steps: int = 0
    passes: int = 0
    most_optimizer_steps: int = 0
    loss: LossSummary = field(default_factory=LossSummary)
    events: tuple[CourseEvent, ...] = ()
