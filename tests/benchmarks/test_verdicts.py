"""A sample of the measurement: what an inspection and a comparison make of cases of the corpus."""

import pytest

from benchmarks.tools import COMPARERS, DETECTORS
from corpus import cases
from corpus.scoring import judge

FIRST = 2
"""Of each list so many are judged in every run, the others by ``scripts/test -m corpus``."""


def sampled(names):
    """Mark all but the first of these names."""
    marked = [pytest.param(name, marks=pytest.mark.corpus) for name in names[FIRST:]]
    return [*names[:FIRST], *marked]


def judged(tool, name, *roles):
    """Return what a tool makes of the case of this name."""
    (case,) = (case for role in roles for case in cases(role=role) if case.name == name)
    return judge(tool.judge, case)


CAUGHT = [
    "weights of a hidden layer all zero",
    "ReLU module dead by its bias",
    "channels dead by a batch norm's shift",
    "detach in mid-net",
    "argmax where a softmax was meant",
    "comparison makes the features",
    "log of a ReLU",
    "torch.where hides a log from forward only",
    "a NaN in a convolution's weight",
    "running mean is NaN",
    "twenty sigmoid layers",
    "twenty layers with three times the gain",
    "dead units behind clamp",
    "a state that grows instead of decaying",
    "binary targets of 0 and 255",
    "loss weight of zero",
]
WARNED_OF = [
    "no_grad around the encoder",
    "time embedded under no_grad",
    "made images detached in the generator's step",
]
LEFT_ALONE = [
    "mlp, trained",
    "resnet, initialised",
    "gpt, trained, batch of 1",
    "cnn, initialised, eval",
    "24 convolutions of deviation 0.05, initialised, eval",
    "scales drawn around 0.1, shifts by 0.1, eval",
    "teacher under no_grad, not frozen",
    "regression, trained, bfloat16",
    "transformers mixtral",
    "transformers t5",
    "resnet, last norm of each branch zero",
    "gpt with fresh LoRA adapters",
    "deep plain ReLU of 40 layers",
    "embedding of 5000 rows, 17 of them used",
    "loss on one output of two",
    "padding masked with -inf",
    "hinge that every sample satisfies",
    "SimSiam",
    "compressed attention, shorter than a window",
    "states of a tower without its summary",
    "a scale for each channel of a convolution",
    "content queries that start at zero",
    "attention over one token",
    "an indexer with a loss of its own",
    "an adapter without its context",
    "a gate that starts at zero",
    "clipped policy gradient, first step",
    "noise prediction, last convolution zero",
]


@pytest.mark.parametrize("name", sampled(CAUGHT))
def test_fault_is_caught_and_located(name):
    """One inspection with default settings names the layer at fault and says why."""
    got = judged(DETECTORS["modelhealth"], name, "fault")
    assert got.has_right_cause, got


@pytest.mark.parametrize("name", sampled(WARNED_OF))
def test_fault_that_looks_like_a_design_is_warned_of(name):
    """Nothing fails, and a warning names the layer and says why."""
    assert judged(DETECTORS["modelhealth"], name, "fault").is_only_warned_of


@pytest.mark.parametrize("name", sampled(LEFT_ALONE))
def test_healthy_model_is_left_alone(name):
    """No check objects to it."""
    got = judged(DETECTORS["modelhealth"], name, "control")
    assert got.is_right, got


SAMPLE = [
    "attributes into a Sequential",
    "layer norm written out",
    "q, k and v fused",
    "batch norms folded",
    "channels last",
    "one layer scaled by 1.001",
    "eps of a batch norm 1e-3 for 1e-5",
    "causal mask shifted by one",
    "residual dropped",
    "embedding and head untied",
    "mask as finite numbers that are added",
    "adapters merged without their scale",
]


@pytest.mark.parametrize("name", sampled(SAMPLE))
def test_pair_is_judged_rightly_side_by_side(name):
    """A refactor passes; a harmful change is flagged at its layer."""
    got = judged(COMPARERS["compare"], name, "refactor", "change")
    assert got.is_right, got


@pytest.mark.parametrize(
    "name", sampled(["layer norm written out", "batch first into time first", *SAMPLE[-5:]])
)
def test_pair_is_judged_rightly_by_a_snapshot(name):
    """So it is by a snapshot of the reference."""
    got = judged(COMPARERS["snapshot"], name, "refactor", "change")
    assert got.is_right, got


# ---- the peers ----------------------------------------------------------------------------------
