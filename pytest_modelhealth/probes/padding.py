"""What stands in padding has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_modelhealth.probes.probe import Probe, began, ratio
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.locating import Place
    from pytest_modelhealth.probes.intervening.paddings import Effects, Refill
    from pytest_modelhealth.probes.intervening.paddings import Padding as PaddedPlaces
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.report import Parting, ProbeRecord


_CAUSES = (
    (
        frozenset({"softmax", "attention", "scaled_dot_product_attention", "transformer"}),
        "the mask does not get to this attention, is inverted, or hides too little",
    ),
    (
        frozenset({"mean", "sum", "amax", "max", "logsumexp", "pool"}),
        "it pools over all places: leave padded ones out, and divide by the number of real ones",
    ),
    (
        frozenset({"getitem", "select", "narrow", "slice"}),
        "it reads the first or last place, which is padding in some samples: read a real one",
    ),
    (
        frozenset({"lstm", "gru", "rnn"}),
        "a recurrence that runs on through padding: pack_padded_sequence helps",
    ),
    (frozenset({"conv"}), "a convolution looks across the border: set padded places to zero first"),
    (frozenset({"norm"}), "a normalisation over all places: leave padded ones out"),
)
_OTHERWISE = (
    "a mask that is not passed on, inverted, or used in some layers only; a mean or a maximum over "
    "all places; the last place read in place of the last real one"
)

_WARNED = {
    "loss": "the loss counts padded places: mask them, or set their targets to ignore_index; a "
    "model that is to predict its padding does so on purpose",
    "merged": "it makes one step of several, and the one at the border holds both real places and "
    "padding; it sees that padding alone, by design or for want of a length that divides",
    "aside": "this output has no dimension of steps, and stands beside one that does not depend on "
    "padding; no loss was given that tells whether it is used: if not, let it be",
}
"""What may be meant, or does not matter, by its kind."""


class Padding(Probe):
    """No output at a real place, and none that pools real places, depends on padding."""

    name = "padding"
    summary = "What stands in the padding of a batch has no effect on its outputs."
    rank = 32
    settings = (
        Ratio(
            "max_padding_effect",
            default=1e-4,
            help="largest change of an output at a real place when what stands in padding changes, "
            "by the output's root mean square (healthy models: 0)",
            per_layer=False,
        ),
    )

    designs, about_tensors = frozenset(_WARNED), frozenset({"loss"})
    known, causes, otherwise = _WARNED, _CAUSES, _OTHERWISE

    def probe(self, runs: Runs) -> ProbeRecord:
        """Put real values into padded places."""
        from pytest_modelhealth.probes.intervening.paddings import (
            Refill,
            effects_of,
            shown_by,
        )

        padding, why = shown_by(runs)
        if padding is None:
            is_said = runs.conventions.padding is not None
            return self.not_told(why) if is_said else self.not_applicable(why)
        if runs.base.error:
            return self.not_told(f"in evaluation mode the model raises {runs.base.error}")
        share = float((~padding.real).float().mean())
        changed = f"real values in the padding ({share:.0%} of the places, by {padding.why})"
        refill = Refill(runs, padding)
        if not runs.is_changed(refill.batch(), padding.values):
            return self.not_told("padding holds what real places hold; give a batch that differs")
        ran = refill.run()
        assert ran is not None
        if ran.error or _has_effect(effects_of(runs, ran, padding)):
            of_rows = Refill(runs, padding, looked_up=True)
            again = of_rows.run()
            if again is not None and not again.error:
                return self._by_rows(runs, padding, (ran, again), of_rows, changed)
        if ran.error:
            return self.not_told(f"with {changed} the model raises {ran.error}", changed)
        return self._found(runs, padding, ran, refill, changed)

    def _by_rows(
        self, runs: Runs, padding: PaddedPlaces, ran: tuple[Ran, Ran], refill: Refill, changed: str
    ) -> ProbeRecord:
        """Judge by other rows for the same ids: other ids change what the model derives of them."""
        from pytest_modelhealth.probes.intervening.paddings import effects_of

        by_ids, by_rows = ran
        record = self._found(runs, padding, by_rows, refill, changed)
        if not by_ids.error and _has_effect(effects_of(runs, by_rows, padding)):
            return record
        first = f"raise {by_ids.error}" if by_ids.error else "have an effect"
        note = (
            f"other ids in the padding {first}, and other rows for the same ids do not: the model "
            "derives positions, a mask or what it reads from ids"
        )
        return replace(record, notes=(*record.notes, note))

    def _found(
        self, runs: Runs, padding: PaddedPlaces, ran: Ran, refill: Refill, changed: str
    ) -> ProbeRecord:
        """Return what a run with other padding shows."""
        from pytest_modelhealth.probes.intervening.paddings import (
            asks_for_the_first_step,
            effects_of,
        )

        found = effects_of(runs, ran, padding)
        partings, notes = list(_in_loss(runs.base, ran)), tuple[str, ...]()
        if partings and asks_for_the_first_step(runs, padding):
            partings, notes = [], (_FIRST_STEP,)
        if found == (None, None) and not partings:
            return self.not_told("no output has a row for each sample", changed)
        if not _has_effect(found):
            return self.judged(*partings, changed=changed, notes=notes)
        if why := runs.unsteady:
            return self.not_told(why, changed)
        if not padding.is_sure:
            return self.not_told(
                f"{padding.why} may show padding or something else, and values there have an "
                "effect; if it is padding, say padding=",
                changed,
            )
        return self.judged(_parting(runs, padding, found, refill), changed=changed, notes=notes)

    def message(self, parting: Parting) -> str:
        """Return that padding has an effect, on outputs or on the loss alone."""
        effect = ratio(parting.effect)
        if parting.kind == "loss":
            return (
                f"what stands in padding changes the loss by {effect} of its value, and no output "
                "at a real place"
            )
        return (
            f"padding has an effect: it changes outputs of real places by {effect} of their root "
            f"mean square{began(parting)}"
        )


def _has_effect(found: Effects) -> bool:
    return any(one is not None and one.effect > 0.0 for one in found)


def _parting(runs: Runs, padding: PaddedPlaces, found: Effects, refill: Refill) -> Parting:
    """Return where padding gets in, and by what kind of evidence."""
    from pytest_modelhealth.probes.intervening.locating import parting_at

    place = refill.where()
    if found.asked is None or not found.asked.effect > 0.0:
        assert found.aside is not None
        return parting_at("aside", found.aside, place)
    is_merged = place is not None and _merges(place, padding)
    is_near = is_merged and _is_near(runs, padding)
    return parting_at("merged" if is_near else "values", found.asked, place)


def _merges(place: Place, padding: PaddedPlaces) -> bool:
    """Whether runs part in a tensor that holds one step for several of the batch."""
    if place.observation is None:
        return False
    record = place.observation.layers[place.given or place.layer]
    seen = record.inputs if place.given else record.activations
    shape = () if seen is None else tuple(seen.shape)
    steps = padding.real.shape[1]
    few = {n for k in _MERGED for n in (steps // k, -(-steps // k)) if n > 1}
    return len(shape) > 2 and steps not in shape and bool(few & set(shape[1:-1]))


def _is_near(runs: Runs, padding: PaddedPlaces) -> bool:
    """Whether only padding that may be merged with a real step has an effect."""
    from pytest_modelhealth.probes.intervening.paddings import Refill, effects_of

    far = Refill(runs, padding, spared=max(_MERGED) - 1).run()
    if far is None or far.error:
        return False
    return not _has_effect(effects_of(runs, far, padding))


def _in_loss(base: Ran, ran: Ran) -> Iterator[Parting]:
    """Yield that the loss depends on padding, where no output does."""
    from pytest_modelhealth.report import Parting

    if base.loss and ran.loss is not None:
        effect = abs(ran.loss - base.loss) / abs(base.loss)
        if effect > _LEAST:
            yield Parting("loss", effect, role="loss", before=base.loss, after=ran.loss)


_LEAST = 1e-5
_MERGED = range(2, 5)
"""Models make one step of so many: two or four, as a rule."""
_FIRST_STEP = (
    "the loss reads the last padded place before real ones, where one that looks a step ahead asks "
    "for the first real step; to leave that out, give it ignore_index"
)
