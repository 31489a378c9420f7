"""The probes: a row each, of what a model promises and what is said of runs that part.

A row is of literals alone, since a run that sets a limit loads them. What changes the batch and
runs the model again is the function of `intervening` that it names.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from pytest_modelhealth.checks import by_rank
from pytest_modelhealth.checks.check import Catalogue
from pytest_modelhealth.settings import Ratio, Setting, Share


class Kind(NamedTuple):
    """What is to be said of one kind of parting."""

    cause: str = ""
    said: str = ""  # where it is not that of the probe
    may_be_meant: bool = False  # whether some models do so on purpose, so that it only warns
    is_limited: bool = True  # whether it is held against the first of the probe's settings
    is_asked_for: bool = False  # whether it is told only where the probe was asked for


PROBES = Catalogue(
    "probes.catalogue:PROBES",
    run="probes.probing:findings",
    occasion="Probes, which change something and run the model again: probes=True",
    is_probe=True,
    # Whether a run shows something that the probe can tell a fault from a design by: then it runs
    # without being asked for. No function: only who asks for it by name has it run.
    called_for="",
    # What a test runs by itself in place of `experiment`, where the batch shows that it applies.
    by_default="",
    judge="probes.probing:judge",
    # What is wrong, one sentence that stands alone: a format of {effect}, {began} (where runs
    # part), {detail} and {more}, the detail behind a semicolon.
    said="",
    kinds={},
    # The cause, by names of operations and parts of classes' names, in lower case, of which one is
    # what a layer is or does; `otherwise` where none of them fits.
    causes={},
    otherwise="",
)


def _largest(name: str, what: str, more: str = "", default: float = 1e-4) -> tuple[Setting, ...]:
    text = f"largest change of {what}, by the output's root mean square (healthy models: 0{more})"
    return (Ratio(name, default=default, help=text, per_layer=False),)


@cache
def all_probes() -> tuple[Any, ...]:
    """Return every probe, the gravest first."""
    return by_rank(PROBES.values())


_ATTENTION = "softmax attention scaled_dot_product_attention transformer"
_RECURRENCE = "lstm gru rnn"

# Branches that start near zero (LayerScale) leave samples as alike as a signal that vanished; three
# steps of training tell the two apart.
PROBES.add(
    "alike_samples",
    rank=28,
    summary="The samples of an output differ by more than a trace of what its numbers differ by.",
    experiment="alike:what_training_parts",
    called_for="probes.intervening.alike:is_called_for",
    judge="probes.intervening.alike:judge",
    reads_scale=True,
    settings=(
        Share(
            "min_sample_deviation",
            default=5e-4,
            help="smallest deviation between samples of an output, as a part of the deviation of "
            "all its numbers (a fresh encoder in evaluation has 2.2e-3)",
            per_layer=False,
        ),
    ),
)

PROBES.add(
    "causality",
    rank=31,
    summary="No output of a model that predicts the next step depends on later steps.",
    experiment="future:what_early_steps_see",
    by_default="future:what_early_steps_see",
    settings=_largest("max_future_effect", "an output when later steps of the sequence change"),
    said=(
        "it sees the future: later steps change earlier outputs by {effect} of their root mean "
        "square{began}"
    ),
    causes={
        _ATTENTION: "its causal mask is missing, shifted, inverted, too small or not passed on",
        "conv": "a convolution padded on both sides: pad kernel - 1 steps on the left",
        _RECURRENCE: "a recurrence that runs backwards too: bidirectional=False",
        "fft_r2_c fft_c2_c": "a product of spectra is circular: pad to n=2 * length",
        "norm mean std var sum amax max pool": "it reduces over time: normalise and pool each step "
        "by itself",
        "flip roll cumsum": "it moves or adds up steps against their order",
    },
    otherwise=(
        "a causal mask that is missing, shifted, inverted, finite or not passed on; else a mean "
        "over time, padding on both sides, or a recurrence that runs backwards"
    ),
    kinds={
        "design": Kind(
            "it chooses among all steps (topk, a capacity), as a mixture of depths does on purpose",
            may_be_meant=True,
            is_asked_for=True,
        ),
        "copy": Kind(
            "labels are not shifted: give ids[:, :-1] and ask for ids[:, 1:], in batch or loss",
            "each output is asked for what it is given: the target is the input {detail}",
            is_limited=False,
        ),
        "twice": Kind(
            "labels are shifted in batch and loss; a head for a later step is so on purpose",
            "the target is the input {detail}: the next step is asked of no output",
            may_be_meant=True,
            is_limited=False,
        ),
    },
)

PROBES.add(
    "padding",
    rank=32,
    summary="What stands in the padding of a batch has no effect on its outputs.",
    experiment="padding:what_padding_does",
    by_default="padding:what_padding_does",
    settings=_largest(
        "max_padding_effect", "an output at a real place when what stands in padding changes"
    ),
    said=(
        "padding has an effect: it changes outputs of real places by {effect} of their root mean "
        "square{began}"
    ),
    causes={
        _ATTENTION: "the mask does not get to this attention, is inverted, or hides too little",
        "mean sum amax max logsumexp pool norm": "it pools over all places: leave padded ones out, "
        "and divide by the number of real ones",
        "getitem select narrow slice": "it reads a place that is padding in some samples",
        _RECURRENCE: "a recurrence that runs on through padding: pack_padded_sequence helps",
        "conv": "a convolution looks across the border: set padded places to zero first",
    },
    otherwise=(
        "a mask that is not passed on, inverted, or used in some layers only; a mean over all "
        "places; the last place read in place of the last real one"
    ),
    kinds={
        "merged": Kind(
            "it makes one step of several, and the one at the border holds padding, by design or "
            "for want of a length that divides",
            may_be_meant=True,
            is_asked_for=True,
        ),
    },
)

PROBES.add(
    "sample_independence",
    rank=33,
    summary="What the model returns for a sample does not depend on the rest of the batch.",
    experiment="samples:what_samples_see",
    by_default="samples:whose_order_matters",
    settings=_largest(
        "max_sample_effect",
        "a sample's output when other samples of its batch change",
        "; where routing changes the shapes of products, more",
    ),
    said=(
        "samples see each other: other samples change an output by {effect} of its root mean "
        "square{began}"
    ),
    causes={
        f"{_RECURRENCE} attention transformer": "it takes the first dimension for time: "
        "batch_first=True, or transpose",
        "softmax": "a softmax over the batch: check its dim, 0 is that of samples",
        "batchnorm": "batch statistics in evaluation mode: say track_running_stats=True",
        "mean sum std var amax amin max min norm cumsum": "it reduces over the batch: check its "
        "dim, 0 is that of samples",
        "view reshape flatten unflatten": "a view that takes dimensions in another order than they "
        "have: transpose or permute first",
        "roll flip sort argsort": "it moves samples: check its dim",
    },
    otherwise=(
        "a view that mixes dimensions, a softmax, mean or statistics over the batch, or a layer "
        "that takes the batch for a sequence (batch_first)"
    ),
    kinds={
        "design": Kind(
            "it chooses among the values of all samples (topk), moves or normalises by them, or "
            "takes them for one sequence (then unsqueeze(1)): check the dim; experts that choose "
            "among all tokens, negatives, attention between rows and solvers do so on purpose",
            may_be_meant=True,
            is_asked_for=True,
        ),
        "doubt": Kind(may_be_meant=True),
        "table": Kind(
            "a table or buffer is added or joined along the samples: positions that run along the "
            "batch; check the order of their dimensions, or batch_first",
            "samples are told apart by their place in the batch: in another order outputs differ "
            "by {effect} of their root mean square{began}",
        ),
        "lost dimension": Kind(
            "squeeze() drops the dimension of one sample: say which it is to drop, squeeze(-1)",
            "of one sample alone it {detail}",
            is_limited=False,
        ),
    },
)

_BY = " by {effect} of its root mean square{began}{more}"
_CHANGES = "{detail} from one call to the next, in evaluation mode"
PROBES.add(
    "repeatability",
    rank=34,
    summary="In evaluation mode the same batch gives the same output, again and again.",
    experiment="repeating:what_calls_change",
    settings=_largest(
        "max_call_effect",
        "an output by another seed or a call before",
        "; float32 rounds at 1e-7",
        default=1e-5,
    ),
    kinds={
        "dropout": Kind(
            "F.dropout without training=self.training, a Dropout made inside forward, or train() "
            "called there; waive Monte Carlo dropout",
            f"dropout is active in evaluation mode: another random seed changes the output{_BY}",
        ),
        "noise": Kind(
            "noise or a mask that should be drawn only if self.training; latents, policies and "
            "diffusion steps draw on purpose",
            f"it draws random numbers in evaluation mode: another seed changes the output{_BY}",
            may_be_meant=True,
        ),
        "again": Kind(
            "forward keeps something from call to call: a buffer that it updates, a list, a tensor "
            "of the first batch; a queue or a carried state does so on purpose",
            f"after a call on another batch it returns something else:{_BY}",
            may_be_meant=True,
        ),
        "state": Kind(
            "forward writes to it in evaluation mode: update it only if self.training",
            _CHANGES,
            may_be_meant=True,
            is_limited=False,
        ),
        "parameters": Kind(
            "forward writes to its parameters, in place or through .data",
            _CHANGES,
            is_limited=False,
        ),
        "batch": Kind(
            "an in-place operation (add_, /=, indexing) changes the caller's data: clone() first",
            "its forward writes to the batch that it is given, {detail}",
            is_limited=False,
        ),
    },
)

PROBES.add(
    "position_effect",
    rank=35,
    summary="Where a model has positions, its outputs depend on the order of the steps.",
    experiment="positions:what_positions_do",
    kinds={
        "order": Kind(
            "what the table is added to does not go on, or nothing mixes it with the steps",
            "positions have no effect: in another order of the steps the output is the same, or "
            "only follows them, though a table goes in{detail}",
            is_limited=False,
        )
    },
)

# An input that the output does not depend on is a note, never a violation: a head of zeros, a gate
# that has not opened, an id for a log and a mask that nothing needs look the same.
PROBES.add(
    "input_effect",
    rank=44,
    summary="Every input has an effect on the output; one without is a note.",
    experiment="samples:what_inputs_do",
    severity="warn",
    role="inputs",
)

PROBES.add(
    "custom_backward",
    rank=42,
    summary="The backward of a custom autograd.Function gives the slope of its forward.",
    experiment="own_backwards:what_backwards_give",
    role="gradients",
    settings=(
        Setting(
            "max_slope_error",
            float,
            default=0.01,
            minimum=5e-3,
            help="largest difference between a custom gradient and the slope, by the larger of the "
            "two (right ones: 1e-6 in float64)",
            per_layer=False,
        ),
    ),
    said="the backward of the custom autograd.Function {detail}",
    kinds={
        "factor": Kind("a sign or a constant factor"),
        "transpose": Kind("the transpose of what is given is right"),
        "order": Kind("backward returns the gradients of its arguments in another order"),
        "approximation": Kind(
            "a term is missing from backward, or a mask, or a wrong tensor was saved for it; an "
            "approximation on purpose, as straight through, looks the same",
            may_be_meant=True,
        ),
    },
    called_for="probes.probing:has_own_functions",
)
