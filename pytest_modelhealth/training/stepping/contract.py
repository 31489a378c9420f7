"""Calls a training step a few times and takes down what it did, as a `Stepped`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.autograd_graph import is_made_by_a_loss, sign_of
from pytest_modelhealth.capture.passive.hooks import parameters_of
from pytest_modelhealth.errors import InspectionError, in_one_line
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import (
    LayerMode,
    Observation,
    Stepped,
    SteppedOptimizer,
    SteppedParameter,
)
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.training.rows import rows_in
from pytest_modelhealth.training.stepping.interventions import (
    half_influence,
    loss_slope,
    overfitted,
    resumed,
    sets_a_seed,
    slope_without_gradient,
)
from pytest_modelhealth.training.stepping.session import Session, TrainingStep, loss_in
from pytest_modelhealth.training.stepping.watching import (
    Call,
    Steps,
    Watch,
    cosine,
    distance,
    inner,
    norm,
    widened,
)


def run_contract(
    given: TrainingStep,
    selection: Selection,
    *,
    calls: int = 3,
    overfit: int | None = None,
    resume: bool = False,
) -> Observation:
    """Return what the step did, and the layers of its first call; all else is as it was.

    Args:
        given: the step, and what it works on.
        selection: which roles of which layers to observe in the first call.
        calls: how often the step is called from the beginning.
        overfit: how often on the one batch; ``None`` not at all.
        resume: whether it has to resume from its saved state.

    Raises:
        InspectionError: an argument is wrong, or the step returns no loss.
        Exception: whatever the first call raises, untouched.
    """
    given.require_sound()
    numbers: list[tuple[str, object, int]] = [("calls", calls, 1)]
    numbers += [] if overfit is None else [("overfit", overfit, 2)]
    for name, value, least in numbers:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InspectionError(f"{name} must be a whole number from {least} on, not {value!r}")
    model, session = given.model, Session(given, selection)
    with session.open():
        untied = untied_weights(model)
        series = Series(session, calls)
        first = series.calls[0]
        stepped = Stepped(
            losses=tuple(loss_in(call.result) for call in series.calls),
            parameters=tuple(series.parameters()),
            optimizers=tuple(series.stepped_optimizers()),
            modes=tuple(series.modes()),
            samples=session.samples,
            runs_whole=session.samples in first.sizes,
            passes=len(first.passes),
            # the step itself brings the model to evaluation mode, and not for a validation
            switched=first.began and first.modes.get(model) == {(False, True)},
            strays=tuple(series.strays()),
            unheld=tuple(series.unheld()),
            switches=tuple(frozen_in_vain(model)),
            untied=untied,
            slope=loss_slope(session, first),
            unlearned=slope_without_gradient(session, series.calls),
            halves=half_influence(session, first, len(series.calls)),
            seeds=series.ends_at is not None and sets_a_seed(session, series.ends_at),
            overfit=None if overfit is None else overfitted(session, overfit),
            resumed=resumed(session) if resume else "",
            **series.facts,
        )
    notes = (
        f"the step reads an iterator from around it ({kind}), which cannot be put back: it has "
        f"moved on by what {session.called} calls take; give the batch as an argument"
        for kind in dict.fromkeys(session.reached.iterators)
    )
    observation = series.observation
    return replace(observation, stepped=stepped, notes=(*observation.notes, *notes))


_MOST_CALLS = 32
"""A step that seems to wait for its turn is called so often to see whether it comes."""


class Series:
    """Calls of a step from the beginning, and what they show together.

    Args:
        session: the step, and what it works on.
        count: how many calls.

    Attributes:
        calls: a record of each.
        observation: the layers of the first.
        ends_at: where every call leaves the random numbers, if it draws any and all end there.
        facts: fields of `Stepped` that are known by then.
    """

    observation: Observation

    def __init__(self, session: Session, count: int) -> None:
        self.session, self.watch = session, Watch(session)
        self.calls: list[Call] = []
        self.ends_at: Tensor | None = None
        self.facts: dict[str, Any] = {"raised": ""}
        start = session.values()
        kinds = torch.bfloat16, torch.float16
        self._half = {key for key, value in start.items() if value.dtype in kinds}
        self._begun = {  # rates before any call
            id(optimizer): tuple(_number(group, "lr") for group in optimizer.param_groups)
            for optimizer in session.given.optimizers
        }
        self._elements: dict[int, Tensor] = {}  # of these, which ever had a gradient
        nodes, ends = [session.reached.live_nodes()], [torch.get_rng_state()]
        schedules = self.watch.schedules
        begun = [repr(one.state_dict()) for one in schedules]  # a count of epochs may stand still
        while len(self.calls) < count or (len(self.calls) < _MOST_CALLS and self._waits()):
            try:
                self._call()
            except Exception as error:
                if not self.calls:
                    raise
                self.facts["raised"] = in_one_line(error)
                break
            ends.append(torch.get_rng_state())
            nodes.append(session.reached.live_nodes())
        self._swallowed = {
            key: float((asked & (session.parameters[key].detach() == start[key])).sum())
            / max(int(asked.sum()), 1)
            for key, asked in self._elements.items()
        }
        # what is summed up for a backward pass of a later call is no leak
        grows = [
            number
            for number, counts in enumerate(zip(*nodes, strict=True))
            if len(counts) > 2 and counts == tuple(sorted(set(counts)))
            if all(call.passes or call.steps for call in self.calls)
        ]
        names = session.reached.names_of(grows) if grows else ()
        self.facts["growing"] = tuple(dict.fromkeys(names))
        cleared = set().union(*(call.wasted for call in self.calls[1:]))
        passes, added = self.calls[0].passes.items(), self.calls[0].added
        held = {key for key in self.held if added.get(key)}
        self.facts["dropped"] = sum(task in cleared and bool(keys & held) for task, keys in passes)
        self.facts["advances"] = begun != [repr(one.state_dict()) for one in schedules]
        begin, end, *later = ends
        if later and not torch.equal(begin, end) and all(torch.equal(end, one) for one in later):
            self.ends_at = end

    def _call(self) -> None:
        """Make the next call."""
        session = self.session
        if self.calls:
            call = self.watch.call()
        else:
            call, self.observation = self.watch.observed()
            self._take_first(call)
        self.calls.append(call)
        before = call.before
        sizes = {key: norm(value) or 1.0 for key, value in before.items()}
        call.changes = {
            key: distance(session.parameters[key].detach(), value) / sizes[key]
            for key, value in before.items()
        }
        call.updated = {key: size / sizes[key] for key, size in call.updated.items()}
        for key in call.at_step & self._half:
            asked = self._elements.get(key, False)
            self._elements[key] = (call.gradients[key] != 0) | asked
        # keep no graph of a call, and of gradients that nothing is held against the norm alone
        call.result, call.at_first, call.before = loss_in(call.result), {}, {}
        if len(self.calls) > 1:
            call.gradients = {k: torch.tensor(norm(g)) for k, g in call.gradients.items()}

    def _take_first(self, call: Call) -> None:
        """Take down what only the first call shows."""
        result, session = call.result, self.session
        if loss_in(result) is None:
            shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
            kind = "nothing" if result is None else type(result).__name__
            raise InspectionError(
                f"{session.given.name} returned {kind}{shape}, not the loss: return "
                "it as a scalar tensor, a number, or under the key 'loss' of a mapping"
            )
        pairs = zip(rows_in(session.given.batch), rows_in(self.watch.batch), strict=False)
        self.facts["writes"] = any(
            a.shape == b.shape and not torch.allclose(a, b, 0.0, 0.0, equal_nan=True)
            for a, b in pairs
        )
        self.facts["wasted"] = len(call.wasted)
        steps = sum(one.count for one in call.steps.values())
        self.facts["clips"] = tuple(size for size, _ in call.clips)
        self.facts["clips_late"] = bool(steps and call.clips) and all(
            count == steps for _, count in call.clips
        )
        if isinstance(result, Tensor):
            self.facts |= {"sign": sign_of(result), "is_loss": is_made_by_a_loss(result)}
        product, moves, gradients = 0.0, 0.0, 0.0  # what moved before an optimizer stepped
        for key, now in call.at_first.items():
            gradient, start = call.gradients.get(key), call.before[key]
            if gradient is not None and now.shape == start.shape and not torch.equal(now, start):
                moved, wide = widened(now) - widened(start), widened(gradient)
                product += inner(moved, wide)
                moves += norm(moved) ** 2
                gradients += norm(wide) ** 2
        self.facts["climbs"] = cosine(product, moves, gradients)
        parameters = session.model.named_parameters()
        self._names = [(name, id(p), p.requires_grad) for name, p in parameters]

    def _waits(self) -> bool:
        """Whether nothing has moved so far, and more calls may tell: gradients add up, say."""
        if self.moved or len(self.calls) < 2:  # it may step first, on the gradient before
            return not self.moved
        sizes = [size for call in self.calls for size in call.added.values()]
        first, last = self.calls[0].added, self.calls[-1].added
        adds_up = any(last.get(key, 0.0) > size for key, size in first.items() if size)
        is_unstepped = not any(call.steps for call in self.calls)
        return not all(map(math.isfinite, sizes)) or (adds_up and is_unstepped)

    @property
    def moved(self) -> set[int]:
        """The parameters that any call changed."""
        return {key for call in self.calls for key, size in call.changes.items() if size}

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that were given, then others that stepped."""
        every = [*self.session.given.optimizers]
        every += [steps.optimizer for call in self.calls for steps in call.steps.values()]
        return list({id(optimizer): optimizer for optimizer in every}.values())

    @property
    def held(self) -> set[int]:
        """What these hold."""
        return {id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)}

    def parameters(self) -> Iterator[SteppedParameter]:
        """Yield what was done to each parameter of the model."""
        session, calls, held = self.session, self.calls, self.held
        if not self.optimizers:  # the step moves them itself, or means to
            held = self.moved or {key for _, key, _ in session.named}
        stepping = {key: steps.optimizer for call in calls for key, steps in call.steps.items()}
        owners = [{id(p) for p in parameters_of(optimizer)} for optimizer in stepping.values()]
        for name, key, parameter in session.named:
            yield SteppedParameter(
                name=name,
                dimensions=parameter.ndim,
                dtype=str(parameter.dtype).removeprefix("torch."),
                trainable=key in session.trainable,
                held=key in held,
                added=tuple(call.added.get(key) for call in calls),
                gradients=tuple(
                    norm(call.gradients[key]) if key in call.at_step else None for call in calls
                ),
                updates=tuple(call.updated.get(key, 0.0) for call in calls),
                changes=tuple(call.changes.get(key, 0.0) for call in calls),
                swallowed=self._swallowed.get(key, 0.0),
                traits=_true(
                    {
                        "zero": key in session.zeros,
                        "kept": key in session.kept,
                        "shared": len({len(one) for one in owners if key in one}) > 1,
                        "erased": all(key in call.marks["erased"] for call in calls),
                        "late": key in calls[0].marks["late"] - calls[0].marks["used_again"],
                        **{
                            trait: any(key in call.marks[trait] for call in calls)
                            for trait in ("used_again", "piled", "between")
                        },
                    }
                ),
            )

    def strays(self) -> Iterator[str]:
        """Yield parameters outside of the model's registry, or newer than it, that nobody moves.

        They have a gradient, and no optimizer holds them.
        """
        reached = {key for call in self.calls for key, size in call.added.items() if size}
        for key, name in self.session.strays.items():
            if key in reached - self.held - self.moved:
                yield name
        for name, key, trainable in self._names:
            if trainable and key not in self.session.parameters and key not in self.held:
                yield name

    def unheld(self) -> Iterator[str]:
        """Yield leaves around the step that nobody steps on or clears: their gradients add up."""
        session, count = self.session, len(self.calls)
        for key, name in session.outside.items():
            if key not in self.held and len(self.watch.within.get(key, ())) >= max(count, 2):
                yield name

    def stepped_optimizers(self) -> Iterator[SteppedOptimizer]:
        """Yield what each optimizer did."""
        session = self.session
        known = {id(p) for p in session.model.parameters()}
        given = {id(optimizer) for optimizer in session.given.optimizers}
        for optimizer in session.given.optimizers:  # those of accelerate step one that they hold
            inside = getattr(optimizer, "__dict__", {}).values()
            given |= {id(one) for one in inside if isinstance(one, torch.optim.Optimizer)}
        names = {key: name for name, key, _ in session.named}
        reached = {key for call in self.calls for key in (*call.added, *call.gradients)}
        cleared = {key for call in self.calls for key in call.marks["cleared"]}
        for optimizer in self.optimizers:
            key, groups = id(optimizer), optimizer.param_groups
            held = [id(p) for p in parameters_of(optimizer)]
            steps = [call.steps.get(key) or Steps(optimizer) for call in self.calls]
            ran = [one for one in steps if one.count]
            losses = [one.evaluations for one in ran]
            traits = {
                "maximizes": any(group.get("maximize") for group in groups),
                "anew": key not in given and len(ran) == 1,
                "closure": any(losses),
                "twice": any(len({*map(id, g["params"])}) < len(g["params"]) for g in groups),
                "emptied": len(ran) > 1 and all(one.emptied for one in ran[1:]),
                "early": ran and all(one.early and one.moves < 2 * one.count for one in ran),
                "hurried": ran and all(one.moves >= 2 * one.count for one in ran),
                "partly": len(begun := self._begun.get(key, ())) > 1 and _is_partly(begun, ran),
                "unused": key in given and not ran and cleared.intersection(held) - self.moved,
                "unreached": key in given and ran and held and reached.isdisjoint(held),
                "constant": ran and all(len(one) > 1 and len({*one, 0.0}) == 2 for one in losses),
            }
            initial = [float(group["initial_lr"]) for group in groups if "initial_lr" in group]
            rates = [rate for group in groups if (rate := _number(group, "lr")) > 0.0]
            frozen = [all(not p.requires_grad for p in g["params"]) for g in groups if g["params"]]
            decays = [_number(group, "lr") * _number(group, "weight_decay") for group in groups]
            yield SteppedOptimizer(
                type_name=type(optimizer).__name__,
                given=key in given,
                holds=len(held),
                foreign=len(set(held) - known),
                first=next((names[number] for number in held if number in names), ""),
                steps=tuple(one.count for one in steps),
                rates=tuple(max(one.rates, default=0.0) for one in ran),
                initial_rate=max(initial, default=None),
                decay=max(decays, default=0.0),
                betas=next((tuple(map(float, g["betas"])) for g in groups if "betas" in g), ()),
                spread=max(rates) / min(rates) if rates else 1.0,
                frozen_groups=0 if all(frozen) else sum(frozen),
                direction=cosine(*ran[0].along) if ran else None,
                traits=_true(traits),
            )

    def modes(self) -> Iterator[LayerMode]:
        """Yield the modes of each layer that ran."""
        for name, module in self.session.model.named_modules():
            ran = [call.modes.get(module, set()) for call in self.calls]
            if not any(ran):
                continue
            own, kind = list(module.parameters(recurse=False)), _kind(module)
            is_trainable, traits = any(p.requires_grad for p in own), dict[str, Any]()
            if (before := self.session.first_statistics.get(module)) is not None:
                moves = not torch.equal(before, module.running_mean)
                is_frozen = own and not is_trainable and self.moved.isdisjoint(map(id, own))
                ran_so = any((True, True) in modes for modes in ran)
                traits["still"] = not moves and is_trainable and ran_so
                traits["drifts"] = moves and is_frozen
            if kind == "batch_norm":
                traits["unseen"] = any({(True, False), (True, True)} <= modes for modes in ran)
                momentum = (getattr(module, "momentum", 0) or 0) if is_trainable else 0
                traits["hasty"] = momentum > 0.5
                traits["twice"] = momentum and any(module in call.again for call in self.calls)
            traits["anew"] = kind == "dropout" and any(c.again.get(module) for c in self.calls)
            runs = set().union(*ran)
            traits["aside"] = kind == "dropout" and runs == {(True, False)}
            with_gradient = [{training for training, enabled in modes if enabled} for modes in ran]
            yield LayerMode(
                layer=name,
                training=tuple(any(modes) if modes else None for modes in with_gradient),
                trainable=is_trainable,
                kind=kind,
                traits=_true(traits),
            )


