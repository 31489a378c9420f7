"""What stands in padding has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.probes.words import began, cause, figures, parting_at, ratio
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.locating import Apart
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.report import Observation, Parting, ProbeRecord, Violation


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
        "it reads the last place, which is padding: read the last real one, by the lengths",
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


class Padding(Probe):
    """No output at a real place, and none that pools real places, depends on padding."""

    name = "padding"
    summary = "What stands in the padding of a batch has no effect on its outputs."
    rank = 32
    definition = (
        "Where a mask (samples, steps) or lengths in the batch show padding: in evaluation mode "
        "padded places are given real values of the batch, and outputs at real places, and those "
        "that pool them, change by at most max_padding_effect of their root mean square."
    )
    source = (
        "attended or pooled padding makes a prediction depend on the longest sample of its batch; "
        "measured: healthy models change by exactly 0"
    )
    minimum_evidence = "a mask or lengths that show padding in some samples"
    settings = (
        Setting(
            "max_padding_effect",
            float,
            default=1e-4,
            minimum=0.0,
            help="largest change of an output at a real place when what stands in padding changes, "
            "by the output's root mean square (healthy models: 0)",
            per_layer=False,
        ),
    )

    def probe(self, runs: Runs) -> ProbeRecord:
        """Put real values into padded places."""
        from pytest_modelhealth.probes.intervening.paddings import (
            is_changed,
            largest_at_real_places,
            refilled,
            shown_by,
        )
        from pytest_modelhealth.probes.intervening.repeating import unsteady

        padding, why = shown_by(runs)
        if padding is None:
            is_said = runs.conventions.padding is not None
            return self.not_told(why) if is_said else self.not_applicable(why)
        if runs.base.error:
            return self.not_told(f"in evaluation mode the model raises {runs.base.error}")
        share = float((~padding.real).float().mean())
        changed = f"real values in the padding ({share:.0%} of the places, by {padding.why})"
        batch = refilled(runs, padding)
        if not is_changed(runs, padding, batch):
            return self.not_told("padding holds what real places hold; give a batch that differs")
        ran = runs.forward(batch, with_loss=True)
        if ran.error:
            return self.not_told(f"with {changed} the model raises {ran.error}", changed)
        found = largest_at_real_places(runs, ran, padding)
        partings = tuple(_in_loss(runs.base, ran))
        if found is None and not partings:
            return self.not_told("no output has a row for each sample", changed)
        if found is None or not found.effect > 0.0:
            return self.judged(*partings, changed=changed)
        if why := unsteady(runs):
            return self.not_told(why, changed)
        if not padding.is_sure:
            return self.not_told(
                f"{padding.why} may show padding or something else, and values there have an "
                "effect; if it is padding, say padding=",
                changed,
            )
        return self.judged(self._parting(runs, found), changed=changed)

    def _parting(self, runs: Runs, most: Apart) -> Parting:
        from pytest_modelhealth.probes.intervening.locating import where_they_part
        from pytest_modelhealth.probes.intervening.paddings import real_places, refilled, shown_by

        padding, _ = shown_by(runs)
        assert padding is not None
        same = real_places(padding)
        place = where_they_part(runs, runs.batch(), refilled(runs, padding), same)
        return parting_at("values", most, place)

    def judge(
        self,
        parting: Parting,
        record: ProbeRecord,
        observation: Observation,
        settings: Settings,
    ) -> Iterator[Violation]:
        """Yield that padding has an effect, at the layer where it gets in."""
        limit = settings["max_padding_effect"]
        if parting.effect <= limit.value:
            return
        if parting.kind == "loss":
            yield self.violation(
                observation.layers[""],
                f"what stands in padding changes the loss by {ratio(parting.effect)} of its value, "
                "and no output at a real place",
                value=parting.effect,
                limit=limit,
                role="loss",
                cause="the loss counts padded places: mask them, or set their targets to "
                "ignore_index; a model that is to predict its padding does so on purpose",
                independent=True,
                severity="warn",
                details=figures(parting, record.changed),
            )
            return
        culprit = observation.layers.get(parting.layer, observation.layers[""])
        yield self.violation(
            culprit,
            f"padding has an effect: it changes outputs of real places by {ratio(parting.effect)} "
            f"of their root mean square{began(parting)}",
            value=parting.effect,
            limit=limit,
            cause=cause(parting, culprit, _CAUSES, _OTHERWISE),
            independent=True,
            details=figures(parting, record.changed),
        )


def _in_loss(base: Ran, ran: Ran) -> Iterator[Parting]:
    """Yield that the loss depends on padding, where no output does."""
    from pytest_modelhealth.report import Parting

    if base.loss and ran.loss is not None:
        effect = abs(ran.loss - base.loss) / abs(base.loss)
        if effect > _LEAST:
            yield Parting("loss", effect, role="loss", before=base.loss, after=ran.loss)


_LEAST = 1e-5
