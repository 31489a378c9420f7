"""What stands in padding has no effect."""

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

_KINDS = {
    "loss": Kind(
        "the loss counts padded places: mask them, or set their targets to ignore_index; a model "
        "that is to predict its padding does so on purpose",
        "what stands in padding changes the loss by {effect} of its value, and no output at a real "
        "place",
        may_be_meant=True,
    ),
    "merged": Kind(
        "it makes one step of several, and the one at the border holds both real places and "
        "padding; it sees that padding alone, by design or for want of a length that divides",
        may_be_meant=True,
    ),
    "aside": Kind(
        "this output has no dimension of steps, and stands beside one that does not depend on "
        "padding; no loss was given that tells whether it is used: if not, let it be",
        may_be_meant=True,
    ),
}


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

    said = (
        "padding has an effect: it changes outputs of real places by {effect} of their root mean "
        "square{began}"
    )
    kinds, causes, otherwise = _KINDS, _CAUSES, _OTHERWISE

    def probe(self, runs: Runs) -> Found:
        """Put real values into padded places."""
        from pytest_modelhealth.probes.intervening.refilling import what_padding_does

        return what_padding_does(runs)
