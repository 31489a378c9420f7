"""Other values put into the padding of a batch, and what real places see of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import Found, UntellableError
from pytest_modelhealth.probes.intervening.differences import Apart, least_apart
from pytest_modelhealth.probes.intervening.locating import Place, parting_at, where_they_part
from pytest_modelhealth.probes.intervening.paddings import (
    Padding,
    judged_places,
    real_places,
    shown_by,
)
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.report import Parting

_SEED = 20_240_229
_LEAST = 1e-5
_MERGED = range(2, 5)
"""Models make one step of so many: two or four, as a rule."""
_FIRST_STEP = (
    "the loss reads the last padded place before real ones, where one that looks a step ahead asks "
    "for the first real step; to leave that out, give it ignore_index"
)


def what_padding_does(runs: Runs) -> Found:
    """Put real values into padded places, and return what follows.

    Other ids change what a model derives of them, so that other rows for the same ids decide where
    other ids have an effect.

    Raises:
        UntellableError: nothing can be told, or no padding is seen.
    """
    padding = shown_by(runs)
    base = runs.base
    share = float((~padding.real).float().mean())
    changed = f"real values in the padding ({share:.0%} of the places, by {padding.why})"
    refill = _Refill(runs, padding)
    if not runs.is_changed(refill.batch(), padding.values):
        raise UntellableError("padding holds what real places hold; give a batch that differs")
    ran = refill.run()
    assert ran is not None
    first = ran.error and f"raise {ran.error}"
    if first or _effects_of(runs, ran, padding).is_any:
        of_rows = _Refill(runs, padding, looked_up=True)
        again = of_rows.run()
        if again is not None and not again.error:
            found = _found(runs, padding, (base, again), of_rows, changed)
            if first or not _effects_of(runs, again, padding).is_any:
                note = (
                    f"other ids in the padding {first or 'have an effect'}, and other rows for the "
                    "same ids do not: the model derives positions, a mask or what it reads from ids"
                )
                found = found._replace(notes=(*found.notes, note))
            return found
    if ran.error:
        raise UntellableError(f"with {changed} the model raises {ran.error}", changed)
    return _found(runs, padding, (base, ran), refill, changed)


def _found(
    runs: Runs, padding: Padding, ran: tuple[Ran, Ran], refill: _Refill, changed: str
) -> Found:
    """Return what a run with other padding shows, beside the unchanged one."""
    base, after = ran
    found = _effects_of(runs, after, padding)
    partings, notes = list[Parting](), tuple[str, ...]()
    if base.loss and after.loss is not None:
        effect = abs(after.loss - base.loss) / abs(base.loss)
        if effect > _LEAST and _asks_for_the_first_step(runs, padding):
            notes = (_FIRST_STEP,)
        elif effect > _LEAST:
            partings = [Parting("loss", effect, role="loss", before=base.loss, after=after.loss)]
    if found == (None, None) and not partings:
        raise UntellableError("no output has a row for each sample", changed)
    if not found.is_any:
        return Found(changed, partings, notes)
    runs.check_steady(changed)
    if not padding.is_sure:
        raise UntellableError(
            f"{padding.why} may show padding or something else, and values there have an effect; "
            "if it is padding, say padding=",
            changed,
        )
    place = refill.where()
    if found.asked is None or not found.asked.effect > 0.0:
        assert found.aside is not None
        return Found(changed, [parting_at("aside", found.aside, place)], notes)
    kind = "values"
    if place is not None and _merges(place, padding):
        far = _Refill(runs, padding, spared=max(_MERGED) - 1).run()
        if far is not None and not far.error and not _effects_of(runs, far, padding).is_any:
            kind = "merged"
    return Found(changed, [parting_at(kind, found.asked, place)], notes)


def _merges(place: Place, padding: Padding) -> bool:
    """Whether runs part in a tensor that holds one step for several of the batch."""
    taker = place.parting.taker
    seen = place.observation.layers[taker].inputs if taker else place.record.activations
    shape = () if seen is None else tuple(seen.shape)
    steps = padding.real.shape[1]
    few = {n for k in _MERGED for n in (steps // k, -(-steps // k)) if n > 1}
    return len(shape) > 2 and steps not in shape and bool(few & set(shape[1:-1]))


class _Refill:
    """A run of the model in which something else stands in padding.

    Args:
        runs: runs the model.
        padding: where it is.
        looked_up: whether ids stay, and the rows that they are looked up as change instead.
        spared: how many padded places beside a real one stay as they are.
    """

    def __init__(
        self, runs: Runs, padding: Padding, *, looked_up: bool = False, spared: int = 0
    ) -> None:
        self._runs, self._padding, self._looked_up = runs, padding, looked_up
        real = padding.real.cpu()
        near = F.max_pool1d(real.float().unsqueeze(1), 2 * spared + 1, 1, spared).squeeze(1)
        self._places = near == 0
        generator = torch.Generator().manual_seed(_SEED)
        given = real.flatten().nonzero().flatten()
        count = int(self._places.sum())
        self._sources = given[torch.randint(len(given), (count,), generator=generator)]

    def batch(self) -> Inputs:
        """Return the batch with real values in padded places, save for ids that stay."""

        def change(number: int, tensor: Tensor) -> Tensor | None:
            if number not in self._padding.values or (self._looked_up and _is_id(tensor)):
                return None
            rows = tensor.flatten(0, 1)[self._sources.to(tensor.device)]
            return tensor.index_put((self._places.to(tensor.device),), rows)

        return self._runs.changed(change)

    def run(self) -> Ran | None:
        """Run it once; ``None`` where there is nothing to change."""
        if not bool(self._places.any()):
            return None
        if not self._looked_up:
            return self._runs.forward(self.batch(), with_loss=True)
        with self._rows() as rows:
            ran = self._runs.forward(self.batch(), with_loss=True)
        return ran if rows.count else None

    def where(self) -> Place | None:
        """Return where real places part from those of the unchanged batch."""
        runs, same = self._runs, real_places(self._padding)
        within = self._rows() if self._looked_up else None
        return where_they_part(runs, runs.batch(), self.batch(), same, within)

    def _rows(self) -> _OtherRows:
        given = [self._runs.tensors[n] for n in self._padding.values]
        return _OtherRows(list(filter(_is_id, given)), self._places, self._sources)


class _OtherRows(TorchFunctionMode):
    """While on, ids of the batch that a table is asked for get rows of other places.

    Models derive positions, masks and the place that they read from ids. Other ids change these
    too, other rows for the same ids do not.

    Args:
        ids: tensors of whole numbers, each of the shape of `places`.
        places: the places ``(samples, steps)`` that get other rows.
        sources: the place, counted along the flattened ones, that each of them gets its row from.

    Attributes:
        count: how many lookups were changed.
    """

    def __init__(self, ids: Sequence[Tensor], places: Tensor, sources: Tensor) -> None:
        super().__init__()
        self._ids, self._places, self._sources = list(ids), places, sources
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and exchange rows of what it returns if it looks up ids of the batch."""
        made, given = func(*args, **(kwargs or {})), kwargs or {}
        asked: Any = None
        if func is torch.nn.functional.embedding:
            asked = args[0] if args else given.get("input")
        elif func is torch.Tensor.__getitem__ and len(args) > 1:
            asked = args[1]
        is_batch = isinstance(asked, Tensor) and asked.shape == self._places.shape
        if not is_batch or asked.is_floating_point() or asked.dtype is torch.bool:
            return made
        if not any(bool((asked == ids.to(asked.device)).all()) for ids in self._ids):
            return made
        if not isinstance(made, Tensor) or made.shape[:2] != self._places.shape:
            return made
        self.count += 1
        rows = made.flatten(0, 1)[self._sources.to(made.device)]
        return made.index_put((self._places.to(made.device),), rows)


