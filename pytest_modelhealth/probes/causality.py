"""Nothing sees what it is to predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.probes.probe import Probe
from pytest_modelhealth.probes.words import began, cause, figures, ratio
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.differences import Apart
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.probes.intervening.sequences import Sequence
    from pytest_modelhealth.report import Observation, Parting, ProbeRecord, Violation


_CAUSES = (
    (
        frozenset({"softmax", "attention", "scaled_dot_product_attention", "transformer"}),
        "its causal mask is missing, shifted, inverted, too small a number, or not passed on",
    ),
    (frozenset({"conv"}), "a convolution padded on both sides: pad kernel - 1 steps on the left"),
    (
        frozenset({"lstm", "gru", "rnn"}),
        "a recurrence that runs backwards too: bidirectional=False",
    ),
    (
        frozenset({"fft_r2_c", "fft_c2_c"}),
        "a product of spectra is circular: pad to twice the length, n=2 * length",
    ),
    (
        frozenset({"norm", "mean", "std", "var", "sum", "amax", "max", "pool"}),
        "it reduces over time, later steps among them: normalise and pool each step by itself",
    ),
    (frozenset({"flip", "roll", "cumsum"}), "it moves or adds up steps against their order"),
)
_CHOICE = (
    "it chooses among the steps of a whole sequence (topk, a capacity): a mixture of depths does "
    "so on purpose, and nothing that was seen tells"
)
_OTHERWISE = (
    "a causal mask that is missing, shifted, inverted, finite or not passed on; else a "
    "normalisation or a mean over time, a convolution padded on both sides, or a recurrence that "
    "runs backwards"
)


class Causality(Probe):
    """A model that predicts the next step of a sequence sees none of the steps to come."""

    name = "causality"
    summary = "No output of a model that predicts the next step depends on later steps."
    rank = 31
    definition = (
        "Where the target is an input one step later, or causal=True says so: in evaluation mode "
        "the second half of that input is replaced by a permutation of its own steps, and the "
        "outputs before it that the loss reads change by at most max_future_effect of their root "
        "mean square. Padded places are left out."
    )
    source = (
        "the loss curve of a model that sees the answer is the best there is; measured: 9 kinds of "
        "leaks of 9 caught and located, 72 healthy models judged, 0 false"
    )
    minimum_evidence = "a sequence of four steps whose later steps have an effect"
    settings = (
        Setting(
            "max_future_effect",
            float,
            default=1e-4,
            minimum=0.0,
            help="largest change of an output when later steps of the sequence change, by the "
            "output's root mean square (healthy models: 0)",
            per_layer=False,
        ),
    )

    def probe(self, runs: Runs) -> ProbeRecord:
        """Permute what comes later, and hold what comes before against the unchanged run."""
        from pytest_modelhealth.probes.intervening.sequences import predicted, said_to_be

        said = runs.conventions.causal
        if said is False:
            return self.not_applicable("causal=False says that outputs may see later inputs")
        base = runs.base
        if base.error:
            return self.not_told(f"in evaluation mode the model raises {base.error}")
        sequence = said_to_be(runs) if said else predicted(runs)
        if sequence is None and said:
            return self.not_told("causal=True, but the batch holds no sequence of two steps")
        if sequence is None:
            return self.not_applicable(
                "the target is no input one step later; if no output may depend on later inputs, "
                "say causal=True"
            )
        return self._after_change(runs, base, sequence)

    def _after_change(self, runs: Runs, base: Ran, sequence: Sequence) -> ProbeRecord:
        from pytest_modelhealth.probes.intervening.sequences import later_changed

        changed = _changed(sequence)
        batch = later_changed(runs, sequence)
        if not runs.is_changed(batch, sequence.tensors):
            return self.not_told("all steps of the sequence are equal; give some that differ")
        ran = runs.forward(batch)
        if ran.error:
            return self.not_told(f"with {changed} the model raises {ran.error}", changed)
        before, after = _effects(runs, base, ran, sequence)
        if not before:
            return self.not_told(
                f"no output that the loss reads has {sequence.length} steps, as the sequence has",
                changed,
            )
        if not after:
            return self.not_told("nothing that comes later has an effect on any output", changed)
        most = max(before)
        if not most.effect > 0.0:
            return self.judged(changed=changed)
        if why := runs.unsteady:
            return self.not_told(why, changed)
        return self.judged(self._parting(runs, sequence, most), changed=changed)

    def _parting(self, runs: Runs, sequence: Sequence, most: Apart) -> Parting:
        from pytest_modelhealth.probes.intervening.locating import parting_at, where_they_part
        from pytest_modelhealth.probes.intervening.sequences import (
            later_changed,
            seen,
            steps_before,
        )

        same = steps_before(sequence, seen(runs, sequence))
        place = where_they_part(runs, runs.batch(), later_changed(runs, sequence), same)
        return parting_at("choice" if place is not None and place.chosen else "values", most, place)

    def judge(
        self,
        parting: Parting,
        record: ProbeRecord,
        observation: Observation,
        settings: Settings,
    ) -> Iterator[Violation]:
        """Yield that the future leaks, at the layer where it does."""
        limit = settings["max_future_effect"]
        if parting.effect <= limit.value:
            return
        culprit = place(observation, parting.layer)
        yield self.violation(
            culprit,
            f"it sees the future: later steps change earlier outputs by {ratio(parting.effect)} of "
            f"their root mean square{began(parting)}",
            value=parting.effect,
            limit=limit,
            cause=_CHOICE
            if parting.kind == "choice"
            else cause(parting, culprit, _CAUSES, _OTHERWISE),
            independent=True,
            severity="warn" if parting.kind == "choice" else "fail",
            details=figures(parting, record.changed),
        )


def _changed(sequence: Sequence) -> str:
    return f"steps {sequence.half} to {sequence.length - 1} permuted ({sequence.why})"


def _effects(
    runs: Runs, base: Ran, ran: Ran, sequence: Sequence
) -> tuple[list[Apart], list[Apart]]:
    """Return how far outputs change before the steps that were changed, and from them on."""
    import torch

    from pytest_modelhealth.probes.intervening.batches import along
    from pytest_modelhealth.probes.intervening.differences import apart, is_rounding
    from pytest_modelhealth.probes.intervening.sequences import reads, seen, step_axis

    real, half = seen(runs, sequence), sequence.half
    is_read = any(gradient is not None for gradient in base.read)
    before, after = [], []
    for n, output in enumerate(base.outputs[: len(ran.outputs)]):
        gradient = base.read[n] if n < len(base.read) else None
        axis = step_axis(output, sequence)
        if axis is None or (is_read and gradient is None) or not output.is_floating_point():
            continue
        early = along(torch.arange(sequence.length) < half, output, axis)
        read = early & reads(gradient, output, axis)
        if real is not None and output.shape[0] == len(real):
            read = read & along(real, output, 0, axis)
        found, later = apart(output, ran.outputs[n], read), apart(output, ran.outputs[n], ~early)
        if found is not None and later is not None:
            is_noise = is_rounding(found, output.dtype)
            before.append(found._replace(effect=0.0) if is_noise else found)
            after += [later] if later.effect > 0.0 or found.effect > 0.0 else []
    return before, after
