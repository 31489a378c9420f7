"""Nothing sees what it is to predict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_modelhealth.probes.probe import Probe, began, ratio
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.differences import Apart
    from pytest_modelhealth.probes.intervening.running import Ran, Runs
    from pytest_modelhealth.probes.intervening.sequences import Sequence
    from pytest_modelhealth.report import Parting, ProbeRecord


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
    settings = (
        Ratio(
            "max_future_effect",
            default=1e-4,
            help="largest change of an output when later steps of the sequence change, by the "
            "output's root mean square (healthy models: 0)",
            per_layer=False,
        ),
    )

    designs = frozenset({"choice"})
    known = {"choice": _CHOICE}  # noqa: RUF012 - declared, and never written to
    causes, otherwise = _CAUSES, _OTHERWISE

    def probe(self, runs: Runs) -> ProbeRecord:
        """Permute what comes later, and hold what comes before against the unchanged run."""
        from pytest_modelhealth.probes.intervening.sequences import predicted, said_to_be

        said = runs.conventions.causal
        if said is False:
            return self.not_applicable("causal=False says that outputs may see later inputs")
        base = runs.base
        if base.error:
            return self.not_told(f"in evaluation mode the model raises {base.error}")
        sequences = said_to_be(runs) if said else predicted(runs)
        if not sequences and said:
            return self.not_told("causal=True, but the batch holds no sequence of two steps")
        if not sequences:
            return self.not_applicable(
                "the target is no input one step later; if no output may depend on later inputs, "
                "say causal=True"
            )
        return self._after_change(runs, base, _along_time(runs, base, sequences))

    def _after_change(self, runs: Runs, base: Ran, sequence: Sequence) -> ProbeRecord:
        from pytest_modelhealth.probes.intervening.sequences import steps_of

        changed = f"steps {sequence.half} to {sequence.length - 1} permuted ({sequence.why})"
        batch = steps_of(runs, sequence, changed="later")
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
            seen,
            steps_before,
            steps_of,
            unlike_widths,
        )

        clear, place = unlike_widths(runs, sequence), None
        for one in dict.fromkeys((clear, sequence)):
            same = steps_before(one, seen(runs, one))
            batches = steps_of(runs, one), steps_of(runs, one, changed="later")
            place = place or where_they_part(runs, *batches, same)
        parting = parting_at(
            "choice" if place is not None and place.chosen else "values", most, place
        )
        return parting if clear is sequence else replace(parting, before=None, after=None)

    def message(self, parting: Parting) -> str:
        """Return that the future leaks."""
        return (
            f"it sees the future: later steps change earlier outputs by {ratio(parting.effect)} of "
            f"their root mean square{began(parting)}"
        )


def _along_time(runs: Runs, base: Ran, sequences: list[Sequence]) -> Sequence:
    """Return which of several dimensions is time, by what the model does along them.

    It is that along which earlier steps have an effect on later ones and not the other way round;
    else, since no order explains the model then, one along which steps see each other.
    """
    from pytest_modelhealth.probes.intervening.sequences import steps_of

    mixed = []
    for sequence in sequences if len(sequences) > 1 else ():
        after_later = runs.forward(steps_of(runs, sequence, changed="later"))
        after_earlier = runs.forward(steps_of(runs, sequence, changed="earlier"))
        if after_later.error or after_earlier.error:
            continue
        early, _ = _effects(runs, base, after_later, sequence)
        is_leak = any(one.effect > 0.0 for one in early)
        _, late = _effects(runs, base, after_earlier, sequence)
        if not is_leak and any(one.effect > 0.0 for one in late):
            return sequence
        mixed += [sequence] if is_leak else []
    return (*mixed, *sequences)[0]


def _effects(
    runs: Runs, base: Ran, ran: Ran, sequence: Sequence
) -> tuple[list[Apart], list[Apart]]:
    """Return how far outputs change before the steps that were changed, and from them on.

    Of several dimensions of an output that are as long, that with the smaller change before counts.
    """
    import torch

    from pytest_modelhealth.probes.intervening.batches import along
    from pytest_modelhealth.probes.intervening.differences import apart, is_rounding
    from pytest_modelhealth.probes.intervening.sequences import reads, seen

    real, half = seen(runs, sequence), sequence.half
    is_read = any(gradient is not None for gradient in base.read)
    before, after = [], []
    for n, output in enumerate(base.outputs[: len(ran.outputs)]):
        gradient = base.read[n] if n < len(base.read) else None
        if (is_read and gradient is None) or not output.is_floating_point():
            continue
        ways = []
        for axis in (axis for axis, size in enumerate(output.shape) if size == sequence.length):
            early = along(torch.arange(sequence.length) < half, output, axis)
            read = early & reads(gradient, output, axis)
            if real is not None and axis and output.shape[0] == len(real):
                read = read & along(real, output, 0, axis)
            found, later = (apart(output, ran.outputs[n], at) for at in (read, ~early))
            ways += [(found, later)] if found is not None and later is not None else []
        for found, later in sorted(ways)[:1]:
            is_noise = is_rounding(found, output.dtype)
            before.append(found._replace(effect=0.0) if is_noise else found)
            after += [later] if later.effect > 0.0 or found.effect > 0.0 else []
    return before, after