def _is_id(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool


def _nearness(output: Tensor, padding: Padding) -> int:
    """Return 2 for an output with a dimension of steps, 1 for one that may hold more, 0 for others.

    A state of many features for the step to come looks like steps that were joined to others.
    """
    steps = padding.real.shape[1]
    if steps in output.shape[1:]:
        return 2
    return int(output.ndim > 2 and output.shape[1] > steps)


class _Effects(NamedTuple):
    """How far outputs are from those of the unchanged batch, where padding has no say.

    Args:
        asked: the largest difference of those that count, of an effect of 0 where rounding explains
            it; ``None`` where no output has a row for each sample.
        aside: likewise, of what stands beside the steps where no loss tells whether it is used.
    """

    asked: Apart | None
    aside: Apart | None

    @property
    def is_any(self) -> bool:
        """Whether padding has an effect."""
        return any(one is not None and one.effect > 0.0 for one in self)


def _effects_of(runs: Runs, ran: Ran, padding: Padding) -> _Effects:
    """Return what a run shows beside the unchanged one.

    Where a loss of the user's or of the model's is known, what stands beside the steps and is not
    read by it is left out: a state for the step to come.
    """
    base = runs.base
    looked = [g is not None and bool((g != 0).any()) for g in base.read]
    judged = [t for t in base.outputs if judged_places(t, padding)]
    nearest = max((_nearness(t, padding) for t in judged), default=0)
    asked: list[Apart] = []
    aside: list[Apart] = []
    for n, (before, after) in enumerate(zip(base.outputs, ran.outputs, strict=False)):
        one = least_apart(before, after, judged_places(before, padding))
        if one is None:
            continue
        is_beside = _nearness(before, padding) < nearest
        if is_beside and base.loss is not None and any(looked) and not looked[n]:
            continue
        (aside if is_beside and base.loss is None else asked).append(one)
    return _Effects(max(asked, default=None), max(aside, default=None))


def _asks_for_the_first_step(runs: Runs, padding: Padding) -> bool:
    """Whether, of padding, the loss reads only the last place before real ones begin.

    A loss that looks one step ahead asks there for the first real step.
    """
    real = padding.real
    ahead = torch.zeros_like(real)
    ahead[:, :-1] = real[:, 1:]
    read = [g for g in runs.base.read if g is not None and g.shape[:2] == real.shape]
    places = [(g != 0).reshape(*real.shape, -1).any(dim=-1) & ~real.to(g.device) for g in read]
    return bool(places) and not any(bool((p & ~ahead.to(p.device)).any()) for p in places)