def _true(traits: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name, applies in traits.items() if applies)


def _is_partly(begun: tuple[float, ...], ran: list[Steps]) -> bool:
    """Whether of groups with one rate some are stepped with it still, and others never."""
    rates = [one.rates for one in ran if len(one.rates) == len(begun)]
    is_kept = [all(each[n] == begun[0] for each in rates) for n in range(len(begun))]
    is_left = [all(each[n] != begun[0] for each in rates) for n in range(len(begun))]
    return bool(rates) and len(set(begun)) == 1 and any(is_kept) and any(is_left)


def _number(group: dict[str, Any], name: str) -> float:
    return float(group.get(name) or 0.0)


def _kind(module: nn.Module) -> str:
    if (
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0)
        or (isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout)
    ):
        return "dropout"
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return "batch_norm" if is_norm and module.running_mean is not None else ""


def untied_weights(model: nn.Module) -> tuple[str, ...]:
    """Return two weights that the model ties by configuration or declaration, and who says so.

    What `_tied_weights_keys` declares, and no configuration unties, is wrong where another weight
    is equal to it bit for bit: it was one tensor.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in named.items()}
    for layer, module in model.named_modules():
        is_tied = getattr(getattr(module, "config", None), "tie_word_embeddings", None)
        holder: Any = module
        with suppress(Exception):  # methods of the user's, or none
            source = holder.get_input_embeddings().weight
            output = holder.get_output_embeddings().weight
            if is_tied and source.shape == output.shape and _are_two(source, output):
                who = "the configuration (tie_word_embeddings)"
                return names.get(id(output), ""), names.get(id(source), ""), who
        declared = getattr(module, "_tied_weights_keys", None) if is_tied is not False else None
        for own in {dotted(layer, target) for target in declared or ()} & named.keys():
            for name, other in named.items():
                is_equal = other.shape == named[own].shape and torch.equal(other, named[own])
                if is_equal and _are_two(other, named[own]):
                    return own, name, "its class (_tied_weights_keys)"
    return ()


def _are_two(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() != b.data_ptr()


def frozen_in_vain(model: nn.Module) -> Iterator[str]:
    """Yield modules that were given an attribute ``requires_grad``, which freezes nothing."""
    for name, module in model.named_modules():
        wanted = vars(module).get("requires_grad")
        if isinstance(wanted, bool) and any(p.requires_grad != wanted for p in module.parameters()):
            yield name or type(module).__name__
