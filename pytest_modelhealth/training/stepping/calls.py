"""Calls a step a few times from the beginning, watched: its modes, and lists that keep graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from pytest_modelhealth.capture.observing.autograd_graph import is_made_by_a_loss, sign_of
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.probes.intervening.running import said
from pytest_modelhealth.progress import track
from pytest_modelhealth.report import LayerMode, Observation
from pytest_modelhealth.training.stepping.session import Session, loss_in
from pytest_modelhealth.training.stepping.snapshot import named_lists
from pytest_modelhealth.training.stepping.watching import Watched, distance, norm, rate_of, widened


@dataclass
class Calls:
    """What the first series of calls showed.

    Args:
        seen: a record a call.
        outside: what moved parameters in the first call before their optimizer stepped.
        names: every parameter after the first call: its name, its `id`, whether it is trainable.
        observation: the layers of the first call.
        swallowed: share of elements with a gradient that did not change.
        ends_at: where every call leaves the random numbers, if it draws any and all end there.
        facts: fields of `Stepped` that are known by then.
    """

    seen: list[Watched] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    names: list[tuple[str, int, bool]] = field(default_factory=list)
    observation: Observation | None = None
    swallowed: dict[int, float] = field(default_factory=dict)
    ends_at: Tensor | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def moved(self) -> set[int]:
        """The parameters that any call changed."""
        return {key for seen in self.seen for key, size in seen.changes.items() if size}


def call_step(session: Session, calls: int) -> Calls:
    """Call the step several times from the beginning."""
    made, watch = Calls(), session.watch()
    lists, asked = _Lists(session.model, session.given.step), dict[int, Tensor]()
    named = () if session.given.has_schedules else session.given.restore
    given, reached = _schedules(named), _schedules(session.snapshot.found)
    starts, ends = list[Tensor](), list[Tensor]()
    number = -1
    while (number := number + 1) < calls or (number < _MOST_CALLS and _waits(session, made)):
        before = {key: p.detach().clone() for key, p in session.parameters.items()}
        starts.append(torch.get_rng_state())
        try:
            if number:
                seen = session.watched(watch)
            else:
                seen, made.observation = session.observed(watch)
        except Exception as error:
            if not number:
                raise
            made.facts |= {"raised": said(error), "raised_at": number + 1}
            break
        if not number:
            start = before
            _take_first(session, made, seen, before)
        sizes = {key: norm(value) or 1.0 for key, value in before.items()}
        made.seen.append(seen)
        seen.changes = {
            key: distance(session.parameters[key].detach(), value) / sizes[key]
            for key, value in before.items()
        }
        seen.updated = {key: size / sizes[key] for key, size in seen.updated.items()}
        seen.at_end = {id(one): rate_of(one) for one in session.given.optimizers}
        ends.append(torch.get_rng_state())
        for key in seen.at_step:  # of which elements there ever was a gradient
            asked[key] = (seen.gradients[key] != 0) | asked.get(key, False)
        lists.look()
        # keep no graph of a call, and gradients only of those that others are held against
        seen.result, seen.at_first = loss_in(seen.result), {}
        if number >= _COMPARED:
            seen.gradients = {key: g.new_zeros(()) for key, g in seen.gradients.items()}
    for key, elements in asked.items():
        still = elements & (session.parameters[key].detach() == start[key])
        made.swallowed[key] = float(still.sum()) / max(int(elements.sum()), 1)
    made.facts |= {
        "advances": any(_state(one) != state for one, state in reached),
        "growing": lists.growing,
        "idle_schedules": tuple(type(one).__name__ for one, was in given if _state(one) == was),
    }
    draws = bool(ends) and not torch.equal(starts[0], ends[0])
    same = len(ends) > 1 and all(torch.equal(ends[0], end) for end in ends[1:])
    made.ends_at = ends[0] if draws and same else None
    return made


_COMPARED = 2
_MOST_CALLS = 32
"""A step that seems to wait for its turn is called so often to see whether it comes."""


def _waits(session: Session, made: Calls) -> bool:
    """Whether nothing has moved so far, and more calls may tell: gradients add up, say."""
    if made.moved:
        return False
    if len(made.seen) < _COMPARED:  # it may step first, on the gradient of the call before
        return any("leads" in steps.traits for steps in made.seen[-1].steps.values())
    overflows = any(not math.isfinite(size) for seen in made.seen for size in seen.added.values())
    no_step = not any(seen.steps for seen in made.seen)
    adds_up = no_step and any(
        made.seen[-1].added.get(key, 0.0) > size for key, size in made.seen[0].added.items() if size
    )
    return overflows or adds_up


def _take_first(session: Session, made: Calls, seen: Watched, before: dict[int, Tensor]) -> None:
    """Take down what only the first call shows."""
    result = seen.result
    if loss_in(result) is None:
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        kind = "nothing" if result is None else type(result).__name__
        raise InspectionError(
            f"{session.given.name} returned {kind}{shape}, not the loss: return "
            "it as a scalar tensor, a number, or under the key 'loss' of a mapping"
        )
    if isinstance(result, Tensor):
        made.facts |= {"sign": sign_of(result), "is_loss": is_made_by_a_loss(result)}
    for key, now in seen.at_first.items():
        start = before[key]
        if now.shape == start.shape and not torch.equal(now, start):
            made.outside[key] = widened(now) - widened(start)
    made.names = [(n, id(p), p.requires_grad) for n, p in session.model.named_parameters()]


def _schedules(objects: Iterable[Any]) -> list[tuple[LRScheduler, str]]:
    """Return the learning rate schedules among objects, each with where it stands."""
    return [(one, _state(one)) for one in objects if isinstance(one, LRScheduler)]


def _state(schedule: LRScheduler) -> str:
    # an epoch's count stands still in a schedule that goes on by parts of one; a chain has none
    return repr(schedule.state_dict())


def overfitted(session: Session, calls: int) -> tuple[float, float, int]:
    """Call the step on the one batch again and again; return the first and least loss, and when."""
    session.rewind()
    losses = [math.nan] * calls
    with suppress(Exception):  # a later call, of which another check says that it raises
        for number in track(range(calls), "overfitting"):
            loss = loss_in(session.call())
            losses[number] = math.nan if loss is None else loss
    best = min(range(calls), key=lambda n: losses[n] if math.isfinite(losses[n]) else math.inf)
    return losses[0], losses[best], best + 1


def resumed(session: Session) -> str:
    """Save after one call, make another; load into what was before, and make that call again.

    Returns:
        What differs, the first such; ``""`` if nothing does, bit for bit.
    """
    session.rewind()
    session.call()
    try:
        stateful = (session.model, *session.given.optimizers, *session.given.restore)
        saved = [copy.deepcopy(one.state_dict()) for one in stateful]
        once = _next(session)
        session.rewind()
        for one, state in zip(stateful, saved, strict=True):
            one.load_state_dict(state)
        again = _next(session)
    except Exception as error:  # noqa: BLE001 - the user's, in an order that we chose
        return f"the step cannot be resumed: {said(error)}"
    for name, value in once.items():
        other = again.get(name)
        if other is None or other.shape != value.shape:
            return name
        if not torch.allclose(value, other.to(value), rtol=0.0, atol=0.0, equal_nan=True):
            return name
    return ""


def _next(session: Session) -> dict[str, Tensor]:
    """Make a call, and return all that it leaves."""
    session.snapshot.restore_random_numbers()
    session.snapshot.clear_gradients()
    loss = loss_in(session.call())
    state = session.model.state_dict().items()
    left = {name: tensor.clone() for name, tensor in state if isinstance(tensor, Tensor)}
    return {"the loss": torch.tensor(math.nan if loss is None else loss), **left}


class _Lists:
    """The lists that a model and a step keep, looked at after each call.

    Args:
        model: the model; lists among the attributes of its modules are looked at.
        step: the user's function; lists that it closes over are, too.
    """

    def __init__(self, model: nn.Module, step: Any) -> None:
        self._lists = named_lists(step)
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, list) and not attribute.startswith("_"):
                    self._lists[f"{name}.{attribute}".lstrip(".")] = value
        self._lengths = {name: len(value) for name, value in self._lists.items()}
        self._calls = 0
        self._grown: dict[str, int] = dict.fromkeys(self._lists, 0)

    def look(self) -> None:
        """Take down which have grown by a tensor with a graph since the last look."""
        self._calls += 1
        for name, value in self._lists.items():
            new = value[self._lengths[name] :]
            self._grown[name] += any(isinstance(v, Tensor) and v.grad_fn is not None for v in new)
            self._lengths[name] = len(value)

    @property
    def growing(self) -> tuple[str, ...]:
        """The names of those that grew in each call, of two or more."""
        return tuple(name for name, times in self._grown.items() if times == self._calls > 1)


def layer_modes(session: Session, made: Calls) -> Iterator[LayerMode]:
    """Yield the modes of each layer that ran."""
    for name, module in session.model.named_modules():
        ran = [seen.modes.get(module, set()) for seen in made.seen]
        if not any(ran):
            continue
        own = list(module.parameters(recurse=False))
        kind, before = _kind(module), session.first_statistics.get(module)
        # of the running mean; None where there is none
        moved = None if before is None else not torch.equal(before, module.running_mean)
        is_trainable = any(p.requires_grad for p in own)
        is_written = any(id(p) in made.moved for p in own)
        traits = {
            "still": moved is False and any((True, True) in one for one in ran),
            "unseen": any((True, False) in one and (True, True) in one for one in ran),
            "drifts": moved and own and not is_trainable and not is_written,
            "hasty": kind == "batch_norm" and (getattr(module, "momentum", 0) or 0) > 0.5,
        }
        with_gradient = [{training for training, enabled in one if enabled} for one in ran]
        yield LayerMode(
            layer=name,
            training=tuple(any(modes) if modes else None for modes in with_gradient),
            without_gradient=not any(with_gradient),
            trainable=is_trainable,
            kind=kind,
            traits=frozenset(name for name, applies in traits.items() if applies),
        )


def _kind(module: nn.Module) -> str:
    if (
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0)
        or (isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout)
    ):
        return "dropout"
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if is_norm and module.running_mean is not None:
        return "batch_norm"
    return ""


def switches_on_purpose(first: Watched) -> bool:
    """Whether the step itself brings the model to evaluation mode, and not for a validation."""
    return first.began and set(first.runs) == {(False, True)}
