"""Nothing sees what it is to predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.probes.endings import Found
from pytest_modelhealth.probes.probe import Kind, Probe
from pytest_modelhealth.settings import Ratio

if TYPE_CHECKING:
    from pytest_modelhealth.probes.intervening.running import Runs


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

    said = (
        "it sees the future: later steps change earlier outputs by {effect} of their root mean "
        "square{began}"
    )
    kinds = {"choice": Kind(_CHOICE, may_be_meant=True)}  # noqa: RUF012 - never written to
    causes, otherwise = _CAUSES, _OTHERWISE

    def probe(self, runs: Runs) -> Found:
        """Permute what comes later, and hold what comes before against the unchanged run."""
        from pytest_modelhealth.probes.intervening.future import what_early_steps_see

        return what_early_steps_see(runs)
